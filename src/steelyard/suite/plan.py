"""The plan of a run: which cases it asks, how often, and what each one's answer and scores depend on.

Making it is the first pass over a suite: it meets every bad row before anything is called, and keeps
about 32 bytes a case. The cases themselves are read again when they are asked.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.errors import ConfigurationError, SuiteError
from steelyard.records import EvalCase, Job, id_digest
from steelyard.suite.evalset import EvalSet
from steelyard.suite.identity import BadCase, as_hex, case_fingerprint, grading_fingerprint
from steelyard.suite.occurrences import Occurrences

Digests: TypeAlias = npt.NDArray[np.uint64]
Selects: TypeAlias = Callable[[str], bool]

CHECK_EVERY = 4096  # rows
_TURN_EVERY = 128  # rows passed over: a millisecond or so
_ONE_TRIAL = (0,)


class Plan(msgspec.Struct, kw_only=True, dict=True, eq=False):
    """The slots of a run, `position * trials + trial`, where a position is a selected case's place in order.

    `indices` are the selected cases' places in the suite; `rows_read` is how many rows the first pass read,
    and `read_all` whether these were all there are.
    """

    suite: EvalSet
    trials: int
    indices: range | array[int]
    id_digests: Digests
    case_fingerprints: Digests
    grading_fingerprints: Digests | None
    repeated: frozenset[int]
    rows_read: int
    read_all: bool

    @property
    def cases(self) -> int:
        """How many cases are asked."""
        return len(self.indices)

    @property
    def slots(self) -> int:
        """How many (case, trial) there are."""
        return self.cases * self.trials

    def slot_at(self, index: int, trial: int) -> int:
        """The slot of a planned case, by its place in the suite."""
        position = index if isinstance(self.indices, range) else bisect_left(self.indices, index)
        return position * self.trials + trial

    def index(self, slot: int) -> int:
        """The place in the suite of a slot's case."""
        return self.indices[slot // self.trials]

    def ids_at(self, positions: Collection[int]) -> dict[int, str]:
        """The ids of a few selected cases, by position; reads the suite as far as the last of them."""
        wanted = {self.indices[position]: position for position in positions}
        found: dict[int, str] = {}
        for index, (_, case) in enumerate(self.suite.numbered(Occurrences(self.repeated))):
            if len(found) == len(wanted):
                break
            if index in wanted:
                found[wanted[index]] = case.id
        return found

    def case_fp(self, slot: int) -> str:
        """The fingerprint of what the target may see of this slot's case."""
        return as_hex(self._seen[slot // self.trials])

    def scored_by(self, slot: int) -> str:
        """The fingerprint of how this slot's answer is graded; empty when nothing grades it."""
        return "" if self._graded is None else as_hex(self._graded[slot // self.trials])

    def is_of_case(self, slot: int, case_fp: str) -> bool:
        """Whether this is the fingerprint of the slot's case; faster than spelling it out."""
        try:
            return len(case_fp) == 16 and int(case_fp, 16) == self._seen[slot // self.trials]
        except ValueError:
            return False

    def is_scored_by(self, slot: int, scored_by: str) -> bool:
        """Whether this is how the slot's answer is graded now."""
        if self._graded is None:
            return not scored_by
        try:
            return len(scored_by) == 16 and int(scored_by, 16) == self._graded[slot // self.trials]
        except ValueError:
            return False

    def slot_of(self, id_digests: Digests, trials: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The slot of each (id digest, trial); -1 where it is not planned."""
        order = self._order
        places = np.searchsorted(self.id_digests, id_digests, sorter=order)
        positions = order[np.minimum(places, len(order) - 1)]
        trials = trials.astype(np.int64)
        planned = (self.id_digests[positions] == id_digests) & (trials >= 0) & (trials < self.trials)
        return np.where(planned, positions * self.trials + trials, -1)

    # Views that hand out Python's own numbers: a numpy scalar costs three times as much.
    @cached_property
    def _seen(self) -> memoryview:
        return self.case_fingerprints.data

    @cached_property
    def _graded(self) -> memoryview | None:
        return None if self.grading_fingerprints is None else self.grading_fingerprints.data

    @cached_property
    def _order(self) -> npt.NDArray[np.int64]:
        return np.argsort(self.id_digests)

    def jobs(self, done: bytearray | None = None) -> Iterator[Job | None]:
        """The jobs whose slots are not done, in suite order, a case's trials together, read as they are taken.

        None, now and then, while many cases are passed over: whoever takes jobs has other things to do as well.
        """
        if done is not None and len(done) != self.slots:
            raise ValueError(f"done must have {self.slots} bytes, one a slot, got {len(done)}")
        position = rows = 0
        cases, indices, passed_over = self.cases, self.indices, 0
        for rows, (line, case) in enumerate(self.suite.numbered(Occurrences(self.repeated)), 1):
            if rows > self.rows_read:
                break
            jobs: Sequence[Job] = ()
            if position < cases and indices[position] == rows - 1:
                jobs = self._jobs_of(position, case, line, done)
                position += 1
            if jobs:
                yield from jobs
            else:
                passed_over += 1
                if passed_over % _TURN_EVERY == 0:
                    yield None
            if position == cases and not self.read_all:
                return
        if position < self.cases or (self.read_all and rows != self.rows_read):
            raise self._changed(f"it had {self.rows_read} cases, now {'more' if rows > self.rows_read else rows}")

    def _jobs_of(self, position: int, case: EvalCase, line: int | None, done: bytearray | None) -> Sequence[Job]:
        first = position * self.trials
        left: Sequence[int] = range(self.trials)
        if done is not None:
            if self.trials == 1:
                left = () if done[first] else _ONE_TRIAL
            else:
                left = [trial for trial in left if not done[first + trial]]
        if not left:
            return ()
        if not self.suite.settled:
            self._check_same(position, case, line)
        index, case_fp, scored_by = self.indices[position], self.case_fp(first), self.scored_by(first)
        if left is _ONE_TRIAL:
            return (Job(index, 0, case, case_fp, scored_by),)
        return [Job(index, trial, case, case_fp, scored_by) for trial in left]

    def _check_same(self, position: int, case: EvalCase, line: int | None) -> None:
        if id_digest(case.id) != self.id_digests[position]:
            raise self._changed(f"the case {case.id!r} stands where another was", line)
        if case_fingerprint(case) != self.case_fingerprints[position]:
            raise self._changed(f"the case {case.id!r} is not what it was", line)

    def _changed(self, how: str, line: int | None = None) -> SuiteError:
        message = f"suite {self.suite.id!r} changed while it was being run: {how}"
        return SuiteError(message, path=self.suite.path, line=line)


def make_plan(
    suite: EvalSet,
    *,
    limit: int | None = None,
    match: str | None = None,
    trials: int = 1,
    scorers_digest: bytes = b"",
    check: Callable[[], None] | None = None,
) -> Plan:
    """Read the suite once and plan a run of it: the first `limit` cases whose id matches, `trials` times each.

    `check` is called every few thousand rows and may raise to give up.
    """
    _check_options(suite, limit, trials)
    rows = _Rows(scorers_digest, None if match is None else _selector(match))
    occurrences = Occurrences()
    read_all = True
    for index, (line, case) in enumerate(suite.numbered(occurrences)):
        if check is not None and index % CHECK_EVERY == 0:
            check()
        try:
            rows.add(case)
        except BadCase as error:
            raise suite.problem(f"{error} (case {case.id!r})", index, line) from error
        if rows.selected == limit:
            read_all = False
            break
    repeated = occurrences.repeated
    _refuse_nothing(suite, rows.read, rows.selected, match)
    return rows.planned(suite, trials, repeated, read_all)


class _Rows:
    """What the first pass keeps: every row's id digest, and the fingerprints of those that are selected."""

    def __init__(self, scorers_digest: bytes, selects: Selects | None) -> None:
        self.scorers_digest = scorers_digest
        self.selects = selects
        self.read = 0
        self.selected = 0
        self._digests = array("Q")
        self._kept = array("Q")
        self._seen = array("Q")
        self._graded = array("Q")

    def add(self, case: EvalCase) -> None:
        self._digests.append(id_digest(case.id))
        self.read += 1
        if self.selects is not None:
            if not self.selects(case.id):
                return
            self._kept.append(self.read - 1)
        self._seen.append(case_fingerprint(case))
        self.selected += 1
        if self.scorers_digest:
            self._graded.append(grading_fingerprint(self.scorers_digest, case))

    def planned(self, suite: EvalSet, trials: int, repeated: frozenset[int], read_all: bool) -> Plan:
        """The plan, after refusing two cases of one id."""
        digests = _as_numpy(self._digests)
        _refuse_duplicates(suite, digests, repeated)
        return Plan(
            suite=suite,
            trials=trials,
            indices=range(self.selected) if self.selects is None else self._kept,
            id_digests=digests if self.selects is None else digests[_as_numpy(self._kept)],
            case_fingerprints=_as_numpy(self._seen),
            grading_fingerprints=_as_numpy(self._graded) if self.scorers_digest else None,
            repeated=repeated,
            rows_read=self.read,
            read_all=read_all,
        )


def _check_options(suite: EvalSet, limit: int | None, trials: int) -> None:
    if limit is not None and limit < 1:
        raise ConfigurationError(f"limit must be >= 1, got {limit}")
    if trials < 1:
        raise ConfigurationError(f"trials must be >= 1, got {trials}")
    if suite.one_shot:
        raise ConfigurationError(
            f"suite {suite.id!r} is a one-shot iterator, and a plan reads its cases twice: spool() it first"
        )


def _selector(match: str) -> Selects:
    """A glob when it looks like one, else any part of the id."""
    if any(sign in match for sign in "*?["):
        return lambda case_id: fnmatchcase(case_id, match)
    return lambda case_id: match in case_id


def _refuse_nothing(suite: EvalSet, read: int, selected: int, match: str | None) -> None:
    if not read:
        raise SuiteError(f"suite {suite.id!r} has no cases", path=suite.path)
    if not selected:
        message = f"no case of suite {suite.id!r} has an id that matches {match!r}: none of its {read} does"
        raise SuiteError(message, path=suite.path)


def _refuse_duplicates(suite: EvalSet, digests: Digests, repeated: frozenset[int]) -> None:
    """Refuse two cases with one id; digests tell which are suspect, a second reading what they are called."""
    ordered = np.sort(digests)
    suspects = frozenset(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not suspects:
        return
    first: dict[int, tuple[str, int, int | None]] = {}
    for index, (line, case) in enumerate(suite.numbered(Occurrences(repeated))):
        digest = id_digest(case.id)
        if digest in first:
            raise _duplicate(suite, case.id, index, line, first[digest])
        if digest in suspects:
            first[digest] = (case.id, index, line)
    raise SuiteError(f"suite {suite.id!r} changed while it was being read", path=suite.path)


def _duplicate(
    suite: EvalSet, case_id: str, index: int, line: int | None, first: tuple[str, int, int | None]
) -> SuiteError:
    first_id, first_index, first_line = first
    earlier = f"case {first_index + 1}" if first_line is None else f"line {first_line}"
    if first_id != case_id:  # 1 in 36 million for a million cases; a run could not tell the two apart
        message = f"the ids {first_id!r} ({earlier}) and {case_id!r} have the same digest: rename one"
    elif line is None:
        message = f"the id {case_id!r} stands twice: {earlier} and case {index + 1}"
    else:
        message = f"the id {case_id!r} stands twice: {earlier} and line {line}"
    return suite.problem(message, index, line)


def _as_numpy(numbers: array[int]) -> Digests:
    return np.frombuffer(numbers, dtype=np.uint64)
