"""The HTML report: one file that needs no network, holds every case, and trusts nothing that it shows.

All data stand in elements that are not executed: the overview as escaped JSON, the cases compressed and in base64.
The policy in the file allows this one script and this one style sheet, by their digests, and nothing else at all.
"""

from __future__ import annotations

import math
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.records import Record
from steelyard.report.headline import notices
from steelyard.report.html import environment, head, script_json
from steelyard.report.page.data import CaseWork, PackedCases, TableColumns, body, text_limit
from steelyard.report.records import STATES, Expectations, RunRecords, open_suite, shows_expected, state_of
from steelyard.report.summary import summary
from steelyard.run.result import Result
from steelyard.stats.metrics import Metrics
from steelyard.suite.evalset import EvalSet

SHARED_SCRIPTS = (
    "dom.js",
    "theme.js",
    "tip.js",
    "charts.js",
    "overview.js",
    "cases.js",
    "table.js",
    "diff.js",
    "work.js",
    "drawer.js",
    "views.js",
)
"""The scripts that the report shares with the pages of `steelyard view`."""
SCRIPTS = (*SHARED_SCRIPTS, "page.js")
_MAX_FACT_CHARS = 2_000
_DRAFT = "steelyard-report-"


def page(run: Path, suite: EvalSet | None = None, *, by: Sequence[str] = ()) -> Iterator[str]:
    """The report of a run as pieces of HTML. What was expected comes from `suite`, else from where the run says."""
    result = Result.load(run, by=by)
    manifest = read_manifest(run)
    note = None
    if suite is None:
        suite, note = open_suite(run, manifest)
    records = RunRecords(run)
    metrics = result.typed_metrics
    names = list(metrics.scores)
    with tempfile.TemporaryFile(prefix=_DRAFT) as bodies, tempfile.TemporaryFile(prefix=_DRAFT) as columns:
        packed = _Packed(bodies, columns, TableColumns(names), text_limit(len(records)), CaseWork(run))
        expectations = Expectations(suite, manifest)
        for offset, record in records:
            packed.add(record, offset, expectations)
        packed.finish()
        overview = {
            "about": about(run, metrics, manifest, records.trials, _note(packed, manifest, expectations.problem, note)),
            "metrics": metrics,
            "counts": records.counts,
            "score_names": names,
            "notices": notices(metrics),
            "charts": packed.curves.to_page(),
            "chunks": packed.starts,
        }
        yield from _assembled(overview, packed)


def _note(packed: _Packed, manifest: Manifest | None, problem: str | None, absent: str | None) -> str | None:
    """Why the page does not show what was expected; None where it does."""
    if not shows_expected(manifest):
        return "left out of the records and of this page (keep_expected)"
    return problem or (None if packed.has_expected else absent)


class _Packed(PackedCases):
    """The cases of a run, and the curves that are drawn of them."""

    def __init__(self, bodies: IO[bytes], columns: IO[bytes], table: TableColumns, limit: int, work: CaseWork) -> None:
        super().__init__(bodies, columns)
        self.curves = Curves()
        self.has_expected = False
        """Whether records have what was expected, so that the suite need not be there."""
        self._table, self._limit, self._work = table, limit, work

    def add(self, record: Any, offset: int, expectations: Expectations) -> None:
        """Take in one record."""
        asked = expectations.of(record)
        self.has_expected = self.has_expected or (record.expected is not None and asked is not None)
        self.curves.add(record)
        self._table.add(record, asked)
        self.put_body(body(record, offset, asked, self._limit, self._work))
        if self._table.full:
            self.put_block(self._table.take())

    def finish(self) -> None:
        """Close what is still open."""
        self.put_block(self._table.take())
        super().finish()


def _assembled(overview: dict[str, Any], packed: _Packed) -> Iterator[str]:
    metrics, about = overview["metrics"], overview["about"]
    named = " on ".join(one for one in (about["suite"], about["model"]) if one)
    return (
        environment("steelyard.report")
        .get_template("page.html")
        .generate(
            title=f"{named}: Steelyard report",
            summary=Markup.escape(summary(metrics, about["run"])),
            overview=script_json(overview),
            pieces=map(Markup, packed.data()),
            **head(scripts=SCRIPTS),
        )
    )


def about(
    run: Path, metrics: Metrics, manifest: Manifest | None, trials: int, suite_note: str | None
) -> dict[str, Any]:
    """What the page says of the run itself."""
    return {
        "run": str(run),
        "suite": metrics.suite,
        "model": metrics.model_id,
        "trials": trials,
        "created": manifest.created if manifest is not None else "",
        "suite_note": suite_note,
        "groups": _groups(run, metrics, manifest, suite_note),
    }


def _groups(
    run: Path, metrics: Metrics, manifest: Manifest | None, suite_note: str | None
) -> list[tuple[str, list[tuple[str, str]]]]:
    """What the page tells of a run's settings: titles, and pairs of words under each."""
    about: dict[str, Any] = {"directory": str(run), "suite": metrics.suite, "expected answers": suite_note}
    groups: dict[str, dict[str, Any]] = {"Run": about, "Target": metrics.target}
    if manifest is not None:
        about |= {"suite file": manifest.suite_file, "load": manifest.load, "launches": len(manifest.launches)}
        about |= manifest.versions
        groups["Scorers"] = {_kind(scorer): scorer for scorer in manifest.scorers}
        groups["Options"] = manifest.options
    shown = {title: [*_pairs(values)] for title, values in groups.items()}
    return [(title, pairs) for title, pairs in shown.items() if pairs]


