"""Pictures of a sweep, as PNG and SVG: errors against throughput, and latency against parallelism."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.errors import ConfigurationError
from steelyard.stats.formatting import safe_text, trim

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

HOW_TO_GET_PLOTS = "pip install 'steelyard[plot]'"

# Okabe and Ito's colours, which people with any common colour blindness tell apart; markers differ as well.
_INK, _GREY, _FAINT = "#222222", "#8c8c8c", "#d9d9d9"
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_SERIES = (("p50", _BLUE, "o"), ("p90", _ORANGE, "s"), ("p99", _RED, "^"))
_PANELS = {"time_to_first_token": "time to first token", "time_to_last_token": "time to last token"}
_LIMIT: dict[str, Any] = {"color": _INK, "linewidth": 1, "linestyle": (0, (5, 3)), "zorder": 1}
_WIDE = 20
"""From this ratio of the longest time to the shortest on, times are drawn on a scale of powers."""
_LONGEST_NAME = 60
_DOTS_PER_INCH = 160
_FORMATS: dict[str, dict[str, Any]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
"""What is left out of each, as it would differ from day to day or from version to version."""
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "steelyard",  # the same picture has the same bytes
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "font.size": 10,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": True,
    "legend.framealpha": 0.9,
    "legend.edgecolor": "none",
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def write_plots(sweep: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw a sweep, as sweep.json has it, into `error-rate` and `latency`, each .png and .svg; their paths.

    Raises ConfigurationError naming the extra where matplotlib is not installed.
    """
    _need_matplotlib()
    paths = []
    for name, draw in (("error-rate", error_rate_plot), ("latency", latency_plot)):
        with _styled():
            figure = draw(sweep)
            for suffix, unchanging in _FORMATS.items():
                path = folder / f"{name}{suffix}"
                figure.savefig(path, dpi=_DOTS_PER_INCH, metadata=unchanging)
                paths.append(path)
    return paths


def _need_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401 - only to see that it is there
    except ImportError as error:
        raise ConfigurationError(f"plots need matplotlib: {HOW_TO_GET_PLOTS}") from error


@contextmanager
def _styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A suite's name in a script that the font lacks shows as boxes: no reason to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def error_rate_plot(sweep: Mapping[str, Any]) -> Figure:
    """One point for each level: how much came through, and how much of what was sent failed."""
    figure = _figure(7.2, 4.6)
    axes = figure.add_subplot()
    levels = [level for level in sweep["levels"] if level["error_rate"] is not None]
    xs = [level["requests_per_second"] for level in levels]
    ys = [level["error_rate"] * 100 for level in levels]
    axes.plot(xs, ys, color=_FAINT, linewidth=1.4, zorder=1)
    limit = next((one["limit"] * 100 for one in sweep["objectives"] if one["figure"] == "error_rate"), None)
    top = max([*ys, 1.0 if limit is None else 2 * limit])
    axes.set(xlim=(0, max([*xs, 1e-9]) * 1.12), ylim=(-0.05 * top, top * 1.14))
    if limit is not None:
        axes.axhline(limit, label=f"limit {limit:g}%", **_LIMIT)
    _scatter(axes, levels, xs, ys, sweep["recommendation"]["level"])
    axes.set(xlabel="throughput (answers/s)", ylabel="error rate")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}%" if value >= 0 else "")
    _title(axes, sweep, "Error rate against throughput")
    _legend(axes)
    ringed = [level["level"] == sweep["recommendation"]["level"] for level in levels]
    place_labels(axes, xs, ys, [f"{level['level']:,}" for level in levels], ringed, colour=_INK, line=_GREY)
    return figure


