"""A result in a notebook: its headline, a bar of outcomes and the first cases that failed; and its records as a table.

Tables are those of pandas, polars or Arrow: a row for each record, text stays text, and a column for each score.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib import import_module
from itertools import islice
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.records import Record
from steelyard.report.html import render
from steelyard.stats.formatting import format_seconds, trim
from steelyard.stats.metrics import correction_note, uncalibrated
from steelyard.stats.prices import format_money

if TYPE_CHECKING:
    from steelyard.report.compare.comparison import Comparison
    from steelyard.report.matrix.leaderboard import Leaderboard
    from steelyard.run.result import Result
    from steelyard.stats.metrics import Metrics

MAX_CASES = 5
_MAX_TEXT = 200
Kind = Literal["text", "number", "whole", "flag", "time", "object"]

_KINDS: dict[Any, Kind] = {str: "text", float: "number", int: "whole", bool: "flag", datetime: "time"}
_PANDAS = {"number": "float64", "whole": "Int64", "flag": "boolean", "text": "object", "object": "object"}
_POLARS = {"number": "Float64", "whole": "Int64", "flag": "Boolean", "text": "String", "object": "String"}
_ARROW = {"number": "float64", "whole": "int64", "flag": "bool_", "text": "string", "object": "string"}


def result_html(result: Result) -> str:
    """A fragment of HTML without scripts or links; whatever the model wrote is escaped."""
    metrics = result.typed_metrics
    shown = [_row(record) for record in islice(result.iter_failures(), MAX_CASES)]
    return str(
        render(
            "notebook.html",
            title=" on ".join(name for name in (metrics.suite, metrics.model_id) if name),
            figures=_figures(metrics),
            marks=uncalibrated(metrics),
            outcomes=_outcomes(metrics),
            cases=shown,
            asks=any(row["asked"] for row in shown),
            unpassed=metrics.scored - metrics.passed + metrics.counts.error,
            place=None if result.path is None else str(result.path),
        )
    )


def sweep_html(sweep: Mapping[str, Any], place: str | None) -> str:
    """A sweep: the advice, the plot of error rate against throughput, and a row for each level."""
    from steelyard.report.chart import chart_file
    from steelyard.report.sweep.page import error_rate_chart
    from steelyard.report.sweep.table import HEADINGS, level_cells, with_goodput

    named = " on ".join(str(name) for name in (sweep["suite"], sweep["model_id"]) if name)
    plot = chart_file("Error rate against throughput", named, [error_rate_chart(sweep)]) if sweep["levels"] else ""
    return str(
        render(
            "notebook_table.html",
            title=named + ("" if sweep["complete"] else ", not complete"),
            lines=[sweep["recommendation"]["says"]] if sweep["levels"] else [],
            plot=b64encode(plot.encode()).decode(),
            tables=[
                {
                    "title": "",
                    "head": with_goodput(sweep, HEADINGS),
                    "rows": [level_cells(sweep, level) for level in sweep["levels"]],
                }
            ],
            place=place,
        )
    )


def comparison_html(comparison: Comparison) -> str:
    """Runs against a baseline: the verdict and a row for each figure."""
    from steelyard.report.compare.comparison import outcome_of, rows, verdict_of

    head = ("", comparison.baseline.label, "run", "change", "95 % CI", "")
    tables = [
        {
            "title": f"{one.run.label}: {outcome_of(one)}. {verdict_of(one, raised=True)}",
            "head": head,
            "rows": [
                (f"{row.label} {row.name}".strip(), row.baseline, row.run, row.change, row.interval, row.outcome)
                for row in rows(one, comparison.currency)
            ],
        }
        for one in comparison.against
    ]
    title = f"Compared with {comparison.baseline.label}"
    return str(render("notebook_table.html", title=title, lines=[], plot="", tables=tables, place=None))


def leaderboard_html(board: Leaderboard) -> str:
    """Several runs of the same cases: the verdict, the Pareto front, and a row for each run."""
    from steelyard.report.chart import chart_file
    from steelyard.report.matrix.page import scatter_charts
    from steelyard.report.matrix.text import HEADINGS, against_words, cells, how_tested, shown_columns

    kept, charts = shown_columns(board), scatter_charts(board)
    title = "Pass rate against cost and latency"
    plot = chart_file(title, board.suite, charts, width=480, height=300) if charts else ""
    head = ("variant", *(HEADINGS[place] for place in kept), "against the best")
    rows = [(one.name, *(cells(one)[place] for place in kept), against_words(one)) for one in board.variants]
    marked = [f"* {one.name}: {sentence}" for one in board.variants for sentence in one.uncalibrated]
    return str(
        render(
            "notebook_table.html",
            title=board.suite,
            lines=[line for line in (board.verdict, how_tested(board), *marked) if line],
            plot=b64encode(plot.encode()).decode(),
            plot_text=f"{title}, a point for each variant",
            tables=[{"title": "", "head": head, "rows": rows}],
            place=board.place,
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


def _kind(hint: Any) -> Kind:
    """What a field holds, by its type: None beside it does not matter; Annotated and Literal are looked into."""
    if get_origin(hint) is Literal:
        return "text"
    parts = [part for part in get_args(hint) if part is not type(None)] if isinstance(hint, UnionType) else [hint]
    return _KINDS.get(parts[0], "object") if len(parts) == 1 else "object"


_FIRST = ("id", "trial", "status")
_HINTS = get_type_hints(Record)
_FIELDS: dict[str, Kind] = {
    name: _kind(_HINTS[name])
    for name in (*_FIRST, *(name for name in Record.__struct_fields__ if name not in (*_FIRST, "v", "scores")))
}


class Column(msgspec.Struct):
    """One column of a table: what it holds, and its values."""

    kind: Kind
    values: list[Any]

    def plain(self) -> list[Any]:
        """Objects as JSON text: a table library would guess a type from the first rows and fail on a later one."""
        if self.kind != "object":
            return self.values
        return [None if value is None else msgspec.json.encode(value).decode() for value in self.values]


def table_columns(records: Iterable[Record]) -> dict[str, Column]:
    """The columns by name: who and how it went first, then the scores by the scorers' names, then the rest."""
    rows = list(records)
    scores = [{score.name: score for score in record.scores} for record in rows]
    fields = {name: Column(kind, [getattr(record, name) for record in rows]) for name, kind in _FIELDS.items()}
    columns = {name: fields.pop(name) for name in _FIRST}
    columns["passed"] = Column("flag", [record.passed for record in rows])
    for name in dict.fromkeys(name for row in scores for name in row):
        found = [row.get(name) for row in scores]
        values = [None if one is None else one.value for one in found]
        labels = [None if one is None else one.label for one in found]
        if any(label is not None for label in labels):
            columns[f"score.{name}.label"] = Column("text", labels)
        if not any(labels) or any(value is not None for value in values):
            columns[f"score.{name}"] = Column("number", values)
        columns[f"score.{name}.passed"] = Column("flag", [None if one is None else one.passed for one in found])
        columns[f"score.{name}.reason"] = Column("text", [None if one is None else one.reason for one in found])
    return columns | fields


