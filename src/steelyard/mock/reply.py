"""What goes back for one request, decided before its first byte is written."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from steelyard.mock.failures import reason_phrase
from steelyard.mock.http import Head

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"


class Reply(msgspec.Struct, kw_only=True):
    """An answer ready to be played: when, which bytes, and how it ends."""

    path: str
    """What it is counted under; nothing for the mock's own pages."""
    status: int
    delay: float = 0.0
    """Seconds from the request to the first byte."""
    start: bytes = b""
    """Bytes that are written first: the head of a stream, or everything there is."""
    frames: Iterator[bytes] | None = None
    """The pieces of a stream, one for each step, and its ending."""
    steps: int = 0
    interval: float = 0.0
    chunked: bool = True
    torn_ending: bytes | None = None
    """What stands in place of a torn stream's ending: nothing, or an error."""
    is_terminated: bool = True
    """Whether a stream's end is marked, as HTTP asks for."""
    closes: bool = False
    """Whether the connection is closed after it."""
    is_admitted: bool = False
    """Whether it counts as being answered until its last byte is written."""
    is_dropped: bool = False
    is_torn: bool = False
    tells_times: bool = False
    request_id: str = ""
    id: str | None = None


def head_bytes(status: int, kind: bytes, length: int | None, request: Head | None, *more: tuple[bytes, bytes]) -> bytes:
    """A status line and headers; without a length the body comes in chunks, or until the connection is closed."""
    start = _start(status, kind)
    headers = b"".join([b"%b: %b\r\n" % header for header in more])
    if length is not None and request is not None and request.keep_alive and not request.is_http_1_0:
        return b"%b%bcontent-length: %d\r\n\r\n" % (start, headers, length)
    framing = b"content-length: %d\r\n" % length if length is not None else b"transfer-encoding: chunked\r\n"
    if length is None and request is not None and request.is_http_1_0:
        framing = b"connection: close\r\n"
    elif request is None or not request.keep_alive:
        framing += b"connection: close\r\n"
    elif request.is_http_1_0:
        framing += b"connection: keep-alive\r\n"
    return b"%b%b%b\r\n" % (start, headers, framing)


_starts: dict[tuple[int, bytes], bytes] = {}


def _start(status: int, kind: bytes) -> bytes:
    found = _starts.get((status, kind))
    if found is None:
        line = f"HTTP/1.1 {status} {reason_phrase(status)}\r\nserver: steelyard-mock\r\ncontent-type: "
        found = _starts[status, kind] = line.encode() + kind + b"\r\n"
    return found
