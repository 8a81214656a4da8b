"""The books of one launch: each record is journalled first and counted after."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np

from steelyard.errors import CountsError
from steelyard.journal.answers import AnswerLog, JudgeCall
from steelyard.journal.index import ERROR
from steelyard.journal.index import UNSCORED as UNSCORED_ANSWER
from steelyard.journal.reader import RecordReader
from steelyard.journal.replay import DONE, ERRORED, PENDING, UNSCORED, Replay
from steelyard.journal.writer import JournalWriter, encode_record
from steelyard.protocols import Tally
from steelyard.records import Job, Record, StoredSample, UnscoredAnswer
from steelyard.run.metrics import Errors, RunCounts
from steelyard.run.plan import Plan
from steelyard.stats.costs import Spending
from steelyard.stats.formatting import counted, safe_text
from steelyard.stats.metrics import TrialMetrics
from steelyard.stats.running import RunningStats
from steelyard.stats.scores import ScoreStats, is_scoring_error, verdict
from steelyard.stats.trials import TrialStats

log = logging.getLogger("steelyard")

_LONGEST_REASON = 200
_FAILED = 4
"""The state of a slot that ended as an error in this launch; the others are the replay's."""

_STARTED = 0x80
"""Set in a slot's state from when its job is handed out until its record lands."""


