"""Stopping a run when its gate is decided, at any moment, with the error that was promised.

Cases must come in a random order that does not depend on their answers. A rule about this suite's own rate is decided
without replacement: what is left is finite, and at the end it is known. A rule against a baseline is about cases like
these, so it is decided as for a sample. Both keep a wealth that grows by betting against the hypothesis: if that is
true, the chance that it ever reaches 1/alpha is at most alpha (Waudby-Smith and Ramdas 2020, 2023).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from steelyard.stats.intervals import Floats
from steelyard.stats.paired import NonInferiority, non_inferiority

Decision: TypeAlias = Literal["pass", "fail"]
Integers: TypeAlias = npt.NDArray[np.int64]

ALPHA_EARLY, ALPHA_END = 0.005, 0.02
"""Of a baseline rule's 2.5 %, what stopping early may use up, and what is left for the end."""

_LOOKS = 1_000
"""How often at most a threshold rule is looked at: a look costs time in proportion to the suite."""
_BETS: Floats = np.linspace(0.02, 0.98, 25)


def passes_needed(threshold: float, suite: int, *, strict: bool = False) -> int:
    """How many of a suite's cases must pass for the rate to be at least (`strict`: above) the threshold."""
    exact = threshold * suite
    nearest = round(exact)
    if math.isclose(exact, nearest, rel_tol=1e-12, abs_tol=1e-9):  # 90 % of 10 is 9, whatever floating point says
        return nearest + strict
    return math.ceil(exact)


