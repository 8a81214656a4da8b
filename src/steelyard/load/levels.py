"""Levels of a sweep: their figures, the parallelisms to measure, and the objectives (SLOs) they are checked against."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import msgspec

from steelyard.errors import ConfigurationError, suggestion
from steelyard.stats.errors import error_rows
from steelyard.stats.formatting import format_number, format_seconds
from steelyard.stats.spec import PERCENT, SECONDS, SHORT_NAMES, full_name

PERCENTILES = ("p50", "p90", "p99")
"""The percentiles of a time that a sweep shows."""
MIN_REQUESTS_PER_CALL = 10
"""A level sends at least this many requests for each call in flight: fewer are mostly ramp-up and tail."""
Unit = Literal["seconds", "share", "number"]
_FIGURES: dict[str, tuple[str, Unit]] = {
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
_OBJECTIVE = re.compile(r"\s*([A-Za-z_][\w-]*)\s*(<=|>=|<|>)\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zµ%]*)\s*", re.IGNORECASE)


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one parallelism: a row of the table, a point of the plot, an entry of sweep.json."""

    level: int
    run: str
    """Its run directory, relative to the sweep's."""
    requests: int
    active_seconds: float
    requests_per_second: float
    """Answers without errors, over the time the level took."""
    error_rate: float | None
    pass_rate: float | None
    pass_rate_ci95: list[float] | None
    output_tps: float | None
    time_to_first_token: dict[str, float | None]
    time_to_last_token: dict[str, float | None]
    peak_in_flight: int
    client: dict[str, Any]
    invalid: str | None = None
    """Why this client was the bottleneck; None when it was not."""
    broken: list[str] = []
    """The objectives that were not met, in words."""
    error_kinds: dict[str, int] = {}
    """The number of errors of each kind, the most frequent first."""
    worst_error: str | None = None
    """The message of one error of the most frequent kind; None when there were none."""
    judged: bool = False
    """Whether the pass rate comes from judges that were asked afterwards, in `<run>/judged`."""

    @property
    def reached(self) -> bool:
        """Whether as many calls as the level really were in flight at once."""
        return self.peak_in_flight >= self.level

    @property
    def usable(self) -> bool:
        """Whether its figures are those of the endpoint at this many calls at once."""
        return self.invalid is None and self.reached

    @property
    def few(self) -> bool:
        """Whether it sent too few requests for its parallelism: a duration that was too short."""
        return self.requests < MIN_REQUESTS_PER_CALL * self.level

    def to_metrics(self) -> dict[str, Any]:
        """Return the level as an entry of sweep.json."""
        return {**msgspec.structs.asdict(self), "reached": self.reached, "few": self.few}


def make_level(
    level: int,
    run: str,
    metrics: Mapping[str, Any],
    objectives: Sequence[Objective],
    judged: Mapping[str, Any] | None = None,
) -> Level:
    """Make a level from a run's metrics; the pass rate is that of `judged` where judges were asked afterwards."""
    stats, quality = metrics["stats"], metrics if judged is None else judged
    client = dict(metrics["client"])
    errors = error_rows(metrics)
    checked = {**metrics, **{name: quality[name] for name in ("pass_rate", "pass_rate_all")}}
    return Level(
        level=level,
        run=run,
        requests=metrics["n"],
        active_seconds=metrics["active_seconds"],
        requests_per_second=(stats["requests_per_minute"] or 0.0) / 60,
        error_rate=metrics["error_rate"],
        pass_rate=quality["pass_rate"],
        pass_rate_ci95=quality["pass_rate_ci95"],
        output_tps=stats["output_tps"],
        time_to_first_token=_percentiles(stats, "time_to_first_token"),
        time_to_last_token=_percentiles(stats, "time_to_last_token"),
        peak_in_flight=metrics["peak_in_flight"],
        client=client,
        invalid=(client["reason"] or "it had no time to spare") if client["bottleneck"] else None,
        broken=[broken.describe() for broken in check(objectives, checked)],
        error_kinds={row.kind: row.number for row in errors},
        worst_error=None if not errors else (errors[0].example or {}).get("error") or errors[0].kind,
        judged=judged is not None,
    )


def _percentiles(stats: Mapping[str, Any], metric: str) -> dict[str, float | None]:
    return {name: stats[f"{metric}-{name}"] for name in PERCENTILES}


