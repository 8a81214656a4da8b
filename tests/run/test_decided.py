"""A run that stops when its rules are settled: in random order, by verdicts in that order, with counts that add up."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from steelyard import CancellationToken, EvalCase, EvalSet, InvocationContext, InvocationResponse, Runner
from steelyard.errors import ConfigurationError, RunFinished
from steelyard.report.summary import summary
from steelyard.run.decided import expected_share


class Agent:
    """Answers rightly but for the cases that it is told to get wrong, or to fail on."""

    model_id = "agent"
    default_parallelism = 4

    def __init__(self, wrong: set[str], broken: set[str] | None = None, slow: set[str] | None = None) -> None:
        self.wrong, self.broken, self.slow = wrong, broken or set(), slow or set()
        self.asked: list[str] = []

    def identity(self) -> dict[str, Any]:
        return {"kind": "agent"}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        self.asked.append(case.id)
        if case.id in self.slow:
            await asyncio.sleep(0.005)
        if case.id in self.broken:
            raise ValueError("no")
        return InvocationResponse(response_text="no" if case.id in self.wrong else "yes")


def suite(n: int) -> EvalSet:
    return EvalSet(id="s", cases=[EvalCase(id=f"c{number}", prompt="?", expected="yes") for number in range(n)])


def wrong(n: int, count: int, seed: int = 1) -> set[str]:
    return {f"c{number}" for number in random.Random(seed).sample(range(n), count)}


def runner(agent: Agent, n: int = 400, **options: Any) -> Runner:
    given = {"decide": ("pass_rate>=0.9",), "stop_when": "decided", "progress": "off", **options}
    return Runner(agent, suite(n), ["exact"], **given)


def test_a_run_stops_when_its_rule_is_settled_and_its_counts_add_up(tmp_path: Path) -> None:
    agent = Agent(wrong(400, 4))
    result = runner(agent, output_path=tmp_path / "r").run_sync()
    metrics = result.typed_metrics
    counts = metrics.counts
    assert result.complete
    assert metrics.stopped is None
    assert counts.planned == 400
    assert counts.ok + counts.not_asked == 400
    assert 0 < counts.ok == len(agent.asked) < 150
    assert (counts.cancelled, counts.not_started) == (0, 0)
    assert metrics.decided
    assert [(one.rule, one.outcome) for one in metrics.decided.rules] == [("pass_rate>=0.9", "holds")]
    assert "not asked: decided: " in summary(metrics)
    with pytest.raises(RunFinished):
        runner(agent, output_path=tmp_path / "r").run_sync()


def test_a_rule_that_is_broken_is_settled_too() -> None:
    metrics = runner(Agent(wrong(400, 160))).run_sync().typed_metrics
    assert metrics.decided
    assert metrics.decided.rules[0].outcome == "broken"
    assert metrics.counts.not_asked > 200


def test_the_order_is_that_of_the_seed_whatever_is_answered_and_wherever_a_case_stands() -> None:
    one, other, third = Agent(set()), Agent(wrong(400, 200)), Agent(set())
    runner(one, parallelism=1).run_sync()
    runner(other, parallelism=1).run_sync()
    runner(third, parallelism=1, seed=7).run_sync()
    shared = min(len(one.asked), len(other.asked))
    assert one.asked[:shared] == other.asked[:shared]
    assert one.asked[:5] != [f"c{number}" for number in range(5)]
    assert one.asked[:10] != third.asked[:10]


def test_verdicts_enter_in_the_order_of_the_draw_not_of_completion() -> None:
    """Wrong answers come late: in the order of completion the first would all be right."""
    bad = wrong(300, 60)
    results = []
    for parallelism, slow in ((1, set()), (40, bad)):
        agent = Agent(bad, slow=slow)
        results.append(runner(agent, 300, decide=("pass_rate>=0.7",), parallelism=parallelism).run_sync().typed_metrics)
    one_by_one, at_once = results
    assert one_by_one.decided
    assert at_once.decided
    assert at_once.decided.rules == one_by_one.decided.rules
    assert at_once.counts.ok >= one_by_one.counts.ok  # those that were in flight when it was settled
    assert at_once.counts.not_asked > 0


def test_an_interrupted_run_goes_on_to_the_same_decision(tmp_path: Path) -> None:
    bad = wrong(400, 20)
    whole = runner(Agent(bad), parallelism=1).run_sync().typed_metrics
    token = CancellationToken()
    agent = Agent(bad)
    ask = agent.invoke

    async def until(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        if len(agent.asked) == 30:
            token.cancel("enough")
        return await ask(case, context)

    agent.invoke = until  # type: ignore[method-assign]
    options = {"output_path": tmp_path / "r", "parallelism": 1}
    part = Runner(
        agent,
        suite(400),
        ["exact"],
        token=token,
        progress="off",
        stop_when="decided",
        decide=("pass_rate>=0.9",),
        **options,
    ).run_sync()
    assert not part.complete
    assert part.typed_metrics.counts.not_started > 0
    again = Agent(bad)
    result = runner(again, **options).run_sync().typed_metrics
    assert result.complete
    assert result.counts == whole.counts
    assert len(again.asked) < whole.counts.ok
    assert json.loads((tmp_path / "r" / "metrics.json").read_bytes())["counts"]["not_asked"] == whole.counts.not_asked


def test_what_stays_open_to_the_end_asks_everything() -> None:
    metrics = runner(Agent(wrong(40, 4)), 40, decide=("pass_rate>=0.9",)).run_sync().typed_metrics
    assert metrics.decided
    assert metrics.decided.rules[0].outcome == "holds"  # exactly nine of ten: known when the last ones are
    assert metrics.counts.ok >= 36


def test_errors_are_no_verdicts_and_the_rule_is_settled_all_the_same() -> None:
    agent = Agent(wrong(400, 4), broken={f"c{number}" for number in range(0, 400, 40)})
    metrics = runner(agent, retries=0).run_sync().typed_metrics
    assert metrics.decided
    assert metrics.decided.rules[0].outcome == "holds"
    assert metrics.counts.planned == metrics.counts.ok + metrics.counts.error + metrics.counts.not_asked


def test_every_rule_must_be_settled() -> None:
    one = runner(Agent(wrong(400, 4))).run_sync().typed_metrics
    both = runner(Agent(wrong(400, 4)), decide=("pass_rate>=0.9", "pass_rate_all>=97%")).run_sync().typed_metrics
    assert both.counts.ok > one.counts.ok


def test_a_baseline_is_a_rule_as_well(tmp_path: Path) -> None:
    Runner(Agent(wrong(600, 30)), suite(600), ["exact"], progress="off", output_path=tmp_path / "base").run_sync()
    options = {"decide": (), "baseline": tmp_path / "base", "max_regression": 0.05}
    same = runner(Agent(wrong(600, 30)), 600, **options).run_sync().typed_metrics
    worse = runner(Agent(wrong(600, 300, seed=2)), 600, **options).run_sync().typed_metrics
    assert same.decided
    assert worse.decided
    assert [one.outcome for one in same.decided.rules] == ["holds"]
    assert [one.outcome for one in worse.decided.rules] == ["broken"]
    assert same.counts.not_asked > 0
    assert worse.counts.not_asked > 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decide": ()}, "needs a rule to decide"),
        ({"decide": ("latency_p95<2s",)}, "cannot settle 'latency_p95<2s' before the end"),
        ({"decide": ("pass_rate<0.5",)}, "cannot settle"),
        ({"stop_when": "bored"}, "stop_when must be decided, got 'bored'"),
        ({"requests": 5}, "does not go with a load run"),
    ],
)
def test_what_cannot_be_decided_is_refused_before_any_call(options: dict[str, Any], message: str) -> None:
    agent = Agent(set())
    with pytest.raises(ConfigurationError, match=message):
        runner(agent, **options).run_sync()
    assert agent.asked == []


def test_how_much_of_a_suite_a_rule_takes_is_known_before() -> None:
    assert expected_share("pass_rate>=0.9", 1000, 0.95) == pytest.approx(0.17, abs=0.04)
    assert expected_share("pass_rate>=0.9", 1000, 0.9) > 0.9
    assert expected_share("error_rate<=10%", 1000, 0.95) == pytest.approx(0.17, abs=0.04)


def test_the_cases_of_a_group_are_asked_together_and_enter_together() -> None:
    cases = [EvalCase(id=f"c{number}", prompt="?", expected="yes", group=f"g{number % 50}") for number in range(500)]
    agent = Agent(wrong(500, 5))
    made = Runner(
        agent, EvalSet(id="s", cases=cases), ["exact"], progress="off", parallelism=1,
        stop_when="decided", decide=("pass_rate>=0.8",),
    )  # fmt: skip
    metrics = made.run_sync().typed_metrics
    assert metrics.decided
    assert metrics.decided.rules[0].outcome == "holds"
    assert metrics.counts.not_asked
    groups = [int(case[1:]) % 50 for case in agent.asked]
    blocks = [group for place, group in enumerate(groups) if place == 0 or groups[place - 1] != group]
    assert len(blocks) == len(set(blocks))  # one after another, each whole
