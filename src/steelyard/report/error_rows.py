"""The errors of a run as every report lists them: by kind, the most frequent first, each with an example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class ErrorRow(NamedTuple):
    """A kind of error, how often it came, and the case and message of one; None where that is not known any more."""

    kind: str
    number: int
    example: Mapping[str, str] | None


def error_rows(metrics: Mapping[str, Any]) -> list[ErrorRow]:
    """The kinds of errors in a run's metrics; the types of their exceptions where an older run tells no kinds."""
    names = ("error_kinds", "error_kind_examples") if "error_kinds" in metrics else ("errors", "error_examples")
    counts, examples = (metrics.get(name, {}) for name in names)
    return [ErrorRow(kind, count, examples.get(kind)) for kind, count in counts.items()]
