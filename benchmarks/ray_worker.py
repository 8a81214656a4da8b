"""What a Ray worker spends: CPU on a request and on a stream, memory on a connection. From these follow machines."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil

from benchmarks.endpoint_rate import make_cases
from benchmarks.mock_ceiling import mock
from benchmarks.rows import Row
from steelyard import EvalCase, EvalSet, Runner
from steelyard.cli.run_control import allow_calls
from steelyard.engine.ray.engine import RayEngine
from steelyard.targets import OpenAIChat

REQUESTS = 10_000
STREAMS = 1_000
CHUNKS = 64
AT_ONCE = 100
CONNECTIONS = 1_000
ROUNDS = 3
LIMIT_REQUEST, LIMIT_STREAM, LIMIT_CONNECTION = 500.0, 1500.0, 150.0


def whose(_: EvalCase) -> str:
    """The number of the worker's process."""
    return str(os.getpid())


def run(engine: RayEngine, target: object, cases: list[EvalCase], parallelism: int) -> str:
    """Ask all of these, with a journal; the last answer."""
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(target, EvalSet("worker", cases), engine=engine, parallelism=parallelism, progress="off")
        result = runner.run_sync(output_path=Path(folder) / "run")
        if result.metrics["error_rate"] or not result.complete:
            raise AssertionError(f"the run did not go as it should: {result.metrics['errors']}")
        return next(iter(result.load_responses())).response_text or ""


def cpu_each(engine: RayEngine, worker: psutil.Process, count: int, *options: str, stream: bool) -> float:
    """Microseconds of the worker's CPU for each call, the best of several."""
    best = float("inf")
    with mock(*options) as (_, (host, port)):
        target = OpenAIChat("mock", base_url=f"http://{host}:{port}/v1", stream=stream)
        for _ in range(ROUNDS):
            before = worker.cpu_times()
            run(engine, target, make_cases(count), AT_ONCE)
            after = worker.cpu_times()
            best = min(best, after.user + after.system - before.user - before.system)
    return best / count * 1e6


def kilobytes_a_connection(engine: RayEngine, worker: psutil.Process) -> float:
    """How much the worker's peak grows when it has a thousand calls in flight."""
    allow_calls(CONNECTIONS)
    with mock("--latency", "5s", "--output-tokens", "1") as (_, (host, port)):
        target = OpenAIChat("mock", base_url=f"http://{host}:{port}/v1", stream=False)
        before = worker.memory_info().rss
        run(engine, target, make_cases(CONNECTIONS), CONNECTIONS)
    status = Path(f"/proc/{worker.pid}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return (peak - before / 1024) / CONNECTIONS


def measure() -> list[Row]:
    """One worker, asked by a driver that has the other core."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("OPENAI_API_KEY", "nobody")
    with RayEngine(workers=1) as engine:
        worker = psutil.Process(int(run(engine, whose, make_cases(1), 1)))
        connection = kilobytes_a_connection(engine, worker)
        request = cpu_each(engine, worker, REQUESTS, "--output-tokens", "8", stream=False)
        pace = ("--output-tokens", str(CHUNKS), "--chunk-interval", "10ms")
        stream = cpu_each(engine, worker, STREAMS, *pace, stream=True)
        rss = worker.memory_info().rss / 2**20
    detail = f"{AT_ONCE} at once, one worker, best of {ROUNDS}"
    held = f"{CONNECTIONS:,} calls in flight; {rss:.0f} MiB resident after all of it"
    return [
        Row("CPU of a worker, a whole answer", request, LIMIT_REQUEST, detail, unit="µs"),
        Row(f"CPU of a worker, a stream of {CHUNKS} chunks, 10 ms apart", stream, LIMIT_STREAM, detail, unit="µs"),
        Row("memory of a worker, an open connection", connection, LIMIT_CONNECTION, held, unit="KiB"),
    ]
