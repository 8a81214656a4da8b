"""The plan of a run: which cases, how many trials, and what each answer and its scores depend on.

Making it is the first pass over a suite: it finds every bad row before any call, and keeps about 32 bytes a case. The
cases themselves are read again when they are run.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.errors import ConfigurationError, SuiteError
from steelyard.journal.manifest import Manifest, now, versions
from steelyard.protocols import RepeatedJudge, Scorer, Session, Target
from steelyard.records import CaseLimits, EvalCase, Job, id_digest
from steelyard.run.options import RunOptions
from steelyard.run.result import Result
from steelyard.run.send_policy import load_of
from steelyard.stats.slices import KnownKeys
from steelyard.suite.evalset import EvalSet
from steelyard.suite.identity import (
    BadCase,
    DigestColumn,
    Digests,
    Marks,
    Occurrences,
    Spelling,
    as_hex,
    canonical,
    case_fingerprint,
    graded,
    grading_prefix,
    seen,
)
from steelyard.suite.selection import FailedCases, Selection, parse_condition

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
    seen_besides: SeenBesides | None = None
    groups: Digests | None = None
    """A digest of each case's group, 0 for a case without one; None where no case has one."""
    limits: frozenset[str] = frozenset()
    """The limits that cases set for themselves."""

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

        None, now and then, while many cases are skipped: the caller has other tasks to run as well.
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
            if len(jobs) == 1:  # most cases: cheaper than a loop
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
            raise plan.changed(f"the case {case.id!r} is where another was", line)
        more = b"" if plan.seen_besides is None else plan.seen_besides(case)
        if case_fingerprint(case, more) != plan.case_fingerprints[position]:
            raise plan.changed(f"the case {case.id!r} is not what it was", line)


def make_plan(
    suite: EvalSet,
    *,
    limit: int | None = None,
    match: str | None = None,
    selection: Selection | None = None,
    by: Sequence[str] = (),
    trials: int = 1,
    scorers_digest: bytes = b"",
    check: Callable[[], None] | None = None,
    seen_besides: SeenBesides | None = None,
) -> Plan:
    """Read the suite once and plan a run of it: the first `limit` cases whose id matches, `trials` times each.

    Of these only the ones that the `selection` takes. A key in `by` that no case has in its metadata is refused.
    `check` is called every few thousand rows and may raise to give up.
    """
    _check_options(suite, limit, trials)
    selection = selection or Selection()
    first = FirstPass(suite, scorers_digest, _selector(match, selection), seen_besides, KnownKeys(by))
    known = KnownKeys(condition.key for condition in selection.where)
    if selection.where:
        first.look_at_all(known)
    read_all = first.read_until(limit, check)
    known.refuse_missing("where", f"suite {suite.id!r}")
    _refuse_nothing(suite, first.read, first.selected, match, selection)
    first.known.refuse_missing("by", f"suite {suite.id!r}")
    id_digests, case_fingerprints, grading_fingerprints = first.numbers()
    plan = Plan(
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
        seen_besides=seen_besides,
        groups=first.groups,
        limits=frozenset(first.limits),
    )
    drawn = selection.drawn(id_digests)
    return plan if drawn is None else _only(plan, drawn)


