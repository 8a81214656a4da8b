"""What a sweep found as text for a terminal: a row for each level, what is to be known of some, and the advice."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from steelyard._version import __version__
from steelyard.load.levels import PERCENTILES
from steelyard.report.csv import csv_line
from steelyard.report.markdown import code, markdown_table, words
from steelyard.stats.formatting import counted, format_number, format_time, safe_text, trim, without_commands

_MAX_ERROR_CHARS = 160
_MAX_KINDS = 4
_MISSING = "–"
_WIDTH = 80
_HEADS = (*("",) * 5, *("first token",) * 3, *("last token",) * 3, "output", "")
HEADINGS = ("level", "answers/s", "95 %", "goodput", "errors", *PERCENTILES, *PERCENTILES, "tokens/s", "passed")
_GOODPUT = 3
"""Its place in a row; left out where no objective is about a time."""


def sweep_table(sweep: Mapping[str, Any], place: str | None = None) -> str:
    """The table of a sweep as sweep.json has it, with the notes and the recommendation under it."""
    levels = sweep["levels"]
    parts = [_headline(sweep)]
    if levels:
        parts += [_table(sweep), _notes(sweep)]
        parts.append(_wrapped(sweep["recommendation"]["says"], indent="  "))
    if place is not None:
        parts.append([f"results in {safe_text(place)}"])
    return without_commands("\n\n".join("\n".join(lines) for lines in parts if lines))


def _headline(sweep: Mapping[str, Any]) -> list[str]:
    named = " on ".join(safe_text(name) for name in (sweep["suite"], sweep["model_id"]) if name)
    state = "complete" if sweep["complete"] else "not complete"
    lines = [f"{named}: {counted(len(sweep['levels']), 'level')} measured, {state}"]
    if sweep["stopped"]:
        lines.append(f"  stopped: {safe_text(sweep['stopped'])}")
    return lines


def _table(sweep: Mapping[str, Any]) -> list[str]:
    """The rows, within the width of a terminal: p90 and tokens/s are left out where they do not fit."""
    levels, recommended = sweep["levels"], sweep["recommendation"]["level"]
    heads = with_goodput(sweep, _HEADS)
    rows = [with_goodput(sweep, HEADINGS), *(level_cells(sweep, level) for level in levels)]
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(len(heads))]
    for name in ("p90", "tokens/s"):
        if sum(widths) + 2 > _WIDTH:
            kept = [column for column, heading in enumerate(rows[0]) if heading != name]
            rows = [[row[column] for column in kept] for row in rows]
            heads, widths = [heads[column] for column in kept], [widths[column] for column in kept]
    marks = ["  ", *("* " if level["level"] == recommended else _mark(level) for level in levels)]
    table = (mark + _row(cells, widths) for mark, cells in zip(marks, rows, strict=True))
    return [_over(heads, widths), *table]


def _over(heads: Sequence[str], widths: Sequence[int]) -> str:
    """The line above the headings: what the percentiles are of, at the right of their columns."""
    line, reached = "  ", 0
    for name, group in groupby(zip(heads, widths, strict=True), key=itemgetter(0)):
        reached += sum(width for _, width in group)
        line = line.ljust(2 + reached - len(name)) + name if name else line
    return line.rstrip()


def with_goodput(sweep: Mapping[str, Any], row: Sequence[Any]) -> list[Any]:
    """The row, without its goodput where no level has any."""
    has_any = any(level.get("goodput") is not None for level in sweep["levels"])
    return [cell for place, cell in enumerate(row) if has_any or place != _GOODPUT]


def _mark(level: Mapping[str, Any]) -> str:
    if level["invalid"] is not None or not level["reached"]:
        return "! "
    return "x " if level["broken"] else "? " if level.get("undecided") else "  "


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def level_name(sweep: Mapping[str, Any], level: Mapping[str, Any]) -> str:
    """A level as it is called: `50` calls in flight, or `10/s` of arrivals."""
    return f"{level['level']:,}{'/s' if by_rate(sweep) else ''}"


def by_rate(sweep: Mapping[str, Any]) -> bool:
    """Whether its levels are arrival rates."""
    return sweep["asked"].get("arrivals") is not None


def level_cells(sweep: Mapping[str, Any], level: Mapping[str, Any]) -> list[str]:
    """The figures of a level as text, in the table's order."""
    cells = [
        level_name(sweep, level),
        format_number(level["requests_per_second"]),
        _reach(level["requests_per_second"], level.get("requests_per_second_ci95")),
        _MISSING if level.get("goodput") is None else format_number(level["goodput"]),
        _percent(level["error_rate"]),
        *(_time(level, "time_to_first_token", name) for name in PERCENTILES),
        *(_time(level, "time_to_last_token", name) for name in PERCENTILES),
        _MISSING if level["output_tps"] is None else format_number(round(level["output_tps"], 1)),
        _percent(level["pass_rate"]),
    ]
    return with_goodput(sweep, cells)


