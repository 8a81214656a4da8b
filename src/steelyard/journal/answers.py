"""`answers.jsonl`: answers that are not scored yet, and each judge sample as it comes. Nothing is paid for twice.

What had come of answers that the end of a run cut off is here too: only kept, as their cases are sent again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from steelyard.disk import open_regular
from steelyard.journal.checksum import is_sound, repaired, sealed
from steelyard.journal.files import ANSWERS
from steelyard.journal.reader import RecordReader, decode_entry, lines_forward
from steelyard.journal.writer import AppendOnlyFile, clean_texts, encode_record
from steelyard.records import Record, StoredSample, UnscoredAnswer
from steelyard.stats.formatting import counted
from steelyard.stats.prices import Spending

log = logging.getLogger("steelyard")


class JudgeCall(msgspec.Struct, gc=False):
    """One line of `answers.jsonl`: what a call of a judge cost."""

    judge_cost: float


_decode_sample = msgspec.json.Decoder(StoredSample).decode
_decode_judge_call = msgspec.json.Decoder(JudgeCall).decode
_encoder = msgspec.json.Encoder()

SlotOf = Callable[[str, int], int | None]
"""The slot of a (case id, trial) that is still to be scored; None for all others."""


class AnswerLog:
    """The answers and judge samples of slots that have no finished record yet."""

    def __init__(self, run: Path) -> None:
        self._path = run / ANSWERS
        self._answers: dict[int, int] = {}
        self._samples: dict[int, list[StoredSample]] = {}
        self.spending = Spending()
        """What judges, and answers that were cut off, cost in earlier launches."""
        self._file: AppendOnlyFile | None = None
        self._reader: RecordReader | None = None

    def read(self, slot_of: SlotOf, same_case: Callable[[int, str], bool]) -> None:
        """Find what belongs to unfinished slots. Other lines are skipped: their calls are repeated."""
        if not self._path.exists():
            return
        bad = []
        descriptor = open_regular(self._path)
        try:
            for offset, line in lines_forward(descriptor, 0, os.fstat(descriptor).st_size):
                entry = decode_entry(line)
                if entry is None:
                    if not self._take_sample(line, slot_of):
                        bad.append(offset)
                    continue
                if entry.status == "error":
                    count_cut_off(entry, self.spending)
                    continue
                slot = slot_of(entry.id, entry.trial)
                if slot is not None and same_case(slot, entry.case_fp):
                    self._answers[slot] = offset
        finally:
            os.close(descriptor)
        if bad:
            lines = counted(len(bad), "line")
            log.warning("%s: skipped %s not as written, the first at byte %d", self._path, lines, bad[0])

    def _take_sample(self, line: bytes, slot_of: SlotOf) -> bool:
        """Take in a judge's sample, or what one cost; whether the line is one."""
        if not is_sound(line) and (repaired(line) is not None or b'"crc32":' in line):
            return False
        try:
            stored = _decode_sample(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self.spending.update_judge(_decode_judge_call(line).judge_cost)
                return True
            return False
        slot = slot_of(stored.id, stored.trial)
        if slot is not None:
            self._samples.setdefault(slot, []).append(stored)
        return True

    @property
    def is_empty(self) -> bool:
        """Whether nothing was found for any slot."""
        return not (self._answers or self._samples)

    def answer(self, slot: int) -> Record | None:
        """Return the answer of a slot whose scoring did not finish."""
        if slot not in self._answers:
            return None
        if self._reader is None:
            self._reader = RecordReader(self._path)
        return self._reader.at(self._answers[slot])

    def samples(self, slot: int) -> tuple[StoredSample, ...]:
        """Return the judge samples of a slot so far."""
        return tuple(self._samples.get(slot, ()))

    def append(self, item: UnscoredAnswer | StoredSample | JudgeCall) -> None:
        """Hand an answer, a sample or a cost to the kernel."""
        if self._file is None:
            self._end_last_line()
            self._file = AppendOnlyFile(self._path)
        if isinstance(item, UnscoredAnswer):
            self._file.append(encode_record(item.record))
        elif isinstance(item, JudgeCall):
            self._file.append(sealed(_encoder.encode(item)))
        else:
            self._file.append(_encode_sample(item))

    def _end_last_line(self) -> None:
        """Start on a new line after a torn one, which is skipped when it is read."""
        with open(self._path, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")

    def close(self) -> None:
        """Commit what is left."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def count_cut_off(record: Record, spending: Spending) -> None:
    """Add what an answer that was cut off has cost, where that is known."""
    if record.cost is not None:
        spending.update(record)


def _encode_sample(stored: StoredSample) -> bytes:
    try:
        return sealed(_encoder.encode(stored))
    except UnicodeEncodeError:
        clean_texts(stored)
        clean_texts(stored.sample)
        return sealed(_encoder.encode(stored))