def _scatter(axes: Axes, levels: Sequence[Mapping[str, Any]], xs: list[float], ys: list[float], best: Any) -> None:
    """The points by what they are worth: full, hollow where they say little, ringed where to run."""
    kinds: list[tuple[str, Callable[[Mapping[str, Any]], bool], dict[str, Any]]] = [
        ("level: calls in flight", _usable, {"s": 52, "color": _BLUE}),
        (
            "not reached",
            lambda one: one["invalid"] is None and not one["reached"],
            {"s": 46, "marker": "s", **_hollow()},
        ),
        ("not valid: client was the bottleneck", lambda one: one["invalid"] is not None, {"s": 52, **_hollow()}),
        ("recommended", lambda one: one["level"] == best, {"s": 210, "fc": "none", "ec": _GREEN, "linewidths": 2.2}),
    ]
    for name, belongs, look in kinds:
        chosen = [place for place, level in enumerate(levels) if belongs(level)]
        if chosen:
            axes.scatter(
                [xs[at] for at in chosen], [ys[at] for at in chosen], label=name, zorder=3, clip_on=False, **look
            )


def _hollow() -> dict[str, Any]:
    return {"facecolors": "white", "edgecolors": _GREY, "linewidths": 1.5}


def _usable(level: Mapping[str, Any]) -> bool:
    return level["invalid"] is None and bool(level["reached"])


def latency_plot(sweep: Mapping[str, Any]) -> Figure:
    """Percentiles of the time to first and to last token, over the calls in flight."""
    figure = _figure(10.5, 4.6)
    levels = sweep["levels"]
    for axes, (metric, name) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        _percentiles(axes, levels, metric)
        _limits(axes, sweep["objectives"], metric)
        _parallelism_axis(axes, [level["level"] for level in levels])
        if (best := sweep["recommendation"]["level"]) is not None:
            axes.axvline(best, color=_GREEN, linewidth=1.2, linestyle=":", label=f"recommended: {best:,}", zorder=1)
        axes.set(ylabel=name, xlabel="calls in flight")
        _legend(axes)
    _title(figure.axes[0], sweep, "Latency against parallelism")
    return figure


def _percentiles(axes: Axes, levels: Sequence[Mapping[str, Any]], metric: str) -> None:
    """A line for each percentile; hollow markers where a level says little."""
    seen: list[float] = []
    for name, colour, marker in _SERIES:
        known = [level for level in levels if level[metric][name] is not None]
        xs, ys = [level["level"] for level in known], [level[metric][name] for level in known]
        if not known:
            continue
        axes.plot(xs, ys, color=colour, marker=marker, markersize=6, linewidth=1.6, label=name, clip_on=False, zorder=3)
        weak = [place for place, level in enumerate(known) if not _usable(level)]
        hollow: dict[str, Any] = {"marker": marker, "s": 38, "facecolors": "white", "edgecolors": colour, "zorder": 4}
        axes.scatter([xs[at] for at in weak], [ys[at] for at in weak], clip_on=False, **hollow)
        seen += ys
    if seen and not all(map(_usable, levels)):
        axes.scatter([], [], s=38, label="hollow: not reached, or not valid", **_hollow())
    if not seen:
        axes.text(0.5, 0.6, "not measured", transform=axes.transAxes, ha="center", va="center", color=_GREY)
    _time_axis(axes, seen)


