"""One level of a sweep: how many calls at once, and what came of it."""

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
"""Those of a time that a sweep shows."""

REQUESTS_PER_PLACE = 10
"""A level sends at least so many requests for each call in flight: fewer are mostly ramp-up and tail."""


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """What one parallelism brought, flat: a row of the table, a point of the plot, an entry of sweep.json."""

    level: int
    run: str
    """Its run directory, within the sweep's."""
    requests: int
    active_seconds: float
    requests_per_second: float
    """Answers that came, without those that failed, over the time the level took."""
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
    """The objectives that were not kept, in words."""
    error_kinds: dict[str, int] = {}
    """How often each kind of error came, the most frequent first."""
    worst_error: str | None = None
    """The most frequent kind of error, in the words of one of them; None when there were none."""
    judged: bool = False
    """Whether the pass rate is that of judges who were asked afterwards, in `<run>/judged`."""

    @property
    def reached(self) -> bool:
        """Whether so many calls really were in flight at once."""
        return self.peak_in_flight >= self.level

    @property
    def usable(self) -> bool:
        """Whether it tells anything about the endpoint at that many calls at once."""
        return self.invalid is None and self.reached

    @property
    def few(self) -> bool:
        """Whether it sent too few requests for its parallelism: a duration that was too short."""
        return self.requests < REQUESTS_PER_PLACE * self.level

    def to_metrics(self) -> dict[str, Any]:
        """The same as it stands in sweep.json."""
        return {**msgspec.structs.asdict(self), "reached": self.reached, "few": self.few}


def level_of(
    level: int,
    run: str,
    metrics: Mapping[str, Any],
    objectives: Sequence[Objective],
    judged: Mapping[str, Any] | None = None,
) -> Level:
    """The level that a run's metrics tell of; the pass rate is that of `judged` where judges were asked afterwards."""
    stats, quality = metrics["stats"], metrics if judged is None else judged
    client = dict(metrics["client"])
    errors = error_rows(metrics)
    seen = {**metrics, **{name: quality[name] for name in ("pass_rate", "pass_rate_all")}}
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
        broken=[broken.describe() for broken in check(objectives, seen)],
        error_kinds={row.kind: row.number for row in errors},
        worst_error=None if not errors else (errors[0].example or {}).get("error") or errors[0].kind,
        judged=judged is not None,
    )


def _percentiles(stats: Mapping[str, Any], metric: str) -> dict[str, float | None]:
    return {name: stats[f"{metric}-{name}"] for name in PERCENTILES}


def parse_levels(given: str | Sequence[int]) -> list[int] | Literal["auto"]:
    """The parallelisms to measure, ascending, each once; or "auto"."""
    if isinstance(given, str):
        if given.strip() == "auto":
            return "auto"
        given = [_number(part) for part in given.split(",") if part.strip()]
    levels = sorted(set(given))
    if not levels:
        raise ConfigurationError("levels: name at least one parallelism, like 1,10,50, or auto")
    for level in levels:
        if not isinstance(level, int) or isinstance(level, bool) or level < 1:
            raise ConfigurationError(f"levels must be whole numbers >= 1, got {level!r}")
    return levels


def _number(part: str) -> int:
    try:
        return int(part)
    except ValueError:
        raise ConfigurationError(f"levels must be whole numbers like 1,10,50, or auto, got {part.strip()!r}") from None


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
