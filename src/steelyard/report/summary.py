"""The result of a run as a few lines of text for a terminal."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import UNSET

from steelyard.report.headline import stop_reason
from steelyard.stats.errors import error_rows
from steelyard.stats.formatting import (
    counted,
    format_bytes,
    format_number,
    format_seconds,
    format_time,
    safe_text,
    trim,
    without_commands,
)
from steelyard.stats.metrics import (
    DecidedMetrics,
    JuryMetrics,
    LatencyMetrics,
    Metrics,
    NodeMetrics,
    PercentileMetrics,
    RunMetric,
    ScoreMetrics,
    SendCounts,
    SliceMetrics,
    TrialMetrics,
    TrialScoreMetrics,
    correction_note,
    not_calibrated,
    percentile_of,
    uncalibrated_judges,
    without_judge,
)
from steelyard.stats.prices import format_money
from steelyard.stats.slices import SMALL

_TIMES = {
    "time_to_first_token": "time to first token",
    "time_to_last_token": "time to last token",
    "time_per_output_token": "time per output token",
}
_DETAILS = {
    "time_to_first_reasoning_token": "  first reasoning token",
    "time_to_first_content_token": "  first content token",
    "time_between_tokens_p50": "between tokens: median",
    "time_between_tokens_max": "  longest of an answer",
    "time_from_planned": "from the planned send",
    "time_waiting": "rate-limit wait",
    "time_in_backoff": "retry backoff",
    "time_in_failed_tries": "in failed tries",
}
"""Shown where they add something: `metrics.json` has them all."""
_TOKENS = {"num_tokens_input": "input tokens", "num_tokens_output": "output tokens"}
_COLUMNS = ("average", "p50", "p90", "p99", "min", "max")
_MAX_ERRORS = 5
_FEWEST_CASES = 10
"""Below this many cases a mean score is said to be of too few."""
_WIDTH = 80
_MAX_ID_CHARS = 40
_MAX_METRICS = 30
_MAX_SLICES = 20
_MAX_SLICE_CHARS = 20
_MAX_LABELS = 8
"""Labels of a score that a summary shows: `metrics.json` has them all."""


def summary(metrics: Metrics, place: str | None = None) -> str:
    """The headline, the verdicts, the latencies and the errors of a run."""
    judges = _judges(metrics)
    repeated = trial_lines(metrics.trials) if metrics.trials else []
    speed, cost, errors = _speed(metrics), cost_lines(metrics), _errors(metrics)
    nodes = node_lines(metrics.nodes or {})
    quality = [_quality(metrics), judges, repeated, _run_metrics(metrics), slice_lines(metrics)]
    parts = [_headline(metrics), _sending(metrics), *quality, speed, nodes, cost, errors]
    if place is not None:
        parts.append([f"results in {safe_text(place)}"])
    return without_commands("\n\n".join("\n".join(lines) for lines in parts if lines))


def _headline(metrics: Metrics) -> list[str]:
    counts = metrics.counts
    state = "complete" if metrics.complete else "not complete"
    named = " on ".join(safe_text(name) for name in (metrics.suite, metrics.model_id) if name)
    lines = [f"{named}: {metrics.n:,} of {counts.planned:,} done, {state}"]
    if reason := stop_reason(metrics):
        text = f"stopped: {safe_text(reason)}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    if metrics.decided:
        lines += _decided(metrics.decided, counts.planned)
    amounts = {"cancelled": counts.cancelled, "not started": counts.not_started}
    left = [f"{amount:,} {name}" for name, amount in amounts.items() if amount]
    if metrics.to_redo:
        left.append(f"{metrics.to_redo:,} to ask or score again")
    if left:
        lines.append(f"  left: {', '.join(left)}")
    if metrics.left_out:
        lines.append(f"  left out: {counted(metrics.left_out, 'record')} of cases that are not in this run any more")
    return lines


def _decided(found: DecidedMetrics, planned: int) -> list[str]:
    """What a run that stops when it is decided has decided, and what that saved."""
    lines = [f"  decided: {safe_text(one.rule)}: {one.outcome}" for one in found.rules]
    if found.not_asked:
        saved = f"{found.not_asked:,} of {planned:,} ({found.not_asked / planned:.0%} saved)"
        lines.append(f"  not asked: decided: {saved}; figures below are of those asked")
    return lines


def _sending(metrics: Metrics) -> list[str]:
    """What must be known of how the calls were sent before the figures are read."""
    lines = []
    client, load = metrics.client, metrics.load
    if client and client.bottleneck:
        lines += [f"  the client was the bottleneck: {client.reason}", "  the times below are its own, in part"]
        lines += [] if client.remedy is None else [f"  {client.remedy}"]
    if metrics.parallelism_shortfall:
        lines.append(f"  {metrics.parallelism_shortfall}")
    if metrics.parallelism_history:
        _, last, _ = metrics.parallelism_history[-1]
        lines.append(f"  parallelism auto: {last:,} at the end, {metrics.peak_in_flight:,} in flight at most")
    if load and load.sends and (load.sends.missed or load.sends.late):
        lines += _late_sends(metrics, load.sends)
    return lines


def _late_sends(metrics: Metrics, sends: SendCounts) -> list[str]:
    """How far the plan of an open loop was not kept, and whether more places would have kept it."""
    late = f"{sends.late:,} were late, by {format_seconds(sends.worst_lateness)} at worst"
    lines = [f"  of {sends.planned:,} planned sends {late}, and {sends.missed:,} not made"]
    if isinstance(metrics.parallelism, int) and (metrics.peak_in_flight or 0) >= metrics.parallelism:
        lines.append(f"  all {metrics.parallelism:,} places were taken at times; -j says how many there are")
    return lines


def _quality(metrics: Metrics) -> list[str]:
    rows = []
    counts = metrics.counts
    if metrics.scored:
        rows += _pass_rates(metrics)
    if metrics.n:
        rows.append(("errors", _percent(metrics.error_rate), f"{counts.error:,} of {metrics.n:,}", ""))
    if metrics.truncated:
        answers = f"{metrics.truncated:,} of {counts.ok:,}"
        rows.append(("cut off", _percent(metrics.truncated_rate), answers, "at the limit of tokens"))
    if metrics.cached:
        rows.append(("cached", "", f"{metrics.cached:,} of {metrics.n:,}", "not asked; left out of the times"))
    if metrics.retried:
        causes = ", ".join(safe_text(cause) for cause in list(metrics.retry_causes)[:_MAX_ERRORS])
        rows.append(("retried", "", f"{metrics.retried:,} of {counts.ok:,}", causes))
    if metrics.resent:
        note = "sent again: the server had closed a kept-alive connection"
        rows.append(("resent", "", f"{metrics.resent:,}", note))
    if metrics.reasoning_in_text:
        note = "a leading block of reasoning is not scored"
        rows.append(("thinks in text", "", f"{metrics.reasoning_in_text:,} of {metrics.n:,}", note))
    if metrics.unscored:
        rows.append(("unscored", "", f"{metrics.unscored:,}", ""))
    if metrics.scoring_errors:
        rows.append(("scoring errors", "", f"{metrics.scoring_errors:,}", "--retry-errors scores again"))
    for name, score in metrics.scores.items():
        rows += [
            (
                trim(f"score {safe_text(name)}{label and ' '}{safe_text(label)}", _MAX_ID_CHARS),
                value,
                part,
                safe_text(note),
            )
            for label, value, part, note in score_rows(score)
        ]
    width = max((len(row[0]) for row in rows), default=0)
    share = max((len(row[2]) for row in rows), default=0)
    lines = [f"  {label:<{width}}  {value:>6}  {part:>{share}}  {note}".rstrip() for label, value, part, note in rows]
    few = [
        safe_text(name)
        for name, score in metrics.scores.items()
        if score.n and _cases_of(metrics, name) < _FEWEST_CASES
    ]
    if few:
        lines.append(trim(f"  n too small to say much of {', '.join(few)}", _WIDTH))
    return lines + limit_lines(metrics)


def _pass_rates(metrics: Metrics) -> list[tuple[str, str, str, str]]:
    """The pass rate of what has a verdict and, where that is not everything, that of all, errors counted against it."""
    trials = metrics.trials
    by_case = bool(trials and trials.trials > 1)
    over = f", over {counted(metrics.groups, 'group')}" if metrics.groups else ""
    scored = counted(trials.cases, "case") if trials and by_case else f"{metrics.passed:,} of {metrics.scored:,}"
    rows = [("passed", _percent(metrics.pass_rate), scored, _interval(metrics.pass_rate_ci95) + over)]
    if metrics.scored < metrics.n:
        records = f"{metrics.passed:,} of {metrics.n:,}"
        rows.append(("of all", _percent(metrics.pass_rate_all), records, _interval(metrics.pass_rate_all_ci95)))
    if metrics.correction:
        note = ", ".join(
            filter(None, (_interval(metrics.pass_rate_corrected_ci95), correction_note(metrics.correction)))
        )
        rows.append(("corrected", _percent(metrics.pass_rate_corrected), "", note))
    return rows


def score_rows(score: ScoreMetrics) -> list[tuple[str, str, str, str]]:
    """A score in words, a row for each of its labels: the label, the figure, of how many, and the interval or range."""
    if score.labels and score.shares and score.shares_ci95:
        rows = [
            (label, _percent(score.shares[label]), f"{count:,} of {score.n:,}", _interval(score.shares_ci95[label]))
            for label, count in list(score.labels.items())[:_MAX_LABELS]
        ]
        if len(score.labels) > _MAX_LABELS:
            rows.append((f"and {len(score.labels) - _MAX_LABELS:,} more", "", "", ""))
        return rows
    if score.mean is None:
        return [("", "", f"n {score.n:,}", "")]
    if score.min is UNSET or score.max is UNSET:
        return [("", f"{score.mean:.3f}", f"n {score.n:,}", _interval(score.mean_ci95, percent=False))]
    unit = f" {score.unit}" if score.unit else ""
    sure = "" if score.mean_ci95 is None else f"95 % CI {' – '.join(map(format_number, score.mean_ci95))}{unit}"
    least, most = (format_number(end or 0.0) for end in (score.min, score.max))
    return [
        ("", format_number(score.mean), f"n {score.n:,}", ", ".join(filter(None, (sure, f"{least} to {most}{unit}"))))
    ]


def _cases_of(metrics: Metrics, score: str) -> int:
    """How many cases a mean score is of."""
    if metrics.trials and score in metrics.trials.scores and not metrics.scores[score].labels:
        return metrics.trials.scores[score].cases
    return metrics.scores[score].n


def limit_lines(metrics: Metrics) -> list[str]:
    """How many cases reached each limit, how many of those passed, and what was not kept for lack of disk."""
    lines = [
        f"  {limit.n:,} of {metrics.n:,} hit the {reason.replace('_', ' ')}, {limit.passed:,} of them passed"
        for reason, limit in (metrics.limits or {}).items()
    ]
    if metrics.not_kept:
        dropped = metrics.not_kept
        what = f"{counted(dropped.files, 'file')}, {format_bytes(dropped.bytes)}"
        lines.append(f"  not kept of {counted(dropped.cases, 'case')}: {what} (max_disk is used up)")
    return lines


def metric_rows(metrics: Metrics, most: int = _MAX_METRICS) -> list[tuple[str, str, str, str]]:
    """What functions over all records give: name, figure, of how many, and its interval or why there is none."""
    found = list((metrics.run_metrics or {}).items())
    rows = [(name, *_metric(metric)) for name, metric in found[:most]]
    if len(found) > most:
        rows.append((f"and {len(found) - most:,} more", "", "", ""))
    return rows


def _metric(metric: RunMetric) -> tuple[str, str, str]:
    of = "" if metric.n is None else f"n {metric.n:,}"
    if metric.value is None:
        return "–", of, f"failed: {metric.error}" if metric.error else ""
    shape = "{:.3f}" if abs(metric.value) <= 1 and not metric.unit else "{:,.4g}"
    ends = "" if metric.ci95 is None else "95 % CI " + " – ".join(map(shape.format, metric.ci95))
    return shape.format(metric.value), of, " ".join(filter(None, (ends, metric.unit)))


def _run_metrics(metrics: Metrics) -> list[str]:
    rows = [(trim(safe_text(name), _MAX_ID_CHARS), value, of, note) for name, value, of, note in metric_rows(metrics)]
    width, share = (max((len(row[column]) for row in rows), default=0) for column in (0, 2))
    lines = (f"  {name:<{width}}  {value:>7}  {of:>{share}}  {safe_text(note)}" for name, value, of, note in rows)
    return [trim(line.rstrip(), _WIDTH) for line in lines]


class SliceRow(msgspec.Struct, frozen=True):
    """A slice in words. `value` is from elsewhere: to be escaped."""

    value: str
    rate: str
    passed: str
    interval: str
    errors: str
    latency: str
    note: str


def slice_rows(metrics: Metrics, most: int = _MAX_SLICES) -> dict[str, list[SliceRow]]:
    """The slices by key; of more than `most` values those with the lowest pass rates."""
    found: dict[str, list[SliceMetrics]] = {}
    for one in metrics.slices or ():
        found.setdefault(one.key, []).append(one)
    return {key: [*_lowest(slices, most)] for key, slices in found.items()}


def slice_mark(metrics: Metrics) -> str:
    """What must be said of the rates of slices: that judges which are not calibrated decide them."""
    judges = uncalibrated_judges(metrics)
    return f"{not_calibrated(judges)}: these rates are with {'it' if len(judges) == 1 else 'them'}" if judges else ""


def _lowest(slices: list[SliceMetrics], most: int) -> Iterator[SliceRow]:
    ordered = sorted(slices, key=lambda one: (one.pass_rate is None, one.pass_rate or 0.0))
    shown = {id(one) for one in ordered[:most]}
    yield from (_slice_row(one) for one in slices if id(one) in shown)
    if len(slices) > most:
        yield SliceRow(f"and {len(slices) - most:,} more", "", "", "", "", "", "with higher pass rates")


def _slice_row(one: SliceMetrics) -> SliceRow:
    by_case = one.n > one.cases
    passed = counted(one.cases, "case") if by_case else f"{one.passed:,} of {one.scored:,}"
    ends = "" if one.pass_rate_ci95 is None else " – ".join(f"{end:.1%}" for end in one.pass_rate_ci95)
    last = one.latency.get("time_to_last_token")
    groups = f"{counted(one.groups, 'group')}" if one.groups else ""
    return SliceRow(
        one.value,
        _percent(one.pass_rate),
        passed if one.scored else f"n {one.n:,}",
        ends,
        f"{one.errors:,}" if one.errors else "",
        "" if last is None else format_time(last.p50.value, last.p50.at_least),
        ", ".join(filter(None, (groups, "small" if one.small else ""))),
    )


def slice_lines(metrics: Metrics) -> list[str]:
    """A table for each key, a line for each of its values, within 80 columns."""
    from tqdm.utils import disp_len  # imported here: most summaries have no slices

    def padded(text: str, width: int) -> str:
        return text + " " * (width - disp_len(text))

    lines: list[str] = []
    for key, rows in slice_rows(metrics).items():
        lines += [""] if lines else []
        names = [trim(safe_text(row.value), _MAX_SLICE_CHARS) for row in rows]
        width = max(disp_len(name) for name in [*names, trim(safe_text(key), _MAX_SLICE_CHARS)])
        counts = max(len(row.passed) for row in rows)
        head = trim(safe_text(key), _MAX_SLICE_CHARS)
        lines.append(f"  {padded(head, width)}  passed  {'':>{counts}}  95 % interval   errors     p50")
        for name, row in zip(names, rows, strict=True):
            figures = f"{row.rate:>6}  {row.passed:>{counts}}  {row.interval:<15} {row.errors:>6}  {row.latency:>6}"
            lines.append(f"  {padded(name, width)}  {figures}  {row.note}".rstrip())
    if lines and (note := slice_mark(metrics)):
        lines += textwrap.wrap(safe_text(note), _WIDTH, initial_indent="  ", subsequent_indent="    ")
    if any(one.small for one in metrics.slices or ()):
        lines.append(f"  small: fewer than {SMALL} cases or groups say little")
    return lines


def _judges(metrics: Metrics) -> list[str]:
    """Who judged, how often only because others had said no, and whether their word counts."""
    lines = []
    for name, score in metrics.scores.items():
        if not score.by:
            continue
        lines.append(trim(f"  {safe_text(name)} is {safe_text(', '.join(score.by))}", _WIDTH))
        if score.escalated:
            failed = counted(score.escalated, "answer")
            lines.append(f"    asked about {failed} that the scorers before it had failed")
            if not score.advisory:
                lines.append(f"    overruled them on {score.overruled or 0:,}: {_with_and_without(metrics, score)}")
        lines += [f"    {line}" for line in _trust(score)]
        if score.jury:
            lines.append(f"    {_jury(score.jury)}")
    return lines


def _with_and_without(metrics: Metrics, score: ScoreMetrics) -> str:
    without = score.pass_rate_without
    shown = "–" if without is UNSET else _percent(without)
    return f"pass rate {_percent(metrics.pass_rate)} with it, {shown} without it"


def _trust(score: ScoreMetrics) -> list[str]:
    """Whether the judge's word counts, and what labels have shown of it."""
    if score.advisory:
        lines = ["advisory: not calibrated, so it decides nothing"]
    else:
        lines = [] if score.calibrated else [f"not calibrated; {without_judge(score)}"]
    found = score.calibration
    if found:
        rates = {"rho": found.rho, "sensitivity": found.sensitivity, "specificity": found.specificity}
        shown = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items() if rate is not None)
        lines.append(f"on {counted(found.labels, 'label')}: {shown}")
    return lines


