"""Intervals against scipy's, exact at the edges, the same in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from steelyard.stats.intervals import bootstrap_mean, wilson

steady = settings(deadline=None, derandomize=True)


@steady
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


def test_without_resamples_there_is_no_bootstrap():
    with pytest.raises(ValueError, match="resamples must be >= 1, got 0"):
        bootstrap_mean([1.0, 2.0], resamples=0)


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


@steady
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
