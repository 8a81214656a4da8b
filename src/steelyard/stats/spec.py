"""Names of figures: the specs of the progress display, checked before the run, and short names such as `ttft_p99`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import msgspec

from steelyard.errors import ConfigurationError, nearest, suggestion

METRICS = (
    "time_to_first_token",
    "time_to_last_token",
    "time_per_output_token",
    "num_tokens_input",
    "num_tokens_output",
)
DETAILS = (
    "time_to_first_content_token",
    "time_to_first_reasoning_token",
    "time_between_tokens_p50",
    "time_between_tokens_p99",
    "time_between_tokens_max",
    "time_queued",
    "time_waiting",
    "time_in_backoff",
    "time_in_failed_tries",
    "time_from_planned",
)
"""Times that only some targets and ways of sending have."""
COUNTERS = ("total", "failed", "input_tokens", "output_tokens", "requests_per_minute", "output_tps")
OUTCOMES = ("pass_rate", "cost")
"""Figures of the display that only a run knows: `RunningStats` has no value for them."""
AGGREGATES = ("average", "min", "max", "sum")

# Failures come first: a narrow terminal cuts the line at its end, and they must not be what is lost.
DEFAULT_PROGRESS_BAR_STATS: Mapping[str, str | tuple[str, ...]] = {
    "errors": "failed",
    "passed": "pass_rate",
    "cost": "cost",
    "first token p50": ("time_to_first_token", "p50"),
    "first token p90": ("time_to_first_token", "p90"),
    "last token p50": ("time_to_last_token", "p50"),
    "last token p90": ("time_to_last_token", "p90"),
    "tok/s": ("time_per_output_token", "p50", "inv"),
    "tokens in": "input_tokens",
    "tokens out": "output_tokens",
}

_FORMS = "a counter's name, (metric, aggregate) or (metric, aggregate, 'inv')"
_PERCENTILE = re.compile(r"p([0-9]+(?:\.[0-9]+)?)")

TIMES = {
    "ttft": "time_to_first_token",
    "ttlt": "time_to_last_token",
    "latency": "time_to_last_token",
    "tpot": "time_per_output_token",
    "time_to_first_token": "time_to_first_token",
    "time_to_last_token": "time_to_last_token",
    "time_per_output_token": "time_per_output_token",
}
GAPS = {f"itl_{name}": f"time_between_tokens_{name}-{name}" for name in ("p50", "p99", "max")}
"""Inter-token latency: of an answer's own gaps, and of the answers of a run, the same aggregate."""
SHORT_AGGREGATES = {"average": "average", "avg": "average", "mean": "average"} | {
    name: name for name in ("p50", "p90", "p95", "p99", "min", "max")
}
SHORT_NAMES = (
    *(f"{time}_{aggregate}" for time in TIMES for aggregate in ("p50", "p90", "p95", "p99", "average")),
    *GAPS,
)
"""Those that are worth suggesting."""

SECONDS = {
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
}
"""The units that a time may be given in. Decimal, as 70 % by floats is a little more than 0.7."""
PERCENT = Decimal("0.01")

_WRITTEN = re.compile(r"(\w+)[-_](\w+)")


