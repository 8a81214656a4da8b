"""Rules on figures, `pass_rate>=0.8` or `ttft_p99<500ms`: how they are written, and stopping a run when one is decided.

A rule is a figure, a comparison, a limit and, where that fits the figure, a unit: the one grammar of gates and of a
sweep's objectives.

A rule can be decided before the end, at any moment, with the error that was promised. Cases must come in a random order
that does not depend on their answers. A rule about this suite's own rate is decided without replacement: what is left
is finite, and at the end it is known. A rule against a baseline is about cases like these, so it is decided as for a
sample. Both keep a wealth that grows by betting against the hypothesis: if that is true, the chance that it ever
reaches 1/alpha is at most alpha (Waudby-Smith and Ramdas 2020, 2023).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.stats.figures import PERCENT, SECONDS, Figure, full_name
from steelyard.stats.intervals import Floats
from steelyard.stats.metrics import figure_of, slice_of
from steelyard.stats.paired import NonInferiority, non_inferiority

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_SCALES = {**SECONDS, "%": PERCENT, "": Decimal(1)}
_RULE = re.compile(
    r"\s*(?P<name>[^\[]+\[[^\[\]=]+=.*\]|.+?)\s*(?P<operator><=|>=|==|!=|<|>)\s*"
    r"(?P<number>[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>[A-Za-zµ%]*)\s*",
    re.DOTALL,
)


class Rule(msgspec.Struct, frozen=True):
    """A figure's name, how it is compared, and with what, in the figure's own unit."""

    text: str
    """As it was written."""
    name: str
    """The figure's name in the metrics: `error_rate`, `time_to_first_token-p99`."""
    operator: str
    limit: float
    unit: str = ""
    """As it was written: `ms`, `%`; empty where there was none."""

    @property
    def figure(self) -> Figure | None:
        """What is known of the figure; None for a name that no run has."""
        return figure_of(self.name)

    @property
    def of_speed(self) -> bool:
        """Whether it is about latency or throughput: figures that a busy client distorts."""
        return self.figure is not None and self.figure.kind == "speed"

    @property
    def of_quality(self) -> bool:
        """Whether it is about how good the answers are, and not about how many there are."""
        return self.figure is not None and self.figure.kind == "quality" and self.figure.better == "higher"

    @property
    def holds_though_late(self) -> bool:
        """Whether it holds for sure where it holds although the client was late: that can only add to the figure."""
        return self.operator.startswith("<") and self.figure is not None and self.figure.lateness_adds

    @property
    def of_cost(self) -> bool:
        """Whether it is about money, and not about how many calls' cost is known."""
        return self.figure is not None and self.figure.kind == "cost"

    def holds(self, value: float) -> bool:
        """Whether a figure of this value keeps the rule."""
        return bool(COMPARISONS[self.operator](value, self.limit))


def read_rule(text: str) -> Rule | None:
    """A rule as it is written; None for what is none. Whether the unit fits the figure is not looked at."""
    found = _RULE.fullmatch(text)
    if found is None:
        return None
    unit = found["unit"] if found["unit"] in _SCALES else found["unit"].lower()
    of_slice = slice_of(found["name"])
    written = found["name"] if of_slice is None else of_slice[0].strip()
    name = full_name(written) or re.sub(r"^scores\.", "score.", written)
    if of_slice is not None:
        name += f"[{of_slice[1]}={of_slice[2]}]"
    limit = float(Decimal(found["number"]) * _SCALES.get(unit, Decimal(1)))
    return Rule(text.strip(), name, found["operator"], limit, unit)


def unit_problem(rule: Rule) -> str | None:
    """Why the rule's unit does not fit its figure, or the limit is one that no share can have; None where all fits."""
    unit = None if rule.figure is None else rule.figure.unit
    if rule.unit == "%" and unit not in ("share", "ratio"):
        return f"{rule.name} is not a share that could be given in %"
    if rule.unit in SECONDS and unit != "seconds":
        return f"{rule.name} is not a time that could be given in {rule.unit}"
    if unit == "share" and rule.limit > 1:
        return "that is a share above 1" + ("" if rule.unit else f"; did you mean {rule.limit:g}%?")
    return None


def is_unit(unit: str) -> bool:
    """Whether a limit may be given in it; the empty text is one."""
    return unit in _SCALES


def show(value: float, unit: str) -> str:
    """A value in the unit of a rule: `412.5 ms`, `80%`, `1,200`."""
    number = value / float(_SCALES[unit])
    text = f"{number:,.0f}" if float(number).is_integer() and abs(number) < 1e15 else f"{number:,.4g}"
    return _with_unit(text, unit)


def show_distinctly(value: float, rule: Rule) -> str:
    """The value, with more digits where fewer would make it look like the limit."""
    shown = show(value, rule.unit)
    if value == rule.limit or shown != show(rule.limit, rule.unit):
        return shown
    return _with_unit(f"{value / float(_SCALES[rule.unit]):.12g}", rule.unit)


def _with_unit(number: str, unit: str) -> str:
    return f"{number} {unit}" if unit not in ("", "%") else number + unit


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