class Recorder:
    """Progress of one run: writes each record to disk, then updates the counters.

    `watch` is called with each record whose answer was requested in this launch and with the statistics so far, until
    it returns False. With `keep` the records stay in memory too.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        replay: Replay | None,
        writer: JournalWriter | None,
        keep: bool,
        invocations: AnswerLog | None = None,
        trials: TrialStats | None = None,
        watch: Callable[[Record, RunningStats], bool] | None = None,
    ) -> None:
        self._plan = plan
        # Mostly a slot is its case's place in the suite, and asking the plan would take longer than to know that.
        self._is_direct = type(plan) is Plan and plan.trials == 1 and isinstance(plan.indices, range)
        self._writer = writer
        self._replay = replay
        self._invocations = invocations
        self._trials = trials
        self._states = replay.states if replay is not None else bytearray(plan.slots)
        self._earlier = replay.run_time if replay is not None else 0.0
        self._began = time.monotonic()
        self._emitted = 0
        self._closed = False
        self.stats = replay.stats if replay is not None else RunningStats()
        self.scores = replay.scores if replay is not None else ScoreStats()
        self.spending = replay.spending if replay is not None else Spending()
        if invocations is not None:
            self.spending.merge(invocations.spending)
        self.errors = Errors()
        self.kept: list[Record] | None = [] if keep else None
        self.done_before = self._count(DONE)
        self.resumed = any(self._states)
        self._watch = watch
        self._broken_down: set[str] = set()
        """The scorers of which that was said."""
        self._only_scored: set[int] = set()
        """The slots of the jobs under way that need no answer; kept only while records are watched."""

    def begin(self) -> None:
        """Count the time of this launch from now on."""
        self._began = time.monotonic()

    @property
    def active_seconds(self) -> float:
        """How long the run has been active, this launch and those before it."""
        return self._earlier + time.monotonic() - self._began

    @property
    def done(self) -> int:
        """How many slots have a record that needs no more work in this launch."""
        return self.done_before + self._emitted

    def so_far(self) -> str:
        """What earlier launches have left, in words."""
        parts = [f"{self.done_before:,} of {self._plan.slots:,} done"]
        if again := self._count(ERRORED):
            parts.append(f"{counted(again, 'error')} to ask again")
        if stored := self._count(UNSCORED):
            parts.append(f"{counted(stored, 'stored answer')} to score again")
        return ", ".join(parts)

    def jobs(self, reader: RecordReader | None) -> Iterator[Job | None]:
        """The jobs that are left, in suite order, read as workers ask for them; None means: not yet, ask again."""
        states, slot_at, is_direct = self._states, self._plan.slot_at, self._is_direct
        done = bytearray((np.frombuffer(states, dtype=np.uint8) == DONE).tobytes())
        for job in self._plan.jobs(done):
            if job is None:
                yield None
                continue
            slot = job.index if is_direct else slot_at(job.index, job.trial)
            if slot == len(states):  # a load run goes on as long as it goes on
                states.append(PENDING)
            if states[slot] == UNSCORED:
                job.stored = self._stored(slot, reader)
            if self._invocations is not None:
                job.stored = job.stored or self._invocations.answer(slot)
                job.samples = self._invocations.samples(slot)
            if job.stored is not None and self._watch is not None:
                self._only_scored.add(slot)
            states[slot] |= _STARTED
            yield job

    def _stored(self, slot: int, reader: RecordReader | None) -> Record:
        """The record whose response is to be scored again."""
        assert self._replay is not None
        assert reader is not None
        return reader.at(self._replay.stored_at(slot))

    def emit(self, record: Record | UnscoredAnswer | StoredSample) -> None:
        """Take in one record: to the kernel, then into the counts. What comes before it only goes to the kernel."""
        if not isinstance(record, Record):
            if self._invocations is not None:
                self._invocations.append(record)
            return
        record.run_time = self._earlier + time.monotonic() - self._began
        ok = record.status == "ok"
        scores = record.scores
        slot = record.index if self._is_direct else self._plan.slot_at(record.index, record.trial)
        said = verdict(scores) if ok and scores else None
        if self._writer is not None:
            line = encode_record(record)
            self._writer.note((self._writer.append(line), len(line), slot, _as_noted(ok, said)))
        before = self._states[slot]
        if before != UNSCORED | _STARTED:  # a stored response was counted when it was replayed
            self.stats.update(record)
            self.spending.update(record)
        if ok:
            self.scores.take(scores, said)
            if said is None and scores:
                self._tell_of_breakdowns(record)
        else:
            self.scores.update(scores, failed=True)
            self.errors.add(record)
        if self._trials is not None:
            position, trial = divmod(slot, self._plan.trials)
            self._trials.update(position, trial, said, scores)
        self._states[slot] = DONE if ok else _FAILED
        self._emitted += 1
        if before == ERRORED | _STARTED and self._replay is not None:
            self._replay.forget_error(slot)
        if self.kept is not None:
            self.kept.append(record)
        if slot in self._only_scored:
            self._only_scored.remove(slot)
        elif self._watch is not None and not self._watch(record, self.stats):
            self._watch = None

    def _tell_of_breakdowns(self, record: Record) -> None:
        """Say, once for each scorer, that it could not score: a run in which none can should not go on unnoticed."""
        for score in record.scores:
            if is_scoring_error(score) and score.name not in self._broken_down:
                self._broken_down.add(score.name)
                why = safe_text(score.errors[0])[:_LONGEST_REASON]
                log.warning("%s could not score %s, and maybe others: %s", score.name, safe_text(record.id), why)

    def judged(self, cost: float | None) -> None:
        """Count what one call of a judge has cost; written down at once, as it belongs to no record."""
        self.spending.update_judge(cost)
        if self._invocations is not None and cost is not None:
            self._invocations.append(JudgeCall(cost))

    def close(self, tally: Tally, stopped: str | None = None) -> RunCounts:
        """Settle every slot, counting what earlier launches left behind; the books as they stand.

        `stopped` is what ended the run before its time, if anything did.
        """
        if self._closed:
            raise CountsError("the books were closed twice")
        self._closed = True
        if self._emitted != tally.finished or tally.started != tally.finished + tally.cancelled:
            raise CountsError(f"{self._emitted} records for {tally}")
        earlier_errors = self._count(ERRORED) + self._count(ERRORED | _STARTED)
        earlier_responses = self._count(UNSCORED) + self._count(UNSCORED | _STARTED)
        self.stats.update_failed(earlier_errors)
        if self._replay is not None:
            self.errors.counts.update(self._replay.errors)
        for _ in range(earlier_errors):
            self.scores.update([], failed=True)
        for _ in range(earlier_responses):
            self.scores.update([], failed=False)
        self.stats.active_seconds = self.active_seconds
        return RunCounts(
            planned=self._plan.slots,
            ok=self._count(DONE) + earlier_responses,
            error=self._count(_FAILED) + earlier_errors,
            cancelled=self._count(PENDING | _STARTED),
            not_started=self._count(PENDING),
            to_redo=earlier_errors + earlier_responses,
            cut_short=stopped is not None and self._plan.is_open_ended,
        )

    def trial_metrics(self) -> TrialMetrics | None:
        """What repeating showed, with the flaky cases by name; None when nothing was repeated."""
        if self._trials is None:
            return None
        metrics = self._trials.to_metrics()
        names = self._plan.ids_at({int(case.id) for case in metrics.flaky_cases})
        for case in metrics.flaky_cases:
            case.id = names.get(int(case.id), case.id)
        return metrics

    def _count(self, state: int) -> int:
        return self._states.count(state)


def _as_noted(ok: bool, said: bool | None) -> int:
    """What became of a record, as the index spells it."""
    if not ok:
        return ERROR
    return UNSCORED_ANSWER if said is None else said
