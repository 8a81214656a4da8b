"""A sweep as one HTML file that needs no network, and its charts, which `write_charts` writes to files of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from markupsafe import Markup

from steelyard.errors import ConfigurationError
from steelyard.journal.manifest import read_sweep
from steelyard.load.levels import PERCENTILES
from steelyard.report.chart import Axis, Chart, LegendEntry, Mark, ReferenceLine, Series, chart_file, draw, nice_ticks
from steelyard.report.html import document, render
from steelyard.report.sweep.table import by_rate, level_cells, level_name, level_notes, with_goodput
from steelyard.stats.formatting import counted, format_number, format_seconds, format_time, safe_text, trim
from steelyard.stats.metrics import LatencyMetrics

TIMES = {"time_to_first_token": "Time to first token", "time_to_last_token": "Time to last token"}
_WIDE = 20
"""From this ratio of the longest time to the shortest on, times are drawn on a logarithmic scale."""
_MAX_NAME = 60

Level = Mapping[str, Any]


def write_charts(sweep: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write a sweep, as sweep.json has it, to `error-rate.svg` and `latency.svg`; their paths."""
    named = " on ".join(trim(safe_text(name), _MAX_NAME) for name in (sweep["suite"], sweep["model_id"]) if name)
    latencies = [latency_chart(sweep, metric) for metric in TIMES]
    drawn = {
        "error-rate.svg": chart_file("Error rate against throughput", named, [error_rate_chart(sweep)]),
        "latency.svg": chart_file(f"Latency against {_load_name(sweep)}", named, latencies, width=560),
    }
    for name, text in drawn.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in drawn]


def error_rate_chart(sweep: Mapping[str, Any]) -> Chart:
    """One point for each level: how much came through, and how much of what was sent failed."""
    levels = [level for level in sweep["levels"] if level["error_rate"] is not None]
    limit = next((limit for _, limit in limits(sweep, "error_rate")), None)
    most = max([*(level["requests_per_second"] for level in levels), 1e-9]) * 1.06
    worst = max([*(level["error_rate"] for level in levels), 2 * (limit or 0.005)]) * 1.1
    marks = [
        _level_mark(sweep, level, level["requests_per_second"], level["error_rate"], named=True) for level in levels
    ]
    return Chart(
        title="Error rate against throughput",
        description="Error rate against throughput, a point for each level",
        x=Axis(0, most, nice_ticks(most, 6), _plain, "answers a second"),
        # A little below nothing, so that the points without errors are clear of the axis.
        y=Axis(-0.06 * worst, worst, nice_ticks(worst, 5), lambda rate: f"{rate * 100:g}%"),
        series=[Series("trail", marks)],
        rules=[] if limit is None else [ReferenceLine("limit", y=limit)],
        legend=list(_level_legend(sweep)),
    )


def throughput_chart(sweep: Mapping[str, Any]) -> Chart:
    """How many answers a second each load brought, and how many of them kept every objective."""
    levels = sweep["levels"]
    most = max([*(level["requests_per_second"] for level in levels), 1e-9]) * 1.1
    good = [level for level in levels if level.get("goodput") is not None]
    series = [Series("through", [_level_mark(sweep, one, one["level"], one["requests_per_second"]) for one in levels])]
    series += [Series("good", [_good_mark(sweep, one) for one in good])] if good else []
    legend = [LegendEntry("level", "answers"), LegendEntry("good", "goodput: within every objective")] if good else []
    return Chart(
        title="Throughput and goodput" if good else "Throughput",
        description=f"Answers a second against {_load_name(sweep)}",
        x=_load_axis(sweep),
        y=Axis(0, most, nice_ticks(most, 5), _plain),
        series=series,
        legend=legend,
    )


def latency_chart(sweep: Mapping[str, Any], metric: str) -> Chart:
    """The percentiles of a time over the calls in flight; without series where it was not measured."""
    levels = [level for level in sweep["levels"] if level[metric]["p50"] is not None]
    drawn, best = time_limits(sweep, metric), sweep["recommendation"]["level"]
    seconds = [level[metric][name] for level in levels for name in PERCENTILES]
    rules = [ReferenceLine("limit", y=limit) for _, limit in drawn]
    rules += [] if best is None else [ReferenceLine("chosen", x=best)]
    return Chart(
        title=TIMES[metric],
        description=f"{TIMES[metric]} against {_load_name(sweep)}",
        x=_load_axis(sweep),
        y=_time_axis([*seconds, *(limit for _, limit in drawn)] or [1.0]),
        series=[_percentile_series(sweep, name, levels, metric) for name in PERCENTILES] if levels else [],
        rules=rules if levels else [],
        legend=list(_time_legend(sweep, drawn)) if levels else [],
        note="" if levels else "not measured",
    )


