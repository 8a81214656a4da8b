"""A sweep as one HTML file that needs no network: where to run, what each level brought, and what to make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.journal.manifest import read_sweep
from steelyard.load.levels import PERCENTILES
from steelyard.report.page.frame import document, escaped
from steelyard.report.sweep.charts import (
    brief,
    error_rate_chart,
    latency_chart,
    limits,
    throughput_chart,
    time_limits,
    usable,
)
from steelyard.report.sweep.table import level_cells, level_notes
from steelyard.stats.formatting import counted, format_number, format_seconds

_TIMES = {"time_to_first_token": "Time to first token", "time_to_last_token": "Time to last token"}

Level = Mapping[str, Any]


def sweep_page(sweep: Mapping[str, Any], place: str) -> str:
    """The whole page of a sweep as sweep.json has it; `place` is the folder that holds it."""
    return document(sweep_title(sweep), "sweep", sweep_markup(sweep, place))


def sweep_title(sweep: Mapping[str, Any]) -> str:
    """What was measured."""
    return f"{' on '.join(name for name in (sweep['suite'], sweep['model_id']) if name)}: sweep"


def sweep_markup(sweep: Mapping[str, Any], place: str, links: Mapping[str, str] | None = None) -> Iterator[str]:
    """What the page shows, without its frame; `links` are the addresses of the levels' runs, by their names."""
    levels, best = sweep["levels"], sweep["recommendation"]["level"]
    yield from _head(sweep, place)
    yield from _advice(sweep)
    yield from _tiles(next((level for level in levels if level["level"] == best), None))
    if not levels:
        return
    yield '<div class="cards">'
    yield _card("Error rate against throughput", error_rate_chart(sweep), _meanings(sweep))
    yield _card("Throughput", throughput_chart(sweep), "")
    for metric, name in _TIMES.items():
        if (chart := latency_chart(sweep, metric)) is not None:
            yield _card(name, chart, _lines(sweep, metric))
    yield "</div>"
    yield from _table(levels, best, links or {})
    yield from _notes(levels)


def _head(sweep: Mapping[str, Any], place: str) -> Iterator[str]:
    count, asked = len(sweep["levels"]), sweep["asked"]
    kept = [objective["text"] for objective in sweep["objectives"]]
    much = f"{asked['duration']:g} s a level" if asked.get("duration") is not None else ""
    facts = [sweep["model_id"] or "", counted(count, "level"), much, ", ".join(kept), place]
    listed = "".join(f"<span>{escaped(fact)}</span>" for fact in facts if fact)
    state = ("passed", "complete") if sweep["complete"] else ("error", "not complete")
    yield f'<div class="head"><div><h1>{escaped(sweep["suite"])}</h1><p class="facts">{listed}</p></div>'
    yield f'<span class="pill {state[0]}">{state[1]}</span></div>'
    if sweep["stopped"]:
        told = f"Not complete ({sweep['stopped']}): this is what the levels measured so far say."
        yield f'<div class="notice warning" role="note"><p>{escaped(told)}</p></div>'


def _advice(sweep: Mapping[str, Any]) -> Iterator[str]:
    best, reason = sweep["recommendation"]["level"], sweep["recommendation"]["reason"]
    words = "No level can be recommended" if best is None else f"Run at {counted(best, 'call')} in flight"
    kind = "none" if best is None else "some"
    yield f'<div class="card advice {kind}"><h2 class="verdict">{words}</h2><p>{escaped(_sentence(reason))}</p></div>'


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _tiles(level: Level | None) -> Iterator[str]:
    """The figures of the level to run at."""
    if level is None:
        return
    yield '<div class="tiles">'
    tokens = "" if level["output_tps"] is None else f"{format_number(round(level['output_tps'], 1))} output tokens/s"
    yield _tile("Throughput", format_number(level["requests_per_second"]), "answers/s", tokens)
    if level["error_rate"] is not None:
        yield _tile("Errors", f"{level['error_rate']:.1%}", "", f"of {level['requests']:,} requests")
    for metric, name in _TIMES.items():
        times = level[metric]
        if times["p50"] is not None:
            more = ", ".join(f"{one} {format_seconds(times[one])}" for one in PERCENTILES[1:])
            yield _tile(name, *_with_unit(times["p50"]), more)
    if level["pass_rate"] is not None:
        low, high = level["pass_rate_ci95"] or (None, None)
        sure = "" if low is None else f"95\N{NO-BREAK SPACE}%\N{NO-BREAK SPACE}CI {low:.1%} – {high:.1%}"
        yield _tile("Pass rate", f"{level['pass_rate']:.1%}", "", sure)
    yield "</div>"


