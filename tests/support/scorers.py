"""One answer, one scorer, one score."""

from __future__ import annotations

from typing import Any

from steelyard.records import EvalCase, InvocationResponse, Score


def scored(scorer: Any, text: str | None, expected: Any = None, **metadata: Any) -> Score:
    """What a scorer says of an answer to a case that expects something; it must apply."""
    score = scored_or_none(scorer, text, expected, **metadata)
    assert score is not None, "the scorer does not apply"
    assert score.value is not None
    assert 0.0 <= score.value <= 1.0
    return score


def scored_or_none(scorer: Any, text: str | None, expected: Any = None, **metadata: Any) -> Score | None:
    case = EvalCase(id="c", prompt="p", expected=expected, metadata=metadata)
    score: Score | None = scorer.score(case, InvocationResponse(response_text=text))
    return score
