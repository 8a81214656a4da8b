"""A run directory held by this process: locked, recovered, and written to until its metrics are there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.errors import ConfigurationError, JournalError, RunMismatch, RunRefused
from steelyard.journal.answers import AnswerLog
from steelyard.journal.files import (
    CASES,
    DAMAGED,
    METRICS,
    OUTPUTS,
    PARTIAL,
    PROCESSES,
    RunState,
    clear_drafts,
    create,
    disk_errors,
    enter,
    read_json_object,
    read_metrics,
    refuse_finished,
    reopen,
    run_state,
    write_json,
)
from steelyard.journal.index import IndexBuilder, pack_columns
from steelyard.journal.lock import RunLock
from steelyard.journal.manifest import (
    Launch,
    Manifest,
    compare,
    metrics_lines,
    now,
    read_manifest,
    refuse_matrix,
    refuse_sweep,
    write_manifest,
)
from steelyard.journal.reader import Entry, RecordReader, ends_whole, repair_tail, rewrite
from steelyard.journal.replay import Replay, SlotState
from steelyard.journal.writer import JournalWriter
from steelyard.records import id_digest, verdict
from steelyard.run.plan import Plan
from steelyard.run.recorder import OpenJournal, Recorder
from steelyard.run.stop_rules import DecidedStop
from steelyard.stats.client_load import ClientLoad
from steelyard.stats.formatting import counted
from steelyard.stats.metrics import Metrics
from steelyard.stats.trials import TrialStats
from steelyard.subprocesses import ProcessLog
from steelyard.suite.evalset import EvalSet

log = logging.getLogger("steelyard")


IfComplete = Literal["error", "load", "update", "new"]
"""What to do about a complete run: refuse it, return it, continue it with what changed since, or start over."""


class OpenMode(msgspec.Struct, frozen=True, kw_only=True):
    """What may be done with a run that is already in the directory."""

    force: bool = False
    retry_errors: bool = False
    salvage: bool = False
    accept_edits: bool = False
    if_complete: IfComplete = "error"


class RunDirectory:
    """A run directory that this process holds the lock of, until it is closed.

    `prepare` checks what is there, `open` recovers its journal, `begin_launch` writes run.json; `commit` and
    `write_metrics` end the launch.
    """

    def __init__(self, path: Path, mode: OpenMode) -> None:
        if mode.if_complete not in get_args(IfComplete):
            known = ", ".join(map(repr, get_args(IfComplete)))
            raise ConfigurationError(f"if_complete must be one of {known}, got {mode.if_complete!r}")
        create(path)
        self.path = path
        self._mode = mode
        self._lock = RunLock(path)
        self._lock.acquire()
        self._writer: JournalWriter | None = None
        self._reader: RecordReader | None = None
        self._answers: AnswerLog | None = None
        self._earlier_load: ClientLoad | None = None
        self._old: Manifest | None = None
        self._to_reopen = False
        """Whether the run here is complete, and is to be continued if anything in it is to be done."""
        self.to_load = False
        """Whether the run here is complete, and its result is all that is asked for."""
        self.programs = ProcessLog(path.absolute() / PROCESSES)
        """The programs that this run's targets start."""
        self._end_leftovers()

    def _end_leftovers(self) -> None:
        """End programs of earlier launches: they would go on spending beside those of this one."""
        if left := self.programs.end_leftovers():
            pids = ", ".join(map(str, left))
            log.warning("%s: ended %s of an earlier launch: %s", self.path, counted(len(left), "program"), pids)

    @property
    def earlier_client_load(self) -> ClientLoad | None:
        """How busy the client was in earlier launches, as far as that is known."""
        return self._earlier_load

    def prepare(self, manifest: Manifest, suite: EvalSet) -> Manifest:
        """Check that this run belongs here, and only then move aside what it replaces.

        Returns the manifest, with the launches of the run that is resumed.
        """
        with disk_errors(self.path):
            clear_drafts(self.path)
            refuse_sweep(self.path)
            refuse_matrix(self.path)
            complete = run_state(self.path) is RunState.COMPLETE
            if complete and self._mode.if_complete == "new":
                self._mode = msgspec.structs.replace(self._mode, force=True)
            old = None if self._mode.force else read_manifest(self.path)
            reopens = self._mode.retry_errors or (complete and self._mode.if_complete in ("update", "load"))
            if old is not None and (old.load is not None or manifest.load is not None):
                old = self._restart_load_run(old, manifest)
            if old is not None:
                differences = compare(self.path, old, manifest)
                if not reopens:
                    refuse_finished(self.path)
                for difference in differences:
                    log.warning("%s: changed since the run began: %s", self.path, difference)
                manifest = msgspec.structs.replace(
                    manifest, created=old.created, launches=old.launches, fields_left_out=old.fields_left_out
                )
            if not self._mode.force:
                self._earlier_load = _earlier_client(self.path)
            self._old = old
            if complete and not self._mode.force and self._mode.if_complete == "load":
                self.to_load = True
                return manifest
            if complete and not self._mode.force and self._mode.if_complete == "update":
                self._to_reopen = True
                self._state = RunState.INCOMPLETE
                return manifest
            in_use = suite.path is not None and suite.path.absolute() == (self.path / CASES).absolute()
            self._state = enter(
                self.path,
                force=self._mode.force,
                retry_errors=self._mode.retry_errors,
                keep=CASES if in_use else None,
            )
        return manifest

    def _restart_load_run(self, old: Manifest, manifest: Manifest) -> Manifest | None:
        """Start an unfinished load run over: half a measurement cannot be continued."""
        if self._mode.retry_errors or self._mode.if_complete == "update":
            raise RunRefused(f"{self.path} is a load run: its errors are what it measured", path=self.path)
        if old.load is None or manifest.load is None:
            there, here = ("a load run", "an evaluation") if old.load is not None else ("an evaluation", "a load run")
            difference = f"{there} there, {here} now"
            raise RunMismatch(
                f"{self.path} holds something else: {difference}\n",
                "use {out}, or {force} to start over there",
                path=self.path,
                differences=[difference],
            )
        if run_state(self.path) is RunState.COMPLETE:
            return old
        compare(self.path, old, manifest)
        log.warning("%s: measuring the unfinished load run again; its files are kept in previous/", self.path)
        self._mode = msgspec.structs.replace(self._mode, force=True)
        return None

    def open(
        self, plan: Plan, *, trials: TrialStats | None, check: Callable[[], None], decided: DecidedStop | None = None
    ) -> OpenJournal:
        """Recover what is there and get ready to append; `check` is called now and then and may raise to give up."""
        with disk_errors(self.path):
            slots = PlanSlots(plan)
            replay = self._recover(slots, plan.slots, slots.into(trials, decided), check)
            self._reader = RecordReader(self.path / OUTPUTS)
            self._answers = answers = self._open_answers(plan, replay)
        assert self._writer is not None
        return OpenJournal(replay, self._writer, self._reader, answers)

    def is_up_to_date(self, manifest: Manifest, recorder: Recorder) -> bool:
        """Whether a complete run that is to be updated has nothing to be asked, scored or counted otherwise."""
        old = self._old
        if not self._to_reopen or old is None or recorder.done_before != manifest.planned:
            return False
        known = metrics_lines(self.path)
        lines = recorder.lines
        same_lines = known is not None and (known.total, known.left_out) == (lines.total, lines.left_out)
        return (
            same_lines
            and (old.planned, old.calibrations) == (manifest.planned, manifest.calibrations)
            and set(old.options.get("by") or ()) == set(manifest.options.get("by") or ())
            and old.run_metrics == msgspec.to_builtins(manifest.run_metrics)
        )

    def _reopen(self) -> None:
        if self._to_reopen:
            self._to_reopen = False
            reopen(self.path)

    def begin_launch(self, manifest: Manifest, done_before: int, left_out: str) -> None:
        """Write run.json with one more launch; `left_out` are the lines that do not belong to the run any more."""
        with disk_errors(self.path):
            self._reopen()
        launches = [*manifest.launches, Launch(started=now(), done_before=done_before, left_out=left_out)]
        write_manifest(self.path, msgspec.structs.replace(manifest, launches=launches))

    def _open_answers(self, plan: Plan, replay: Replay) -> AnswerLog:
        """Open answers.jsonl, and find in it what belongs to slots that are not finished."""
        answers = AnswerLog(self.path)

        def unfinished(case_id: str, trial: int) -> int | None:
            found = plan.slot_of(np.array([id_digest(case_id)], dtype=np.uint64), np.array([trial]))
            slot = int(found[0])
            return None if slot < 0 or replay.states[slot] == SlotState.DONE else slot

        answers.read(unfinished, plan.is_of_case)
        return answers

    def _recover(self, slots: PlanSlots, count: int, on_done: OnDone | None, check: Callable[[], None]) -> Replay:
        """Repair and read the journal, rebuild its index, and open both for more."""
        path = self.path / OUTPUTS
        index = IndexBuilder(self.path)
        try:
            replay = Replay(self.path, slots, bytearray(count), index.add, on_done)
            if self._state is RunState.INCOMPLETE and path.exists():
                self._repair(path)
                replay.read(check)
            indexing = index.finish()
        except BaseException:
            index.abandon()
            raise
        self._writer = JournalWriter(self.path, slots.make_rows, indexing=indexing)
        return replay

    def _repair(self, path: Path) -> None:
        if self._to_reopen and not ends_whole(path):
            self._reopen()
        if cut := repair_tail(path):
            log.warning("%s: cut off a torn last line of %s; its case will be retried", path, counted(cut, "byte"))
        if not (self._mode.salvage or self._mode.accept_edits):
            return
        found = rewrite(
            self.path, salvage=self._mode.salvage, accept_edits=self._mode.accept_edits, before=self._forget_lines
        )
        if found.moved:
            lines = counted(found.moved, "line")
            log.warning("%s: moved %s to %s; their cases will be retried", path, lines, DAMAGED)
        if found.restored:
            lines = counted(found.restored, "line")
            log.warning("%s: restored %s with a flipped bit; as found in %s", path, lines, DAMAGED)
        if found.accepted:
            log.warning("%s: accepted %s", path, counted(found.accepted, "edited line"))

    def _forget_lines(self) -> None:
        """Take back what run.json says of lines by their numbers, which are about to change."""
        self._reopen()
        manifest = read_manifest(self.path)
        if manifest is not None and manifest.launches and manifest.launches[-1].left_out:
            launch = msgspec.structs.replace(manifest.launches[-1], left_out="")
            launches = [*manifest.launches[:-1], launch]
            write_manifest(self.path, msgspec.structs.replace(manifest, launches=launches))

    def commit(self) -> None:
        """Close the journal: every record is on the disk when this returns."""
        if self._answers is not None:
            answers, self._answers = self._answers, None
            answers.close()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _note_left_out(self, fields: list[str]) -> None:
        """Note in run.json which fields the endpoint refused to take back."""
        manifest = read_manifest(self.path) if fields else None
        if manifest is not None and set(fields).difference(manifest.fields_left_out):
            every = sorted({*manifest.fields_left_out, *fields})
            write_manifest(self.path, msgspec.structs.replace(manifest, fields_left_out=every))

    def write_metrics(self, metrics: Metrics) -> None:
        """Write metrics.json, or partial.json if the run is not complete. The journal must be committed before."""
        self._note_left_out(metrics.fields_left_out)
        if metrics.complete:
            write_json(self.path / METRICS, metrics)
            with disk_errors(self.path):
                (self.path / PARTIAL).unlink(missing_ok=True)
        else:
            write_json(self.path / PARTIAL, metrics)

    def spool(self, suite: EvalSet, limit: int | None) -> EvalSet:
        """Write the cases of a one-shot suite to cases.jsonl, so that they can be read again."""
        with disk_errors(self.path):
            return suite.spool(self.path / CASES, limit)

    def close(self) -> None:
        """Commit what was recorded and release the directory; for every way out."""
        try:
            with contextlib.suppress(JournalError):  # a failing disk was already reported when it first failed
                self.commit()
            if self._reader is not None:
                self._reader.close()
            self.programs.remove_if_all_ended()
        finally:
            self._lock.release()


