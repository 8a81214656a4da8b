"""The cases of a run as a few numbers each, and those of two runs side by side: no answer is held in memory."""

from __future__ import annotations

import math
import os
import sys
from array import array
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from steelyard.disk import open_regular
from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import FAILED, PASSED, ROWS, Rows, short_fingerprint
from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.journal.reader import RecordReader, bad_line, check_line, counted_rows
from steelyard.records import Better, Record, id_digest
from steelyard.run.result import Result
from steelyard.stats.errors import error_name, ranked

Floats: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]
Digests: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]

TIMES = ("time_to_first_token", "time_to_last_token")


class _Value(msgspec.Struct, gc=False):
    name: str
    value: float | None = None


class _Measured(msgspec.Struct, gc=False):
    """The part of a record that a comparison looks at; the rest of the line is skipped, not decoded."""

    scored_by: str
    time_to_first_token: float | None
    time_to_last_token: float | None
    scores: list[_Value]
    cost: float | None = None
    cached: bool = False
    group: str | None = None
    error_type: str | None = None
    http_status: int | None = None


_decode = msgspec.json.Decoder(_Measured).decode


class RunCases:
    """What became of each case of a run. Arrays by case are in the order of `ids`, the digests of the case ids.

    A case with several trials is one case: the mean of its trials is its value, the first one its example.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.metrics = Result.load(run).typed_metrics
        self.manifest: Manifest | None = read_manifest(run)
        rows = counted_rows(run) if (run / OUTPUTS).exists() else np.empty(0, dtype=ROWS)
        self.ids, first, self._case_of = np.unique(rows["id"], return_index=True, return_inverse=True)
        self.records = self._tally(np.ones(len(rows), dtype=bool))
        self.errors = self._tally(rows["ok"] == 0)
        self.passed = self._tally((rows["ok"] == 1) & (rows["verdict"] == PASSED))
        self.tried = self.passed + self._tally((rows["ok"] == 1) & (rows["verdict"] == FAILED))
        self.places: Counts = rows["index"][first].astype(np.int64)
        self.asked: Counts = rows["case"][first].astype(np.int64)
        self._offsets = rows["offset"][first]
        self._read = _Columns(run, rows)
        self.graded: Counts = self._read.graded[first]
        self.groups: Digests | None = None if self._read.groups is None else self._read.groups[first]
        """The digest of each case's group, 0 for a case without one; None where no case has one."""
        self.cached = self._read.cached

    @property
    def trials(self) -> int:
        """How often a case was asked at the most."""
        return int(self.records.max()) if len(self.records) else 1

    def times(self, name: str) -> Floats:
        """The mean of a time by case, of what was asked for and answered; NaN where there is none."""
        return self._mean_of(self._read.times[name])

    def costs(self) -> Floats:
        """The mean cost by case, the same way."""
        return self._mean_of(self._read.costs)

    def score_counts(self) -> dict[str, int]:
        """The names of the scores, and how many records have each."""
        return {name: len(rows) for name, (rows, _) in self._read.scores.items()}

    def score(self, name: str) -> Floats:
        """The mean of a score by case; NaN where there is none."""
        rows, values = self._read.scores[name]
        return self._mean(np.asarray(rows, dtype=np.int64), np.asarray(values))

    def all_times(self, name: str, cases: Counts) -> Floats:
        """The single times of these cases."""
        chosen = np.zeros(len(self.ids), dtype=bool)
        chosen[cases] = True
        values: Floats = self._read.times[name][chosen[self._case_of]]
        return values[~np.isnan(values)]

    def error_kinds(self, cases: Counts) -> dict[str, int]:
        """How many of these cases ended in each kind of error, by the first of its errors, most frequent first."""
        kinds = dict(zip(self._case_of[list(self._read.kinds)].tolist(), self._read.kinds.values(), strict=True))
        return ranked((kinds[case], 1) for case in cases.tolist() if case in kinds)

    def examples(self, cases: Counts) -> list[Record]:
        """The first record of each of these cases."""
        if not len(cases):
            return []
        reader = RecordReader(self.run / OUTPUTS)
        try:
            return [reader.at(int(offset)) for offset in self._offsets[cases]]
        finally:
            reader.close()

    def _tally(self, rows: Mask) -> Counts:
        return np.bincount(self._case_of[rows], minlength=len(self.ids))

    def _mean_of(self, values: Floats) -> Floats:
        present = np.flatnonzero(~np.isnan(values))
        return self._mean(present, values[present])

    def _mean(self, rows: Counts, values: Floats) -> Floats:
        cases = self._case_of[rows]
        counts = np.bincount(cases, minlength=len(self.ids))
        sums = np.bincount(cases, weights=values, minlength=len(self.ids))
        means: Floats = np.divide(sums, counts, out=np.full(len(self.ids), math.nan), where=counts > 0)
        return means


