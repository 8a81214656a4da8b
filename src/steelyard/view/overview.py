"""The report of a run that is not being written: its figures as they stand on disk, and what was expected of a case."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from steelyard.journal.files import CASES
from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.journal.states import read_metrics
from steelyard.records import Record
from steelyard.report.expectations import Asked, Expectations, open_suite
from steelyard.report.headline import read_partial
from steelyard.report.page import about
from steelyard.report.page_notices import notices
from steelyard.result import Result
from steelyard.suite.evalset import EvalSet
from steelyard.view.cases import CaseTable
from steelyard.view.figures import NO_CHARTS
from steelyard.view.runs import Signature, sayable, signature_of

_MOST_REPLAYED = 16
_FARTHEST = 200_000
"""Cases of a suite that are read to find one."""


class Suites:
    """The suite files that may be read: those in one of these folders. What a run names elsewhere stays unread."""

    def __init__(self, *folders: Path) -> None:
        self._folders = [folder.resolve() for folder in folders]

    def open(self, run: Path, manifest: Manifest | None) -> tuple[EvalSet | None, str | None]:
        """The cases of a run; else None, and why not in words."""
        if (run / CASES).is_symlink():
            return None, "the run's own cases are a link to somewhere else"
        named = None if manifest is None else manifest.suite_file
        if named is not None and not (run / CASES).exists() and not self._may_read(Path(named)):
            return None, f"the suite file {named} lies outside the folders that this server reads"
        return open_suite(run, manifest)

    def asked(self, run: Path, record: Record) -> Asked | None:
        """The case of a record as the suite has it now."""
        manifest = read_manifest(run)
        suite, _ = self.open(run, manifest)
        if suite is None or record.index > _FARTHEST:
            return None
        return Expectations(suite, manifest).of(record)

    def _may_read(self, suite_file: Path) -> bool:
        place = suite_file.resolve()
        return any(place.is_relative_to(folder) for folder in self._folders)


class Overviews:
    """The reports' first views. What had to be replayed is kept for a while: that takes seconds in a large run."""

    def __init__(self, suites: Suites) -> None:
        self._suites = suites
        self._replayed: OrderedDict[tuple[Path, Signature], dict[str, Any]] = OrderedDict()

    def of(self, run: Path, table: CaseTable) -> dict[str, Any]:
        """What the first view shows, in the form that the report's scripts read; the charts come later."""
        manifest = read_manifest(run)
        _, note = self._suites.open(run, manifest)
        return _overview(run, table, self._metrics(run), manifest, note)

    def _metrics(self, run: Path) -> dict[str, Any]:
        """The figures of a run: as written when it ended or was stopped, else replayed from its journal."""
        written = read_metrics(run) or read_partial(run)
        if written is not None:
            return written
        key = (run, signature_of(run))
        replayed = self._replayed.pop(key, None)
        if replayed is None:
            replayed = Result.load(run).metrics
            replayed["suite"] = sayable(replayed["suite"])  # without a manifest it is the folder's name
        self._replayed[key] = replayed
        while len(self._replayed) > _MOST_REPLAYED:
            self._replayed.popitem(last=False)
        return replayed


def _overview(
    run: Path, table: CaseTable, metrics: dict[str, Any], manifest: Manifest | None, note: str | None
) -> dict[str, Any]:
    return {
        "about": about(Path(sayable(str(run))), metrics, manifest, table.trials, note),
        "metrics": metrics,
        "counts": table.record_counts,
        "score_names": list(metrics["scores"]),
        "notices": notices(metrics),
        "charts": NO_CHARTS,
        "chunks": [],
    }