def _only(plan: Plan, positions: npt.NDArray[np.int64]) -> Plan:
    """The plan of some of its cases."""
    graded, groups = plan.grading_fingerprints, plan.groups
    return msgspec.structs.replace(
        plan,
        indices=array("Q", np.asarray(plan.indices)[positions].astype(np.uint64).tobytes()),
        id_digests=plan.id_digests[positions],
        case_fingerprints=plan.case_fingerprints[positions],
        grading_fingerprints=None if graded is None else graded[positions],
        groups=None if groups is None else groups[positions],
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


def _selector(match: str | None, selection: Selection) -> Selects | None:
    """Whether a case is taken, by its id and its metadata; None where all are."""
    if match is None:
        return None if selection.takes_all else selection.takes
    # A glob when it looks like one, else any part of the id.
    is_glob = any(sign in match for sign in "*?[")
    return lambda case: (fnmatchcase(case.id, match) if is_glob else match in case.id) and selection.takes(case)


def _refuse_nothing(suite: EvalSet, read: int, selected: int, match: str | None, selection: Selection) -> None:
    if not read:
        raise SuiteError(f"suite {suite.id!r} has no cases", path=suite.path)
    if not selected and not selection.takes_all:
        wanted = [f"has {condition.text}" for condition in selection.where]
        wanted += [] if match is None else [f"has an id that matches {match!r}"]
        wanted += [] if selection.failed is None else [f"failed in {selection.failed.run}"]
        message = f"no case of suite {suite.id!r} {' and '.join(wanted)}: none of its {read}"
        raise SuiteError(message, path=suite.path)
    if not selected:
        message = f"no case of suite {suite.id!r} has an id that matches {match!r}: none of its {read} does"
        raise SuiteError(message, path=suite.path)


def failed_cases(run: str | Path) -> FailedCases:
    """The cases of a run that failed or ended in an error, in any trial; ConfigurationError where none did."""
    digests = frozenset(id_digest(record.id) for record in Result.load(run).iter_failures())
    if not digests:
        raise ConfigurationError(f"failed_in: no case of {run} failed or ended in an error")
    return FailedCases(str(run), digests)


Selects: TypeAlias = Callable[[EvalCase], bool]
SeenBesides: TypeAlias = Callable[[EvalCase], bytes]
"""What a target sees of a case besides the case itself: a digest of its workspace's content."""

CHECK_EVERY = 4096  # rows


class FirstPass:
    """What a first reading keeps: every row's id digest, and the fingerprints of those that are selected."""

    def __init__(
        self,
        suite: EvalSet,
        scorers_digest: bytes,
        selects: Selects | None,
        seen_besides: SeenBesides | None = None,
        known: KnownKeys | None = None,
    ) -> None:
        self.known = known or KnownKeys(())
        self._all: KnownKeys | None = None
        self._suite = suite
        self._seen_besides = seen_besides
        self.limits: set[str] = set()
        self._selects = selects
        self.occurrences = Occurrences()
        self.marks = Marks()
        self.read = 0
        self.selected = 0
        self._ids = DigestColumn()
        self._kept = array("Q")
        self._seen = DigestColumn()
        self._graded = DigestColumn(grading_prefix(scorers_digest)) if scorers_digest else None
        self._groups = array("Q")

    def read_until(self, limit: int | None, check: Callable[[], None] | None) -> bool:
        """Read the suite until `limit` cases are selected; whether that was all of it."""
        for index, (line, case) in enumerate(self._suite.numbered(self.occurrences, self.marks)):
            if check is not None and index % CHECK_EVERY == 0:
                check()
            try:
                self._add(case)
            except BadCase as error:
                raise self._suite.problem(f"{error} (case {case.id!r})", index, line) from error
            if self.selected == limit:
                return False
        return True

    def look_at_all(self, known: KnownKeys) -> None:
        """Show the metadata of every case, selected or not, to this as well."""
        self._all = known

    def _add(self, case: EvalCase) -> None:
        self._ids.add(case.id.encode())
        self.read += 1
        if self._selects is not None:
            if self._all is not None:
                self._all.add(case.metadata)
            if not self._selects(case):
                return
            self._kept.append(self.read - 1)
        self.known.add(case.metadata)
        if case.limits is not None:
            self.limits.update(case.limits.names)
        self._seen.add(seen(case) if self._seen_besides is None else seen(case) + self._seen_besides(case))
        self.selected += 1
        if case.group or self._groups:
            # Only a suite that has groups pays for them.
            self._groups.frombytes(bytes(8 * (self.selected - 1 - len(self._groups))))
            self._groups.append(id_digest(case.group) if case.group else 0)
        if self._graded is not None:
            self._graded.add(graded(case))

    def numbers(self) -> tuple[Digests, Digests, Digests | None]:
        """Of the selected rows: their ids' digests, and the fingerprints of what is asked and of how it is graded.

        Refuses two cases of one id, selected or not. The columns give up their memory: this can be asked for once.
        """
        ids = self._ids.numbers()
        _refuse_duplicates(self._suite, ids, self.occurrences.repeated)
        kept = ids if self._selects is None else ids[np.asarray(self._kept)]
        return kept, self._seen.numbers(), None if self._graded is None else self._graded.numbers()

    @property
    def groups(self) -> Digests | None:
        """The digest of each selected row's group; None where no row has one."""
        return np.array(self._groups, dtype=np.uint64) if self._groups else None

    @property
    def indices(self) -> range | array[int]:
        """The selected rows' places in the suite."""
        return range(self.selected) if self._selects is None else self._kept


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
        message = f"the id {case_id!r} is duplicated: {earlier} and case {index + 1}"
    else:
        message = f"the id {case_id!r} is duplicated: {earlier} and line {line}"
    return suite.problem(message, index, line)


_MAX_KEPT = 10_000
"""Cases kept in memory between rounds; of a larger suite they are read again each time."""


class CyclingPlan(Plan, kw_only=True, dict=True, eq=False):
    """Slots in the order of sending, `round * cases + position`; a record's trial is the round it was sent in.

    Without a number of `requests` there are as many slots as jobs were handed out.
    """

    requests: int | None
    duration: float | None
    clock: Callable[[], float] = time.monotonic
    handed_out: int = 0

    @property
    def slots(self) -> int:
        """How many requests are planned; of a run without a number, those handed out so far."""
        return self.requests if self.requests is not None and not self.is_open_ended else self.handed_out

    @property
    def is_open_ended(self) -> bool:
        """Whether a time ends it, or its schedule, and not a number of requests."""
        return self.requests is None or self.duration is not None

    def slot_at(self, index: int, trial: int) -> int:
        """The slot of a case in one of the rounds."""
        return trial * self.cases + super().slot_at(index, 0)

    def index(self, slot: int) -> int:
        """The place in the suite of a slot's case."""
        return super().index(slot % self.cases)

    def places(self, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The position and the round of each slot."""
        rounds, positions = np.divmod(slots, self.cases)
        return positions, rounds

    def slot_of(self, id_digests: npt.NDArray[np.uint64], trials: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The slot of each (id digest, round); -1 where the case is not planned."""
        positions = super().slot_of(id_digests, np.zeros_like(trials))
        return np.where(positions < 0, -1, trials.astype(np.int64) * self.cases + positions)

    def jobs(self, done: bytearray | None = None) -> Iterator[Job | None]:  # noqa: ARG002 - nothing is done before
        """Jobs without end, or until all requests were handed out or the time since the first is up."""
        ends = None if self.duration is None else self.clock() + self.duration
        for number in itertools.count():
            for job in self._round():
                if self.handed_out == self.requests or (ends is not None and self.clock() >= ends):
                    return
                if job is None:
                    yield None
                    continue
                self.handed_out += 1
                yield msgspec.structs.replace(job, trial=number)

    def _round(self) -> Iterable[Job | None]:
        if self.cases > _MAX_KEPT:
            return super().jobs()
        kept: list[Job | None] | None = self.__dict__.get("_kept")
        if kept is None:
            kept = self.__dict__["_kept"] = [job for job in super().jobs() if job is not None]
        return kept


def cycling(plan: Plan, *, requests: int | None, duration: float | None) -> CyclingPlan:
    """The same cases as in this plan, sent round and round."""
    facts = {name: getattr(plan, name) for name in Plan.__struct_fields__}
    return CyclingPlan(**{**facts, "trials": 1}, requests=requests, duration=duration)


def read_session(path: str | Path) -> Session:
    """The session in a JSON file: an object with `data`, an object, and `messages`, a list of objects."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Session)
    except OSError as error:
        raise ConfigurationError(f"initial session {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"initial session {path}: {error}") from error


def plan_of(
    suite: EvalSet,
    scorers: Sequence[Scorer],
    options: RunOptions,
    check: Callable[[], None] | None = None,
    seen_besides: SeenBesides | None = None,
) -> Plan:
    """Which cases a run is of; reads the suite once, so that a bad one is refused before anything is called."""
    digest = b""
    if scorers:
        asked: list[object] = [scorer.identity() for scorer in scorers]
        if options.num_runs > 1 and any(isinstance(scorer, RepeatedJudge) for scorer in scorers):
            asked.append({"num_runs": options.num_runs})
        digest = hashlib.sha256(canonical(asked)).digest()
    plan = make_plan(
        suite,
        limit=options.limit,
        match=options.match,
        selection=Selection(
            where=tuple(map(parse_condition, options.where)),
            failed=None if options.failed_in is None else failed_cases(options.failed_in),
            sample=options.sample,
            seed=options.seed,
        ),
        by=options.by,
        trials=options.trials,
        scorers_digest=digest,
        check=check,
        seen_besides=seen_besides,
    )
    if not options.is_load:
        return plan
    if options.arrivals is None:
        return cycling(plan, requests=options.requests, duration=options.duration)
    # In open loop the schedule knows when to stop; with a time there are as many slots as it had moments for. Without
    # a number or a time it sends each case once.
    requests = None if options.duration is not None else options.requests or plan.cases
    return cycling(plan, requests=requests, duration=None)


def manifest_of(
    target: Target,
    suite: EvalSet,
    scorers: Sequence[Scorer],
    options: RunOptions,
    *,
    planned: int = 0,
    session: Session | None = None,
    suite_file: str | None = None,
    scored_from: str | None = None,
    case_limits: CaseLimits | None = None,
) -> Manifest:
    """Return what run.json says about a run that is about to begin."""
    identity = dict(target.identity())
    if case_limits is not None:  # answers within other limits may be others: a resumed run warns
        identity["~case_limits"] = msgspec.to_builtins(case_limits)
    if session is not None:  # another session, another answer: it belongs to the target's identity
        identity["initial_session"] = hashlib.sha256(canonical(session)).hexdigest()[:16]
    return Manifest(
        suite=suite.id,
        target=identity,
        model_id=target.model_id,
        seed=options.seed,
        suite_file=suite_file,
        scored_from=scored_from,
        planned=planned,
        load=load_of(options),
        scorers=[dict(scorer.identity()) for scorer in scorers],
        options=options.for_manifest(),
        versions=versions(),
        created=now(),
    )
