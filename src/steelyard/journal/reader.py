"""The entries of a journal: its records without what only a reader of answers needs, decoded many at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.disk import sync_directory
from steelyard.errors import ConfigurationError, RunDamaged
from steelyard.journal.files import DAMAGED, INDEX, OUTPUTS
from steelyard.journal.index import ROWS, Rows, pack_row, read_index, winners
from steelyard.records import Record, id_digest, verdict

Places: TypeAlias = npt.NDArray[np.int64]

_BLOCK = 1 << 18
"""Bytes read at a time: small enough to stay in the processor's cache while its lines are decoded."""

_NEWLINE, _OPENING, _CLOSING = b"\n{}"
_ABSENT = msgspec.Raw()


class Entry(Record, kw_only=True, gc=False):
    """A record with its payload and messages, often most of the line, left as they are written.

    It has all fields of a record, needed or not: what recovery accepts must be readable as a whole record later.
    """

    messages: msgspec.Raw = _ABSENT  # type: ignore[assignment]
    input_payload: msgspec.Raw = _ABSENT


_decoder = msgspec.json.Decoder(Entry)

NOT_A_RECORD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_entry(line: bytes) -> Entry | None:
    """The entry in a line, or None when the line is not a whole record."""
    try:
        entry = _decoder.decode(line)
        _let_go([entry])
    except NOT_A_RECORD:
        return None
    return entry


def _let_go(entries: list[Entry]) -> None:
    """Look at what was left as it is written, in which the decoder takes any bytes, and drop it."""
    for entry in entries:
        if entry.messages is not _ABSENT or entry.input_payload is not _ABSENT:
            bytes(entry.messages).decode()
            bytes(entry.input_payload).decode()
            entry.messages = entry.input_payload = _ABSENT


class EntryBlock(NamedTuple):
    """Some entries that follow one another in a journal, the newest first, and where each one's line lies."""

    offsets: list[int]
    lengths: list[int]
    """Without the newline."""
    entries: list[Entry]


class BadLine(Exception):
    """A line that is not a record."""

    def __init__(self, offset: int) -> None:
        self.offset = offset


def entries_backward(descriptor: int, end: int) -> Iterator[EntryBlock]:
    """All entries before `end`, block by block, the last one first; BadLine at the first line that is none."""
    for begins, block in blocks_backward(descriptor, end):
        starts, lengths = _lines_of(block)
        if not len(starts):
            continue
        entries = _decode_lines(block, starts, lengths)
        if entries is None:
            entries = _decode_each(begins, block, starts, lengths)
        entries.reverse()
        yield EntryBlock((starts[::-1] + begins).tolist(), lengths[::-1].tolist(), entries)


def _lines_of(block: memoryview) -> tuple[Places, Places]:
    """Where the lines begin that are not empty, and how long they are."""
    ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == _NEWLINE)
    if not len(ends) or ends[-1] != len(block) - 1:
        ends = np.append(ends, len(block))
    starts = np.empty_like(ends)
    starts[0], starts[1:] = 0, ends[:-1] + 1
    lengths = ends - starts
    return starts[lengths > 0], lengths[lengths > 0]


def _decode_lines(block: memoryview, starts: Places, lengths: Places) -> list[Entry] | None:
    """The entries of many lines in one go; None unless each line is sure to hold one entry and no more.

    The decoder does not care for lines. But where each begins with `{` and ends with `}` no value can reach from one
    into the next, and with as many values as lines there is one in each.
    """
    signs = np.frombuffer(block, dtype=np.uint8)
    if not ((signs[starts] == _OPENING).all() and (signs[starts + lengths - 1] == _CLOSING).all()):
        return None
    try:
        entries = _decoder.decode_lines(block)
        _let_go(entries)
    except NOT_A_RECORD:
        return None
    return entries if len(entries) == len(starts) else None


def _decode_each(begins: int, block: memoryview, starts: Places, lengths: Places) -> list[Entry]:
    """The same, line by line, from the last one on: finds the bad one."""
    entries = []
    for start, length in zip(starts[::-1].tolist(), lengths[::-1].tolist(), strict=True):
        entry = decode_entry(bytes(block[start : start + length]))
        if entry is None:
            raise BadLine(begins + start)
        entries.append(entry)
    entries.reverse()
    return entries