def _jury(jury: JuryMetrics) -> str:
    return f"its models agree on {_percent(jury.unanimous)} of answers, in {_percent(jury.agreement)} of pairs of votes"


def _speed(metrics: Metrics) -> list[str]:
    stats = metrics.stats
    rows = []
    for metric, label in {**_TIMES, **_reasoning_details(stats), **_TOKENS}.items():
        if stats[f"{metric}-average"] is not None:
            rows.append([label, *(_cell(metrics, metric, column) for column in _COLUMNS)])
    lines = []
    if rows:
        lines = [f"  {'':<22}" + "".join(f"{column:>9}" for column in _COLUMNS)]
        lines += [f"  {row[0]:<22}" + "".join(f"{cell:>9}" for cell in row[1:]) for row in rows]
        lines += _intervals(metrics)
    if metrics.tokens_estimated:
        answers = f"{metrics.tokens_estimated:,} of {counted(metrics.counts.ok, 'answer')}"
        lines.append(f"  ~ is an estimate: the server reported no tokens for {answers}")
    if metrics.scored_from:
        lines.append(f"  answers and times of {safe_text(metrics.scored_from)}; nothing was asked")
    elif stats["requests_per_minute"] is not None and metrics.n:
        about = "~" if metrics.tokens_estimated else ""
        tokens = f", {about}{stats['output_tps']:,.0f} output tokens/s" if stats["total_output_tokens"] else ""
        rate = f"{stats['requests_per_minute']:,.0f} requests/min{tokens}" if metrics.counts.ok else "no answers"
        lines.append(f"  {rate} over {format_seconds(metrics.active_seconds)}{_at_once(metrics)}")
    return lines


