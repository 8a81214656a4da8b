"""What a figure of a run is: its unit, which direction is better, and the name by which rules and reports call it."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from steelyard.stats.spec import DETAILS, METRICS

Unit: TypeAlias = Literal["seconds", "share", "ratio", "count", "tokens", "rate", "money", "bytes", "number"]
"""A `share` lies within 0..1; a `ratio` can be given in % too, and be above 1: two busy cores are 200 %."""

Kind: TypeAlias = Literal["quality", "speed", "cost", "count", "client"]
"""What a figure tells of. Those of `speed` are distorted when the client is the bottleneck."""


class Figure(msgspec.Struct, frozen=True):
    """How a number of the metrics is to be read: `Annotated[float | None, Figure("share", "higher", "quality")]`."""

    unit: Unit
    better: Literal["higher", "lower"] | None = None
    kind: Kind = "count"
    label: str | None = None
    """What it is called in a sentence, where its name does not say that."""
    lateness_adds: bool = False
    """Whether a client that is late can only make it larger: what is below a limit even so is below it."""


AGGREGATES = ("average", "p50", "p90", "p95", "p99", "min", "max")
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
    **{f"{metric}-{aggregate}": _measured(metric) for metric in (*METRICS, *DETAILS) for aggregate in AGGREGATES},
}
"""The figures of `stats`, which rules name without a prefix."""

_GROUPS = {"scores": "score"}
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
