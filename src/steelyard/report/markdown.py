"""A run as Markdown, fit for a comment on a pull request: short, and nothing in it that a model wrote is markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from steelyard._version import __version__
from steelyard.journal.manifest import read_manifest
from steelyard.records import Record
from steelyard.report.case import as_text, question
from steelyard.report.headline import notices
from steelyard.report.records import Expectations, RunRecords, SuiteCase, open_suite, state_of, why_failed
from steelyard.report.summary import cost_notes, interval_of, metric_rows, score_rows, slice_mark, slice_rows
from steelyard.run.result import Result
from steelyard.stats.errors import error_rows
from steelyard.stats.formatting import counted, format_number, format_time, one_line
from steelyard.stats.metrics import ErrorExample, Metrics, correction_note, percentile_of
from steelyard.stats.prices import format_money
from steelyard.suite.evalset import EvalSet

# All that Markdown or GitHub could make something of: emphasis, code, links, tables, mentions, references, formulas.
_SPECIAL = re.compile(r"[&<>|`*_~\[\]\\!#@:.$(){}^]")
_REFERRING = re.compile(f"(&#(?:{ord('@')}|{ord('#')});)")
_MAX_CHARS = 160
_MAX_SENTENCE_CHARS = 400
_MAX_FAILED = 20
_MAX_KINDS = 10
_TIMES = {"time_to_first_token": "first token", "time_to_last_token": "last token"}


def markdown(run: Path, suite: EvalSet | None = None, *, by: Sequence[str] = ()) -> Iterator[str]:
    """The headline, warnings, scores, slices, latencies, errors, and the first cases that failed, folded."""
    metrics = Result.load(run, by=by).typed_metrics
    named = " on ".join(code(name) for name in (metrics.suite, metrics.model_id) if name)
    yield f"## {named}: {_headline(metrics)}\n\n"
    for notice in notices(metrics):
        yield f"> [!{'WARNING' if notice['level'] == 'warning' else 'NOTE'}]\n"
        yield f"> **{notice['title']}.** {words(notice['text'])}\n\n"
    yield markdown_table(["", "", "95 % interval"], _figures(metrics)) + "\n\n"
    yield from _slices(metrics)
    yield from _latencies(metrics)
    yield from _errors(metrics)
    yield from _failed(run, suite)
    yield f"<sub>{code(str(run))}, Steelyard {__version__}</sub>\n"


def code(text: str, longest: int = _MAX_CHARS) -> str:
    """Text from elsewhere as code on one line: shown as it is, taken for nothing else."""
    shown = _escaped(one_line(text, longest))
    return f"<code>{shown}</code>" if shown else ""


def words(text: str) -> str:
    """A sentence with text from elsewhere in it: shown as it is; a mention or a reference falls apart."""
    return _REFERRING.sub(r"<code>\1</code>", _escaped(one_line(text, _MAX_SENTENCE_CHARS)))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A table, all but its first column flush right where they hold numbers; its cells must be Markdown already."""
    rule = "|---|" + ("---:|" if numbers else "---|") * (len(head) - 1)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", text)


def _headline(metrics: Metrics) -> str:
    counts = metrics.counts
    done = f"{metrics.n:,} of {counts.planned:,} done" if not metrics.complete else f"{metrics.n:,} records"
    passed = "" if metrics.pass_rate is None else f"{metrics.pass_rate:.1%} passed, "
    return f"{passed}{done}"