def parse_levels(levels: str | Sequence[int]) -> list[int] | Literal["auto"]:
    """Parse the parallelisms to measure, ascending, each once; or "auto"."""
    if isinstance(levels, str):
        if levels.strip() == "auto":
            return "auto"
        levels = [_number(part) for part in levels.split(",") if part.strip()]
    parallelisms = sorted(set(levels))
    if not parallelisms:
        raise ConfigurationError("levels: name at least one parallelism, like 1,10,50, or auto")
    for level in parallelisms:
        if not isinstance(level, int) or isinstance(level, bool) or level < 1:
            raise ConfigurationError(f"levels must be whole numbers >= 1, got {level!r}")
    return parallelisms


def _number(part: str) -> int:
    try:
        return int(part)
    except ValueError:
        raise ConfigurationError(f"levels must be whole numbers like 1,10,50, or auto, got {part.strip()!r}") from None


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """An objective: a figure of a run, a comparison and a limit."""

    text: str
    """As it was written."""
    figure: str
    """Its name in the metrics: `error_rate`, `time_to_first_token-p99`."""
    name: str
    """Its name in a sentence."""
    comparison: str
    limit: float
    unit: Unit

    def value_in(self, metrics: Mapping[str, Any]) -> float | None:
        """Look up the figure in a run's metrics; None where it was not measured."""
        value: float | None = metrics[self.figure] if self.figure in metrics else metrics["stats"].get(self.figure)
        return value

    def holds(self, value: float | None) -> bool:
        """Whether a value meets the objective; None, not measured, never does."""
        return value is not None and _COMPARISONS[self.comparison](value, self.limit)

    def describe(self, value: float | None) -> str:
        """Describe a value and the limit: `the error rate is 12% (limit 1%)`."""
        found = "was not measured" if value is None else f"is {_format(value, self.unit)}"
        return f"{self.name} {found} (limit {_format(self.limit, self.unit)})"


Objectives: TypeAlias = tuple[Objective, ...]


class Broken(msgspec.Struct, frozen=True):
    """An objective that a run did not meet, and the value found."""

    objective: Objective
    value: float | None

    def describe(self) -> str:
        """In words: `the error rate is 12% (limit 1%)`."""
        return self.objective.describe(self.value)


def parse_slo(text: str) -> Objectives:
    """Parse objectives separated by commas; an unknown figure is refused, with the nearest name."""
    return tuple(_parse_one(part) for part in text.split(",") if part.strip())


def check(objectives: Sequence[Objective], metrics: Mapping[str, Any]) -> list[Broken]:
    """Return the objectives that these metrics do not meet, in their order."""
    values = ((objective, objective.value_in(metrics)) for objective in objectives)
    return [Broken(objective, value) for objective, value in values if not objective.holds(value)]


def _parse_one(part: str) -> Objective:
    found = _OBJECTIVE.fullmatch(part)
    if found is None:
        raise ConfigurationError(f"slo: cannot read {part.strip()!r}; write it like ttft_p99<500ms or error_rate<1%")
    figure_text, comparison, number, suffix = found[1].lower(), found[2], Decimal(found[3]), found[4].lower()
    figure, name, unit = _figure(figure_text)
    limit = float(number * _scale(part.strip(), unit, suffix))
    if unit == "share" and limit > 1:
        raise ConfigurationError(f"slo: {part.strip()!r} is a share above 1; did you mean {number:g}%?")
    return Objective(text=part.strip(), figure=figure, name=name, comparison=comparison, limit=limit, unit=unit)


def _figure(text: str) -> tuple[str, str, Unit]:
    """Find a figure's name in the metrics, its name in a sentence, and its unit."""
    if text in _FIGURES:
        name, unit = _FIGURES[text]
        return text, name, unit
    if (full := full_name(text)) is not None:
        return full, full.replace("_", " ").replace("-", " "), "seconds"
    raise ConfigurationError(f"slo: no figure is named {text!r}; {suggestion(text, [*_FIGURES, *SHORT_NAMES])}")


def _scale(part: str, unit: Unit, suffix: str) -> Decimal:
    scales = _SCALES[unit]
    if suffix in scales:
        return scales[suffix]
    units = ", ".join(known for known in scales if known)
    if not units:
        raise ConfigurationError(f"slo: {part!r} takes a number without a unit, got {suffix!r}")
    wrong = f"got {suffix!r}" if suffix else "got none"
    raise ConfigurationError(f"slo: {part!r} needs a unit ({units}), {wrong}")


def _format(value: float, unit: Unit) -> str:
    if unit == "seconds":
        return format_seconds(value)
    return percent(value) if unit == "share" else format_number(value)


def percent(share: float) -> str:
    """Format a share with at most three digits: 12%, 1.04%, 0.04%."""
    return f"{share * 100:.3g}%"
