"""Whether a judge may be trusted: sensitivity, specificity, grades, the human ceiling, and how many labels it takes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from steelyard.stats.agreement import (
    PassFailAgreement,
    cohen_kappa,
    consensus,
    graded_agreement,
    human_ceiling,
    labels_needed_for_rate,
    pass_fail_agreement,
    spearman_lower,
)
from steelyard.stats.intervals import BoundedMean


def judged(passed: tuple[int, int], failed: tuple[int, int]) -> PassFailAgreement:
    """A judge that agrees on the first of each pair of numbers of labels."""
    labels = [True] * passed[1] + [False] * failed[1]
    verdicts = [i < passed[0] for i in range(passed[1])] + [i >= failed[0] for i in range(failed[1])]
    return pass_fail_agreement(labels, verdicts)


def test_sensitivity_and_specificity_have_one_sided_exact_ends() -> None:
    found = judged((18, 20), (45, 50))
    for kind, (right, n) in ((found.sensitivity, (18, 20)), (found.specificity, (45, 50))):
        oracle = stats.binomtest(right, n, alternative="greater").proportion_ci(0.95, method="exact").low
        assert (kind.labels, kind.cases, kind.rate) == (n, n, right / n)
        assert kind.lower == pytest.approx(oracle)
    assert found.balanced_accuracy == pytest.approx(0.9)
    assert found.trust.trusted


def test_a_judge_that_passes_everything_is_not_trusted() -> None:
    found = judged((90, 90), (0, 10))
    assert not found.trust.trusted
    assert "specificity 0.00 is below 0.80" in found.trust.reason
    assert found.trust.more is None


def test_a_flawless_judge_is_trusted_from_nine_labels_of_each_kind() -> None:
    assert judged((9, 9), (9, 9)).trust.trusted
    found = judged((30, 30), (6, 6)).trust
    assert (found.trusted, found.scarce, found.more) == (False, "failed", 3)
    assert "about 3 more labels of answers that failed" in found.reason
    assert judged((0, 0), (6, 6)).trust.scarce == "passed"


def test_it_says_how_many_more_of_which_kind() -> None:
    found = judged((17, 20), (50, 50)).trust
    assert (found.trusted, found.scarce) == (False, "passed")
    assert found.more == labels_needed_for_rate(0.85, 20)
    total = 20 + (found.more or 0)
    assert stats.beta.ppf(0.05, 0.85 * total, 0.15 * total + 1) > 0.70
    assert labels_needed_for_rate(0.7, 20) is None


def test_a_judge_just_right_in_70_of_100_is_hardly_ever_trusted() -> None:
    """Exactly: the other kind is flawless, so that all depends on this one."""
    for n in (9, 20, 50):
        trusted = [judged((right, n), (50, 50)).trust.trusted for right in range(n + 1)]
        assert np.dot(trusted, stats.binom.pmf(np.arange(n + 1), n, 0.70)) <= 0.05


@pytest.mark.parametrize(("n", "rate", "wanted"), [(20, 0.95, 0.80), (50, 0.90, 0.90)])
def test_a_good_judge_is_mostly_trusted(n: int, rate: float, wanted: float) -> None:
    trusted = [judged((right, n), (50, 50)).trust.trusted for right in range(n + 1)]
    assert np.dot(trusted, stats.binom.pmf(np.arange(n + 1), n, rate)) ** 2 >= wanted


def test_several_labels_of_one_case_are_not_new_evidence() -> None:
    labels, verdicts = [True] * 30 + [False] * 30, [True] * 30 + [False] * 30
    alone = pass_fail_agreement(labels, verdicts)
    together = pass_fail_agreement(labels, verdicts, [i // 5 for i in range(60)])
    assert alone.trust.trusted
    assert not together.trust.trusted
    assert (together.sensitivity.labels, together.sensitivity.cases) == (30, 6)
    uneven = pass_fail_agreement(labels, [*verdicts[:28], False, False, *verdicts[30:]], [i // 3 for i in range(60)])
    expected = BoundedMean([1.0] * 9 + [1 / 3]).lower(0.05)
    assert uneven.sensitivity.lower == pytest.approx(expected, abs=1e-9)


def test_labels_verdicts_and_cases_must_match() -> None:
    with pytest.raises(ValueError, match="each label needs a verdict and a case"):
        pass_fail_agreement([True], [True, False])


# Grades


def test_the_lower_end_of_rho_is_bonett_and_wrights() -> None:
    found = spearman_lower(0.85, 50)
    assert found == pytest.approx(math.tanh(math.atanh(0.85) - 1.6449 * math.sqrt((1 + 0.85**2 / 2) / 47)), abs=1e-4)
    assert spearman_lower(0.9, 3) is None
    with pytest.raises(ValueError, match=r"rho must be within -1\.\.1"):
        spearman_lower(1.1, 10)


def test_a_perfect_rho_is_not_certain() -> None:
    few, many = spearman_lower(1.0, 10), spearman_lower(1.0, 100)
    assert few is not None
    assert many is not None
    assert few < many < 1


def test_grades_are_trusted_by_rho_and_its_lower_end() -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(1, 6, 60).astype(float)
    good = graded_agreement(labels, labels + rng.normal(0, 0.5, 60))
    assert good.trust.trusted
    assert good.rho == pytest.approx(stats.spearmanr(labels, labels).statistic, abs=0.2)
    assert not graded_agreement(labels, rng.random(60)).trust.trusted
    assert graded_agreement(labels[:8], labels[:8]).trust.more == 2
    assert not graded_agreement(labels, np.ones(60)).trust.trusted
    few = graded_agreement(labels[:15], labels[:15] + rng.normal(0, 1.0, 15))
    assert few.trust.scarce == "graded"
    assert few.trust.more is not None
    one_case = graded_agreement(labels, labels, ["same"] * 60)
    assert (one_case.cases, one_case.trust.trusted) == (1, False)


def test_a_rho_of_70_is_hardly_ever_trusted() -> None:
    rng = np.random.default_rng(2)
    strength = 2 * math.sin(math.pi * 0.70 / 6)
    trusted = 0
    for _ in range(400):
        x = rng.normal(size=40)
        trusted += graded_agreement(x, strength * x + math.sqrt(1 - strength**2) * rng.normal(size=40)).trust.trusted
    assert trusted / 400 <= 0.05


# Several labellers


def test_the_consensus_is_the_mean_of_those_who_spoke() -> None:
    found = consensus(np.array([[1.0, 0.0, np.nan], [np.nan] * 3, [1.0, 1.0, 0.0]]))
    assert found == pytest.approx([0.5, np.nan, 2 / 3], nan_ok=True)


def test_the_human_ceiling_is_how_labellers_agree_with_the_others() -> None:
    labels = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1], [1, np.nan, np.nan]], dtype=float)
    found = human_ceiling(labels)
    assert found is not None
    assert (found.labellers, found.cases) == (3, 5)
    # Where the other two agree: 1s of row 0 and 4 (6 of 6), the 0 of row 1 against two 1s; 0s of rows 2 and 3.
    assert found.sensitivity == pytest.approx(6 / 7)
    assert found.specificity == 1.0
    pairs = [cohen_kappa(labels[:5, i].tolist(), labels[:5, j].tolist()) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert found.kappa == pytest.approx(np.mean([kappa for kappa in pairs if kappa is not None]))
    assert human_ceiling(np.array([[1.0, np.nan]])) is None


def test_the_ceiling_of_grades_is_rho_with_the_mean_of_the_others() -> None:
    rng = np.random.default_rng(4)
    truth = rng.normal(size=80)
    labels = truth[:, None] + rng.normal(0, 0.4, (80, 3))
    found = human_ceiling(labels, graded=True)
    assert found is not None
    expected = [stats.spearmanr(labels[:, i], np.delete(labels, i, 1).mean(axis=1)).statistic for i in range(3)]
    assert found.rho == pytest.approx(np.mean(expected))
