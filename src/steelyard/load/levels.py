"""One level of a sweep: how many calls at once, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.load.slo import Objective, check
from steelyard.report.error_rows import error_rows
from steelyard.report.sweep_table import PERCENTILES

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
