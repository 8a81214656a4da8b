"""Reads a journal back: which slots are done, which to retry or score again, and the figures so far."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from steelyard.disk import open_regular
from steelyard.errors import RunRefused
from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import id_digests, pack_row
from steelyard.journal.manifest import LeftOut, write_ranges
from steelyard.journal.reader import BadLine, Entry, EntryBlock, bad_line, entries_backward, readable_end
from steelyard.records import RECORD_VERSION, verdict
from steelyard.stats.errors import TIMEOUTS, ErrorName, error_name
from steelyard.stats.prices import Spending
from steelyard.stats.running import RunningStats, timed_out_after
from steelyard.stats.scores import ScoreStats


class SlotState(IntEnum):
    """What is known about a slot, a (case, trial) of the plan: one byte of a bytearray."""

    PENDING = 0
    """It has no record."""
    DONE = 1
    """It has an ok record with the scores that it should have."""
    ERRORED = 2
    """It has only errors, from earlier launches: to retry."""
    UNSCORED = 3
    """It has an answer from an earlier launch whose scores are missing or outdated: to score again."""
    FAILED = 4
    """It ended in an error in this launch."""


STARTED = 0x80
"""Set in the byte of a slot from when its job is handed out until its record is written."""

# Plain numbers for the loops over all records: an attribute of an enum takes several times as long to read.
_DONE, _ERRORED, _UNSCORED = int(SlotState.DONE), int(SlotState.ERRORED), int(SlotState.UNSCORED)
_MAX_KINDS = 1 << 16
_ANY_ERROR = ErrorName("error", "error")


class Slots(Protocol):
    """The (case, trial) pairs of a plan, by number."""

    def slot_of(
        self,
        id_digests: npt.NDArray[np.uint64],
        trials: npt.NDArray[np.int64],
        recorded: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Return the slot of each (id digest, trial), -1 where there is none; `recorded` was its case's position."""
        ...

    def same_case(self, slot: int, case_fp: str) -> bool: ...

    def needs_scoring(self, slot: int, scored_by: str, has_errors: bool) -> bool: ...

    def all_current(self, slots: npt.NDArray[np.int64], case_fps: list[str], scored_bys: list[str]) -> bool:
        """Whether each of these certainly belongs to the slot's case and is scored as it would be now."""
        ...


