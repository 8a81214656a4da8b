"""Runs as JUnit XML, for a CI system's test page: a test suite a run, a test case a record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from steelyard.journal.manifest import read_manifest
from steelyard.records import Record
from steelyard.report.records import RunRecords, state_of, why_failed
from steelyard.run.result import Result
from steelyard.stats.formatting import cut, escape_invisible, one_line
from steelyard.stats.metrics import Metrics, correction_note
from steelyard.stats.scores import is_scoring_error

_MAX_MESSAGE_CHARS = 300
_MAX_TEXT_CHARS = 10_000
_BEFORE_TIME = "1970-01-01T00:00:00"
_HEADLINE = (
    "model_id",
    "complete",
    "n",
    "pass_rate",
    "pass_rate_all",
    "pass_rate_corrected",
    "error_rate",
    "p50_latency_s",
    "scored",
    "passed",
    "unscored",
    "cost",
    "currency",
)
_STATS = ("requests_per_minute", "output_tps", "time_to_first_token-p50", "time_to_first_token-p99")


def junit(runs: Sequence[Path]) -> Iterator[str]:
    """The document, piece by piece. Failed answers are failures, records without one errors, unscored ones skipped."""
    loaded = [(run, Result.load(run).typed_metrics) for run in runs]
    yield '<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>\n'
    for number, (run, metrics) in enumerate(loaded):
        yield from _suite(run, metrics, number)
    yield "</testsuites>\n"


def attribute(value: object) -> str:
    """A value between quotes: nothing in it can end the attribute, and nothing in it is forbidden in XML."""
    text = escape(escape_invisible(str(value)), {'"': "&quot;", "\n": "&#10;", "\t": "&#9;"})
    return f'"{text}"'


def content(text: str) -> str:
    """A text between tags: no markup is left in it, nor `]]>`, nor a control character."""
    return escape(escape_invisible(text))


def _suite(run: Path, metrics: Metrics, number: int) -> Iterator[str]:
    records, manifest = RunRecords(run), read_manifest(run)
    counts = records.counts
    name = metrics.suite or run.name or "run"
    about = {
        "name": name,
        "package": name,
        "id": number,
        "timestamp": _timestamp(manifest.created if manifest is not None else ""),
        "hostname": "localhost",
        "tests": len(records),
        "failures": counts["failed"],
        "errors": counts["error"],
        "skipped": counts["unscored"],
        "time": _decimal(metrics.active_seconds),
    }
    yield f"  <testsuite {_attributes(about)}>\n    <properties>\n"
    for key, value in _properties(run, metrics):
        yield f"      <property name={attribute(key)} value={attribute(value)}/>\n"
    yield "    </properties>\n"
    several = records.trials > 1
    for _, record in records:
        yield _case(record, name, several=several)
    yield "    <system-out/>\n    <system-err/>\n  </testsuite>\n"


def _case(record: Record, suite: str, *, several: bool) -> str:
    name = f"{record.id} [trial {record.trial + 1}]" if several else record.id
    opening = f"    <testcase {_attributes({'name': name, 'classname': suite, 'time': _decimal(record.elapsed)})}"
    inside = _OUTCOMES[state_of(record)](record)
    return f"{opening}>{inside}</testcase>\n" if inside else f"{opening}/>\n"


def _failure(record: Record) -> str:
    reason = why_failed(record)
    answer = cut(record.response_text or "", _MAX_TEXT_CHARS, f"{len(record.response_text or ''):,} characters in all")
    message = one_line(reason, _MAX_MESSAGE_CHARS)
    text = content(f"{reason}\n\nanswer: {answer}")
    return f'<failure type="failed" message={attribute(message)}>{text}</failure>'


def _error(record: Record) -> str:
    error = record.error or "no answer came"
    kind, message = record.error_type or "error", one_line(error, _MAX_MESSAGE_CHARS)
    text = cut(error, _MAX_TEXT_CHARS, f"{len(error):,} characters in all")
    return f"<error type={attribute(kind)} message={attribute(message)}>{content(text)}</error>"


def _skipped(record: Record) -> str:
    broken = [f"{score.name}: {error}" for score in record.scores if is_scoring_error(score) for error in score.errors]
    message = f"could not be scored: {'; '.join(broken)}" if broken else "unscored: no scorer that decides applies"
    return f"<skipped message={attribute(one_line(message, _MAX_MESSAGE_CHARS))}/>"


_OUTCOMES = {"passed": lambda record: "", "failed": _failure, "error": _error, "unscored": _skipped}  # noqa: ARG005


def _properties(run: Path, metrics: Metrics) -> Iterator[tuple[str, object]]:
    """The headline figures, those that there are."""
    yield "run", run
    for key in _HEADLINE:
        value = getattr(metrics, key)
        if value is not None:
            yield key, str(value).lower() if isinstance(value, bool) else value
    if metrics.pass_rate_ci95 is not None:
        yield "pass_rate_ci95", "{} {}".format(*metrics.pass_rate_ci95)
    if metrics.correction:
        yield "correction", correction_note(metrics.correction)
    for key in _STATS:
        if metrics.stats.get(key) is not None:
            yield key, metrics.stats[key]
    for name, score in metrics.scores.items():
        if score.mean is not None:
            yield f"score.{name}.mean", score.mean


def _attributes(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={attribute(value)}" for name, value in values.items())


def _decimal(seconds: float | None) -> str:
    return f"{seconds or 0.0:.3f}"  # Jenkins refuses a fourth decimal


def _timestamp(created: str) -> str:
    """When the run began, as the schema wants it: UTC, to the second, without saying so."""
    return created[:19] if re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", created) else _BEFORE_TIME
