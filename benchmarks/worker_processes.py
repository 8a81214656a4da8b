"""What a second worker process brings, against a second copy of the program; what a case costs the driver; start-up.

Everything is asked of mocks in other processes, one for each client, so that no mock is the limit before the clients
are. Rates are read off the mocks' clocks. On a machine with two cores, mocks and driver share them with the workers:
how much two bare copies gain on one is what there is to gain, and workers are compared with that.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.endpoint_rate import make_cases
from benchmarks.mock_ceiling import mock
from benchmarks.mock_times import Answered, answered, forget
from benchmarks.rows import Row
from steelyard import Engine, EvalCase, EvalSet, InvocationResponse, ProcessEngine, Runner
from steelyard.targets import OpenAIChat

REQUESTS = 20_000
STREAMS = 2_000
CHUNKS = 64
AT_ONCE = 50
"""In flight for each worker, and for each copy."""
ROUNDS = 3
QUICK_CASES = 40_000
ANSWER_BYTES = 4096
LOAD_SECONDS = 4.0
LATENCY = 1.0
LIMIT_GAIN, LIMIT_DRIVER, LIMIT_START, LIMIT_IN_FLIGHT = 0.9, 25.0, 1.0, 0.02
COPY = "from benchmarks.worker_processes import copy; copy()"


@contextlib.contextmanager
def mocks(count: int, *flags: str) -> Iterator[list[str]]:
    """The addresses of this many mocks."""
    with contextlib.ExitStack() as stack:
        yield [f"http://{host}:{port}" for _, (host, port) in (stack.enter_context(mock(*flags)) for _ in range(count))]


class EndpointOfEach:
    """A target that asks the mock of its own process: the first worker to call takes the first mock, and so on."""

    model_id = "mock"
    default_parallelism = AT_ONCE

    def __init__(self, addresses: list[str], place: str, *, stream: bool) -> None:
        self._targets = [OpenAIChat("mock", base_url=f"{one}/v1", api_key="nobody", stream=stream) for one in addresses]
        self._place = place
        self.endpoint = addresses[0]

    def identity(self) -> dict[str, object]:
        return {"kind": "endpoint of each"}

    def check(self) -> None: ...

    async def open(self, parallelism: int) -> None:
        number = 0
        while len(self._targets) > 1:
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{self._place}/{number}")
                break
            number += 1
        self._mine = self._targets[number]
        await self._mine.open(parallelism)

    async def close(self) -> None:
        await self._mine.close()

    async def invoke(self, case: EvalCase, context: object) -> InvocationResponse:
        return await self._mine.invoke(case, context)  # type: ignore[arg-type]


def run(target: object, count: int, parallelism: int, folder: Path, engine: ProcessEngine | None) -> None:
    runner = Runner(target, EvalSet("w", make_cases(count)), engine=engine, parallelism=parallelism, progress="off")
    options = {"force": True, "low_memory": True, "output_path": folder / "run"}
    metrics = runner.run_sync(loop_factory=uvloop.new_event_loop, **options).metrics  # type: ignore[arg-type]
    if metrics["error_rate"] or not metrics["complete"]:
        raise AssertionError(f"the run did not go as it should: {metrics['errors']}")


def rate(addresses: list[str], count: int) -> float:
    """Answers a second by the mocks' clock, which is one for all of them."""
    answers = [one for address in addresses for one in answered(address).values()]
    if len(answers) != count:
        raise AssertionError(f"{count} requests were to come, {len(answers)} came")
    return count / (max(one.last for one in answers) - min(one.received for one in answers))


def rate_of_workers(addresses: list[str], engine: ProcessEngine, count: int, *, stream: bool) -> float:
    for address in addresses:
        forget(address)
    with tempfile.TemporaryDirectory() as folder:
        target = EndpointOfEach(addresses, folder, stream=stream)
        run(target, count, AT_ONCE * len(addresses), Path(folder), engine)
    return rate(addresses, count)


def copy() -> None:
    """One copy of the program: gets ready, waits for the word, and asks its part."""
    address, count, stream = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "stream"
    target = OpenAIChat("mock", base_url=f"{address}/v1", api_key="nobody", stream=stream)
    with tempfile.TemporaryDirectory() as folder:
        run(target, AT_ONCE, AT_ONCE, Path(folder), None)
        print("ready", flush=True)
        sys.stdin.readline()
        run(target, count, AT_ONCE, Path(folder), None)


