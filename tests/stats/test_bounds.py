"""Bounds of means, rates and percentiles that hold with few values: against scipy, by draws and by simulated truth."""

from __future__ import annotations

import math
import time
import tracemalloc

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steelyard.stats.intervals import (
    BoundedMean,
    StudentMean,
    bounded_mean_interval,
    clopper_pearson,
    effective_n,
    percentile,
    percentile_bound,
    percentile_needs,
    percentile_ranks,
    percentiles,
    rate_lower,
    rate_upper,
)

scores = st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]) | st.floats(0, 1), min_size=1, max_size=40)


@given(st.integers(1, 2_000), st.floats(0, 1))
def test_noughts_and_ones_have_clopper_and_pearsons_interval(n: int, share: float) -> None:
    successes = round(n * share)
    oracle = stats.binomtest(successes, n).proportion_ci(method="exact")
    expected = pytest.approx((oracle.low, oracle.high), abs=1e-10)
    assert clopper_pearson(successes, n) == expected
    assert BoundedMean.of_counts([0, 1], [n - successes, successes]).interval() == expected


def test_one_sided_bounds_are_clopper_and_pearsons() -> None:
    low = stats.binomtest(18, 20, alternative="greater").proportion_ci(0.95, method="exact").low
    high = stats.binomtest(18, 20, alternative="less").proportion_ci(0.95, method="exact").high
    assert (rate_lower(18, 20), rate_upper(18, 20)) == pytest.approx((low, high))
    assert (rate_lower(0, 5), rate_upper(5, 5), rate_lower(0, 0), rate_upper(0, 0)) == (0.0, 1.0, 0.0, 1.0)
    assert clopper_pearson(0, 0) is None
    with pytest.raises(ValueError, match=r"successes must be within 0\.\.3"):
        rate_lower(4, 3)


def test_values_near_the_ends_do_not_jump() -> None:
    """What is almost 0/1 data goes another way through the code, and must come to the same."""
    exact = BoundedMean([1.0] * 7 + [0.0] * 3).interval()
    nearly = BoundedMean([1 - 1e-9] * 7 + [1e-9] * 3).interval()
    assert nearly == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("sized", [False, True])
def test_the_bounds_are_quantiles_of_a_bayesian_bootstrap_with_one_more_extreme_value(sized: bool) -> None:
    rng = np.random.default_rng(4)
    values, sizes = rng.uniform(-1, 1, 9), rng.choice([3.0, 40.0], 9) if sized else np.ones(9)
    weights = rng.exponential(size=(400_000, 10))
    extra = sizes.max() * weights[:, -1]
    body, total = weights[:, :-1] @ (values * sizes), weights[:, :-1] @ sizes + extra
    drawn = np.quantile((body - extra) / total, 0.025), np.quantile((body + extra) / total, 0.975)
    found = BoundedMean(values, low=-1.0, sizes=sizes if sized else None)
    assert found.interval() == pytest.approx(drawn, abs=0.004)
    assert found.mean == pytest.approx(np.average(values, weights=sizes))


@given(scores)
def test_the_interval_holds_the_mean_within_the_range_in_any_order(values: list[float]) -> None:
    mean = BoundedMean(values)
    low, high = mean.interval()
    assert 0 <= low <= mean.mean + 1e-9
    assert mean.mean - 1e-9 <= high <= 1
    assert BoundedMean(values[::-1]).interval() == (low, high)
    distinct, counts = np.unique(values, return_counts=True)
    assert BoundedMean.of_counts(distinct, counts).interval() == pytest.approx((low, high), abs=1e-9)


@given(scores, st.floats(0.02, 0.98))
def test_p_and_interval_are_one_procedure(values: list[float], null: float) -> None:
    mean = BoundedMean(values)
    low, high = mean.interval()
    if min(abs(null - low), abs(null - high)) > 1e-6:
        assert (mean.p_value(null) < 0.05) == (not low <= null <= high)


@given(scores)
def test_mirrored_values_have_the_mirrored_interval(values: list[float]) -> None:
    low, high = BoundedMean(values).interval()
    mirrored = BoundedMean([1 - value for value in values]).interval()
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-7)


