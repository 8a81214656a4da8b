"""Scorers that compare text."""

from __future__ import annotations

from steelyard.contracts import Identity
from steelyard.records import EvalCase, InvocationResponse, Score

_SHOWN = 200


class Exact:
    """Passes when the answer, stripped, is the expected text, or one of them when `expected` is a list."""

    def __init__(self, *, ignore_case: bool = False, name: str = "exact") -> None:
        self.ignore_case = ignore_case
        self.name = name

    def identity(self) -> Identity:
        return {"kind": "exact", "name": self.name, "ignore_case": self.ignore_case}

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """1.0 or 0.0; None when the case expects nothing."""
        if case.expected is None:
            return None
        wanted = case.expected if isinstance(case.expected, list) else [case.expected]
        got = self._normal(response.response_text or "")
        if any(self._normal(_as_text(item)) == got for item in wanted):
            return Score(self.name, 1.0, True)
        shown = " or ".join(repr(_as_text(item)[:_SHOWN]) for item in wanted[:3])
        return Score(self.name, 0.0, False, f"expected {shown}, got {got[:_SHOWN]!r}")

    def _normal(self, text: str) -> str:
        text = text.strip()
        return text.casefold() if self.ignore_case else text


def _as_text(expected: object) -> str:
    """The text a model would write for an expected value: JSON's true, not Python's True."""
    if isinstance(expected, bool):
        return "true" if expected else "false"
    return expected if isinstance(expected, str) else str(expected)
