"""What a sweep found as text for a terminal: a row for each level, what is to be known of some, and the advice."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from steelyard.stats.wording import counted, format_number, format_seconds, safe_text, trim

_LONGEST_ERROR = 160
_MOST_KINDS = 4
_MISSING = "–"
_WIDTH = 94
PERCENTILES = ("p50", "p90", "p99")
"""Those of a time that a level keeps and every report of a sweep shows."""
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
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


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
    found = [", ".join(f"{count:,} × {kind}" for kind, count in kinds[:_MOST_KINDS])] if kinds else []
    if len(kinds) > _MOST_KINDS:
        found[0] += f" and {sum(count for _, count in kinds[_MOST_KINDS:]):,} others"
    if level["error_rate"] and level.get("worst_error"):
        found.append(f"mostly {trim(safe_text(level['worst_error']), _LONGEST_ERROR)}")
    return found


def _wrapped(text: str, *, indent: str) -> list[str]:
    return textwrap.wrap(safe_text(text), _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _seconds(seconds: float | None) -> str:
    return _MISSING if seconds is None else format_seconds(seconds)


def _percent(rate: float | None) -> str:
    return _MISSING if rate is None else f"{rate:.1%}"
