"""What a sweep found as text for a terminal: a row for each level, what is to be known of some, and the advice."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from steelyard._version import __version__
from steelyard.load.levels import PERCENTILES
from steelyard.report.csv import csv_line
from steelyard.report.markdown import code, markdown_table, words
from steelyard.stats.formatting import counted, format_number, format_seconds, safe_text, trim, without_commands

_MAX_ERROR_CHARS = 160
_MAX_KINDS = 4
_MISSING = "–"
_WIDTH = 94
_WIDTHS = (6, 11, 8, *(8,) * 6, 10, 9)
_HEADINGS = ("level", "answers/s", "errors", *PERCENTILES, *PERCENTILES, "tokens/s", "passed")


def sweep_table(sweep: Mapping[str, Any], place: str | None = None) -> str:
    """The table of a sweep as sweep.json has it, with the notes and the recommendation under it."""
    levels = sweep["levels"]
    parts = [_headline(sweep)]
    if levels:
        parts += [_table(levels, sweep["recommendation"]["level"]), _notes(levels)]
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


def _table(levels: Sequence[Mapping[str, Any]], recommended: int | None) -> list[str]:
    before, times = sum(_WIDTHS[:3]), sum(_WIDTHS[3:6])
    over = " " * before + f"{'time to first token':>{times}}{'time to last token':>{times}}{'output':>{_WIDTHS[9]}}"
    rows = [_HEADINGS, *(level_cells(level) for level in levels)]
    marks = ["  ", *("* " if level["level"] == recommended else _mark(level) for level in levels)]
    return [
        f"  {over}",
        *(mark + _row(cells) for mark, cells in zip(marks, rows, strict=True)),
    ]


def _mark(level: Mapping[str, Any]) -> str:
    return "! " if level["invalid"] is not None or not level["reached"] else "  "


def _row(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def level_cells(level: Mapping[str, Any]) -> list[str]:
    """The figures of a level as text, in the table's order."""
    return [
        f"{level['level']:,}",
        format_number(level["requests_per_second"]),
        _percent(level["error_rate"]),
        *(_seconds(level["time_to_first_token"][name]) for name in PERCENTILES),
        *(_seconds(level["time_to_last_token"][name]) for name in PERCENTILES),
        _MISSING if level["output_tps"] is None else format_number(round(level["output_tps"], 1)),
        _percent(level["pass_rate"]),
    ]


def _notes(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is to be known of the levels, a paragraph each."""
    lines: list[str] = []
    for level in levels:
        if about := level_notes(level):
            lines += _wrapped(f"{level['level']:,}: {'; '.join(about)}", indent="  ")
    return lines


def level_notes(level: Mapping[str, Any]) -> list[str]:
    """What a figure alone would not tell of a level, in words that are safe for a terminal."""
    found = []
    if level["invalid"] is not None:
        found.append(f"not valid: this client was the bottleneck: {level['invalid']}")
    if not level["reached"]:
        found.append(f"not reached: at most {level['peak_in_flight']:,} were in flight at once")
    if level["few"]:
        found.append(f"only {level['requests']:,} requests: too few for steady figures, give it more time")
    return [*found, *level["broken"], *_errors(level)]


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


def _seconds(seconds: float | None) -> str:
    return _MISSING if seconds is None else format_seconds(seconds)


def _percent(rate: float | None) -> str:
    return _MISSING if rate is None else f"{rate:.1%}"


_MARKDOWN_HEADINGS = ("level", "answers/s", "errors", "first token p50", "p90", "p99", "last token p50", "p90", "p99")


def sweep_markdown(sweep: Mapping[str, Any], place: str) -> str:
    """Where to run, a row for each level, and what is to be known of some."""
    levels, best = sweep["levels"], sweep["recommendation"]["level"]
    named = " on ".join(code(name) for name in (sweep["suite"], sweep["model_id"]) if name)
    advice = "no level can be recommended" if best is None else f"run at {best:,}"
    parts = [f"## {named}: {advice}", words(sweep["recommendation"]["says"])]
    if sweep["stopped"]:
        parts.append(f"> [!WARNING]\n> **Not complete.** {words(sweep['stopped'])}")
    if levels:
        head = [*_MARKDOWN_HEADINGS, "tokens/s", "passed"]
        parts.append(
            markdown_table(
                head, (_marked(level_cells(level), level["level"] == best) for level in levels), numbers=True
            )
        )
    listed = [
        f"- **{level['level']:,}**: {words('; '.join(notes))}" for level in levels if (notes := level_notes(level))
    ]
    parts += ["\n".join(listed)] if listed else []
    return "\n\n".join([*parts, f"<sub>{code(place)}, Steelyard {__version__}</sub>"]) + "\n"


def _marked(cells: list[str], recommended: bool) -> list[str]:
    return [f"**{cell}**" for cell in cells] if recommended else cells


_FIGURES = ("requests", "active_seconds", "requests_per_second", "error_rate", "pass_rate", "output_tps")
_TIMES = tuple((metric, name) for metric in ("time_to_first_token", "time_to_last_token") for name in PERCENTILES)
_STATES = ("peak_in_flight", "reached", "few", "invalid", "worst_error")


def sweep_csv(sweeps: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """A header, then a row for each level of each sweep, which comes with the name of its folder."""
    times = (f"{metric}-{name}" for metric, name in _TIMES)
    yield csv_line(["sweep", "suite", "model_id", "level", "recommended", *_FIGURES, *times, *_STATES, "broken"])
    for place, sweep in sweeps:
        for level in sweep["levels"]:
            yield csv_line(
                [place, sweep["suite"], sweep["model_id"], *_csv_row(level, sweep["recommendation"]["level"])]
            )


def _csv_row(level: Mapping[str, Any], best: int | None) -> list[Any]:
    return [
        level["level"],
        level["level"] == best,
        *(level[name] for name in _FIGURES),
        *(level[metric][name] for metric, name in _TIMES),
        *(level.get(name) for name in _STATES),
        "; ".join(level["broken"]),
    ]
