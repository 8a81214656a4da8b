"""One measured figure and its limit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A figure, usually a ratio to a baseline measured in the same run."""

    what: str
    value: float
    limit: float
    detail: str
    unit: str = "×"
    at_least: bool = False

    @property
    def ok(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        verdict = "ok  " if self.ok else "MISS"
        figure = f"{self.value:.2f} {self.unit}"
        return f"  {verdict}  {self.what:<58} {figure:>18}   {sign} {self.limit:g}\n          {self.detail}"
