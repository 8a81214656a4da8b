"""Figures of a run: their units, which direction is better, and their names in rules, reports and the progress display.

A figure of the display is named by a spec, checked before the run; rules may use short names such as `ttft_p99`.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from steelyard.errors import ConfigurationError, nearest, suggestion

Unit: TypeAlias = Literal["seconds", "share", "ratio", "count", "tokens", "rate", "money", "bytes", "number"]
"""A `share` lies within 0..1; a `ratio` can be given in % too, and be above 1: two busy cores are 200 %."""

Kind: TypeAlias = Literal["quality", "speed", "cost", "count", "client"]
"""What a figure tells of. Those of `speed` are distorted when the client is the bottleneck."""

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
    *(f"{time}_{aggregate}" for time in TIMES for aggregate in ("p50", "p90", "p95", "p99", "average", "min", "max")),
    *GAPS,
)
"""Those that are worth suggesting."""


def nearest_figure(name: str, known: Iterable[str]) -> str | None:
    """The figure that was probably meant: one of the known, a short name, or a time without its aggregate."""
    match = nearest(name, [*known, *SHORT_NAMES])
    if match is None and (time := nearest(name, TIMES)) is not None:
        match = f"{time}_p50"
    return match


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


class Figure(msgspec.Struct, frozen=True):
    """How a number of the metrics is to be read: `Annotated[float | None, Figure("share", "higher", "quality")]`."""

    unit: Unit
    better: Literal["higher", "lower"] | None = None
    kind: Kind = "count"
    label: str | None = None
    """What it is called in a sentence, where its name does not say that."""
    lateness_adds: bool = False
    """Whether a client that is late can only make it larger: what is below a limit even so is below it."""


FIGURE_AGGREGATES = ("average", "p50", "p90", "p95", "p99", "min", "max")
"""Those of each time and token count in `stats`."""

_TIME = Figure("seconds", "lower", "speed")
_TIME_TO = Figure("seconds", "lower", "speed", lateness_adds=True)
_TOKENS = Figure("tokens")


def _measured(metric: str) -> Figure:
    """A time or a number of tokens. A token that is seen late makes the time to it longer, not that between tokens."""
    if metric.startswith(("time_to_", "time_from_")):
        return _TIME_TO
    return _TIME if metric.startswith("time_") else _TOKENS


STATS: Mapping[str, Figure] = {
    "total_requests": Figure("count"),
    "failed_requests": Figure("count", "lower"),
    "failed_requests_rate": Figure("share", "lower", "quality"),
    "total_input_tokens": _TOKENS,
    "total_output_tokens": _TOKENS,
    "requests_per_minute": Figure("rate", "higher", "speed", "requests/min"),
    "output_tps": Figure("rate", "higher", "speed", "output tokens/s"),
    **{
        f"{metric}-{aggregate}": _measured(metric) for metric in (*METRICS, *DETAILS) for aggregate in FIGURE_AGGREGATES
    },
}
"""The figures of `stats`, which rules name without a prefix."""

_GROUPS = {"scores": "score", "shares": "share", "shares_ci95": "share_ci95"}
"""What rules call a group of figures, where that is not its key."""


class _Member(msgspec.Struct, frozen=True):
    """A field of a struct of metrics: a figure, a nested struct, or a mapping of either."""

    attribute: str
    name: str
    figure: Figure | None
    nested: type[msgspec.Struct] | None
    mapping: bool


@functools.cache
def _members(kind: type[msgspec.Struct]) -> tuple[_Member, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    return tuple(_member(attribute, name, hints[attribute]) for attribute, name in names)


def _member(attribute: str, name: str, hint: Any) -> _Member:
    figure = None
    if typing.get_origin(hint) is Annotated:
        figure = next((each for each in hint.__metadata__ if isinstance(each, Figure)), None)
        hint = hint.__origin__
    parts = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    mapped = next((part for part in parts if typing.get_origin(part) is dict), None)
    candidates = parts if mapped is None else typing.get_args(mapped)[1:]
    structs = (part for part in candidates if isinstance(part, type) and issubclass(part, msgspec.Struct))
    return _Member(attribute, _GROUPS.get(name, name), figure, next(structs, None), mapped is not None)


def patterns(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Figure]]:
    """The name of every figure that a struct of metrics can have, `*` in place of any key of an open mapping."""
    for member in _members(kind):
        name = f"{prefix}{member.name}"
        if member.figure is not None:
            if member.mapping:
                name = f"{name.removesuffix('_ci95')}.*" + ("_ci95" if name.endswith("_ci95") else "")
            ends = _ends(name) or (name,)
            yield from ((end, member.figure) for end in ends)
            if member.name == "mean_ci95":
                yield from ((f"{prefix}{end}", member.figure) for end in ("ci_low", "ci_high"))
        elif member.nested is not None:
            yield from patterns(member.nested, f"{name}.*." if member.mapping else f"{name}.")


def values(metrics: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Every figure of a struct of metrics by its name; None for one that is not known."""
    for member in _members(type(metrics)):
        value, name = getattr(metrics, member.attribute), f"{prefix}{member.name}"
        if value is msgspec.UNSET:
            continue
        if member.figure is not None:
            yield from _numbers(name, value)
            if member.name == "mean_ci95":
                yield from zip((f"{prefix}ci_low", f"{prefix}ci_high"), value or (None, None), strict=True)
        elif member.nested is not None and member.mapping:
            for key, each in value.items():
                yield from values(each, f"{name}.{key}.")
        elif member.nested is not None and value is not None:
            yield from values(value, f"{name}.")


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float | None]]:
    """A figure, both ends of an interval, or each of a mapping; nothing of a word such as `auto`."""
    if isinstance(value, dict):
        of_interval = "_ci95" if name.endswith("_ci95") else ""
        for key, each in value.items():
            yield from _numbers(f"{name.removesuffix('_ci95')}.{key}{of_interval}", each)
    elif ends := _ends(name):
        yield from zip(ends, value or (None, None), strict=True)
    elif not isinstance(value, str):
        yield name, value


def _ends(name: str) -> tuple[str, ...]:
    """`x.ci_low` and `x.ci_high` for `x_ci95`."""
    if not name.endswith("_ci95"):
        return ()
    base = name.removesuffix("_ci95")
    return f"{base}.ci_low", f"{base}.ci_high"


def as_expression(pattern: str) -> re.Pattern[str]:
    """What matches the names of a pattern: a key may have any characters, dots too."""
    return re.compile(".+".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)


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