class ProgressStat(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the display: a counter, or an aggregate of a metric, perhaps as its reciprocal."""

    label: str
    source: str
    aggregate: str | None = None
    percentile: float | None = None
    inverse: bool = False

    @property
    def unit(self) -> Literal["seconds", "count", "number"]:
        """How the figure is shown: as a duration, a whole number, or a number."""
        if self.aggregate is None:
            return "number" if self.source in ("requests_per_minute", "output_tps") else "count"
        return "seconds" if self.source.startswith("time_") and not self.inverse else "number"


ProgressSpec: TypeAlias = tuple[ProgressStat, ...]


def parse_progress_bar_stats(given: Mapping[str, Any] | ProgressSpec | None) -> ProgressSpec:
    """Parse the figures to show, in order: the default for None, nothing for `{}`; a bad spec is refused."""
    if isinstance(given, tuple) and all(isinstance(stat, ProgressStat) for stat in given):
        return given
    if given is None:
        given = DEFAULT_PROGRESS_BAR_STATS
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"progress_bar_stats must map a label to {_FORMS}, got {given!r}")
    return tuple(_parse_one(label, spec) for label, spec in given.items())


def _parse_one(label: Any, spec: Any) -> ProgressStat:
    if not isinstance(label, str) or not label.strip():
        raise ConfigurationError(f"progress_bar_stats: a label must be text, got {label!r}")
    if isinstance(spec, str):
        if spec in METRICS:
            raise _bad(label, spec, f"a metric needs an aggregate, such as ({spec!r}, 'p50')")
        if spec not in COUNTERS and spec not in OUTCOMES:
            raise _bad(label, spec, _not_known("counter", spec, (*COUNTERS, *OUTCOMES), also=METRICS))
        return ProgressStat(label=label, source=spec)
    if not isinstance(spec, (tuple, list)) or len(spec) not in (2, 3):
        raise _bad(label, spec, f"a spec is {_FORMS}")
    return _parse_aggregate(label, spec)


def _parse_aggregate(label: str, spec: tuple[Any, ...] | list[Any]) -> ProgressStat:
    metric, aggregate = spec[0], spec[1]
    if metric not in METRICS:
        raise _bad(label, spec, _not_known("metric", metric, METRICS))
    percentile = _parse_percentile(aggregate)
    if percentile is None and aggregate not in AGGREGATES:
        choices = (*AGGREGATES, "p50", "p90", "p95", "p99")
        raise _bad(label, spec, _not_known("aggregate", aggregate, choices, suffix=" or any other p0 to p100"))
    if len(spec) == 3 and spec[2] != "inv":
        raise _bad(label, spec, f"the third part can only be 'inv', got {spec[2]!r}")
    return ProgressStat(label=label, source=metric, aggregate=aggregate, percentile=percentile, inverse=len(spec) == 3)


def _parse_percentile(aggregate: Any) -> float | None:
    """Return 50.0 for "p50", 99.9 for "p99.9"; None for what is not a percentile from 0 to 100."""
    match = _PERCENTILE.fullmatch(aggregate) if isinstance(aggregate, str) else None
    if match is None or float(match[1]) > 100:
        return None
    return float(match[1])


def _bad(label: str, spec: Any, what: str) -> ConfigurationError:
    return ConfigurationError(f"progress_bar_stats[{label!r}]: cannot use {spec!r}: {what}")


def _not_known(kind: str, given: Any, allowed: Iterable[str], *, also: Iterable[str] = (), suffix: str = "") -> str:
    near = nearest(given, [*allowed, *also])
    hint = f" (did you mean {near!r}?)" if near else ""
    return f"{given!r} is not a known {kind}{hint}; allowed: {', '.join(allowed)}{suffix}"


def full_name(written: str) -> str | None:
    """Return the name in the metrics, `time_to_first_token-p99` for `ttft_p99`; None where it is not a time.

    A time without an aggregate, or with an unknown one, is refused.
    """
    name = written.lower()
    if name in TIMES:
        raise ConfigurationError(f"{written} needs an aggregate, such as {written}_p99")
    if name in GAPS:
        return GAPS[name]
    found = _WRITTEN.fullmatch(name)
    if name == "itl" or (found is not None and found[1] == "itl"):
        raise ConfigurationError(f"{written}: the time between tokens is {', '.join(GAPS)}")
    if found is None or found[1] not in TIMES:
        return None
    time, aggregate = found.groups()
    if aggregate not in SHORT_AGGREGATES:
        raise ConfigurationError(f"{written}: no aggregate {aggregate!r}; {suggestion(aggregate, SHORT_AGGREGATES)}")
    return f"{TIMES[time]}-{SHORT_AGGREGATES[aggregate]}"
