"""Pydantic Evals: `Dataset.evaluate` with `max_concurrency` and `EqualsExpected` (ai.pydantic.dev/evals).

Its tasks are plain functions: this one asks with the openai SDK. The report is in memory; a script would write it down
when it is there, as this one does. It reports no time to first token.
"""

from __future__ import annotations

import asyncio
from typing import Any

from job import API_KEY, MODEL, Job, serve
from openai import AsyncOpenAI
from pydantic_evals import Case, Dataset
from pydantic_evals.evaluators import EqualsExpected
from pydantic_evals.reporting import EvaluationReportAdapter


async def evaluate(job: Job) -> None:
    client = AsyncOpenAI(base_url=job.base_url, api_key=API_KEY)

    async def ask(prompt: str) -> str:
        messages: Any = [{"role": "user", "content": prompt}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages)
        return whole.choices[0].message.content or ""

    cases = [Case(name=case["id"], inputs=case["prompt"], expected_output=case["expected"]) for case in job.cases()]
    dataset = Dataset(name="peers", cases=cases, evaluators=[EqualsExpected()])
    report = await dataset.evaluate(ask, max_concurrency=job.parallelism)
    job.path("report.json").write_bytes(EvaluationReportAdapter.dump_json(report))


def run(job: Job) -> None:
    asyncio.run(evaluate(job))


if __name__ == "__main__":
    serve(run)
