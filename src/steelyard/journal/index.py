"""`outputs.idx`: where each record lies, so that readers need not scan. Rebuildable from `outputs.jsonl` alone."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from steelyard.journal.files import INDEX, OUTPUTS

_MAGIC = b"SYIDX\x02\0\0"
_HEADER = struct.Struct("<8sQQ")
"""Magic, how many bytes of outputs.jsonl the first rows account for, and how many rows these are.

They are the records that count, the newest first. The rows after them were added as records landed, in their order.
"""

_ROW = struct.Struct("<QQIIHBBI")
ROWS = np.dtype(
    [
        ("offset", "<u8"),
        ("id", "<u8"),
        ("length", "<u4"),
        ("index", "<u4"),
        ("trial", "<u2"),
        ("ok", "u1"),
        ("verdict", "u1"),
        ("case", "<u4"),
    ]
)
ERROR, FAILED, PASSED, UNSCORED = -1, 0, 1, 2
"""What a record says of its case. In a row an error is `ok` 0, the others are in `verdict`."""

Rows = npt.NDArray[np.void]

_ODD = np.uint64(0x9E3779B97F4A7C15)
"""Spreads the trials of an id over all numbers, so that they meet no other id's."""


def id_digests(ids: list[str]) -> npt.NDArray[np.uint64]:
    """`records.id_digest` of many ids at once."""
    joined = b"".join([blake2b(case_id.encode(), digest_size=8).digest() for case_id in ids])
    return np.frombuffer(joined, dtype=">u8").astype(np.uint64)


def pack_row(
    offset: int, id_digest: int, length: int, index: int, trial: int, ok: bool, verdict: bool | None, case_fp: str
) -> bytes:
    """One row as bytes. Of the case's fingerprint it keeps 32 bits: enough to tell a case from its edited self."""
    state = UNSCORED if verdict is None else verdict
    return _ROW.pack(offset, id_digest, length, index, trial, ok, state, short_fingerprint(case_fp))


def short_fingerprint(case_fp: str) -> int:
    """The last 32 bits of a fingerprint of 16 hex digits; anything else counts as one odd case."""
    try:
        return int(case_fp, 16) & 0xFFFFFFFF
    except ValueError:
        return 0


def pack_columns(
    notes: npt.NDArray[np.int64],
    ids: npt.NDArray[np.uint64],
    indices: npt.NDArray[Any],
    trials: npt.NDArray[Any],
    fingerprints: npt.NDArray[np.uint64],
) -> bytes:
    """Many rows at once: `notes` has the columns offset, length, slot and verdict."""
    rows = np.zeros(len(notes), dtype=ROWS)
    verdicts = notes[:, 3]
    rows["offset"], rows["length"] = notes[:, 0], notes[:, 1]
    rows["id"], rows["index"], rows["trial"] = ids, indices, trials
    rows["case"] = fingerprints & np.uint64(0xFFFFFFFF)
    rows["ok"] = verdicts != ERROR
    rows["verdict"] = np.where(verdicts == ERROR, UNSCORED, verdicts)
    return rows.tobytes()


class IndexBuilder:
    """Writes a whole index row by row, the newest record first, and puts it in place of the old one in one step.

    A disk that refuses it costs the index, never the run.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / INDEX
        self._temporary = self._path.with_name(f"{INDEX}.{os.getpid()}.tmp")
        self._bytes = 0
        self._file: BinaryIO | None = None
        with self._giving_up():
            self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed by finish() or abandon()
            self._file.write(_HEADER.pack(_MAGIC, 0, 0))

    def add(self, row: bytes) -> None:
        """Add one row, or several."""
        if self._file is not None:
            with self._giving_up():
                self._file.write(row)
                self._bytes += len(row)

    def finish(self, covered: int) -> bool:
        """Make it the run's index, of the first `covered` bytes of outputs.jsonl; whether there now is one."""
        if self._file is not None:
            with self._giving_up():
                self._file.seek(0)
                self._file.write(_HEADER.pack(_MAGIC, covered, self._bytes // _ROW.size))
                self._file.close()
                os.replace(self._temporary, self._path)
        return self._file is not None

    def abandon(self) -> None:
        """Leave the old index as it is."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
            self._temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Go on without an index when the disk refuses it. The old one goes too: it will soon be behind."""
        try:
            yield
        except OSError:
            self.abandon()
            self._file = None
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def read_index(run: Path) -> tuple[Rows, int]:
    """The rows and how many bytes of outputs.jsonl they account for; no rows when there is no usable index."""
    nothing = np.empty(0, dtype=ROWS)
    try:
        data = (run / INDEX).read_bytes()
        size = os.path.getsize(run / OUTPUTS)
    except OSError:
        return nothing, 0
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        return nothing, 0
    _, covered, built = _HEADER.unpack_from(data)
    rows = np.frombuffer(data, dtype=ROWS, count=(len(data) - _HEADER.size) // _ROW.size, offset=_HEADER.size)
    if not _sound(rows[:built], built, covered):
        return nothing, 0
    rows, covered = _unbroken(rows, built, covered)
    # An index that speaks of bytes that are not there belongs to another file.
    return (nothing, 0) if covered > size else (rows, covered)


def _sound(built: Rows, count: int, covered: int) -> bool:
    """Whether the first rows are all there, each before the one above it, within the bytes they account for."""
    starts = built["offset"].astype(np.int64)
    ends = starts + built["length"]
    limits = np.concatenate([[covered], starts[:-1]])
    return len(built) == count and bool(((ends <= limits) & (ends > starts) & (starts >= 0)).all())


def _unbroken(rows: Rows, built: int, covered: int) -> tuple[Rows, int]:
    """The rows as far as each added one begins where the last one ended, and where that is."""
    starts = rows["offset"][built:].astype(np.int64)
    ends = starts + rows["length"][built:]
    broken = np.flatnonzero((starts != np.concatenate([[covered], ends[:-1]])) | (ends <= starts))
    kept = int(broken[0]) if len(broken) else len(starts)
    return rows[: built + kept], int(ends[kept - 1]) if kept else covered


def winners(rows: Rows) -> Rows:
    """The row that counts for each (id, trial), in case order: the last ok one, else the last error.

    Where a case was edited, only rows of the case as it was asked last count.
    """
    if not len(rows):
        return rows
    rows = rows[np.lexsort((rows["offset"], rows["trial"], rows["id"]))]
    newest = _last_of_each(rows)
    asked_last = rows["case"][newest][np.cumsum(newest) - newest]
    rows = rows[rows["case"] == asked_last]
    rows = rows[np.lexsort((rows["offset"], rows["ok"], rows["trial"], rows["id"]))]
    kept = rows[_last_of_each(rows)]
    return kept[np.lexsort((kept["trial"], kept["index"]))]


def counting(rows: Rows) -> Rows:
    """The rows that count, in no order that means anything."""
    # One sort of numbers tells whether any (id, trial) is there twice, which few journals have: far less than to rank.
    keys = np.sort(rows["id"] + rows["trial"].astype(np.uint64) * _ODD)
    return winners(rows) if bool((keys[1:] == keys[:-1]).any()) else rows


def _last_of_each(rows: Rows) -> npt.NDArray[np.bool_]:
    """Which rows, sorted by id and trial, are the last of theirs."""
    last = np.ones(len(rows), dtype=bool)
    last[:-1] = (rows["id"][1:] != rows["id"][:-1]) | (rows["trial"][1:] != rows["trial"][:-1])
    return last
