"""A sweep as one HTML file that needs no network: where to run, what each level brought, and what to make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from markupsafe import Markup

from steelyard.errors import ConfigurationError
from steelyard.journal.manifest import read_sweep
from steelyard.load.levels import PERCENTILES
from steelyard.report.chart import draw
from steelyard.report.html import document, render
from steelyard.report.sweep.charts import TIMES, Level, error_rate_chart, latency_chart, throughput_chart
from steelyard.report.sweep.table import by_rate, level_cells, level_name, level_notes, with_goodput
from steelyard.stats.formatting import counted, format_number, format_seconds, format_time
from steelyard.stats.metrics import LatencyMetrics

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
        ("error", "undecided", bool(level.get("undecided"))),
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
