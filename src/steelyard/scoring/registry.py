"""The built-in scorers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from steelyard.errors import ConfigurationError, suggestion
from steelyard.protocols import Scorer
from steelyard.scoring.choice import Choice
from steelyard.scoring.latency import Latency, Tokens
from steelyard.scoring.number import Number
from steelyard.scoring.similarity import Bleu, RougeL, Similarity
from steelyard.scoring.structured import JsonMatch, JsonSchema
from steelyard.scoring.text import Contains, Exact, Regex
from steelyard.scoring.trajectory import Trajectory

SCORERS: Mapping[str, Callable[..., Scorer]] = {
    "exact": Exact,
    "contains": Contains,
    "regex": Regex,
    "choice": Choice,
    "number": Number,
    "json_match": JsonMatch,
    "json_schema": JsonSchema,
    "similarity": Similarity,
    "rouge_l": RougeL,
    "bleu": Bleu,
    "latency": Latency,
    "tokens": Tokens,
    "trajectory": Trajectory,
}


def scorer_by_name(name: str, arguments: Mapping[str, Any] | None = None) -> Scorer:
    """Create the scorer of that name with these arguments or its defaults."""
    if name not in SCORERS:
        raise ConfigurationError(f"no scorer is named {name!r}; {suggestion(name, SCORERS)}")
    try:
        return SCORERS[name](**(arguments or {}))
    except TypeError as error:  # an argument that is missing or not known
        raise ConfigurationError(f"scorer {name!r}: {error}") from error
