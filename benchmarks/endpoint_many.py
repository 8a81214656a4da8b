"""A thousand calls at once: how near a run comes to what the endpoint's own latency allows.

Ideal is every connection busy all the time: requests over parallelism, times the latency. The time is the mock's, from
the first request that it received to the last answer that it wrote. Opening the connections is part of it, and told
apart: the time until the mock had as many requests as there are to be at once.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.endpoint_rate import make_cases
from benchmarks.mock_ceiling import mock
from benchmarks.mock_times import answered, forget, seconds
from benchmarks.rows import Row
from steelyard import EvalSet, Runner
from steelyard.cli.run_control import allow_calls
from steelyard.targets import OpenAIChat

REQUESTS = 50_000
PARALLELISM = 1_000
LATENCY_MS = 200
ROUNDS = 3
LIMIT = 1.15


@dataclass(order=True)
class Took:
    """Seconds: all of it, until all connections were in use, and of this process' CPU."""

    wall: float
    ramp: float
    cpu: float


def run(address: str, folder: Path) -> Took:
    target = OpenAIChat("mock", base_url=f"{address}/v1", api_key="nobody", stream=False)
    suite = EvalSet("many", make_cases(REQUESTS))
    runner = Runner(target, suite, ["exact"], parallelism=PARALLELISM, progress="off")
    place, loop = folder / "run", uvloop.new_event_loop
    forget(address)
    before = time.process_time()
    metrics = runner.run_sync(force=True, low_memory=True, output_path=place, loop_factory=loop).metrics
    cpu = time.process_time() - before
    if metrics["error_rate"] or metrics["peak_in_flight"] != PARALLELISM:
        raise AssertionError(f"{metrics['errors']} errors, at most {metrics['peak_in_flight']} at once")
    answers = answered(address)
    received = sorted(one.received for one in answers.values())
    return Took(seconds(answers, REQUESTS), received[PARALLELISM - 1] - received[0], cpu)


def measure() -> list[Row]:
    """The best of several: whatever else the machine does only adds."""
    allow_calls(PARALLELISM)
    with tempfile.TemporaryDirectory() as name, mock("--latency", f"{LATENCY_MS}ms") as (_, (host, port)):
        best = min(run(f"http://{host}:{port}", Path(name)) for _ in range(ROUNDS))
    ideal = REQUESTS / PARALLELISM * LATENCY_MS / 1000
    what = f"{REQUESTS:,} answers of {LATENCY_MS} ms, {PARALLELISM:,} at once"
    detail = (
        f"{best.wall:.2f} s of {ideal:g} s ideal, {best.ramp:.2f} s of them until all connections were in use; "
        f"{best.cpu / REQUESTS * 1e6:.0f} µs of CPU each; best of {ROUNDS}"
    )
    return [Row(what, best.wall / ideal, LIMIT, detail, unit="× ideal")]
