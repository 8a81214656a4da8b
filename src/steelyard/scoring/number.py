"""The scorer that compares the final number of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal

from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.number_text import final_number, is_plain
from steelyard.scoring.plain import PlainScorer, alternatives, check_choice, check_number, shown

# What separates 0.30000000000000004, computed, from 0.3, written. Whole numbers are compared exactly.
_ROUNDING = Decimal("1e-12")


@dataclass(frozen=True, kw_only=True)
class Number(PlainScorer):
    """Passes when the final number of the answer is the expected one, within `tolerance` or `relative_tolerance`.

    With `percent="keep"` 18% is 18, with "fraction" it is 0.18, in the answer and in the expected text alike.
    """

    name: str = "number"
    tolerance: float = 0.0
    relative_tolerance: float = 0.0
    percent: Literal["keep", "fraction"] = "keep"

    def _check(self) -> None:
        check_number("tolerance", self.tolerance)
        check_number("relative_tolerance", self.relative_tolerance)
        check_choice("percent", self.percent, ("keep", "fraction"))

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """1.0 or 0.0; None when the case expects nothing."""
        if case.expected is None:
            return None
        text = response.response_text or ""
        if text == case.expected and is_plain(text):  # as right answers mostly are: no need to read either
            return self._score(True)
        wanted = [self._expected(item) for item in alternatives(case.expected)]
        got = self._read(text)
        if got is None:
            return self._score(False, f"no number in {shown(text)}")
        if any(self._close(item, got) for item in wanted):
            return self._score(True)
        return self._score(False, f"expected {' or '.join(map(_shown_number, wanted[:3]))}, got {_shown_number(got)}")

    def _expected(self, item: Any) -> Decimal:
        value = as_decimal(item) if not isinstance(item, str) else self._read(item)
        if value is None:
            raise ValueError(f"expected holds no number: {shown(item)}")
        return value

    def _read(self, text: str) -> Decimal | None:
        return final_number(text, percent_as_fraction=self.percent == "fraction")

    def _close(self, wanted: Decimal, got: Decimal) -> bool:
        return close(wanted, got, *self._tolerances)

    @cached_property
    def _tolerances(self) -> tuple[Decimal, Decimal]:
        return Decimal(repr(self.tolerance)), Decimal(repr(self.relative_tolerance))


def _shown_number(number: Decimal) -> str:
    """Twelve digits of a number; a short one is spelled as it is, which is much faster."""
    text = str(number)
    return text if len(text) <= 12 and text.isdecimal() else f"{number:.12g}"


def as_decimal(value: object) -> Decimal | None:
    """A JSON number as it is written; None for anything that is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    exact = Decimal(value) if isinstance(value, int) else Decimal(repr(value))
    return exact if exact.is_finite() else None


def close(wanted: Decimal, got: Decimal, tolerance: Decimal, relative_tolerance: Decimal) -> bool:
    """Whether two numbers are the same, but for the tolerances and the last digits that floats lose."""
    if wanted == got:
        return True
    if not tolerance and not relative_tolerance and abs(wanted - got) >= 1 > abs(wanted) * _ROUNDING:
        return False  # as wrong answers mostly are: a whole one off
    whole = wanted == wanted.to_integral_value() and got == got.to_integral_value()
    relative = relative_tolerance if whole else max(relative_tolerance, _ROUNDING)
    return abs(wanted - got) <= max(tolerance, relative * abs(wanted))
