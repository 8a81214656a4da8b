"""A run from prices to bill: what it says it cost, after a resume too, and where it stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Result, Runner
from steelyard.engine.retry import RetryPolicy
from steelyard.errors import ConfigurationError, TransientError
from steelyard.report.summary import summary
from steelyard.scoring import Judge
from steelyard.targets import OpenAIChat
from tests.support.cli import Workshop, run_cli
from tests.support.metrics import typed

PRICES = {"m": {"input": 2.0, "output": 8.0}, "j": {"input": 1.0, "output": 1.0}}
SUITE = EvalSet(id="s", cases=[EvalCase(id=f"c{number}", prompt="p", expected="a") for number in range(20)])


class Model:
    """A target whose every answer uses a thousand tokens, a hundred of them output."""

    default_parallelism = 1

    def __init__(self, model: str = "m", text: str = "a", fails: tuple[str, ...] = ()) -> None:
        self.model_id, self.text, self.fails = model, text, fails
        self.asked: list[str] = []

    def identity(self) -> dict[str, Any]:
        return {"kind": "model", "model": self.model_id}

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        self.asked.append(case.id)
        error = "cut off" if case.id in self.fails else None
        return InvocationResponse(response_text=self.text, num_tokens_input=900, num_tokens_output=100, error=error)


EACH = 0.0026
VERDICT = json.dumps({"reason": "r", "score": 1.0, "passed": True})


def judge() -> Judge:
    return Judge(model="j", target=Model("j", VERDICT))


def run(target: Any, scorers: Any = (), **options: Any) -> Result:
    return Runner(target, SUITE, scorers, progress="off", prices=PRICES, **options).run_sync()


def test_a_run_says_what_it_cost_and_its_judges_apart() -> None:
    metrics = run(Model(), [judge()]).metrics
    assert (metrics["cost_answers"], metrics["cost_judges"], metrics["cost"]) == (20 * EACH, 0.02, 0.072)
    assert metrics["cost_per_1000_cases"] == 3.6
    assert "  cost 0.072 USD: 3.60 USD per 1,000 cases, 0.0036 USD per passed case\n    of it judges 0.02" in summary(
        typed(metrics)
    )


def test_after_a_resume_the_bill_is_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = run(Model(), [judge()]).metrics
    place = tmp_path / "r"
    run(Model(), [judge()], output_path=place)
    lines = (place / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    (place / "outputs.jsonl").write_bytes(b"".join(lines[:7]))
    (place / "metrics.json").unlink()
    assert Result.load(place).metrics["cost_judges"] == 0.02
    resumed = run(Model(), [judge()], output_path=place).metrics
    named = [name for name in whole if name.startswith("cost")]
    assert {name: resumed[name] for name in named} == {name: whole[name] for name in named}


def test_a_superseded_error_leaves_the_counts_and_its_cost_stays(tmp_path: Path) -> None:
    run(Model(fails=("c3",)), output_path=tmp_path / "r")
    runner = Runner(Model(), SUITE, progress="off", prices=PRICES, output_path=tmp_path / "r")
    metrics = runner.run_sync(retry_errors=True).metrics
    assert metrics["counts"]["error"] == 0
    assert (metrics["cost_answers"], metrics["cost_errors"]) == (20 * EACH, EACH)


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_tries_that_failed_with_their_usage_told_are_on_the_bill_each_once(failing: int) -> None:
    class Torn(Model):
        async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
            whole = await super().invoke(case, context)
            if context.attempt <= failing:
                raise TransientError("torn", partial=whole, retry_after=0.0)
            return whole

    suite = EvalSet(id="s", cases=[EvalCase(id="c0", prompt="p")])
    with patch.object(RetryPolicy, "wait_before", return_value=0.0):
        result = Runner(Torn(), suite, progress="off", prices=PRICES).run_sync()
    tries = min(failing + 1, 5)
    assert result.responses[0].cost == pytest.approx(tries * EACH)
    assert result.metrics["cost"] == pytest.approx(tries * EACH)


def test_a_budget_is_refused_when_the_price_of_a_judge_is_not_known() -> None:
    asked = Model()
    paid = OpenAIChat("never-heard-of", base_url="https://llm.example.com/v1", api_key="k" * 20)
    with pytest.raises(ConfigurationError, match=r"max_cost 1 cannot be kept: .*never-heard-of"):
        run(asked, [Judge(model="never-heard-of", target=paid)], max_cost=1.0)
    assert asked.asked == []


def test_a_judge_on_ones_own_machine_needs_no_price_for_a_budget() -> None:
    free = OpenAIChat("local", base_url="http://127.0.0.1:9/v1")
    assert run(Model(), [Judge(model="local", target=free, when="failed"), "exact"], max_cost=1.0).complete


def test_the_budget_stops_the_run_politely_and_more_of_it_goes_on(tmp_path: Path) -> None:
    target = Model()
    stopped = run(target, output_path=tmp_path / "r", max_cost=5 * EACH)
    assert (len(target.asked), stopped.complete, stopped.metrics["n"]) == (5, False, 5)
    assert stopped.metrics["stopped"] == "0.013 USD spent: max_cost is 0.013"
    assert run(target, output_path=tmp_path / "r", max_cost=5 * EACH).metrics["n"] == 5
    assert run(target, output_path=tmp_path / "r", max_cost=1.0).complete
    assert sorted(target.asked) == sorted(case.id for case in SUITE)


def test_calls_in_flight_when_the_budget_is_used_up_are_kept(tmp_path: Path) -> None:
    target = Model()
    metrics = run(target, output_path=tmp_path / "r", max_cost=5 * EACH, parallelism=4).metrics
    assert metrics["n"] == len(target.asked)
    assert metrics["counts"]["cancelled"] == 0
    assert metrics["cost"] <= (5 + 4) * EACH


def test_cached_answers_cost_nothing(tmp_path: Path) -> None:
    run(Model(), cache=tmp_path / "cache")
    again = run(Model(), cache=tmp_path / "cache").metrics
    assert (again["cached"], again["cost"]) == (20, 0.0)


def test_the_commands_stop_at_max_cost_with_exit_4(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.suite(target={"simulated": {"latency": 0, "tokens_per_second": 0}}, prices={"input": 1000.0, "output": 1000.0})
    ended = run_cli(
        shop.folder, "run", "suite.yaml", "--out", "RUN", "--max-cost", "0.00001", "--no-progress", "-j", "1"
    )
    assert ended.code == 4
    assert "max_cost is 1e-05" in ended.out
    assert "resume with a larger --max-cost: steelyard run suite.yaml --out RUN" in ended.err
    assert "cost" in ended.out
