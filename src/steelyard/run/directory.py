"""A run directory held by this process: locked, recovered, written to, and closed with its metrics."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.errors import JournalError, RunMismatch, RunRefused
from steelyard.journal.answers import AnswerLog
from steelyard.journal.files import (
    CASES,
    DAMAGED,
    METRICS,
    OUTPUTS,
    PARTIAL,
    RunState,
    clear_drafts,
    create,
    disk_errors,
    enter,
    read_json_object,
    read_metrics,
    refuse_finished,
    write_json,
)
from steelyard.journal.index import IndexBuilder, pack_columns
from steelyard.journal.lock import RunLock
from steelyard.journal.manifest import Launch, Manifest, compare, now, read_manifest, refuse_sweep, write_manifest
from steelyard.journal.reader import RecordReader, mend_tail, salvage
from steelyard.journal.replay import DONE, Replay
from steelyard.journal.writer import JournalWriter
from steelyard.protocols import Tally
from steelyard.records import Job, Record, Score, id_digest
from steelyard.run.metrics import compose
from steelyard.run.plan import Plan
from steelyard.run.recorder import Recorder
from steelyard.run.result import about_run
from steelyard.run.send_policy import SendPolicy
from steelyard.stats.client_load import ClientLoad
from steelyard.stats.formatting import counted
from steelyard.stats.metrics import Metrics
from steelyard.stats.running import RunningStats
from steelyard.stats.scores import verdict
from steelyard.stats.trials import TrialStats
from steelyard.suite.evalset import EvalSet

log = logging.getLogger("steelyard")


class OpenMode(msgspec.Struct, frozen=True, kw_only=True):
    """What may be done with what is found in the directory."""

    force: bool = False
    retry_errors: bool = False
    salvage: bool = False


class RunDirectory:
    """A run directory that this process may write to, until it is closed."""

    def __init__(self, path: Path, entry: OpenMode) -> None:
        create(path)
        self.path = path
        self._entry = entry
        self._lock = RunLock(path)
        self._lock.acquire()
        self._writer: JournalWriter | None = None
        self._reader: RecordReader | None = None
        self._invoked: AnswerLog | None = None
        self._left_out = 0
        self._earlier: ClientLoad | None = None

    def enter(self, manifest: Manifest, suite: EvalSet) -> None:
        """Check that this run belongs here, and only then move aside what it replaces."""
        with disk_errors(self.path):
            clear_drafts(self.path)
            refuse_sweep(self.path)
            old = None if self._entry.force else read_manifest(self.path)
            if old is not None and (old.load is not None or manifest.load is not None):
                old = self._load_run_anew(old, manifest)
            if old is not None:
                if not self._entry.retry_errors:
                    refuse_finished(self.path)
                for difference in compare(self.path, old, manifest):
                    log.warning("%s: changed since the run began: %s", self.path, difference)
                manifest.created, manifest.launches = old.created, old.launches
            if not self._entry.force:
                self._earlier = _earlier_client(self.path)
            in_use = suite.path is not None and suite.path.absolute() == (self.path / CASES).absolute()
            self._state = enter(
                self.path,
                force=self._entry.force,
                retry_errors=self._entry.retry_errors,
                keep=CASES if in_use else None,
            )

    def _load_run_anew(self, old: Manifest, manifest: Manifest) -> Manifest | None:
        """An unfinished load run is measured from its beginning: half a measurement cannot be gone on with."""
        if self._entry.retry_errors:
            raise RunRefused(f"{self.path} is a load run: its errors are what it measured", path=self.path)
        refuse_finished(self.path)
        if old.load is None or manifest.load is None:
            there, now_asked = (
                ("a load run", "an evaluation") if old.load is not None else ("an evaluation", "a load run")
            )
            difference = f"{there} there, {now_asked} now"
            raise RunMismatch(
                f"{self.path} holds something else: {difference}\nuse another --out, or --force to start over there",
                path=self.path,
                differences=[difference],
            )
        log.warning("%s: the unfinished load run there is measured anew; what it had is kept in previous/", self.path)
        self._entry = msgspec.structs.replace(self._entry, force=True)
        return None

    def open(
        self,
        plan: Plan,
        manifest: Manifest,
        *,
        keep: bool,
        judged: bool,
        trials: TrialStats | None,
        check: Callable[[], None],
        watch: Callable[[Record, RunningStats], bool],
    ) -> Recorder:
        """Recover what is there and get ready to append; the ledger knows what is left to do."""
        with disk_errors(self.path):
            replay = self._recover(PlanSlots(plan), plan.slots, trials, check)
            self._reader = RecordReader(self.path / OUTPUTS)
            invocations = self._invocations(plan, replay) if judged else None
        assert self._writer is not None
        recorder = Recorder(
            plan, replay=replay, writer=self._writer, invocations=invocations, trials=trials, keep=keep, watch=watch
        )
        self._left_out = replay.left_out
        manifest.launches.append(Launch(started=now(), done_before=recorder.done_before))
        write_manifest(self.path, manifest)
        return recorder

    def _invocations(self, plan: Plan, replay: Replay) -> AnswerLog:
        """The answers and judgements of slots that were not finished, found again."""
        self._invoked = AnswerLog(self.path)

        def unfinished(case_id: str, trial: int) -> int | None:
            found = plan.slot_of(np.array([id_digest(case_id)], dtype=np.uint64), np.array([trial]))
            slot = int(found[0])
            return None if slot < 0 or replay.states[slot] == DONE else slot

        self._invoked.read(unfinished, plan.is_of_case)
        return self._invoked

    def _recover(self, slots: PlanSlots, count: int, trials: TrialStats | None, check: Callable[[], None]) -> Replay:
        """Mend and read the journal, build its index anew, and open both for more."""
        path = self.path / OUTPUTS
        index = IndexBuilder(self.path)
        try:
            replay = Replay(self.path, slots, bytearray(count), index.add)
            if trials is not None:
                replay.on_done = slots.into(trials)
            size = 0
            if self._state is RunState.INCOMPLETE and path.exists():
                self._mend(path)
                replay.read(check)
                size = path.stat().st_size
            indexing = index.finish(size)
        except BaseException:
            index.abandon()
            raise
        self._writer = JournalWriter(self.path, slots.make_rows, indexing=indexing)
        return replay

    def _mend(self, path: Path) -> None:
        if cut := mend_tail(path):
            log.warning("%s: cut off a torn last line of %s; its case is asked again", path, counted(cut, "byte"))
        if self._entry.salvage and (bad := salvage(self.path)):
            lines = counted(bad, "unreadable line")
            log.warning("%s: moved %s to %s; what was in there is asked again", path, lines, DAMAGED)

    def jobs(self, recorder: Recorder) -> Iterator[Job | None]:
        """The jobs that are left, stored responses attached where only the scores are missing."""
        return recorder.jobs(self._reader)

    def finish(
        self, manifest: Manifest, recorder: Recorder, tally: Tally, stopped: str | None, send_policy: SendPolicy
    ) -> Metrics:
        """Commit every record, then write metrics.json, or partial.json if anything is left to do."""
        self._close_journal()
        books = recorder.close(tally, stopped)
        send_policy.earlier = self._earlier
        metrics = compose(
            about=about_run(manifest, self.path),
            books=books,
            stats=recorder.stats,
            scores=recorder.scores,
            errors=recorder.errors,
            left_out=self._left_out,
            stopped=stopped,
            trials=recorder.trial_metrics(),
            spending=recorder.spending,
            sent=partial(send_policy.to_metrics, tally),
        )
        if books.complete:
            write_json(self.path / METRICS, metrics)
            with disk_errors(self.path):
                (self.path / PARTIAL).unlink(missing_ok=True)
        else:
            write_json(self.path / PARTIAL, metrics)
        return metrics

    def spool(self, suite: EvalSet, limit: int | None) -> EvalSet:
        """A one-shot suite's cases, written down first so that they can be read again."""
        with disk_errors(self.path):
            return suite.spool(self.path / CASES, limit)

    def close(self) -> None:
        """Commit what landed and let go of the directory; for every way out."""
        try:
            with contextlib.suppress(JournalError):  # a failing disk has already been reported by what met it first
                self._close_journal()
            if self._reader is not None:
                self._reader.close()
        finally:
            self._lock.release()

    def _close_journal(self) -> None:
        if self._invoked is not None:
            invoked, self._invoked = self._invoked, None
            invoked.close()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


