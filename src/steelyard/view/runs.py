"""The runs, sweeps and matrices in a folder: where they are, the state and headline of each. Reads, never writes.

A page names a run by a digest of its place. The digest is looked up among the runs that were found, so that nothing
that a request says ever becomes part of a path. Links are not followed: what is shown lies in the folder.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from markupsafe import Markup

from steelyard.errors import ConfigurationError, RunRefused
from steelyard.journal.files import (
    CASES,
    INDEX,
    LOCK,
    MANIFEST,
    MATRIX,
    METRICS,
    OUTPUTS,
    PARTIAL,
    PREVIOUS,
    SWEEP,
    SWEEP_PARTIAL,
    RunState,
    run_state,
)
from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.records import Record
from steelyard.report.compare.compare import compare_runs
from steelyard.report.compare.formats import comparison_markup, comparison_title
from steelyard.report.headline import Headline, is_writing, notices, read_headline
from steelyard.report.matrix.leaderboard import leading, named, passed_words
from steelyard.report.matrix.page import Surroundings, matrix_page
from steelyard.report.matrix.table import VariantRun, VariantRuns
from steelyard.report.page.page import about
from steelyard.report.records import Expectations, SuiteCase, open_suite
from steelyard.report.sweep.page import checked_sweep, sweep_markup, sweep_title
from steelyard.run.matrix import Matrix, read_matrix
from steelyard.run.result import Result, load_metrics, read_partial
from steelyard.stats.metrics import Metrics
from steelyard.suite.evalset import EvalSet
from steelyard.view.cases import CaseTable
from steelyard.view.pages import NO_CHARTS

_MAX_DEPTH = 3
"""Folders within folders that are looked into: a sweep keeps each level's run in its own folder."""
_MAX_FOLDERS = 5_000
_FRESH = 1.0
"""Seconds that a list of the folder is good for, however many pages ask."""
_SHARE = 8
"""A run whose headline takes long is read seldom: at most one part in eight of the time."""
_FILES = (MANIFEST, OUTPUTS, METRICS, PARTIAL)

Signature = tuple[tuple[int, int, int] | None, ...]


class ListedRun(Headline, kw_only=True):
    """One run of the list: its headline, and what pages and people call it."""

    id: str
    name: str


class _Known(msgspec.Struct):
    """A headline, of which state of the files it is, and until when it will do while a run is being written."""

    headline: ListedRun
    signature: Signature
    good_until: float

    def will_do(self, signature: Signature, now: float) -> bool:
        return self.signature == signature or (self.headline.state == "running" and now < self.good_until)


class Runs:
    """The runs below a folder; the folder may be a run itself. Any thread may ask."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not self.root.is_dir():
            raise ConfigurationError(f"there is no folder {root}")
        self.is_run = run_state(self.root) is not RunState.FRESH
        self._places: dict[str, Path] = {}
        self._looked = -_FRESH
        self._known: dict[Path, _Known] = {}
        self._looking = threading.Lock()

    def find(self, run_id: str) -> Path | None:
        """The run of that id, if the folder holds it."""
        if run_id not in self._places:
            with self._looking:
                self._look()
        place = self._places.get(run_id)
        return place if place is not None and is_inside(place) else None

    def headlines(self) -> list[ListedRun]:
        """All runs, the newest first."""
        with self._looking:
            self._look()
            found = [one for run_id, place in self._places.items() if (one := self._headline(run_id, place))]
        return sorted(found, key=lambda one: (one.created, one.name), reverse=True)

    def id_of(self, place: Path) -> str:
        """What pages call the run at a place: the same whenever the folder is served."""
        relative = place.relative_to(self.root).as_posix()
        return blake2b(relative.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()

    def name_of(self, place: Path) -> str:
        """What people call it: its place below the folder."""
        relative = place.relative_to(self.root).as_posix()
        return sayable(self.root.name if relative == "." else relative)

    def _look(self) -> None:
        if time.monotonic() - self._looked < _FRESH:
            return
        self._places = {self.id_of(place): place for place in _run_folders(self.root)}
        self._known = {place: known for place, known in self._known.items() if self.id_of(place) in self._places}
        self._looked = time.monotonic()

    def _headline(self, run_id: str, place: Path) -> ListedRun | None:
        """What is known of a run; read again only where it has changed, and not too often."""
        began, signature, known = time.monotonic(), signature_of(place), self._known.get(place)
        if known is not None and known.will_do(signature, began) and _still(known.headline.state, place):
            return known.headline
        found = msgspec.structs.asdict(read_headline(place))
        headline = ListedRun(id=run_id, name=self.name_of(place), **found)
        headline.problem = None if headline.problem is None else sayable(headline.problem)
        ended = time.monotonic()
        self._known[place] = _Known(headline, signature, ended + max(_FRESH, _SHARE * (ended - began)))
        return headline if any(signature) else None


def sayable(text: str) -> str:
    """The text with a stand-in for what is no text: a file's name may be any bytes."""
    return text.encode("utf-8", "replace").decode()


