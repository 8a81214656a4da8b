"""What a second Ray worker brings, how exact calls in flight are, and what a case costs the driver.

The cluster is started on this machine and its workers are greeted before a clock runs: starting takes seconds, once.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.low_memory import ANSWER_BYTES, FEW, MANY, write_cases
from benchmarks.memory import peak_bytes
from benchmarks.rows import Row
from benchmarks.worker_processes import in_flight
from steelyard import EvalCase, EvalSet, InvocationResponse, Runner
from steelyard.engine.ray.engine import RayEngine

BURN_SECONDS = 0.005
BURNING_CASES = 600
SLOW_SECONDS = 2.0
IN_FLIGHT = 2_000
SLOW_CASES = 10_000
QUICK_CASES = 40_000
ROUNDS = 3
BARE_SECONDS = 2.0
LIMIT_SCALE, LIMIT_BARE, LIMIT_IDEAL, LIMIT_BYTES, LIMIT_DRIVER = 1.5, 0.8, 1.25, 150.0, 60.0


async def burn(case: EvalCase) -> str:
    """Use 5 ms of this core, as a tokeniser or a parser would."""
    began = time.thread_time()
    while time.thread_time() - began < BURN_SECONDS:
        pass
    return case.id


async def slow(case: EvalCase) -> str:
    await asyncio.sleep(SLOW_SECONDS)
    return case.id


async def long_answer(case: EvalCase) -> InvocationResponse:
    return InvocationResponse(
        response_text=(case.id + " ").ljust(ANSWER_BYTES, "x"),
        time_to_first_token=0.1,
        time_to_last_token=0.2,
        time_per_output_token=0.01,
        num_tokens_input=len(case.prompt or ""),
        num_tokens_output=1000,
    )


def suite(count: int) -> EvalSet:
    return EvalSet("ray", [EvalCase(id=f"c{number}", prompt=f"{number}?") for number in range(count)])


def seconds(engine: RayEngine | None, target: object, count: int, parallelism: int) -> float:
    """How long a run was active, journal included."""
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(target, suite(count), engine=engine, parallelism=parallelism, progress="off")
        metrics = runner.run_sync(low_memory=True, output_path=Path(folder) / "run").metrics
    if metrics["error_rate"] or not metrics["complete"]:
        raise AssertionError(f"the run did not go as it should: {metrics['errors']}")
    return float(metrics["active_seconds"])


def bare_rate(processes: int) -> float:
    """Cases of 5 ms that these processes burn in a second, with nothing around them: what the machine has to give."""
    command = [sys.executable, "-c", "from benchmarks.ray_scale import burn_alone; burn_alone()"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return sum(float(process.communicate()[0]) for process in running)


def burn_alone() -> None:
    began, done = time.monotonic(), 0
    while time.monotonic() - began < BARE_SECONDS:
        asyncio.run(burn(EvalCase(id="c")))
        done += 1
    print(done / BARE_SECONDS)


def second_worker(one: RayEngine, two: RayEngine) -> list[Row]:
    """What two workers do more than one; and how much of what two bare processes do, measured in turns."""
    alone = both = bare_alone = bare_both = 0.0
    for _ in range(ROUNDS):
        alone = max(alone, BURNING_CASES / seconds(one, burn, BURNING_CASES, 4))
        bare_alone = max(bare_alone, bare_rate(1))
        both = max(both, BURNING_CASES / seconds(two, burn, BURNING_CASES, 4))
        bare_both = max(bare_both, bare_rate(2))
    ours = f"{alone:.0f}/s with one, {both:.0f}/s with two; best of {ROUNDS} in turns"
    bare = f"bare processes: {bare_alone:.0f}/s one, {bare_both:.0f}/s two, {bare_both / bare_alone:.2f} ×"
    return [
        Row("two workers against one, 5 ms of CPU a case", both / alone, LIMIT_SCALE, f"{ours}; {bare}", at_least=True),
        Row("two workers against two bare processes", both / bare_both, LIMIT_BARE, bare, at_least=True),
    ]


def many_in_flight(two: RayEngine) -> Row:
    ideal = SLOW_CASES / IN_FLIGHT * SLOW_SECONDS
    wall = min(seconds(two, slow, SLOW_CASES, IN_FLIGHT) for _ in range(2))
    what = f"{SLOW_CASES:,} answers of {SLOW_SECONDS:g} s, {IN_FLIGHT:,} at once over two workers"
    return Row(what, wall / ideal, LIMIT_IDEAL, f"{wall:.2f} s of {ideal:g} s ideal, best of 2", unit="× ideal")


def driver_cost(two: RayEngine) -> Row:
    """What the process that owns the run spends on each case: the part that no further worker takes off it."""
    best = float("inf")
    rate = 0.0
    for _ in range(ROUNDS):
        before = time.process_time()
        took = seconds(two, long_answer, QUICK_CASES, 100)
        cost = (time.process_time() - before) / QUICK_CASES * 1e6
        best, rate = min(best, cost), max(rate, QUICK_CASES / took)
    detail = f"at {rate:,.0f} cases/s with two workers, answers of {ANSWER_BYTES} bytes, journal on; best of {ROUNDS}"
    return Row("CPU of the driver", best, LIMIT_DRIVER, detail, unit="µs a case")


def child(folder: str) -> None:
    """Run the cases in a folder on a cluster of this process's own, and print the peak of its memory in bytes."""
    cases = EvalSet.from_jsonl(Path(folder) / "cases.jsonl", id="memory")
    with RayEngine(workers=2) as engine:
        runner = Runner(long_answer, cases, ["exact"], engine=engine, parallelism=50, progress="off")
        result = runner.run_sync(low_memory=True, output_path=Path(folder) / "run")
    if not result.complete:
        raise AssertionError("the run did not go as it should")
    print(peak_bytes())


def peak_memory(count: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        write_cases(Path(folder) / "cases.jsonl", count)
        command = [sys.executable, "-c", f"from benchmarks.ray_scale import child; child({folder!r})"]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def memory() -> Row:
    few, many = peak_memory(FEW), peak_memory(MANY)
    what = f"driver's growth from {FEW:,} to {MANY:,} cases of {ANSWER_BYTES} bytes"
    detail = f"peak {few / 2**20:.0f} MiB and {many / 2**20:.0f} MiB"
    return Row(what, (many - few) / (MANY - FEW), LIMIT_BYTES, detail, unit="bytes a case")


def measure() -> list[Row]:
    """Ratios within this run; the memory of the driver in separate processes."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("OPENAI_API_KEY", "nobody")
    try:
        import ray
    except ImportError:
        print("  Ray is not installed: pip install 'steelyard[ray]'")
        return []

    # Room for the workers of both engines at once, so that they can be measured in turns.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        with RayEngine(workers=1) as one, RayEngine(workers=2) as two:
            for engine in (one, two):
                seconds(engine, slow, 20, 4)
            rows = [*second_worker(one, two), many_in_flight(two), in_flight(two, 2), driver_cost(two)]
        with RayEngine(workers=5) as five:
            five.check()
            rows.append(in_flight(five, 5))
    finally:
        ray.shutdown()
    return [*rows, memory()]
