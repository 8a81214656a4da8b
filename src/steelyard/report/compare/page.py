"""A comparison as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from steelyard.report.compare.comparison import Against, Change, Comparison, Row, RunFacts, lists, outcomes, rows
from steelyard.report.html import document, render

_PILLS = {"better": "passed", "worse": "failed", "mixed": "failed", "no difference": "unscored", "unknown": "unscored"}
_WIDTH, _HEIGHT = 180, 14


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
    left, right, point = (round(_WIDTH * (0.5 + 0.46 * end / widest), 1) for end in (low, high, change.difference))
    return {"tone": tone, "width": _WIDTH, "height": _HEIGHT, "left": left, "right": right, "point": point}
