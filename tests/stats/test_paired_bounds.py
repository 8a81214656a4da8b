"""One procedure for pairs: its interval, verdict, non-inferiority by enumeration, and what so many cases can show."""

from __future__ import annotations

import math
import time

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from steelyard.stats.intervals import BoundedMean
from steelyard.stats.paired import (
    cases_needed,
    detectable_difference,
    non_inferiority,
    paired_difference,
    paired_mean,
    shown_outcome,
    smallest_detectable,
    unchanged_cases_needed,
)


def flips(better: int, worse: int, same: int) -> npt.NDArray[np.float64]:
    return np.repeat([1.0, -1.0, 0.0], [better, worse, same])


def tail_below(better: int, worse: int, n: int, margin: float) -> float:
    """P(difference < −margin) by the Dirichlet integral, with scipy."""
    same = n - better - worse
    if not better:
        return float(1 - special.betainc(worse + 1, same, margin)) if same else 1.0
    points = (np.arange(20_000) + 0.5) / 20_000
    moved = stats.beta.ppf(points, better + worse + 1, same) if same else np.ones(1)
    inside = np.clip((1 - margin / np.maximum(moved, 1e-12)) / 2, 0, 1)
    return float(np.mean(special.betainc(better, worse + 1, inside)))


@pytest.mark.parametrize(
    ("better", "worse", "n", "margin"),
    [(0, 0, 50, 0.05), (3, 1, 30, 0.1), (0, 2, 60, 0.1), (12, 5, 17, 0.0), (1, 0, 6, 0.001), (40, 30, 900, 0.02)],
)
def test_single_trials_are_decided_by_the_integral(better: int, worse: int, n: int, margin: float) -> None:
    mean = paired_mean(flips(better, worse, n - better - worse))
    assert mean.chance_below(-margin) == pytest.approx(tail_below(better, worse, n, margin), abs=1e-4)


@given(st.lists(st.integers(-3, 3).map(lambda thirds: thirds / 3), min_size=1, max_size=40))
def test_a_verdict_is_what_the_interval_says(differences: list[float]) -> None:
    found = paired_difference(differences)
    assert found is not None
    low, high = found.ci95
    outcome = shown_outcome(found.difference, found.p, found.p)
    assert (outcome == "better") == (low > 0)
    assert (outcome == "worse") == (high < 0)
    assert found.difference == pytest.approx(np.mean(differences), abs=1e-12)


def test_a_raised_p_can_only_take_a_verdict_back() -> None:
    found = paired_difference(flips(12, 1, 40))
    assert found is not None
    assert shown_outcome(found.difference, found.p, 0.04) == "better"
    assert shown_outcome(found.difference, found.p, 0.04, lower_is_better=True) == "worse"
    assert shown_outcome(found.difference, found.p, 0.2) == "no difference"
    nothing = paired_difference(flips(3, 1, 40))
    assert nothing is not None
    assert shown_outcome(nothing.difference, nothing.p, 0.0001) == "no difference"


def test_no_cases_have_no_difference() -> None:
    assert paired_difference([]) is None
    assert non_inferiority([], 0.1) is None
    assert cases_needed([]) is None
    assert smallest_detectable([]) is None


@pytest.mark.parametrize(("before", "after"), [(1, 10), (1, 3)])
def test_an_unchanged_model_with_unequal_trials_is_not_called_worse(before: int, after: int) -> None:
    """The sign test on rates called it worse in 65 to 100 of 100 comparisons."""
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(300):
        differences = rng.binomial(after, 0.9, 100) / after - rng.binomial(before, 0.9, 100) / before
        alarms += paired_mean(differences).p_value(0.0) < 0.05
    assert alarms / 300 <= 0.05


def test_cases_of_a_group_count_together() -> None:
    differences, groups = np.repeat([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], 20), np.repeat(np.arange(6), 20)
    clustered, plain = paired_difference(differences, groups.tolist()), paired_difference(differences)
    assert clustered is not None
    assert plain is not None
    assert (clustered.groups, clustered.cases, plain.groups) == (6, 120, 120)
    assert clustered.ci95[0] < 0 < plain.ci95[0]


# Non-inferiority


def test_six_cases_do_not_rule_out_a_tenth_of_a_point() -> None:
    found = non_inferiority(flips(1, 0, 5), 0.001)
    assert found is not None
    assert found.outcome == "cannot tell"
    assert found.cases_needed is not None


def test_it_is_kept_broken_or_open() -> None:
    outcomes = [non_inferiority(flips(*counts), 0.05) for counts in ((2, 2, 396), (2, 60, 338), (2, 4, 100))]
    assert [found.outcome for found in outcomes if found is not None] == ["kept", "broken", "cannot tell"]
    with pytest.raises(ValueError, match=r"margin must be within 0\.\.1, got 1"):
        non_inferiority([0.0], 1.0)


