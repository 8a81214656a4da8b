"""Spending of a run: exact sums, the same in any order, with calls of unknown cost counted separately."""

from __future__ import annotations

import math
from typing import Any, Protocol

_UNIT = 1e12
"""Costs are summed as whole numbers of 1e-12: exact for one token at any price per million tokens with up to six
decimals. A million of them add up to the last digit, which floats do not."""

_LIMIT = 1e9
"""A single call above this is a mistake, and counted as unknown."""


class Costed(Protocol):
    """What Spending reads of a response or a record."""

    @property
    def error(self) -> str | None: ...
    @property
    def cached(self) -> bool: ...
    @property
    def cost(self) -> float | None: ...
    @property
    def tokens_estimated(self) -> bool: ...


class Spending:
    """The cost of answers, failed calls and judges, and the number of calls whose cost is not known.

    Add each answer that counts, and each error, superseded or not: it was paid for.
    """

    def __init__(self, currency: str = "USD", unknown_because: str | None = None) -> None:
        self.currency = currency
        self.unknown_because = unknown_because
        """Why no price is known, where one is expected."""
        self.calls = 0
        """Number of answers and errors with a known cost."""
        self.unknown = 0
        """Number of answers without one."""
        self.unknown_errors = 0
        self.unknown_judges = 0
        self.estimated = 0
        """Number of answers whose cost comes from estimated tokens."""
        self._answers = 0
        self._errors = 0
        self._judges = 0

    def update(self, record: Costed) -> None:
        """Add an answer or an error. One from the cache costs nothing now."""
        if record.cached:
            return
        units = _units(record.cost)
        failed = record.error is not None
        if units is None:
            self.unknown_errors += failed
            self.unknown += not failed
            return
        self.calls += 1
        if failed:
            self._errors += units
        else:
            self._answers += units
            self.estimated += record.tokens_estimated

    def update_judge(self, cost: float | None) -> None:
        """Add one call of a judge."""
        units = _units(cost)
        if units is None:
            self.unknown_judges += 1
        else:
            self._judges += units

    def merge(self, other: Spending) -> None:
        """Add another's calls, as if each had been counted here."""
        self.unknown_because = self.unknown_because or other.unknown_because
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)

    @property
    def answers(self) -> float:
        return self._answers / _UNIT

    @property
    def errors(self) -> float:
        return self._errors / _UNIT

    @property
    def judges(self) -> float:
        return self._judges / _UNIT

    @property
    def total(self) -> float:
        """Everything that is known to be spent."""
        return (self._answers + self._errors + self._judges) / _UNIT

    @property
    def per_call(self) -> float:
        """What a call has cost so far on average, its judges included; 0 before any is known."""
        return self.total / self.calls if self.calls else 0.0

    def to_metrics(self, *, n: int, passed: int) -> dict[str, Any]:
        """The figures for `metrics.json`: of `n` records, `passed` of them good. None where nothing is known."""
        nothing_known = not (self.calls or self._judges) and bool(
            self.unknown or self.unknown_errors or self.unknown_judges
        )
        total = None if nothing_known else self.total
        return {
            "cost": total,
            "cost_answers": None if total is None else self.answers,
            "cost_errors": None if total is None else self.errors,
            "cost_judges": None if total is None else self.judges,
            "cost_per_1000_cases": None if total is None or not n else total * 1000 / n,
            "cost_per_passed_case": None if total is None or not passed else total / passed,
            "cost_unknown": self.unknown,
            "cost_unknown_errors": self.unknown_errors,
            "cost_unknown_judges": self.unknown_judges,
            "cost_unknown_because": self.unknown_because,
            "cost_estimated": self.estimated,
            "currency": self.currency,
        }


def _units(cost: float | None) -> int | None:
    """Return a cost as a whole number; None when it is missing, negative, NaN or too large."""
    if cost is None or not 0 <= cost < _LIMIT:
        return None
    return round(cost * _UNIT)


def format_money(amount: float, currency: str) -> str:
    """Format an amount to the cent, or to two digits where it is less than that: 12.30 USD, 0.0042 USD."""
    digits = 2
    if 0 < abs(amount) < 1:
        digits = max(2, 1 - math.floor(math.log10(abs(amount))))
    return f"{amount:,.{digits}f} {currency}"
