"""HTTP/1.1 for our own servers, the mock and the gateway: connections, and requests parsed from bytes as they arrive.

Heads are cached by their bytes, which clients repeat: with a parser in C, which calls Python for each header, a request
costs more CPU.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import cast
from urllib.parse import unquote_to_bytes

import msgspec

_TLS_HANDSHAKE = b"\x16"
_MAX_HEAD_BYTES = 64 * 1024
_MAX_BODY_BYTES = 64 * 1024 * 1024
_MAX_CHUNK_LINE_BYTES = 1024
_MAX_PIPELINED_BYTES = 1024 * 1024
"""Bytes of further requests that are taken in while one is answered."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MAX_CACHED_HEADS = 4096
_MAX_CACHED_HEAD_BYTES = 2048
_head_cache: dict[bytes, Head] = {}


class BadRequest(Exception):
    """A malformed request; it is answered with `status`, and the connection is closed."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Head(msgspec.Struct, frozen=True):
    """The request line and headers."""

    method: str
    path: str
    query: str
    headers: dict[bytes, bytes]
    """Names in lower case; of a repeated header, the last value."""
    length: int
    chunked: bool
    keep_alive: bool
    is_http_1_0: bool
    expects_continue: bool


class Request(msgspec.Struct, gc=False):
    """One complete request."""

    head: Head
    body: bytes
    size: int
    """Bytes on the wire, near enough."""


class ServerConnection(asyncio.Protocol):
    """One connection of a client: its requests are taken up one after another, each when the one before is answered."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        """None before the client has come and after it has gone."""
        self.is_answering = False
        """Whether a request was taken up and is not answered yet: set by those who take it up and answer it."""
        self._reader = RequestReader()
        self._is_serving = False
        self._is_full = False

    @abstractmethod
    def take(self, request: Request) -> None:
        """Answer a request, at once or later: then `is_answering` is true when this returns."""

    @abstractmethod
    def refuse(self, error: BadRequest) -> None:
        """Answer a request that is malformed, and close."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own has another base

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if not self.is_answering:
            self.serve()
        elif self._reader.held > _MAX_PIPELINED_BYTES and self.transport is not None:
            self._is_full = True
            self.transport.pause_reading()

    def serve(self) -> None:
        """Take up the requests that have arrived, until one has to be waited for. Not twice at once."""
        if self._is_serving:
            return
        self._is_serving = True
        try:
            while not self.is_answering and self.transport is not None and not self.transport.is_closing():
                request = self._reader.next()
                if request is None:
                    self._read_on(self.transport)
                    return
                self.take(request)
        except BadRequest as error:
            self.refuse(error)
        finally:
            self._is_serving = False

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close without waiting for the client to read what was written."""
        if self.transport is not None:
            self.transport.abort()

    def _read_on(self, transport: asyncio.Transport) -> None:
        """Wait for the rest of a request, or for the next one."""
        if self._reader.wants_continue():
            transport.write(_CONTINUE)
        if self._is_full:
            self._is_full = False
            transport.resume_reading()


class RequestReader:
    """Parses bytes as they arrive into complete requests, in order."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._held = 0
        self._needed = 1
        self._head: Head | None = None
        self._body = bytearray()
        self._continue_sent = False
        self._scanned = 0

    @property
    def held(self) -> int:
        """Bytes received that are not yet part of a returned request."""
        return self._held

    def feed(self, data: bytes) -> None:
        self._pieces.append(data)
        self._held += len(data)

    def next(self) -> Request | None:
        """Return the next complete request; None when more bytes are needed."""
        if self._held < self._needed:
            return None
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        if self._head is None:
            data = self._read_head(data)
            if self._head is None:
                return None
        return self._read_chunks(data) if self._head.chunked else self._read_body(data)

    def wants_continue(self) -> bool:
        """Whether the client waits for `100 Continue` before it sends the body; true once per request."""
        head = self._head
        if head is None or self._continue_sent or not head.expects_continue:
            return False
        self._continue_sent = True
        return True

    def _read_head(self, data: bytes) -> bytes:
        """Parse the head and return what follows it; an incomplete head is kept."""
        if data[:1] in (b"\r", b"\n"):  # blank lines before a request are allowed
            data = data.lstrip(b"\r\n")
        if data[:1] == _TLS_HANDSHAKE:  # it contains no line end, and its client waits for a reply
            raise BadRequest(400, "this is plain HTTP: use http:// rather than https://")
        end = data.find(b"\r\n\r\n", self._scanned)
        if end < 0 and len(data) <= _MAX_HEAD_BYTES:
            self._scanned = max(0, len(data) - 3)
            self._keep(data, needed=len(data) + 1)
            return data
        if end < 0 or end > _MAX_HEAD_BYTES:
            raise BadRequest(431, f"the head of a request must be at most {_MAX_HEAD_BYTES} bytes")
        self._scanned = 0
        self._head = parse_head(data[:end])
        return data[end + 4 :]

    def _read_body(self, data: bytes) -> Request | None:
        head = self._head
        assert head is not None
        length = head.length
        if len(data) < length:
            self._keep(data, needed=length)
            return None
        self._keep(data[length:], needed=1)
        return self._complete(head, data if len(data) == length else data[:length])

    def _read_chunks(self, data: bytes) -> Request | None:
        head = self._head
        assert head is not None
        at = 0
        while (end := data.find(b"\r\n", at)) >= 0:
            size = _chunk_size(data[at:end])
            if len(self._body) + size > _MAX_BODY_BYTES:
                raise BadRequest(413, f"the body of a request must be at most {_MAX_BODY_BYTES} bytes")
            if size == 0:
                return self._read_trailers(head, data, at, end + 2)
            if len(data) < end + 2 + size + 2:
                self._keep(data[at:], needed=end + 2 + size + 2 - at)
                return None
            if data[end + 2 + size : end + 4 + size] != b"\r\n":
                raise BadRequest(400, "a chunk does not end where its size says")
            self._body += data[end + 2 : end + 2 + size]
            at = end + 4 + size
        if len(data) - at > _MAX_CHUNK_LINE_BYTES:
            raise BadRequest(400, "the size of a chunk never ends")
        self._keep(data[at:], needed=len(data) - at + 1)
        return None

    def _read_trailers(self, head: Head, data: bytes, at: int, start: int) -> Request | None:
        """Skip the trailers after the last chunk, up to the blank line."""
        while (end := data.find(b"\r\n", start)) > start:
            start = end + 2
        if end < 0:
            if len(data) - at > _MAX_HEAD_BYTES:
                raise BadRequest(431, f"trailers must be at most {_MAX_HEAD_BYTES} bytes")
            self._keep(data[at:], needed=len(data) - at + 1)
            return None
        self._keep(data[end + 2 :], needed=1)
        body, self._body = bytes(self._body), bytearray()
        return self._complete(head, body)

    def _keep(self, rest: bytes, needed: int) -> None:
        self._pieces = [rest] if rest else []
        self._held = len(rest)
        self._needed = needed

    def _complete(self, head: Head, body: bytes) -> Request:
        self._head = None
        self._continue_sent = False
        return Request(head, body, len(body))