def _kind(scorer: dict[str, Any]) -> str:
    return str(scorer.get("name") or scorer.get("kind") or "scorer")


def _pairs(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if value not in (None, [], {}, ""):
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            yield name.lstrip("~"), text[:_MAX_FACT_CHARS]


Values = npt.NDArray[np.float64]

_BINS = 44
_SPREAD_FOR_LOG = 12.0
"""How many times the 1st percentile the 99th must be for a logarithmic scale to read better."""
_TIME_BINS = 60
_MAX_POINTS = 1_500
_ERROR = STATES.index("error")


class Curves:
    """Takes in records, keeps about 40 bytes of each, and draws up what the page's charts show."""

    def __init__(self) -> None:
        self._first, self._last, self._at = array("d"), array("d"), array("d")
        self._output = array("d")
        self._states = bytearray()
        self._measured = bytearray()
        self.cached_input = 0
        self.reasoning = 0

    def add(self, record: Record) -> None:
        """Take in one record. What came from the cache was not measured now and is only counted."""
        ok = record.status == "ok"
        self._states.append(STATES.index(state_of(record)))
        self._measured.append(ok and not record.cached)
        self._first.append(_number(record.time_to_first_token))
        self._last.append(_number(record.time_to_last_token if ok else record.elapsed))
        self._output.append(_number(record.num_tokens_output))
        self._at.append(_number(record.run_time))
        if ok and not record.cached:
            self.cached_input += record.num_tokens_input_cached or 0
            self.reasoning += record.num_tokens_output_reasoning or 0

    def to_page(self) -> dict[str, Any]:
        """All charts, JSON-able; None for one that has nothing to show."""
        measured = np.frombuffer(self._measured, dtype=np.uint8).astype(bool)
        states = np.frombuffer(self._states, dtype=np.uint8)
        first, last, at, output = (np.asarray(one) for one in (self._first, self._last, self._at, self._output))
        drawn = charts(first, last, output, at, states, measured)
        return {**drawn, "cached_input": self.cached_input, "reasoning": self.reasoning}


_LAST_WITH_HALVES = 2.0**52


def charts(
    first: Values,
    last: Values,
    output: Values,
    at: Values,
    states: npt.NDArray[np.uint8],
    measured: npt.NDArray[np.bool_],
) -> dict[str, Any]:
    """The charts of a run, from columns in case order; None for one that has nothing to show."""
    return {
        "first": histogram(first[measured]),
        "last": histogram(last[measured]),
        "output": histogram(output[measured]),
        "over_time": over_time(at, states),
        "points": points(at, last, states, measured | (states == _ERROR)),
    }


def histogram(values: Values) -> dict[str, Any] | None:
    """Counts between edges, evenly spaced in the value or, where it spans orders of magnitude, in its logarithm."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return None
    low, high = float(values.min()), float(values.max())
    near, far = (float(one) for one in np.percentile(values, [1, 99]))
    # Beyond that a float has no room for the halves between two whole numbers.
    whole = bool((values == np.round(values)).all()) and high < _LAST_WITH_HALVES
    log = not whole and near > 0 and far / near > _SPREAD_FOR_LOG
    edges = _edges(low, high, near if log else None, whole)
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), bins=edges)
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {
        "edges": [_short(edge) for edge in edges],
        "counts": counts.tolist(),
        "log": log,
        "whole": whole,
        "n": len(values),
        "p50": _short(p50),
        "p90": _short(p90),
        "p99": _short(p99),
    }


def _edges(low: float, high: float, log_from: float | None, whole: bool) -> Values:
    if whole:  # a bar for each number, or for as many as make few enough bars: none of them falls between two
        width = math.ceil((high - low + 1) / _BINS)
        return np.arange(low - 0.5, high + width, width)
    if low == high:
        low, high = low * 0.9, high * 1.1
    if log_from is not None:
        return np.geomspace(max(low, log_from / 10), high, _BINS + 1)
    return np.linspace(low, high, _BINS + 1)


def over_time(at: Values, states: npt.NDArray[np.uint8]) -> dict[str, Any] | None:
    """How many records finished in each stretch of the run, and how many of them were errors."""
    known = np.isfinite(at)
    end = float(at[known].max()) if known.any() else 0.0
    if known.sum() < 2 or end <= 0:
        return None
    bins = int(min(_TIME_BINS, max(8, math.sqrt(known.sum()) * 2)))
    edges = np.linspace(0, end, bins + 1)
    errors = states[known] == _ERROR
    finished, _ = np.histogram(at[known], bins=edges)
    failed, _ = np.histogram(at[known][errors], bins=edges)
    return {"width": end / bins, "finished": finished.tolist(), "errors": failed.tolist()}


def points(
    at: Values, last: Values, states: npt.NDArray[np.uint8], shown: npt.NDArray[np.bool_]
) -> dict[str, Any] | None:
    """When each record finished and how long it took, thinned evenly, with the position of each among the records."""
    places = np.flatnonzero(shown & np.isfinite(at) & np.isfinite(last))
    if len(places) < 2:
        return None
    if len(places) > _MAX_POINTS:
        places = places[np.linspace(0, len(places) - 1, _MAX_POINTS).astype(np.int64)]
    return {
        "at": [_short(one) for one in at[places]],
        "last": [_short(one) for one in last[places]],
        "state": states[places].tolist(),
        "record": places.tolist(),
        "of": int(shown.sum()),
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _short(value: float) -> float:
    return float(f"{value:.5g}")
