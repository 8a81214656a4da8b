"""Rules on the figures of a run: how they are written, what they may name, and when they are broken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, Runner
from steelyard.errors import ConfigurationError
from steelyard.report.rules import Checked, Leave, check_rule, figures, parse_rule


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    """Ten cases in two trials each; the odd ones fail, and case 9 raises."""

    def answer(case: EvalCase) -> str:
        if case.id == "9":
            raise ValueError("no")
        return "even" if int(case.id) % 2 == 0 else "odd"

    cases = [EvalCase(id=str(number), prompt="?", expected="even") for number in range(10)]
    return Runner(answer, EvalSet("s", cases), ["exact"], trials=2, progress="off").run_sync().metrics


def checked(rule: str, metrics: dict[str, Any], **leave: bool) -> Checked:
    return check_rule(parse_rule(rule), metrics, figures(metrics), Leave(**leave))


@pytest.mark.parametrize(
    ("rule", "ok"),
    [
        ("pass_rate>=0.5", True),
        ("pass_rate >= 60%", False),
        ("pass_rate.ci_low>0.1", True),
        ("pass_rate.ci_high<=1", True),
        ("error_rate==0.1", True),
        ("failure_rate<=10%", True),
        ("n==20", True),
        ("n!=20", False),
        ("counts.error<2", False),
        ("errors.ValueError==2", True),
        ("errors.TimeoutError==0", True),
        ("score.exact.mean>0.5", True),
        ("scores.exact.mean>0.5", True),
        ("score.exact.ci_low>=0.75", False),
        ("score.exact.pass_rate.ci_high<0.9", True),
        ("time_to_last_token-p99<1s", True),
        ("time_to_last_token-p99<1us", False),
        ("time_to_last_token-p50<60000ms", True),
        ("trials.flaky==0", True),
        ("trials.pass_at_k.2>=0.5", True),
        ("trials.score.exact.mean>=.5", True),
        ("requests_per_minute>1e0", True),
        ("total_requests<=1_000", True),
    ],
)
def test_a_rule_may_name_any_figure(rule: str, ok: bool, metrics: dict[str, Any]) -> None:
    found = checked(rule, metrics, client_bottleneck=True)
    assert found.ok is ok, found


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "pass_rate",
        "pass_rate>",
        ">=0.8",
        "pass_rate=0.8",
        "pass_rate>=high",
        "n<5 apples",
        "n<nan",
    ],
)
def test_what_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(ConfigurationError, match="a rule is a metric"):
        parse_rule(rule)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("pass_rate>=80ms", "pass_rate is not a time"),
        ("cost<5%", "cost is not a share"),
        ("time_to_first_token-p99<5%", "is not a share"),
    ],
)
def test_a_unit_must_fit_its_metric(rule: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse_rule(rule)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("pass_rat>=0.8", "did you mean 'pass_rate'?"),
        ("score.exat.mean>0", "did you mean 'score.exact.mean'?"),
        ("time_to_first_token-p98<1", "did you mean 'time_to_first_token-p9"),
        ("pass_rate=>0.8", "did you mean 'pass_rate'?"),
        ("xyzzy>0", "steelyard report RUN -f json shows them all"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(rule: str, named: str, metrics: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="no metric of this run is named") as refused:
        checked(rule, metrics)
    assert named in str(refused.value)


def test_a_figure_that_is_not_known_breaks_its_rule(metrics: dict[str, Any]) -> None:
    found = checked("cost<2", metrics)
    assert (found.ok, found.value, found.reason) == (False, None, "is not known: there was nothing to measure")
    unpriced = {**metrics, "cost": None, "cost_unknown_because": "the suite has no prices"}
    assert checked("cost<2", unpriced).reason == "is not known: the suite has no prices"
    assert not checked("pass_rate!=1", {**metrics, "pass_rate": None}).ok


def test_an_advisory_judge_cannot_pass_a_gate(metrics: dict[str, Any]) -> None:
    score = {**metrics["scores"]["exact"], "advisory": True}
    advisory = {**metrics, "scores": {"exact": score}}
    for rule in ("score.exact.mean>0", "trials.score.exact.mean>0"):
        found = checked(rule, advisory)
        assert not found.ok
        assert "advisory" in found.reason
    assert checked("pass_rate>0", advisory).ok


@pytest.mark.parametrize("rule", ["time_to_last_token-p99<9s", "requests_per_minute>0", "p50_latency_s<9"])
def test_times_of_a_client_that_was_the_bottleneck_break_their_rules(rule: str, metrics: dict[str, Any]) -> None:
    busy = {**metrics, "client": {"bottleneck": True, "reason": "its event loop was busy 97 % of the time"}}
    found = checked(rule, busy)
    assert not found.ok
    assert "the client was the bottleneck: its event loop was busy 97 %" in found.reason
    assert checked(rule, busy, client_bottleneck=True).ok
    assert checked("pass_rate>0", busy).ok


def test_a_broken_rule_says_the_value_in_its_own_unit(metrics: dict[str, Any]) -> None:
    assert checked("pass_rate>=80%", metrics).reason.startswith("is 55.5")
    assert checked("n<5", metrics).reason == "is 20"
    slow = {**metrics, "stats": {**metrics["stats"], "time_to_first_token-p99": 0.6123}}
    assert checked("time_to_first_token-p99<500ms", slow, client_bottleneck=True).reason == "is 612.3 ms"


@given(st.text(min_size=1, max_size=20), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), st.integers(0, 10**6))
def test_a_score_may_have_any_name(name: str, operator: str, limit: int) -> None:
    rule = parse_rule(f"score.{name}.mean{operator}{limit}")
    assert (rule.name, rule.operator, rule.limit) == (f"score.{name}.mean", operator, limit)
