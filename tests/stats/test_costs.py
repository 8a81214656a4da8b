"""What a run has spent: exact sums, whatever the order, and nothing unknown taken for nothing."""

from __future__ import annotations

import pickle
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, InvocationResponse, Runner
from steelyard.journal.replay import Replay
from steelyard.report.summary import cost_lines as lines
from steelyard.run.result import _AsRecorded
from steelyard.stats.costs import Spending, format_money
from steelyard.stats.metrics import Counts, Metrics

SUITE = EvalSet(id="s", cases=[EvalCase(id=f"c{number}", prompt="p") for number in range(4)])


def response(**fields: Any) -> InvocationResponse:
    return InvocationResponse(response_text="a", **fields)


@pytest.mark.slow
def test_a_million_costs_add_up_to_the_last_digit() -> None:
    """Floats would not: summed one by one, they are off from the seventh digit behind the point on."""
    rng = random.Random(7)
    costs = [Decimal(rng.randrange(1, 10**9)).scaleb(-12) for _ in range(1_000_000)]
    spending, naive = Spending(), 0.0
    answer = response()
    for cost in costs:
        answer.cost = float(cost)
        spending.update(answer)
        naive += float(cost)
    exact = float(sum(costs))
    assert spending.total == exact
    assert naive != exact


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=30), st.randoms(use_true_random=False))
def test_the_order_of_calls_and_where_they_were_counted_do_not_show(
    calls: list[tuple[float, bool]], shuffle: random.Random
) -> None:
    def counted(some: list[tuple[float, bool]]) -> Spending:
        spending = Spending()
        for cost, failed in some:
            spending.update(response(cost=cost, error="e" if failed else None))
            spending.update_judge(cost)
        return spending

    whole = counted(calls)
    shuffle.shuffle(calls)
    cut = len(calls) // 2
    parts = counted(calls[:cut])
    parts.merge(pickle.loads(pickle.dumps(counted(calls[cut:]))))
    assert vars(parts) == vars(whole)


def test_answers_failed_calls_and_judges_are_counted_apart() -> None:
    spending = Spending()
    spending.update(response(cost=1.0))
    spending.update(response(cost=0.25, error="torn"))
    spending.update_judge(0.5)
    assert (spending.answers, spending.errors, spending.judges, spending.total) == (1.0, 0.25, 0.5, 1.75)
    metrics = spending.to_metrics(n=2, passed=1)
    assert (metrics["cost"], metrics["cost_judges"]) == (1.75, 0.5)
    assert (metrics["cost_per_1000_cases"], metrics["cost_per_passed_case"]) == (875.0, 1.75)


def test_what_is_not_known_is_counted_and_never_nothing() -> None:
    spending = Spending()
    for cost in (None, float("nan"), float("inf"), -1.0, 1e12):
        spending.update(response(cost=cost))
    spending.update(InvocationResponse(error="down"))
    spending.update_judge(None)
    metrics = spending.to_metrics(n=6, passed=0)
    assert metrics["cost"] is None
    assert metrics["cost_per_1000_cases"] is None
    assert (metrics["cost_unknown"], metrics["cost_unknown_errors"], metrics["cost_unknown_judges"]) == (5, 1, 1)


def test_an_answer_from_the_cache_costs_nothing_whatever_it_cost_then() -> None:
    spending = Spending()
    spending.update(response(cost=3.0, cached=True))
    spending.update(response(cached=True))
    assert spending.to_metrics(n=2, passed=2)["cost"] == 0.0
    assert spending.unknown == 0


def test_costs_by_estimated_tokens_are_marked() -> None:
    spending = Spending()
    spending.update(response(cost=1.0, tokens_estimated=True))
    spending.update(response(cost=1.0))
    assert spending.to_metrics(n=2, passed=0)["cost_estimated"] == 1


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(0, "0.00 USD"), (0.000042, "0.000042 USD"), (0.0123, "0.012 USD"), (0.5, "0.50 USD"), (1234.5, "1,234.50 USD")],
)
def test_money_is_shown_to_the_cent_or_to_two_digits(amount: float, shown: str) -> None:
    assert format_money(amount, "USD") == shown


