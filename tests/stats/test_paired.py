"""Paired intervals and tests, against scipy and against simulated truth."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steelyard.stats.intervals import Interval
from steelyard.stats.paired import holm, mcnemar_exact, median_interval, paired_interval, smallest_visible


@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_is_the_exact_two_sided_binomial_test(better: int, worse: int) -> None:
    expected = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert mcnemar_exact(better, worse) == pytest.approx(expected, rel=1e-9)
    assert mcnemar_exact(better, worse) == mcnemar_exact(worse, better)


def test_mcnemar_stays_exact_with_many_cases() -> None:
    assert mcnemar_exact(60_000, 59_000) == pytest.approx(stats.binomtest(60_000, 119_000).pvalue, rel=1e-6)
    assert mcnemar_exact(100_000, 0) == 0.0


def test_mcnemar_knows_the_example_of_14_and_3() -> None:
    assert mcnemar_exact(14, 3) == pytest.approx(0.0127, abs=1e-4)
    assert mcnemar_exact(0, 0) == 1.0


@pytest.mark.parametrize("pair", [(-1, 3), (3, -1)])
def test_mcnemar_refuses_negative_counts(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be >= 0, got"):
        mcnemar_exact(*pair)


@pytest.mark.parametrize("kind", ["verdicts", "trials", "scores"])
def test_the_interval_is_the_percentile_bootstrap_of_scipy(kind: str) -> None:
    rng = np.random.default_rng(7)
    drawn = {
        "verdicts": rng.choice([-1.0, 0.0, 1.0], size=80, p=[0.1, 0.7, 0.2]),
        "trials": rng.integers(-3, 4, size=60) / 3,
        "scores": rng.normal(0.05, 0.2, size=300).clip(-1, 1),
    }[kind]
    oracle = stats.bootstrap(
        (drawn,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    interval = paired_interval(drawn)
    assert interval is not None
    assert interval == pytest.approx((oracle.low, oracle.high), abs=0.1 * (oracle.high - oracle.low))


def test_the_interval_is_the_same_each_time_and_in_any_order() -> None:
    drawn = np.random.default_rng(3).choice([-1.0, 0.0, 1.0], size=200)
    assert paired_interval(drawn) == paired_interval(drawn[::-1]) == paired_interval(list(drawn))


@cache
def interval_of_verdicts(better: int, worse: int, same: int) -> Interval:
    interval = paired_interval(np.repeat([1.0, -1.0, 0.0], [better, worse, same]))
    assert interval is not None
    return interval


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "better", "worse"), [(100, 0.10, 0.10), (200, 0.12, 0.05), (60, 0.15, 0.20)])
def test_the_interval_holds_the_true_difference_in_93_to_97_of_100_runs(
    cases: int, better: float, worse: float
) -> None:
    drawn = np.random.default_rng(11).multinomial(cases, [better, worse, 1 - better - worse], size=3_000)
    held = 0
    for counts in drawn.tolist():
        low, high = interval_of_verdicts(*counts)
        held += low - 1e-12 <= better - worse <= high + 1e-12
    assert 0.93 <= held / len(drawn) <= 0.97


@pytest.mark.parametrize(
    ("difference", "expected"), [(0.0, (-0.161, 0.161)), (1.0, (0.678, 1.0)), (-1.0, (-1.0, -0.678))]
)
def test_cases_that_all_differ_alike_do_not_make_it_certain(difference: float, expected: Interval) -> None:
    assert paired_interval([difference] * 20) == pytest.approx(expected, abs=1e-3)


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), min_size=1, max_size=30))
def test_the_interval_holds_the_mean_and_stays_within_what_is_possible(differences: list[float]) -> None:
    interval = paired_interval(differences)
    assert interval is not None
    low, high = interval
    assert -1 <= low <= np.mean(differences) + 1e-9
    assert np.mean(differences) - 1e-9 <= high <= 1


def test_nothing_to_compare_has_no_interval() -> None:
    assert paired_interval([]) is None
    assert median_interval([]) is None


@pytest.mark.parametrize("count", [6, 7, 25, 100, 1_001])
def test_the_median_s_interval_is_the_sign_test_s(count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count)
    interval = median_interval(values)
    assert interval is not None
    outside = int(stats.binom.ppf(0.025, count, 0.5))  # scipy's: the first rank that may not be left out
    ordered = np.sort(values)
    assert interval == (ordered[outside - 1], ordered[count - outside])
    assert 2 * stats.binom.cdf(outside - 1, count, 0.5) <= 0.05


def test_five_values_are_too_few_for_an_interval_of_the_median() -> None:
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    with pytest.raises(ValueError, match="confidence must be between 0 and 1, got 2"):
        median_interval([1.0], confidence=2)


def test_the_median_s_interval_holds_it_at_least_95_times_in_100() -> None:
    drawn = np.random.default_rng(5).lognormal(size=(2_000, 40))
    held = [low <= 1.0 <= high for low, high in filter(None, map(median_interval, drawn))]
    assert 0.95 <= np.mean(held) <= 0.98


def test_holm_raises_p_values_by_their_rank() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))
    ranked = [adjusted[i] for i in sorted(range(len(p_values)), key=lambda i: p_values[i])]
    assert ranked == sorted(ranked)


def test_the_smallest_visible_difference_is_seen_four_times_in_five() -> None:
    """Draw runs that truly differ by what is said to be visible, and count how often McNemar sees it."""
    cases, changed = 400, 0.2
    visible = smallest_visible(np.repeat([1.0, -1.0, 0.0], [40, 40, 320]))
    assert visible is not None
    drawn = np.random.default_rng(2).multinomial(
        cases, [(changed + visible) / 2, (changed - visible) / 2, 1 - changed], size=1_000
    )
    seen = np.mean([mcnemar_exact(better, worse) < 0.05 for better, worse, _ in drawn.tolist()])
    assert 0.72 <= seen <= 0.88


def test_few_cases_can_show_nothing() -> None:
    assert smallest_visible([0.0] * 5) is None
    assert smallest_visible([0.0] * 60) == pytest.approx(0.1)
    assert smallest_visible([1.0, -1.0] * 3) is None
