"""The entries of a journal: its records without what only a reader of answers needs, decoded many at a time."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.disk import open_regular, sync_directory
from steelyard.errors import ConfigurationError, RunDamaged, RunEdited
from steelyard.journal.checksum import (
    SEAL_BYTES,
    Line,
    are_sound,
    is_sound,
    judge,
    repaired,
    sealed,
    seals_match,
    stored_crc,
)
from steelyard.journal.files import DAMAGED, INDEX, OUTPUTS
from steelyard.journal.index import ROWS, Rows, pack_row, read_index, signed, winners
from steelyard.journal.manifest import left_out_lines, metrics_lines
from steelyard.records import Record, id_digest, verdict

Places: TypeAlias = npt.NDArray[np.int64]

_BLOCK = 1 << 18
"""Bytes read at a time: small enough to stay in the processor's cache while its lines are decoded."""

_SOME_ROWS = 1 << 13
log = logging.getLogger("steelyard")

_NEWLINE, _OPENING, _CLOSING = b"\n{}"
_ABSENT = msgspec.Raw()


class Entry(Record, kw_only=True, gc=False):
    """A record with its payload, messages and what the case has, often most of the line, left as they are written.

    It has all fields of a record, needed or not: what recovery accepts must be readable as a whole record later.
    """

    messages: msgspec.Raw = _ABSENT  # type: ignore[assignment]
    input_payload: msgspec.Raw = _ABSENT
    expected: msgspec.Raw = _ABSENT
    metadata: msgspec.Raw = _ABSENT  # type: ignore[assignment]


_decoder = msgspec.json.Decoder(Entry)

NOT_A_RECORD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_entry(line: bytes) -> Entry | None:
    """The entry in a line, or None when the line is not a whole record as it was written."""
    entry = _decode_any(line)
    return entry if entry is not None and _is_as_written(line, entry.v) else None


decode_trusted = _decoder.decode
"""The entry in a line that this run has just written; its payload and messages are as they are in the line."""


def _decode_any(line: bytes) -> Entry | None:
    """The entry in a line, whatever its checksum says."""
    try:
        entry = _decoder.decode(line)
        _let_go([entry])
    except NOT_A_RECORD:
        return None
    return entry


def _is_as_written(line: bytes, version: int) -> bool:
    line = line.rstrip(b"\r\n")
    return is_sound(line) or judge(line, version) is Line.OLD


def _let_go(entries: list[Entry]) -> None:
    """Look at what was left as it is written, in which the decoder takes any bytes, and drop it."""
    for entry in entries:
        if entry.messages is not _ABSENT or entry.input_payload is not _ABSENT:
            bytes(entry.messages).decode()
            bytes(entry.input_payload).decode()
            entry.messages = entry.input_payload = _ABSENT
        if entry.expected is not _ABSENT or entry.metadata is not _ABSENT:
            bytes(entry.expected).decode()
            bytes(entry.metadata).decode()
            entry.expected = entry.metadata = _ABSENT


class EntryBlock(NamedTuple):
    """Some entries that follow one another in a journal, the newest first, and where each one's line lies."""

    offsets: list[int]
    lengths: list[int]
    """Without the newline."""
    crcs: list[int]
    """The checksum that each line carries; 0 for one of before there were checksums."""
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
        crcs = are_sound(block, starts, lengths)
        entries = None if crcs is None else _decode_lines(block, starts, lengths)
        if entries is None or crcs is None:
            entries, crcs = _decode_each(begins, block, starts, lengths)
        entries.reverse()
        crcs.reverse()
        yield EntryBlock((starts[::-1] + begins).tolist(), lengths[::-1].tolist(), crcs, entries)


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


def _decode_each(begins: int, block: memoryview, starts: Places, lengths: Places) -> tuple[list[Entry], list[int]]:
    """The same, line by line, from the last one on, with the checksums: finds the bad one."""
    entries, crcs = [], []
    for start, length in zip(starts[::-1].tolist(), lengths[::-1].tolist(), strict=True):
        line = bytes(block[start : start + length])
        entry = decode_entry(line)
        if entry is None:
            raise BadLine(begins + start)
        entries.append(entry)
        crcs.append(stored_crc(line) or 0)
    entries.reverse()
    crcs.reverse()
    return entries, crcs


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
    return end if not tail or not _is_torn(tail) else start


def _is_torn(tail: bytes) -> bool:
    """Whether what follows the last newline is a part of a line: a whole one may lack its newline."""
    return _decode_any(tail) is None and not is_sound(tail[:-1])


