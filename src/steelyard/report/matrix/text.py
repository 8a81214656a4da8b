"""A leaderboard as text for a terminal, as Markdown for a pull request, and as CSV."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence

from steelyard._version import __version__
from steelyard.records import Record
from steelyard.report.compare.comparison import GO_BY_P, Change, format_p, is_corrected_away, signed
from steelyard.report.csv import csv_line
from steelyard.report.markdown import code, markdown_table, words
from steelyard.report.matrix.leaderboard import Leaderboard, Standing
from steelyard.report.matrix.table import AlignedCases, VariantRuns, lead_of
from steelyard.report.records import state_of
from steelyard.stats.formatting import counted, format_number, format_time, safe_text, trim, without_commands
from steelyard.stats.metrics import PercentileMetrics
from steelyard.stats.prices import format_money

MAX_DIFFERING = 20
_WIDTH = 80
_MAX_NAME = 22
_MAX_NAME_MD = 60
_MAX_ANSWER_MD = 100
_MAX_ANSWERS = 6
"""Variants whose answers a row of the Markdown shows: more do not fit in a comment."""
MISSING = "–"
_SIGNS = {"failed": "✕", "passed": "✓", "unscored": "–", "error": "!"}
_MAX_SIGNS = 10


def leaderboard_text(board: Leaderboard) -> str:
    """The verdict, the variants from the best to the worst, and how each compares with the best one."""
    named = safe_text(board.suite) or "runs"
    head = f"{named}: {counted(len(board.variants), 'variant')}, {counted(board.cases_in_common, 'case')} in common"
    parts = [[head, *_wrapped(f"{board.verdict}")], _table(board), _against(board), _notes(board)]
    if board.place is not None:
        parts.append([f"results in {safe_text(board.place)}"])
    return without_commands("\n\n".join("\n".join(lines) for lines in parts if lines))


HEADINGS = (
    *("passed", "95 % CI", "of scored", "errors"),
    *("cost/case", "cost/passed", "time p50", "time p95", "output tokens"),
)
_SCORED = HEADINGS.index("of scored")
_LESSER = [HEADINGS.index(name) for name in ("output tokens", "time p95", "cost/passed", "of scored")]
"""The columns that a terminal of 80 columns can do without, the least important first."""


def shown_columns(board: Leaderboard) -> list[int]:
    """The places in HEADINGS of what is worth a column: where any variant has it, and it says something new."""
    rows = [cells(one) for one in board.variants]
    errs = any(one.scored < one.n for one in board.variants)
    return [
        place
        for place in range(len(HEADINGS))
        if place < _SCORED or (any(row[place] != MISSING for row in rows) and (errs or place != _SCORED))
    ]


def cells(one: Standing, currency: str = "") -> list[str]:
    """The figures of a variant, in the order of HEADINGS. The pass rate is that of all records: errors count."""
    interval = one.pass_rate_all_ci95
    return [
        _percent(one.pass_rate_all if one.scored or one.errors else None) + (" *" if one.uncalibrated else ""),
        MISSING if interval is None or one.pass_rate_all is None else f"{interval[0]:.1%} – {interval[1]:.1%}",
        _percent(one.pass_rate),
        _percent(one.error_rate),
        _money(one.cost_per_case, currency),
        _money(one.cost_per_passed_case, currency),
        _time(one.latency_p50),
        _time(one.latency_p95),
        MISSING if one.tokens_output is None else format_number(round(one.tokens_output, 1)),
    ]


def mark_of(one: Standing) -> str:
    """`*` for the best variant, `=` for one that cannot be told from it, or is tied with another."""
    return {"best": "*", "tied": "=", "not distinguishable": "="}.get(one.place, " ")


def against_words(one: Standing) -> str:
    """What is shown of a variant against the best one, and how many cases would show more."""
    if one.place in ("best", "tied", "not ranked"):
        return one.place
    if one.against_best is None:
        return "shares no case with the best"
    if one.against_best.change.outcome != "no difference":
        return one.against_best.change.outcome
    needed = one.against_best.cases_needed
    return "not distinguishable" + ("" if needed is None else f": about {needed:,} cases would tell")


def change_cells(change: Change) -> list[str]:
    """The difference, its interval and p."""
    low, high = change.ci95
    return [
        f"{signed(change.difference * 100, 1)} points",
        f"{signed(low * 100, 1)} – {signed(high * 100, 1)}",
        format_p(change.p_adjusted),
    ]


def how_tested(board: Leaderboard) -> str:
    """How p is to be read."""
    if board.pairs_tested <= 1:
        return ""
    note = f"Holm's correction counts all {board.pairs_tested:,} pairs that differ, as any variant could have been best"
    compared = [one.against_best.change for one in board.variants if one.against_best is not None]
    if any(is_corrected_away(change) for change in compared):
        note += f". An interval is for its pair alone: {GO_BY_P}"
    return note


def about_columns(board: Leaderboard, headings: Collection[str]) -> list[str]:
    """What the headings leave open of the columns that are shown."""
    costs = f"costs in {board.currency}" if board.currency and "cost/case" in headings else ""
    time = "time: to the last token" if "time p50" in headings else ""
    tokens = "output tokens: of an answer" if "output tokens" in headings else ""
    return [note for note in (costs, time, tokens) if note]


def _table(board: Leaderboard) -> list[str]:
    names = _names(board)
    rows = [["variant", *HEADINGS], *([names[one.name], *cells(one)] for one in board.variants)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    kept = [0, *(place + 1 for place in shown_columns(board))]
    for lesser in _LESSER:
        if sum(widths[place] + 1 for place in kept) + 1 > _WIDTH and lesser + 1 in kept:
            kept.remove(lesser + 1)
    lines = []
    for mark, row in zip([" ", *map(mark_of, board.variants)], rows, strict=True):
        shown = [f"{row[0]:<{widths[0]}}", *(f"{row[place]:>{widths[place]}}" for place in kept[1:])]
        lines.append(f"{mark} {' '.join(shown)}".rstrip())
    return [*lines, *_wrapped("; ".join(about_columns(board, [HEADINGS[place - 1] for place in kept[1:]])))]


def _against(board: Leaderboard) -> list[str]:
    compared = [(one, one.against_best.change) for one in board.variants if one.against_best is not None]
    if not compared or board.best is None:
        return []
    names = _names(board)
    rows = [[names[one.name], *change_cells(change)] for one, change in compared]
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    lines = [f"against {trim(safe_text(board.best), 40)}, case by case:"]
    for (one, _), row in zip(compared, rows, strict=True):
        figures = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        line = f"{mark_of(one)} {'  '.join([f'{row[0]:<{widths[0]}}', *figures])}  "
        words = against_words(one)
        lines += [f"{line}{words}"] if len(line) + len(words) <= _WIDTH else [line.rstrip(), f"      {words}"]
    tested = how_tested(board)
    return [*lines, *(_wrapped(tested) if tested else [])]


def _notes(board: Leaderboard) -> list[str]:
    lines: list[str] = []
    for one in board.variants:
        marks = [f"* {sentence}" for sentence in one.uncalibrated]
        lines += [line for note in (*marks, *one.notes) for line in _wrapped(f"{one.name}: {note}")]
    if board.not_begun:
        lines += _wrapped(f"not begun: {', '.join(board.not_begun)}")
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(safe_text(text), _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _names(board: Leaderboard) -> dict[str, str]:
    """Names that fit into a column and stay different: cut at the end, else at the start, else in the middle."""
    safe = {one.name: safe_text(one.name) for one in board.variants}
    different = len(set(safe.values()))
    for width in range(_MAX_NAME, max(map(len, safe.values()), default=0)):
        for head in (width - 1, 0, width // 2):
            cut = {name: _cut(text, width, head) for name, text in safe.items()}
            if len(set(cut.values())) == different:
                return cut
    return safe


def _cut(text: str, width: int, head: int) -> str:
    tail = width - 1 - head
    return text if len(text) <= width else f"{text[:head]}…{text[len(text) - tail :]}"


def _percent(rate: float | None) -> str:
    return MISSING if rate is None else f"{rate:.1%}"


def _money(amount: float | None, currency: str) -> str:
    return MISSING if amount is None else format_money(amount, currency).rstrip()


def _time(found: PercentileMetrics | None) -> str:
    return MISSING if found is None else format_time(found.value, found.at_least)


def leaderboard_markdown(board: Leaderboard, variants: VariantRuns, most: int | None = MAX_DIFFERING) -> Iterator[str]:
    """The verdict, the leaderboard, and, folded, the first cases on which the variants differ."""
    yield f"## {code(board.suite, _MAX_NAME_MD)}: {counted(len(board.variants), 'variant')}\n\n"
    yield f"{words(board.verdict)}.\n\n"
    kept = shown_columns(board)
    head = ["variant", *(HEADINGS[place] for place in kept), "against the best", "95 % CI", "p", ""]
    yield markdown_table(head, (_markdown_row(one, kept) for one in board.variants), numbers=True) + "\n\n"
    listed = [f"- {code(one.name, _MAX_NAME_MD)}: {words(note)}" for one in board.variants for note in _all_notes(one)]
    if board.not_begun:
        listed.append(f"- not begun: {', '.join(code(name, _MAX_NAME_MD) for name in board.not_begun)}")
    listed += [f"- {words(note)}" for note in about_columns(board, [HEADINGS[place] for place in kept])]
    listed += [f"- {tested}"] if (tested := how_tested(board)) else []
    yield "\n".join([*listed, ""]) + "\n" if listed else ""
    yield from _differing(variants, most)
    place = "" if board.place is None else f"{code(board.place)}, "
    yield f"<sub>{place}Steelyard {__version__}</sub>\n"


def _all_notes(one: Standing) -> list[str]:
    return [*(f"* {sentence}" for sentence in one.uncalibrated), *one.notes]


def _markdown_row(one: Standing, kept: Sequence[int]) -> list[str]:
    change = ["", "", ""] if one.against_best is None else change_cells(one.against_best.change)
    rank = f"{one.rank}\\. " if one.rank is not None else ""
    figures = cells(one)
    row = [f"{rank}{code(one.name, _MAX_NAME_MD)}", *(figures[place] for place in kept), *change, against_words(one)]
    return [f"**{cell}**" if cell and one.place == "best" else cell for cell in row]


def _differing(variants: VariantRuns, most: int | None) -> Iterator[str]:
    """The first cases that did not come out alike, each with its outcome and answer by every variant."""
    aligned = AlignedCases([one.run for one in variants.runs])
    found = aligned.differing()
    if not len(found):
        return
    shown = found if most is None else found[:most]
    title = f"differ on {counted(len(found), 'case')}"
    if len(shown) < len(found):
        title += f": the first {len(shown):,}"
    yield f"<details><summary>{title}</summary>\n\n"
    names = [code(one.name, 40) for one in variants.runs]
    rows = (_case_row(records) for _, records in aligned.read(shown))
    yield markdown_table(["case", *names], rows) + "\n\n</details>\n\n"


def _case_row(records: Sequence[Sequence[tuple[int, Record]]]) -> list[str]:
    case_id = next(trials[0][1].id for trials in records if trials)
    return [
        code(case_id, _MAX_NAME_MD),
        *(_case_cell([record for _, record in trials], len(records)) for trials in records),
    ]


def _case_cell(trials: Sequence[Record], variants: int) -> str:
    if not trials:
        return ""
    states = [state_of(record) for record in trials]
    signs = "".join(_SIGNS[state] for state in states[:_MAX_SIGNS]) + ("…" if len(states) > _MAX_SIGNS else "")
    if variants > _MAX_ANSWERS:
        return signs
    lead = trials[lead_of(states)]
    answer = lead.error if lead.error is not None else lead.response_text
    return f"{signs} {code(answer or '', _MAX_ANSWER_MD)}".rstrip()


_CSV = (
    *("name", "rank", "place", "suite", "model_id", "complete", "n", "cases", "trials", "pass_rate", "pass_rate_all"),
    *("passed", "scored", "errors", "error_rate", "cost", "cost_per_case", "cost_per_passed_case"),
    *("tokens_input", "tokens_output", "pareto"),
)
_INTERVALS = ("pass_rate_ci95", "pass_rate_all_ci95")
_OF_CHANGE = ("difference", "p", "p_adjusted")


def leaderboard_csv(boards: Sequence[Leaderboard]) -> Iterator[str]:
    """A header, then a row for each variant of each matrix; a column for each of its axes."""
    axes = list(dict.fromkeys(axis for board in boards for axis in board.axes))
    ends = [f"{name}.{end}" for name in _INTERVALS for end in ("low", "high")]
    against = [*(f"against_best.{name}" for name in _OF_CHANGE), "against_best.low", "against_best.high"]
    yield csv_line(["matrix", *(f"axis.{axis}" for axis in axes), *_CSV, *ends, "p50", "p95", *against, "notes"])
    for board in boards:
        for one in board.variants:
            yield csv_line([board.place, *(one.axes.get(axis) for axis in axes), *_csv_row(one)])


def _csv_row(one: Standing) -> list[object]:
    intervals = [end for name in _INTERVALS for end in (getattr(one, name) or (None, None))]
    times = [None if found is None else found.value for found in (one.latency_p50, one.latency_p95)]
    change = None if one.against_best is None else one.against_best.change
    against = [None] * 5 if change is None else [*(getattr(change, name) for name in _OF_CHANGE), *change.ci95]
    return [*(getattr(one, name) for name in _CSV), *intervals, *times, *against, "; ".join(_all_notes(one))]