def _still(state: str, run: Path) -> bool:
    """Whether a run is in the same state, unless its files say otherwise: a lock comes and goes without a trace."""
    return state in ("complete", "damaged") or is_writing(run) == (state == "running")


def signature_of(run: Path) -> Signature:
    """What changes whenever a file of the run does."""
    return tuple(stat_of(run / name) for name in _FILES)


def stat_of(path: Path) -> tuple[int, int, int] | None:
    """What changes whenever a file does; None when there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_inside(run: Path) -> bool:
    """Whether a run's folder, the folders above it and its files are what they seem, and no links elsewhere.

    The path must be one that had no links in it when it was found.
    """
    names = (*_FILES, INDEX, LOCK)
    return run.is_dir() and run.resolve() == run and not any((run / name).is_symlink() for name in names)


def _run_folders(root: Path) -> Iterator[Path]:
    """The folders that hold a run, without following links; a bounded number of them."""
    waiting, seen = [(root, 0)], 0
    while waiting and seen < _MAX_FOLDERS:
        folder, depth = waiting.pop()
        seen += 1
        try:
            with os.scandir(folder) as entries:
                found = list(entries)
        except OSError:
            continue
        if any(entry.name in (MANIFEST, OUTPUTS) for entry in found) and is_inside(folder):
            yield folder
        if depth < _MAX_DEPTH:
            below = [entry for entry in found if entry.is_dir(follow_symlinks=False) and entry.name != PREVIOUS]
            waiting += [(folder / entry.name, depth + 1) for entry in below if not entry.name.startswith(".")]


_MAX_REPLAYED = 16
_MAX_CASES_READ = 200_000
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
        suite, note = open_suite(run, manifest)
        if suite is not None and suite.path is not None and not self._may_read(suite.path, run):
            return None, f"the cases in {suite.path} lie outside the folders that this server reads"
        return suite, note

    def asked(self, run: Path, record: Record) -> SuiteCase | None:
        """The case of a record as the suite has it now."""
        manifest = read_manifest(run)
        suite, _ = self.open(run, manifest)
        if record.index > _MAX_CASES_READ:
            suite = None
        return Expectations(suite, manifest).of(record)

    def _may_read(self, file: Path, *more: Path) -> bool:
        place = file.resolve()
        return any(place.is_relative_to(folder) for folder in (*self._folders, *(one.resolve() for one in more)))


class Overviews:
    """The reports' first views. What had to be replayed is kept for a while: that takes seconds in a large run."""

    def __init__(self, suites: Suites) -> None:
        self._suites = suites
        self._replayed: OrderedDict[tuple[Path, Signature], Metrics] = OrderedDict()

    def of(self, run: Path, table: CaseTable) -> dict[str, Any]:
        """What the first view shows, in the form that the report's scripts read; the charts come later."""
        manifest = read_manifest(run)
        _, note = self._suites.open(run, manifest)
        return _overview(run, table, self._metrics(run), manifest, note)

    def _metrics(self, run: Path) -> Metrics:
        """The figures of a run: as written when it ended or was stopped, else replayed from its journal."""
        written = load_metrics(run) or read_partial(run)
        if written is not None:
            return written
        key = (run, signature_of(run))
        replayed = self._replayed.pop(key, None)
        if replayed is None:
            replayed = Result.load(run).typed_metrics
            replayed.suite = sayable(replayed.suite)  # without a manifest it is the folder's name
        self._replayed[key] = replayed
        while len(self._replayed) > _MAX_REPLAYED:
            self._replayed.popitem(last=False)
        return replayed


def _overview(
    run: Path, table: CaseTable, metrics: Metrics, manifest: Manifest | None, note: str | None
) -> dict[str, Any]:
    return {
        "about": about(Path(sayable(str(run))), metrics, manifest, table.trials, note),
        "metrics": metrics,
        "counts": table.record_counts,
        "score_names": list(metrics.scores),
        "notices": notices(metrics),
        "charts": NO_CHARTS,
        "chunks": [],
    }


