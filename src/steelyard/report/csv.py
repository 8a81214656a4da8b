"""Records as CSV, one row each, that a spreadsheet can open without running anything in it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from steelyard.records import Record, Score
from steelyard.report.records import RunRecords, state_of
from steelyard.run.result import Result
from steelyard.stats.formatting import escape_invisible

_FIELDS = (
    "id",
    "trial",
    "index",
    "status",
    "attempts",
    "elapsed",
    "time_to_first_token",
    "time_to_last_token",
    "time_per_output_token",
    "num_tokens_input",
    "num_tokens_output",
    "num_tokens_input_cached",
    "num_tokens_output_reasoning",
    "cost",
    "cached",
    "request_time",
    "stop_reason",
    "error_type",
    "error",
    "input_prompt",
    "response_text",
)
_OF_A_SCORE = ("value", "passed", "reason")
"""The columns of a score; its value is the label, where it has no other."""

# What a spreadsheet may take for the beginning of a formula; the last four are the wide forms that Excel takes too.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def table_csv(runs: Sequence[Path]) -> Iterator[str]:
    """A header, then a row for each record of each run; a score has three columns, empty where it was not given."""
    names = list(dict.fromkeys(name for run in runs for name in Result.load(run).typed_metrics.scores))
    yield csv_line(["run", "outcome", *_FIELDS, *(f"{name}.{part}" for name in names for part in _OF_A_SCORE)])
    for run in runs:
        for _, record in RunRecords(run):
            yield csv_line(_row(run, record, names))


def cell(value: Any) -> str | int | float | None:
    """A value as a cell. Text that would be a formula gets an apostrophe before it; what is unseen becomes visible."""
    if value is None or isinstance(value, bool):
        return None if value is None else str(value).lower()
    if isinstance(value, int | float):
        return value
    text = value.isoformat() if isinstance(value, datetime) else str(value)
    starts = text.startswith(_FORMULA_STARTS) or text.lstrip().startswith(_FORMULA_STARTS)
    return escape_invisible(f"'{text}" if starts else text)


def _row(run: Path, record: Record, names: Sequence[str]) -> list[Any]:
    scores = {score.name: score for score in record.scores}
    row: list[Any] = [str(run), state_of(record), *(getattr(record, name) for name in _FIELDS)]
    for name in names:
        row += _parts(scores.get(name))
    return row


def _parts(score: Score | None) -> list[Any]:
    return [None] * len(_OF_A_SCORE) if score is None else [score.shown_value, score.passed, score.reason]


def csv_line(values: Sequence[Any]) -> str:
    """A row, with its line break."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow([cell(value) for value in values])
    return written.getvalue()
