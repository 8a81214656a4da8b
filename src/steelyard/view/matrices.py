"""The matrices in a folder, each as one entry of the list, and several runs side by side: the page of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from steelyard.errors import RunRefused
from steelyard.journal.files import MATRIX
from steelyard.report.matrix.page import Surroundings, matrix_page
from steelyard.report.matrix.table import VariantRun, VariantRuns
from steelyard.run.matrix import Matrix, read_matrix
from steelyard.view.runs import ListedRun, Runs, Suites

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
    """The variant that passed most so far; None where none has a verdict."""
    pass_rate: float | None
    """Its share of all records that passed: an error counts as not passed, as on the leaderboard."""
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
                read[folder] = _read(folder)
            matrix = read[folder]
            if matrix is not None and any(one.directory == run.name for one in matrix.variants):
                found.setdefault(folder, (matrix, {}))[1][run.name] = headline
        return found

    def _headline(self, place: Path, matrix: Matrix, runs: dict[str, ListedRun]) -> MatrixHeadline:
        names = {one.directory: one.name for one in matrix.variants}
        rated = [(one.passed / one.done, directory) for directory, one in runs.items() if one.scored and one.done]
        rate, leader = max(rated, default=(None, None))
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
            leader=None if leader is None else names[leader],
            pass_rate=rate,
            uncalibrated=leader is not None and bool(runs[leader].uncalibrated),
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


def _read(folder: Path) -> Matrix | None:
    """What a folder says of its matrix; None where there is none, or it is a link elsewhere or not understood."""
    if (folder / MATRIX).is_symlink():
        return None
    try:
        return read_matrix(folder)
    except (RunRefused, OSError):
        return None
