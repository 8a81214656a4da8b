"""Charts: one description of series, axes and labels, drawn as SVG for pages and for files alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from markupsafe import Markup

from steelyard.report.html import asset, render

_NICE = (1, 2, 2.5, 5, 10)
_LETTER, _LINE = 6.6, 12.0
"""About how wide a digit is, and how high a line."""
_LEGEND_LETTER, _LEGEND_ROW = 6.2, 20.0
_HALF_BAR, _MIN_BAR = 0.32, 1.5
"""Half of a bar's height as a share of its row, and its least width."""

Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


class Axis(msgspec.Struct, frozen=True):
    """What an axis spans, which values are written at it, and how."""

    low: float
    high: float
    ticks: list[float]
    format: Callable[[float], str]
    label: str = ""
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies between the two ends: 0 at the low one, 1 at the high one."""
        scale = math.log if self.log else float
        return (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low) or 1.0)


class Mark(msgspec.Struct, frozen=True):
    """One value of a series; `text` is its tooltip, `kind` its CSS classes, `label` is written next to it."""

    x: float
    y: float
    text: str
    kind: str
    radius: float
    label: str = ""
    ringed: bool = False


class Series(msgspec.Struct, frozen=True):
    """Values that a line joins; `kind` is the line's CSS class."""

    kind: str
    marks: list[Mark]


class Bar(msgspec.Struct, frozen=True):
    """A bar along the x axis in one row; `row` is the row's middle on the y axis, `text` its tooltip."""

    begin: float
    end: float
    row: float
    kind: str
    text: str


class ReferenceLine(msgspec.Struct, frozen=True):
    """A straight line across the chart at a value of one of its axes."""

    kind: str
    x: float | None = None
    y: float | None = None


class LegendEntry(msgspec.Struct, frozen=True):
    """What a mark or line means; `kind` is the CSS classes of its sign."""

    kind: str
    text: str


class Chart(msgspec.Struct, frozen=True):
    """A chart, whatever size it is drawn at. `note` says why it is empty."""

    title: str
    description: str
    x: Axis
    y: Axis
    series: list[Series] = []
    rules: list[ReferenceLine] = []
    legend: list[LegendEntry] = []
    note: str = ""
    bars: list[Bar] = []
    rows: list[str] = []
    """Names of the rows of bars, from the top: in place of values at the y axis."""


def draw(chart: Chart, width: int = 500, height: int = 270) -> dict[str, Any]:
    """The chart's shapes at this size, for the template `chart.svg`."""
    left, right, top, bottom = 58, width - 14, 14, height - 40
    frame = (float(left), float(top), right + 8.0, float(bottom))

    def place(x: float, y: float) -> Point:
        across, up = chart.x.share(x), chart.y.share(y)
        return round(left + across * (right - left), 1), round(bottom - up * (bottom - top), 1)

    marks = [(mark, place(mark.x, mark.y)) for series in chart.series for mark in series.marks]
    return {
        "title": chart.title,
        "description": chart.description,
        "legend": chart.legend,
        "note": chart.note,
        "width": width,
        "height": height,
        "left": left,
        "right": right,
        "top": top,
        "bottom": bottom,
        "x_label": chart.x.label,
        "x_ticks": _spaced([(place(tick, chart.y.low)[0], chart.x.format(tick)) for tick in chart.x.ticks]),
        "y_ticks": [(place(chart.x.low, tick)[1], chart.y.format(tick)) for tick in chart.y.ticks],
        "rows": [
            (place(chart.x.low, len(chart.rows) - number - 0.5)[1], name) for number, name in enumerate(chart.rows)
        ],
        "bars": [_bar(bar, place) for bar in chart.bars],
        "rules": [_rule(rule, place, (left, top, right, bottom)) for rule in chart.rules],
        "lines": [
            {"kind": series.kind, "points": " ".join("{},{}".format(*place(m.x, m.y)) for m in series.marks)}
            for series in chart.series
        ],
        "rings": [point for mark, point in marks if mark.ringed],
        "marks": [
            {"kind": mark.kind, "x": x, "y": y, "radius": mark.radius, "text": mark.text} for mark, (x, y) in marks
        ],
        "labels": _labels([(mark, point) for mark, point in marks if mark.label], frame),
    }


