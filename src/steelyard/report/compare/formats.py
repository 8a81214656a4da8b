"""A comparison as text for a terminal, as Markdown, and as one HTML file that needs no network."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from steelyard.report.compare.comparison import (
    Against,
    CaseChange,
    CaseList,
    Change,
    Comparison,
    Row,
    RunFacts,
    lists,
    outcomes,
    rows,
)
from steelyard.report.html import document, render
from steelyard.report.markdown import code, markdown_table
from steelyard.stats.formatting import safe_text, trim, without_commands

_WIDTH = 80
_MAX_ID_TEXT = 40
_MAX_LABEL_CHARS = _WIDTH - 2
_MAX_HEAD_CHARS = 8
_TYPICAL = ", typical case"
_MIN_WIDTHS = (0, 8, 8, 12, 15, 0)
"""Of the columns, so that the tables of several runs look alike."""


def compare_text(comparison: Comparison) -> str:
    """For each run the verdict, the figures, the cases that changed, and what else is different."""
    parts = [_named("baseline", comparison.baseline)]
    for one in comparison.against:
        parts += [_named("against", one.run), *_text_sections(one, comparison)]
    return without_commands("\n\n".join(parts))


def _text_sections(one: Against, comparison: Comparison) -> list[str]:
    found = [_wrapped(safe_text(one.verdict)), _table(one, comparison)]
    if one.split is not None:
        found += [_text_flips("better", one.split.better, one.better), _text_flips("worse", one.split.worse, one.worse)]
    found += [_list(title, listed) for title, listed in lists(one)]
    if one.notes:
        notes = [_wrapped(f"  {safe_text(note)}", "    ") for note in one.notes]
        found.append("\n".join(["what else is different:", *notes]))
    return found


def _named(role: str, run: RunFacts) -> str:
    named = " on ".join(safe_text(name) for name in (run.suite, run.model_id) if name)
    trials = f", {run.trials:,} trials" if run.trials > 1 else ""
    state = "" if run.complete else ", not complete"
    return _wrapped(f"{role:<9} {safe_text(run.run)}: {named}, {run.cases:,} cases{trials}{state}", " " * 10)


def _wrapped(text: str, indent: str = "") -> str:
    """A text in lines that fit the width; a word that does not, such as a path, stays whole."""
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _table(one: Against, comparison: Comparison) -> str:
    before, now = _heads(comparison.baseline, one.run)
    head = Row(
        f"{one.paired:,} paired cases", baseline=before, run=now, change="change", interval="95 % CI", outcome="shown"
    )
    shown = [head, *rows(one, safe_text(comparison.currency))]
    labels = [trim(f"{_short(row.label)} {safe_text(row.name)}".rstrip(), _MAX_LABEL_CHARS) for row in shown]
    cells = [
        [label, row.baseline, row.run, row.change, row.interval, row.outcome]
        for label, row in zip(labels, shown, strict=True)
    ]
    columns = zip(_MIN_WIDTHS, zip(*cells, strict=True), strict=True)
    widths = [max(fewest, *map(len, column)) for fewest, column in columns]
    widths[0] = min(widths[0], _WIDTH - 2 - sum(width + 2 for width in widths[1:]))
    form = f"  {{:<{widths[0]}}}" + "".join(f"  {{:>{width}}}" for width in widths[1:-1]) + "  {}"
    lines = []
    for label, *figures in cells:
        if len(label) > widths[0]:  # on a separate line: no figure is left out
            lines.append(f"  {label}")
        lines.append(form.format("" if len(label) > widths[0] else label, *figures).rstrip())
    if one.scores_left_out:
        lines.append(f"  and {one.scores_left_out:,} more scores")
    return "\n".join(lines)


def _short(label: str) -> str:
    """The label of a row, short enough for figures beside it: typical first token."""
    short = label.removeprefix("time to ")
    return f"typical {short.removesuffix(_TYPICAL)}" if short.endswith(_TYPICAL) else short


def _heads(baseline: RunFacts, run: RunFacts) -> list[str]:
    """The two names for the head of the table; where their beginnings are the same, as of times, their ends."""
    names = [safe_text(facts.label) for facts in (baseline, run)]
    cut = [trim(name, _MAX_HEAD_CHARS) for name in names]
    return [f"…{name[1 - _MAX_HEAD_CHARS :]}" for name in names] if cut[0] == cut[1] and names[0] != names[1] else cut


def _text_flips(title: str, total: int, cases: list[CaseChange]) -> str:
    lines = [f"{title} on {total:,}" + (":" if total else ""), *(_flip(case) for case in cases)]
    return "\n".join([*lines, *_more(total - len(cases))])


def _flip(case: CaseChange) -> str:
    before, now = outcomes(case)
    name = trim(safe_text(case.id), _MAX_ID_TEXT)
    answers = f"{safe_text(case.baseline_answer)} → {safe_text(case.run_answer)}"
    how = "" if case.baseline_tried == case.run_tried == 1 else f"  {before} → {now}"
    return trim(f"  {name}{how}  {answers}", _WIDTH)


def _list(title: str, listed: CaseList) -> str:
    ids = [f"  {trim(safe_text(one), _WIDTH - 2)}" for one in listed.ids]
    return "\n".join([f"{title}: {listed.total:,}", *ids, *_more(listed.total - len(ids))])


def _more(count: int) -> list[str]:
    return [f"  and {count:,} more (--all lists them)"] if count > 0 else []


_MAX_ID_MD = 60
_SIGNS = {"better": "🟢", "worse": "🔴", "mixed": "🟠", "no difference": "⚪", "unknown": "⚪"}


def compare_markdown(comparison: Comparison) -> str:
    """For each run the verdict, the figures, and, folded, the cases that changed and what else is different."""
    return "\n\n".join("\n\n".join(_markdown_sections(one, comparison)) for one in comparison.against) + "\n"


def _markdown_sections(one: Against, comparison: Comparison) -> Iterator[str]:
    baseline = comparison.baseline
    yield f"### {_SIGNS[one.outcome]} {code(one.run.label, _MAX_ID_MD)} against {code(baseline.label, _MAX_ID_MD)}"
    yield code(one.verdict, 800)
    yield markdown_table(
        [f"{one.paired:,} paired cases", "baseline", "run", "change", "95 % CI", "shown"],
        (
            [
                f"{row.label} {code(row.name, _MAX_ID_MD)}".rstrip(),
                row.baseline,
                row.run,
                row.change,
                row.interval,
                row.outcome,
            ]
            for row in rows(one, code(comparison.currency, 20))
        ),
        numbers=True,
    )
    if one.scores_left_out:
        yield f"and {one.scores_left_out:,} more scores"
    if one.notes:
        yield "**What else is different**\n\n" + "\n".join(f"- {code(note, 300)}" for note in one.notes)
    if one.split is not None:
        yield from _markdown_flips("better", one.split.better, one.better)
        yield from _markdown_flips("worse", one.split.worse, one.worse)
    for title, listed in lists(one):
        ids = "\n".join(f"- {code(name, _MAX_ID_MD)}" for name in listed.ids)
        yield _folded(f"{title}: {listed.total:,}", ids, listed.total - len(listed.ids))


def _markdown_flips(title: str, total: int, cases: list[CaseChange]) -> Iterator[str]:
    if not total:
        return
    inside = markdown_table(
        ["case", "", "baseline", "run"],
        (
            [
                code(case.id, _MAX_ID_MD),
                " → ".join(outcomes(case)),
                code(case.baseline_answer),
                code(case.run_answer),
            ]
            for case in cases
        ),
    )
    yield _folded(f"{title} on {total:,}", inside, total - len(cases))


def _folded(title: str, inside: str, more: int) -> str:
    rest = f"\n\nand {more:,} more" if more > 0 else ""
    return f"<details><summary>{title}</summary>\n\n{inside}{rest}\n\n</details>"


_PILLS = {"better": "passed", "worse": "failed", "mixed": "failed", "no difference": "unscored", "unknown": "unscored"}
_WHISKER_WIDTH, _WHISKER_HEIGHT = 180, 14


def compare_page(comparison: Comparison) -> str:
    """The whole page."""
    return document("compare", comparison_title(comparison), comparison_markup(comparison))


def comparison_title(comparison: Comparison) -> str:
    """Which runs are compared with which."""
    return f"{', '.join(one.run.label for one in comparison.against)} against {comparison.baseline.label}"


def comparison_markup(comparison: Comparison) -> Markup:
    """The content of the page."""
    return render(
        "compare.html",
        baseline=comparison.baseline,
        against=comparison.against,
        pills=_PILLS,
        run_facts=_facts,
        figures=lambda one: _figures(one, comparison.currency),
        lists=lists,
        outcomes=outcomes,
    )


def _facts(run: RunFacts) -> list[str]:
    facts = [run.run, run.suite, run.model_id or "", f"{run.cases:,} cases"]
    facts += [f"{run.trials:,} trials"] if run.trials > 1 else []
    facts += [] if run.complete else ["not complete"]
    return [fact for fact in facts if fact]


def _figures(one: Against, currency: str) -> Iterator[tuple[Row, dict[str, Any] | None]]:
    """The rows of figures, each with its interval drawn around no change where it has one."""
    changes = {("errors", ""): one.error_rate, **{("score", name): change for name, change in one.scores.items()}}
    if one.pass_rate is not None:
        changes["passed", ""] = one.pass_rate
    widest = max(max(abs(end) for end in change.ci95) for change in changes.values())
    for row in rows(one, currency):
        kind = row.label.partition(",")[0]
        change = changes.get((kind, row.name))
        yield row, None if change is None else _whisker(change, widest or 1.0)


def _whisker(change: Change, widest: float) -> dict[str, Any]:
    """The interval as a line, on the scale of the widest; green or red where a difference is shown."""
    low, high = change.ci95
    tone = {"better": "good", "worse": "bad"}.get(change.outcome, "")
    left, right, point = (
        round(_WHISKER_WIDTH * (0.5 + 0.46 * end / widest), 1) for end in (low, high, change.difference)
    )
    return {
        "tone": tone,
        "width": _WHISKER_WIDTH,
        "height": _WHISKER_HEIGHT,
        "left": left,
        "right": right,
        "point": point,
    }
