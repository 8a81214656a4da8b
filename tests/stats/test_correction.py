"""Pass rates corrected by labels: coverage against simulated truth, and where there is nothing to say."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.stats.correction import Stratum, corrected_rate, rogan_gladen, weighted_error_rates


def strata(*counts: tuple[int, int, int]) -> list[Stratum]:
    """Scorer passed, judge overruled, judge confirmed: the size, how many labelled, how many of these right."""
    names = (("passed", True), ("overruled", True), ("confirmed", False))
    return [
        Stratum(name=name, passed=passed, size=size, labelled=labelled, right=right)
        for (name, passed), (size, labelled, right) in zip(names, counts, strict=True)
    ]


def test_the_corrected_rate_weighs_each_stratum_by_its_size() -> None:
    found = corrected_rate(strata((600, 20, 19), (200, 20, 10), (200, 20, 2)))
    assert found is not None
    assert found.raw == 0.8
    assert found.rate == pytest.approx(0.6 * 0.95 + 0.2 * 0.5 + 0.2 * 0.1)
    assert found.ci95[0] < found.rate < found.ci95[1] < found.raw
    assert not found.assumes_same_errors
    assert found == corrected_rate(strata((600, 20, 19), (200, 20, 10), (200, 20, 2)))


def test_a_stratum_without_labels_leaves_no_corrected_rate() -> None:
    assert corrected_rate(strata((600, 20, 19), (200, 0, 0), (200, 20, 2))) is None
    assert weighted_error_rates(strata((600, 20, 19), (200, 0, 0), (200, 20, 2))) is None
    assert corrected_rate([]) is None


def test_an_empty_stratum_needs_none() -> None:
    found = corrected_rate(strata((600, 20, 19), (0, 0, 0), (400, 20, 2)))
    assert found is not None
    assert found.rate == pytest.approx(0.6 * 0.95 + 0.4 * 0.1)


def test_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="stratum passed: right <= labelled <= size must hold, got 21, 20 and 600"):
        corrected_rate(strata((600, 20, 21), (200, 20, 1), (200, 20, 1)))


def test_the_corrected_interval_holds_the_truth_where_the_raw_one_does_not() -> None:
    rng = np.random.default_rng(1)
    covered = above = below = raw = 0
    for seed in range(150):
        truth = rng.random(500) < 0.6
        scorer = np.where(truth, rng.random(500) < 0.8, rng.random(500) < 0.04)
        judge = np.where(truth, rng.random(500) < 0.9, rng.random(500) < 0.25)
        counts = []
        for members in (scorer, ~scorer & judge, ~scorer & ~judge):
            chosen = rng.permutation(np.flatnonzero(members))[:20]
            counts.append((int(members.sum()), len(chosen), int(truth[chosen].sum())))
        found, errors = corrected_rate(strata(*counts), seed=seed), weighted_error_rates(strata(*counts), seed=seed)
        assert found is not None
        assert errors is not None
        covered += found.ci95[0] <= 0.6 <= found.ci95[1]
        raw += abs(found.raw - 0.6) <= 1.96 * np.sqrt(found.raw * (1 - found.raw) / 500)
        above += errors.sensitivity_lower <= 0.98
        below += errors.specificity_lower <= 0.96 * 0.75
    assert covered / 150 >= 0.93
    assert raw / 150 < 0.5
    assert min(above, below) / 150 >= 0.93


def test_error_rates_are_weighted_by_how_the_labels_were_drawn() -> None:
    """Of 900 passed 5 % are wrong, of 100 failed 50 %: plain shares of 20 + 20 labels would say 19/29 and 10/11."""
    found = weighted_error_rates(
        [
            Stratum(name="passed", passed=True, size=900, labelled=20, right=19),
            Stratum(name="failed", passed=False, size=100, labelled=20, right=10),
        ]
    )
    assert found is not None
    assert found.sensitivity == pytest.approx(855 / 905)
    assert found.specificity == pytest.approx(50 / 95)
    assert found.sensitivity_lower < 855 / 905
    assert found.specificity_lower < 50 / 95


def test_without_wrong_answers_there_is_no_specificity() -> None:
    found = weighted_error_rates([Stratum(name="passed", passed=True, size=50, labelled=20, right=20)])
    assert found is not None
    assert (found.sensitivity, found.specificity, found.specificity_lower) == (1.0, None, 0.0)


def test_rogan_and_gladen_take_the_errors_out() -> None:
    found = rogan_gladen(620, 1000, right_passed=90, right_labelled=100, wrong_failed=80, wrong_labelled=100)
    assert found is not None
    assert found.rate == pytest.approx((0.62 - 0.2) / 0.7)
    assert found.assumes_same_errors
    assert found.ci95[0] < 0.6 < found.ci95[1]
    flawless = rogan_gladen(620, 1000, right_passed=9e6, right_labelled=9e6, wrong_failed=9e6, wrong_labelled=9e6)
    assert flawless is not None
    assert flawless.rate == pytest.approx(0.62)
    assert flawless.ci95 == pytest.approx((0.5896, 0.6495), abs=5e-4)  # Agresti and Coull's


def test_a_verdict_no_better_than_chance_says_nothing() -> None:
    assert rogan_gladen(50, 100, right_passed=5, right_labelled=10, wrong_failed=5, wrong_labelled=10) is None
    assert rogan_gladen(50, 100, right_passed=5, right_labelled=10, wrong_failed=0, wrong_labelled=0) is None
    assert rogan_gladen(0, 0, right_passed=9, right_labelled=10, wrong_failed=9, wrong_labelled=10) is None
    barely = rogan_gladen(50, 100, right_passed=2, right_labelled=2, wrong_failed=1, wrong_labelled=50)
    assert barely is not None
    assert barely.ci95 == (0.0, 1.0)


@pytest.mark.parametrize("right", [0.1, 0.5, 0.9])
def test_lang_and_reiczigels_interval_holds_the_truth(right: float) -> None:
    rng = np.random.default_rng(2)
    held = []
    for _ in range(1_000):
        found = rogan_gladen(
            int(rng.binomial(300, right * 0.9 + (1 - right) * 0.2)),
            300,
            right_passed=int(rng.binomial(30, 0.9)),
            right_labelled=30,
            wrong_failed=int(rng.binomial(30, 0.8)),
            wrong_labelled=30,
        )
        if found is not None:
            held.append(found.ci95[0] <= right <= found.ci95[1])
    assert np.mean(held) >= 0.93


def test_labels_drawn_by_verdict_elsewhere_hold_the_truth_once_they_are_weighted() -> None:
    """Sensitivity .9 and specificity .8 by 30 labels of each verdict in a run where 60 % are right; here 40 % are."""
    rng = np.random.default_rng(5)
    held = []
    for seed in range(250):
        truth = rng.random(600) < 0.6
        passed = np.where(truth, rng.random(600) < 0.9, rng.random(600) < 0.2)
        drawn = []
        for name, members in (("passed", passed), ("failed", ~passed)):
            chosen = rng.permutation(np.flatnonzero(members))[:30]
            right = int(truth[chosen].sum())
            drawn.append(Stratum(name=name, passed=name == "passed", size=int(members.sum()), labelled=30, right=right))
        errors = weighted_error_rates(drawn, seed=seed)
        assert errors is not None
        assert errors.sensitivity is not None
        assert errors.specificity is not None
        found = rogan_gladen(
            int(rng.binomial(500, 0.4 * 0.9 + 0.6 * 0.2)),
            500,
            right_passed=errors.sensitivity * errors.right_n,
            right_labelled=errors.right_n,
            wrong_failed=errors.specificity * errors.wrong_n,
            wrong_labelled=errors.wrong_n,
        )
        if found is not None:
            held.append(found.ci95[0] <= 0.4 <= found.ci95[1])
    assert len(held) > 240
    assert np.mean(held) >= 0.93