def _spaced(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """The ticks whose texts have room, from the left."""
    kept: list[tuple[float, str]] = []
    free_from = -math.inf
    for x, text in ticks:
        half = len(text) * _LETTER / 2
        if x - half > free_from:
            free_from = x + half + 8
            kept.append((x, text))
    return kept


def _bar(bar: Bar, place: Callable[[float, float], Point]) -> dict[str, Any]:
    (left, top), (right, bottom) = place(bar.begin, bar.row + _HALF_BAR), place(bar.end, bar.row - _HALF_BAR)
    width, height = max(_MIN_BAR, right - left), bottom - top
    return {
        "kind": bar.kind,
        "x": left,
        "y": top,
        "width": round(width, 1),
        "height": round(height, 1),
        "text": bar.text,
    }


def _rule(
    rule: ReferenceLine, place: Callable[[float, float], Point], frame: tuple[int, int, int, int]
) -> dict[str, Any]:
    left, top, right, bottom = frame
    if rule.y is not None:
        y = place(1.0, rule.y)[1]
        return {"kind": rule.kind, "x1": left, "x2": right, "y1": y, "y2": y}
    assert rule.x is not None
    x = place(rule.x, 1.0)[0]
    return {"kind": rule.kind, "x1": x, "x2": x, "y1": top, "y2": bottom}


def _labels(marks: Sequence[tuple[Mark, Point]], frame: Box) -> Iterator[dict[str, Any]]:
    sizes = [(len(mark.label) * _LETTER, _LINE) for mark, _ in marks]
    radii = [11.0 if mark.ringed else 6.0 for mark, _ in marks]
    points = [point for _, point in marks]
    for (mark, point), size, label in zip(marks, sizes, place_labels(points, sizes, radii, frame), strict=True):
        if label is not None:  # no room among many levels: the table names them all, and each point has its tooltip
            gaps = (max(abs(label[axis] - point[axis]) - size[axis] / 2, 0.0) for axis in (0, 1))
            far = math.hypot(*gaps) > _LEADER_FROM
            yield {"x": round(label[0], 1), "y": round(label[1], 1), "text": mark.label, "point": point, "leader": far}


_DISTANCES = (4.0, 9.0, 15.0, 24.0, 34.0, 46.0)
_ANGLES = (-90, -45, -135, 0, 180, 45, 135, 90)
"""Above first, then to the sides, then below: y grows downwards."""
_LEADER_FROM = 24.0
"""From this distance to a label's edge on, a line shows which point it belongs to."""


def place_labels(
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


def nice_ticks(high: float, count: int) -> list[float]:
    """Round values from zero on, about `count` of them."""
    step = high / count
    power = 10.0 ** math.floor(math.log10(step))
    nice = next(one for one in _NICE if one * power >= step * 0.999) * power
    return [number * nice for number in range(int(high / nice + 1e-9) + 1)]


# Files

_HEADING = 64
_COLOR = re.compile(r"var\(--([\w-]+)\)")


def chart_file(title: str, subtitle: str, charts: Sequence[Chart], width: int = 720, height: int = 400) -> Markup:
    """One SVG file with these charts side by side, each with its legend; the colours are the light theme's."""
    top = _HEADING + (18 if len(charts) > 1 else 0)
    parts: list[dict[str, Any]] = []
    for number, chart in enumerate(charts):
        legend = list(_legend(chart.legend, width, height))
        parts.append({"x": number * width, "y": top, "drawing": draw(chart, width, height), "legend": legend})
    deepest = max((entry["y"] for part in parts for entry in part["legend"]), default=height)
    return render(
        "chart_file.svg",
        title=title,
        subtitle=subtitle,
        width=width * len(charts),
        height=round(top + deepest + 24),
        style=Markup(_file_style()),
        parts=parts,
    )


def _legend(entries: Sequence[LegendEntry], width: int, height: int) -> Iterator[dict[str, Any]]:
    x, y = 66.0, height + 12.0
    for entry in entries:
        needed = 14 + len(entry.text) * _LEGEND_LETTER + 24
        if x + needed > width and x > 66.0:
            x, y = 66.0, y + _LEGEND_ROW
        shape = "line" if entry.kind.startswith("dash ") else "ring" if entry.kind == "ring" else "dot"
        yield {"x": x, "y": y, "kind": entry.kind.removeprefix("dash "), "shape": shape, "text": entry.text}
        x += needed


def _file_style() -> str:
    """The charts' style sheet with the light theme's colours in place: not every program reads variables."""
    light = asset("colors.css").partition("}")[0]
    values = dict(re.findall(r"--([\w-]+):\s*([^;]+);", light))
    return _COLOR.sub(lambda found: values[found[1]], asset("chart.css"))