@pytest.mark.parametrize("kind", range(4))
def test_a_bound_is_where_its_chance_is_alpha(kind: int) -> None:
    """Also for values that differ by many orders of magnitude, where secants creep."""
    rng = np.random.default_rng(kind)
    for _ in range(40):
        n = int(np.exp(rng.uniform(1, 5)))
        values = (rng.random(n), rng.beta(0.05, 0.05, n), np.where(rng.random(n) < 0.1, 1e-6, 0.0), rng.random(n) ** 9)[
            kind
        ]
        mean = BoundedMean(values, sizes=np.exp(rng.normal(0, 2, n)))
        low, high = mean.lower(0.01), mean.upper(0.01)
        assert low == 0 or mean.chance_below(low) == pytest.approx(0.01, abs=1e-6)
        assert high > 1 - 1e-9 or mean.chance_above(high) == pytest.approx(0.01, abs=1e-6)


def test_equal_values_do_not_claim_certainty() -> None:
    low, high = BoundedMean([0.5] * 7).interval()
    assert low == pytest.approx(0.5 * 0.025 ** (1 / 7))
    assert high == pytest.approx(1 - 0.5 * 0.025 ** (1 / 7))


def test_no_values_say_nothing() -> None:
    assert BoundedMean([]).interval() == (0.0, 1.0)
    assert BoundedMean([]).p_value(0.5) == 1.0
    assert math.isnan(BoundedMean([]).mean)
    assert bounded_mean_interval([]) is None


def test_groups_of_one_are_plain_values_and_equal_groups_are_their_means() -> None:
    values = [0.1, 0.5, 0.9, 1.0]
    assert bounded_mean_interval(values, groups="abcd") == bounded_mean_interval(values)
    twice = bounded_mean_interval([*values, *values], groups="abcdabcd")
    assert twice == pytest.approx(bounded_mean_interval(values), abs=1e-9)


