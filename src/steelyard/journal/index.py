"""`outputs.idx`: where each record lies, so that readers need not scan. Rebuildable from `outputs.jsonl` alone."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from steelyard.disk import read_regular
from steelyard.journal.files import INDEX, OUTPUTS

log = logging.getLogger("steelyard")

_MAGIC = b"SYIDX\x04\0\0"
"""The file begins with it. One row for each line of outputs.jsonl follows, in their order."""
_OLD_MAGIC = b"SYIDX\x02\0\0"

_ROW = struct.Struct("<QQIIHBBIII")
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
        ("crc", "<u4"),
        ("check", "<u4"),
    ]
)
_WORDS = ROWS.itemsize // 4
_FACTORS = np.array([0x9E3779B1 + 0x3C6EF372 * number | 1 for number in range(_WORDS - 1)], dtype=np.uint64).astype(
    np.uint32
)
"""One odd number for each word of a row but the last: any one changed bit changes the sum of their products."""
_CHUNK_ROWS = 1 << 12

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
    offset: int,
    id_digest: int,
    length: int,
    index: int,
    trial: int,
    ok: bool,
    verdict: bool | None,
    case_fp: str,
    crc: int = 0,
) -> bytes:
    """One row as bytes, not signed yet. Of the fingerprint it has 32 bits: enough to tell a case from its edited self.

    `crc` is the checksum that the line carries; 0 for a line of before there were checksums.
    """
    state = UNSCORED if verdict is None else verdict
    return _ROW.pack(offset, id_digest, length, index, trial, ok, state, short_fingerprint(case_fp), crc, 0)


def signed(rows: bytes) -> bytes:
    """The same rows with their checksums."""
    words = np.frombuffer(rows, dtype="<u4").reshape(-1, _WORDS).copy()
    words[:, -1] = _checks(words)
    return words.tobytes()


def _checks(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    sums: npt.NDArray[np.uint32] = (words[:, :-1] * _FACTORS).sum(axis=1, dtype=np.uint32)
    return sums + np.uint32(1)


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
    """Many rows at once, signed: `notes` has the columns offset, length, slot, verdict and crc."""
    rows = np.zeros(len(notes), dtype=ROWS)
    verdicts = notes[:, 3]
    rows["offset"], rows["length"] = notes[:, 0], notes[:, 1]
    rows["id"], rows["index"], rows["trial"] = ids, indices, trials
    rows["case"] = fingerprints & np.uint64(0xFFFFFFFF)
    rows["ok"] = verdicts != ERROR
    rows["verdict"] = np.where(verdicts == ERROR, UNSCORED, verdicts)
    rows["crc"] = notes[:, 4]
    return signed(rows.tobytes())


class IndexBuilder:
    """Writes a whole index, from the newest record to the oldest, and puts it in place of the old one in one step.

    A disk that refuses it costs the index, never the run.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / INDEX
        self._backward = self._path.with_name(f"{INDEX}.{os.getpid()}.backward.tmp")
        self._temporary = self._path.with_name(f"{INDEX}.{os.getpid()}.tmp")
        self._file: BinaryIO | None = None
        with self._giving_up():
            self._file = open(self._backward, "w+b")  # noqa: SIM115 - closed by finish() or abandon()

    def add(self, rows: bytes) -> None:
        """Add some rows, the newest first."""
        if self._file is not None:
            with self._giving_up():
                self._file.write(rows)

    def finish(self) -> bool:
        """Make it the run's index; whether there now is one."""
        if self._file is not None:
            with self._giving_up():
                self._turn_round(self._file)
                self._file.close()
                os.replace(self._temporary, self._path)
                self._backward.unlink()
        return self._file is not None

    def _turn_round(self, backward: BinaryIO) -> None:
        """Write the rows in the order of the journal, signed, a piece at a time."""
        backward.flush()
        left = os.fstat(backward.fileno()).st_size // _ROW.size
        with open(self._temporary, "wb") as file:
            file.write(_MAGIC)
            while left:
                count = min(left, _CHUNK_ROWS)
                left -= count
                data = os.pread(backward.fileno(), count * _ROW.size, left * _ROW.size)
                file.write(signed(np.frombuffer(data, dtype=ROWS)[::-1].tobytes()))

    def abandon(self) -> None:
        """Leave the old index as it is."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
            self._temporary.unlink(missing_ok=True)
            self._backward.unlink(missing_ok=True)

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
    """The rows and how many bytes of outputs.jsonl they account for; no rows when there is no usable index.

    Rows are taken as far as each is as it was written, and begins where the one before it ended.
    """
    path = run / INDEX
    nothing = np.empty(0, dtype=ROWS)
    try:
        data = read_regular(path)
    except OSError:
        return nothing, 0
    if data[: len(_MAGIC)] != _MAGIC:
        if data and not data.startswith(_OLD_MAGIC):
            log.warning("%s is damaged at its beginning; reading %s instead", path, OUTPUTS)
        return nothing, 0
    count = (len(data) - len(_MAGIC)) // _ROW.size
    rows = np.frombuffer(data, dtype=ROWS, count=count, offset=len(_MAGIC))
    words = np.frombuffer(data, dtype="<u4", count=count * _WORDS, offset=len(_MAGIC)).reshape(-1, _WORDS)
    bad = np.flatnonzero(words[:, -1] != _checks(words))
    if len(bad):
        log.warning("%s is damaged at row %d; reading %s instead", path, int(bad[0]) + 1, OUTPUTS)
        rows = rows[: int(bad[0])]
    return _unbroken(rows)


def _unbroken(rows: Rows) -> tuple[Rows, int]:
    """The rows as far as each one begins where the last one ended, and where that is."""
    starts = rows["offset"].astype(np.int64)
    ends = starts + rows["length"]
    broken = np.flatnonzero((starts != np.concatenate([[0], ends[:-1]])) | (ends <= starts))
    kept = int(broken[0]) if len(broken) else len(starts)
    return rows[:kept], int(ends[kept - 1]) if kept else 0


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
