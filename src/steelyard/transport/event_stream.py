"""AWS event streams (`application/vnd.amazon.eventstream`): binary frames, each with two checksums, from raw bytes.

A frame is: its length and that of its headers (4 bytes each), the CRC-32 of these 8 bytes, the headers, the payload,
and the CRC-32 of all before it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from steelyard.transport.sse import ArrivalClock, ServerSentEvent

MEDIA_TYPE = "application/vnd.amazon.eventstream"
MAX_FRAME_BYTES = 25 * 2**20
DAMAGED = "!damaged"
"""Name of the last event of a stream whose next frame has a wrong checksum or length; its data says which."""
_PRELUDE = struct.Struct(">III")
_CRC = struct.Struct(">I")
_FIXED_SIZES = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Bytes of a header's value by its type; types 6 (bytes) and 7 (text) begin with their length."""


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
