"""Objectives are read as people write them, and a run that breaks one says by how much."""

from __future__ import annotations

import pytest

from steelyard.load.levels import check, parse_slo, percent
from tests.support.sweep import metrics_of


@pytest.mark.parametrize(
    ("text", "figure", "comparison", "limit"),
    [
        ("ttft_p95<500ms", "time_to_first_token-p95", "<", 0.5),
        ("ttft_p99<500ms", "time_to_first_token-p99", "<", 0.5),
        ("ttlt_p50 <= 2s", "time_to_last_token-p50", "<=", 2.0),
        ("latency_p90<1.5s", "time_to_last_token-p90", "<", 1.5),
        ("tpot_avg<20ms", "time_per_output_token-average", "<", 0.02),
        ("tpot_mean<500us", "time_per_output_token-average", "<", 0.0005),
        ("TTFT_P99<1m", "time_to_first_token-p99", "<", 60.0),
        ("time_to_first_token_max<3s", "time_to_first_token-max", "<", 3.0),
        ("time_to_first_token-p99<3min", "time_to_first_token-p99", "<", 180.0),
        ("error_rate<1%", "error_rate", "<", 0.01),
        ("error_rate<0.01", "error_rate", "<", 0.01),
        ("pass_rate>=90%", "pass_rate", ">=", 0.9),
        ("error_rate<=7%", "error_rate", "<=", 0.07),
        ("output_tps>1000", "output_tps", ">", 1000.0),
        ("requests_per_minute>=600", "requests_per_minute", ">=", 600.0),
        ("pass_rate.ci_low>=80%", "pass_rate.ci_low", ">=", 0.8),
        ("failure_rate<1%", "failure_rate", "<", 0.01),
        ("p50_latency_s<2s", "p50_latency_s", "<", 2.0),
    ],
)
def test_an_objective_is_a_figure_a_comparison_and_a_limit(
    text: str, figure: str, comparison: str, limit: float
) -> None:
    (objective,) = parse_slo(text)
    assert (objective.figure, objective.comparison) == (figure, comparison)
    assert objective.limit == pytest.approx(limit)
    assert objective.text == text


@pytest.mark.parametrize("percent", [35, 70, 82, 95])
def test_a_limit_in_percent_is_just_that_share(percent: int) -> None:
    """70 × 0.01 is a little more than 0.7 in floating point."""
    (objective,) = parse_slo(f"pass_rate>={percent}%")
    assert objective.holds(percent / 100)


def test_several_objectives_have_commas_between_them() -> None:
    assert [one.text for one in parse_slo("ttft_p99<500ms, error_rate<1%,")] == ["ttft_p99<500ms", "error_rate<1%"]
    assert parse_slo(" ") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttf_p99<500ms", "did you mean 'ttft_p99'"),
        ("eror_rate<1%", "did you mean 'error_rate'"),
        ("xyzzy<1", "known here: error_rate"),
        ("ttft_p97<500ms", "no aggregate 'p97'; did you mean 'p9"),
        ("ttft<500ms", "ttft needs an aggregate, such as ttft_p99"),
        ("ttft_p99<500", r"needs a unit \(us, µs, ms, s, m, min\), got none"),
        ("ttft_p99<5%", "needs a unit .*, got '%'"),
        ("error_rate<5", "did you mean 5%"),
        ("output_tps>10s", "without a unit, got 's'"),
        ("ttft_p99=500ms", "cannot read 'ttft_p99=500ms'"),
        ("ttft_p99<-1s", "cannot read"),
    ],
)
def test_an_objective_that_cannot_be_parsed_is_refused_and_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_slo(text)


def test_only_broken_objectives_are_reported_with_the_values_found() -> None:
    objectives = parse_slo("ttft_p99<150ms,latency_p50<1s,error_rate<=1%,pass_rate>95%,output_tps>100,ttft_max<10s")
    broken = check(objectives, metrics_of(10, peak=1, errors=0.12, first=0.1, pass_rate=0.9))
    assert [one.describe() for one in broken] == [
        "time to first token p99 is 200ms (limit 150ms)",
        "the error rate is 12% (limit 1%)",
        "the pass rate is 90% (limit 95%)",
    ]


def test_the_limit_itself_is_kept_or_not_as_it_was_written() -> None:
    metrics = metrics_of(10, peak=1, errors=0.01)
    assert check(parse_slo("error_rate<=1%"), metrics) == []
    assert len(check(parse_slo("error_rate<1%"), metrics)) == 1


def test_what_was_not_measured_keeps_no_objective() -> None:
    broken = check(parse_slo("ttft_p99<500ms,pass_rate>0"), metrics_of(0, peak=1, first=None, pass_rate=None))
    assert [one.describe() for one in broken] == [
        "time to first token p99 was not measured (limit 500ms)",
        "the pass rate was not measured (limit 0%)",
    ]


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "0%"),
        (0.12, "12%"),
        (0.01, "1%"),
        (1.0, "100%"),
        (0.0104, "1.04%"),
        (0.1234, "12.3%"),
        (0.0004, "0.04%"),
    ],
)
def test_a_share_is_shown_to_three_digits_at_most(share: float, shown: str) -> None:
    assert percent(share) == shown
