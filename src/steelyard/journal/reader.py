"""Reading whole records back: by offset, and all of a run in case order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from steelyard.errors import ConfigurationError
from steelyard.journal.entries import decode_entry
from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import ROWS, Rows, pack_row, read_index, winners
from steelyard.journal.scan import damage, lines_forward, readable_end
from steelyard.records import Record, id_digest
from steelyard.stats.scores import verdict

_decode_record = msgspec.json.Decoder(Record).decode


class RecordReader:
    """Whole records of one file, read by where they begin."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close()

    def at(self, offset: int) -> Record:
        """The record that begins at this byte."""
        self._file.seek(offset)
        try:
            return _decode_record(self._file.readline())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise damage(self._path, self._file.fileno(), offset) from error

    def close(self) -> None:
        self._file.close()


def iter_records(run: Path) -> Iterator[Record]:
    """The record that counts for each (case, trial), in case order, one in memory at a time."""
    if not run.is_dir():
        raise ConfigurationError(f"there is no run directory {run}")
    if not (run / OUTPUTS).exists():
        return
    rows = winners(index_rows(run))
    reader = RecordReader(run / OUTPUTS)
    try:
        for offset in rows["offset"].tolist():
            yield reader.at(offset)
    finally:
        reader.close()


def index_rows(run: Path) -> Rows:
    """The rows of the index, completed from the journal where the index is absent, behind or of another journal."""
    rows, covered = read_index(run)
    descriptor = os.open(run / OUTPUTS, os.O_RDONLY)
    try:
        end = readable_end(descriptor)
        if covered > end or not _fits(descriptor, rows):
            rows, covered = rows[:0], 0
        missing = b"".join(_rows_after(run, descriptor, covered, end)) if covered < end else b""
    finally:
        os.close(descriptor)
    return np.concatenate([rows, np.frombuffer(missing, dtype=ROWS)]) if missing else rows


def _fits(descriptor: int, rows: Rows) -> bool:
    """Whether the first and the last row lie where these records do: rows of another journal would not."""
    for row in (rows[0], rows[-1]) if len(rows) else ():
        line = os.pread(descriptor, int(row["length"]), int(row["offset"]))
        entry = decode_entry(line)
        if entry is None or not line.endswith(b"\n") or id_digest(entry.id) != row["id"]:
            return False
    return True


def _rows_after(run: Path, descriptor: int, start: int, end: int) -> Iterable[bytes]:
    for offset, line in lines_forward(descriptor, start, end):
        entry = decode_entry(line)
        if entry is None:
            raise damage(run / OUTPUTS, descriptor, offset)
        said = verdict(entry.scores)
        digest = id_digest(entry.id)
        yield pack_row(
            offset, digest, len(line) + 1, entry.index, entry.trial, entry.status == "ok", said, entry.case_fp
        )
