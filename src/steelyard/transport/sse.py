"""Streams of events parsed from raw bytes, each event with the time at which it was complete.

Server-sent events (`text/event-stream`) are text. AWS event streams (`application/vnd.amazon.eventstream`) are binary
frames with two checksums each: a frame is its length and that of its headers (4 bytes each), the CRC-32 of these
8 bytes, the headers, the payload, and the CRC-32 of all before it.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNNAMED = "message"
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\r|\n)")

_Fields: TypeAlias = tuple[list[bytes], bytes]
"""The data lines of an event and its name."""
MEDIA_TYPE = "application/vnd.amazon.eventstream"
MAX_FRAME_BYTES = 25 * 2**20
DAMAGED = "!damaged"
"""Name of the last event of a stream whose next frame has a wrong checksum or length; its data says which."""
_PRELUDE = struct.Struct(">III")
_CRC = struct.Struct(">I")
_FIXED_SIZES = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Bytes of a header's value by its type; types 6 (bytes) and 7 (text) begin with their length."""


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


def frames(chunks: Sequence[bytes], arrivals: Sequence[float]) -> list[ServerSentEvent]:
    """Parse the frames of a whole stream as events, each with the time at which it was complete.

    An event's name is the frame's event type; of an exception it is its type after a `!`. A last frame that was cut
    off is left out.
    """
    body = memoryview(b"".join(chunks))
    clock = ArrivalClock(chunks, arrivals)
    found: list[ServerSentEvent] = []
    start = 0
    while start + _PRELUDE.size + _CRC.size <= len(body):
        total, headers, checksum = _PRELUDE.unpack_from(body, start)
        end = start + total
        problem = _problem(body, start, total, headers, checksum)
        if problem is not None:
            found.append(ServerSentEvent(problem.encode(), DAMAGED, clock.at(min(end, len(body)) - 1)))
            return found
        if end > len(body):
            return found
        first = start + _PRELUDE.size
        at = clock.at(end - 1)
        try:
            name = _name(read_headers(bytes(body[first : first + headers])))
        except (struct.error, IndexError, KeyError, UnicodeDecodeError):
            found.append(ServerSentEvent(b"a frame has headers that cannot be read", DAMAGED, at))
            return found
        found.append(ServerSentEvent(bytes(body[first + headers : end - _CRC.size]), name, at))
        start = end
    return found


def _problem(body: memoryview, start: int, total: int, headers: int, checksum: int) -> str | None:
    """Return what is wrong with a frame; None when nothing is, or when it is not all there yet."""
    if zlib.crc32(body[start : start + 8]) != checksum:
        return "the checksum of a frame's lengths is wrong"
    if not _PRELUDE.size + headers + _CRC.size <= total <= MAX_FRAME_BYTES:
        return f"a frame has an impossible length: {total} bytes, {headers} of them headers"
    end = start + total
    if end <= len(body) and zlib.crc32(body[start : end - _CRC.size]) != _CRC.unpack_from(body, end - _CRC.size)[0]:
        return "the checksum of a frame is wrong"
    return None


def _name(headers: dict[str, str]) -> str:
    kind = headers.get(":message-type", "event")
    if kind == "event":
        return headers.get(":event-type", "")
    return "!" + (headers.get(":exception-type") or headers.get(":error-code") or kind)


def read_headers(data: bytes) -> dict[str, str]:
    """Return the headers that are texts; struct.error, IndexError or KeyError for what cannot be read."""
    found: dict[str, str] = {}
    place = 0
    while place < len(data):
        length = data[place]
        name = data[place + 1 : place + 1 + length].decode()
        kind = data[place + 1 + length]
        place += length + 2
        if kind in (6, 7):
            (size,) = struct.unpack_from(">H", data, place)
            place += 2
        else:
            size = _FIXED_SIZES[kind]
        if place + size > len(data):
            raise IndexError(f"the header {name} is cut off")
        if kind == 7:
            found[name] = data[place : place + size].decode()
        place += size
    return found


def frame(payload: bytes, **headers: str) -> bytes:
    """Return a frame with headers that are texts; `event_type` is the header `:event-type`."""
    written = b"".join(
        bytes([len(name) + 1])
        + f":{name.replace('_', '-')}".encode()
        + struct.pack(">BH", 7, len(value.encode()))
        + value.encode()
        for name, value in headers.items()
    )
    total = _PRELUDE.size + len(written) + len(payload) + _CRC.size
    lengths = struct.pack(">II", total, len(written))
    data = lengths + _CRC.pack(zlib.crc32(lengths)) + written + payload
    return data + _CRC.pack(zlib.crc32(data))