def _at_once(metrics: Metrics) -> str:
    """How many calls there were at a time; of an open loop that is only the most there may be."""
    if not isinstance(metrics.parallelism, int):
        return ""
    most = "at most " if metrics.load and metrics.load.arrivals else ""
    return f", {most}{metrics.parallelism:,} at a time"


def _cell(metrics: Metrics, metric: str, column: str) -> str:
    value = metrics.stats[f"{metric}-{column}"] or 0.0
    about = "~" if metrics.tokens_estimated else ""
    if metric in _TOKENS:
        return about + _format_tokens(value)
    if metric == "time_per_output_token" and about:
        return about + format_time(value)
    found = percentile_of(metrics, f"{metric}-{column}")
    return format_time(value, found is not None and found.at_least)


def _intervals(metrics: Metrics) -> list[str]:
    """How far the percentiles of the two main times may be from the truth, and how many calls timed out."""
    lines = []
    for metric in ("time_to_first_token", "time_to_last_token"):
        latency = metrics.latency.get(metric)
        if latency is not None:
            text = f"95 % CI, {_TIMES[metric].removeprefix('time to ')}: {percentile_intervals(latency)}"
            lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    timeouts = metrics.latency["time_to_last_token"].timeouts if "time_to_last_token" in metrics.latency else 0
    if timeouts:
        lines.append(f"  {counted(timeouts, 'call')} timed out: in the percentiles, as longer than that")
    return lines