_LEVEL = "level-"


class SweepHeadline(msgspec.Struct, kw_only=True):
    """One sweep, in a line."""

    id: str
    name: str
    suite: str
    model: str | None
    complete: bool
    levels: int
    recommended: int | None
    says: str


class Sweeps:
    """The sweeps below a folder, found by their levels, which are runs. Any thread may ask."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def headlines(self) -> list[SweepHeadline]:
        """All sweeps, in the order of their names."""
        found = [self._headline(place, sweep) for place in self._places() if (sweep := _read(place)) is not None]
        return sorted(found, key=lambda one: one.name)

    def page_of(self, sweep_id: str) -> tuple[str, Markup] | None:
        """The title and the markup of a sweep, all that is not ours escaped; None when the folder does not hold it."""
        for place, levels in self._places().items():
            if self._runs.id_of(place) == sweep_id and (sweep := _read(place)) is not None:
                links = {level.name: f"/run/{self._runs.id_of(level)}" for level in levels}
                return sweep_title(sweep), sweep_markup(sweep, self._runs.name_of(place), links)
        return None

    def inside(self) -> set[str]:
        """The ids of the runs of a sweep, which its own page leads to; one that is running is not yet on that page."""
        places = [place for place in self._places() if place != self._runs.root and _read(place) is not None]
        ended = ((one.id, self._runs.find(one.id)) for one in self._runs.headlines() if one.state != "running")
        return {run_id for run_id, run in ended if run is not None and any(place in run.parents for place in places)}

    def _places(self) -> dict[Path, list[Path]]:
        """The folders that hold levels, and their levels."""
        found: dict[Path, list[Path]] = {}
        for headline in self._runs.headlines():
            place = self._runs.find(headline.id)
            if place is not None and place != self._runs.root and place.name.startswith(_LEVEL):
                found.setdefault(place.parent, []).append(place)
        return found

    def _headline(self, place: Path, sweep: Mapping[str, Any]) -> SweepHeadline:
        recommendation = sweep["recommendation"]
        return SweepHeadline(
            id=self._runs.id_of(place),
            name=self._runs.name_of(place),
            suite=sweep["suite"],
            model=sweep["model_id"],
            complete=sweep["complete"],
            levels=len(sweep["levels"]),
            recommended=recommendation["level"],
            says=recommendation["says"],
        )


def _read(place: Path) -> dict[str, Any] | None:
    """What a sweep found; None where there is none, or it is a link elsewhere or cannot be understood."""
    if any((place / name).is_symlink() for name in (SWEEP, SWEEP_PARTIAL)):
        return None
    try:
        return checked_sweep(place)
    except (ConfigurationError, OSError):
        return None


MAX_COMPARED = 5
_MAX_KEPT = 8


class Comparisons:
    """Titles and markup of comparisons."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[tuple[Path, Signature], ...], tuple[str, Markup]] = OrderedDict()

    def of(self, runs: Sequence[Path]) -> tuple[str, Markup]:
        """The title and the markup of the first run against each of the others; all that is not ours is escaped."""
        key = tuple((run, signature_of(run)) for run in runs)
        made = self._kept.pop(key, None)
        if made is None:
            comparison = compare_runs(runs)
            made = (comparison_title(comparison), comparison_markup(comparison))
        self._kept[key] = made
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return made


_STATES = ("damaged", "running", "interrupted", "complete")
"""What a matrix is called: the first of these that a variant is."""
_PIECE = 1 << 18


class MatrixHeadline(msgspec.Struct, kw_only=True):
    """One matrix, in a line."""

    id: str
    name: str
    suite: str
    state: str
    created: str
    variants: int
    begun: int
    done: int
    planned: int
    leader: str | None
    """The variant that passed most so far, or all that are tied; None where none has a verdict."""
    leads: str
    """Whether it passed most, or they passed equally many."""
    pass_rate: float | None
    """Their share of all records that passed: an error counts as not passed, as on the leaderboard."""
    uncalibrated: bool
    """Whether a judge that is not calibrated decided it."""
    cost: float | None
    currency: str | None