@pytest.mark.parametrize("n", [5, 10, 20, 36, 50])
def test_a_drop_as_large_as_the_margin_passes_at_most_25_times_in_1000(n: int) -> None:
    """By enumeration of every outcome, with and without cases that get better."""
    for margin in (0.02, 0.05, 0.1):
        passing = [
            (better, worse)
            for better in range(n + 1)
            for worse in range(n - better + 1)
            if (better - worse) / n > -margin
            and BoundedMean.of_counts([-1, 0, 1], [worse, n - better - worse, better], low=-1.0).chance_below(-margin)
            <= 0.025
        ]
        for up in (0.0, 0.02, 0.1):
            chances = stats.multinomial(n, [up, up + margin, 1 - 2 * up - margin])
            assert sum(chances.pmf([better, worse, n - better - worse]) for better, worse in passing) <= 0.025


@pytest.mark.parametrize(("margin", "cases"), [(0.01, 368), (0.02, 183), (0.05, 72), (0.10, 36)])
def test_so_many_unchanged_cases_rule_out_a_drop(margin: float, cases: int) -> None:
    assert unchanged_cases_needed(margin) == cases
    assert cases_needed(np.zeros(6), margin) == cases
    enough, one_less = non_inferiority(np.zeros(cases), margin), non_inferiority(np.zeros(cases - 1), margin)
    assert enough is not None
    assert one_less is not None
    assert (enough.outcome, one_less.outcome, one_less.cases_needed) == ("kept", "cannot tell", cases)


# What so many cases can show


def power(n: int, better: float, worse: float, margin: float = 0.0) -> float:
    drawn = np.random.default_rng(9).multinomial(n, [worse, 1 - better - worse, better], 1_000)
    samples, times = np.unique(drawn, axis=0, return_counts=True)
    shown = [BoundedMean.of_counts([-1, 0, 1], row, low=-1.0).chance_below(-margin) <= 0.025 for row in samples]
    return float(np.dot(shown, times)) / 1_000


@pytest.mark.parametrize("n", [20, 50, 200, 2_000])
@pytest.mark.parametrize("changed", [0.0, 0.1, 0.3])
def test_the_smallest_detectable_difference_is_seen_four_times_in_five(n: int, changed: float) -> None:
    each = round(n * changed / 2)
    smallest = smallest_detectable(flips(each, each, n - 2 * each))
    assert smallest is not None
    share = max(2 * each / n, smallest)
    assert 0.75 <= power(n, (share + smallest) / 2, (share - smallest) / 2) <= 0.85


def test_five_cases_can_show_nothing_and_six_hardly_anything() -> None:
    assert smallest_detectable(np.zeros(5)) is None
    assert detectable_difference(6) == pytest.approx(0.96, abs=0.03)


def test_a_suite_knows_beforehand_what_it_can_show() -> None:
    found = [detectable_difference(n) for n in (50, 200, 1_000)]
    assert [one for one in found if one is not None] == sorted(found, reverse=True)  # type: ignore[type-var]
    assert found[1] == pytest.approx(smallest_detectable(flips(10, 10, 180)), abs=1e-9)
    assert found[1] == pytest.approx(0.064, abs=0.004)
    with pytest.raises(ValueError, match=r"changed must be within 0\.\.1"):
        detectable_difference(10, 2)


@pytest.mark.parametrize(
    ("n", "better", "worse", "margin"), [(50, 1, 1, 0.05), (100, 0, 1, 0.05), (60, 6, 2, 0.0), (100, 10, 10, 0.05)]
)
def test_about_n_cases_show_it_four_times_in_five(n: int, better: int, worse: int, margin: float) -> None:
    needed = cases_needed(flips(better, worse, n - better - worse), margin)
    assert needed is not None
    assert 0.75 <= power(needed, better / n, worse / n, margin) <= 0.85


def test_no_number_of_cases_shows_what_is_not_so() -> None:
    assert cases_needed(flips(0, 5, 45), 0.05) is None
    assert cases_needed(flips(3, 3, 44)) is None


def test_groups_need_as_many_times_more_cases_as_they_are_alike() -> None:
    rng = np.random.default_rng(3)
    each = rng.choice([1.0, -1.0, 0.0], 40, p=[0.15, 0.05, 0.8])
    groups = np.repeat(np.arange(40), 5).tolist()
    alone, together = cases_needed(np.repeat(each, 5)), cases_needed(np.repeat(each, 5), groups=groups)
    assert alone is not None
    assert together is not None
    assert together / alone == pytest.approx(5, rel=0.1)
    wide, narrow = smallest_detectable(np.repeat(each, 5), groups), smallest_detectable(np.repeat(each, 5))
    assert wide is not None
    assert narrow is not None
    assert wide > 1.5 * narrow


def test_ten_thousand_cases_are_compared_in_well_under_a_second() -> None:
    rng = np.random.default_rng(2)
    differences = rng.normal(0.01, 0.3, 10_000).clip(-1, 1)
    started = time.perf_counter()
    found = paired_difference(differences)
    assert time.perf_counter() - started < 5  # 0.06 s on an idle core
    assert found is not None
    reach = 1.96 * differences.std() / math.sqrt(10_000)
    assert found.ci95 == pytest.approx((differences.mean() - reach, differences.mean() + reach), abs=3e-4)
