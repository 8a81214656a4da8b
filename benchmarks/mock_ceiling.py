"""What `steelyard mock` can bear: whole answers a second, and how late its chunks are with 500 streams at once.

The client is a bare epoll loop that counts answers and reads streams without looking at them, so that the server is
what is measured. Its own figures say how far it can be trusted: CPU a request from the kernel, lateness from the
server's stamps (`x-mock-times`) of when a chunk was due and when it was written.
"""

from __future__ import annotations

import re
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.rows import Row

REQUESTS = 40_000
CONNECTIONS = 50
STREAMS = 500
TOKENS = 64
INTERVALS_MS = (5, 10, 20)
RATE_LIMIT = 20_000.0
CHUNK_LIMIT = 50_000.0
TRIES = 3
"""Whatever else the machine does only adds: the best try counts."""

_STAMP = re.compile(rb": sent_ns=(\d+) due_ns=(\d+)\n")


@contextmanager
def mock(*flags: str) -> Iterator[tuple[psutil.Process, tuple[str, int]]]:
    """A mock in a separate process, and its address."""
    command = [Path(sys.executable).with_name("steelyard"), "mock", *flags]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert started.stdout is not None
        place = urlsplit(started.stdout.readline().strip())
        yield psutil.Process(started.pid), (place.hostname or "", place.port or 0)
    finally:
        started.terminate()
        started.wait(10)


def request(number: int, *, stream: bool) -> bytes:
    """A chat request as a client would send it."""
    flag = b"true" if stream else b"false"
    content = b"What is %d?" % number
    body = b'{"model":"mock","stream":%b,"messages":[{"role":"user","content":"%b"}]}' % (flag, content)
    times = b"x-mock-times: 1\r\n" if stream else b""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: mock\r\ncontent-type: application/json\r\n"
    return b"%b%bauthorization: Bearer x\r\ncontent-length: %d\r\n\r\n%b" % (head, times, len(body), body)


def connect(address: tuple[str, int], count: int) -> dict[int, socket.socket]:
    """So many open connections, by file number."""
    lines = {}
    for _ in range(count):
        line = socket.create_connection(address)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.setblocking(False)
        lines[line.fileno()] = line
    return lines


def whole_answers(address: tuple[str, int], count: int) -> float:
    """Seconds that a number of whole answers took."""
    lines = connect(address, CONNECTIONS)
    ready = select.epoll()
    requests = [request(number, stream=False) for number in range(count)]
    started = time.perf_counter()
    for number, line in zip(lines, lines.values(), strict=True):
        ready.register(number, select.EPOLLIN)
        line.send(requests.pop())
    done = 0
    while done < count:
        for number, _ in ready.poll():
            if not lines[number].recv(65_536).startswith(b"HTTP/1.1 200"):
                raise AssertionError("not every answer was 200")
            done += 1
            if requests:
                lines[number].send(requests.pop())
    took = time.perf_counter() - started
    for line in lines.values():
        line.close()
    return took


def streams(address: tuple[str, int]) -> list[bytes]:
    """The bytes of a number of streams, all begun at once."""
    lines = connect(address, STREAMS)
    ready = select.epoll()
    for number, line in lines.items():
        ready.register(number, select.EPOLLIN)
        line.send(request(number, stream=True))
    read: dict[int, list[bytes]] = {number: [] for number in lines}
    left = len(lines)
    while left:
        for number, _ in ready.poll(timeout=10):
            data = lines[number].recv(65_536)
            read[number].append(data)
            if data.endswith(b"0\r\n\r\n") or not data:
                ready.unregister(number)
                left -= 1
    for line in lines.values():
        line.close()
    return [b"".join(pieces) for pieces in read.values()]


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure_whole() -> Row:
    tries = []
    with mock() as (process, address):
        whole_answers(address, REQUESTS // 10)
        for _ in range(TRIES):
            before = cpu_seconds(process)
            took = whole_answers(address, REQUESTS)
            tries.append((cpu_seconds(process) - before, took))
    cpu, took = min(tries)
    detail = f"{cpu / REQUESTS * 1e6:.1f} µs each; {REQUESTS / took:,.0f}/s by the clock, beside the client"
    what = f"whole answers, {CONNECTIONS} connections: what one core's CPU allows"
    return Row(what, REQUESTS / cpu, RATE_LIMIT, detail, unit="requests/s", at_least=True)


def lateness(interval: int) -> tuple[list[float], float]:
    """How late each chunk was in milliseconds, and the CPU seconds a chunk."""
    flags = ("--latency", "500ms", "--chunk-interval", f"{interval}ms", "--output-tokens", str(TOKENS))
    with mock(*flags) as (process, address):
        before = cpu_seconds(process)
        read = streams(address)
        cpu = cpu_seconds(process) - before
    stamps = [(int(sent), int(due)) for one in read for sent, due in _STAMP.findall(one)]
    if len(stamps) != STREAMS * TOKENS:
        raise AssertionError(f"{STREAMS * TOKENS} chunks were to come, {len(stamps)} came")
    return [(sent - due) / 1e6 for sent, due in stamps], cpu / len(stamps)


def measure_streams(interval: int) -> Row:
    """Judged by CPU alone: lateness is the mock's own only on a machine that does nothing else."""
    tries = [lateness(interval) for _ in range(TRIES)]
    late = min((late for late, _ in tries), key=statistics.median)
    cpu = min(cpu for _, cpu in tries)
    cuts = statistics.quantiles(late, n=100)
    detail = f"{cpu * 1e6:.1f} µs each; {STREAMS * 1000 // interval:,}/s were asked for: late p50 {cuts[49]:.1f}, "
    detail += f"p90 {cuts[89]:.1f}, p99 {cuts[98]:.1f}, max {max(late):.1f} ms"
    what = f"{STREAMS} streams, a chunk every {interval} ms: what one core allows"
    return Row(what, 1 / cpu, CHUNK_LIMIT, detail, unit="chunks/s", at_least=True)


def measure() -> list[Row]:
    """Whole answers a second, and the lateness of chunks at several intervals."""
    return [measure_whole(), *(measure_streams(interval) for interval in INTERVALS_MS)]