def priced(case: EvalCase) -> InvocationResponse:
    failing = case.id == "c1" and case.metadata.get("failing", True) and priced.failing
    return InvocationResponse(response_text="a", cost=0.5, error="torn" if failing else None)


priced.failing = True  # type: ignore[attr-defined]


def replayed(run: Path) -> Spending:
    slots = _AsRecorded(1)
    replay = Replay(run, slots, slots.states)
    replay.read()
    return replay.spending


def test_an_error_that_was_asked_again_stays_paid_for(tmp_path: Path) -> None:
    """Superseded errors leave the counts, their cost stays; the answers in their place are added once."""
    runner = Runner(priced, SUITE, output_path=tmp_path / "r", progress="off")
    priced.failing = True  # type: ignore[attr-defined]
    runner.run_sync()
    assert (replayed(tmp_path / "r").answers, replayed(tmp_path / "r").errors) == (1.5, 0.5)
    priced.failing = False  # type: ignore[attr-defined]
    runner.run_sync(retry_errors=True)
    spent = replayed(tmp_path / "r")
    assert (spent.answers, spent.errors, spent.total) == (2.0, 0.5, 2.5)


def test_an_error_of_unknown_cost_leaves_the_counts_when_it_is_asked_again(tmp_path: Path) -> None:
    def answer(case: EvalCase) -> InvocationResponse:
        if failing:
            raise ValueError("down")
        return InvocationResponse(response_text="a", cost=0.5)

    runner = Runner(answer, SUITE, output_path=tmp_path / "r", progress="off")
    failing = True
    runner.run_sync()
    failing = False
    runner.run_sync(retry_errors=True)
    assert (replayed(tmp_path / "r").unknown_errors, replayed(tmp_path / "r").total) == (0, 2.0)


def test_an_answer_that_was_scored_again_is_paid_for_once(tmp_path: Path) -> None:
    run = tmp_path / "r"
    priced.failing = False  # type: ignore[attr-defined]
    Runner(priced, SUITE, output_path=run, progress="off").run_sync()
    (run / "metrics.json").unlink()
    Runner(priced, SUITE, [lambda case, response: 1.0], output_path=run, progress="off").run_sync()
    assert len((run / "outputs.jsonl").read_bytes().splitlines()) == 8
    assert replayed(run).total == 2.0


def metrics(spending: Spending | None = None, **more: Any) -> Metrics:
    counts = Counts(planned=10, ok=10, error=0, cancelled=0, not_started=0)
    costs = {} if spending is None else spending.to_metrics(n=10, passed=5)
    return Metrics(suite="s", n=10, counts=counts, scoring_errors=0, errors={}, scores={}, stats={}, **costs, **more)


def test_the_report_says_cost_per_run_per_thousand_and_per_passed_case() -> None:
    spending = Spending("EUR")
    spending.update(response(cost=2.0))
    assert lines(metrics(spending)) == ["  cost 2.00 EUR: 200.00 EUR per 1,000 cases, 0.40 EUR per passed case"]


def test_the_report_says_what_is_in_the_cost_and_what_is_not() -> None:
    spending = Spending()
    spending.update(response(cost=2.0, tokens_estimated=True))
    spending.update(response(cost=0.5, error="torn"))
    spending.update(response())
    spending.update_judge(1.5)
    spending.update_judge(None)
    assert lines(metrics(spending))[1:] == [
        "    of it judges 1.50 USD, failed calls 0.50 USD",
        "    not in it, as their cost is unknown: 1 answer, 1 call of judges",
        "    by an estimated number of tokens: 1 answer",
    ]


def test_the_report_says_plainly_that_the_cost_is_unknown_where_a_price_was_expected() -> None:
    spending = Spending(unknown_because="the suite has no `prices` for model 'm'")
    spending.update(response())
    assert lines(metrics(spending)) == ["  cost unknown: the suite has no `prices` for model 'm'"]
    silent = Spending()
    silent.update(response())
    assert lines(metrics(silent)) == []
    assert lines(metrics()) == []


def test_answers_that_are_only_scored_again_are_said_to_have_cost_then() -> None:
    spending = Spending()
    spending.update(response(cost=2.0))
    spending.update_judge(0.25)
    assert lines(metrics(spending, scored_from="runs/a")) == [
        "  the answers cost 2.00 USD back then; judges now 0.25 USD"
    ]
