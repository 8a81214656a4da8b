"""The records of a run as they count, one in memory at a time, with where each one lies in `outputs.jsonl`."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from steelyard.errors import ConfigurationError
from steelyard.journal.files import CASES, OUTPUTS
from steelyard.journal.index import FAILED, PASSED, ROWS, UNSCORED, Rows
from steelyard.journal.manifest import Manifest
from steelyard.journal.reader import RecordReader, counted_rows
from steelyard.records import EvalCase, Record, id_digest, is_digest, verdict
from steelyard.suite.evalset import EvalSet
from steelyard.suite.identity import BadCase, as_hex, canonical, case_fingerprint, grading_fingerprint
from steelyard.suite.suite_file import read_suite_file

STATES = ("failed", "passed", "unscored", "error")
"""What became of a record, in words; the position is its number in the page's data."""


class RunRecords:
    """A view of a run's records that stays as it was when it was made, whatever is appended meanwhile."""

    def __init__(self, run: Path) -> None:
        self.run = run
        there = (run / OUTPUTS).exists()
        self._rows: Rows = counted_rows(run) if there else np.empty(0, dtype=ROWS)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        """Each record with the byte at which its line begins, in case order."""
        return self._read(self._rows)

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each state."""
        ok, passed = self._rows["ok"] == 1, self._rows["verdict"]
        counted = {"failed": FAILED, "passed": PASSED, "unscored": UNSCORED}
        return {name: int((ok & (passed == code)).sum()) for name, code in counted.items()} | {
            "error": int((~ok).sum())
        }

    @property
    def trials(self) -> int:
        """How often a case was asked at the most."""
        return int(self._rows["trial"].max()) + 1 if len(self._rows) else 1

    def of_case(self, case_id: str) -> list[tuple[int, Record]]:
        """The records of one case, a trial after another."""
        found = self._read(self._rows[self._rows["id"] == np.uint64(id_digest(case_id))])
        return [(offset, record) for offset, record in found if record.id == case_id]

    def some_ids(self, most: int) -> list[str]:
        """The ids of the first cases, to suggest one from."""
        return list(dict.fromkeys(record.id for _, record in self._read(self._rows[:most])))

    def _read(self, rows: Rows) -> Iterator[tuple[int, Record]]:
        if not len(rows):
            return
        reader = RecordReader(self.run / OUTPUTS)
        try:
            for offset in rows["offset"].tolist():
                yield offset, reader.at(offset)
        finally:
            reader.close()


def state_of(record: Record) -> str:
    """What became of a record: one of STATES."""
    if record.status != "ok":
        return "error"
    passed = verdict(record.scores)
    return "unscored" if passed is None else "passed" if passed else "failed"


def why_failed(record: Record) -> str:
    """The scores that decided against an answer, each with its reason."""
    against = [score for score in record.scores if score.passed is False and not score.overruled and not score.advisory]
    return "; ".join(f"{score.name}: {score.reason or 'failed'}" for score in against)


_AHEAD = 2_000
"""Cases read past the place where a record says that its own stood: the suite may have been edited since."""


class SuiteCase(msgspec.Struct, frozen=True):
    """A record's case as the suite has it now. `edited` says that it is not what was asked, or graded, back then."""

    case: EvalCase
    edited: bool


def open_suite(run: Path, manifest: Manifest | None) -> tuple[EvalSet | None, str | None]:
    """The cases of a run, from the run itself or its suite file; else None, and why not in words.

    A suite in a Python file is not looked at: to show a report must not mean to run somebody's code.
    """
    if (run / CASES).is_file():
        return EvalSet.from_spool(run / CASES, id="spooled"), None
    named = None if manifest is None else manifest.suite_file
    if named is None:
        return None, "the run does not say which suite file it is of"
    if Path(named).suffix.lower() not in (".yaml", ".yml"):
        return None, f"the suite {named} is Python code, which a report does not run unless --suite names it"
    if not Path(named).is_file():
        return None, f"the suite file {named} is not to be found from here: --suite names another"
    try:
        return read_suite_file(named).cases_of({} if manifest is None else manifest.variant), None
    except ConfigurationError as error:
        return None, f"the suite file cannot be read any more: {error}"


def shows_expected(manifest: Manifest | None) -> bool:
    """Whether pages about a run may show what its cases expect."""
    return manifest is None or manifest.options.get("keep_expected") is not False


def _as_recorded(record: Record) -> SuiteCase | None:
    """What a record itself has of its case; None where it has nothing."""
    expected = None if is_digest(record.expected) else record.expected
    metadata = {} if is_digest(record.metadata) else record.metadata
    if expected is None and not metadata:
        return None
    return SuiteCase(EvalCase(id=record.id, prompt=record.input_prompt, expected=expected, metadata=metadata), False)


class Expectations:
    """Finds the case of each record. Records come in case order, so that the suite is read once, beside them."""

    def __init__(self, suite: EvalSet | None, manifest: Manifest | None) -> None:
        self.problem: str | None = None
        """Why the suite could not be read to its end."""
        self._cases: Iterator[EvalCase] = iter(()) if suite is None else iter(suite)
        self._read = 0
        self._waiting: OrderedDict[str, EvalCase] = OrderedDict()
        self._current: EvalCase | None = None
        self._graders = _grader_digests(manifest)
        self._shows_expected = shows_expected(manifest)

    def of(self, record: Record) -> SuiteCase | None:
        """The case of a record, from the suite or, where that does not have it or is not at hand, from the record.

        None where neither has it. Of a run that keeps what is expected out of its records, it is not shown either.
        """
        asked = self._from_suite(record) or _as_recorded(record)
        if asked is None or self._shows_expected:
            return asked
        case = msgspec.structs.replace(asked.case, expected=None, expected_trajectory=None, metadata={})
        return SuiteCase(case, asked.edited)

    def _from_suite(self, record: Record) -> SuiteCase | None:
        case = self._current
        if case is None or case.id != record.id:  # not one more trial of the case before
            case = self._find(record)
            self._current = case
        return None if case is None else SuiteCase(case, self._is_edited(case, record))

    def _find(self, record: Record) -> EvalCase | None:
        if record.id in self._waiting:
            return self._waiting.pop(record.id)
        while self._read <= record.index + _AHEAD:
            case = self._next()
            if case is None:
                return None
            if case.id == record.id:
                return case
            self._waiting[case.id] = case
            if len(self._waiting) > 2 * _AHEAD:
                self._waiting.popitem(last=False)
        return None

    def _next(self) -> EvalCase | None:
        try:
            case = next(self._cases, None)
        except (ConfigurationError, OSError) as error:
            self.problem, self._cases = str(error), iter(())
            return None
        self._read += case is not None
        return case

    def _is_edited(self, case: EvalCase, record: Record) -> bool:
        try:
            if as_hex(case_fingerprint(case)) != record.case_fp:
                return True
            graded = [as_hex(grading_fingerprint(digest, case)) for digest in self._graders]
        except BadCase:
            return True
        return bool(record.scored_by) and bool(graded) and record.scored_by not in graded


def _grader_digests(manifest: Manifest | None) -> list[bytes]:
    """What the run's scorers may have been digested to: `num_runs` is part of it where a judge is among them."""
    if manifest is None or not manifest.scorers:
        return []
    asked: list[list[object]] = [[*manifest.scorers]]
    num_runs = manifest.options.get("num_runs", 1)
    if num_runs != 1:
        asked.append([*manifest.scorers, {"num_runs": num_runs}])
    return [hashlib.sha256(canonical(one)).digest() for one in asked]