class Replay:
    """Reads a journal once, from its end: the last ok record of a slot counts, else its last error.

    `add_rows` gets the index rows of all records, the newest first; `on_done` is called for each slot that
    needs no more work, with its entry. `left_out` are offsets of lines that are known not to belong to the run.
    """

    def __init__(
        self,
        run: Path,
        slots: Slots,
        states: bytearray,
        add_rows: Callable[[bytes], None] | None = None,
        on_done: Callable[[int, Entry], None] | None = None,
        left_out: Collection[int] = (),
    ) -> None:
        self._path = run / OUTPUTS
        self._slots = slots
        self._add_rows = add_rows
        self.states = states
        self.stats = RunningStats()
        self.scores = ScoreStats()
        self.spending = Spending()
        self.run_time = 0.0
        self._kinds = _ErrorKinds()
        self.lines = 0
        """How many lines there are."""
        self._left_out = LeftOut()
        self._known_left_out = left_out
        self._offsets: array[int] | None = None
        self._timed_out = array("d")
        """After how many seconds each slot timed out, 0 for one that did not; empty while none has."""
        self._on_done = on_done

    def read(self, check: Callable[[], None] = lambda: None) -> None:
        """Read the whole journal; `check` is called from time to time and may raise to give up."""
        descriptor = open_regular(self._path)
        try:
            for block in entries_backward(descriptor, readable_end(descriptor)):
                self._take(block)
                check()
        except BadLine as error:
            raise bad_line(self._path, descriptor, error.offset) from error
        finally:
            os.close(descriptor)

    @property
    def errors(self) -> Mapping[ErrorName, int]:
        """How many slots ended in each error."""
        return self._kinds.counts

    @property
    def left_out(self) -> int:
        """How many records belong to no case of the plan as it is now."""
        return self._left_out.count

    @property
    def left_out_lines(self) -> str:
        """The numbers of their lines."""
        return write_ranges(self._left_out.ranges(self.lines))

    def forget_error(self, slot: int) -> None:
        """Remove the error of a slot that has a newer record now."""
        self._kinds.remove(slot)

    def timeouts(self) -> npt.NDArray[np.float64]:
        """After how many seconds those slots were given up that have only a timeout so far."""
        seconds = np.array(self._timed_out)
        states = np.frombuffer(self.states, dtype=np.uint8)[: len(seconds)] & ~np.uint8(STARTED)
        found: npt.NDArray[np.float64] = seconds[(states == _ERRORED) & (seconds > 0)]
        return found

    def stored_at(self, slot: int) -> int:
        """Return the offset of the record whose answer is to be scored again, of a slot that is UNSCORED."""
        assert self._offsets is not None
        return self._offsets[slot]

    def _take(self, block: EntryBlock) -> None:
        entries = block.entries
        if max([entry.v for entry in entries]) > RECORD_VERSION:
            message = f"{self._path} was written by a newer Steelyard (record version {RECORD_VERSION + 1} or later)"
            raise RunRefused(message, path=self._path.parent, topic="version")
        self.run_time = max(self.run_time, *[entry.run_time for entry in entries])
        digests = id_digests([entry.id for entry in entries])
        trials = np.array([entry.trial for entry in entries], dtype=np.int64)
        recorded = np.array([entry.index for entry in entries], dtype=np.int64)
        slots = self._slots.slot_of(digests, trials, recorded)
        if self._all_win(slots, entries):
            self._take_all(slots, entries)
        else:
            known = self._known_left_out
            each = zip(slots.tolist(), entries, block.offsets, strict=True)
            for distance, (slot, entry, offset) in enumerate(each, self.lines):
                if slot < 0 or offset in known or not self._slots.same_case(slot, entry.case_fp):
                    self._left_out.add(distance)
                else:
                    self._settle(slot, entry, offset)
        self.lines += len(entries)
        if self._add_rows is not None:
            rows = [
                pack_row(
                    offset,
                    digest,
                    length + 1,
                    entry.index,
                    entry.trial,
                    entry.status == "ok",
                    verdict(entry.scores),
                    entry.case_fp,
                    crc,
                )
                for digest, offset, length, crc, entry in zip(digests.tolist(), *block, strict=True)
            ]
            self._add_rows(b"".join(rows))

    def _all_win(self, slots: npt.NDArray[np.int64], entries: list[Entry]) -> bool:
        """Whether each entry is a good answer, scored as it should be, and the newest of its slot: most are."""
        if slots.min() < 0 or len(np.unique(slots)) < len(slots):
            return False
        if np.frombuffer(self.states, dtype=np.uint8)[slots].any():
            return False
        for entry in entries:
            if entry.status != "ok" or entry.error is not None:
                return False
            for score in entry.scores:
                if score.value is None or score.errors:  # a label has none, and is looked at one by one
                    return False
        fingerprints, scored = [entry.case_fp for entry in entries], [entry.scored_by for entry in entries]
        return self._slots.all_current(slots, fingerprints, scored)

    def _take_all(self, slots: npt.NDArray[np.int64], entries: list[Entry]) -> None:
        """Do for all of these what `_settle` does for each."""
        np.frombuffer(self.states, dtype=np.uint8)[slots] = _DONE
        self.stats.update_all(entries)
        for entry in entries:
            self.spending.update(entry)
        self.scores.take_all([entry.scores for entry in entries])
        if self._on_done is not None:
            for slot, entry in zip(slots.tolist(), entries, strict=True):
                self._on_done(slot, entry)

    def _settle(self, slot: int, entry: Entry, offset: int) -> None:
        """Take in an entry, older than all seen so far, if it is the one that counts for its slot."""
        state = self.states[slot]
        if entry.status == "error" and entry.cost is not None:
            self.spending.update(entry)  # paid for, whether or not it was retried
        if state in (_DONE, _UNSCORED) or (state == _ERRORED and entry.status == "error"):
            return
        if entry.status == "error":
            self.states[slot] = _ERRORED
            self._kinds.add(slot, error_name(entry))
            if entry.error_type in TIMEOUTS:
                self._note_timeout(slot, timed_out_after(entry))
            return
        if state == _ERRORED:
            self._kinds.remove(slot)
        self.stats.update(entry)
        self.spending.update(entry)
        lacking = [score for score in entry.scores if score.is_lacking]
        # A score could not be made, or a judge gave fewer samples than it should.
        if self._slots.needs_scoring(slot, entry.scored_by, bool(lacking)):
            self.states[slot] = _UNSCORED
            if self._offsets is None:
                self._offsets = array("Q", bytes(8 * len(self.states)))
            self._offsets[slot] = offset
        else:
            self.states[slot] = _DONE
            self.scores.update(entry.scores, failed=False)
            if self._on_done is not None:
                self._on_done(slot, entry)

    def _note_timeout(self, slot: int, seconds: float | None) -> None:
        if slot >= len(self._timed_out):
            self._timed_out.frombytes(bytes(8 * (max(slot + 1, len(self.states)) - len(self._timed_out))))
        self._timed_out[slot] = seconds or 0.0


class _ErrorKinds:
    """The error of each slot that has one: two bytes a slot, and only once there is any."""

    def __init__(self) -> None:
        self.counts: Counter[ErrorName] = Counter()
        self._names = [_ANY_ERROR]
        self._numbers = {_ANY_ERROR: 0}
        self._of_slot = array("H")

    def add(self, slot: int, kind: ErrorName) -> None:
        if kind not in self._numbers:
            if len(self._names) < _MAX_KINDS:
                self._numbers[kind] = len(self._names)
                self._names.append(kind)
            else:
                kind = _ANY_ERROR
        if slot >= len(self._of_slot):
            self._of_slot.frombytes(bytes(2 * (slot + 1 - len(self._of_slot))))
        self._of_slot[slot] = self._numbers[kind]
        self.counts[kind] += 1

    def remove(self, slot: int) -> None:
        """Remove a slot's error: an older record has an answer."""
        kind = self._names[self._of_slot[slot]]
        self.counts[kind] -= 1
        if not self.counts[kind]:
            del self.counts[kind]
