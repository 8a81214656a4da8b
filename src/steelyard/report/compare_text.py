"""A comparison as text for a terminal."""

from __future__ import annotations

import textwrap

from steelyard.report.compare_rows import Row, lists, outcomes, rows
from steelyard.report.comparison import Against, CaseChange, Comparison, Listed, RunFacts
from steelyard.stats.wording import safe_text, trim

_WIDTH = 100
_LONGEST_ID = 40
_LONGEST_LABEL = 34
_COLUMN = 12
_WIDTHS = (0, _COLUMN, _COLUMN, _COLUMN, 15)
"""Of the columns of figures at the least, so that the tables of several runs look alike."""


def compare_text(comparison: Comparison) -> str:
    """For each run the verdict, the figures, the cases that changed, and what else is different."""
    parts = [_named("baseline", comparison.baseline)]
    for one in comparison.against:
        parts += [_named("against", one.run), *_sections(one, comparison)]
    return "\n\n".join(parts)


def _sections(one: Against, comparison: Comparison) -> list[str]:
    found = ["\n".join(textwrap.wrap(safe_text(one.verdict), _WIDTH)), _table(one, comparison)]
    if one.split is not None:
        found += [_flips("better", one.split.better, one.better), _flips("worse", one.split.worse, one.worse)]
    found += [_list(title, listed) for title, listed in lists(one)]
    if one.notes:
        found.append("\n".join(["what else is different:", *(f"  {safe_text(note)}" for note in one.notes)]))
    return found


def _named(role: str, run: RunFacts) -> str:
    named = " on ".join(safe_text(name) for name in (run.suite, run.model_id) if name)
    trials = f", {run.trials:,} trials" if run.trials > 1 else ""
    state = "" if run.complete else ", not complete"
    return f"{role:<9} {safe_text(run.run)}: {named}, {run.cases:,} cases{trials}{state}"


def _table(one: Against, comparison: Comparison) -> str:
    before, now = _heads(comparison.baseline, one.run)
    head = Row(f"{one.paired:,} paired cases", baseline=before, run=now, change="change", interval="95 % CI")
    shown = [head, *rows(one, safe_text(comparison.currency))]
    labels = [trim(f"{row.label} {safe_text(row.name)}".rstrip(), _LONGEST_LABEL) for row in shown]
    cells = [[label, row.baseline, row.run, row.change, row.interval] for label, row in zip(labels, shown, strict=True)]
    widths = [max(fewest, *map(len, column)) for fewest, column in zip(_WIDTHS, zip(*cells, strict=True), strict=True)]
    form = f"  {{:<{widths[0]}}}" + "".join(f"  {{:>{width}}}" for width in widths[1:])
    lines = [form.format(*row).rstrip() for row in cells]
    if one.scores_left_out:
        lines.append(f"  and {one.scores_left_out:,} more scores")
    return "\n".join(lines)


def _heads(baseline: RunFacts, run: RunFacts) -> list[str]:
    """The two names for the head of the table; where their beginnings are the same, as of times, their ends."""
    names = [safe_text(facts.label) for facts in (baseline, run)]
    cut = [trim(name, _COLUMN) for name in names]
    return [f"…{name[1 - _COLUMN :]}" for name in names] if cut[0] == cut[1] and names[0] != names[1] else cut


def _flips(title: str, total: int, cases: list[CaseChange]) -> str:
    lines = [f"{title} on {total:,}" + (":" if total else ""), *(_flip(case) for case in cases)]
    return "\n".join([*lines, *_more(total - len(cases))])


def _flip(case: CaseChange) -> str:
    before, now = outcomes(case)
    name = trim(safe_text(case.id), _LONGEST_ID)
    said = f"{safe_text(case.baseline_answer)} → {safe_text(case.run_answer)}"
    how = "" if case.baseline_tried == case.run_tried == 1 else f"  {before} → {now}"
    return trim(f"  {name}{how}  {said}", _WIDTH)


def _list(title: str, listed: Listed) -> str:
    ids = [f"  {trim(safe_text(one), _WIDTH - 2)}" for one in listed.ids]
    return "\n".join([f"{title}: {listed.total:,}", *ids, *_more(listed.total - len(ids))])


def _more(count: int) -> list[str]:
    return [f"  and {count:,} more (--all lists them)"] if count > 0 else []
