"""Objectives are read as people write them, and a run that breaks one says by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from steelyard.load.levels import Block, Level, make_level, parse_slo, percent
from steelyard.load.timings import Timings
from steelyard.stats.figures import STATS
from steelyard.stats.metrics import Counts, Metrics
from tests.support.sweep import QUIET


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
        ("stalls<3", "stalls", "<", 3.0),
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
        ("tft<3", "'tft'; did you mean 'ttft_p50'"),
        ("ttft_mx<3s", "no aggregate 'mx'; did you mean 'max'"),
        ("xyzzy<1", "known here: error_rate, .*, stalls, .* and ttft, .* with _p50, .*, _min or _max$"),
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


def timings(
    seconds: Sequence[float], *, timeouts: int = 0, errors: int = 0, limit: float = 0.6, in_flight: int = 1
) -> Timings:
    """A block of answers that took so long, timeouts and other errors, mixed, all sent one after another."""
    n = len(seconds) + timeouts + errors
    mixed = np.arange(n) if n == len(seconds) else np.random.default_rng(2).permutation(n)
    last = np.array([*seconds, *[limit] * timeouts, *[math.nan] * errors])[mixed]
    ended = np.cumsum(np.nan_to_num(last, nan=0.001)) / in_flight
    return Timings(
        sent=ended - np.nan_to_num(last, nan=0.001),
        ended=ended,
        ok=mixed < len(seconds),
        timed_out=(mixed >= len(seconds)) & (mixed < n - errors),
        times={
            "time_to_first_token": last / 2,
            "time_to_last_token": last,
            "time_per_output_token": np.full(n, math.nan),
        },
        tokens=np.where(mixed < len(seconds), 2.0, math.nan),
    )


def metrics_of(
    n: int, errors: int = 0, pass_rate: float | None = 0.9, output_tps: float | None = None, stalls: int = 0
) -> Metrics:
    stats: dict[str, Any] = dict.fromkeys(STATS)
    return Metrics(
        suite="s",
        n=n,
        counts=Counts(planned=n, ok=n - errors, error=errors, cancelled=0, not_started=0),
        scoring_errors=0,
        errors={},
        scores={},
        active_seconds=10.0,
        error_rate=errors / n,
        pass_rate=pass_rate,
        scored=n - errors,
        passed=round((n - errors) * (pass_rate or 0.0)),
        peak_in_flight=1,
        client=QUIET,
        stalls=stalls,
        stats={**stats, "requests_per_minute": 6.0 * (n - errors), "output_tps": output_tps},
    )


def made(slo: str, *blocks: Timings, looks: int = 1, **figures: Any) -> Level:
    whole = [
        Block(run=f"level-1-{place}", metrics=metrics_of(len(block), **figures), judged=None, timings=block)
        for place, block in enumerate(blocks)
    ]
    return make_level(1, whole, parse_slo(slo), looks=looks)


def test_an_objective_on_a_percentile_is_decided_by_the_share_of_requests_above_it() -> None:
    assert made("latency_p99<1s", timings([0.5] * 299)).objectives[0].outcome == "kept"
    twenty = made("latency_p99<1s", timings([0.5] * 20))
    assert (twenty.broken, twenty.objectives[0].outcome, twenty.more_requests) == ([], "cannot tell", 279)
    assert twenty.undecided == [
        "time to last token p99: cannot tell: 0 of 20 requests took longer than 1.00s, 0% – 13.9% (allowed 1%): "
        "279 more requests would tell"
    ]
    slow = made("latency_p99<1s", timings([0.5, 0.5, 0.5, 0.5, 1.5] * 20))
    assert slow.broken == [
        "time to last token p99 is broken: 20 of 100 requests took longer than 1.00s, so at least 13.7% do (allowed 1%)"
    ]


def test_calls_that_timed_out_are_above_any_objective() -> None:
    """The p95 of the answers that came is 0.5 s, whatever was given up at 0.6 s."""
    found = made("latency_p95<0.7s", timings([0.5] * 80, timeouts=20))
    assert [one.outcome for one in found.objectives] == ["broken"]
    assert found.objectives[0].above == 20
    p99 = found.latency["time_to_last_token"].p99
    assert (p99.value, p99.at_least) == (0.6, True)


def test_other_errors_are_neither_above_nor_below() -> None:
    found = made("latency_p50<0.7s", timings([0.5] * 80, errors=20))
    assert (found.objectives[0].above, found.objectives[0].n) == (0, 80)


def test_several_looks_share_the_error() -> None:
    assert made("latency_p99<1s", timings([0.5] * 299), looks=4).objectives[0].outcome == "cannot tell"
    assert made("latency_p99<1s", timings([0.5] * 440), looks=4).objectives[0].outcome == "kept"


def test_the_limit_itself_is_kept_or_not_as_it_was_written() -> None:
    assert made("latency_p50<=500ms", timings([0.5] * 50)).objectives[0].outcome == "kept"
    assert made("latency_p50<500ms", timings([0.5] * 50)).objectives[0].outcome == "broken"
    assert made("error_rate<=1%", timings([0.5] * 100), errors=1).broken == []
    assert len(made("error_rate<1%", timings([0.5] * 100), errors=1).broken) == 1


def test_other_objectives_are_checked_by_their_value() -> None:
    found = made("error_rate<=1%,pass_rate>95%", timings([0.5] * 100), errors=12)
    assert found.broken == ["the error rate is 12% (limit 1%)", "the pass rate is 90% (limit 95%)"]


def test_stalls_are_those_of_all_blocks() -> None:
    block = timings([0.5] * 60)
    assert made("stalls<3", block, stalls=2).broken == []
    assert made("stalls<3", block, block, stalls=2).broken == ["the number of stalls is 4 (limit 3)"]


def test_an_unknown_figure_is_refused_in_few_words() -> None:
    with pytest.raises(ValueError, match="known here") as refused:
        parse_slo("xyzzy<1")
    assert len(str(refused.value)) < 300


def test_what_was_not_measured_keeps_no_objective() -> None:
    assert made("tpot_p99<500ms,pass_rate>0", timings([0.5] * 9), pass_rate=None).broken == [
        "time per output token p99 was not measured (limit 500ms)",
        "the pass rate was not measured (limit 0%)",
    ]


def test_goodput_counts_answers_that_keep_every_objective() -> None:
    """Every second answer is too slow; one of the others has a first token that is."""
    block = timings([0.1, 0.3] * 100)
    found = made("latency_p50<200ms,ttft_p50<1s", block)
    assert found.goodput is not None
    assert found.goodput == pytest.approx(found.requests_per_second / 2, rel=0.05)
    assert found.goodput_ci95 is not None
    assert made("error_rate<1%", block).goodput is None


def test_tokens_per_second_agree_with_answers_per_second() -> None:
    """Each answer has two tokens; over the whole time, ramp and drain included, there are fewer of both."""
    found = made("", timings([0.1] * 100, in_flight=4), output_tps=7.0)
    assert found.requests_per_second == pytest.approx(40, rel=0.1)
    assert found.output_tps == pytest.approx(2 * found.requests_per_second)


def test_a_level_whose_answers_all_came_while_it_filled_up_has_no_steady_state() -> None:
    """One answer that comes first, then errors: not 0 answers a second, while tokens came."""
    block, ended = timings([0.1], errors=59), np.arange(60) / 1000
    early = msgspec.structs.replace(block, sent=ended - 0.001, ended=ended, ok=np.arange(60) == 0)
    found = made("error_rate<1%", early, errors=59, output_tps=0.2)
    assert (found.requests_per_second, found.output_tps, found.few) == (0.1, 0.2, True)
    nothing = made("error_rate<1%", msgspec.structs.replace(early, ok=np.zeros(60, bool)), errors=60)
    assert (nothing.requests_per_second, nothing.requests_per_second_ci95) == (0.0, (0.0, 0.0))


def test_blocks_of_a_level_add_up() -> None:
    found = made("latency_p99<1s", timings([0.5] * 100), timings([0.5] * 200), errors=1)
    assert (found.requests, found.objectives[0].n, found.latency["time_to_last_token"].n) == (300, 300, 300)
    assert found.error_rate == pytest.approx(2 / 300)
    assert found.pass_rate == pytest.approx(0.9, abs=0.01)
    assert found.active_seconds == 20.0
    assert found.runs == ["level-1-0", "level-1-1"]


def test_an_endpoint_that_falls_behind_an_arrival_rate_breaks_it() -> None:
    """Ten calls arrive a second and two are answered."""
    seconds = np.arange(400) * 0.5
    block = msgspec.structs.replace(timings([0.5] * 400), sent=np.linspace(0, 40, 400), ended=seconds)
    whole = [Block(run="level-10", metrics=metrics_of(400), judged=None, timings=block)]
    found = make_level(10, whole, (), open_loop=True)
    assert "the endpoint falls behind" in found.broken[0]


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