def percentile_intervals(latency: LatencyMetrics, names: Sequence[str] = ("p50", "p90", "p99")) -> str:
    """`p50 412ms – 431ms; n too small for p99`: the intervals of some percentiles in words."""
    found = {name: getattr(latency, name) for name in names}
    known = ", ".join(f"{name} {interval_of(one)}" for name, one in found.items() if one.ci95 is not None)
    small = ", ".join(name for name, one in found.items() if one.ci95 is None)
    return "; ".join(part for part in (known, small and f"n too small for {small}") if part)


def interval_of(found: PercentileMetrics) -> str:
    """A percentile's interval in words; that n is too small where it has none."""
    if found.ci95 is None:
        return f"n too small ({found.needed:,} needed)"
    low, high = found.ci95
    return f"{format_seconds(low)} – {'?' if high is None else format_seconds(high)}"


def _reasoning_details(stats: Mapping[str, float | None]) -> dict[str, str]:
    """The details worth a line: content and reasoning where there are both, waiting where there was any."""
    shown = {metric: label for metric, label in _DETAILS.items() if stats.get(f"{metric}-average") is not None}
    if "time_to_first_reasoning_token" not in shown:
        shown.pop("time_to_first_content_token", None)
    return shown


def _format_tokens(count: float) -> str:
    """A number of tokens that fits its column, millions included."""
    return f"{count / 1e6:,.1f}M" if count >= 1e6 else format_number(count)


