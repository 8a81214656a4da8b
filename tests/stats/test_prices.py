"""Prices, and what an answer costs by them."""

from __future__ import annotations

import asyncio
import builtins
import pickle
import random
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, InvocationResponse, Runner
from steelyard.cache.cached import Cached
from steelyard.engine.retry import Retry, RetryPolicy
from steelyard.errors import ConfigurationError, TargetError, TransientError
from steelyard.journal.replay import Replay
from steelyard.protocols import Identity, InvocationContext, Target
from steelyard.report.summary import cost_lines as lines
from steelyard.run.result import _AsRecorded
from steelyard.stats.metrics import Counts, Metrics
from steelyard.stats.prices import (
    PriceBook,
    Priced,
    Prices,
    Spending,
    check_budget,
    cost_of,
    format_money,
    listed_prices,
    over_budget,
    read_prices,
)
from tests.support.cache import open_store

PRICES = Prices(input=2.0, output=8.0, cached_input=0.5)
SUITE = EvalSet(id="s", cases=[EvalCase(id=f"c{number}", prompt="p") for number in range(4)])


class Scripted:
    """A target that gives, or raises, one thing after another."""

    default_parallelism = 1

    def __init__(self, *replies: Any, model: str | None = "m") -> None:
        self.model_id = model
        self._replies = list(replies)

    def identity(self) -> Identity:
        return {"kind": "scripted"}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply  # type: ignore[no-any-return]


class Endpoint(Scripted):
    """One that is asked over a connection."""

    def __init__(self, endpoint: str, model: str | None = "gpt-4.1") -> None:
        super().__init__(model=model)
        self.endpoint = endpoint

    def check(self) -> None: ...

    async def open(self, parallelism: int) -> None: ...

    async def close(self) -> None: ...


def used(tokens: int | None, output: int | None, cached: int | None = None, **more: Any) -> InvocationResponse:
    return InvocationResponse(
        response_text="a", num_tokens_input=tokens, num_tokens_output=output, num_tokens_input_cached=cached, **more
    )


def ask(target: Target) -> InvocationResponse:
    return asyncio.run(target.invoke(EvalCase(id="c", prompt="p"), InvocationContext("c")))


def test_tokens_cost_by_the_million() -> None:
    assert cost_of(used(1000, 100), PRICES) == 0.0028


def test_tokens_from_the_providers_cache_are_cheaper_and_part_of_the_input() -> None:
    assert cost_of(used(1000, 100, cached=200), PRICES) == 0.0025


def test_without_a_price_for_cached_tokens_they_cost_like_the_rest() -> None:
    assert cost_of(used(1000, 0, cached=1000), Prices(input=2.0, output=8.0)) == 0.002


def test_tokens_written_to_the_providers_cache_have_a_price_of_their_own() -> None:
    answer = used(1000, 100, cached=200, num_tokens_input_cache_write=300)
    dear = Prices(input=2.0, output=8.0, cached_input=0.5, cache_write=2.5)
    assert cost_of(answer, dear) == pytest.approx((500 * 2 + 200 * 0.5 + 300 * 2.5 + 100 * 8) / 1e6)
    assert cost_of(answer, PRICES) == pytest.approx((800 * 2 + 200 * 0.5 + 100 * 8) / 1e6)


def test_more_written_tokens_than_there_are_make_no_negative_cost() -> None:
    prices = Prices(input=2.0, output=8.0, cached_input=0.5, cache_write=2.5)
    assert cost_of(used(10, 0, cached=6, num_tokens_input_cache_write=100), prices) == pytest.approx(13e-6)


def test_a_suite_says_what_writing_to_the_cache_costs() -> None:
    book = read_prices({"input": 2, "output": 8, "cache_write": 0.0025, "per": 1000}, "m")
    assert book.models["m"].cache_write == 2.5
    with pytest.raises(ConfigurationError, match=r"prices.cache_write must be a number at least 0, got 'dear'"):
        read_prices({"input": 2, "output": 8, "cache_write": "dear"}, "m")


def test_more_cached_tokens_than_input_tokens_make_no_negative_cost() -> None:
    assert cost_of(used(10, 0, cached=100), PRICES) == 0.000005


def test_an_answer_without_usage_has_no_known_cost() -> None:
    assert cost_of(used(None, 10), PRICES) is None
    assert cost_of(used(10, None), PRICES) is None


def test_a_cached_answer_costs_nothing_and_a_failed_one_what_it_used() -> None:
    assert cost_of(used(1000, 100, cached=0), PRICES) == 0.0028
    hit = used(1000, 100)
    hit.cached = True
    assert cost_of(hit, PRICES) == 0.0
    assert cost_of(used(1000, 100, error="content filter"), PRICES) == 0.0028