class _Columns:
    """What the rows of a run say, read line by line. Scores are kept by the row, as few rows may have a name."""

    def __init__(self, run: Path, rows: Rows) -> None:
        self.times = {name: np.full(len(rows), math.nan) for name in TIMES}
        self.costs = np.full(len(rows), math.nan)
        self.graded = np.zeros(len(rows), dtype=np.int64)
        self.cached = 0
        self.groups: Digests | None = None
        self.kinds: dict[int, str] = {}
        """The kind of error of each row that has one."""
        self.scores: dict[str, tuple[array[int], array[float]]] = {}
        """For each name the rows that have such a score, and its values."""
        if len(rows):
            self._read(run / OUTPUTS, rows)

    def _read(self, path: Path, rows: Rows) -> None:
        descriptor = open_regular(path)
        try:
            lines = zip(rows["offset"].tolist(), rows["length"].tolist(), rows["ok"].tolist(), strict=True)
            for number, (offset, length, ok) in enumerate(lines):
                line = os.pread(descriptor, length, offset)
                check_line(path, descriptor, offset, line.removesuffix(b"\n"))
                try:
                    measured = _decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise bad_line(path, descriptor, offset) from error
                self._take(number, measured, ok=bool(ok))
        finally:
            os.close(descriptor)

    def _take(self, number: int, measured: _Measured, *, ok: bool) -> None:
        self.graded[number] = short_fingerprint(measured.scored_by)
        if measured.group is not None:
            if self.groups is None:
                self.groups = np.zeros(len(self.graded), dtype=np.uint64)
            self.groups[number] = id_digest(measured.group)
        if not ok:
            self.kinds[number] = sys.intern(error_name(measured).kind)
            return
        if measured.cached:
            # Its times are of the call back then, and it cost nothing: neither says anything of this run.
            self.cached += 1
        else:
            for name in TIMES:
                self.times[name][number] = _figure(getattr(measured, name))
            self.costs[number] = _figure(measured.cost)
        for name, value in {score.name: _figure(score.value) for score in measured.scores}.items():
            if not math.isnan(value):
                rows, values = self.scores.setdefault(name, (array("q"), array("d")))
                rows.append(number)
                values.append(value)


class Values(NamedTuple):
    """A figure by case in both runs, and the group of each case where cases are grouped."""

    baseline: Floats
    run: Floats
    groups: list[int] | None

    @property
    def differences(self) -> Floats:
        """By how much it is higher in the run, case by case."""
        return self.run - self.baseline