def to_pandas(records: Iterable[Record]) -> Any:
    """A pandas.DataFrame; lists and objects stay Python's own."""
    pandas = _library("pandas")
    return pandas.DataFrame(
        {
            name: pandas.to_datetime(pandas.Series(column.values, dtype="object"), utc=True)
            if column.kind == "time"
            else pandas.Series(column.values, dtype=_PANDAS[column.kind])
            for name, column in table_columns(records).items()
        }
    )


def to_arrow(records: Iterable[Record]) -> Any:
    """A pyarrow.Table; lists and objects are JSON text."""
    arrow = _library("pyarrow")
    times = arrow.timestamp("us", tz="UTC")
    return arrow.table(
        {
            name: arrow.array(
                column.plain(), type=times if column.kind == "time" else getattr(arrow, _ARROW[column.kind])()
            )
            for name, column in table_columns(records).items()
        }
    )


def to_polars(records: Iterable[Record]) -> Any:
    """A polars.DataFrame; lists and objects are JSON text."""
    polars = _library("polars")
    types = {kind: getattr(polars, name) for kind, name in _POLARS.items()} | {"time": polars.Datetime("us", "UTC")}
    columns = table_columns(records)
    return polars.DataFrame([polars.Series(name, one.plain(), types[one.kind]) for name, one in columns.items()])


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(f"{name} is not installed: pip install {name}") from error