def limits(sweep: Mapping[str, Any], figure: str) -> Iterator[tuple[str, float]]:
    """The objectives on a figure: the aggregate, such as p99, and its limit."""
    for objective in sweep["objectives"]:
        measured, _, aggregate = objective["figure"].partition("-")
        if measured == figure:
            yield aggregate, objective["limit"]


def time_limits(sweep: Mapping[str, Any], metric: str) -> list[tuple[str, float]]:
    """The limits of a time that are near enough to what was measured to be drawn."""
    known = [level[metric][name] for level in sweep["levels"] for name in PERCENTILES]
    highest = max((seconds for seconds in known if seconds is not None), default=0.0)
    return [(name, limit) for name, limit in limits(sweep, metric) if 0 < limit <= 2 * highest]


def is_usable(level: Level) -> bool:
    """Whether a level says anything about the endpoint at that many calls at once."""
    return level["invalid"] is None and bool(level["reached"])


def _load_name(sweep: Mapping[str, Any]) -> str:
    return "requests a second" if by_rate(sweep) else "calls in flight"


def _level_text(sweep: Mapping[str, Any], level: Level) -> str:
    return level_name(sweep, level) if by_rate(sweep) else f"{level['level']:,} in flight"


def _good_mark(sweep: Mapping[str, Any], level: Level) -> Mark:
    text = f"{_level_text(sweep, level)}: {_with_interval(level, 'goodput')} answers/s within every objective"
    return Mark(level["level"], level["goodput"], text, "good" if is_usable(level) else "good weak", 3.5)


def _with_interval(level: Level, name: str) -> str:
    """A throughput with its 95 % interval, where it has one."""
    shown, interval = format_number(level[name]), level.get(f"{name}_ci95")
    return shown if interval is None else f"{shown} ({format_number(interval[0])} – {format_number(interval[1])})"


def _level_mark(sweep: Mapping[str, Any], level: Level, x: float, y: float, *, named: bool = False) -> Mark:
    """A dot for a level, hollow where it says little, ringed where to run."""
    best = sweep["recommendation"]["level"]
    text = f"{_level_text(sweep, level)}: {_with_interval(level, 'requests_per_second')} answers/s"
    if level["error_rate"] is not None:
        text += f", {level['error_rate']:.1%} errors"
    kind = "level" if is_usable(level) else "level weak"
    label = level_name(sweep, level) if named else ""
    return Mark(x, y, text, kind, 4.5, label=label, ringed=level["level"] == best)


def _percentile_series(sweep: Mapping[str, Any], name: str, levels: Sequence[Level], metric: str) -> Series:
    marks = []
    for level in levels:
        seconds, found = level[metric][name], level.get("latency", {}).get(metric, {}).get(name, {})
        text = f"{_level_text(sweep, level)}: {name} {format_time(seconds, found.get('at_least', False))}"
        kind = f"knot {name}" if is_usable(level) else f"knot {name} weak"
        marks.append(Mark(level["level"], seconds, text, kind, 3))
    return Series(name, marks)


def _level_legend(sweep: Mapping[str, Any]) -> Iterator[LegendEntry]:
    """What the points and lines mean, as far as there are any."""
    levels = sweep["levels"]
    if any(map(is_usable, levels)):
        yield LegendEntry("level", "level, by its rate" if by_rate(sweep) else "level, by its calls in flight")
    if sweep["recommendation"]["level"] is not None:
        yield LegendEntry("ring", "recommended")
    if not all(map(is_usable, levels)):
        yield LegendEntry("level weak", "not reached, or the client was the bottleneck")
    for _, limit in limits(sweep, "error_rate"):
        yield LegendEntry("dash limit", f"limit {limit * 100:g}%")


def _time_legend(sweep: Mapping[str, Any], drawn: Sequence[tuple[str, float]]) -> Iterator[LegendEntry]:
    for name in PERCENTILES:
        yield LegendEntry(f"knot {name}", name)
    for name, limit in drawn:
        yield LegendEntry("dash limit", f"limit of {name} {_seconds(limit)}")
    if sweep["recommendation"]["level"] is not None:
        yield LegendEntry("dash chosen", "recommended")


