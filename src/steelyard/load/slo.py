"""Objectives for a run under load: `ttft_p99<500ms,error_rate<1%`, and which of them a run has broken."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import msgspec

from steelyard.errors import ConfigurationError, suggestion
from steelyard.stats.short_names import PERCENT, SECONDS, SHORT_NAMES, full_name
from steelyard.stats.wording import format_number, format_seconds

Unit = Literal["seconds", "share", "number"]

_PLAIN: dict[str, tuple[str, Unit]] = {
    "error_rate": ("the error rate", "share"),
    "pass_rate": ("the pass rate", "share"),
    "pass_rate_all": ("the pass rate, errors included,", "share"),
    "output_tps": ("output tokens/s", "number"),
    "requests_per_minute": ("requests/min", "number"),
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SCALES: dict[Unit, dict[str, Decimal]] = {
    "seconds": SECONDS,
    "share": {"%": PERCENT, "": Decimal(1)},
    "number": {"": Decimal(1)},
}
_WRITTEN = re.compile(r"\s*([A-Za-z_][\w-]*)\s*(<=|>=|<|>)\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zµ%]*)\s*", re.IGNORECASE)


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must hold: a figure of a run, a comparison and a limit."""

    text: str
    """As it was written."""
    figure: str
    """Its name in the metrics: `error_rate`, `time_to_first_token-p99`."""
    name: str
    """What it is called in a sentence."""
    comparison: str
    limit: float
    unit: Unit

    def value_in(self, metrics: Mapping[str, Any]) -> float | None:
        """The figure in a run's metrics; None where it was not measured."""
        value: float | None = metrics[self.figure] if self.figure in metrics else metrics["stats"].get(self.figure)
        return value

    def holds(self, value: float | None) -> bool:
        """Whether the figure keeps the limit; what was not measured keeps none."""
        return value is not None and _COMPARISONS[self.comparison](value, self.limit)

    def describe(self, value: float | None) -> str:
        """How a figure stands to the limit: `the error rate is 12% (limit 1%)`."""
        said = "was not measured" if value is None else f"is {_worded(value, self.unit)}"
        return f"{self.name} {said} (limit {_worded(self.limit, self.unit)})"


Objectives: TypeAlias = tuple[Objective, ...]


class Broken(msgspec.Struct, frozen=True):
    """An objective that a run did not keep, and what was found instead."""

    objective: Objective
    value: float | None

    def describe(self) -> str:
        """In words: `the error rate is 12% (limit 1%)`."""
        return self.objective.describe(self.value)


def parse_slo(text: str) -> Objectives:
    """The objectives in a list with commas between them; what cannot be understood is refused, naming the nearest."""
    return tuple(_parse_one(part) for part in text.split(",") if part.strip())


def check(objectives: Sequence[Objective], metrics: Mapping[str, Any]) -> list[Broken]:
    """The objectives that these metrics break, in their order."""
    values = ((objective, objective.value_in(metrics)) for objective in objectives)
    return [Broken(objective, value) for objective, value in values if not objective.holds(value)]


def _parse_one(part: str) -> Objective:
    found = _WRITTEN.fullmatch(part)
    if found is None:
        raise ConfigurationError(f"slo: cannot read {part.strip()!r}; write it like ttft_p99<500ms or error_rate<1%")
    written, comparison, number, suffix = found[1].lower(), found[2], Decimal(found[3]), found[4].lower()
    figure, name, unit = _figure(written)
    limit = float(number * _scale(part.strip(), unit, suffix))
    if unit == "share" and limit > 1:
        raise ConfigurationError(f"slo: {part.strip()!r} is a share above 1; did you mean {number:g}%?")
    return Objective(text=part.strip(), figure=figure, name=name, comparison=comparison, limit=limit, unit=unit)


def _figure(written: str) -> tuple[str, str, Unit]:
    """The figure's name in the metrics, its name in a sentence, and its unit."""
    if written in _PLAIN:
        name, unit = _PLAIN[written]
        return written, name, unit
    if (full := full_name(written)) is not None:
        return full, full.replace("_", " ").replace("-", " "), "seconds"
    raise ConfigurationError(f"slo: nothing is named {written!r}; {suggestion(written, [*_PLAIN, *SHORT_NAMES])}")


def _scale(part: str, unit: Unit, suffix: str) -> Decimal:
    scales = _SCALES[unit]
    if suffix in scales:
        return scales[suffix]
    units = ", ".join(known for known in scales if known)
    if not units:
        raise ConfigurationError(f"slo: {part!r} takes a number without a unit, got {suffix!r}")
    wrong = f"got {suffix!r}" if suffix else "got none"
    raise ConfigurationError(f"slo: {part!r} needs a unit ({units}), {wrong}")


def _worded(value: float, unit: Unit) -> str:
    if unit == "seconds":
        return format_seconds(value)
    return percent(value) if unit == "share" else format_number(value)


def percent(share: float) -> str:
    """A share to three digits at most: 12%, 1.04%, 0.04%."""
    return f"{share * 100:.3g}%"