def _chunk_size(line: bytes) -> int:
    size = chunk_size(line)
    if size is None:
        raise BadRequest(400, f"the size of a chunk must be hexadecimal, got {line[:40]!r}")
    return size


def chunk_size(line: bytes) -> int | None:
    """Return the size in the line before a chunk, of a request or a reply; None where it says none."""
    digits = line.partition(b";")[0].strip()
    if not digits or digits.strip(b"0123456789abcdefABCDEF") or len(digits) > 16:
        return None
    return int(digits, 16)


def parse_head(raw: bytes) -> Head:
    """Parse a request's head. Clients repeat their heads, so the last few thousand are cached."""
    head = _head_cache.get(raw)
    if head is None:
        head = _parse_head(raw)
        if len(_head_cache) >= _MAX_CACHED_HEADS:
            _head_cache.clear()
        if len(raw) <= _MAX_CACHED_HEAD_BYTES:
            _head_cache[raw] = head
    return head


def _parse_head(raw: bytes) -> Head:
    first, *lines = raw.split(b"\r\n")
    parts = first.split(b" ")
    if len(parts) != 3 or not parts[0].isalpha() or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadRequest(400, f"not an HTTP/1.1 request: {first[:80]!r}")
    headers = dict(map(_parse_header, lines))
    path, _, query = parts[1].partition(b"?")
    connection = headers.get(b"connection", b"").lower()
    is_old = parts[2] == b"HTTP/1.0"
    return Head(
        method=parts[0].decode(),
        path=unquote_to_bytes(path).decode("utf-8", "replace"),
        query=query.decode("latin-1"),
        headers=headers,
        length=_length(headers),
        chunked=_is_chunked(headers),
        keep_alive=b"close" not in connection and (not is_old or b"keep-alive" in connection),
        is_http_1_0=is_old,
        expects_continue=headers.get(b"expect", b"").lower() == b"100-continue",
    )


def _parse_header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not name or name != name.strip() or b" " in name:
        raise BadRequest(400, f"not a header: {line[:80]!r}")
    return name.lower(), value.strip()


def _length(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"0")
    if not text.isdigit():
        raise BadRequest(400, f"content-length must be a number, got {text[:40]!r}")
    if len(text) > 18 or int(text) > _MAX_BODY_BYTES:
        raise BadRequest(413, f"the body of a request must be at most {_MAX_BODY_BYTES} bytes")
    return int(text)


def _is_chunked(headers: dict[bytes, bytes]) -> bool:
    encoding = headers.get(b"transfer-encoding", b"").lower()
    if encoding and encoding != b"chunked":
        raise BadRequest(501, f"transfer-encoding must be chunked, got {encoding[:40]!r}")
    return bool(encoding)
