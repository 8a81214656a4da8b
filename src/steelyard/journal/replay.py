"""What a journal says of a plan: which slots are done, which to ask or score again, and the numbers so far."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from steelyard.errors import RunRefused
from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import id_digests, pack_row
from steelyard.journal.scan import Entry, damage, decode_entry, lines_backward, readable_end
from steelyard.records import RECORD_VERSION, Score
from steelyard.stats.running import RunningStats
from steelyard.stats.scores import ScoreStats, verdict

PENDING, DONE, ERRORED, UNSCORED = 0, 1, 2, 3
"""What is known of a slot: nothing; an ok record; only errors (ask again); a response whose scores are not of use."""

_BATCH = 256
"""Records looked up at once: few enough that holding them never wakes the garbage collector."""
_MOST_KINDS = 1 << 16


class Slots(Protocol):
    """The (case, trial) pairs of a plan, by number."""

    def slot_of(
        self,
        id_digests: npt.NDArray[np.uint64],
        trials: npt.NDArray[np.int64],
        recorded: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """The slot of each (id digest, trial), -1 where there is none; `recorded` is where its case stood then."""
        ...

    def index(self, slot: int, recorded: int) -> int: ...

    def same_case(self, slot: int, case_fp: str) -> bool: ...

    def needs_scoring(self, slot: int, scored_by: str, has_errors: bool) -> bool: ...


class _Batch:
    """Entries on their way to be looked up together, and where each one lies."""

    __slots__ = ("entries", "lengths", "offsets")

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.lengths: list[int] = []
        self.entries: list[Entry] = []

    def clear(self) -> None:
        for column in (self.offsets, self.lengths, self.entries):
            column.clear()


class Replay:
    """A journal read once, from its end: the newest word on each slot counts, the last ok record before all."""

    def __init__(
        self, run: Path, slots: Slots, states: bytearray, add_row: Callable[[bytes], None] | None = None
    ) -> None:
        self._path = run / OUTPUTS
        self._slots = slots
        self._add_row = add_row
        self.states = states
        self.stats = RunningStats()
        self.scores = ScoreStats()
        self.run_time = 0.0
        self._kinds = _ErrorKinds()
        self.left_out = 0
        self._offsets: array[int] | None = None
        self.on_done: Callable[[int, list[Score]], None] | None = None
        """Called for each slot that needs no more work, with its scores."""

    def read(self, check: Callable[[], None] = lambda: None) -> None:
        """Read the whole journal; `check` is called now and then and may raise to give up."""
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            batch = _Batch()
            offsets, lengths, entries = batch.offsets.append, batch.lengths.append, batch.entries.append
            for offset, line in lines_backward(descriptor, readable_end(descriptor)):
                entry = decode_entry(line)
                if entry is None:
                    raise damage(self._path, descriptor, offset)
                offsets(offset)
                lengths(len(line))
                entries(entry)
                if len(batch.entries) == _BATCH:
                    self._take(batch)
                    batch.clear()
                    check()
            self._take(batch)
        finally:
            os.close(descriptor)

    @property
    def error_types(self) -> Mapping[str, int]:
        """How many slots ended in each type of error."""
        return self._kinds.counts

    def forget_error(self, slot: int) -> None:
        """Take back the error of a slot that has a newer record now."""
        self._kinds.remove(slot)

    def stored_at(self, slot: int) -> int:
        """Where the record lies whose response is to be scored again: for slots that are UNSCORED."""
        assert self._offsets is not None
        return self._offsets[slot]

    def _take(self, batch: _Batch) -> None:
        entries = batch.entries
        if not entries:
            return
        if max([entry.v for entry in entries]) > RECORD_VERSION:
            message = f"{self._path} was written by a newer Steelyard (record version {RECORD_VERSION + 1} or later)"
            raise RunRefused(message, path=self._path.parent)
        self.run_time = max(self.run_time, *[entry.run_time for entry in entries])
        found = id_digests([entry.id for entry in entries])
        trials = np.array([entry.trial for entry in entries], dtype=np.int64)
        recorded = np.array([entry.index for entry in entries], dtype=np.int64)
        numbers = self._slots.slot_of(found, trials, recorded).tolist()
        digests = found.tolist()
        same_case, add_row, wins = self._slots.same_case, self._add_row, self._wins
        for slot, digest, offset, length, entry in zip(
            numbers, digests, batch.offsets, batch.lengths, entries, strict=True
        ):
            if slot < 0 or not same_case(slot, entry.case_fp):
                self.left_out += 1
            elif wins(slot, entry, offset) and add_row is not None:
                index = self._slots.index(slot, entry.index)
                said = verdict(entry.scores) if self.states[slot] == DONE else None
                ok = entry.status == "ok"
                add_row(pack_row(offset, digest, length + 1, index, entry.trial, ok, said, entry.case_fp))

    def _wins(self, slot: int, entry: Entry, offset: int) -> bool:
        """Whether this entry, older than all seen so far, is the one that counts for its slot."""
        state = self.states[slot]
        if state in (DONE, UNSCORED) or (state == ERRORED and entry.status == "error"):
            return False
        if entry.status == "error":
            self.states[slot] = ERRORED
            self._kinds.add(slot, entry.error_type or "error")
            return True
        if state == ERRORED:
            self._kinds.remove(slot)
        self.stats.update(entry)
        lacking = [score for score in entry.scores if score.value is None or score.errors]
        # A score could not be made, or a judge was not heard as often as was asked for.
        if self._slots.needs_scoring(slot, entry.scored_by, bool(lacking)):
            self.states[slot] = UNSCORED
            if self._offsets is None:
                self._offsets = array("Q", bytes(8 * len(self.states)))
            self._offsets[slot] = offset
        else:
            self.states[slot] = DONE
            self.scores.update(entry.scores, failed=False)
            if self.on_done is not None:
                self.on_done(slot, entry.scores)
        return True


class _ErrorKinds:
    """The type of error of each slot that has one: two bytes a slot, and only once there is any."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._names = ["error"]
        self._numbers = {"error": 0}
        self._of_slot = array("H")

    def add(self, slot: int, kind: str) -> None:
        if kind not in self._numbers:
            if len(self._names) < _MOST_KINDS:
                self._numbers[kind] = len(self._names)
                self._names.append(kind)
            else:
                kind = "error"
        if slot >= len(self._of_slot):
            self._of_slot.frombytes(bytes(2 * (slot + 1 - len(self._of_slot))))
        self._of_slot[slot] = self._numbers[kind]
        self.counts[kind] += 1

    def remove(self, slot: int) -> None:
        """Take a slot's error back: an older record has an answer."""
        kind = self._names[self._of_slot[slot]]
        self.counts[kind] -= 1
        if not self.counts[kind]:
            del self.counts[kind]
