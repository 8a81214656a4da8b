"""The scorer for multiple choice."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass

from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.choice_text import final_choice, options_of, words_of
from steelyard.scoring.plain import PlainScorer, alternatives, shown


@dataclass(frozen=True, kw_only=True)
class Choice(PlainScorer):
    """Passes when the answer settles on the expected option: its letter, its index from 0, or its text.

    The options' texts are read from the case's `metadata["choices"]`: a list, lettered from A, or a mapping.
    """

    name: str = "choice"

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """1.0 or 0.0; None when the case expects nothing."""
        if case.expected is None:
            return None
        options = options_of(case.metadata.get("choices"))
        wanted = [_label(item, options) for item in alternatives(case.expected)]
        text = response.response_text or ""
        got = final_choice(text, options)
        if got is None:
            return self._score(False, f"no choice in {shown(text)}")
        return self._score(got in wanted, f"expected {' or '.join(wanted)}, got {got}")


def _label(expected: object, options: Mapping[str, str]) -> str:
    """The label that an expected value means; ValueError when it means none."""
    labels = list(options) or list(string.ascii_uppercase)
    if isinstance(expected, int) and not isinstance(expected, bool) and str(expected) not in options:
        if 0 <= expected < len(labels):
            return labels[expected]
    else:
        text = str(expected)
        bare = text.strip().strip("().[]*: ").upper()
        if bare in labels:
            return bare
        named = [label for label, option in options.items() if words_of(option) == words_of(text)]
        if named and words_of(text):
            return named[0]
    raise ValueError(f"expected {shown(expected)} is none of the choices: {', '.join(labels)}")
