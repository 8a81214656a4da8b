"""The runs of a matrix, or any others, side by side: the cases of all of them, aligned by id and trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.errors import ConfigurationError
from steelyard.journal.files import OUTPUTS, RunState, run_state
from steelyard.journal.index import FAILED, PASSED, ROWS, Rows
from steelyard.journal.reader import RecordReader, counted_rows
from steelyard.records import Record
from steelyard.report.compare.compare import run_labels
from steelyard.report.records import STATES
from steelyard.run.matrix import Matrix, is_matrix, read_matrix

Counts: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]


class VariantRun(msgspec.Struct, frozen=True, kw_only=True):
    """One of the runs: what it is called, where it is, and its values on the axes of a matrix."""

    name: str
    run: Path
    axes: dict[str, str] = {}


class VariantRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The runs that are shown side by side, and what is known of them together."""

    runs: list[VariantRun]
    place: Path | None = None
    """The folder of a matrix; None of runs that were named one by one."""
    suite: str = ""
    axes: dict[str, list[str]] = {}
    not_begun: list[str] = []
    """Variants of a matrix that have no run yet."""


def variants_in(folder: Path) -> VariantRuns:
    """The variants of the matrix in a folder that have begun."""
    matrix = read_matrix(folder)
    begun = [VariantRun(name=one.name, run=folder / one.directory, axes=one.axes) for one in matrix.variants]
    there = [one for one in begun if _has_begun(one.run)]
    if not there:
        raise ConfigurationError(f"no variant of the matrix in {folder} has begun: nothing can be shown yet")
    return VariantRuns(
        runs=there,
        place=folder,
        suite=matrix.suite,
        axes=matrix.axes,
        not_begun=[one.name for one in begun if one not in there],
    )


def variants_of(runs: Sequence[Path]) -> VariantRuns:
    """Runs that were named one by one."""
    named = zip(run_labels(runs), runs, strict=True)
    return VariantRuns(runs=[VariantRun(name=name, run=run) for name, run in named])


def checked_matrix(folder: Path) -> Matrix | None:
    """What a folder says of its matrix; None when it holds none."""
    return read_matrix(folder) if is_matrix(folder) else None


def _has_begun(run: Path) -> bool:
    return run.is_dir() and run_state(run) is not RunState.FRESH


_MARKS = ("failed", "error", "unscored", "passed")
"""What several trials are called together: the first of these that one of them is."""


def lead_of(states: Sequence[str]) -> int:
    """Which trial stands for all of a case: the first that is as the case is marked."""
    return states.index(next(mark for mark in _MARKS if mark in states))


class AlignedCases:
    """The cases of several runs in one order: that of the first run that has each. Holds numbers, no answers."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self.runs = list(runs)
        self._rows = [_in_case_order(run) for run in runs]
        places: dict[int, int] = {}
        found = [_cases_of(rows, places) for rows in self._rows]
        self.starts: Counts = np.zeros((len(runs), len(places)), dtype=np.int64)
        """Where the records of each case begin in each run."""
        self.trials: Counts = np.zeros((len(runs), len(places)), dtype=np.int64)
        """How many records there are of each case in each run; 0 where it has none."""
        for number, (cases, firsts) in enumerate(found):
            self.starts[number, cases] = firsts
            self.trials[number, cases] = np.diff(firsts, append=len(self._rows[number]))

    def __len__(self) -> int:
        return int(self.starts.shape[1])

    @property
    def records(self) -> int:
        """How many records all runs have together."""
        return sum(map(len, self._rows))

    def states(self, run: int, case: int) -> list[int]:
        """What became of each trial of a case in a run, as positions in STATES; empty where it has none."""
        start = int(self.starts[run, case])
        rows = self._rows[run][start : start + int(self.trials[run, case])]
        states: list[int] = np.where(rows["ok"] == 1, rows["verdict"], STATES.index("error")).tolist()
        return states

    def differing(self) -> Counts:
        """The cases that did not come out alike: the share of a case's records that passed is not the same in all.

        Runs that do not have a case are not looked at.
        """
        passed = self._tallies([_with_verdict(rows, PASSED) for rows in self._rows])
        failed = self._tallies([_with_verdict(rows, FAILED) for rows in self._rows])
        decided = passed + failed + self._tallies([rows["ok"] == 0 for rows in self._rows])
        shares = np.divide(passed, decided, out=np.full(passed.shape, np.nan), where=decided > 0)
        lowest = np.where(np.isnan(shares), np.inf, shares).min(axis=0, initial=np.inf)
        highest = np.where(np.isnan(shares), -np.inf, shares).max(axis=0, initial=-np.inf)
        return np.flatnonzero(highest > lowest)

    def read(self, cases: Sequence[int] | Counts | None = None) -> Iterator[tuple[int, list[list[tuple[int, Record]]]]]:
        """Each of these cases, or all: its number, and for each run its records with the bytes at which they begin."""
        with ExitStack() as open_files:
            readers = [
                _reader(run, open_files) if len(rows) else None for run, rows in zip(self.runs, self._rows, strict=True)
            ]
            for case in range(len(self)) if cases is None else cases:
                yield int(case), [self._of(number, int(case), reader) for number, reader in enumerate(readers)]

    def _of(self, run: int, case: int, reader: RecordReader | None) -> list[tuple[int, Record]]:
        count = int(self.trials[run, case])
        if reader is None or not count:
            return []
        start = int(self.starts[run, case])
        return [(offset, reader.at(offset)) for offset in self._rows[run]["offset"][start : start + count].tolist()]

    def _tallies(self, chosen: Sequence[Mask]) -> Counts:
        """How many of the chosen rows of each run each case has."""
        return np.stack([self._tally(number, one) for number, one in enumerate(chosen)])

    def _tally(self, run: int, chosen: Mask) -> Counts:
        present = np.flatnonzero(self.trials[run])
        order = present[np.argsort(self.starts[run, present], kind="stable")]
        case_of = np.repeat(order, self.trials[run, order])
        return np.bincount(case_of[chosen], minlength=len(self))


def _in_case_order(run: Path) -> Rows:
    rows = counted_rows(run) if (run / OUTPUTS).exists() else np.empty(0, dtype=ROWS)
    return rows[np.lexsort((rows["trial"], rows["id"], rows["index"]))]


def _cases_of(rows: Rows, places: dict[int, int]) -> tuple[list[int], Counts]:
    """The place of each case of a run in the common order, and where its rows begin. New cases get the next places."""
    begins = np.ones(len(rows), dtype=bool)
    begins[1:] = rows["id"][1:] != rows["id"][:-1]
    firsts: Counts = np.flatnonzero(begins)
    return [places.setdefault(one, len(places)) for one in rows["id"][firsts].tolist()], firsts


def _with_verdict(rows: Rows, verdict: int) -> Mask:
    chosen: Mask = (rows["ok"] == 1) & (rows["verdict"] == verdict)
    return chosen


def _reader(run: Path, open_files: ExitStack) -> RecordReader:
    reader = RecordReader(run / OUTPUTS)
    open_files.callback(reader.close)
    return reader
