"""Reading a journal forwards, mending its last line, and telling where it is damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from steelyard.disk import sync_directory
from steelyard.errors import RunDamaged
from steelyard.journal.entries import decode_entry, read_exactly
from steelyard.journal.files import DAMAGED, INDEX, OUTPUTS

_BLOCK = 1 << 18
"""Bytes read at a time."""


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


def mend_tail(path: Path) -> int:
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
        f"--salvage keeps what is readable and asks the rest again",
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
