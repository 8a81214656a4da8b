"""Intervals against scipy's, exact at the edges, the same in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from steelyard.stats.intervals import bootstrap_mean, mean_interval, rate_over_cases, wilson


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys(pair):
    successes, n = pair
    expected = scipy_stats.binomtest(successes, n).proportion_ci(method="wilson")
    assert wilson(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_wilson_meets_zero_and_one_exactly_and_is_none_without_trials():
    assert wilson(0, 7)[0] == 0.0
    assert wilson(7, 7)[1] == 1.0
    assert wilson(0, 0) is None


@pytest.mark.parametrize(("successes", "n"), [(-1, 3), (4, 3)])
def test_wilson_refuses_impossible_counts(successes, n):
    with pytest.raises(ValueError, match=rf"within 0\.\.{n}, got {successes}"):
        wilson(successes, n)


@pytest.mark.parametrize("confidence", [0, 1, 95])
def test_a_confidence_outside_0_to_1_is_refused(confidence):
    with pytest.raises(ValueError, match=f"got {confidence}"):
        wilson(1, 2, confidence)
    with pytest.raises(ValueError, match=f"got {confidence}"):
        bootstrap_mean([1.0, 2.0], confidence)


@pytest.mark.parametrize("resamples", [0, -1])
def test_without_resamples_there_is_no_bootstrap(resamples):
    with pytest.raises(ValueError, match=f"resamples must be >= 1, got {resamples}"):
        bootstrap_mean([1.0, 2.0], resamples=resamples)


def test_one_resample_is_enough_for_a_bootstrap():
    low, high = bootstrap_mean([1.0, 2.0, 4.0], resamples=1)
    assert low == high  # the mean of that one resample
    assert 1.0 <= low <= 4.0


@pytest.mark.parametrize("size", [20, 300])
def test_the_bootstrap_is_near_scipys(size):
    values = np.random.default_rng(3).beta(2, 3, size)
    expected = scipy_stats.bootstrap(
        (values,), np.mean, n_resamples=4000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    low, high = bootstrap_mean(values)
    width = expected.high - expected.low
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.08 * width)


def test_many_distinct_values_use_the_normal_interval():
    values = np.random.default_rng(5).random(30_000)
    expected = scipy_stats.norm.interval(0.95, values.mean(), scipy_stats.sem(values))
    assert bootstrap_mean(values) == pytest.approx(expected, abs=1e-12)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_the_order_of_the_values_changes_no_bit(values, rng):
    shuffled = list(values)
    rng.shuffle(shuffled)
    low, high = bootstrap_mean(values, resamples=50)
    assert bootstrap_mean(shuffled, resamples=50) == (low, high)
    assert min(values) <= low <= high <= max(values)


def test_the_edges_are_exact():
    assert bootstrap_mean([]) is None
    assert bootstrap_mean([0.3]) == (0.3, 0.3)
    assert bootstrap_mean([0.1] * 1000) == (0.1, 0.1)


def test_the_size_of_a_block_changes_nothing(monkeypatch):
    values = np.random.default_rng(2).random(40)
    whole = bootstrap_mean(values, resamples=100)
    monkeypatch.setattr("steelyard.stats.intervals._BLOCK_CELLS", 90)
    assert bootstrap_mean(values, resamples=100) == whole


def test_a_higher_confidence_is_wider():
    values = [0.0, 0.2, 0.4, 1.0] * 5
    low, high = bootstrap_mean(values, confidence=0.99)
    inner_low, inner_high = bootstrap_mean(values, confidence=0.8)
    assert low < inner_low < inner_high < high


def test_a_mean_of_noughts_and_ones_is_a_rate() -> None:
    assert mean_interval([1.0, 0.0, 1.0, 1.0]) == wilson(3, 4)


@pytest.mark.parametrize("n", [1, 3, 50])
def test_equal_values_are_not_certain_to_stay_so(n: int) -> None:
    """A resample of equal values cannot differ; the share that may yet be otherwise is that of a rate never seen."""
    rare = wilson(0, n)[1]
    assert mean_interval([1.0] * n) == wilson(n, n)
    assert mean_interval([0.0] * n) == wilson(0, n)
    assert mean_interval([0.25] * n) == pytest.approx((0.25 - rare * 0.25, 0.25 + rare * 0.75))
    assert mean_interval([0.0] * n, least=-1.0) == pytest.approx((-rare, rare))


def test_other_means_are_resampled() -> None:
    values = [0.2, 0.9, 0.7]
    assert mean_interval(values) == bootstrap_mean(values)
    assert mean_interval([]) is None


def test_the_interval_of_few_noughts_and_ones_holds_the_truth_as_often_as_it_says() -> None:
    """Over every outcome of 20 tries at 90 %, by how likely it is; a resample of so few would claim too much."""
    n, truth = 20, 0.9

    def coverage(interval: Any) -> float:
        ends = [interval([1.0] * right + [0.0] * (n - right)) for right in range(n + 1)]
        likely = scipy_stats.binom.pmf(np.arange(n + 1), n, truth)
        return float(sum(p for p, (low, high) in zip(likely, ends, strict=True) if low <= truth <= high))

    assert coverage(mean_interval) > 0.95
    assert coverage(bootstrap_mean) < 0.9


@given(st.integers(1, 200), st.integers(1, 8), st.data())
def test_a_rate_over_trials_is_as_certain_as_its_cases_allow(cases, trials, data):
    passed = data.draw(st.integers(0, cases * trials))
    low, high = rate_over_cases(passed / (cases * trials), cases)
    assert low <= passed / (cases * trials) <= high
    if passed % trials == 0:
        assert (low, high) == wilson(passed // trials, cases)
    each = wilson(passed, cases * trials)
    assert high - low >= each[1] - each[0] - 1e-12