def _load_axis(sweep: Mapping[str, Any]) -> Axis:
    """A scale on which doubling is a step, with ticks at the levels."""
    numbers = [float(level["level"]) for level in sweep["levels"]] or [1.0]
    low, high = min(numbers) / 1.12, max(numbers) * 1.12
    return Axis(low, high, numbers, _plain, _load_name(sweep), log=True)


def _time_axis(seconds: Sequence[float]) -> Axis:
    """Seconds from zero; logarithmic where overload would flatten all the rest against the axis."""
    least, most = min(seconds), max(seconds)
    if least > 0 and most / least >= _WIDE:
        powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        low, high = least / 1.3, most * 1.3
        within = [tick for tick in ticks if low <= tick <= high]
        return Axis(low, high, within[:: math.ceil(len(within) / 7)], _seconds, log=True)
    high = most * 1.1 or 1.0
    return Axis(0, high, nice_ticks(high, 5), _seconds)


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) else f"{number:g}"


def _seconds(seconds: float) -> str:
    """A time as it is written at an axis."""
    return f"{seconds:g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:g} ms"


_HEADINGS = ("answers/s", "95 %", "goodput", "errors", *PERCENTILES, *PERCENTILES, "tokens/s", "passed")


def sweep_page(sweep: Mapping[str, Any], place: str) -> str:
    """The whole page of a sweep as sweep.json has it; `place` is the folder that holds it."""
    return document("sweep", sweep_title(sweep), sweep_markup(sweep, place))


def sweep_title(sweep: Mapping[str, Any]) -> str:
    """What was measured."""
    return f"{' on '.join(name for name in (sweep['suite'], sweep['model_id']) if name)}: sweep"


def sweep_markup(sweep: Mapping[str, Any], place: str, links: Mapping[str, str] | None = None) -> Markup:
    """The content of the page; `links` are the addresses of the levels' runs, by their names."""
    levels, best = sweep["levels"], sweep["recommendation"]["level"]
    latencies = [chart for metric in TIMES if (chart := latency_chart(sweep, metric)).series]
    charts = [error_rate_chart(sweep), throughput_chart(sweep), *latencies] if levels else []
    return render(
        "sweep.html",
        sweep=sweep,
        best=best,
        best_load="" if best is None else _load(sweep, best),
        reason=_sentence(sweep["recommendation"]["reason"]),
        open_question=_open_question(sweep["recommendation"]),
        facts=_facts(sweep, place),
        tiles=[tile for level in levels if level["level"] == best for tile in _tiles(level)],
        before=len(with_goodput(sweep, ("", *_HEADINGS))) - 8,
        drawings=[draw(chart) for chart in charts],
        headings=with_goodput(sweep, ("requests a second" if by_rate(sweep) else "calls in flight", *_HEADINGS)),
        rows=[_row(sweep, level, (links or {}).get(level["run"])) for level in levels],
        notes=[
            (level_name(sweep, level), _sentence("; ".join(notes))) for level in levels if (notes := level_notes(level))
        ],
    )


def _load(sweep: Mapping[str, Any], best: int | float) -> str:
    return f"{best:,} requests a second" if by_rate(sweep) else f"{counted(int(best), 'call')} in flight"


def _open_question(recommendation: Mapping[str, Any]) -> str:
    """That the recommendation is not settled, and what would settle it; empty where it is."""
    if recommendation.get("decided", True):
        return ""
    more = recommendation.get("more_requests")
    return "Undecided." if more is None else f"Undecided: about {more:,} more requests would tell."