def _figures(metrics: Metrics) -> Iterator[list[str]]:
    if metrics.pass_rate is not None:
        trials = metrics.trials
        scored = f"{metrics.passed:,} of {metrics.scored:,}"
        if trials and trials.trials > 1:
            scored = f"mean of {counted(trials.cases, 'case')}"
        over = f", {counted(metrics.groups, 'group')}" if metrics.groups else ""
        yield ["passed", f"**{metrics.pass_rate:.1%}** ({scored}{over})", _interval(metrics.pass_rate_ci95, "{:.1%}")]
    if metrics.pass_rate_all is not None and metrics.scored and metrics.scored < metrics.n:
        share = f"{metrics.pass_rate_all:.1%} ({metrics.passed:,} of {metrics.n:,})"
        yield ["passed of all, errors included", share, _interval(metrics.pass_rate_all_ci95, "{:.1%}")]
    if metrics.correction:
        rate = "–" if metrics.pass_rate_corrected is None else f"{metrics.pass_rate_corrected:.1%}"
        interval = _interval(metrics.pass_rate_corrected_ci95, "{:.1%}")
        yield ["passed, corrected by labels", f"{rate} ({_escaped(correction_note(metrics.correction))})", interval]
    if metrics.error_rate is not None:
        yield ["errors", f"{metrics.error_rate:.1%} ({metrics.counts.error:,} of {metrics.n:,})", ""]
    if metrics.unscored:
        yield ["unscored", f"{metrics.unscored:,}", ""]
    for name, score in metrics.scores.items():
        advisory = ", advisory" if score.advisory else ""
        for label, value, part, note in score_rows(score):
            named = f"score {code(name, 60)}{label and ' '}{code(label, 60)}{advisory}"
            yield [named, f"{value or '–'} ({part})", (_escaped(note) if score.unit else note).removeprefix("95 % CI ")]
    for name, value, of, note in metric_rows(metrics):
        yield [code(name, 60), f"{value} ({of})" if of else value, _escaped(note).replace("&#46;", ".")]
    trials = metrics.trials
    if trials and trials.trials > 1 and trials.cases:
        yield ["flaky cases", f"{trials.flaky:,} of {trials.cases:,} in {trials.trials:,} trials", ""]
    if metrics.cost:
        yield ["cost", format_money(metrics.cost, code(metrics.currency or "", 20)), "; ".join(cost_notes(metrics))]
    stats = metrics.stats
    if not metrics.scored_from and stats["requests_per_minute"]:
        yield ["throughput", f"{format_number(stats['requests_per_minute'])} a minute", ""]


def _slices(metrics: Metrics) -> Iterator[str]:
    for key, rows in slice_rows(metrics).items():
        found = [
            [code(row.value, 60), row.rate, row.passed, row.interval, row.errors, row.latency, row.note] for row in rows
        ]
        yield (
            markdown_table([code(key, 60), "passed", "", "95 % interval", "errors", "last token p50", ""], found)
            + "\n\n"
        )
    if metrics.slices and (note := slice_mark(metrics)):
        yield f"{words(note)}\n\n"


def _latencies(metrics: Metrics) -> Iterator[str]:
    stats, columns = metrics.stats, ("p50", "p90", "p99", "max")
    rows = [
        [label, *(_time(metrics, f"{name}-{column}") for column in columns)]
        for name, label in _TIMES.items()
        if stats[f"{name}-average"] is not None
    ]
    if rows:
        yield markdown_table(["time to", *columns], rows) + "\n\n"


def _time(metrics: Metrics, name: str) -> str:
    """A time, with the interval of a percentile where there is one."""
    found = percentile_of(metrics, name)
    text = format_time(metrics.stats[name] or 0.0, found is not None and found.at_least)
    return text if found is None or found.ci95 is None else f"{text} ({interval_of(found)})"


def _errors(metrics: Metrics) -> Iterator[str]:
    rows = []
    for row in error_rows(metrics)[:_MAX_KINDS]:
        example = row.example or ErrorExample(id="", error="")
        rows.append([code(row.kind, 60), f"{row.number:,}", code(example.id, 60), code(example.error)])
    if rows:
        yield markdown_table(["error", "", "for example", ""], rows) + "\n\n"


def _failed(run: Path, suite: EvalSet | None) -> Iterator[str]:
    records = RunRecords(run)
    total = records.counts["failed"]
    if not total:
        return
    manifest = read_manifest(run)
    expectations = Expectations(open_suite(run, manifest)[0] if suite is None else suite, manifest)
    rows: list[list[str]] = []
    for _, record in records:
        if state_of(record) == "failed":
            rows.append(_failed_row(record, expectations.of(record)))
            if len(rows) == _MAX_FAILED:
                break
    shown = f"{total:,} failed" if total <= _MAX_FAILED else f"the first {_MAX_FAILED} of {total:,} that failed"
    yield f"<details><summary>{shown}</summary>\n\n"
    yield markdown_table(["case", "asked", "answered", "expected", "why"], rows) + "\n\n"
    yield "</details>\n\n"


def _failed_row(record: Record, asked: SuiteCase | None) -> list[str]:
    case = asked.case if asked is not None else None
    named = code(record.id, 60) + (f" trial {record.trial + 1}" if record.trial else "")
    expected = "" if case is None or case.expected is None else as_text(case.expected)
    texts = (question(record, case), record.response_text or "", expected, why_failed(record))
    return [named, *(code(text) for text in texts)]


def _interval(interval: Sequence[float] | None, form: str) -> str:
    return "" if interval is None else f"{form.format(interval[0])} – {form.format(interval[1])}"
