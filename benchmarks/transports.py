"""Our two transports against aiohttp behind the same seam, all on uvloop, against one server in another process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import numpy as np
import uvloop

from benchmarks.rows import Row
from steelyard.protocols import HttpReply, HttpRequest, Transport
from steelyard.transport import CurlTransport
from steelyard.transport.plain import PlainTransport

REQUESTS = 8_000
PARALLELISM = 50
STREAMS = ((50, 0.005, 1.0, 1.0), (200, 0.005, 1.0, 1.0), (500, 0.010, 0.5, 0.75))
"""Streams at once, seconds from chunk to chunk, and the limits of the ratios at p50 and at p99."""
IN_A_ROW = 3
CHUNKS = 64
FIRST = 0.1
ROUNDS = 5
HEADERS = (("Content-Type", "application/json"), ("Authorization", "Bearer nobody"))
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "What is the capital of France?"}]}).encode()


class AiohttpTransport:
    """aiohttp as a transport: read in whatever pieces arrive, as a careful user of it would."""

    def __init__(self, connections: int) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections))

    async def send(self, request: HttpRequest) -> HttpReply:
        sent = time.perf_counter()
        chunks, arrivals = [], []
        async with self._session.post(request.url, data=request.body, headers=request.headers) as answer:
            async for chunk in answer.content.iter_any():
                arrivals.append(time.perf_counter() - sent)
                chunks.append(chunk)
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return HttpReply(answer.status, headers, chunks, arrivals, time.perf_counter() - sent, 0.0)

    async def close(self) -> None:
        await self._session.close()


Make = Callable[[int], Transport]
OURS: dict[str, Make] = {"plain": PlainTransport, "libcurl": CurlTransport}
CLIENTS: dict[str, Make] = {**OURS, "aiohttp": AiohttpTransport}


@dataclass
class Rate:
    """Requests a second, and what each costs this process."""

    per_second: float
    cpu_microseconds: float


@contextlib.contextmanager
def lean_server() -> Iterator[str]:
    """A lean server in a separate process; its address."""
    command = [sys.executable, "-m", "benchmarks.lean_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


Outcome = TypeVar("Outcome")


def on_uvloop(make: Make, connections: int, work: Callable[[Transport], Awaitable[Outcome]]) -> Outcome:
    async def main() -> Outcome:
        transport = make(connections)
        try:
            return await work(transport)
        finally:
            await transport.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def rate(make: Make, address: str) -> Rate:
    """How fast a client sends short requests over connections that are open already."""
    request = HttpRequest(f"{address}/v1/chat/completions", HEADERS, BODY)

    async def worker(transport: Transport, numbers: Iterator[int]) -> None:
        for _ in numbers:
            reply = await transport.send(request)
            assert reply.status == 200, reply

    async def work(transport: Transport) -> Rate:
        for requests in (REQUESTS // 4, REQUESTS):
            numbers = iter(range(requests))
            started, cpu = time.perf_counter(), time.process_time()
            await asyncio.gather(*(worker(transport, numbers) for _ in range(PARALLELISM)))
            took, cpu = time.perf_counter() - started, time.process_time() - cpu
        return Rate(REQUESTS / took, cpu / REQUESTS * 1e6)

    return on_uvloop(make, PARALLELISM, work)


@dataclass
class Lateness:
    """Seconds by which first tokens were seen late, and by which the server itself was late with its chunks."""

    client: np.ndarray
    server: np.ndarray


def judged(seen: list[tuple[float, HttpReply]]) -> Lateness:
    """The moments at which first tokens count as arrived, against those at which the server says that it sent them."""
    client, server = [], []
    for called, reply in seen:
        events = [json.loads(event[6:]) for event in reply.body.split(b"\n\n") if event]
        assert len(events) == CHUNKS, reply
        client.append(called + reply.queued + reply.arrivals[0] - events[0]["sent"])
        server += [event["late"] for event in events]
    return Lateness(np.array(client), np.array(server))


def lateness(make: Make, address: str, streams: int, gap: float) -> Lateness:
    """How long after the server sent it the first token of each of many streams counts as arrived."""
    wanted = json.dumps({"chunks": CHUNKS, "gap": gap, "first": FIRST}).encode()
    request = HttpRequest(f"{address}/stream", HEADERS, wanted)

    async def worker(transport: Transport, called_and_replied: list[tuple[float, HttpReply]]) -> None:
        for _ in range(IN_A_ROW):
            called = time.perf_counter()
            called_and_replied.append((called, await transport.send(request)))

    async def work(transport: Transport) -> Lateness:
        # Open connections first: opening them would spread the streams, and more so for the slower client.
        await asyncio.gather(*(transport.send(HttpRequest(address, HEADERS, BODY)) for _ in range(streams)))
        seen: list[tuple[float, HttpReply]] = []
        await asyncio.gather(*(worker(transport, seen) for _ in range(streams)))
        return judged(seen)

    return on_uvloop(make, streams, work)


def rate_rows(address: str) -> list[Row]:
    rounds = [{name: rate(make, address) for name, make in CLIENTS.items()} for _ in range(ROUNDS)]
    medians = {
        name: Rate(
            statistics.median(each[name].per_second for each in rounds),
            statistics.median(each[name].cpu_microseconds for each in rounds),
        )
        for name in CLIENTS
    }
    theirs = medians["aiohttp"]
    rows = []
    for name in OURS:
        ours = medians[name]
        detail = (
            f"{ours.per_second:,.0f} against {theirs.per_second:,.0f} requests/s, "
            f"{ours.cpu_microseconds:.0f} against {theirs.cpu_microseconds:.0f} µs of CPU each; medians of {ROUNDS}"
        )
        what = f"{name}, {PARALLELISM} in flight, instant answers"
        rows += [
            Row(f"{what}: rate", ours.per_second / theirs.per_second, 2.0, detail, unit="× aiohttp's", at_least=True),
            Row(f"{what}: CPU", ours.cpu_microseconds / theirs.cpu_microseconds, 0.5, detail, unit="× aiohttp's"),
        ]
    return rows


def stream_rows(address: str, streams: int, gap: float, *limits: float) -> list[Row]:
    late: dict[str, list[Lateness]] = {name: [] for name in CLIENTS}
    for _ in range(ROUNDS):
        for name, make in CLIENTS.items():
            late[name].append(lateness(make, address, streams, gap))
    server = np.concatenate([each.server for rounds in late.values() for each in rounds]) * 1e3
    rows = []
    for name, (percent, limit) in itertools.product(OURS, zip((50, 99), limits, strict=True)):
        ours, theirs = (
            statistics.median(float(np.percentile(each.client, percent)) * 1e3 for each in late[client])
            for client in (name, "aiohttp")
        )
        detail = (
            f"{ours:.2f} against {theirs:.2f} ms late, medians of {ROUNDS}; "
            f"{CHUNKS} chunks, one every {gap * 1e3:g} ms, which the server "
            f"sent {np.percentile(server, 50):.1f} ms late at p50, {np.percentile(server, 99):.1f} at p99"
        )
        rows.append(
            Row(f"{name}, {streams} streams: first token p{percent}", ours / theirs, limit, detail, "× aiohttp's")
        )
    return rows


def measure() -> list[Row]:
    """Rate and cost of short requests, then how late first tokens are seen; ratios within one run."""
    with lean_server() as address:
        return [*rate_rows(address), *(row for streams in STREAMS for row in stream_rows(address, *streams))]
