"""Following a journal while it grows: a few numbers of each record, read once, and the newest cases in words.

Only whole lines are read, so that a torn last one waits until it is whole. A journal that was replaced or rewritten
(`--force`, `--salvage`) is recognised and read anew.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steelyard.journal.entries import Entry, decode_entry, read_exactly
from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import ROWS, UNSCORED, Rows, id_digests, short_fingerprint
from steelyard.report.visible import one_line
from steelyard.stats.error_kinds import error_name
from steelyard.stats.scores import verdict

FIGURES = np.dtype(
    [
        *ROWS.descr,
        ("at", "<f4"),
        ("first", "<f4"),
        ("last", "<f4"),
        ("input", "<f4"),
        ("output", "<f4"),
        ("cached_input", "<f4"),
        ("reasoning", "<f4"),
        ("cost", "<f4"),
        ("kind", "<u2"),
        ("cached", "u1"),
        ("escalated", "u1"),
    ]
)
"""A row of the index, and what charts and sorting need: NaN where a record does not say."""

NEWEST = 12
_FIELDS = {
    "at": "run_time",
    "first": "time_to_first_token",
    "last": "time_to_last_token",
    "input": "num_tokens_input",
    "output": "num_tokens_output",
    "cached_input": "num_tokens_input_cached",
    "reasoning": "num_tokens_output_reasoning",
    "cost": "cost",
}
_STRIDE = 8 << 20
"""Bytes read at a time: a large journal is caught up with in steps, between which others have their turn."""
_MOST_KINDS = 1_000
_BEGINNING = 256
_LONGEST_PREVIEW = 160
_LIMIT = 1e12


class Follower:
    """One journal, as far as it has been read."""

    def __init__(self, run: Path) -> None:
        self._path = run / OUTPUTS
        self._forget()

    def _forget(self) -> None:
        self.position = 0
        """How many bytes are accounted for: the end of the last whole line that was read."""
        self.size = 0
        self.damaged = 0
        """How many whole lines are not records."""
        self.kinds: list[str] = ["error"]
        """What the rows' `kind` means: the types of errors."""
        self.newest: deque[dict[str, Any]] = deque(maxlen=NEWEST)
        self.caught_up = False
        """Whether all whole lines that were there at the last look have been read."""
        self._place: tuple[int, int] | None = None
        self._beginning = b""
        self._rows = np.empty(1024, dtype=FIGURES)
        self._count = 0

    @property
    def rows(self) -> Rows:
        """One row for each record, in the order in which they landed."""
        return self._rows[: self._count]

    @property
    def generation(self) -> str:
        """Which journal this is: the same for every reader, another one after a rewrite."""
        if self._place is None or not self._beginning:
            return ""
        return f"{self._place[1]:x}{zlib.crc32(self._beginning):08x}"

    def advance(self) -> bool:
        """Read one step further; whether the end was reached. What follows the last newline is not looked at."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except FileNotFoundError:
            self._forget()
            self.caught_up = True
            return True
        try:
            self._check_same(descriptor)
            data = self._whole_lines(descriptor)
            if data:
                self._take(data)
                self._beginning = self._beginning or data[: min(_BEGINNING, data.find(b"\n"))]
        finally:
            os.close(descriptor)
        return self.caught_up

    def _check_same(self, descriptor: int) -> None:
        """Begin anew if this is not the file, or not the content, that was read so far."""
        status = os.fstat(descriptor)
        place = (status.st_dev, status.st_ino)
        same = place == self._place and status.st_size >= self.position
        if same and self.position:
            ends = read_exactly(descriptor, 1, self.position - 1) == b"\n"
            same = ends and read_exactly(descriptor, len(self._beginning), 0) == self._beginning
        if not same:
            self._forget()
        self._place, self.size = place, status.st_size

    def _whole_lines(self, descriptor: int) -> bytes:
        stride = _STRIDE
        while True:
            data = read_exactly(descriptor, min(stride, self.size - self.position), self.position)
            self.caught_up = self.position + len(data) >= self.size
            ends = data.rfind(b"\n") + 1
            if ends or self.caught_up:
                return data[:ends]
            stride *= 2  # a line longer than that

    def _take(self, data: bytes) -> None:
        entries: list[Entry] = []
        places: list[tuple[int, int]] = []
        offset = self.position
        for line in data[:-1].split(b"\n"):
            entry = decode_entry(line) if line else None
            if entry is not None:
                entries.append(entry)
                places.append((offset, len(line) + 1))
            self.damaged += entry is None and bool(line)
            offset += len(line) + 1
        self.position = offset
        if entries:
            self._append(entries, places)
            said = zip(entries[-NEWEST:], places[-NEWEST:], strict=True)
            self.newest.extend(_in_words(entry, place[0]) for entry, place in said)

    def _append(self, entries: list[Entry], places: list[tuple[int, int]]) -> None:
        needed = self._count + len(entries)
        if needed > len(self._rows):
            grown = np.empty(max(needed, 2 * len(self._rows)), dtype=FIGURES)
            grown[: self._count] = self.rows
            self._rows = grown
        self._fill(self._rows[self._count : needed], entries, places)
        self._count = needed

    def _fill(self, rows: Rows, entries: list[Entry], places: list[tuple[int, int]]) -> None:
        """Write the entries to rows, column by column: a third of the time that it takes row by row."""
        rows["offset"], rows["length"] = np.array(places, dtype=np.int64).T
        rows["id"] = id_digests([entry.id for entry in entries])
        rows["index"] = [entry.index for entry in entries]
        rows["trial"] = [entry.trial for entry in entries]
        rows["ok"] = ok = np.array([entry.status == "ok" for entry in entries])
        said = [verdict(entry.scores) for entry in entries]
        rows["verdict"] = np.where(ok, [UNSCORED if one is None else one for one in said], UNSCORED)
        rows["case"] = [short_fingerprint(entry.case_fp) for entry in entries]
        rows["cached"] = [entry.cached for entry in entries]
        rows["escalated"] = [any(score.escalated for score in entry.scores) for entry in entries]
        rows["kind"] = [0 if entry.status == "ok" else self._kind(error_name(entry).kind) for entry in entries]
        for name, field in _FIELDS.items():
            rows[name] = _numbers(list(map(attrgetter(field), entries)))
        rows["last"] = np.where(ok, rows["last"], _numbers([entry.elapsed for entry in entries]))

    def _kind(self, name: str) -> int:
        if name not in self.kinds:
            if len(self.kinds) >= _MOST_KINDS:
                return 0
            self.kinds.append(name)
        return self.kinds.index(name)


def _in_words(entry: Entry, offset: int) -> dict[str, Any]:
    """What the live page says of a record."""
    ok = entry.status == "ok"
    said = verdict(entry.scores)
    return {
        "offset": offset,
        "id": entry.id,
        "trial": entry.trial,
        "state": 3 if not ok else UNSCORED if said is None else int(said),
        "at": entry.run_time,
        "last": entry.time_to_last_token if ok else entry.elapsed,
        "ask": one_line(entry.input_prompt or "", _LONGEST_PREVIEW),
        "say": one_line((entry.response_text if ok else entry.error) or "", _LONGEST_PREVIEW),
    }


def _numbers(values: list[Any]) -> npt.NDArray[np.float64]:
    """The values, NaN where there is none or none that a chart could show."""
    numbers = np.array(values, dtype=np.float64)
    return np.where(np.abs(numbers) < _LIMIT, numbers, np.nan)
