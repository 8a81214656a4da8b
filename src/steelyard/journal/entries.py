"""The entries of a journal: its records without what only a reader of answers needs, decoded many at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.records import Score, Status

Places: TypeAlias = npt.NDArray[np.int64]

_BLOCK = 1 << 18
"""Bytes read at a time: small enough to stay in the processor's cache while its lines are decoded."""

_NEWLINE, _OPENING, _CLOSING = b"\n{}"
_ABSENT = msgspec.Raw()


class Entry(msgspec.Struct, gc=False):
    """A record with its payload and messages, often most of the line, left as they are written.

    All fields are here, needed or not: what recovery accepts must be readable as a whole record later.
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
    node: str | None = None
    num_tokens_input_cache_write: int | None = None
    notes: list[str] = []
    messages: msgspec.Raw = _ABSENT
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