def _earlier_client(run: Path) -> ClientLoad | None:
    """How busy the client was in the launches that the run's metrics tell of; None where they do not say."""
    metrics = read_metrics(run) or read_json_object(run / PARTIAL) or {}
    try:
        return msgspec.convert(metrics.get("client"), ClientLoad)
    except msgspec.ValidationError:
        return None


class PlanSlots:
    """A plan, as the journal's replay needs to see it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._filtered = not isinstance(plan.indices, range)
        self.same_case = plan.is_of_case
        self.all_current = plan.are_current

    def slot_of(
        self,
        id_digests: npt.NDArray[np.uint64],
        trials: npt.NDArray[np.int64],
        recorded: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """The slots; looked up where the cases stood then, which is where they stand in a suite that did not change."""
        plan = self._plan
        if not self._filtered:
            places = np.minimum(recorded, plan.cases - 1)
            if bool(np.all((plan.id_digests[places] == id_digests) & (trials < plan.trials))):
                return places * plan.trials + trials
        return plan.slot_of(id_digests, trials)

    def index(self, slot: int, recorded: int) -> int:  # noqa: ARG002 - the suite may have changed since
        return self._plan.index(slot)

    def needs_scoring(self, slot: int, scored_by: str, has_errors: bool) -> bool:
        return has_errors or not self._plan.is_scored_by(slot, scored_by)

    def into(self, trials: TrialStats) -> Callable[[int, list[Score]], None]:
        """What tells the trial statistics of a slot that is done."""

        def tell(slot: int, scores: list[Score]) -> None:
            position, trial = divmod(slot, self._plan.trials)
            trials.update(position, trial, verdict(scores), scores)

        return tell

    def make_rows(self, notes: npt.NDArray[np.int64]) -> bytes:
        """Rows of the index for records that were noted by their slots."""
        positions, trials = self._plan.places(notes[:, 2])
        indices = np.asarray(self._plan.indices)[positions] if self._filtered else positions
        ids, fingerprints = self._plan.id_digests[positions], self._plan.case_fingerprints[positions]
        return pack_columns(notes, ids, indices, trials, fingerprints)