def ends_whole(path: Path) -> bool:
    """Whether the file ends with a newline, or is empty."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        return end == _start_of_last_line(file.fileno(), end)


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
        cut = 0
        if is_sound(tail[:-1]):
            log.warning("%s: restored the damaged newline after its last line (byte %d)", path, end - 1)
            file.seek(end - 1)
            file.write(b"\n")
        elif _decode_any(tail) is not None:
            file.seek(end)
            file.write(b"\n")
        else:
            file.truncate(start)
            cut = end - start
        file.flush()
        os.fsync(file.fileno())
        return cut


def bad_line(path: Path, descriptor: int, offset: int) -> RunDamaged | RunEdited:
    """The error that names a bad line: which one, at which byte, what is wrong with it, and what can be done."""
    number = 1 + _count_newlines(descriptor, offset)
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(offset)
        line = file.readline().rstrip(b"\r\n")
    where = f"line {number} (byte {offset})"
    entry = _decode_any(line)
    fixed = None if entry is not None and is_sound(line) else repaired(line)
    if fixed is not None:
        place = next(place for place, (old, new) in enumerate(zip(line, fixed, strict=True)) if old != new)
        return RunDamaged(
            f"{path} is damaged at {where}: a bit of byte {offset + place} is flipped.",
            " {salvage} restores it",
            path=path.parent,
            line=number,
            byte=offset,
        )
    if entry is not None:
        what = "its crc32 is missing" if stored_crc(line) is None else "its crc32 is not that of its text"
        return RunEdited(
            f"{path} was edited at {where}: {what}.",
            " {accept_edits} takes such lines as they are; {salvage} moves them out and asks their cases again",
            path=path.parent,
            line=number,
            byte=offset,
        )
    return RunDamaged(
        f"{path} is damaged at {where}: not a record, and more follow it.",
        " {salvage} keeps what is readable and retries the rest",
        path=path.parent,
        line=number,
        byte=offset,
    )


def check_line(path: Path, descriptor: int, offset: int, line: bytes) -> None:
    """Raise RunDamaged or RunEdited unless a line, without its newline, is as it was written."""
    if is_sound(line):
        return
    entry = _decode_any(line)
    if entry is None or not _is_as_written(line, entry.v):
        raise bad_line(path, descriptor, offset)


class Rewritten(NamedTuple):
    """What became of the lines of a journal that were not as they had been written."""

    moved: int = 0
    """Moved to `damaged.jsonl`."""
    restored: int = 0
    """A flipped bit was flipped back; the line as it was found is in `damaged.jsonl`."""
    accepted: int = 0
    """Edited, and kept as they are with a new checksum."""


def rewrite(run: Path, *, salvage: bool, accept_edits: bool, before: Callable[[], None] = lambda: None) -> Rewritten:
    """Deal with lines that are not as they were written; the journal is replaced in one step, if it changes.

    With `salvage` lines with one flipped bit are restored, and others moved to `damaged.jsonl`. With `accept_edits`
    lines that were edited stay and get a new checksum. `before` is called before anything that readers see is changed.
    """
    path = run / OUTPUTS
    temporary = path.with_name(f"{OUTPUTS}.{os.getpid()}.tmp")
    damaged: list[bytes] = []
    counts = {"moved": 0, "restored": 0, "accepted": 0}
    with open(path, "rb") as source, open(temporary, "wb") as kept:
        for line in source:
            if line == b"\n":
                continue
            text = line.removesuffix(b"\n")
            what, new = _dealt_with(text, salvage=salvage, accept_edits=accept_edits)
            if what is not None:
                counts[what] += 1
            if what in ("moved", "restored"):
                damaged.append(text + b"\n")
            if new is not None:
                kept.write(new + b"\n")
        kept.flush()
        os.fsync(kept.fileno())
    found = Rewritten(**counts)
    if not any(found):
        temporary.unlink()
        return found
    before()
    if damaged:
        with open(run / DAMAGED, "ab") as file:
            file.writelines(damaged)
            file.flush()
            os.fsync(file.fileno())
    # The old index speaks of offsets in the old file: it goes first, so that no reader finds it beside the new one.
    (run / INDEX).unlink(missing_ok=True)
    os.replace(temporary, path)
    sync_directory(run)
    return found


def _dealt_with(line: bytes, *, salvage: bool, accept_edits: bool) -> tuple[str | None, bytes | None]:
    """What is done about a line, if anything, and what is kept of it."""
    entry = _decode_any(line)
    if entry is not None and _is_as_written(line, entry.v):
        return None, line
    if salvage and is_sound(line[:-1]) and decode_entry(line[:-1]) is not None:
        return "restored", line[:-1]  # the newline after it was damaged
    fixed = repaired(line)
    if fixed is not None and decode_entry(fixed) is not None:
        return ("restored", fixed) if salvage else (None, line)
    if entry is not None and accept_edits:
        value = msgspec.json.decode(line)
        value.pop("crc32", None)
        return "accepted", sealed(msgspec.json.encode(value))[:-1]
    return ("moved", None) if salvage else (None, line)


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


decode_record = msgspec.json.Decoder(Record).decode


class RecordReader:
    """Whole records of one file, read by where they begin."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.fdopen(open_regular(path), "rb")

    def at(self, offset: int) -> Record:
        """The record that begins at this byte."""
        self._file.seek(offset)
        line = self._file.readline()
        check_line(self._path, self._file.fileno(), offset, line.removesuffix(b"\n"))
        try:
            return decode_record(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad_line(self._path, self._file.fileno(), offset) from error

    def close(self) -> None:
        self._file.close()


def iter_records(run: Path) -> Iterator[Record]:
    """The record that counts for each (case, trial), in case order, one in memory at a time."""
    if not run.is_dir():
        raise ConfigurationError(f"there is no run directory {run}", topic="not-a-run")
    if not (run / OUTPUTS).exists():
        return
    rows = counted_rows(run)
    reader = RecordReader(run / OUTPUTS)
    try:
        for offset in rows["offset"].tolist():
            yield reader.at(offset)
    finally:
        reader.close()


def counted_rows(run: Path) -> Rows:
    """The row that counts for each (case, trial), in case order; every line is checked, whether it counts or not."""
    rows = index_rows(run, check=True)
    known = metrics_lines(run)
    if known is not None and len(rows) < known.total:
        raise RunDamaged(
            f"{run / OUTPUTS} has {len(rows):,} lines, and had {known.total:,} when the run was completed.",
            " {update} asks the cases again that are lost",
            path=run,
            line=len(rows) + 1,
            byte=os.path.getsize(run / OUTPUTS),
        )
    return winners(rows[_belonging(run, len(rows))])


def belonging_rows(run: Path, rows: Rows) -> Rows:
    """Those of a run's rows, one for each line, whose cases still belong to it."""
    return rows[_belonging(run, len(rows))]


def left_out_offsets(run: Path) -> frozenset[int]:
    """Where the lines begin that do not belong to a run any more."""
    if not (run / OUTPUTS).exists() or not left_out_lines(run):
        return frozenset()
    rows = index_rows(run)
    return frozenset(rows["offset"][~_belonging(run, len(rows))].tolist())


def _belonging(run: Path, lines: int) -> npt.NDArray[np.bool_]:
    kept = np.ones(lines, dtype=bool)
    for first, last in left_out_lines(run):
        kept[first - 1 : last] = False
    return kept


def index_rows(run: Path, *, check: bool = False) -> Rows:
    """One row for each line: from the index, and from the journal where that is absent, behind or of another one.

    With `check` the lines that the index knows are looked at, too: RunDamaged or RunEdited for one not as written.
    """
    rows, covered = read_index(run)
    descriptor = open_regular(run / OUTPUTS)
    try:
        end = readable_end(descriptor)
        if covered > end or not _fits(descriptor, rows) or (check and not _are_as_written(descriptor, covered)):
            rows, covered = rows[:0], 0
        missing = b"".join(_rows_after(run, descriptor, covered, end)) if covered < end else b""
    finally:
        os.close(descriptor)
    return np.concatenate([rows, np.frombuffer(signed(missing), dtype=ROWS)]) if missing else rows


def _are_as_written(descriptor: int, end: int) -> bool:
    """Whether each line before `end` has its checksum."""
    for _, block in blocks_backward(descriptor, end):
        starts, lengths = _lines_of(block)
        if len(starts) and are_sound(block, starts, lengths) is None:
            return False
    return True


def _fits(descriptor: int, rows: Rows) -> bool:
    """Whether each row's line ends there and carries its checksum: rows of another journal would not."""
    if not len(rows):
        return True
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped:
        data = np.frombuffer(mapped, dtype=np.uint8)
        try:
            for start in range(0, len(rows), _SOME_ROWS):
                if not _fits_some(data, rows[start : start + _SOME_ROWS]):
                    return False
                if hasattr(mmap, "MADV_DONTNEED"):  # pages that were looked at would count as this process's memory
                    mapped.madvise(mmap.MADV_DONTNEED)
            return True
        finally:
            del data  # a mapping that somebody looks at cannot be closed


def _fits_some(data: npt.NDArray[np.uint8], rows: Rows) -> bool:
    ends = rows["offset"].astype(np.int64) + rows["length"] - 1
    if (rows["length"] <= SEAL_BYTES).any() or (data[ends] != _NEWLINE).any():
        return False
    return bool(seals_match(data, ends, rows["crc"]).all())


def _rows_after(run: Path, descriptor: int, start: int, end: int) -> Iterable[bytes]:
    for offset, line in lines_forward(descriptor, start, end):
        entry = decode_entry(line)
        if entry is None:
            raise bad_line(run / OUTPUTS, descriptor, offset)
        passed = verdict(entry.scores)
        digest = id_digest(entry.id)
        yield pack_row(
            offset,
            digest,
            len(line) + 1,
            entry.index,
            entry.trial,
            entry.status == "ok",
            passed,
            entry.case_fp,
            stored_crc(line) or 0,
        )