class Matrices:
    """The matrices below a folder, found by their variants, which are runs. Any thread may ask."""

    def __init__(self, runs: Runs, suites: Suites) -> None:
        self._runs, self._suites = runs, suites

    @property
    def root_id(self) -> str | None:
        """The id of the folder itself where it is a matrix."""
        return self._runs.id_of(self._runs.root) if self._runs.root in self._places() else None

    def headlines(self) -> list[MatrixHeadline]:
        """All matrices, the newest first."""
        found = [self._headline(place, matrix, runs) for place, (matrix, runs) in self._places().items()]
        return sorted(found, key=lambda one: (one.created, one.name), reverse=True)

    def listed(self) -> list[ListedRun]:
        """The runs that are no variant of a matrix."""
        inside = {run.id for _, runs in self._places().values() for run in runs.values()}
        return [run for run in self._runs.headlines() if run.id not in inside]

    def page_of(self, matrix_id: str) -> Iterator[str] | None:
        """The page of a matrix, in pieces; None when the folder does not hold it."""
        for place, (matrix, runs) in self._places().items():
            if self._runs.id_of(place) == matrix_id:
                begun = [one for one in matrix.variants if one.directory in runs]
                variants = VariantRuns(
                    runs=[VariantRun(name=one.name, run=place / one.directory, axes=one.axes) for one in begun],
                    place=Path(self._runs.name_of(place)),
                    suite=matrix.suite,
                    axes=matrix.axes,
                    not_begun=[one.name for one in matrix.variants if one.directory not in runs],
                )
                return self._page(variants)
        return None

    def side_by_side(self, places: Sequence[Path]) -> Iterator[str]:
        """The page of several runs, in pieces."""
        return self._page(VariantRuns(runs=[VariantRun(name=self._runs.name_of(place), run=place) for place in places]))

    def _page(self, variants: VariantRuns) -> Iterator[str]:
        links = {one.name: f"/run/{self._runs.id_of(one.run)}" for one in variants.runs}
        around = Surroundings(home="/", links=links, open_suite=self._suites.open)
        return matrix_page(variants, around=around)

    def _places(self) -> dict[Path, tuple[Matrix, dict[str, ListedRun]]]:
        """The folders that hold a matrix: what it says, and the headlines of its variants by their directories."""
        found: dict[Path, tuple[Matrix, dict[str, ListedRun]]] = {}
        read: dict[Path, Matrix | None] = {}
        for headline in self._runs.headlines():
            run = self._runs.find(headline.id)
            if run is None or run == self._runs.root:
                continue
            folder = run.parent
            if folder not in read:
                read[folder] = _matrix_of(folder)
            matrix = read[folder]
            if matrix is not None and any(one.directory == run.name for one in matrix.variants):
                found.setdefault(folder, (matrix, {}))[1][run.name] = headline
        return found

    def _headline(self, place: Path, matrix: Matrix, runs: dict[str, ListedRun]) -> MatrixHeadline:
        named_runs = {one.name: runs[one.directory] for one in matrix.variants if one.directory in runs}
        rates = {name: one.passed / one.done for name, one in named_runs.items() if one.scored and one.done}
        leaders = leading(rates)
        states = {one.state for one in runs.values()}
        unfinished = {"interrupted"} if len(runs) < len(matrix.variants) and "running" not in states else set()
        costs = [one.cost for one in runs.values() if one.cost is not None]
        return MatrixHeadline(
            id=self._runs.id_of(place),
            name=self._runs.name_of(place),
            suite=matrix.suite,
            state=next(state for state in _STATES if state in states | unfinished),
            created=matrix.created,
            variants=len(matrix.variants),
            begun=len(runs),
            done=sum(one.done for one in runs.values()),
            planned=sum(one.planned for one in runs.values()),
            leader=named(leaders) if leaders else None,
            leads=passed_words(leaders),
            pass_rate=rates[leaders[0]] if leaders else None,
            uncalibrated=any(named_runs[one].uncalibrated for one in leaders),
            cost=sum(costs) if costs else None,
            currency=next((one.currency for one in runs.values() if one.currency), None),
        )


def batch(pieces: Iterator[str]) -> bytes:
    """The next pieces of a page together, about as much as is sent at once; empty at its end."""
    found, size = [], 0
    for piece in pieces:
        found.append(piece.encode("utf-8", "replace"))
        size += len(found[-1])
        if size >= _PIECE:
            break
    return b"".join(found)


def _matrix_of(folder: Path) -> Matrix | None:
    """What a folder says of its matrix; None where there is none, or it is a link elsewhere or not understood."""
    if (folder / MATRIX).is_symlink():
        return None
    try:
        return read_matrix(folder)
    except (RunRefused, OSError):
        return None
