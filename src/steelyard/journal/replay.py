"""What a journal says of a plan: which slots are done, which to ask or score again, and the numbers so far."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from steelyard.errors import RunRefused
from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import pack_row
from steelyard.journal.scan import Entry, damage, decode_entry, is_newer, lines_backward, readable_end
from steelyard.records import id_digest
from steelyard.stats.running import RunningStats
from steelyard.stats.scores import ScoreStats, verdict

PENDING, DONE, ERRORED, UNSCORED = 0, 1, 2, 3
"""What is known of a slot: nothing; an ok record; only errors (ask again); a response whose scores are not of use."""

_BATCH = 4096


class Slots(Protocol):
    """The (case, trial) pairs of a plan, by number."""

    def slot_of(self, id_digests: npt.NDArray[np.uint64], trials: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...

    def index(self, slot: int, recorded: int) -> int: ...

    def same_case(self, slot: int, case_fp: str) -> bool: ...

    def needs_scoring(self, slot: int, scored_by: str, has_errors: bool) -> bool: ...


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
        self.error_types: Counter[str] = Counter()
        self.left_out = 0
        self.superseded = 0
        self._offsets: array[int] | None = None

    def read(self, check: Callable[[], None] = lambda: None) -> None:
        """Read the whole journal; `check` is called now and then and may raise to give up."""
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            end = readable_end(descriptor)
            batch: list[tuple[int, int, Entry]] = []
            for offset, line in lines_backward(descriptor, end):
                entry = decode_entry(line)
                if entry is None:
                    raise damage(self._path, descriptor, offset)
                if is_newer(entry):
                    raise RunRefused(
                        f"{self._path} was written by a newer Steelyard (record version {entry.v})",
                        path=self._path.parent,
                    )
                batch.append((offset, len(line), entry))
                if len(batch) == _BATCH:
                    self._take(batch)
                    batch.clear()
                    check()
            self._take(batch)
        finally:
            os.close(descriptor)

    def stored_at(self, slot: int) -> int:
        """Where the record lies whose response is to be scored again: for slots that are UNSCORED."""
        assert self._offsets is not None
        return self._offsets[slot]

    def _take(self, batch: list[tuple[int, int, Entry]]) -> None:
        digests = np.fromiter((id_digest(entry.id) for _, _, entry in batch), dtype=np.uint64, count=len(batch))
        trials = np.fromiter((entry.trial for _, _, entry in batch), dtype=np.int64, count=len(batch))
        numbers = self._slots.slot_of(digests, trials).tolist()
        for slot, digest, (offset, length, entry) in zip(numbers, digests.tolist(), batch, strict=True):
            if entry.run_time > self.run_time:
                self.run_time = entry.run_time
            if slot < 0 or not self._slots.same_case(slot, entry.case_fp):
                self.left_out += 1
            elif not self._wins(slot, entry, offset):
                self.superseded += 1
            elif self._add_row is not None:
                index = self._slots.index(slot, entry.index)
                said = verdict(entry.scores) if self.states[slot] == DONE else None
                ok = entry.status == "ok"
                self._add_row(pack_row(offset, digest, length + 1, index, entry.trial, ok, said))

    def _wins(self, slot: int, entry: Entry, offset: int) -> bool:
        """Whether this entry, older than all seen so far, is the one that counts for its slot."""
        state = self.states[slot]
        if state in (DONE, UNSCORED) or (state == ERRORED and entry.status == "error"):
            return False
        if entry.status == "error":
            self.states[slot] = ERRORED
            self.error_types[entry.error_type or "error"] += 1
            return True
        if state == ERRORED:
            self.superseded += 1
        self.stats.update(entry)
        has_errors = any(score.value is None for score in entry.scores)
        if self._slots.needs_scoring(slot, entry.scored_by, has_errors):
            self.states[slot] = UNSCORED
            if self._offsets is None:
                self._offsets = array("Q", bytes(8 * len(self.states)))
            self._offsets[slot] = offset
        else:
            self.states[slot] = DONE
            self.scores.update(entry.scores, failed=False)
        return True