def _errors(metrics: Metrics) -> list[str]:
    errors = error_rows(metrics)
    lines = []
    for kind, count, example in errors[:_MAX_ERRORS]:
        lines.append(f"  {count:>7,} × {safe_text(kind)}")
        if example is not None:
            lines += _example_lines(safe_text(f"{trim(example.id, _MAX_ID_CHARS)}: {example.error}"))
    if len(errors) > _MAX_ERRORS:
        lines.append(f"  and {len(errors) - _MAX_ERRORS} more kinds")
    for name, score in metrics.scores.items():
        if score.error_example:
            lines.append(f"  {score.errors:>7,} × {safe_text(name)} could not score")
            lines += _example_lines(safe_text(score.error_example))
    return lines


def _example_lines(message: str) -> list[str]:
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


def cost_lines(metrics: Metrics) -> list[str]:
    """The cost of the run; that it is unknown, where a price was to be expected; nothing where nothing is sold."""
    if metrics.cost is None:
        because = metrics.cost_unknown_because
        return [f"  cost unknown: {safe_text(because)}"] if because else []
    if not metrics.cost:
        return []
    if metrics.scored_from:
        return [_scored(metrics), *_indented(cost_notes(metrics))]
    per = {"1,000 cases": metrics.cost_per_1000_cases, "passed case": metrics.cost_per_passed_case}
    shares = [f"{_money(metrics, amount)} per {label}" for label, amount in per.items() if amount is not None]
    return [
        f"  cost {_money(metrics, metrics.cost)}: {', '.join(shares)}",
        *_of_it(metrics),
        *_indented(cost_notes(metrics)),
    ]


