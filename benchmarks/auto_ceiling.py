"""`parallelism: auto` and `sweep` against a provider that allows 40 calls at once and answers 429 beyond."""

from __future__ import annotations

import tempfile
from pathlib import Path

import uvloop

from benchmarks.mock_ceiling import mock
from benchmarks.rows import Row
from steelyard import EvalCase, EvalSet, Runner
from steelyard.load.sweep import Sweep
from steelyard.targets import OpenAIChat

ALLOWED = 40
CALLS = 4_000
FIXED = (20, 30, 40, 60)
LEVELS = (1, 10, 20, 30, 40, 50, 80)
MOCK = ("--latency", "100ms", "--output-tokens", "8", "--max-concurrency", str(ALLOWED), "--retry-after", "0.2")


def make_runner(base_url: str) -> Runner:
    cases = [EvalCase(id=f"c{number}", prompt=f"question {number}") for number in range(CALLS)]
    target = OpenAIChat("mock", base_url=base_url, api_key="nobody", stream=False)
    return Runner(target, EvalSet(id="auto", cases=cases), progress="off")


def answers_a_second(base_url: str, parallelism: int | str) -> tuple[float, int]:
    """Answers over the time the run was at work, and how many calls at once it ended with."""
    result = make_runner(base_url).run_sync(parallelism=parallelism, loop_factory=uvloop.new_event_loop)  # type: ignore[arg-type]
    history = result.metrics.get("parallelism_history")
    return result.metrics["counts"]["ok"] / result.metrics["active_seconds"], history[-1][1] if history else 0


def recommended(base_url: str) -> tuple[int, str]:
    """The level that a sweep advises, and why."""
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(make_runner(base_url), levels=list(LEVELS), requests=200, output_path=Path(folder) / "sweep")
        advice = sweep.run_sync(loop_factory=uvloop.new_event_loop).recommendation
    return advice.level or 0, advice.reason


def measure() -> list[Row]:
    with mock(*MOCK) as (_, (host, port)):
        base_url = f"http://{host}:{port}/v1"
        fixed = {at_once: answers_a_second(base_url, at_once)[0] for at_once in FIXED}
        auto, ended = answers_a_second(base_url, "auto")
        level, reason = recommended(base_url)
    best = max(fixed, key=lambda at_once: fixed[at_once])
    detail = f"{auto:.0f} answers/s against {fixed[best]:.0f} with {best} at once, {CALLS:,} calls"
    return [
        Row("auto, against the best fixed parallelism", auto / fixed[best], 0.85, detail, at_least=True),
        Row("auto ends no higher than", ended, ALLOWED, f"{ALLOWED} are allowed", unit="at once"),
        Row("auto ends no lower than", ended, 30, f"{ALLOWED} are allowed", unit="at once", at_least=True),
        Row("sweep recommends", level, ALLOWED, reason, unit="at once"),
        Row("sweep recommends no less than", level, 20, reason, unit="at once", at_least=True),
    ]