def _with_unit(seconds: float) -> tuple[str, str]:
    figure = format_seconds(seconds)
    number = figure.rstrip("µms")
    return number, f"{figure.removeprefix(number)} median"


def _tile(label: str, value: str, unit: str, note: str) -> str:
    small = f"<small>{unit}</small>" if unit else ""
    return (
        f'<div class="tile"><div class="label">{label}</div><div class="value">{value}{small}</div>'
        f'<div class="note">{note}</div></div>'
    )


def _card(name: str, chart: str, keys: str) -> str:
    legend = f'<div class="legend">{keys}</div>' if keys else ""
    return f'<section class="card"><h2>{name}</h2>{chart}{legend}</section>'


def _meanings(sweep: Mapping[str, Any]) -> str:
    """What the points and lines of the chart mean, as far as there are any."""
    levels, best = sweep["levels"], sweep["recommendation"]["level"]
    found = [("dot-level", "level, by its calls in flight")] if any(map(usable, levels)) else []
    found += [] if best is None else [("dot-ring", "recommended")]
    found += [] if all(map(usable, levels)) else [("dot-weak", "not reached, or the client was the bottleneck")]
    found += [("dash limit", f"limit {limit * 100:g}%") for _, limit in limits(sweep, "error_rate")]
    return _keys(found)


def _lines(sweep: Mapping[str, Any], metric: str) -> str:
    """What the lines of a chart of times mean."""
    found = [(name, name) for name in PERCENTILES]
    found += [("dash limit", f"limit of {name} {brief(limit)}") for name, limit in time_limits(sweep, metric)]
    found += [] if sweep["recommendation"]["level"] is None else [("dash chosen", "recommended")]
    return _keys(found)


def _keys(found: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<span><span class="dot {kind}"></span>{escaped(says)}</span>' for kind, says in found)


def _table(levels: Sequence[Level], best: int | None, links: Mapping[str, str]) -> Iterator[str]:
    groups = ("", "", "", *("Time to first token",), *("Time to last token",), "Output", "")
    over = "".join(f"<th{' colspan=3' if name.startswith('Time') else ''}>{name}</th>" for name in groups)
    names = ("calls in flight", "answers/s", "errors", *PERCENTILES, *PERCENTILES, "tokens/s", "passed")
    titles = "".join(f'<th scope="col">{name}</th>' for name in names)
    yield '<section class="card wide"><h2>Levels</h2><div class="scroll levels-scroll"><table class="levels">'
    yield f"<thead><tr>{over}</tr><tr>{titles}</tr></thead><tbody>"
    for level in levels:
        named, *cells = level_cells(level)
        address = links.get(level["run"])
        shown = named if address is None else f'<a href="{escaped(address)}">{named}</a>'
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        kind = ' class="best"' if level["level"] == best else ""
        yield f'<tr{kind}><td class="name"><b>{shown}</b>{_tags(level, best)}</td>{row}</tr>'
    yield "</tbody></table></div></section>"


def _tags(level: Level, best: int | None) -> str:
    found = [
        ("passed", "recommended", level["level"] == best),
        ("failed", "client was the bottleneck", level["invalid"] is not None),
        ("error", "not reached", not level["reached"]),
        ("error", "objective broken", bool(level["broken"])),
        ("", "few requests", level["few"]),
    ]
    return "".join(f' <span class="tag {kind}">{says}</span>' for kind, says, there in found if there)


def _notes(levels: Sequence[Level]) -> Iterator[str]:
    told = [(level["level"], notes) for level in levels if (notes := level_notes(level))]
    if not told:
        return
    yield '<section class="card wide"><h2>About these levels</h2><dl class="pairs">'
    for number, notes in told:
        yield f"<dt>{number:,}</dt><dd>{escaped(_sentence('; '.join(notes)))}</dd>"
    yield "</dl></section>"


_Number = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""A figure that can be drawn: nothing that is measured is less, or comes near to more."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
_Parallelism = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Percentiles(msgspec.Struct):
    p50: _Number | None
    p90: _Number | None
    p99: _Number | None

    def __post_init__(self) -> None:
        if len({value is None for value in (self.p50, self.p90, self.p99)}) > 1:
            raise ValueError("a time has all of its percentiles or none")


class _Level(msgspec.Struct):
    level: _Parallelism
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


class _Asked(msgspec.Struct):
    duration: _Number | None = None


class _Objective(msgspec.Struct):
    figure: str
    limit: _Number
    text: str


class _Recommendation(msgspec.Struct):
    level: _Parallelism | None
    reason: str
    says: str


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
