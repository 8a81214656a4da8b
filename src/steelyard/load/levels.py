"""Levels of a sweep: their figures, the parallelisms to measure, and the objectives (SLOs) they are checked against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET

from steelyard.errors import ConfigurationError, suggestion
from steelyard.stats.client_load import ClientLoad
from steelyard.stats.errors import ErrorRow, error_rows
from steelyard.stats.figures import STATS, Figure
from steelyard.stats.formatting import format_number, format_seconds
from steelyard.stats.metrics import Metrics, figures, fixed_figures
from steelyard.stats.rules import COMPARISONS, Rule, read_rule, unit_problem
from steelyard.stats.spec import SECONDS, SHORT_NAMES

PERCENTILES = ("p50", "p90", "p99")
"""The percentiles of a time that a sweep shows."""
MIN_REQUESTS_PER_CALL = 10
"""A level sends at least this many requests for each call in flight: fewer are mostly ramp-up and tail."""
Unit = Literal["seconds", "share", "number"]
_VERDICTS = ("pass_rate", "pass_rate_ci95", "pass_rate_all")


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
    pass_rate_ci95: tuple[float, float] | None
    output_tps: float | None
    time_to_first_token: dict[str, float | None]
    time_to_last_token: dict[str, float | None]
    peak_in_flight: int
    client: ClientLoad
    invalid: str | None = None
    """Why this client was the bottleneck; None when it was not."""
    broken: list[str] = []
    """The objectives that were not met, in words."""
    error_kinds: dict[str, int] = {}
    """The number of errors of each kind, the most frequent first."""
    worst_error: str | None = None
    """The message of one error of the most frequent kind; None when there were none."""
    resent: int = 0
    """Requests sent again at once, as their kept-alive connection was closed before anyone read them."""
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
        return {**msgspec.to_builtins(self), "reached": self.reached, "few": self.few}


def make_level(
    level: int,
    run: str,
    metrics: Metrics,
    objectives: Sequence[Objective],
    judged: Metrics | None = None,
) -> Level:
    """Make a level from a run's metrics; the pass rate is that of `judged` where judges were asked afterwards."""
    stats, quality = metrics.stats, metrics if judged is None else judged
    client, errors = client_of(metrics), error_rows(metrics)
    checked = msgspec.structs.replace(metrics, **{name: getattr(quality, name) for name in _VERDICTS})
    return Level(
        level=level,
        run=run,
        requests=metrics.n,
        active_seconds=metrics.active_seconds,
        requests_per_second=(stats["requests_per_minute"] or 0.0) / 60,
        error_rate=metrics.error_rate,
        pass_rate=quality.pass_rate,
        pass_rate_ci95=quality.pass_rate_ci95,
        output_tps=stats["output_tps"],
        time_to_first_token=_percentiles(stats, "time_to_first_token"),
        time_to_last_token=_percentiles(stats, "time_to_last_token"),
        peak_in_flight=metrics.peak_in_flight or 0,
        client=client,
        invalid=(client.reason or "it had no time to spare") if client.bottleneck else None,
        broken=[broken.describe() for broken in check(objectives, checked)],
        error_kinds={row.kind: row.number for row in errors},
        worst_error=_worst_error(errors),
        resent=metrics.resent,
        judged=judged is not None,
    )


def client_of(metrics: Metrics) -> ClientLoad:
    """Return how busy the client of a load run was; every load run says so."""
    if metrics.client is UNSET:
        raise ConfigurationError("the metrics of a level do not say how busy the client was: measure it again")
    return metrics.client


def _worst_error(errors: Sequence[ErrorRow]) -> str | None:
    """Return the message of one error of the most frequent kind."""
    if not errors:
        return None
    kind, _, example = errors[0]
    return kind if example is None else example.error or kind


def _percentiles(stats: Mapping[str, float | None], metric: str) -> dict[str, float | None]:
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

    def holds(self, value: float | None) -> bool:
        """Whether a value meets the objective; None, not measured, never does."""
        return value is not None and COMPARISONS[self.comparison](value, self.limit)

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


def check(objectives: Sequence[Objective], metrics: Metrics) -> list[Broken]:
    """Return the objectives that these metrics do not meet, in their order."""
    known = figures(metrics)
    values = ((objective, known.get(objective.figure)) for objective in objectives)
    return [Broken(objective, value) for objective, value in values if not objective.holds(value)]


def _parse_one(part: str) -> Objective:
    text = part.strip()
    rule = read_rule(text.lower())
    if rule is None or rule.operator in ("==", "!=") or rule.limit < 0:
        raise ConfigurationError(f"slo: cannot read {text!r}; write it like ttft_p99<500ms or error_rate<1%")
    known = _figures_for_objectives()
    if rule.name not in known:
        names = [*(name for name in known if name not in STATS or "-" not in name), *SHORT_NAMES]
        raise ConfigurationError(f"slo: no figure is named {rule.name!r}; {suggestion(rule.name, names)}")
    figure = known[rule.name]
    _check_unit(text, rule, figure)
    return Objective(
        text=text,
        figure=rule.name,
        name=figure.label or rule.name.replace("_", " ").replace("-", " "),
        comparison=rule.operator,
        limit=rule.limit,
        unit=figure.unit if figure.unit in ("seconds", "share") else "number",
    )


def _figures_for_objectives() -> dict[str, Figure]:
    """Return the figures of quality and speed of which it is known which direction is better."""
    found = fixed_figures().items()
    return dict(
        sorted((name, figure) for name, figure in found if figure.better and figure.kind in ("quality", "speed"))
    )


def _check_unit(text: str, rule: Rule, figure: Figure) -> None:
    """Refuse a unit that does not fit. A time must have one: 500 may be meant in ms or in s."""
    units = {"seconds": tuple(SECONDS), "share": ("%", "")}.get(figure.unit, ("",))
    if rule.unit not in units:
        if units == ("",):
            raise ConfigurationError(f"slo: {text!r} takes a number without a unit, got {rule.unit!r}")
        wrong = f"got {rule.unit!r}" if rule.unit else "got none"
        raise ConfigurationError(f"slo: {text!r} needs a unit ({', '.join(filter(None, units))}), {wrong}")
    if (problem := unit_problem(rule)) is not None:
        raise ConfigurationError(f"slo: {text!r}: {problem}")


def _format(value: float, unit: Unit) -> str:
    if unit == "seconds":
        return format_seconds(value)
    return percent(value) if unit == "share" else format_number(value)


def percent(share: float) -> str:
    """Format a share with at most three digits: 12%, 1.04%, 0.04%."""
    return f"{share * 100:.3g}%"