def test_past_a_number_of_input_tokens_all_tokens_cost_more() -> None:
    prices = Prices(input=3, output=15, above=((200_000, Prices(input=6, output=22.5)),))
    assert cost_of(used(200_000, 1000), prices) == 0.615
    assert cost_of(used(200_001, 1000), prices) == 1.222506


@given(
    st.integers(0, 10**7),
    st.integers(0, 10**6),
    st.decimals(0, 500, places=6),
    st.decimals(0, 500, places=6),
)
def test_a_cost_is_right_to_the_last_of_twelve_decimals(
    tokens: int, output: int, price_in: Decimal, price_out: Decimal
) -> None:
    cost = cost_of(used(tokens, output), Prices(input=float(price_in), output=float(price_out)))
    exact = (tokens * price_in + output * price_out) / 1_000_000
    assert cost is not None
    assert abs(Decimal(cost) - exact) <= Decimal("0.5e-12") + exact * Decimal("4e-16")


def test_the_target_is_wrapped_and_says_what_each_answer_cost() -> None:
    heard: list[float | None] = []
    answer = used(1000, 100)
    target = Priced(Scripted(answer, used(1, 1, cost=7.0), used(None, None)), PRICES, heard.append)
    assert [ask(target).cost for _ in range(3)] == [0.0028, 7.0, None]
    assert heard == [0.0028, 7.0, None]
    assert answer.cost is None, "the target's own object is left alone"
    assert (target.model_id, target.default_parallelism, target.identity()) == ("m", 1, {"kind": "scripted"})
    assert isinstance(target, Target)


def test_without_prices_a_judges_calls_are_heard_of_as_unknown() -> None:
    heard: list[float | None] = []
    assert ask(Priced(Scripted(used(1, 1)), None, heard.append)).cost is None
    assert heard == [None]


def test_what_came_before_a_fault_is_priced() -> None:
    fault = TargetError("torn", partial=used(1000, 100))
    with pytest.raises(TargetError) as raised:
        ask(Priced(Scripted(fault), PRICES))
    assert raised.value.partial is not None
    assert raised.value.partial.cost == 0.0028
    with pytest.raises(TargetError):
        ask(Priced(Scripted(TargetError("down")), PRICES))


def test_an_answer_after_a_retry_and_one_from_the_cache_have_their_cost(tmp_path: Path) -> None:
    inner = Scripted(TransientError("busy"), used(1000, 100, stop_reason="stop"))
    retrying = Retry(Priced(inner, PRICES), RetryPolicy(first_wait=0.0))
    target = Cached(retrying, open_store("local", tmp_path), "s")
    assert ask(target).cost == 0.0028
    hit = ask(target)
    assert (hit.cached, hit.cost) == (True, 0.0)


def test_one_set_of_prices_is_for_the_target_and_not_for_a_judge_of_another_model() -> None:
    book = read_prices({"input": 2, "output": 8, "cached_input": 0.5, "currency": "EUR"}, "m")
    assert book.of(Scripted(model="m")) == Prices(input=2.0, output=8.0, cached_input=0.5, currency="EUR")
    assert book.of(Scripted(model="other")) is None
    assert book.currency == "EUR"


