"""Every figure of a run by one name: what a rule may be about, and what is logged elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from steelyard.metrics import Books, Errors, compose
from steelyard.stats.running import RunningStats
from steelyard.stats.scores import ScoreStats
from steelyard.stats.spending import Spending

FAILURE_RATE = "failure_rate"
"""The share of records without an answer, or whose scoring broke down: what a suite's `max_error_rate` limits."""

_NOT_FIGURES = (
    "v",
    "seed",
    "stopped",
    "target",
    "model_id",
    "currency",
    "cost_unknown_because",
    "error_examples",
    "error_kind_examples",
    "scores",
    "stats",
    "trials",
)
_OF_CALLS = ("parallelism", "peak_in_flight")
_TEXTS = ("reason", "dominates")
"""Within others: what is a text where it is there at all."""


def figures(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Every figure of a run by the name that a rule calls it; None for one that is not known."""
    found: dict[str, float | None] = {"cost": None}
    found.update(_flat("", {key: value for key, value in metrics.items() if key not in _NOT_FIGURES}))
    found.update(_flat("", metrics["stats"]))
    trials = metrics.get("trials") or {}
    found.update(_flat("trials.", {key: value for key, value in trials.items() if key != "scores"}))
    for name, score in metrics["scores"].items():
        found.update(_of_score(f"score.{name}.", score))
    for name, score in (trials.get("scores") or {}).items():
        found.update(_of_score(f"trials.score.{name}.", score))
    n = metrics["n"]
    found[FAILURE_RATE] = (metrics["counts"]["error"] + metrics["scoring_errors"]) / n if n else None
    return found


def usual_names() -> list[str]:
    """The names of figures that any run has, as far as they are known before there is one."""
    nothing = compose(
        about={},
        books=Books(planned=0, ok=0, error=0, cancelled=0, not_started=0),
        stats=RunningStats(),
        scores=ScoreStats(),
        errors=Errors(),
        left_out=0,
        stopped=None,
        spending=Spending(),
    )
    return [*figures(nothing), *_OF_CALLS]


def _of_score(prefix: str, score: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    yield from _flat(prefix, score)
    low, high = score.get("mean_ci95") or (None, None)
    yield f"{prefix}ci_low", low
    yield f"{prefix}ci_high", high


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """The numbers in nested mappings, by their path; `x_ci95` becomes `x.ci_low` and `x.ci_high`."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key.endswith("_ci95"):
            low, high = value or (None, None)
            yield f"{name.removesuffix('_ci95')}.ci_low", low
            yield f"{name.removesuffix('_ci95')}.ci_high", high
        elif isinstance(value, Mapping):
            yield from _flat(f"{name}.", value)
        elif key in _TEXTS:
            continue
        elif value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            yield name, value
