"""Stopping when it is decided: the wealth against its definition, errors by exact enumeration, and what is certain."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import gammaln, logsumexp

from steelyard.stats.rules import (
    BaselineRule,
    SuiteRateRule,
    ThresholdRule,
    decide_at_the_end,
    passes_needed,
)


def reference(suite: int, needed: int, passed: int, failed: int) -> str | None:
    """The same decision written down plainly, with scipy."""
    if passed >= needed:
        return "pass"
    if failed > suite - needed:
        return "fail"

    def path(total: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            k = np.asarray(total, float)
            value = gammaln(k + 1) - gammaln(k - passed + 1) + gammaln(suite - k + 1) - gammaln(suite - k - failed + 1)
        return np.where((k < passed) | (suite - k < failed), -np.inf, value)

    high, low = np.arange(needed, suite + 1), np.arange(needed)
    up = logsumexp(path(high)) - np.log(len(high)) - path(np.array(needed - 1))
    down = logsumexp(path(low)) - np.log(len(low)) - path(np.array(needed))
    return "pass" if up >= math.log(20) else "fail" if down >= math.log(20) else None


@pytest.mark.parametrize(
    ("threshold", "suite", "strict", "needed"),
    [(0.9, 10, False, 9), (0.9, 10, True, 10), (0.7, 10, False, 7), (0.85, 10, False, 9), (0.0, 5, False, 0)],
)
def test_a_threshold_is_a_number_of_passes(threshold: float, suite: int, strict: bool, needed: int) -> None:
    assert passes_needed(threshold, suite, strict=strict) == needed


@pytest.mark.parametrize(("suite", "needed"), [(60, 54), (40, 20), (30, 30)])
def test_a_decision_is_the_mixtures(suite: int, needed: int) -> None:
    rule = ThresholdRule(suite, needed)
    for asked in range(suite + 1):
        for passed in range(asked + 1):
            assert rule.decision_at(passed, asked - passed) == reference(suite, needed, passed, asked - passed)


@pytest.mark.parametrize("passes", [53, 54, 57])
def test_it_seldom_decides_otherwise_than_the_whole_suite_would(passes: int) -> None:
    """Exactly, over all orders: the chance of each number of passes so far, until it is decided."""
    suite, needed = 60, 54
    rule = ThresholdRule(suite, needed)
    reached, wrong = {0: 1.0}, 0.0
    for asked in range(suite):
        after: dict[int, float] = {}
        for passed, chance in reached.items():
            up = (passes - passed) / (suite - asked)
            for number, share in ((passed + 1, up), (passed, 1 - up)):
                if share > 0:
                    after[number] = after.get(number, 0.0) + chance * share
        reached = {}
        for passed, chance in after.items():
            decision = rule.decision_at(passed, asked + 1 - passed)
            if decision is None:
                reached[passed] = chance
            else:
                wrong += chance * (decision != ("pass" if passes >= needed else "fail"))
    assert not reached
    assert wrong <= 0.05


def test_what_is_certain_is_decided_at_once_and_stays_so() -> None:
    rule = ThresholdRule(10, 3)
    assert [rule.update(True) for _ in range(3)][-1] == "pass"
    assert rule.update(False) == "pass"
    assert ThresholdRule(10, 0).decision == "pass"
    assert ThresholdRule(10, 11).decision == "fail"
    done = ThresholdRule(1, 1)
    assert done.update(False) == "fail"
    with pytest.raises(ValueError, match="all 1 cases have been counted"):
        done.update(True)


def test_a_suite_far_above_its_bar_is_decided_early() -> None:
    rng = np.random.default_rng(1)
    asked = []
    for _ in range(20):
        rule = ThresholdRule(1_000, 900)
        order = rng.permutation(np.arange(1_000) < 950).tolist()
        asked.append(next(i for i, passed in enumerate(order, 1) if rule.update(passed)))
        assert rule.decision == "pass"
    assert np.mean(asked) / 1_000 == pytest.approx(0.16, abs=0.05)


def test_a_large_suite_is_looked_at_now_and_then() -> None:
    rule = ThresholdRule(50_000, 45_000)
    seen = [rule.update(True) for _ in range(150)]
    assert seen.index("pass") % 50 == 49


# Groups and missing verdicts


@pytest.mark.parametrize(("rate", "groups"), [(0.9, 40), (0.8, 40)])
def test_whole_groups_are_decided_as_the_suite_is(rate: float, groups: int) -> None:
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(100):
        sizes = rng.integers(1, 9, groups)
        hits = rng.binomial(sizes, rng.beta(rate, 1 - rate, groups))
        rule = SuiteRateRule(0.9, sizes.tolist())
        for size, hit in zip(sizes.tolist(), hits.tolist(), strict=True):
            rule.update(hit, size, size)
        wrong += rule.decision != ("pass" if hits.sum() >= passes_needed(0.9, int(sizes.sum())) else "fail")
    assert wrong / 100 <= 0.05


def test_cases_without_a_verdict_do_not_count() -> None:
    rule = SuiteRateRule(0.5, 5)
    assert [rule.update(0, 0), rule.update(1, 1), rule.update(0, 0)] == [None, None, None]
    assert rule.update(0, 0) == "pass"  # with one case left, it is 1 of 2 at worst
    strict = SuiteRateRule(0.5, 2, strict=True)
    assert strict.update(1, 1) is None
    assert strict.update(0, 1) == "fail"
    with pytest.raises(ValueError, match="passed <= decided <= size <= 1 must hold"):
        SuiteRateRule(0.5, 4).update(1, 1, 2)
    with pytest.raises(ValueError, match=r"threshold must be within 0\.\.1"):
        SuiteRateRule(2, 4)


def test_single_cases_without_groups_are_decided_early_too() -> None:
    rule = SuiteRateRule(0.5, 1_000)
    assert next(i for i in range(1, 1_001) if rule.update(1, 1)) < 20


# Against a baseline


def test_the_wealth_is_a_mixture_of_bets() -> None:
    rng = np.random.default_rng(3)
    differences = rng.choice([1.0, -1.0, 0.0], 400, p=[0.03, 0.02, 0.95])
    bets = np.linspace(0.02, 0.98, 25)
    wealth = np.exp(np.cumsum(np.log1p(bets * (differences[:, None] + 0.05) / 0.95), axis=0)).mean(axis=1)
    moment = int(np.argmax(wealth >= 200)) + 1
    rule = BaselineRule(0.05)
    assert next(i for i, difference in enumerate(differences.tolist(), 1) if rule.update(difference)) == moment
    assert (rule.decision, rule.asked) == ("pass", moment)


def test_a_drop_that_is_shown_fails_early() -> None:
    rule = BaselineRule(0.05)
    for difference in [-1.0, 0.0] * 30:
        rule.update(difference)
    assert rule.decision == "fail"
    assert rule.update(1.0) == "fail"


def test_early_and_late_false_passes_add_up_to_25_in_1000_at_most() -> None:
    rng = np.random.default_rng(4)
    passed = 0
    for differences in rng.choice([1.0, -1.0, 0.0], (150, 100), p=[0.02, 0.12, 0.86]):
        rule = BaselineRule(0.1)
        for difference in differences.tolist():
            if rule.update(difference):
                break
        end = decide_at_the_end(differences, 0.1, plan=False)
        assert end is not None
        passed += rule.decision == "pass" or (rule.decision is None and end.outcome == "kept")
    assert passed / 150 <= 0.025


def test_a_whole_group_weighs_what_its_cases_do() -> None:
    grouped, single = BaselineRule(0.05, largest_group=4), BaselineRule(0.05)
    grouped.update(0.5, size=4)
    single.update(0.5)
    assert (grouped.asked, single.asked) == (4, 1)
    with pytest.raises(ValueError, match=r"size must be within 1\.\.4, got 5"):
        grouped.update(0.0, size=5)
    with pytest.raises(ValueError, match=r"a difference must be within -1\.\.1"):
        grouped.update(2.0)
    with pytest.raises(ValueError, match=r"margin must be within 0\.\.1"):
        BaselineRule(1.0)
