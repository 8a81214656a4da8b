"""What a notebook shows of a result: the headline, a bar of outcomes, and the first cases that failed."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from steelyard.report.html import render
from steelyard.stats.costs import format_money
from steelyard.stats.formatting import format_seconds, trim
from steelyard.stats.metrics import correction_note

if TYPE_CHECKING:
    from steelyard.records import Record
    from steelyard.run.result import Result
    from steelyard.stats.metrics import Metrics

MAX_CASES = 5
_MAX_TEXT = 200


def result_html(result: Result) -> str:
    """A fragment of HTML without scripts or links; whatever the model wrote is escaped."""
    metrics = result.typed_metrics
    shown = [_row(record) for record in islice(result.iter_failures(), MAX_CASES)]
    return str(
        render(
            "notebook.html",
            title=" on ".join(name for name in (metrics.suite, metrics.model_id) if name),
            figures=_figures(metrics),
            outcomes=_outcomes(metrics),
            cases=shown,
            unpassed=metrics.scored - metrics.passed + metrics.counts.error,
            place=None if result.path is None else str(result.path),
        )
    )


def _figures(metrics: Metrics) -> list[tuple[str, str]]:
    """The few numbers of the headline: label and value."""
    counts = metrics.counts
    found = [("done", f"{metrics.n:,} of {counts.planned:,}{'' if metrics.complete else ', not complete'}")]
    if metrics.pass_rate is not None:
        interval = metrics.pass_rate_ci95
        ends = "" if interval is None else f" (95 % CI {interval[0]:.1%} – {interval[1]:.1%})"
        found.insert(0, ("passed", f"{metrics.pass_rate:.1%}{ends}"))
    if metrics.correction:
        rate = metrics.pass_rate_corrected
        shown = "" if rate is None else f"{rate:.1%}, "
        found.insert(1, ("corrected", shown + correction_note(metrics.correction)))
    if counts.error:
        found.append(("errors", f"{counts.error:,}"))
    if (p50 := metrics.stats.get("time_to_last_token-p50")) is not None:
        found.append(("median time", format_seconds(p50)))
    if metrics.cost is not None:
        found.append(("cost", format_money(metrics.cost, metrics.currency or "USD")))
    return found


def _outcomes(metrics: Metrics) -> list[tuple[str, int, float, str]]:
    """The parts of the bar: name, count, share in percent, color."""
    failed = metrics.scored - metrics.passed
    parts = {
        "passed": (metrics.passed, "#1a8f66"),
        "failed": (failed, "#cf3f37"),
        "error": (metrics.counts.error, "#c77700"),
        "unscored": (metrics.counts.ok - metrics.scored, "#8d95a3"),
    }
    planned = max(metrics.counts.planned, 1)
    return [(name, n, round(100 * n / planned, 2), color) for name, (n, color) in parts.items() if n > 0]


def _row(record: Record) -> dict[str, str]:
    trial = f" trial {record.trial + 1}" if record.trial else ""
    reasons = [score.reason for score in record.scores if score.passed is False and score.reason]
    return {
        "id": record.id + trial,
        "state": "error" if record.error is not None else "failed",
        "asked": trim(record.input_prompt or "", _MAX_TEXT),
        "answer": trim(record.error or record.response_text or "", _MAX_TEXT),
        "why": trim("; ".join(reasons), _MAX_TEXT),
    }
