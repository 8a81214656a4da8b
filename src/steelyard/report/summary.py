"""The result of a run as a few lines of text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.report.trials import lines as trial_lines
from steelyard.stats.wording import format_number, format_seconds, safe_text, trim

_TIMES = {
    "time_to_first_token": "time to first token",
    "time_to_last_token": "time to last token",
    "time_per_output_token": "time per output token",
}
_TOKENS = {"num_tokens_input": "input tokens", "num_tokens_output": "output tokens"}
_COLUMNS = ("average", "p50", "p90", "p99", "min", "max")
_MOST_ERRORS = 5
_WIDTH = 80


def summary(metrics: Mapping[str, Any], place: str | None = None) -> str:
    """The headline, the verdicts, the latencies and the errors of a run."""
    judges = _judges(metrics)
    repeated = trial_lines(metrics["trials"]) if "trials" in metrics else []
    parts = [_headline(metrics), _quality(metrics), judges, repeated, _speed(metrics), _errors(metrics)]
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
        lines.append(f"  left out: {metrics['left_out']:,} record(s) of cases that are not in this run any more")
    return lines


def _quality(metrics: Mapping[str, Any]) -> list[str]:
    rows = []
    if metrics["scored"]:
        passed = f"{metrics['passed']:,} of {metrics['scored']:,}"
        rows.append(("passed", _percent(metrics["pass_rate"]), passed, _interval(metrics["pass_rate_ci95"])))
    counts = metrics["counts"]
    if metrics["n"]:
        rows.append(("errors", _percent(metrics["error_rate"]), f"{counts['error']:,} of {metrics['n']:,}", ""))
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
            lines.append(f"    asked about {score['escalated']:,} answer(s) that the scorers before it had failed")
        if score["advisory"]:
            lines.append("    advisory: not calibrated, so it decides nothing")
    return lines


def _speed(metrics: Mapping[str, Any]) -> list[str]:
    stats = metrics["stats"]
    rows = []
    for metric, label in {**_TIMES, **_TOKENS}.items():
        if stats[f"{metric}-average"] is not None:
            show = format_seconds if metric in _TIMES else _format_tokens
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


def _format_tokens(count: float) -> str:
    """A number of tokens that fits its column, millions included."""
    return f"{count / 1e6:,.1f}M" if count >= 1e6 else format_number(count)


def _errors(metrics: Mapping[str, Any]) -> list[str]:
    errors = list(metrics["errors"].items())
    lines = []
    for kind, count in errors[:_MOST_ERRORS]:
        lines.append(f"  {count:>7,} × {safe_text(kind)}")
        if (example := metrics["error_examples"].get(kind)) is not None:
            lines.append(trim(safe_text(f"            {example['id']}: {example['error']}"), _WIDTH))
    if len(errors) > _MOST_ERRORS:
        lines.append(f"  and {len(errors) - _MOST_ERRORS} more kinds")
    return lines


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.1%}"


def _interval(interval: list[float] | tuple[float, float] | None, *, percent: bool = True) -> str:
    if interval is None:
        return ""
    low, high = interval
    shown = f"{low:.1%} – {high:.1%}" if percent else f"{low:.3f} – {high:.3f}"
    return f"95 % CI {shown}"
