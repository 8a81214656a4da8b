"""The cache in a run: what is asked again, what is not, and how a hit is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Runner
from steelyard.records import InvocationResponse
from steelyard.targets import CallableTarget


class Agent:
    """Counts its calls; each takes a stated time."""

    def __init__(self) -> None:
        self.calls = 0

    async def answer(self, case: EvalCase) -> InvocationResponse:
        self.calls += 1
        return InvocationResponse(response_text=f"to {case.prompt}", time_to_last_token=2.0, num_tokens_output=5)


def suite(**case: Any) -> EvalSet:
    return EvalSet("s", [EvalCase(id=f"c{number}", prompt=f"q{number}", **case) for number in range(5)])


def run(agent: Agent, cases: EvalSet, cache: object, **options: Any) -> Any:
    target = CallableTarget(agent.answer, model_id=options.pop("model", "m"), version="1")
    return Runner(target, cases, parallelism=3, progress="off", cache=cache, **options).run_sync()


@pytest.mark.parametrize("place", ["cache", "cache.sqlite"])
def test_a_second_run_asks_nothing_and_says_so(tmp_path: Path, place: str) -> None:
    agent = Agent()
    first = run(agent, suite(), tmp_path / place)
    second = run(agent, suite(), tmp_path / place)
    assert agent.calls == 5
    assert (first.metrics["cached"], second.metrics["cached"]) == (0, 5)
    assert [record.response_text for record in second.responses] == [record.response_text for record in first.responses]
    assert all(record.cached and record.attempts == 0 for record in second.responses)
    assert second.stats["time_to_last_token-p50"] is None
    assert second.stats["total_output_tokens"] == 0
    assert first.stats["total_output_tokens"] == 25


@pytest.mark.parametrize(
    "changed",
    [{"system_prompt": "x"}, {"tools": [{"name": "t"}]}, {"messages": [{"role": "user", "content": "x"}]}],
    ids=lambda changed: next(iter(changed)),
)
def test_what_an_answer_depends_on_misses_when_it_changes(tmp_path: Path, changed: dict[str, Any]) -> None:
    agent = Agent()
    run(agent, suite(), tmp_path)
    run(agent, suite(**changed), tmp_path)
    assert agent.calls == 10


def test_another_model_misses_and_another_expectation_does_not(tmp_path: Path) -> None:
    agent = Agent()
    run(agent, suite(expected="a"), tmp_path, scorers=["exact"])
    run(agent, suite(expected="b"), tmp_path, scorers=["exact"])
    assert agent.calls == 5
    run(agent, suite(), tmp_path, model="other")
    assert agent.calls == 10


def test_a_resumed_run_replays_hits_as_hits(tmp_path: Path) -> None:
    agent = Agent()
    run(agent, suite(), tmp_path / "cache")
    run(agent, suite(), tmp_path / "cache", output_path=tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    again = run(agent, suite(), tmp_path / "cache", output_path=tmp_path / "run")
    assert agent.calls == 5
    assert again.metrics["cached"] == 5
    assert again.stats["time_to_last_token-p50"] is None


def test_trials_are_cached_each_for_itself(tmp_path: Path) -> None:
    agent = Agent()
    run(agent, suite(), tmp_path, trials=2)
    assert agent.calls == 10
    run(agent, suite(), tmp_path, trials=3)
    assert agent.calls == 15
