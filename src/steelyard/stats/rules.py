"""Rules on figures, `pass_rate>=0.8` or `ttft_p99<500ms`: the one grammar of gates and of a sweep's objectives.

A rule is a figure, a comparison, a limit and, where that fits the figure, a unit.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from decimal import Decimal

import msgspec

from steelyard.stats.figures import PERCENT, SECONDS, Figure, full_name
from steelyard.stats.metrics import figure_of, slice_of

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
