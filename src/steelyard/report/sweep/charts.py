"""The charts of a sweep's page, as SVG: plain shapes and escaped text, coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from steelyard.load.levels import PERCENTILES
from steelyard.report.page.frame import escaped
from steelyard.stats.formatting import format_number, format_seconds

_WIDTH, _HEIGHT = 500, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, _WIDTH - 14, 14, _HEIGHT - 40
_WIDE = 20
"""From this ratio of the longest time to the shortest on, times are drawn on a scale of powers."""
_LETTER, _LINE = 6.6, 12.0
"""About how wide a digit is, and how high a line."""
_NICE = (1, 2, 2.5, 5, 10)

Level = Mapping[str, Any]


class _Axis(msgspec.Struct, frozen=True):
    """Which place a value has, and the values that are named."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[float]
    show: Callable[[float], str]
    powers: bool = False

    def at(self, value: float) -> float:
        to = math.log if self.powers else float
        span = to(self.high) - to(self.low) or 1.0
        return self.start + (to(value) - to(self.low)) / span * (self.end - self.start)


def error_rate_chart(sweep: Mapping[str, Any]) -> str:
    """One point for each level: how much came through, and how much of what was sent failed."""
    levels = [level for level in sweep["levels"] if level["error_rate"] is not None]
    limit = next((limit for _, limit in limits(sweep, "error_rate")), None)
    most = max([*(level["requests_per_second"] for level in levels), 1e-9]) * 1.06
    worst = max([*(level["error_rate"] for level in levels), 2 * (limit or 0.005)]) * 1.1
    x = _Axis(0, most, _LEFT, _RIGHT, _ticks(most, 6), _plain)
    # A little below nothing, so that the points without errors stand clear of the axis.
    y = _Axis(-0.06 * worst, worst, _BOTTOM, _TOP, _ticks(worst, 5), lambda rate: f"{rate * 100:g}%")
    points = [(x.at(level["requests_per_second"]), y.at(level["error_rate"])) for level in levels]
    best = sweep["recommendation"]["level"]
    parts = [*_axes(x, y, "answers a second")]
    parts += [] if limit is None else [_limit(y.at(limit))]
    parts += [_curve("trail", points), *_points(levels, points, best), *_labels(levels, points, best)]
    return _drawn("Error rate against throughput, a point for each level", parts)


def throughput_chart(sweep: Mapping[str, Any]) -> str:
    """How many answers a second each number of calls in flight brought."""
    levels = sweep["levels"]
    most = max([*(level["requests_per_second"] for level in levels), 1e-9]) * 1.1
    x, y = _in_flight(levels), _Axis(0, most, _BOTTOM, _TOP, _ticks(most, 5), _plain)
    points = [(x.at(level["level"]), y.at(level["requests_per_second"])) for level in levels]
    best = sweep["recommendation"]["level"]
    parts = [*_axes(x, y, "calls in flight"), _curve("through", points), *_points(levels, points, best)]
    return _drawn("Answers a second against calls in flight", parts)


def latency_chart(sweep: Mapping[str, Any], metric: str) -> str | None:
    """The percentiles of a time over the calls in flight; None where it was not measured."""
    levels = [level for level in sweep["levels"] if level[metric]["p50"] is not None]
    if not levels:
        return None
    seconds = [level[metric][name] for level in levels for name in PERCENTILES]
    drawn = [limit for _, limit in time_limits(sweep, metric)]
    x, y = _in_flight(sweep["levels"]), _times([*seconds, *drawn])
    parts = [*_axes(x, y, "calls in flight")]
    parts += [_limit(y.at(limit)) for limit in drawn]
    best = sweep["recommendation"]["level"]
    if best is not None:
        parts.append(f'<line class="chosen" x1="{x.at(best):.1f}" x2="{x.at(best):.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>')
    for name in PERCENTILES:
        points = [(x.at(level["level"]), y.at(level[metric][name])) for level in levels]
        parts += [_curve(name, points), *_knots(name, levels, points, metric)]
    return _drawn(f"{metric.replace('_', ' ')} against calls in flight", parts)


def limits(sweep: Mapping[str, Any], figure: str) -> Iterator[tuple[str, float]]:
    """What was asked of a figure: the aggregate, such as p99, and its limit."""
    for objective in sweep["objectives"]:
        measured, _, aggregate = objective["figure"].partition("-")
        if measured == figure:
            yield aggregate, objective["limit"]


def time_limits(sweep: Mapping[str, Any], metric: str) -> list[tuple[str, float]]:
    """The limits of a time that are near enough to what was measured to be drawn."""
    known = [level[metric][name] for level in sweep["levels"] for name in PERCENTILES]
    highest = max((seconds for seconds in known if seconds is not None), default=0.0)
    return [(name, limit) for name, limit in limits(sweep, metric) if 0 < limit <= 2 * highest]


def _drawn(label: str, parts: Iterable[str]) -> str:
    inside = "".join(parts)
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escaped(label)}">{inside}</svg>'
    )


