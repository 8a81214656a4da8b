"""The yardstick: a worker pool over aiohttp on uvloop, with orjson, as one would write it by hand for speed.

It asks, times, compares with the expected text and appends a JSON line. It has no plan, no retry, no time limit, no
resume, no statistics, no index and no group commit; its lines are in Python's own buffer until that is full.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import orjson
import uvloop

from steelyard import EvalCase

HEADERS = {"content-type": "application/json", "authorization": "Bearer nobody"}


async def read_stream(answer: aiohttp.ClientResponse, started: float) -> dict[str, Any]:
    """The text of a stream, line by line as aiohttp hands it out; the first token counts when it has been read."""
    first, pieces, usage = None, [], None
    async for line in answer.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = orjson.loads(line[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            if piece := choice["delta"].get("content"):
                first = first or time.perf_counter() - started
                pieces.append(piece)
    return {"response": "".join(pieces), "pieces": len(pieces), "time_to_first_token": first, "usage": usage}


async def ask(session: aiohttp.ClientSession, url: str, case: EvalCase, stream: bool) -> dict[str, Any]:
    """One line of the file."""
    messages = [{"role": "user", "content": case.prompt}]
    body = {"model": "mock", "stream": stream, "messages": messages}
    if stream:
        body["stream_options"] = {"include_usage": True}
    started = time.perf_counter()
    async with session.post(url, data=orjson.dumps(body), headers=HEADERS) as answer:
        answer.raise_for_status()
        if stream:
            said = await read_stream(answer, started)
        else:
            whole = orjson.loads(await answer.read())
            said = {"response": whole["choices"][0]["message"]["content"], "usage": whole["usage"]}
    ended = time.perf_counter() - started
    return {
        "id": case.id,
        "prompt": case.prompt,
        **said,
        "started": started,
        "time_to_last_token": ended,
        "correct": said["response"] == case.expected,
        "request_id": answer.headers["x-request-id"],
    }


def run_yardstick(
    url: str, cases: list[EvalCase], path: Path, *, parallelism: int, stream: bool = False, warmup: int = 0
) -> None:
    """Ask every case, a number at once; with `warmup`, ask that many beforehand and forget the answers."""

    async def worker(session: aiohttp.ClientSession, left: Iterator[EvalCase], file: BinaryIO | None) -> None:
        for case in left:
            line = await ask(session, url, case, stream)
            if file is not None:
                file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    async def pool() -> None:
        connector = aiohttp.TCPConnector(limit=parallelism)
        async with aiohttp.ClientSession(connector=connector) as session:
            with path.open("wb") as file:
                for left, place in ((iter(cases[:warmup]), None), (iter(cases), file)):
                    await asyncio.gather(*(worker(session, left, place) for _ in range(parallelism)))

    uvloop.run(pool())