def rate_of_copies(addresses: list[str], count: int, *, stream: bool) -> float:
    kind, each = "stream" if stream else "whole", str(count // len(addresses))
    copies = [
        subprocess.Popen(
            [sys.executable, "-c", COPY, address, each, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for address in addresses
    ]
    for one in copies:
        assert one.stdout is not None
        one.stdout.readline()
    for address in addresses:
        forget(address)
    for one in copies:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    for one in copies:
        if one.wait() != 0:
            raise AssertionError("a copy of the program failed")
        for pipe in (one.stdin, one.stdout):
            if pipe is not None:
                pipe.close()
    return rate(addresses, count)


def gain(what: str, count: int, flags: list[str], *, stream: bool, units: int = 1) -> Row:
    """How much two workers gain on one, of what two copies gain on one; in turns, the best of each."""
    best = {"one worker": 0.0, "two workers": 0.0, "one copy": 0.0, "two copies": 0.0}
    with mocks(2, *flags) as addresses, ProcessEngine(1) as one, ProcessEngine(2) as two:
        for _ in range(ROUNDS):
            found = {
                "one worker": rate_of_workers(addresses[:1], one, count, stream=stream),
                "one copy": rate_of_copies(addresses[:1], count, stream=stream),
                "two workers": rate_of_workers(addresses, two, count, stream=stream),
                "two copies": rate_of_copies(addresses, count, stream=stream),
            }
            best = {name: max(value, found[name]) for name, value in best.items()}
    workers, copies = best["two workers"] / best["one worker"], best["two copies"] / best["one copy"]
    rates = ", ".join(f"{name} {value * units:,.0f}/s" for name, value in best.items())
    detail = f"{workers:.2f} × with a second worker, {copies:.2f} × with a second copy: {rates}; best of {ROUNDS}"
    return Row(what, workers / copies, LIMIT_GAIN, detail, unit="of copies' gain", at_least=True)


async def long_answer(case: EvalCase) -> InvocationResponse:
    return InvocationResponse(
        response_text=(case.id + " ").ljust(ANSWER_BYTES, "x"),
        time_to_first_token=0.1,
        time_to_last_token=0.2,
        time_per_output_token=0.01,
        num_tokens_input=10,
        num_tokens_output=1000,
    )


def driver_cost() -> Row:
    """CPU of the process that owns the run, for each case: the part that no further worker takes off it."""
    costs = []
    with ProcessEngine(2) as engine, tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS + 1):
            before = time.process_time()
            run(long_answer, QUICK_CASES, 100, Path(folder), engine)
            costs.append((time.process_time() - before) / QUICK_CASES * 1e6)
    detail = f"two workers, answers of {ANSWER_BYTES} bytes, journal on; best of {ROUNDS}, the first not counted"
    return Row("CPU of the driver", min(costs[1:]), LIMIT_DRIVER, detail, unit="µs a case")


def start_up() -> Row:
    took = []
    for _ in range(ROUNDS):
        with ProcessEngine(2) as engine:
            began = time.monotonic()
            engine.check()
            took.append(time.monotonic() - began)
    return Row("start of two worker processes", min(took), LIMIT_START, f"best of {ROUNDS}", unit="s")


def in_flight(engine: Engine, workers: int) -> Row:
    """How far the calls in flight are from those asked for, in the worst second of a load run; the best of several."""
    parallelism = 100
    flags = ("--latency", f"{LATENCY}s", "--output-tokens", "1")
    cases = EvalSet("w", make_cases(10))
    worst, seen = float("inf"), ""
    for _ in range(ROUNDS):
        with mocks(1, *flags) as (address,), tempfile.TemporaryDirectory() as folder:
            target = OpenAIChat("mock", base_url=f"{address}/v1", stream=False)
            runner = Runner(target, cases, engine=engine, parallelism=parallelism, progress="off")
            runner.run_sync(duration=LOAD_SECONDS, warmup=parallelism, output_path=Path(folder) / "run")
            calls = sorted(answered(address).values(), key=lambda call: call.received)[parallelism:]
        means = means_by_second(calls)
        off = max(abs(mean / parallelism - 1) for mean in means)
        if off < worst:
            worst, seen = off, " ".join(f"{mean:.1f}" for mean in means)
    detail = f"{parallelism} asked for, {seen} second by second, counted at the mock; best of {ROUNDS}"
    return Row(f"in flight over {workers} workers, worst second", worst, LIMIT_IN_FLIGHT, detail, unit="off")


def means_by_second(calls: list[Answered]) -> list[float]:
    """The mean number in flight in each whole second between the first request and the last."""
    began, ended = min(call.received for call in calls), max(call.received for call in calls)
    begins = np.array([call.received for call in calls])
    ends = np.array([call.last for call in calls])
    seconds = np.arange(began, ended - 1 + 1e-9, 1.0)
    return [float(np.clip(np.minimum(ends, at + 1) - np.maximum(begins, at), 0, 1).sum()) for at in seconds]


def measure() -> list[Row]:
    """Ratios within this run."""
    os.environ.setdefault("OPENAI_API_KEY", "nobody")
    streams = ["--output-tokens", str(CHUNKS), "--chunk-interval", "0ms"]
    rows = [
        start_up(),
        driver_cost(),
        gain(f"{REQUESTS:,} whole answers", REQUESTS, ["--output-tokens", "8"], stream=False),
        gain(f"{STREAMS:,} streams of {CHUNKS} chunks", STREAMS, streams, stream=True, units=CHUNKS),
    ]
    for workers in (2, 5):
        with ProcessEngine(workers) as engine:
            rows.append(in_flight(engine, workers))
    return rows
