"""A comparison as Markdown, fit for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from steelyard.report.compare_rows import lists, outcomes, rows
from steelyard.report.comparison import Against, CaseChange, Comparison
from steelyard.report.markdown import code, markdown_table

_LONGEST_ID = 60
_SIGNS = {"better": "🟢", "worse": "🔴", "no difference": "⚪", "unknown": "⚪"}


def compare_markdown(comparison: Comparison) -> str:
    """For each run the verdict, the figures, and, folded, the cases that changed and what else is different."""
    return "\n\n".join("\n\n".join(_sections(one, comparison)) for one in comparison.against) + "\n"


def _sections(one: Against, comparison: Comparison) -> Iterator[str]:
    baseline = comparison.baseline
    yield f"### {_SIGNS[one.outcome]} {code(one.run.label, _LONGEST_ID)} against {code(baseline.label, _LONGEST_ID)}"
    yield code(one.verdict, 400)
    yield markdown_table(
        [f"{one.paired:,} paired cases", "baseline", "run", "change", "95 % CI"],
        (
            [f"{row.label} {code(row.name, _LONGEST_ID)}".rstrip(), row.baseline, row.run, row.change, row.interval]
            for row in rows(one, code(comparison.currency, 20))
        ),
        numbers=True,
    )
    if one.scores_left_out:
        yield f"and {one.scores_left_out:,} more scores"
    if one.notes:
        yield "**What else is different**\n\n" + "\n".join(f"- {code(note, 300)}" for note in one.notes)
    if one.split is not None:
        yield from _flips("better", one.split.better, one.better)
        yield from _flips("worse", one.split.worse, one.worse)
    for title, listed in lists(one):
        ids = "\n".join(f"- {code(name, _LONGEST_ID)}" for name in listed.ids)
        yield _folded(f"{title}: {listed.total:,}", ids, listed.total - len(listed.ids))


def _flips(title: str, total: int, cases: list[CaseChange]) -> Iterator[str]:
    if not total:
        return
    inside = markdown_table(
        ["case", "", "baseline", "run"],
        (
            [code(case.id, _LONGEST_ID), " → ".join(outcomes(case)), code(case.baseline_answer), code(case.run_answer)]
            for case in cases
        ),
    )
    yield _folded(f"{title} on {total:,}", inside, total - len(cases))


def _folded(title: str, inside: str, more: int) -> str:
    rest = f"\n\nand {more:,} more" if more > 0 else ""
    return f"<details><summary>{title}</summary>\n\n{inside}{rest}\n\n</details>"
