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
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.errors import ConfigurationError, SuiteError
from steelyard.records import EvalCase, Job, id_digest
from steelyard.suite.digests import Digests, Marks, Spelling
from steelyard.suite.evalset import EvalSet
from steelyard.suite.first_pass import FirstPass, Selects
from steelyard.suite.identity import as_hex, case_fingerprint
from steelyard.suite.occurrences import Occurrences

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
    marks: Marks

    @property
    def cases(self) -> int:
        """How many cases are asked."""
        return len(self.indices)

    @property
    def slots(self) -> int:
        """How many (case, trial) there are."""
        return self.cases * self.trials

    @property
    def is_open_ended(self) -> bool:
        """Whether the number of slots is only known at the end: something else than their number ends the run."""
        return False

    def slot_at(self, index: int, trial: int) -> int:
        """The slot of a planned case, by its place in the suite."""
        position = index if isinstance(self.indices, range) else bisect_left(self.indices, index)
        return position * self.trials + trial

    def index(self, slot: int) -> int:
        """The place in the suite of a slot's case."""
        return self.indices[slot // self.trials]

    def places(self, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The position and the trial of each slot."""
        positions, trials = np.divmod(slots, self.trials)
        return positions, trials

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

    def are_current(self, slots: npt.NDArray[np.int64], case_fps: list[str], scored_bys: list[str]) -> bool:
        """Whether these are the fingerprints of the slots' cases and of their grading; False in doubt."""
        positions, _ = self.places(slots)
        if not _same(case_fps, self.case_fingerprints[positions]):
            return False
        if self.grading_fingerprints is None:
            return not any(scored_bys)
        return _same(scored_bys, self.grading_fingerprints[positions])

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
        making = _Making(self, done)
        for rows, (line, case) in enumerate(self.suite.numbered(Occurrences(self.repeated), making.marks), 1):
            if rows > self.rows_read:
                break
            jobs: Sequence[Job] = ()
            if position < cases and indices[position] == rows - 1:
                jobs = making.jobs_of(position, case, line)
                position += 1
            if len(jobs) == 1:  # as mostly: cheaper than to go through them
                yield jobs[0]
            elif jobs:
                yield from jobs
            else:
                passed_over += 1
                if passed_over % _TURN_EVERY == 0:
                    yield None
            if position == cases and not self.read_all:
                return
        if position < self.cases or (self.read_all and rows != self.rows_read):
            raise self.changed(f"it had {self.rows_read} cases, now {'more' if rows > self.rows_read else rows}")

    def changed(self, how: str, line: int | None = None) -> SuiteError:
        """The error that ends a run whose suite is not what it was."""
        message = f"suite {self.suite.id!r} changed while it was being run: {how}"
        return SuiteError(message, path=self.suite.path, line=line)


class _Making:
    """Makes the jobs of a plan's cases as they are read for the second time."""

    def __init__(self, plan: Plan, done: bytearray | None) -> None:
        self.marks = Marks(plan.marks)
        self._plan = plan
        self._trials = plan.trials
        self._done = done
        self._settled = plan.suite.settled
        self._seen = Spelling(plan.case_fingerprints)
        self._graded = None if plan.grading_fingerprints is None else Spelling(plan.grading_fingerprints)

    def jobs_of(self, position: int, case: EvalCase, line: int | None) -> Sequence[Job]:
        """One job for each of the case's slots that are not done."""
        left: Sequence[int] = _ONE_TRIAL if self._trials == 1 else range(self._trials)
        if self._done is not None:
            first = position * self._trials
            if left is not _ONE_TRIAL:
                left = [trial for trial in left if not self._done[first + trial]]
            if not left or (left is _ONE_TRIAL and self._done[first]):
                return ()
        if not (self._settled or self.marks.same):
            self._check_same(position, case, line)
        index, case_fp = self._plan.indices[position], self._seen.at(position)
        scored_by = "" if self._graded is None else self._graded.at(position)
        if left is _ONE_TRIAL:
            return (Job(index, 0, case, case_fp, scored_by),)
        return [Job(index, trial, case, case_fp, scored_by) for trial in left]

    def _check_same(self, position: int, case: EvalCase, line: int | None) -> None:
        plan = self._plan
        if id_digest(case.id) != plan.id_digests[position]:
            raise plan.changed(f"the case {case.id!r} stands where another was", line)
        if case_fingerprint(case) != plan.case_fingerprints[position]:
            raise plan.changed(f"the case {case.id!r} is not what it was", line)


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
    first = FirstPass(suite, scorers_digest, None if match is None else _selector(match))
    read_all = first.read_until(limit, check)
    _refuse_nothing(suite, first.read, first.selected, match)
    id_digests, case_fingerprints, grading_fingerprints = first.numbers()
    return Plan(
        suite=suite,
        trials=trials,
        indices=first.indices,
        id_digests=id_digests,
        case_fingerprints=case_fingerprints,
        grading_fingerprints=grading_fingerprints,
        repeated=first.occurrences.repeated,
        rows_read=first.read,
        read_all=read_all,
        marks=first.marks,
    )


def _same(spelled: list[str], digests: Digests) -> bool:
    """Whether these are the digests, spelled out."""
    return "".join(spelled) == digests.astype(">u8").tobytes().hex() and set(map(len, spelled)) == {16}


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