def _reach(rate: float, interval: Sequence[float] | None) -> str:
    """How far the throughput may be from the truth, as a share of it; a dash where there was no steady state."""
    return _MISSING if interval is None or not rate else f"±{(interval[1] - rate) / rate:.0%}"


def _time(level: Mapping[str, Any], metric: str, name: str) -> str:
    found = level.get("latency", {}).get(metric, {}).get(name, {})
    return format_time(level[metric][name], found.get("at_least", False))


def _notes(sweep: Mapping[str, Any]) -> list[str]:
    """What is to be known of the levels, a paragraph each."""
    lines: list[str] = []
    for level in sweep["levels"]:
        if about := level_notes(level):
            lines += _wrapped(f"{level_name(sweep, level)}: {'; '.join(about)}", indent="  ")
    return lines


def level_notes(level: Mapping[str, Any]) -> list[str]:
    """What a figure alone would not tell of a level, in words that are safe for a terminal."""
    found = []
    if level["invalid"] is not None:
        found.append(f"not valid: this client was the bottleneck: {level['invalid']}")
    if not level["reached"]:
        found.append(f"not reached: at most {level['peak_in_flight']:,} were in flight at once")
    if level["few"]:
        found.append(f"only {level['requests']:,} requests: too few answers for a steady state, send more")
    return [*found, *level["broken"], *level.get("undecided", []), *_errors(level)]


def _errors(level: Mapping[str, Any]) -> list[str]:
    """How often the most frequent kinds of error came, and what one of the first kind said."""
    kinds = list(level.get("error_kinds", {}).items())
    found = [", ".join(f"{count:,} × {kind}" for kind, count in kinds[:_MAX_KINDS])] if kinds else []
    if len(kinds) > _MAX_KINDS:
        found[0] += f" and {sum(count for _, count in kinds[_MAX_KINDS:]):,} others"
    if level["error_rate"] and level.get("worst_error"):
        found.append(f"mostly {trim(safe_text(level['worst_error']), _MAX_ERROR_CHARS)}")
    return found


def _wrapped(text: str, *, indent: str) -> list[str]:
    return textwrap.wrap(safe_text(text), _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _percent(rate: float | None) -> str:
    return _MISSING if rate is None else f"{rate:.1%}"


_MARKDOWNHEADINGS = (
    *("level", "answers/s", "95 %", "goodput", "errors", "first token p50", "p90", "p99"),
    *("last token p50", "p90", "p99", "tokens/s", "passed"),
)


def sweep_markdown(sweep: Mapping[str, Any], place: str) -> str:
    """Where to run, a row for each level, and what is to be known of some."""
    levels, best = sweep["levels"], sweep["recommendation"]["level"]
    named = " on ".join(code(name) for name in (sweep["suite"], sweep["model_id"]) if name)
    advice = "no level can be recommended" if best is None else f"run at {best:,}{'/s' if by_rate(sweep) else ''}"
    parts = [f"## {named}: {advice}", words(sweep["recommendation"]["says"])]
    if sweep["stopped"]:
        parts.append(f"> [!WARNING]\n> **Not complete.** {words(sweep['stopped'])}")
    if levels:
        rows = (_marked(level_cells(sweep, level), level["level"] == best) for level in levels)
        parts.append(markdown_table(with_goodput(sweep, _MARKDOWNHEADINGS), rows, numbers=True))
    listed = [
        f"- **{level_name(sweep, level)}**: {words('; '.join(notes))}"
        for level in levels
        if (notes := level_notes(level))
    ]
    parts += ["\n".join(listed)] if listed else []
    return "\n\n".join([*parts, f"<sub>{code(place)}, Steelyard {__version__}</sub>"]) + "\n"


def _marked(cells: list[str], recommended: bool) -> list[str]:
    return [f"**{cell}**" for cell in cells] if recommended else cells


_FIGURES = ("requests", "active_seconds", "requests_per_second", "goodput", "error_rate", "pass_rate", "output_tps")
_TIMES = tuple((metric, name) for metric in ("time_to_first_token", "time_to_last_token") for name in PERCENTILES)
_STATES = ("peak_in_flight", "reached", "few", "invalid", "worst_error")


def sweep_csv(sweeps: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """A header, then a row for each level of each sweep, which comes with the name of its folder."""
    times = (f"{metric}-{name}" for metric, name in _TIMES)
    yield csv_line(
        ["sweep", "suite", "model_id", "level", "recommended", *_FIGURES, *times, *_STATES, "broken", "undecided"]
    )
    for place, sweep in sweeps:
        for level in sweep["levels"]:
            yield csv_line(
                [place, sweep["suite"], sweep["model_id"], *_csv_row(level, sweep["recommendation"]["level"])]
            )


def _csv_row(level: Mapping[str, Any], best: int | None) -> list[Any]:
    return [
        level["level"],
        level["level"] == best,
        *(level.get(name) for name in _FIGURES),
        *(level[metric][name] for metric, name in _TIMES),
        *(level.get(name) for name in _STATES),
        "; ".join(level["broken"]),
        "; ".join(level.get("undecided", [])),
    ]