def test_more_cases_of_the_same_groups_say_no_more() -> None:
    rng = np.random.default_rng(2)
    wide = BoundedMean.over_groups(np.repeat([1.0, 1.0, 0.0, 1.0, 0.0], 20), np.repeat(np.arange(5), 20)).interval()
    assert wide == pytest.approx(clopper_pearson(3, 5))
    one_more_failed = rng.permutation(np.r_[np.ones(9), 0.0])
    assert BoundedMean(one_more_failed).interval()[0] < BoundedMean(np.ones(10)).interval()[0]


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([0.5, 2.0], {}, r"values must be within 0\.\.1, got 0\.5\.\.2"),
        ([0.5], {"low": 1.0}, "low must be below high"),
        ([0.5], {"sizes": [1, 2]}, "each value needs a size"),
        ([0.5], {"sizes": [0]}, "sizes must be > 0"),
    ],
)
def test_what_cannot_be_is_refused(values: list[float], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoundedMean(values, **options)  # type: ignore[arg-type]


def test_a_hundred_thousand_values_take_a_moment_and_little_memory() -> None:
    values = np.random.default_rng(1).normal(0.1, 0.3, 100_000).clip(-1, 1)
    tracemalloc.start()
    started = time.perf_counter()
    low, high = BoundedMean(values, low=-1.0).interval()
    assert time.perf_counter() - started < 5  # 0.1 s on an idle core, without tracing
    assert tracemalloc.get_traced_memory()[1] < 12e6  # most of it for the merged ones, however many there were
    tracemalloc.stop()
    reach = 1.96 * values.std() / math.sqrt(len(values))
    assert (low, high) == pytest.approx((values.mean() - reach, values.mean() + reach), abs=2e-5)


@pytest.mark.parametrize("distinct", [2, 1000, 400_000])
def test_a_mean_of_many_copies_none_of_them(distinct: int) -> None:
    values = np.random.default_rng(1).integers(0, distinct, 400_000) / (distinct - 1)
    tracemalloc.start()
    mean = BoundedMean(values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(values)
    assert mean.mean == math.fsum(values) / len(values)


def test_merging_near_values_moves_no_digit() -> None:
    rng = np.random.default_rng(1)
    values = rng.random(21_000)
    exact = BoundedMean(values[:20_000]).interval()
    again = BoundedMean(np.concatenate([values[:20_000], np.full(1, values[0])])).interval()
    assert again == pytest.approx(exact, abs=1e-4)
    sizes = rng.integers(1, 9, len(values)).astype(float)
    low, high = BoundedMean(values, sizes=sizes).interval()
    assert low < np.average(values, weights=sizes) < high
    assert high - low == pytest.approx(2 * 1.96 * 0.2887 / math.sqrt(21_000 * 25 / 30.67), rel=0.03)


@pytest.mark.parametrize("clusters", [5, 10, 20])
def test_few_clusters_of_unequal_sizes_hold_the_rate(clusters: int) -> None:
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(200):
        sizes = np.where(rng.random(clusters) < 0.2, 100, 3)
        hits = rng.binomial(sizes, rng.beta(0.8, 0.2, clusters))
        mean = BoundedMean(hits / sizes, sizes=sizes.astype(float))
        held += mean.p_value(0.8) >= 0.05
    assert held / 200 >= 0.93


@pytest.mark.parametrize("n", [5, 20])
def test_few_skewed_scores_hold_the_mean(n: int) -> None:
    rng = np.random.default_rng(8)
    grades = rng.choice([0, 0.25, 0.5, 0.75, 1], (300, n), p=[0.02, 0.03, 0.05, 0.2, 0.7])
    assert np.mean([BoundedMean(row).p_value(0.8825) >= 0.05 for row in grades]) >= 0.92


# Percentiles


@pytest.mark.parametrize(("percent", "needed"), [(50, 6), (90, 36), (95, 72), (99, 368), (10, 36)])
def test_a_percentile_needs_so_many_values(percent: float, needed: int) -> None:
    assert percentile_needs(percent) == needed
    values = np.arange(float(needed))
    assert percentile(values, percent).interval is not None
    assert percentile(values[1:], percent).interval is None
    assert percentile(values[1:], percent).needed == needed


@pytest.mark.parametrize(("percent", "needed"), [(95, 59), (99, 299)])
def test_one_sided_a_percentile_needs_fewer(percent: float, needed: int) -> None:
    assert percentile_needs(percent, one_sided=True) == needed
    values = np.arange(float(needed))
    assert percentile_bound(values, percent) == needed - 1
    assert percentile_bound(values[1:], percent) is None
    assert percentile_bound(values, percent, upper=False) is not None


@given(st.integers(1, 3_000), st.sampled_from([50.0, 90.0, 95.0, 99.0, 99.9]))
def test_ranks_hold_the_percentile_and_no_narrower_ones_do(n: int, percent: float) -> None:
    low, high = percentile_ranks(n, percent)
    binomial = stats.binom(n, percent / 100)
    if low is not None:
        assert binomial.cdf(low - 1) <= 0.025 < binomial.cdf(low)
    else:
        assert binomial.cdf(0) > 0.025
    if high is not None:
        assert binomial.sf(high - 1) <= 0.025 < binomial.sf(high - 2)
    else:
        assert binomial.sf(n - 1) > 0.025


def test_the_value_is_numpys_linear_percentile() -> None:
    values = np.random.default_rng(3).lognormal(size=101)
    for percent in (50, 90, 95, 99):
        assert percentile(values, percent).value == pytest.approx(np.percentile(values, percent))


def test_timeouts_are_values_that_are_only_known_to_be_longer() -> None:
    """5 % of the calls are broken off after 0.6 s: the p99 is 0.6 s or more, not the slowest of the others."""
    answered = np.linspace(0.1, 0.56, 380)
    found = percentile(answered, 99, censored=[0.6] * 20)
    assert (found.n, found.censored, found.value, found.value_at_least) == (400, 20, 0.6, True)
    assert found.low == 0.6
    assert found.high == math.inf
    median = percentile(answered, 50, censored=[0.6] * 20)
    assert not median.value_at_least
    assert median.high is not None
    assert median.high < 0.6


def test_a_value_broken_off_early_lowers_nothing() -> None:
    """One that was broken off at 0.2 s may have been the slowest of all: the upper end must allow for that."""
    answered = np.linspace(0.1, 1.0, 99)
    found, whole = percentile(answered, 50, censored=[0.2]), percentile(answered, 50)
    assert found.value_at_least
    assert found.value is not None
    assert whole.value is not None
    assert found.value <= whole.value
    assert found.high is not None
    assert whole.high is not None
    assert found.high >= whole.high


def test_nothing_measured_has_no_percentile() -> None:
    found = percentile([], 95)
    assert (found.value, found.interval, found.needed) == (None, None, 72)
    for percent in (0, 100, -1):
        with pytest.raises(ValueError, match="percent must be between 0 and 100"):
            percentile([1.0], percent)


def test_independent_values_count_for_about_as_many_as_they_are() -> None:
    rng = np.random.default_rng(5)
    counted = [effective_n(rng.random(500), 50) for _ in range(100)]
    assert max(counted) == 500
    assert np.median(counted) > 300
    assert effective_n([1.0] * 15, 50) == 15
    assert effective_n(np.full(100, 0.1), 95) == 100


def test_neighbours_that_are_alike_count_for_less_and_still_hold_the_median() -> None:
    rng = np.random.default_rng(6)
    noise = rng.normal(size=(200, 600)) * 0.6
    series = np.zeros((200, 600))
    for i in range(1, 600):
        series[:, i] = 0.8 * series[:, i - 1] + noise[:, i]
    counted = [effective_n(row, 50) for row in series]
    assert np.median(counted) < 150
    held = plain = 0
    for row, n in zip(series, counted, strict=True):
        low, high = percentile(row, 50, effective_n=n).interval or (-math.inf, math.inf)
        held += low <= 0 <= high
        low, high = percentile(row, 50).interval or (-math.inf, math.inf)
        plain += low <= 0 <= high
    assert held / 200 >= 0.87
    assert plain / 200 < 0.7


@given(
    st.lists(st.floats(0, 100), max_size=60),
    st.lists(st.floats(0, 100), max_size=10),
    st.sampled_from([None, [7.5, 20.0]]),
)
def test_percentiles_are_those_of_sorted_values(values: list[float], cut: list[float], effective: list[float]) -> None:
    given_values = np.array(values)
    found = percentiles(given_values, (50, 90), censored=cut, effective_ns=effective)
    assert given_values.tolist() == values
    assert found == percentiles(given_values, (50, 90), censored=cut, effective_ns=effective, overwrite_input=True)
    ordered, n = sorted(values + cut), len(values) + len(cut)
    for one, percent, independent in zip(found, (50, 90), effective or (None, None), strict=True):
        assert (one.n, one.censored) == (n, len(cut))
        if n:
            low, high = percentile_ranks(n, percent, effective_n=independent)
            assert one.value == pytest.approx(np.percentile(ordered, percent))
            assert one.low == (None if low is None else ordered[low - 1])
            latest = [*sorted(values), *[math.inf] * len(cut)]
            assert one.high == (None if high is None else latest[high - 1])


@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 4)), min_size=2, max_size=40))
def test_the_interval_of_grouped_measurements_is_that_of_clustered_least_squares(observed):
    """The sandwich estimate of regressing on a constant, with G/(G−1) as its correction."""
    values, groups = np.array([value for value, _ in observed]), [group for _, group in observed]
    found = StudentMean(values, groups)
    totals = pd.Series(values - values.mean()).groupby(groups).sum().to_numpy()
    count = len(totals)
    assert found.n == count
    variance = (totals**2).sum() * count / (count - 1) / len(values) ** 2 if count > 1 else 0.0
    assert found.std_error == pytest.approx(math.sqrt(variance), abs=1e-6)


def test_of_one_measurement_or_equal_ones_nothing_is_known():
    assert StudentMean([3.0]).interval() is None
    assert StudentMean([0.1 + 0.2, 0.3]).interval() is None
    assert StudentMean([]).interval() is None