def blocks_backward(descriptor: int, end: int, size: int = _BLOCK) -> Iterator[tuple[int, memoryview]]:
    """(offset, whole lines) from `end` to the beginning, in memory bounded by the longest line."""
    position, carry, least = end, b"", size
    while position > 0:
        size = min(size, position)
        position -= size
        chunk = read_exactly(descriptor, size, position) + carry
        # What stands before the first newline goes with the block before it.
        begins = chunk.find(b"\n") + 1 if position else 0
        if position and not begins:
            carry, size = (
                chunk,
                size * 2,
            )  # a line longer than the block: look further back each time, not again and again
            continue
        carry, size = chunk[:begins][:-1], least
        if begins < len(chunk):
            yield position + begins, memoryview(chunk)[begins:]


def read_exactly(descriptor: int, size: int, position: int) -> bytes:
    """These bytes of a file; os.pread may return fewer than asked for (2 GB at a time on Linux)."""
    parts = []
    while size > 0:
        part = os.pread(descriptor, size, position)
        if not part:
            break
        parts.append(part)
        position += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def lines_forward(descriptor: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of every line from `start` to `end`, where one ends, in order."""
    with os.fdopen(os.dup(descriptor), "rb", buffering=1 << 20) as file:
        file.seek(start)
        offset = start
        for line in file:
            if offset + len(line) > end:
                return
            if line != b"\n":
                yield offset, line.removesuffix(b"\n")
            offset += len(line)


def readable_end(descriptor: int) -> int:
    """How many bytes can be read as whole lines: all, or all but a torn last line."""
    end = os.fstat(descriptor).st_size
    start = _start_of_last_line(descriptor, end)
    tail = read_exactly(descriptor, end - start, start)
    return end if not tail or decode_entry(tail) is not None else start


def repair_tail(path: Path) -> int:
    """Make the file end after a whole line; returns how many torn bytes were cut off.

    A whole last line that only lacks its newline gets it; anything else after the last newline goes.
    """
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        start = _start_of_last_line(file.fileno(), end)
        if start == end:
            return 0
        tail = read_exactly(file.fileno(), end - start, start)
        if decode_entry(tail) is not None:
            file.seek(end)
            file.write(b"\n")
            cut = 0
        else:
            file.truncate(start)
            cut = end - start
        file.flush()
        os.fsync(file.fileno())
        return cut


def damage(path: Path, descriptor: int, offset: int) -> RunDamaged:
    """The error that names a bad line: which one, at which byte, and what can be done."""
    line = 1 + _count_newlines(descriptor, offset)
    return RunDamaged(
        f"{path} is damaged at line {line} (byte {offset}): not a record, and more follow it. "
        f"--salvage keeps what is readable and retries the rest",
        path=path.parent,
        line=line,
        byte=offset,
    )


def salvage(run: Path) -> int:
    """Move unreadable lines to `damaged.jsonl`; returns how many. The journal is replaced in one step."""
    path, bad = run / OUTPUTS, 0
    temporary = path.with_name(f"{OUTPUTS}.{os.getpid()}.tmp")
    with open(path, "rb") as source, open(temporary, "wb") as kept, open(run / DAMAGED, "ab") as damaged:
        for line in source:
            whole = line if line.endswith(b"\n") else line + b"\n"
            if line == b"\n":
                continue
            good = decode_entry(line) is not None
            bad += not good
            (kept if good else damaged).write(whole)
        for file in (damaged, kept):
            file.flush()
            os.fsync(file.fileno())
    if bad:
        # The old index speaks of offsets in the old file: it goes first, so that no reader finds it beside the new one.
        (run / INDEX).unlink(missing_ok=True)
        os.replace(temporary, path)
    else:
        temporary.unlink()
        if not os.path.getsize(run / DAMAGED):
            (run / DAMAGED).unlink()
    sync_directory(run)
    return bad


def _start_of_last_line(descriptor: int, end: int) -> int:
    """Where the text after the last newline begins; `end` when the file ends with one."""
    position = end
    while position > 0:
        size = min(_BLOCK, position)
        position -= size
        found = read_exactly(descriptor, size, position).rfind(b"\n")
        if found >= 0:
            return position + found + 1
    return 0


def _count_newlines(descriptor: int, end: int) -> int:
    count = 0
    for position in range(0, end, _BLOCK):
        count += read_exactly(descriptor, min(_BLOCK, end - position), position).count(b"\n")
    return count


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
        passed = verdict(entry.scores)
        digest = id_digest(entry.id)
        yield pack_row(
            offset, digest, len(line) + 1, entry.index, entry.trial, entry.status == "ok", passed, entry.case_fp
        )
