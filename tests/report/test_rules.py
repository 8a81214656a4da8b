"""Rules on the figures of a run: how they are written, what they may name, and when they are broken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, Runner
from steelyard.errors import ConfigurationError
from steelyard.report.rules import Checked, check_rule, parse_rule
from steelyard.stats.intervals import clopper_pearson
from steelyard.stats.metrics import figures
from tests.support.metrics import typed


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    """Ten cases in two trials each; the odd ones fail, and case 9 raises."""

    def answer(case: EvalCase) -> str:
        if case.id == "9":
            raise ValueError("no")
        return "even" if int(case.id) % 2 == 0 else "odd"

    cases = [EvalCase(id=str(number), prompt="?", expected="even") for number in range(10)]
    return Runner(answer, EvalSet("s", cases), ["exact"], trials=2, progress="off").run_sync().metrics


def checked(rule: str, metrics: dict[str, Any], *allowed: str) -> Checked:
    found = typed(metrics)
    return check_rule(parse_rule(rule), found, figures(found), allowed)


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
        ("error_kinds.HTTP 429==0", True),
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
        ("score.exact.n>=27", False),
        ("latency_p99<1s", True),
        ("ttlt_p50 < 1us", False),
        ("TTLT_max<1m", True),
        ("time_to_last_token_avg<1min", True),
        ("ttlt-p99<1", True),
    ],
)
def test_a_rule_may_name_any_figure(rule: str, ok: bool, metrics: dict[str, Any]) -> None:
    found = checked(rule, metrics, "client-bottleneck")
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
        ("ttft_p99<5%", "is not a share"),
        ("latncy_p99<5s", "did you mean 'latency_p99'?"),
    ],
)
def test_a_unit_must_fit_its_metric(rule: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse_rule(rule)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("ttft<1s", "ttft needs an aggregate, such as ttft_p99"),
        ("time_to_last_token<1", "time_to_last_token needs an aggregate"),
        ("ttlt_p98<1s", "no aggregate 'p98'; did you mean 'p9"),
        ("time_to_first_token-p97<1", "no aggregate 'p97'; did you mean 'p9"),
        ("pass_rate>0.5,error_rate<1%", "more than one rule"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_run_is_looked_at(rule: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse_rule(rule)


@pytest.mark.parametrize(
    ("rule", "meant"),
    [
        ("error_rate<5", "5%"),
        ("pass_rate>=80", "80%"),
        ("pass_rate.ci_low>=80", "80%"),
        ("failure_rate<=1.5", "1.5%"),
        ("score.exact.mean>=75", "75%"),
        ("score.exact.ci_low>=75", "75%"),
        ("trials.pass_hat_k.3>=50", "50%"),
    ],
)
def test_a_share_above_1_would_hold_always_or_never_and_is_refused(rule: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=f"a share above 1; did you mean {meant}?"):
        parse_rule(rule)
    with pytest.raises(ConfigurationError, match="a share above 1"):
        parse_rule("pass_rate>=101%")


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("pass_rat>=0.8", "did you mean 'pass_rate'?"),
        ("score.exat.mean>0", "did you mean 'score.exact.mean'?"),
        ("pass_rate=>0.8", "did you mean 'pass_rate'?"),
        ("xyzzy>0", "steelyard report RUN -f json shows them all"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(rule: str, named: str, metrics: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="no metric of this run is named") as refused:
        checked(rule, metrics)
    assert named in str(refused.value)


def test_a_figure_that_is_not_known_breaks_its_rule(metrics: dict[str, Any]) -> None:
    found = checked("pass_rate!=1", {**metrics, "pass_rate": None})
    assert (found.ok, found.value, found.reason) == (False, None, "is not known: there was nothing to measure")


def test_a_rule_on_a_cost_that_nobody_knows_says_how_to_get_one(metrics: dict[str, Any]) -> None:
    help_ = "; give the suite `prices`, or pip install 'steelyard[prices]' for a list of public ones"
    found = checked("cost<2", metrics)
    assert (found.ok, found.value) == (False, None)
    assert found.reason == f"is not known: no call has a known cost{help_}"
    assert checked("cost_per_passed_case<2", metrics).reason == found.reason
    unpriced = {**metrics, "cost_unknown_because": "the suite has no `prices` for model 'm'"}
    assert checked("cost<2", unpriced).reason == f"is not known: the suite has no `prices` for model 'm'{help_}"
    none_passed = {**metrics, "cost": 1.0}
    assert checked("cost_per_passed_case<2", none_passed).reason == "is not known: there was nothing to measure"


def test_a_run_from_before_there_were_costs_has_none_that_is_known(metrics: dict[str, Any]) -> None:
    old = {key: value for key, value in metrics.items() if not key.startswith("cost")}
    assert "no call has a known cost" in checked("cost<2", old).reason


def test_a_cost_of_which_a_part_is_not_known_cannot_be_below_a_limit(metrics: dict[str, Any]) -> None:
    partly = {**metrics, "cost": 1.5, "cost_unknown": 3, "cost_unknown_judges": 2}
    found = checked("cost<2", partly)
    assert not found.ok
    assert found.reason == "is 1.5 or more: the cost of 3 answers and 2 calls of judges is not known"
    assert checked("cost>1", partly).ok
    assert not checked("cost>2", partly).ok
    assert checked("cost<2", {**partly, "cost_unknown": 0, "cost_unknown_judges": 0}).ok


def test_the_interval_of_a_score_is_that_over_cases_where_each_was_tried_several_times(metrics: dict[str, Any]) -> None:
    """Trials of one case are no new evidence about others: as records they would make it look more certain."""
    known = figures(typed(metrics))
    low, high = metrics["trials"]["scores"]["exact"]["mean_ci95"]
    assert (known["score.exact.ci_low"], known["score.exact.ci_high"]) == (low, high)
    assert (known["score.exact.mean.ci_low"], known["score.exact.mean.ci_high"]) == (low, high)
    assert (known["score.exact.pass_rate.ci_low"], known["score.exact.pass_rate.ci_high"]) == clopper_pearson(5, 9)


def test_texts_are_no_figures_even_where_there_are_none(metrics: dict[str, Any]) -> None:
    assert {"stopped", "model_id", "cost_unknown_because", "currency", "client.reason"}.isdisjoint(
        figures(typed(metrics))
    )


def test_an_advisory_judge_cannot_pass_a_gate(metrics: dict[str, Any]) -> None:
    score = {**metrics["scores"]["exact"], "advisory": True}
    advisory = {**metrics, "scores": {"exact": score}}
    for rule in ("score.exact.mean>0", "trials.score.exact.mean>0"):
        found = checked(rule, advisory)
        assert not found.ok
        assert "advisory" in found.reason
    assert checked("pass_rate>0", advisory).ok


@pytest.mark.parametrize("rule", ["time_to_last_token-p99<9s", "latency_p99<=9s", "p50_latency_s<9"])
def test_a_time_below_its_limit_is_below_it_although_the_client_was_late(rule: str, metrics: dict[str, Any]) -> None:
    """Lag only adds: what was measured late and is still fast enough was faster."""
    client = {**metrics["client"], "bottleneck": True, "reason": "its event loop was busy 97% of the time"}
    busy = {**metrics, "client": client}
    found = checked(rule, busy)
    assert found.ok
    assert found.reason.endswith(" although the client was late, which can only add to it")
    above = checked(rule.replace("9s", "1us").replace("<9", "<0.000001"), busy)
    assert not above.ok
    assert "says nothing of the target" in above.reason


@pytest.mark.parametrize(
    "rule", ["time_to_last_token-p99>0", "time_to_last_token-p99>=0s", "requests_per_minute>0", "p50_latency_s!=9"]
)
def test_times_of_a_client_that_was_the_bottleneck_break_their_rules(rule: str, metrics: dict[str, Any]) -> None:
    client = {**metrics["client"], "bottleneck": True, "reason": "its event loop was busy 97% of the time"}
    busy = {**metrics, "client": client}
    found = checked(rule, busy)
    assert not found.ok
    assert "the client was the bottleneck: its event loop was busy 97%" in found.reason
    assert checked(rule, busy, "client-bottleneck").ok
    assert checked("pass_rate>0", busy).ok


@pytest.mark.parametrize("percent", range(101))
def test_a_limit_in_percent_is_met_by_just_that_share(percent: int, metrics: dict[str, Any]) -> None:
    """70 × 0.01 is a little more than 0.7 in floating point: a pass rate of 70 % would not be at least 70 %."""
    rate = {**metrics, "pass_rate": percent / 100}
    assert checked(f"pass_rate>={percent}%", rate).ok
    assert checked(f"pass_rate=={percent}%", rate).ok
    assert parse_rule(f"ttft_p99<{percent}ms").limit == percent / 1000


def test_a_broken_rule_shows_enough_digits_to_tell_the_value_from_the_limit(metrics: dict[str, Any]) -> None:
    assert checked("pass_rate>=0.8", {**metrics, "pass_rate": 0.79999}).reason == "is 0.79999"
    assert checked("pass_rate>=80%", {**metrics, "pass_rate": 0.79999}).reason == "is 79.999%"
    assert checked("pass_rate!=0.8", {**metrics, "pass_rate": 0.8}).reason == "is 0.8"


def test_a_broken_rule_says_the_value_in_its_own_unit(metrics: dict[str, Any]) -> None:
    assert checked("pass_rate>=80%", metrics).reason.startswith("is 55.5")
    assert checked("n<5", metrics).reason == "is 20"
    slow = {**metrics, "stats": {**metrics["stats"], "time_to_first_token-p99": 0.6123}}
    assert checked("time_to_first_token-p99<500ms", slow, "client-bottleneck").reason == "is 612.3 ms"


@given(st.text(min_size=1, max_size=20), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), st.integers(0, 10**6))
def test_a_score_may_have_any_name(name: str, operator: str, limit: int) -> None:
    rule = parse_rule(f"score.{name}.n{operator}{limit}")
    assert (rule.name, rule.operator, rule.limit) == (f"score.{name}.n", operator, limit)


def test_a_percentile_among_timeouts_is_not_known_to_be_below_a_limit() -> None:
    def slow(case: EvalCase) -> str:
        raise TimeoutError("no answer")

    suite = EvalSet("one", [EvalCase(id=str(number), prompt="?") for number in range(3)])
    metrics = Runner(slow, suite, progress="off", retries=0).run_sync().metrics
    found = checked("latency_p99<100s", metrics)
    assert not found.ok
    assert "is at least" in found.reason
    assert "it lies among calls that timed out" in found.reason
