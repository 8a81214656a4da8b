"""Server-sent events out of raw bytes, each with the moment at which it was whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNNAMED = "message"
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\r|\n)")


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event of a stream. `at` is the arrival of the chunk that completed it.

    `terminated` is False for a last event that the stream broke off or ended without the blank line that is due: the
    standard drops it, but servers exist that end with a bare `data: [DONE]`. Its data may be half of what was meant.
    """

    data: bytes
    name: str
    at: float
    terminated: bool = True


_Fields: TypeAlias = tuple[list[bytes], bytes]
"""The data lines of an event and its name."""
_Found: TypeAlias = tuple[list[Event], _Fields | None]
"""The whole events, and what there is of a last one that was not ended."""


class _Clock:
    """Says when the byte at a position had arrived; asked in the order of positions, so that it only walks forward."""

    def __init__(self, chunks: Sequence[bytes], arrivals: Sequence[float]) -> None:
        self._pieces = list(zip(chunks, arrivals, strict=True))
        self._piece = 0
        self._end = len(chunks[0]) if chunks else 0

    def at(self, position: int) -> float:
        while position >= self._end and self._piece + 1 < len(self._pieces):
            self._piece += 1
            self._end += len(self._pieces[self._piece][0])
        return self._pieces[self._piece][1]


def events(chunks: Sequence[bytes], arrivals: Sequence[float]) -> list[Event]:
    """The events of a whole stream, whichever way it was cut into chunks; nothing is decoded but event names."""
    body = b"".join(chunks)
    clock = _Clock(chunks, arrivals)
    start = len(_BYTE_ORDER_MARK) if body.startswith(_BYTE_ORDER_MARK) else 0
    found, rest = _of_any_lines(body, start, clock) if b"\r" in body else _of_plain_lines(body, start, clock)
    if rest is not None:
        data, name = rest
        found.append(_event(data, name, arrivals[-1], terminated=False))
    return found


def _of_plain_lines(body: bytes, start: int, clock: _Clock) -> _Found:
    """The events where every line ends in `\\n`, as nearly all servers write them: in half the time."""
    found: list[Event] = []
    *blocks, last = body[start:].split(b"\n\n")
    position = start
    for block in blocks:
        position += len(block) + 2
        if block.startswith(b"data: ") and b"\n" not in block:
            found.append(Event(block[6:], _UNNAMED, clock.at(position - 1)))
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


def _of_any_lines(body: bytes, start: int, clock: _Clock) -> _Found:
    """The events whatever the lines end in, `\\r` and `\\r\\n` among them."""
    found: list[Event] = []
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
            # A blank line is there with its `\r`: the `\n` behind it may come later, and says nothing.
            found.append(_event(data, name, clock.at(match.start(2))))
        data, name = [], b""
    if position < len(body):
        name = _take(body[position:], data, name)
    return found, (data, name) if data else None


def _take(line: bytes, data: list[bytes], name: bytes) -> bytes:
    """Add a line's field to the event that is being read; the event's name from here on."""
    field, _, value = line.partition(b":")
    if field == b"data":
        data.append(value.removeprefix(b" "))
    elif field == b"event":
        return value.removeprefix(b" ")
    return name


def _event(data: list[bytes], name: bytes, at: float, *, terminated: bool = True) -> Event:
    return Event(b"\n".join(data), name.decode("utf-8", "replace") if name else _UNNAMED, at, terminated)
