"""Paired intervals and tests, against scipy and against simulated truth."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steelyard.stats.paired import holm, measured_difference, median_interval, paired_difference


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 60))
def test_single_trials_have_mcnemars_exact_p(better: int, worse: int, same: int) -> None:
    """With one trial a case the procedure is the exact binomial test on the cases that changed."""
    found = paired_difference(np.repeat([1.0, -1.0, 0.0], [better, worse, same]))
    assert found is not None
    expected = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert found.p == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("count", [6, 7, 25, 100, 1_001])
def test_the_median_s_interval_is_the_sign_test_s(count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count)
    interval = median_interval(values)
    assert interval is not None
    outside = int(stats.binom.ppf(0.025, count, 0.5))  # scipy's: the first rank that may not be left out
    ordered = np.sort(values)
    assert interval == (ordered[outside - 1], ordered[count - outside])
    assert 2 * stats.binom.cdf(outside - 1, count, 0.5) <= 0.05


def test_values_of_a_group_say_less_of_the_median_together() -> None:
    values = np.repeat(np.random.default_rng(3).lognormal(size=20), 10)
    single, grouped = median_interval(values), median_interval(values, groups=[i // 10 for i in range(200)])
    assert single is not None
    assert grouped is not None
    assert grouped[0] < single[0]
    assert grouped[1] > single[1]
    assert median_interval([]) is None


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


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_what_testing_every_group_of_them_by_bonferroni_gives(p_values: list[float]) -> None:
    """The closure principle: a test is rejected if each set of tests that it belongs to is."""
    numbers = range(len(p_values))
    groups = [group for size in numbers for group in combinations(numbers, size + 1)]
    expected = [
        max(min(1.0, len(group) * min(p_values[i] for i in group)) for group in groups if number in group)
        for number in numbers
    ]
    assert holm(p_values) == pytest.approx(expected)


@given(st.lists(st.floats(-50, 50, width=16), min_size=2, max_size=40))
def test_a_measurements_difference_is_students_paired_t(differences):
    found = measured_difference(differences)
    assert found is not None
    low, high = found.ci95
    assert (found.p < 0.05) == (low > 0 or high < 0)
    if np.ptp(differences) > 1e-3:
        expected = stats.ttest_1samp(differences, 0.0)
        assert found.p == pytest.approx(expected.pvalue, abs=1e-6)
        assert found.ci95 == pytest.approx(tuple(expected.confidence_interval()), abs=1e-5)


@pytest.mark.parametrize(("count", "p"), [(2, 0.5), (6, 0.03125), (20, 2.0**-19)])
def test_equal_differences_are_as_sure_as_their_signs(count, p):
    found = measured_difference([1.5] * count)
    assert found is not None
    assert (found.difference, found.p) == (1.5, p)
    assert found.ci95 == ((1.5, 1.5) if p < 0.05 else (0.0, 1.5))
    assert measured_difference([0.0] * count).ci95 == (0.0, 0.0)


def test_of_one_case_that_differs_nothing_is_known():
    assert measured_difference([3.0]) is None
    assert measured_difference([3.0, 4.0], [1, 1]) is None
    assert measured_difference([]) is None
