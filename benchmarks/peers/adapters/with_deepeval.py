"""DeepEval: a dataset's `evals_iterator` with `AsyncConfig` and `ExactMatchMetric` (deepeval.com/docs).

As its pages on evaluation have it, each golden becomes a task; this one asks with the openai SDK under `@observe`.
DeepEval runs `max_concurrent` tasks at once, and scores the traces when all are there. It reports no time to first
token. Its telemetry, which wants a network, is off by the variable that it names for this.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from job import API_KEY, MODEL, Job, serve
from openai import AsyncOpenAI


def run(job: Job) -> None:
    # DeepEval reads its settings when it is imported.
    os.environ.update(DEEPEVAL_TELEMETRY_OPT_OUT="1")
    from deepeval.dataset import EvaluationDataset, Golden
    from deepeval.evaluate import AsyncConfig
    from deepeval.metrics import ExactMatchMetric
    from deepeval.tracing import observe, update_current_trace

    client = AsyncOpenAI(base_url=job.base_url, api_key=API_KEY)

    @observe()
    async def ask(golden: Golden) -> str:
        messages: Any = [{"role": "user", "content": golden.input}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages)
        answer = whole.choices[0].message.content or ""
        update_current_trace(input=golden.input, output=answer, expected_output=golden.expected_output)
        return answer

    goldens = [Golden(input=case["prompt"], expected_output=case["expected"]) for case in job.cases()]
    dataset = EvaluationDataset(goldens=goldens)
    asked = AsyncConfig(max_concurrent=job.parallelism)
    for golden in dataset.evals_iterator(metrics=[ExactMatchMetric()], async_config=asked):
        dataset.evaluate(asyncio.create_task(ask(golden)))


if __name__ == "__main__":
    serve(run)
