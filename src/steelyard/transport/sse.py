"""Server-sent events parsed from raw bytes, each with the time at which it was complete."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNNAMED = "message"
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\r|\n)")

_Fields: TypeAlias = tuple[list[bytes], bytes]
"""The data lines of an event and its name."""


class ServerSentEvent(msgspec.Struct, frozen=True, gc=False):
    """One event of a stream. `at` is the arrival of the chunk that completed it.

    `terminated` is False for a last event without its closing blank line: the standard drops it, but some servers end
    with a bare `data: [DONE]`. Its data may be incomplete.
    """

    data: bytes
    name: str
    at: float
    terminated: bool = True


_Found: TypeAlias = tuple[list[ServerSentEvent], _Fields | None]
"""The complete events, and the fields of a last, unterminated one."""


class ArrivalClock:
    """Returns when the byte at a position arrived; positions must be asked for in order."""

    def __init__(self, chunks: Sequence[bytes], arrivals: Sequence[float]) -> None:
        self._pieces = list(zip(chunks, arrivals, strict=True))
        self._piece = 0
        self._end = len(chunks[0]) if chunks else 0

    def at(self, position: int) -> float:
        while position >= self._end and self._piece + 1 < len(self._pieces):
            self._piece += 1
            self._end += len(self._pieces[self._piece][0])
        return self._pieces[self._piece][1]


def events(chunks: Sequence[bytes], arrivals: Sequence[float]) -> list[ServerSentEvent]:
    """Parse the events of a whole stream, however it was cut into chunks; only event names are decoded."""
    body = b"".join(chunks)
    clock = ArrivalClock(chunks, arrivals)
    start = len(_BYTE_ORDER_MARK) if body.startswith(_BYTE_ORDER_MARK) else 0
    found, rest = _of_any_lines(body, start, clock) if b"\r" in body else _of_plain_lines(body, start, clock)
    if rest is not None:
        data, name = rest
        found.append(_event(data, name, clock.at(len(body)), terminated=False))
    return found


def _of_plain_lines(body: bytes, start: int, clock: ArrivalClock) -> _Found:
    """Parse events whose lines all end in `\\n`, as nearly all servers write them: twice as fast."""
    found: list[ServerSentEvent] = []
    *blocks, last = body[start:].split(b"\n\n")
    position = start
    for block in blocks:
        position += len(block) + 2
        if block.startswith(b"data: ") and b"\n" not in block:
            found.append(ServerSentEvent(block[6:], _UNNAMED, clock.at(position - 1)))
            continue
        data, name = _fields(block)
        if data:
            found.append(_event(data, name, clock.at(position - 1)))
    data, name = _fields(last)
    return found, (data, name) if data else None


def _fields(block: bytes) -> _Fields:
    data: list[bytes] = []
    name = b""
    for line in block.split(b"\n"):
        name = _take(line, data, name)
    return data, name


def _of_any_lines(body: bytes, start: int, clock: ArrivalClock) -> _Found:
    """Parse events with any line endings, `\\r` and `\\r\\n` included."""
    found: list[ServerSentEvent] = []
    data: list[bytes] = []
    name = b""
    position = start
    for match in _LINE.finditer(body, position):
        line = match[1]
        position = match.end()
        if line:
            name = _take(line, data, name)
            continue
        if data:
            # A blank line is complete with its `\r`: the `\n` after it may arrive later.
            found.append(_event(data, name, clock.at(match.start(2))))
        data, name = [], b""
    if position < len(body):
        name = _take(body[position:], data, name)
    return found, (data, name) if data else None


def _take(line: bytes, data: list[bytes], name: bytes) -> bytes:
    """Add a line's field to the current event; returns the event's name so far."""
    field, _, value = line.partition(b":")
    if field == b"data":
        data.append(value.removeprefix(b" "))
    elif field == b"event":
        return value.removeprefix(b" ")
    return name


def _event(data: list[bytes], name: bytes, at: float, *, terminated: bool = True) -> ServerSentEvent:
    return ServerSentEvent(b"\n".join(data), name.decode("utf-8", "replace") if name else _UNNAMED, at, terminated)