def _time_axis(axes: Axes, seconds: Sequence[float]) -> None:
    """Seconds from zero; by powers where overload would flatten all the rest against the axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    least, most = min(seconds, default=0.0), max(seconds, default=0.0)
    if least > 0 and most / least >= _WIDE:
        axes.set_yscale("log")
        axes.set_ylim(least / 1.5, most * 1.5)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, most * 1.1 or 1.0)
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value))


def _tick(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:g} ms"


def _limits(axes: Axes, objectives: Sequence[Mapping[str, Any]], metric: str) -> None:
    """A line for each objective on this time, if it lies within what is shown or close above."""
    for objective in objectives:
        measured, _, aggregate = objective["figure"].partition("-")
        low, high = axes.get_ylim()
        if measured == metric and low < objective["limit"] <= 2 * high:
            label = f"limit for {aggregate}: {_tick(objective['limit'])}"
            axes.axhline(objective["limit"], label=label, **_LIMIT)
            axes.set_ylim(low, max(high, objective["limit"] * 1.1))


def _parallelism_axis(axes: Axes, numbers: Sequence[int]) -> None:
    """A scale on which doubling is a step, named at the levels, as far as their names have room."""
    from matplotlib.ticker import NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    shown: list[int] = []
    for number in numbers:
        if not shown or number / shown[-1] >= (max(numbers) / min(numbers)) ** (1 / 14):
            shown.append(number)
    axes.set_xticks(shown, [f"{number:,}" for number in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    if numbers:
        axes.set_xlim(min(numbers) / 1.15, max(numbers) * 1.15)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, whatever backend the user has chosen
    return figure


def _title(axes: Axes, sweep: Mapping[str, Any], what: str) -> None:
    named = " on ".join(trim(safe_text(name), _LONGEST_NAME) for name in (sweep["suite"], sweep["model_id"]) if name)
    axes.set_title(what, loc="left", fontsize=12, fontweight="bold", pad=24, parse_math=False)
    axes.text(0, 1.03, named, transform=axes.transAxes, color=_GREY, fontsize=10, parse_math=False)


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles, labels, loc="best", fontsize=9, markerscale=0.8)


_DISTANCES = (11.0, 17.0, 26.0, 36.0, 48.0, 64.0)
"""How far from its point a label may be, in printer's points; the nearest that is free is taken."""
_ANGLES = (90, 45, 135, 0, 180, -45, -135, -90, 67, 113, 22, 158)
_FAR = 22.0
"""From here on a line shows which point a label belongs to."""
_POINT_SIZE, _RING_SIZE = 9.0, 17.0
_LOOK: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "zorder": 5}


def place_labels(
    axes: Axes,
    xs: Sequence[float],
    ys: Sequence[float],
    texts: Sequence[str],
    ringed: Sequence[bool],
    *,
    colour: str,
    line: str,
) -> None:
    """Write a text beside each point, where there is room for it; a point that is ringed needs more."""
    from matplotlib.patheffects import withStroke

    figure: Any = axes.figure
    figure.canvas.draw()  # a layout that adapts itself is only settled by drawing
    renderer = figure.canvas.get_renderer()
    sizes = [_RING_SIZE if ring else _POINT_SIZE for ring in ringed]
    taken = [_around(axes, x, y, size * figure.dpi / 72) for x, y, size in zip(xs, ys, sizes, strict=True)]
    if (legend := axes.get_legend()) is not None:
        taken.append(legend.get_window_extent(renderer))
    frame = axes.get_window_extent(renderer)
    for x, y, text in zip(xs, ys, texts, strict=True):
        label = axes.annotate(text, (x, y), (0, 0), **_LOOK, color=colour)
        taken.append(_settle(label, frame, taken, renderer))
        offset = label.get_position()
        if math.hypot(*offset) > _FAR:
            leader = {"arrowstyle": "-", "color": line, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3}
            axes.annotate("", (x, y), offset, **{**_LOOK, "zorder": 2}, arrowprops=leader).set_in_layout(False)
        label.set_in_layout(False)
        label.set_path_effects([withStroke(linewidth=2.5, foreground="white")])  # legible where a line runs under it


def _settle(label: Annotation, frame: Bbox, taken: Sequence[Bbox], renderer: Any) -> Bbox:
    """Move a label to the first place that is free, or to the last there is; the box that it takes there."""
    box = label.get_window_extent(renderer)
    for place in _places():
        label.set_position(place)
        box = label.get_window_extent(renderer)
        inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        if inside and not any(box.overlaps(other) for other in taken):
            break
    return box


def _places() -> Iterator[tuple[float, float]]:
    for distance in _DISTANCES:
        for angle in _ANGLES:
            # Texts are wider than high: a little more room to the sides.
            yield distance * 1.25 * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))


def _around(axes: Axes, x: float, y: float, size: float) -> Bbox:
    from matplotlib.transforms import Bbox

    centre_x, centre_y = axes.transData.transform((x, y))
    half = size / 2
    return Bbox.from_extents(centre_x - half, centre_y - half, centre_x + half, centre_y + half)