def _facts(sweep: Mapping[str, Any], place: str) -> list[str]:
    count, asked = len(sweep["levels"]), sweep["asked"]
    objectives = ", ".join(objective["text"] for objective in sweep["objectives"])
    duration = f"{asked['duration']:g} s a level" if asked.get("duration") is not None else ""
    arrivals = asked.get("arrivals") or ""
    facts = [sweep["model_id"] or "", counted(count, "level"), arrivals, duration, objectives, place]
    return [fact for fact in facts if fact]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _tiles(level: Level) -> Iterator[tuple[str, str, str, str]]:
    """The figures of the level to run at: label, value, unit, note."""
    tokens = "" if level["output_tps"] is None else f"{format_number(round(level['output_tps'], 1))} output tokens/s"
    sure = level.get("requests_per_second_ci95")
    if sure is not None:
        tokens = ", ".join(filter(None, (_interval(*map(format_number, sure)), tokens)))
    yield "Throughput", format_number(level["requests_per_second"]), "answers/s", tokens
    if level.get("goodput") is not None:
        yield "Goodput", format_number(level["goodput"]), "answers/s", "within every objective"
    if level["error_rate"] is not None:
        yield "Errors", f"{level['error_rate']:.1%}", "", f"of {level['requests']:,} requests"
    for metric, name in TIMES.items():
        times = level[metric]
        if times["p50"] is not None:
            found = level.get("latency", {}).get(metric, {})
            more = ", ".join(
                f"{one} {format_time(times[one], found.get(one, {}).get('at_least', False))}" for one in PERCENTILES[1:]
            )
            yield name, *_with_unit(times["p50"]), more
    if level["pass_rate"] is not None:
        low, high = level["pass_rate_ci95"] or (None, None)
        interval = "" if low is None else _interval(f"{low:.1%}", f"{high:.1%}")
        yield "Pass rate", f"{level['pass_rate']:.1%}", "", interval


def _interval(low: str, high: str) -> str:
    return f"95\N{NO-BREAK SPACE}%\N{NO-BREAK SPACE}CI {low} – {high}"


def _with_unit(seconds: float) -> tuple[str, str]:
    figure = format_seconds(seconds)
    number = figure.rstrip("µms")
    return number, f"{figure.removeprefix(number)} median"


def _row(sweep: Mapping[str, Any], level: Level, address: str | None) -> dict[str, Any]:
    best = sweep["recommendation"]["level"]
    name, *cells = level_cells(sweep, level)
    tags = [
        ("passed", "recommended", level["level"] == best),
        ("failed", "client was the bottleneck", level["invalid"] is not None),
        ("error", "not reached", not level["reached"]),
        ("error", "objective broken", bool(level["broken"])),
        ("error", "undecided", bool(level.get("undecided") and not level["broken"])),
        ("", "few requests", level["few"]),
    ]
    shown = [(kind, text) for kind, text, there in tags if there]
    return {"name": name, "cells": cells, "address": address, "best": level["level"] == best, "tags": shown}


_Number = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""A figure that can be drawn: nothing that is measured is less, or comes near to more."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
_Load = Annotated[float, msgspec.Meta(gt=0, le=10**9)]
"""Calls in flight, or requests a second."""
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Percentiles(msgspec.Struct):
    p50: _Number | None
    p90: _Number | None
    p99: _Number | None

    def __post_init__(self) -> None:
        if len({value is None for value in (self.p50, self.p90, self.p99)}) > 1:
            raise ValueError("a time has all of its percentiles or none")


class _Level(msgspec.Struct):
    level: _Load
    run: str
    requests: _Count
    active_seconds: _Number
    requests_per_second: _Number
    error_rate: _Share | None
    pass_rate: _Share | None
    pass_rate_ci95: tuple[_Share, _Share] | None
    output_tps: _Number | None
    time_to_first_token: _Percentiles
    time_to_last_token: _Percentiles
    peak_in_flight: _Count
    invalid: str | None
    broken: list[str]
    reached: bool
    few: bool
    error_kinds: dict[str, _Count] = {}
    worst_error: str | None = None
    requests_per_second_ci95: tuple[_Number, _Number] | None = None
    goodput: _Number | None = None
    goodput_ci95: tuple[_Number, _Number] | None = None
    undecided: list[str] = []
    latency: dict[str, LatencyMetrics] = {}


class _Asked(msgspec.Struct):
    duration: _Number | None = None
    arrivals: str | None = None


class _Objective(msgspec.Struct):
    figure: str
    limit: _Number
    text: str


class _Recommendation(msgspec.Struct):
    level: _Load | None
    reason: str
    says: str
    decided: bool = True
    more_requests: _Count | None = None


class _Sweep(msgspec.Struct):
    complete: bool
    stopped: str | None
    suite: str
    model_id: str | None
    asked: _Asked
    objectives: list[_Objective]
    levels: list[_Level]
    recommendation: _Recommendation


def checked_sweep(folder: Path) -> dict[str, Any] | None:
    """What a folder says of its sweep, complete or so far; None when it holds none. Raises if it is not understood."""
    sweep = read_sweep(folder)
    try:
        if sweep is not None:
            msgspec.convert(sweep, _Sweep)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the sweep in {folder} cannot be understood: {error}") from error
    return sweep