class Pairs:
    """The cases that two runs share, in the baseline's order: `a` has their positions there, `b` in the other run.

    Where more than half of them were asked (or graded) otherwise, what they have in common was changed, such as the
    system prompt: they are paired. Fewer are cases that were edited: they are left out, unless asked for.
    """

    def __init__(self, baseline: RunCases, other: RunCases, *, with_edited: bool = False) -> None:
        self.baseline, self.other = baseline, other
        _, a, b = np.intersect1d(baseline.ids, other.ids, assume_unique=True, return_indices=True)
        order = np.argsort(baseline.places[a], kind="stable")
        a, b = a[order], b[order]
        asked = baseline.asked[a] != other.asked[b]
        graded = baseline.graded[a] != other.graded[b]
        self.asked_otherwise, self.graded_otherwise = int(asked.sum()), int(graded.sum())
        self.shared = len(a)
        edited = np.zeros(len(a), dtype=bool)
        for changed in (asked, graded):
            if changed.sum() * 2 <= len(a):
                edited |= changed
        kept = np.ones(len(a), dtype=bool) if with_edited else ~edited
        self.edited: Counts = b[edited]
        self.a, self.b = a[kept], b[kept]
        self._groups = _groups(baseline, self.a, other, self.b)
        self.only_a = _in_order(baseline, np.flatnonzero(~np.isin(baseline.ids, other.ids)))
        self.only_b = _in_order(other, np.flatnonzero(~np.isin(other.ids, baseline.ids)))

    def __len__(self) -> int:
        return len(self.a)

    def both(self, of_baseline: Floats, of_other: Floats) -> Values:
        """The values by case of each run, of the pairs in which both have one."""
        a, b = of_baseline[self.a], of_other[self.b]
        present = ~(np.isnan(a) | np.isnan(b))
        groups = None if self._groups is None else self._groups[present].tolist()
        return Values(a[present], b[present], groups)

    def measured(self, name: str) -> tuple[str | None, Better | None]:
        """The unit of a score that is a measurement, and its better direction; a plain score has no unit."""
        for cases in (self.other, self.baseline):
            score = cases.metrics.scores.get(name)
            if score is not None and score.max is not UNSET:
                return score.unit or "", score.better or None
        return None, "higher"

    def scored(self) -> tuple[Counts, Counts]:
        """The pairs in which both have a verdict."""
        decided = (self.baseline.tried[self.a] > 0) & (self.other.tried[self.b] > 0)
        return self.a[decided], self.b[decided]

    def pass_rates(self) -> Values:
        """The share of trials that passed, by case, of the pairs in which both have a verdict."""
        return self.both(*(_share(cases.passed, cases.tried) for cases in (self.baseline, self.other)))

    def pass_rates_all(self) -> Values:
        """The share of all trials that passed, by case: an error counts as not passed."""
        return self.both(*(_share(cases.passed, cases.records) for cases in (self.baseline, self.other)))

    def error_rates(self) -> Values:
        """The share of trials that brought no answer, by case."""
        return self.both(*(_share(cases.errors, cases.records) for cases in (self.baseline, self.other)))

    def now_failing(self) -> Counts:
        """The cases of the other run that have an error there and none in the baseline."""
        failing: Counts = self.b[(self.baseline.errors[self.a] == 0) & (self.other.errors[self.b] > 0)]
        return failing

    def no_longer_failing(self) -> Counts:
        """The cases of the baseline that have an error there and none in the other run."""
        failed: Counts = self.a[(self.baseline.errors[self.a] > 0) & (self.other.errors[self.b] == 0)]
        return failed


def _share(part: Counts, whole: Counts) -> Floats:
    shares: Floats = np.divide(part, whole, out=np.full(len(whole), math.nan), where=whole > 0)
    return shares


def _groups(baseline: RunCases, a: Counts, other: RunCases, b: Counts) -> Counts | None:
    """A number for the group of each pair, as the newer run has it; a case without one is a group by itself."""
    cases, chosen = (other, b) if other.groups is not None else (baseline, a)
    if cases.groups is None or not len(chosen):
        return None
    digests = cases.groups[chosen]
    _, numbers = np.unique(digests, return_inverse=True)
    alone = digests == 0
    numbers[alone] = len(chosen) + np.arange(int(alone.sum()))
    return numbers.astype(np.int64)


def _in_order(cases: RunCases, positions: Counts) -> Counts:
    return positions[np.argsort(cases.places[positions], kind="stable")]


def _figure(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan
