"""Progress of one run: writes each record to disk, then updates the counters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from steelyard.errors import CountsError
from steelyard.journal.answers import AnswerLog, JudgeCall, count_cut_off
from steelyard.journal.index import ERROR, UNSCORED
from steelyard.journal.reader import RecordReader, decode_record, decode_trusted
from steelyard.journal.replay import STARTED, Replay, SlotState
from steelyard.journal.writer import JournalWriter, seal_encoded, seal_record
from steelyard.protocols import Tally
from steelyard.records import EncodedRecord, EncodedRecords, Job, Record, StoredSample, UnscoredAnswer, verdict
from steelyard.run.metrics import Errors, RunCounts
from steelyard.run.plan import Plan
from steelyard.run.stop_rules import DecidedStop
from steelyard.stats.formatting import counted, safe_text
from steelyard.stats.metrics import JournalLines, TrialMetrics
from steelyard.stats.prices import Spending, format_money
from steelyard.stats.running import RunningStats
from steelyard.stats.scores import ScoreStats, is_scoring_error
from steelyard.stats.trials import TrialStats

log = logging.getLogger("steelyard")

_MAX_REASON = 200
# Plain numbers for what is done for every record.
_DONE, _FAILED, _UNSCORED = int(SlotState.DONE), int(SlotState.FAILED), int(SlotState.UNSCORED)
_STARTED_ERRORED = SlotState.ERRORED | STARTED
_STARTED_UNSCORED = SlotState.UNSCORED | STARTED


class OpenJournal(NamedTuple):
    """The journal of a run directory, recovered and open for more records."""

    replay: Replay
    writer: JournalWriter
    reader: RecordReader
    answers: AnswerLog
    """Answers and judge samples of unfinished slots."""


class Recorder:
    """Progress of one run: writes each record to disk, then updates the counters.

    Without a `journal` nothing is written. What earlier launches spent is added to `spending`. `watch` is called with
    each record whose answer was requested in this launch and with the statistics so far, until it returns False;
    `on_record` with each record, once it is written and counted. With `keep` the records stay in memory too. Warnings
    begin with the `label`.
    """

    def __init__(
        self,
        plan: Plan,
        journal: OpenJournal | None,
        *,
        spending: Spending,
        keep: bool,
        trials: TrialStats | None = None,
        watch: Callable[[Record, RunningStats], bool] | None = None,
        decided: DecidedStop | None = None,
        on_record: Callable[[Record], None] | None = None,
        label: str = "",
    ) -> None:
        self._label = label
        replay = journal.replay if journal is not None else None
        self._plan = plan
        # In most runs a slot is its case's position in the suite; to compute it here is faster than to ask the plan.
        self._is_direct = type(plan) is Plan and plan.trials == 1 and isinstance(plan.indices, range)
        self._writer = journal.writer if journal is not None else None
        self._reader = journal.reader if journal is not None else None
        self._answers = journal.answers if journal is not None else None
        self._replay = replay
        self._trials = trials
        self._states = replay.states if replay is not None else bytearray(plan.slots)
        self._earlier = replay.run_time if replay is not None else 0.0
        self._began = time.monotonic()
        self._emitted = 0
        self._closed = False
        self.stats = replay.stats if replay is not None else RunningStats()
        self.scores = replay.scores if replay is not None else ScoreStats()
        self.spending = spending
        if replay is not None:
            spending.merge(replay.spending)
        if self._answers is not None:
            spending.merge(self._answers.spending)
        self.errors = Errors()
        self.kept: list[Record] | None = [] if keep else None
        self.done_before = self._count(SlotState.DONE)
        self.resumed = any(self._states)
        self._watch = watch
        self._decided = decided
        self._on_record = on_record
        # Only who looks at answers needs all of a record that a worker encoded.
        self._decode: Callable[[bytes], Record] = decode_record if keep or on_record is not None else decode_trusted
        self._failing_scorers: set[str] = set()
        """The scorers that were already reported as failing."""
        self._only_scored: set[int] = set()
        """The slots of the jobs in progress that need no answer; kept only while records are watched."""

    def begin(self) -> None:
        """Start the clock of this launch."""
        self._began = time.monotonic()

    @property
    def active_seconds(self) -> float:
        """How long the run has been active, in this launch and earlier ones."""
        return self._earlier + time.monotonic() - self._began

    @property
    def done(self) -> int:
        """How many slots have a record that needs no more work in this launch."""
        return self.done_before + self._emitted

    def live_outcomes(self) -> dict[str, str]:
        """The pass rate with its interval, and what was spent, as the display shows them; only what is known.

        Where trials or groups of cases count together, there is no interval before the end.
        """
        shown = {}
        if self.scores.pass_rate is not None:
            shown["pass_rate"] = f"{self.scores.pass_rate:.1%}"
            if self._trials is None and (interval := self.scores.pass_rate_ci95) is not None:
                shown["pass_rate"] += f" ({interval[0]:.0%}–{interval[1]:.0%})"
            shown["pass_rate"] += ", judge not calibrated" if self.scores.is_uncalibrated else ""
        if self.spending.total > 0:
            shown["cost"] = format_money(self.spending.total, safe_text(self.spending.currency))
        return shown

    def so_far(self) -> str:
        """Describe what earlier launches did, and what they left to do."""
        parts = [f"{self.done_before:,} of {self._plan.slots:,} done"]
        if again := self._count(SlotState.ERRORED):
            parts.append(f"{counted(again, 'error')} to retry")
        if stored := self._count(SlotState.UNSCORED):
            parts.append(f"{counted(stored, 'stored answer')} to score again")
        return ", ".join(parts)

    def jobs(self) -> Iterator[Job | None]:
        """Yield the jobs that are left, in suite order, read as workers take them; None means: not yet, ask again."""
        states, slot_at, is_direct = self._states, self._plan.slot_at, self._is_direct
        answers = None if self._answers is None or self._answers.is_empty else self._answers
        done = bytearray((np.frombuffer(states, dtype=np.uint8) == _DONE).tobytes())
        jobs = self._plan.jobs(done)
        for job in jobs if self._decided is None else self._decided.ordered(jobs):
            if job is None:
                yield None
                continue
            slot = job.index if is_direct else slot_at(job.index, job.trial)
            if slot == len(states):  # the number of slots of an open-ended load run is not known before its end
                states.append(SlotState.PENDING)
            if states[slot] == _UNSCORED:
                job.stored = self._stored(slot)
            if answers is not None:
                job.stored = job.stored or answers.answer(slot)
                job.samples = answers.samples(slot)
            if job.stored is not None and self._watch is not None:
                self._only_scored.add(slot)
            states[slot] |= STARTED
            yield job

    def _stored(self, slot: int) -> Record:
        """Read the record whose response is to be scored again."""
        assert self._replay is not None
        assert self._reader is not None
        return self._reader.at(self._replay.stored_at(slot))

    def emit(self, record: Record | UnscoredAnswer | StoredSample | EncodedRecords) -> None:
        """Hand one record to the kernel, then count it. Unscored answers and judge samples are only written."""
        if isinstance(record, Record):
            record.run_time = self._earlier + time.monotonic() - self._began
            if self._writer is None:
                self._take(record, 0, 0, 0)
            else:
                line, crc = seal_record(record)
                self._take(record, self._writer.append(line), len(line), crc)
        elif isinstance(record, EncodedRecords):
            self._emit_encoded(record.records)
        else:
            if self._answers is not None:
                self._answers.append(record)
            if isinstance(record, UnscoredAnswer) and record.record.status == "error":
                count_cut_off(record.record, self.spending)

    def _emit_encoded(self, records: list[EncodedRecord]) -> None:
        """Hand records that workers encoded to the kernel, all at once, then count them one by one."""
        run_time = self._earlier + time.monotonic() - self._began
        sealed = [seal_encoded(record.line, run_time) for record in records]
        # Before anything is written: what cannot be read back does not belong into the journal.
        entries = [self._decode(line) for line, _ in sealed]
        offset = 0 if self._writer is None else self._writer.append(b"".join([line for line, _ in sealed]))
        for entry, (line, crc) in zip(entries, sealed, strict=True):
            self._take(entry, offset, len(line), crc)
            offset += len(line)

    def _take(self, record: Record, offset: int, length: int, crc: int) -> None:
        """Count a record that is written, at this place of the journal."""
        ok = record.status == "ok"
        scores = record.scores
        slot = record.index if self._is_direct else self._plan.slot_at(record.index, record.trial)
        passed = verdict(scores) if ok and scores else None
        if self._writer is not None:
            state = ERROR if not ok else UNSCORED if passed is None else passed
            self._writer.note((offset, length, slot, state, crc))
        before = self._states[slot]
        if before != _STARTED_UNSCORED:  # a stored response was counted when it was replayed
            self.stats.update(record)
            self.spending.update(record)
        if ok:
            self.scores.take(scores, passed)
            if scores and (passed is None or (scores[-1].escalated and is_scoring_error(scores[-1]))):
                self._warn_of_failing_scorers(record)
        else:
            self.scores.update(scores, failed=True)
            self.errors.add(record)
            if record.error_traceback is not None:
                _log_traceback(record.id, record.error_traceback)
        if self._trials is not None:
            position, trial = divmod(slot, self._plan.trials)
            self._trials.update(position, trial, passed, scores)
        if self._decided is not None:
            self._decided.take(slot, ok, passed)
        self._states[slot] = _DONE if ok else _FAILED
        self._emitted += 1
        if before == _STARTED_ERRORED and self._replay is not None:
            self._replay.forget_error(slot)
        if self.kept is not None:
            self.kept.append(record)
        if self._on_record is not None:
            self._on_record(record)
        if slot in self._only_scored:
            self._only_scored.remove(slot)
        elif self._watch is not None and not self._watch(record, self.stats):
            self._watch = None

    def _warn_of_failing_scorers(self, record: Record) -> None:
        """Warn once for each scorer that could not score, so that a run in which none can does not go unnoticed."""
        for score in record.scores:
            if is_scoring_error(score) and score.name not in self._failing_scorers:
                self._failing_scorers.add(score.name)
                why = safe_text(score.errors[0])[:_MAX_REASON]
                case = safe_text(record.id)
                log.warning("%s%s could not score %s, and maybe others: %s", self._label, score.name, case, why)
                if score.error_traceback is not None:
                    _log_traceback(record.id, score.error_traceback)

    def judged(self, cost: float | None) -> None:
        """Count what one call of a judge cost; written at once, as it belongs to no record."""
        self.spending.update_judge(cost)
        if self._answers is not None and cost is not None:
            self._answers.append(JudgeCall(cost))

    def close(self, tally: Tally, stopped: str | None = None) -> RunCounts:
        """Settle every slot, those of earlier launches included, and return the counts.

        `stopped` is why the run ended early, if it did.
        """
        if self._closed:
            raise CountsError("the recorder was closed twice")
        self._closed = True
        if self._emitted != tally.finished or tally.started != tally.finished + tally.cancelled:
            raise CountsError(f"{self._emitted} records for {tally}")
        earlier_errors = self._count(SlotState.ERRORED) + self._count(_STARTED_ERRORED)
        earlier_responses = self._count(SlotState.UNSCORED) + self._count(_STARTED_UNSCORED)
        self.stats.update_failed(earlier_errors)
        if self._replay is not None:
            self.errors.counts.update(self._replay.errors)
            self.stats.update_timeouts(self._replay.timeouts())
        if self._trials is not None and earlier_errors + earlier_responses:
            self._count_earlier(self._trials)
        for _ in range(earlier_errors):
            self.scores.update([], failed=True)
        for _ in range(earlier_responses):
            self.scores.update([], failed=False)
        self.stats.active_seconds = self.active_seconds
        for job in tally.unused:
            self._states[self._plan.slot_at(job.index, job.trial)] &= ~STARTED
        # A run without a number of requests has a slot for each job that was sent, and no other.
        unused = len(tally.unused) if self._plan.is_open_ended else 0
        pending = self._count(SlotState.PENDING) - unused
        is_decided = self._decided is not None and self._decided.settled
        return RunCounts(
            planned=self._plan.slots - unused,
            ok=self._count(SlotState.DONE) + earlier_responses,
            error=self._count(SlotState.FAILED) + earlier_errors,
            cancelled=self._count(SlotState.PENDING | STARTED),
            not_started=0 if is_decided else pending,
            not_asked=pending if is_decided else 0,
            to_redo=earlier_errors + earlier_responses,
            cut_short=stopped is not None and self._plan.is_open_ended,
        )

    def _count_earlier(self, trials: TrialStats) -> None:
        """Count the slots whose records, from earlier launches, have no verdict: they are in the rate over all."""
        earlier = (SlotState.ERRORED, _STARTED_ERRORED, SlotState.UNSCORED, _STARTED_UNSCORED)
        states = np.frombuffer(self._states, dtype=np.uint8)
        for slot in np.flatnonzero(np.isin(states, [int(state) for state in earlier])).tolist():
            trials.update(*divmod(slot, self._plan.trials), None, [])

    @property
    def left_out(self) -> int:
        """How many records of the journal belong to no case of the plan."""
        return self._replay.left_out if self._replay is not None else 0

    @property
    def left_out_lines(self) -> str:
        """The numbers of the lines of these records."""
        return self._replay.left_out_lines if self._replay is not None else ""

    @property
    def lines(self) -> JournalLines:
        """Which lines of the journal belong to the run: all that this launch wrote do."""
        before = self._replay.lines if self._replay is not None else 0
        return JournalLines(total=before + self._emitted, left_out=self.left_out_lines)

    def trial_metrics(self) -> TrialMetrics | None:
        """Return the figures over trials, with the flaky cases by id; None when nothing was repeated."""
        if self._trials is None:
            return None
        metrics = self._trials.to_metrics()
        names = self._plan.ids_at({int(case.id) for case in metrics.flaky_cases})
        for case in metrics.flaky_cases:
            case.id = names.get(int(case.id), case.id)
        return metrics

    def _count(self, state: int) -> int:
        return self._states.count(state)


def _log_traceback(case_id: str, text: str) -> None:
    """Log where the user's code failed, for `--verbose`."""
    if log.isEnabledFor(logging.DEBUG):
        lines = (safe_text(line) for line in text.splitlines())
        log.debug("%s: %s", safe_text(case_id), "\n  ".join(lines))
