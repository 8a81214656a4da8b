"""LLMeter: a Runner over its OpenAI endpoint (awslabs.github.io/llmeter, "Run Experiments").

`clients` threads each send `n_requests`, so a count is divided among them. All clients go through the payloads in one
and the same shuffled order, so that each prompt is asked once a client. It writes `responses.jsonl` and statistics to
`output_path`; it scores nothing. It has no warm-up: a small run before, without an output path, does that.
"""

from __future__ import annotations

import asyncio
import json

from job import API_KEY, MODEL, Job, Reported, serve
from llmeter.endpoints import OpenAICompletionEndpoint, OpenAICompletionStreamEndpoint
from llmeter.runner import Runner


async def ask_all(job: Job) -> None:
    kind = OpenAICompletionStreamEndpoint if job.stream else OpenAICompletionEndpoint
    endpoint = kind(model_id=MODEL, api_key=API_KEY, base_url=job.base_url)
    payload = [{"messages": [{"role": "user", "content": case["prompt"]}]} for case in job.cases()]
    if job.warmup:
        runner = Runner(endpoint)
        await runner.run(payload=payload, n_requests=-(-job.warmup // job.parallelism), clients=job.parallelism)
    runner = Runner(endpoint, output_path=job.path("out"))
    await runner.run(
        payload=payload, n_requests=-(-job.count // job.parallelism), clients=job.parallelism, run_name="peers"
    )


def run(job: Job) -> None:
    asyncio.run(ask_all(job))


def read(job: Job) -> Reported:
    stats = json.loads(next(job.path("out").rglob("stats.json")).read_text())
    return Reported(stats["time_to_first_token-p50"], stats["time_to_first_token-p99"])


if __name__ == "__main__":
    serve(run, read=read)
