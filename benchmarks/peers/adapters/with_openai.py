"""The openai SDK under an asyncio.Semaphore: the script that one writes first.

AsyncOpenAI with `base_url`, as the SDK's README shows; its own retries and connection limits are left as they are.
Each answer is appended to a file that is flushed at once, which is the most one would do by hand. Nothing is scored.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import IO, Any

from job import API_KEY, MODEL, Job, Reported, percentiles, serve
from openai import AsyncOpenAI


async def ask(client: AsyncOpenAI, case: dict[str, str], stream: bool) -> dict[str, Any]:
    messages: Any = [{"role": "user", "content": case["prompt"]}]
    started = time.perf_counter()
    if not stream:
        whole = await client.chat.completions.create(model=MODEL, messages=messages)
        return {"id": case["id"], "answer": whole.choices[0].message.content}
    first, pieces = None, []
    async for chunk in await client.chat.completions.create(model=MODEL, messages=messages, stream=True):
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - started
            pieces.append(chunk.choices[0].delta.content)
    return {"id": case["id"], "answer": "".join(pieces), "first": first}


async def ask_all(job: Job) -> None:
    cases = job.cases()
    places = asyncio.Semaphore(job.parallelism)
    client = AsyncOpenAI(base_url=job.base_url, api_key=API_KEY)

    async def one(case: dict[str, str], file: IO[str] | None) -> None:
        async with places:
            line = await ask(client, case, job.stream)
        if file is not None:
            print(json.dumps(line), file=file, flush=True)

    await asyncio.gather(*(one(case, None) for case in cases[: job.warmup]))
    with job.path("answers.jsonl").open("a") as file:
        await asyncio.gather(*(one(case, file) for case in cases))


def run(job: Job) -> None:
    asyncio.run(ask_all(job))


def read(job: Job) -> Reported:
    with job.path("answers.jsonl").open() as file:
        return percentiles(json.loads(line)["first"] for line in file)


if __name__ == "__main__":
    serve(run, read=read)
