"""The result of a run as a few lines of text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from steelyard.report.cost import lines as cost_lines
from steelyard.report.error_rows import error_rows
from steelyard.report.nodes import lines as node_lines
from steelyard.report.trials import lines as trial_lines
from steelyard.stats.wording import counted, format_number, format_seconds, safe_text, trim

_TIMES = {
    "time_to_first_token": "time to first token",
    "time_to_last_token": "time to last token",
    "time_per_output_token": "time per output token",
}
_DETAILS = {
    "time_to_first_reasoning_token": "  first reasoning token",
    "time_to_first_content_token": "  first content token",
    "time_from_planned": "from the planned send",
    "time_waiting": "waiting for leave",
    "time_in_backoff": "in backoff",
}
"""Shown where they add something: `metrics.json` has them all."""
_TOKENS = {"num_tokens_input": "input tokens", "num_tokens_output": "output tokens"}
_COLUMNS = ("average", "p50", "p90", "p99", "min", "max")
_MOST_ERRORS = 5
_WIDTH = 80
_LONGEST_ID = 40


def summary(metrics: Mapping[str, Any], place: str | None = None) -> str:
    """The headline, the verdicts, the latencies and the errors of a run."""
    judges = _judges(metrics)
    repeated = trial_lines(metrics["trials"]) if "trials" in metrics else []
    speed, cost, errors = _speed(metrics), cost_lines(metrics), _errors(metrics)
    nodes = node_lines(metrics.get("nodes", {}))
    parts = [_headline(metrics), _sending(metrics), _quality(metrics), judges, repeated, speed, nodes, cost, errors]
    if place is not None:
        parts.append([f"results in {safe_text(place)}"])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _headline(metrics: Mapping[str, Any]) -> list[str]:
    counts = metrics["counts"]
    state = "complete" if metrics["complete"] else "not complete"
    named = " on ".join(safe_text(name) for name in (metrics["suite"], metrics["model_id"]) if name)
    lines = [f"{named}: {metrics['n']:,} of {counts['planned']:,} done, {state}"]
    if metrics["stopped"] and not metrics["complete"]:
        lines.append(f"  stopped: {safe_text(metrics['stopped'])}")
    left = [f"{counts[key]:,} {key.replace('_', ' ')}" for key in ("cancelled", "not_started") if counts[key]]
    if metrics["to_redo"]:
        left.append(f"{metrics['to_redo']:,} to ask or score again")
    if left:
        lines.append(f"  left: {', '.join(left)}")
    if metrics["left_out"]:
        lines.append(f"  left out: {counted(metrics['left_out'], 'record')} of cases that are not in this run any more")
    return lines


def _sending(metrics: Mapping[str, Any]) -> list[str]:
    """What must be known of how the calls were sent before the figures are read."""
    lines = []
    client, load = metrics.get("client") or {}, metrics.get("load") or {}
    if client.get("bottleneck"):
        lines += [f"  the client was the bottleneck: {client['reason']}", "  the times below are its own, in part"]
    history = metrics.get("parallelism_history")
    if history:
        peak = metrics["peak_in_flight"]
        lines.append(f"  parallelism auto: {history[-1][1]:,} at the end, {peak:,} in flight at most")
    if (sends := load.get("sends")) and (sends["missed"] or sends["late"]):
        lines += _late_sends(metrics, sends)
    return lines


def _late_sends(metrics: Mapping[str, Any], sends: Mapping[str, Any]) -> list[str]:
    """How far the plan of an open loop was not kept, and whether more places would have kept it."""
    late = f"{sends['late']:,} were late, by {format_seconds(sends['worst_lateness'])} at worst"
    lines = [f"  of {sends['planned']:,} planned sends {late}, and {sends['missed']:,} not made"]
    if metrics["peak_in_flight"] >= metrics["parallelism"]:
        lines.append(f"  all {metrics['parallelism']:,} places were taken at times; -j says how many there are")
    return lines


def _quality(metrics: Mapping[str, Any]) -> list[str]:
    rows = []
    if metrics["scored"]:
        passed = f"{metrics['passed']:,} of {metrics['scored']:,}"
        rows.append(("passed", _percent(metrics["pass_rate"]), passed, _interval(metrics["pass_rate_ci95"])))
    counts = metrics["counts"]
    if metrics["n"]:
        rows.append(("errors", _percent(metrics["error_rate"]), f"{counts['error']:,} of {metrics['n']:,}", ""))
    if metrics.get("cached"):
        rows.append(("cached", "", f"{metrics['cached']:,} of {metrics['n']:,}", "not asked; left out of the times"))
    if metrics["unscored"]:
        rows.append(("unscored", "", f"{metrics['unscored']:,}", ""))
    if metrics["scoring_errors"]:
        rows.append(("scoring errors", "", f"{metrics['scoring_errors']:,}", "--retry-errors scores again"))
    for name, score in metrics["scores"].items():
        mean = "" if score["mean"] is None else f"{score['mean']:.3f}"
        rows.append(
            (f"score {safe_text(name)}", mean, f"n {score['n']:,}", _interval(score["mean_ci95"], percent=False))
        )
    width = max((len(row[0]) for row in rows), default=0)
    share = max((len(row[2]) for row in rows), default=0)
    return [f"  {label:<{width}}  {value:>6}  {part:>{share}}  {note}".rstrip() for label, value, part, note in rows]


def _judges(metrics: Mapping[str, Any]) -> list[str]:
    """Who judged, how often only because others had said no, and whether their word counts."""
    lines = []
    for name, score in metrics["scores"].items():
        if not score.get("by"):
            continue
        lines.append(trim(f"  {safe_text(name)} is {safe_text(', '.join(score['by']))}", _WIDTH))
        if score["escalated"]:
            failed = counted(score["escalated"], "answer")
            lines.append(f"    asked about {failed} that the scorers before it had failed")
        if score["advisory"]:
            lines.append("    advisory: not calibrated, so it decides nothing")
    return lines


def _speed(metrics: Mapping[str, Any]) -> list[str]:
    stats = metrics["stats"]
    rows = []
    for metric, label in {**_TIMES, **_told_apart(stats), **_TOKENS}.items():
        if stats[f"{metric}-average"] is not None:
            show = _format_tokens if metric in _TOKENS else format_seconds
            rows.append([label, *(show(stats[f"{metric}-{column}"]) for column in _COLUMNS)])
    lines = []
    if rows:
        lines = [f"  {'':<22}" + "".join(f"{column:>9}" for column in _COLUMNS)]
        lines += [f"  {row[0]:<22}" + "".join(f"{cell:>9}" for cell in row[1:]) for row in rows]
    if "scored_from" in metrics:
        lines.append(f"  answers and times of {safe_text(metrics['scored_from'])}; nothing was asked")
    elif stats["requests_per_minute"] is not None and metrics["n"]:
        tokens = f", {stats['output_tps']:,.0f} output tokens/s" if stats["total_output_tokens"] else ""
        active = format_seconds(metrics["active_seconds"])
        lines.append(f"  {stats['requests_per_minute']:,.0f} requests/min{tokens} over {active}")
    return lines


def _told_apart(stats: Mapping[str, Any]) -> dict[str, str]:
    """The details worth a line: content and reasoning where there are both, waiting where there was any."""
    told = {metric: label for metric, label in _DETAILS.items() if stats.get(f"{metric}-average") is not None}
    if "time_to_first_reasoning_token" not in told:
        told.pop("time_to_first_content_token", None)
    return told


def _format_tokens(count: float) -> str:
    """A number of tokens that fits its column, millions included."""
    return f"{count / 1e6:,.1f}M" if count >= 1e6 else format_number(count)


def _errors(metrics: Mapping[str, Any]) -> list[str]:
    errors = error_rows(metrics)
    lines = []
    for kind, count, example in errors[:_MOST_ERRORS]:
        lines.append(f"  {count:>7,} × {safe_text(kind)}")
        if example is not None:
            lines += _told(safe_text(f"{trim(example['id'], _LONGEST_ID)}: {example['error']}"))
    if len(errors) > _MOST_ERRORS:
        lines.append(f"  and {len(errors) - _MOST_ERRORS} more kinds")
    for name, score in metrics["scores"].items():
        if "error_example" in score:
            lines.append(f"  {score['errors']:>7,} × {safe_text(name)} could not score")
            lines += _told(safe_text(score["error_example"]))
    return lines


def _told(message: str) -> list[str]:
    """An error's message to its end, which is where the cause stands, within the width of a terminal."""
    return textwrap.wrap(message, _WIDTH, initial_indent=" " * 12, subsequent_indent=" " * 14)


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.1%}"


def _interval(interval: list[float] | tuple[float, float] | None, *, percent: bool = True) -> str:
    if interval is None:
        return ""
    low, high = interval
    shown = f"{low:.1%} – {high:.1%}" if percent else f"{low:.3f} – {high:.3f}"
    return f"95 % CI {shown}"