def _scored(metrics: Metrics) -> str:
    """Answers that are only scored again were paid for by the run that they come from."""
    judges = f"; judges now {_money(metrics, metrics.cost_judges)}" if metrics.cost_judges else ""
    return f"  the answers cost {_money(metrics, metrics.cost_answers)} back then{judges}"


def _of_it(metrics: Metrics) -> list[str]:
    amounts = {"judges": metrics.cost_judges, "failed calls": metrics.cost_errors}
    parts = [f"{label} {_money(metrics, amount)}" for label, amount in amounts.items() if amount]
    return [f"    of it {', '.join(parts)}"] if parts else []


def _indented(notes: list[str]) -> list[str]:
    return [f"    {note}" for note in notes]


def cost_notes(metrics: Metrics) -> list[str]:
    """What a cost leaves out, and how much of it is estimated."""
    unknown = (
        (metrics.cost_unknown, "answer", "answers"),
        (metrics.cost_unknown_errors, "failed call", "failed calls"),
        (metrics.cost_unknown_judges, "call of judges", "calls of judges"),
    )
    missing = [counted(number, *names) for number, *names in unknown if number]
    found = [f"not in it, as their cost is unknown: {', '.join(missing)}"] if missing else []
    if metrics.cost_estimated:
        found.append(f"by an estimated number of tokens: {counted(metrics.cost_estimated, 'answer')}")
    return found


def _money(metrics: Metrics, amount: float | None) -> str:
    return format_money(amount or 0.0, safe_text(metrics.currency or ""))


_FEWEST = 20
"""Requests that a node must have served before it is called anything."""
_SLOWER = 1.5
_MORE_ERRORS = 0.02
_TWICE = 2.0


def node_lines(nodes: Mapping[str, NodeMetrics]) -> list[str]:
    """How many nodes there were, and a line for each that is slower or fails more often than the others."""
    if not nodes:
        return []
    lines = [f"  served by {counted(len(nodes), 'node')}"]
    for name, figures in nodes.items():
        others = [other for node, other in nodes.items() if node != name]
        if others and (trouble := _trouble(figures, others)):
            lines.append(f"  {safe_text(name)} stands out: {trouble}")
    return lines


