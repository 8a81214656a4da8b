"""Whole answers a second from an endpoint: a run with journal, statistics and scoring against a bare aiohttp loop.

Both ask the same questions of the same mock in another process, in turn. What is timed is read off the mock's clock:
from when it had the first request to when it had written the last answer. That leaves out planning and the writing of
the metrics, which the bare loop does not have; opening the connections is in it for both. CPU is of the whole call.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from benchmarks.mock_ceiling import mock
from benchmarks.mock_times import answered, forget, seconds
from benchmarks.rows import Row
from benchmarks.yardstick import run_yardstick
from steelyard import EvalCase, EvalSet, Runner
from steelyard.stats.client_load import LoopMonitor
from steelyard.targets import OpenAIChat

REQUESTS = 5_000
PARALLELISM = 50
ROUNDS = 7
"""Whatever else the machine does only takes away: the best round of each counts."""
LIMIT = 1.0
WATCHED = 3.0
WATCHING_LIMIT = 1.0

Ask = Callable[[str, list[EvalCase], Path], None]


@dataclass
class Pace:
    """Requests a second by the mock's clock, and microseconds of this process' CPU for each."""

    per_second: float
    cpu: float


def make_cases(count: int) -> list[EvalCase]:
    return [EvalCase(id=f"case-{n}", prompt=f"What is {n} plus {n}?", expected=str(2 * n)) for n in range(count)]


def ask_with_steelyard(base_url: str, cases: list[EvalCase], folder: Path) -> None:
    target = OpenAIChat("mock", base_url=base_url, api_key="nobody", stream=False)
    runner = Runner(target, EvalSet("rate", cases), ["exact"], parallelism=PARALLELISM, progress="off")
    place, loop = folder / "run", uvloop.new_event_loop
    metrics = runner.run_sync(force=True, low_memory=True, output_path=place, loop_factory=loop).metrics
    if metrics["pass_rate_all"] != 1.0:
        raise AssertionError(f"not every answer was right: {metrics['pass_rate_all']}")


def ask_with_yardstick(base_url: str, cases: list[EvalCase], folder: Path) -> None:
    path = folder / "bare.jsonl"
    run_yardstick(f"{base_url}/chat/completions", cases, path, parallelism=PARALLELISM)
    right = sum(json.loads(line)["correct"] for line in path.open("rb"))
    if right != len(cases):
        raise AssertionError(f"{right} of {len(cases)} answers were right")


def paced(ask: Ask, address: str, cases: list[EvalCase], folder: Path) -> Pace:
    forget(address)
    before = time.process_time()
    ask(f"{address}/v1", cases, folder)
    cpu = time.process_time() - before
    took = seconds(answered(address), len(cases))
    return Pace(len(cases) / took, cpu / len(cases) * 1e6)


def best(paces: list[Pace]) -> Pace:
    return Pace(max(one.per_second for one in paces), min(one.cpu for one in paces))


def rate_row() -> Row:
    """Several rounds, in which the two take turns at going first."""
    cases = make_cases(REQUESTS)
    clients: list[tuple[Ask, list[Pace]]] = [(ask_with_steelyard, []), (ask_with_yardstick, [])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answers = folder / "answers.jsonl"
        answers.write_bytes(b"\n".join(map(msgspec.json.encode, cases)))
        with mock("--answers", str(answers)) as (_, (host, port)):
            for number in range(ROUNDS + 1):
                for ask, paces in clients if number % 2 else reversed(clients):
                    paces.append(paced(ask, f"http://{host}:{port}", cases, folder))
    ours, theirs = (best(paces[1:]) for _, paces in clients)  # the first round imports, and fills caches
    detail = (
        f"{ours.per_second:,.0f} against {theirs.per_second:,.0f} requests/s; CPU, planning and metrics included, "
        f"{ours.cpu:.0f} against {theirs.cpu:.0f} µs each; best of {ROUNDS}"
    )
    what = f"{REQUESTS:,} whole answers, {PARALLELISM} at once"
    return Row(what, ours.per_second / theirs.per_second, LIMIT, detail, unit="× bare loop's", at_least=True)


def idle_cpu(*, watched: bool) -> float:
    """CPU seconds that an idle event loop takes, watched or not."""

    async def idle() -> None:
        monitor = LoopMonitor()
        if watched:
            monitor.start()
        await asyncio.sleep(WATCHED)
        if watched:
            monitor.stop()

    before = time.process_time()
    uvloop.run(idle())
    return time.process_time() - before


def watching_row() -> Row:
    """What it costs to watch the loop's lag all the time."""
    unwatched, watched = idle_cpu(watched=False), idle_cpu(watched=True)
    share = max(0.0, watched - unwatched) / WATCHED * 100
    detail = f"{watched * 1e3:.1f} ms of CPU in {WATCHED:g} s of an idle loop; without it {unwatched * 1e3:.1f} ms"
    return Row("watching the event loop's lag", share, WATCHING_LIMIT, detail, unit="% of a core")


def measure() -> list[Row]:
    """Rate and CPU against the yardstick; then what the watching alone costs."""
    return [rate_row(), watching_row()]
