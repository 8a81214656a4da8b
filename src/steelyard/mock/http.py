"""The mock's replies, and the heads that they begin with."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from steelyard.mock.dialects import reason_phrase
from steelyard.transport.http_server import Head

JSON = b"application/json"
_start_cache: dict[tuple[int, bytes], bytes] = {}


class Reply(msgspec.Struct, kw_only=True):
    """A reply ready to be sent: when, which bytes, and how it ends."""

    path: str
    """The path it is counted under; empty for the mock's own pages."""
    status: int
    delay: float = 0.0
    """Seconds from the request to the first byte."""
    start: bytes = b""
    """Bytes that are written first: the head of a stream, or the whole reply."""
    frames: Iterator[bytes] | None = None
    """The pieces of a stream, one for each step, and its ending."""
    steps: int = 0
    interval: float = 0.0
    chunked: bool = True
    torn_ending: bytes | None = None
    """What replaces the ending of a torn stream: nothing, or an error."""
    is_terminated: bool = True
    """Whether a stream's end is marked, as HTTP requires."""
    closes: bool = False
    """Whether the connection is closed after it."""
    is_admitted: bool = False
    """Whether it counts towards the concurrency until its last byte is written."""
    tokens: tuple[int, int] = (0, 0)
    """What its usage says, counted when all of it was written."""
    is_dropped: bool = False
    is_torn: bool = False
    includes_times: bool = False
    request_id: str = ""
    id: str | None = None


def reply_head(status: int, kind: bytes, length: int | None, request: Head | None, *more: tuple[bytes, bytes]) -> bytes:
    """Make a status line and headers; without a length the body is chunked, or ends when the connection closes."""
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


def _start(status: int, kind: bytes) -> bytes:
    found = _start_cache.get((status, kind))
    if found is None:
        line = f"HTTP/1.1 {status} {reason_phrase(status)}\r\nserver: steelyard-mock\r\ncontent-type: "
        found = _start_cache[status, kind] = line.encode() + kind + b"\r\n"
    return found
