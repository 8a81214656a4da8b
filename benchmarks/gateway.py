"""What the recording gateway adds to a model call: first tokens and throughput against calls without it.

The mock, the gateway and this client are processes of their own. Both ways are measured in turns, in one run. As a
yardstick a server of starlette and uvicorn passes the same streams on, and does nothing else.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import uvloop

from benchmarks.mock_ceiling import mock
from benchmarks.rows import Row
from steelyard.protocols import HttpRequest
from steelyard.stats.prices import read_prices
from steelyard.transport import CurlTransport
from steelyard.workspace.gateway import Gateway

STREAMS = (1, 50, 200)
CALLS = {1: 15, 50: 5, 200: 4}
"""Calls in a row of each stream, for each round."""
ROUNDS = 5
CHUNKS = 32
FIRST_MS = 50
INTERVAL_MS = 20
LATER_MS = {1: 2.0, 50: 2.0, 200: 20.0}
"""How much later the first token may be at the median."""
THROUGHPUT = 0.8
TURNS = [{"role": "user", "content": "word " * 2000}]


@dataclass
class Round:
    """Milliseconds to the first token of each call, calls a second, and the server's CPU milliseconds a call."""

    first: npt.NDArray[np.float64]
    rate: float
    cpu: float = 0.0


class FirstChunk:
    """Notes when the first chunk of a reply was there, by the client's own clock."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.first: float | None = None

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        if status != 200:
            raise AssertionError(f"status {status}: {headers}")

    def on_chunk(self, data: bytes) -> None:
        if self.first is None and b"data:" in data:
            self.first = perf_counter() - self.began


async def stream_calls(base_url: str, key: str, streams: int) -> Round:
    transport = CurlTransport(streams)
    headers = (("content-type", "application/json"), ("authorization", f"Bearer {key}"))
    firsts: list[float] = []

    async def one_agent(number: int, calls: int) -> None:
        await asyncio.sleep(number / streams * (FIRST_MS + CHUNKS * INTERVAL_MS) / 1e3)  # agents are not in step
        for turn in range(calls):
            fields = {"model": f"m{number}-{turn}", "stream": True, "stream_options": {"include_usage": True}}
            body = json.dumps({**fields, "messages": TURNS}).encode()
            seen = FirstChunk()
            reply = await transport.send(HttpRequest(f"{base_url}/chat/completions", headers, body), seen)
            if not reply.body.endswith(b"[DONE]\n\n") or seen.first is None:
                raise AssertionError(reply.body[-200:])
            firsts.append(seen.first)

    try:
        await asyncio.gather(*(one_agent(number, 1) for number in range(streams)))  # opens the connections
        firsts.clear()
        began = perf_counter()
        await asyncio.gather(*(one_agent(number, CALLS[streams]) for number in range(streams)))
        return Round(np.array(firsts) * 1e3, len(firsts) / (perf_counter() - began))
    finally:
        await transport.close()


def measured(place: dict[str, Any], streams: int) -> Round:
    server = psutil.Process(place["pid"])
    before = server.cpu_times()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(stream_calls(place["openai"], place["key"], streams))
    after = server.cpu_times()
    calls = streams * (1 + CALLS[streams])
    found.cpu = (after.user + after.system - before.user - before.system) / calls * 1e3
    return found


@contextmanager
def served(how: str, base_url: str) -> Iterator[dict[str, Any]]:
    """A server in front of the mock, in a separate process: where it is, and its key."""
    command = [sys.executable, "-m", "benchmarks.gateway", how, base_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield {**json.loads(process.stdout.readline()), "pid": process.pid}
        finally:
            process.stdin.close()
            process.wait(20)


def rows_of(streams: int, direct: list[Round], ours: list[Round], theirs: list[Round]) -> Iterator[Row]:
    """The best round of each counts: whatever else the machine does only adds."""

    def best(rounds: list[Round], percent: int) -> float:
        return min(float(np.percentile(one.first, percent)) for one in rounds)

    def detail(percent: int) -> str:
        bare, through, other = (best(rounds, percent) for rounds in (direct, ours, theirs))
        return f"{through:.2f} against {bare:.2f} ms; starlette and uvicorn, passing on alone: {other - bare:.2f} ms"

    for percent in (50, 99):
        later = best(ours, percent) - best(direct, percent)
        limit = LATER_MS[streams] * (1 if percent == 50 else 10)
        yield Row(f"{streams} streams: first token later at p{percent}", later, limit, detail(percent), "ms")
    rates = [max(one.rate for one in rounds) for rounds in (direct, ours, theirs)]
    cpu = [min(one.cpu for one in rounds) for rounds in (ours, theirs)]
    told = f"{rates[1]:.0f} against {rates[0]:.0f} calls/s; starlette and uvicorn {rates[2]:.0f}"
    told += f"; CPU a call of {CHUNKS} chunks {cpu[0]:.2f} against {cpu[1]:.2f} ms"
    yield Row(f"{streams} streams: throughput", rates[1] / rates[0], THROUGHPUT, told, "× direct", at_least=True)


def measure() -> list[Row]:
    """Rounds in which the three ways take turns."""
    flags = ("--latency", f"{FIRST_MS}ms", "--chunk-interval", f"{INTERVAL_MS}ms", "--output-tokens", str(CHUNKS))
    rows: list[Row] = []
    with mock(*flags) as (process, (host, port)):
        base = f"http://{host}:{port}/v1"
        with served("serve", base) as ours, served("serve-asgi", base) as theirs:
            places = ({"openai": base, "key": "k", "pid": process.pid}, ours, theirs)
            for streams in STREAMS:
                rounds: list[list[Round]] = [[], [], []]
                for _ in range(ROUNDS):
                    for kept, place in zip(rounds, places, strict=True):
                        kept.append(measured(place, streams))
                rows += rows_of(streams, *rounds)
    return rows


async def serve(base_url: str) -> None:
    """A gateway with one session, which records as it does in a run, until stdin is closed."""
    gateway = Gateway({"openai": {"base_url": base_url, "api_key": "real"}})
    gateway.bind(lambda upstream: upstream, read_prices({"input": 1, "output": 2}, None))
    with tempfile.TemporaryDirectory() as folder:
        await gateway.upstreams["openai"].open(64)
        session = await gateway.session("bench", path=Path(folder) / "calls.jsonl")
        print(json.dumps({"openai": session.addresses.openai, "key": session.addresses.key}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await gateway.close()
        await gateway.upstreams["openai"].close()


async def serve_asgi(base_url: str) -> None:
    """The same passing on by starlette and uvicorn: no own key, no record, no limits."""
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    transport = CurlTransport(512)

    class Queued:
        def __init__(self) -> None:
            self.queue: asyncio.Queue[Any] = asyncio.Queue()

        def on_head(self, status: int, headers: dict[str, str]) -> None:
            self.queue.put_nowait((status, headers))

        def on_chunk(self, data: bytes) -> None:
            self.queue.put_nowait(data)

    async def forward(request: Request) -> StreamingResponse:
        headers = (("content-type", "application/json"), ("authorization", "Bearer real"))
        body, queued = await request.body(), Queued()
        call = asyncio.create_task(transport.send(HttpRequest(f"{base_url}/chat/completions", headers, body), queued))
        call.add_done_callback(lambda _: queued.queue.put_nowait(None))
        status, passed = await queued.queue.get()

        async def chunks() -> AsyncIterator[bytes]:
            while (data := await queued.queue.get()) is not None:
                yield data

        return StreamingResponse(chunks(), status, media_type=passed["content-type"])

    app = Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])])
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(json.dumps({"openai": f"http://127.0.0.1:{listening.getsockname()[1]}/v1", "key": "k"}), flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.should_exit = True
    await serving
    await transport.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run({"serve": serve, "serve-asgi": serve_asgi}[sys.argv[1]](sys.argv[2]))