def _trouble(node: NodeMetrics, others: list[NodeMetrics]) -> str:
    if node.requests < _FEWEST:
        return ""
    found = []
    rate = node.failed / node.requests
    elsewhere = sum(other.failed for other in others) / max(1, sum(other.requests for other in others))
    if rate > elsewhere * _TWICE and rate > elsewhere + _MORE_ERRORS:
        found.append(f"{rate:.1%} errors, {elsewhere:.1%} elsewhere")
    medians = [p50 for other in others if (p50 := other.p50) is not None]
    if medians and (own := node.p50) is not None and own > _SLOWER * statistics.median(medians):
        usual = format_seconds(statistics.median(medians))
        found.append(f"its median time to last token is {format_seconds(own)}, {usual} elsewhere")
    return "; ".join(found)


_MAX_NAME_CHARS = 30
_MAX_FLAKY = 5
_MAX_COLUMNS = 8
_LABEL = 10
_MISSING = "–"


def trial_lines(trials: TrialMetrics) -> list[str]:
    """The pass rate by case, pass@k and pass^k, the spread, the flaky cases, and whether agent or judge varies more.

    With a single trial only the judges' part is left to tell; nothing at all gives no lines.
    """
    several = trials.trials > 1
    found = []
    if several and trials.cases:
        found += [*_verdicts(trials), *_estimates(trials), *_flaky(trials)]
    for name, score in trials.scores.items():
        found += _score(name, score, several=several)
    return found


def _verdicts(metrics: TrialMetrics) -> list[str]:
    spread = "" if metrics.spread is None else f", spread {metrics.spread:.2f} between trials"
    return [f"  {metrics.trials:,} trials of {counted(metrics.cases, 'case')}{spread}"]


def _estimates(metrics: TrialMetrics) -> list[str]:
    most = metrics.verdicts_for_k
    ks = [str(k) for k in _columns(most)]
    rows = [f"  {'k':<{_LABEL}}" + "".join(f"{k:>8}" for k in ks).removeprefix(" ")]
    for label, rates in (("pass@k", metrics.pass_at_k), ("pass^k", metrics.pass_hat_k)):
        cells = "".join(f"{_percent(rates[k]):>8}" for k in ks).removeprefix(" ")
        rows.append(f"  {label:<{_LABEL}}{cells}")
    intervals = (("pass@", metrics.pass_at_k_ci95), ("pass^", metrics.pass_hat_k_ci95))
    shown = "; ".join(f"{label}{most} {_interval(found.get(str(most)))}" for label, found in intervals)
    rows.append(f"  {'':<{_LABEL}}{shown}")
    if metrics.cases_for_k < metrics.cases or most < metrics.trials:
        rows.append(f"  {'':<{_LABEL}}of the {metrics.cases_for_k:,} cases with {counted(most, 'verdict')} or more")
    return rows


def _columns(trials: int) -> list[int]:
    """The numbers of trials to show: all that fit, else doubling, with the last."""
    if trials <= _MAX_COLUMNS:
        return list(range(1, trials + 1))
    doubling = [2**power for power in range(_MAX_COLUMNS - 1) if 2**power < trials]
    return [*doubling, trials]


def _flaky(metrics: TrialMetrics) -> list[str]:
    flaky = metrics.flaky
    if not flaky:
        return ["  flaky     none: every case passed in all of its trials or in none"]
    shown = metrics.flaky_cases[:_MAX_FLAKY]
    found = [f"  flaky     {flaky:,} of {metrics.cases:,} cases passed in some trials, not in others:"]
    found += [trim(f"    {case.passed:,} of {case.tried:,}  {safe_text(case.id)}", _WIDTH) for case in shown]
    if flaky > len(shown):
        found.append(f"    and {flaky - len(shown):,} more")
    return found


def _score(name: str, score: TrialScoreMetrics, *, several: bool) -> list[str]:
    """A score's spread between trials and, where a judge was asked, whose it is."""
    variance = score.variance
    lines = textwrap.wrap(variance.says, _WIDTH - 4) if variance.judged and variance.says else []
    shown = f"  score {trim(safe_text(name), _MAX_NAME_CHARS)}"
    if several and score.spread is not None:
        return [f"{shown}: spread {score.spread:.2f} between trials", *(f"    {line}" for line in lines)]
    return [shown, *(f"    {line}" for line in lines)] if lines else []