def test_prices_may_be_given_for_each_model_and_per_any_number_of_tokens() -> None:
    book = read_prices({"a": {"input": 1, "output": 2}, "b": {"input": 0.003, "output": 0.004, "per": "1_000"}}, "a")
    assert book.of(Scripted(model="a")) == Prices(input=1, output=2)
    found = book.of(Scripted(model="b"))
    assert found is not None
    assert (found.input, found.output) == (3.0, 4.0)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"input": 2}, "prices must say what output tokens cost: prices.output"),
        ({"input": 2, "output": -1}, "prices.output must be a number at least 0, got -1"),
        ({"input": 2, "output": float("nan")}, "prices.output must be a number at least 0, got nan"),
        ({"input": True, "output": 1}, "prices.input must be a number at least 0, got True"),
        ({"input": 2, "output": 1, "per": 0}, "prices.per must be a number above 0, got 0"),
        ({"input": 2, "output": 1, "currency": 3}, "prices.currency must be text, got 3"),
        ({"imput": 2, "output": 1}, "unknown key prices.imput; did you mean 'input'?"),
        ({"m": {"input": 2, "outptu": 1}}, "unknown key prices.m.outptu; did you mean 'output'?"),
        (
            {"a": {"input": 1, "output": 1}, "b": {"input": 1, "output": 1, "currency": "EUR"}},
            "prices must be in one currency, got EUR, USD",
        ),
        ([1], "prices must be a mapping, got [1]"),
    ],
)
def test_bad_prices_are_refused_by_name_and_value(raw: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_prices(raw, "m")
    assert str(raised.value) == message


def test_the_public_list_agrees_with_its_own_arithmetic() -> None:
    """Prices are read from genai-prices once; what they come to is what the package itself would charge."""
    genai_prices = pytest.importorskip("genai_prices")
    for model, endpoint in (
        ("gpt-4.1", "https://api.openai.com:443"),
        ("gpt-4o-mini", "https://api.openai.com"),
        ("claude-sonnet-4-5", "https://api.anthropic.com"),
        ("gemini-2.5-pro", "https://generativelanguage.googleapis.com"),
    ):
        prices = listed_prices(model, endpoint)
        assert prices is not None
        for tokens, read, written, output in (
            (1000, 200, 0, 100),
            (1000, 200, 300, 100),
            (200_000, 0, 0, 5),
            (200_001, 150_000, 50_000, 7777),
            (0, 0, 0, 0),
        ):
            usage = genai_prices.Usage(
                input_tokens=tokens, cache_read_tokens=read, cache_write_tokens=written, output_tokens=output
            )
            charged = genai_prices.calc_price(usage, model, provider_api_url=endpoint).total_price
            cost = cost_of(used(tokens, output, cached=read, num_tokens_input_cache_write=written), prices)
            assert cost == pytest.approx(float(charged), rel=1e-12)


def test_a_model_or_an_endpoint_that_the_list_does_not_know_has_no_price() -> None:
    assert listed_prices("no-such-model", "https://api.openai.com") is None
    assert listed_prices("gpt-4.1", "https://llm.example.com") is None
    assert listed_prices("gpt-4.1", "http://127.0.0.1:8000") is None
    assert listed_prices("sonar", "https://api.perplexity.ai") is None, "it is also paid by the request"


def test_the_list_is_asked_only_for_endpoints_and_only_where_its_currency_fits() -> None:
    openai = Endpoint("https://api.openai.com")
    pytest.importorskip("genai_prices")
    found = PriceBook().of(openai)
    assert found is not None
    assert found.source == "genai-prices: gpt-4.1 at openai"
    assert PriceBook().of(Scripted(model="gpt-4.1")) is None, "nobody knows who is paid"
    assert read_prices({"x": {"input": 1, "output": 1, "currency": "EUR"}}, "m").of(openai) is None


def test_without_the_list_a_price_is_unknown_and_why_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("genai_prices"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("steelyard.stats.prices._has_list", lambda: False)
    target = Endpoint("https://api.openai.com")
    assert PriceBook().of(target) is None
    because = PriceBook().unknown_because(target)
    assert because == "the suite has no `prices` for model 'gpt-4.1', and genai-prices is not installed"
    assert PriceBook().unknown_because(Scripted(model=None)) == "the suite has no `prices` for the target"


def test_the_list_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, steelyard.stats.prices; assert not {'genai_prices', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def spent(*costs: float | None) -> Spending:
    spending = Spending()
    for cost in costs:
        spending.update(InvocationResponse(response_text="a", cost=cost))
    return spending


def test_a_budget_is_used_up_when_what_was_spent_reaches_it() -> None:
    assert over_budget(spent(1.0, 1.49), 2.5) is None
    assert over_budget(spent(1.0, 1.5), 2.5) == "2.50 USD spent: max_cost is 2.5"


def test_calls_under_way_count_by_the_average_so_that_little_is_overspent() -> None:
    assert over_budget(spent(0.25, 0.25), 2.5, in_flight=7) is None
    reason = over_budget(spent(0.25, 0.25), 2.5, in_flight=8)
    assert reason == "0.50 USD spent, with 8 in flight: max_cost is 2.5"


def test_a_budget_counts_judges_too() -> None:
    spending = spent(1.0)
    spending.update_judge(2.0)
    assert over_budget(spending, 3.0) is not None


def test_a_budget_that_cannot_be_kept_stops_the_run() -> None:
    reason = over_budget(spent(None, None), 2.5)
    assert reason == "max_cost 2.5 cannot be kept: no answer has a known cost (2 so far)"
    assert over_budget(spent(None, 0.1), 2.5) is None


def test_a_budget_for_an_endpoint_without_prices_is_refused_before_anything_is_asked() -> None:
    here = Endpoint("http://127.0.0.1:8000", model="m")
    with pytest.raises(ConfigurationError, match=r"max_cost 2.5 cannot be kept: the suite has no `prices` for model"):
        check_budget(2.5, here, PriceBook())
    check_budget(2.5, here, read_prices({"input": 1, "output": 1}, "m"))
    check_budget(2.5, Scripted(model=None), PriceBook())


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
