"""A sweep has one budget: its levels, their judges and whatever was measured twice are paid from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard import CancellationToken, EvalCase, EvalSet, InvocationResponse, Runner
from steelyard.errors import ConfigurationError
from steelyard.load.sweep import Sweep, SweepResult
from steelyard.run.rescore import StoredAnswers
from steelyard.scoring import Judge
from steelyard.stats import client_load

CENT = {"input": 10_000.0, "output": 0.0}
"""A cent a token of input."""
VERDICT = json.dumps({"reason": "r", "score": 1.0, "passed": True})
SUITE = EvalSet(id="s", cases=[EvalCase(id=f"c{number}", prompt="p", expected="a") for number in range(4)])


@pytest.fixture(autouse=True)
def a_client_with_time_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine is busy with is not what these tests are about."""
    monkeypatch.setattr(client_load, "MIN_SECONDS", float("inf"))


class Paid:
    """A target or a judge's model whose every answer costs a cent, and that cancels `ends` at call `at`."""

    default_parallelism = 1

    def __init__(
        self, model: str = "m", text: str = "a", *, ends: CancellationToken | None = None, at: int = 0
    ) -> None:
        self.model_id, self.text, self.ends, self.at = model, text, ends, at
        self.calls = 0

    def identity(self) -> dict[str, Any]:
        return {"kind": "paid", "model": self.model_id}

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        self.calls += 1
        if self.ends is not None and self.calls == self.at:
            self.ends.cancel("enough")
        return InvocationResponse(response_text=self.text, num_tokens_input=1, num_tokens_output=0)


def sweep(
    target: Paid,
    path: Path,
    *judges: Paid,
    levels: tuple[int, ...] = (1, 2),
    max_cost: float | None = None,
    token: CancellationToken | None = None,
) -> SweepResult:
    """Twenty requests a level: twenty cents."""
    scorers = [Judge(model=judge.model_id, target=judge) for judge in judges]
    prices = {"m": CENT, "j": CENT}
    runner = Runner(target, SUITE, scorers, progress="off", prices=prices, max_cost=max_cost)
    return Sweep(runner, levels=levels, requests=20, output_path=path, token=token).run_sync()


def test_the_budget_is_for_all_levels_together(tmp_path: Path) -> None:
    target = Paid()
    result = sweep(target, tmp_path, max_cost=0.3)
    assert not result.complete
    assert [level.level for level in result.levels] == [1]
    assert target.calls in (30, 31)  # two at a time: one more may be under way
    assert result.stopped == f"0.{target.calls} USD spent in the whole sweep: max_cost is 0.3"
    assert result.cost == pytest.approx(target.calls / 100)


def test_a_spent_budget_asks_nothing_more_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    target = Paid()
    assert not sweep(target, tmp_path, max_cost=0.2).complete
    assert target.calls == 20
    assert not sweep(target, tmp_path, max_cost=0.2).complete
    assert target.calls == 20
    result = sweep(target, tmp_path, max_cost=1.0)
    assert result.complete
    assert (target.calls, result.cost) == (40, pytest.approx(0.4))


def test_a_level_that_was_broken_off_is_on_the_bill(tmp_path: Path) -> None:
    token = CancellationToken()
    first = Paid(ends=token, at=11)
    sweep(first, tmp_path, levels=(1,), token=token)
    again = Paid()
    result = sweep(again, tmp_path, levels=(1,), max_cost=0.25)
    assert not result.complete
    assert again.calls == 14  # eleven are paid for
    result = sweep(again, tmp_path, levels=(1,), max_cost=0.5)
    assert result.complete
    assert result.cost == pytest.approx(0.11 + 0.14 + 0.2)


def test_judges_are_paid_from_it_and_answers_only_once(tmp_path: Path) -> None:
    target, judge = Paid(), Paid("j", VERDICT)
    result = sweep(target, tmp_path, judge, levels=(1,), max_cost=0.41)
    assert result.complete
    assert (target.calls, judge.calls, result.cost) == (20, 20, pytest.approx(0.4))


def test_judging_that_stops_for_the_budget_goes_on_with_a_larger_one(tmp_path: Path) -> None:
    target, judge = Paid(), Paid("j", VERDICT)
    stopped = sweep(target, tmp_path, judge, levels=(1,), max_cost=0.25)
    assert (stopped.complete, judge.calls) == (False, 5)
    assert "in the whole sweep: max_cost is 0.25" in (stopped.stopped or "")
    stopped = sweep(target, tmp_path, judge, levels=(1,), max_cost=0.3)
    assert (stopped.complete, judge.calls) == (False, 10)
    result = sweep(target, tmp_path, judge, levels=(1,), max_cost=0.5)
    assert (result.complete, judge.calls, target.calls, result.cost) == (True, 20, 20, pytest.approx(0.4))


def test_force_begins_a_bill_of_its_own(tmp_path: Path) -> None:
    target = Paid()
    sweep(target, tmp_path, levels=(1,))
    runner = Runner(target, SUITE, progress="off", prices={"m": CENT}, max_cost=0.3)
    result = Sweep(runner, levels=[1], requests=20, output_path=tmp_path).run_sync(force=True)
    assert (result.complete, result.cost) == (True, pytest.approx(0.2))


def test_the_cost_is_in_sweep_json_and_is_unknown_without_prices(tmp_path: Path) -> None:
    sweep(Paid(), tmp_path / "a", levels=(1,))
    found = json.loads((tmp_path / "a" / "sweep.json").read_bytes())
    assert (found["cost"], found["currency"]) == (pytest.approx(0.2), "USD")
    runner = Runner(Paid(), SUITE, progress="off")
    assert Sweep(runner, levels=[1], requests=9, output_path=tmp_path / "b").run_sync().cost is None


def test_a_budget_must_be_above_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_cost must be a number above 0, got 0"):
        sweep(Paid(), tmp_path, max_cost=0)


def test_answers_that_are_only_scored_again_do_not_use_up_a_budget(tmp_path: Path) -> None:
    Runner(Paid(), SUITE, progress="off", prices={"m": CENT}, output_path=tmp_path / "r").run_sync()
    judge = Paid("j", VERDICT)
    runner = Runner(
        StoredAnswers(tmp_path / "r"),
        SUITE,
        [Judge(model="j", target=judge)],
        progress="off",
        prices={"j": CENT},
        parallelism=1,
        max_cost=0.035,
        scored_from="r",
    )
    result = runner.run_sync()
    assert judge.calls == 4
    assert result.metrics["cost_judges"] == pytest.approx(0.04)
