"""The HTML report: one file that needs no network, holds every case, and trusts nothing that it shows.

All data stand in elements that are not executed: the overview as escaped JSON, the cases compressed and in base64.
The policy in the file allows this one script and this one style sheet, by their digests, and nothing else at all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
from markupsafe import Markup

from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.report.headline import notices
from steelyard.report.html import environment, head, script_json
from steelyard.report.page.charts import Curves
from steelyard.report.page.data import CaseWork, PackedCases, TableColumns, body, text_limit
from steelyard.report.records import Expectations, RunRecords, open_suite, shows_expected
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