def _axes(x: _Axis, y: _Axis, along: str) -> Iterator[str]:
    for tick in y.ticks:
        place = y.at(tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
        yield _text(_LEFT - 8, place + 3.5, "end", y.show(tick))
    yield f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>'
    written = -math.inf
    for tick in x.ticks:
        place, half = x.at(tick), len(x.show(tick)) * _LETTER / 2
        if place - half > written:
            written = place + half + 8
            yield _text(place, _BOTTOM + 16, "middle", x.show(tick))
    yield _text(_RIGHT, _BOTTOM + 34, "end", along)


def _text(x: float, y: float, anchor: str, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def _limit(place: float) -> str:
    return f'<line class="limit" x1="{_LEFT}" x2="{_RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'


def _curve(kind: str, points: Sequence[tuple[float, float]]) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="curve {kind}" points="{places}"/>'


def _points(levels: Sequence[Level], points: Sequence[tuple[float, float]], best: int | None) -> Iterator[str]:
    """A dot for each level, hollow where it says little, ringed where to run; it tells its figures when pointed at."""
    for level, (x, y) in zip(levels, points, strict=True):
        if level["level"] == best:
            yield f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
        kind = "level" if usable(level) else "level weak"
        told = f"{level['level']:,} in flight: {format_number(level['requests_per_second'])} answers/s"
        if level["error_rate"] is not None:
            told += f", {level['error_rate']:.1%} errors"
        yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{escaped(told)}</title></circle>'


def _knots(name: str, levels: Sequence[Level], points: Sequence[tuple[float, float]], metric: str) -> Iterator[str]:
    for level, (x, y) in zip(levels, points, strict=True):
        told = f"{level['level']:,} in flight: {name} {format_seconds(level[metric][name])}"
        kind = f"knot {name}" if usable(level) else f"knot {name} weak"
        yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escaped(told)}</title></circle>'


def _labels(levels: Sequence[Level], points: Sequence[tuple[float, float]], best: int | None) -> Iterator[str]:
    texts = [f"{level['level']:,}" for level in levels]
    sizes = [(len(text) * _LETTER, _LINE) for text in texts]
    radii = [11.0 if level["level"] == best else 6.0 for level in levels]
    frame = (_LEFT, _TOP, _RIGHT + 8, _BOTTOM)
    for text, place in zip(texts, settled(points, sizes, radii, frame), strict=True):
        if place is not None:  # a crowd of levels: the table names them all, and each point says its own
            yield _text(place[0], place[1] + 4, "middle", text, "level-label")


def usable(level: Level) -> bool:
    """Whether a level says anything about the endpoint at that many calls at once."""
    return level["invalid"] is None and bool(level["reached"])


def _in_flight(levels: Sequence[Level]) -> _Axis:
    """A scale on which doubling is a step, named at the levels, as far as their names have room."""
    numbers = [float(level["level"]) for level in levels] or [1.0]
    low, high = min(numbers) / 1.12, max(numbers) * 1.12
    return _Axis(low, high, _LEFT, _RIGHT, numbers, lambda number: f"{number:,.0f}", powers=True)


def _times(seconds: Sequence[float]) -> _Axis:
    """Seconds from zero; by powers where overload would flatten all the rest against the axis."""
    least, most = min(seconds), max(seconds)
    if least > 0 and most / least >= _WIDE:
        powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        low, high = least / 1.3, most * 1.3
        within = [tick for tick in ticks if low <= tick <= high]
        return _Axis(low, high, _BOTTOM, _TOP, within[:: math.ceil(len(within) / 7)], brief, powers=True)
    high = most * 1.1 or 1.0
    return _Axis(0, high, _BOTTOM, _TOP, _ticks(high, 5), brief)


def _ticks(high: float, wanted: int) -> list[float]:
    """Round values from zero on, about so many of them."""
    step = high / wanted
    power = 10.0 ** math.floor(math.log10(step))
    nice = next(one for one in _NICE if one * power >= step * 0.999) * power
    return [count * nice for count in range(int(high / nice + 1e-9) + 1)]


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) else f"{number:g}"


def brief(seconds: float) -> str:
    """A time as it stands at an axis."""
    return f"{seconds:g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:g} ms"


Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

_DISTANCES = (4.0, 9.0, 15.0)
_ANGLES = (-90, -45, -135, 0, 180, 45, 135, 90)
"""Above first, then to the sides, then below: y grows downwards."""


def settled(
    points: Sequence[Point], sizes: Sequence[tuple[float, float]], radii: Sequence[float], frame: Box
) -> list[Point | None]:
    """The middle of each label, within the frame and clear of points and other labels; None where there is no room."""
    taken = [(x - r, y - r, x + r, y + r) for (x, y), r in zip(points, radii, strict=True)]
    places: list[Point | None] = []
    for point, size, radius in zip(points, sizes, radii, strict=True):
        free = (place for place in _around(point, size, radius) if _fits(_box(place, size), frame, taken))
        place = next(free, None)
        places.append(place)
        if place is not None:
            taken.append(_box(place, size))
    return places


def _around(point: Point, size: tuple[float, float], radius: float) -> Iterator[Point]:
    width, height = size
    for distance in _DISTANCES:
        for angle in _ANGLES:
            across, down = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            yield (
                point[0] + across * (radius + distance + width / 2),
                point[1] + down * (radius + distance + height / 2),
            )


def _box(place: Point, size: tuple[float, float]) -> Box:
    (x, y), (width, height) = place, size
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _fits(box: Box, frame: Box, taken: Sequence[Box]) -> bool:
    inside = frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]
    return inside and not any(_overlap(box, other) for other in taken)


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
