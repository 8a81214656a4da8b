"""Reading a journal: forwards, backwards, and mending its last line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from steelyard.disk import sync_directory
from steelyard.errors import RunDamaged
from steelyard.journal.files import DAMAGED, INDEX, OUTPUTS
from steelyard.records import Score, Status

_BLOCK = 1 << 18
"""Bytes read at a time: small enough to stay in the processor's cache while its lines are decoded."""


class Entry(msgspec.Struct, gc=False):
    """A record without its payload and messages, often most of the line, which are skipped undecoded.

    All else is here, needed or not: what recovery accepts must be readable as a whole record later. The
    response's text is looked at and let go, so that many entries can be held at once.
    """

    v: int
    id: str
    trial: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    status: Status
    attempts: int
    elapsed: float
    case_fp: str
    scored_by: str
    run_time: float
    response_text: str | None
    time_to_first_token: float | None
    time_to_last_token: float | None
    time_per_output_token: float | None
    num_tokens_input: int | None
    num_tokens_output: int | None
    request_time: datetime | None
    stop_reason: str | None
    error: str | None
    scores: list[Score]
    num_tokens_input_cached: int | None = None
    num_tokens_output_reasoning: int | None = None
    retries: int = 0
    error_type: str | None = None
    input_prompt: str | None = None
    cached: bool = False
    time_to_first_content_token: float | None = None
    time_to_first_reasoning_token: float | None = None
    time_waiting: float | None = None
    time_in_backoff: float | None = None
    time_queued: float | None = None
    time_from_planned: float | None = None
    cost: float | None = None
    tokens_estimated: bool = False
    http_status: int | None = None
    request_id: str | None = None
    notes: list[str] = []


_decoder = msgspec.json.Decoder(Entry)


def decode_entry(line: bytes) -> Entry | None:
    """The entry in a line, or None when the line is not a whole record."""
    try:
        if not line.isascii() and (b'"messages":' in line or b'"input_payload":' in line):
            line.decode()  # in what it skips, the decoder takes any bytes
        entry = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    entry.response_text = entry.input_prompt = None
    return entry


def lines_backward(descriptor: int, end: int, block: int = _BLOCK) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of every line before `end`, the last one first, in memory bounded by the longest line."""
    position, carry = end, b""
    while position > 0:
        size = min(block, position)
        position -= size
        chunk = _read_exactly(descriptor, size, position) + carry
        lines = chunk.split(b"\n")
        carry = lines[0]
        # A line longer than the block: look further back each time, so that joining it stays linear.
        block = block * 2 if len(lines) == 1 else _BLOCK
        offset = position + len(chunk)
        for line in reversed(lines[1:]):
            offset -= len(line)
            if line:
                yield offset, line
            offset -= 1
    if carry:
        yield 0, carry


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
    tail = _read_exactly(descriptor, end - start, start)
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
        tail = _read_exactly(file.fileno(), end - start, start)
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
        found = _read_exactly(descriptor, size, position).rfind(b"\n")
        if found >= 0:
            return position + found + 1
    return 0


def _count_newlines(descriptor: int, end: int) -> int:
    count = 0
    for position in range(0, end, _BLOCK):
        count += _read_exactly(descriptor, min(_BLOCK, end - position), position).count(b"\n")
    return count


def _read_exactly(descriptor: int, size: int, position: int) -> bytes:
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