def _earlier_client(run: Path) -> ClientLoad | None:
    """Read how busy the client was in earlier launches from the metrics; None where they do not say."""
    metrics = read_metrics(run) or read_json_object(run / PARTIAL) or {}
    try:
        return msgspec.convert(metrics.get("client"), ClientLoad)
    except msgspec.ValidationError:
        return None


OnDone: TypeAlias = Callable[[int, Entry], None]


class PlanSlots:
    """Adapts a plan to what the journal's replay asks of it."""

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
        """Return the slots; tries the recorded positions first, which are right when the suite did not change."""
        plan = self._plan
        if not self._filtered:
            places = np.minimum(recorded, plan.cases - 1)
            if bool(np.all((plan.id_digests[places] == id_digests) & (trials < plan.trials))):
                return places * plan.trials + trials
        return plan.slot_of(id_digests, trials)

    def needs_scoring(self, slot: int, scored_by: str, has_errors: bool) -> bool:
        return has_errors or not self._plan.is_scored_by(slot, scored_by)

    def into(self, trials: TrialStats | None, decided: DecidedStop | None) -> OnDone | None:
        """Return a callback that adds a finished slot to the trial statistics and to the rules that stop the run."""
        if trials is None and decided is None:
            return None

        def add(slot: int, entry: Entry) -> None:
            passed = verdict(entry.scores)
            if trials is not None:
                position, trial = divmod(slot, self._plan.trials)
                trials.update(position, trial, passed, entry.scores)
            if decided is not None:
                decided.take(slot, True, passed)

        return add

    def make_rows(self, notes: npt.NDArray[np.int64]) -> bytes:
        """Make rows of the index for records that were noted by their slots."""
        positions, trials = self._plan.places(notes[:, 2])
        indices = np.asarray(self._plan.indices)[positions] if self._filtered else positions
        ids, fingerprints = self._plan.id_digests[positions], self._plan.case_fingerprints[positions]
        return pack_columns(notes, ids, indices, trials, fingerprints)
