"""The scorers that have a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from steelyard.contracts import Scorer
from steelyard.errors import ConfigurationError, suggestion
from steelyard.scoring.text import Exact

SCORERS: Mapping[str, Callable[..., Scorer]] = {"exact": Exact}


def scorer_by_name(name: str, arguments: Mapping[str, Any] | None = None) -> Scorer:
    """The scorer of that name, made with these arguments or its defaults."""
    if name not in SCORERS:
        raise ConfigurationError(f"no scorer is named {name!r}; {suggestion(name, SCORERS)}")
    return SCORERS[name](**(arguments or {}))