class ThresholdRule:
    """Whether at least `needed` of a suite's cases pass, each case a pass or a fail, asked in random order.

    The wealth is a mixture of hypergeometric likelihoods over the numbers of passes on one side, against the nearest
    number on the other. What is certain, because enough have passed or failed, is decided at once.
    """

    def __init__(self, suite: int, needed: int, alpha: float = 0.05) -> None:
        if suite < 1:
            raise ValueError(f"suite must be >= 1, got {suite}")
        self.suite, self.needed, self.alpha = suite, needed, alpha
        self.passed = self.failed = 0
        self.decision: Decision | None = None
        self._log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, suite + 1)))])
        self._every = max(1, suite // _LOOKS)
        self._settle()

    def update(self, passed: bool) -> Decision | None:
        """Count in the next case of the random order; the decision so far. What comes after it changes nothing."""
        if self.passed + self.failed >= self.suite:
            raise ValueError(f"all {self.suite} cases have been counted")
        self.passed += passed
        self.failed += not passed
        if self.decision is None:
            self._settle()
        return self.decision

    def decision_at(self, passed: int, failed: int) -> Decision | None:
        """What is decided after these passes and fails, were this the first look."""
        if passed >= self.needed:
            return "pass"
        if failed > self.suite - self.needed:
            return "fail"
        bar = -math.log(self.alpha)
        high = np.arange(self.needed, self.suite - failed + 1)
        if self._log_wealth(high, self.needed - 1, passed, failed) >= bar + math.log(self.suite - self.needed + 1):
            return "pass"
        low = np.arange(passed, self.needed)
        if self._log_wealth(low, self.needed, passed, failed) >= bar + math.log(self.needed):
            return "fail"
        return None

    def _settle(self) -> None:
        certain = self.passed >= self.needed or self.failed > self.suite - self.needed
        if certain or (self.passed + self.failed) % self._every == 0:
            self.decision = self.decision_at(self.passed, self.failed)

    def _log_wealth(self, numbers: Integers, against: int, passed: int, failed: int) -> float:
        """How much likelier what was seen is under these numbers of passes, added up, than under one `against` them."""
        logs = self._log_likelihood(numbers, passed, failed)
        most = float(logs.max())
        reference = float(self._log_likelihood(np.array([against]), passed, failed)[0])
        return most + math.log(float(np.exp(logs - most).sum())) - reference

    def _log_likelihood(self, passes: Integers, passed: int, failed: int) -> Floats:
        """The likelihood of this path if the suite holds that many passes, up to a constant."""
        table, fails = self._log_factorials, self.suite - passes
        logs: Floats = table[passes] - table[passes - passed] + table[fails] - table[fails - failed]
        return logs


class SuiteRateRule:
    """Whether a suite's rate reaches a threshold, where cases come in whole groups or may be left without a verdict.

    The rate is passed / decided over all cases. A unit (a group, or a single case) adds passed − threshold × decided;
    the rule is whether these add up to 0 or more. As units are drawn without replacement, what the rest must average
    if they just did not is known at each moment, and that is what is bet against.
    """

    def __init__(
        self, threshold: float, sizes: Sequence[int] | int, *, strict: bool = False, alpha: float = 0.05
    ) -> None:
        """`sizes` are those of the groups, or a number of single cases."""
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold must be within 0..1, got {threshold}")
        self.threshold, self.strict, self.alpha = threshold, strict, alpha
        self._units = sizes if isinstance(sizes, int) else len(sizes)
        self._cases = sizes if isinstance(sizes, int) else sum(sizes)
        self._largest = 1 if isinstance(sizes, int) else max(sizes, default=1)
        self.passed = self.decided = self.asked = self._seen = 0
        self.decision: Decision | None = None
        self._above, self._below = np.zeros(len(_BETS)), np.zeros(len(_BETS))
        self._settle()

    def update(self, passed: int, decided: int, size: int = 1) -> Decision | None:
        """Count in the next unit: how many of its cases passed, have a verdict, and are there at all."""
        if not 0 <= passed <= decided <= size <= self._largest:
            raise ValueError(f"passed <= decided <= size <= {self._largest} must hold, got {passed}, {decided}, {size}")
        if self.decision is None:
            self._bet((passed - self.threshold * decided) / self._largest)
        self.passed += passed
        self.decided += decided
        self.asked += size
        self._seen += 1
        if self.decision is None:
            self._settle()
        return self.decision

    def _bet(self, value: float) -> None:
        left = self._units - self._seen
        # What the rest would average, this unit included, if all of them added up to exactly 0.
        average = -(self.passed - self.threshold * self.decided) / self._largest / left
        least, most = -self.threshold, 1 - self.threshold
        if least < average < most:
            self._above += np.log1p(_BETS * (value - average) / (average - least))
            self._below += np.log1p(-_BETS * (value - average) / (most - average))

    def _settle(self) -> None:
        lead = self.passed - self.threshold * self.decided
        left = self._cases - self.asked
        ahead, behind = lead - self.threshold * left, lead + (1 - self.threshold) * left
        if ahead > 1e-9 or (not self.strict and ahead > -1e-9):
            self.decision = "pass"
        elif behind < -1e-9 or (self.strict and behind < 1e-9):
            self.decision = "fail"
        elif _mixed(self._above) >= 1 / self.alpha:
            self.decision = "pass"
        elif _mixed(self._below) >= 1 / self.alpha:
            self.decision = "fail"


class BaselineRule:
    """Whether a drop of more than `margin` against a baseline is ruled out ("pass") or shown ("fail").

    Early a mixture of bets decides, at a small alpha; at the end the bound of `paired`, at what is left of 2.5 %.
    """

    def __init__(self, margin: float, *, largest_group: int = 1, alpha: float = ALPHA_EARLY) -> None:
        if not 0 <= margin < 1:
            raise ValueError(f"margin must be within 0..1, got {margin}")
        self.margin, self.alpha, self._largest = margin, alpha, largest_group
        self.asked = 0
        self.decision: Decision | None = None
        self._above, self._below = np.zeros(len(_BETS)), np.zeros(len(_BETS))

    def update(self, difference: float, size: int = 1) -> Decision | None:
        """Count in the next case, or a whole group's mean difference and size; the decision so far."""
        if not -1 <= difference <= 1:
            raise ValueError(f"a difference must be within -1..1, got {difference}")
        if not 1 <= size <= self._largest:
            raise ValueError(f"size must be within 1..{self._largest}, got {size}")
        self.asked += size
        if self.decision is None:
            beyond = (difference + self.margin) * size / self._largest
            self._above += np.log1p(_BETS * beyond / (1 - self.margin))
            self._below += np.log1p(-_BETS * beyond / (1 + self.margin))
            if _mixed(self._above) >= 1 / self.alpha:
                self.decision = "pass"
            elif _mixed(self._below) >= 1 / self.alpha:
                self.decision = "fail"
        return self.decision


def decide_at_the_end(
    differences: Sequence[float] | Floats,
    margin: float,
    groups: Sequence[Hashable] | None = None,
    *,
    alpha: float = ALPHA_END,
    plan: bool = True,
) -> NonInferiority | None:
    """The verdict of a baseline rule that was not decided early, on all cases; None without any."""
    return non_inferiority(differences, margin, groups, alpha=alpha, plan=plan)


def _mixed(logs: Floats) -> float:
    """The wealth of all bets together, each begun with the same share."""
    most = float(logs.max())
    return math.exp(min(most, 700.0)) * float(np.exp(logs - most).mean())
