"""Replies: read from bytes as they arrive, their heads parsed, and handed over to their callers a few at a time."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections import deque
from functools import lru_cache
from typing import TypeAlias

from steelyard.errors import TargetError
from steelyard.protocols import HttpReply, ReplyReceiver
from steelyard.transport.http_server import chunk_size

_STATUS_LINE = re.compile(rb"HTTP/[0-9.]+ +([0-9]{3})")
_CHUNKS_PER_ITERATION = 256
"""Chunks delivered per event-loop iteration: dozens of whole replies, or a few streams. Decoding them takes about as
long as reading the sockets served in one iteration, so that neither delays the other."""

Outcome: TypeAlias = HttpReply | TargetError
Waiting: TypeAlias = asyncio.Future[HttpReply]


def read_head(lines: list[bytes]) -> tuple[int, dict[str, str]]:
    """Parse the last status in these lines (interim ones may precede it) and its headers, names in lower case."""
    if lines[-1] == b"\r\n" and (status := _status(lines[0])):
        headers = dict(map(_field, lines[1:-1]))
        if len(headers) == len(lines) - 2 and b"\r\n" not in lines[1:-1]:
            return status, headers  # one head, and no name in it twice: nearly all replies
    return _read_any_head(lines)


def _read_any_head(lines: list[bytes]) -> tuple[int, dict[str, str]]:
    status, within = 0, False
    headers: dict[str, str] = {}
    for line in lines:
        if not within and (found := _status(line)):
            status, within, headers = found, True, {}
        elif line in (b"\r\n", b"\n"):
            within = False  # after the blank line come trailers
        elif within:
            name, value = _field(line)
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return status, headers


@lru_cache(maxsize=32)
def _status(line: bytes) -> int:
    """Return the status of a status line, 0 for any other line; cached, since few occur."""
    found = _STATUS_LINE.match(line)
    return int(found[1]) if found else 0


@lru_cache(maxsize=512)
def _field(line: bytes) -> tuple[str, str]:
    """Parse a header line; cached, since most lines of an endpoint's replies repeat."""
    name, _, value = line.decode("latin-1").partition(":")
    return name.lower(), value.strip()


class BadReply(Exception):
    """A reply that cannot be read, or only to a part: the code of libcurl for it, and what is wrong."""

    def __init__(self, code: int, words: str) -> None:
        self.code = code
        self.words = words
        super().__init__(words)


_NOT_HTTP, _WEIRD, _PARTIAL, _EMPTY, _BAD_ENCODING, _TOO_LONG = 1, 8, 18, 52, 61, 63
"""Codes of libcurl: see `steelyard.transport.errors`."""
_MAX_HEAD_BYTES = 300_000
_MAX_CHUNK_LINE_BYTES = 16_384
_FOLD = re.compile(rb"\r?\n[ \t]+")
_GZIP_OR_ZLIB = 47
"""zlib's `wbits` that recognizes either."""


_HEAD, _SIZED, _UNSIZED, _CHUNK_SIZE, _CHUNK, _CHUNK_END, _TRAILER = range(7)
"""What comes next of a reply: of its body, a known number of bytes, all until the connection ends, or chunks. Plain
numbers, as looking up the members of an Enum would take longer than reading a chunk."""
_DECIDING = frozenset({"transfer-encoding", "connection", "content-encoding"})
"""Headers that say how a body is to be read, besides its length."""


class ReplyReader:
    """Reads one reply from bytes as they arrive; each part of the body is kept with the moment of its arrival."""

    status: int = 0
    """0 until the head is whole."""
    keeps_connection: bool = True
    """Whether another request may follow on the connection; meaningful once the reply is whole."""
    _next: int = _HEAD
    _left: int = 0
    """Bytes that are still to come of a body or chunk whose length is known."""
    _size: int = 0
    _rest: bytes = b""
    """The beginning of a head or of a chunk's line."""
    _arrived: float = 0.0
    _decoder: zlib._Decompress | None = None

    def __init__(self, max_bytes: int, receiver: ReplyReceiver | None = None) -> None:
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.arrivals: list[float] = []
        self._max_bytes = max_bytes
        self._receiver = receiver

    @property
    def has_begun(self) -> bool:
        """Whether any byte has arrived."""
        return bool(self.status or self._rest)

    def feed(self, data: bytes, at: float) -> bool:
        """Take in bytes that arrived at this moment; True when the reply is whole. Raises BadReply."""
        self._arrived = at
        if self._rest:
            data, self._rest = self._rest + data, b""
        if self._next == _HEAD:
            data = self._take_head(data)
        if self._next == _SIZED:
            return self._take_sized(data)
        if self._next == _UNSIZED:
            if data:
                self._keep(data)
            return False
        return self._next != _HEAD and self._take_chunks(data)

    def end(self) -> None:
        """The connection has ended; raises BadReply unless that is how the reply ends, too."""
        if self._next == _HEAD:
            if self._rest:
                raise BadReply(_PARTIAL, "the connection was closed within the headers")
            raise BadReply(_EMPTY, "Empty reply from server")
        if self._next != _UNSIZED:
            raise BadReply(_PARTIAL, "transfer closed with outstanding read data remaining")
        self._check_decoded()

    def reply(self, sent: float, called: float, resent: int) -> HttpReply | None:
        """Return the reply as far as it has come, to a request sent at this moment; None before its head is whole."""
        if not self.status:
            return None
        arrivals = [at - sent for at in self.arrivals]
        return HttpReply(
            self.status, self.headers, self.chunks, arrivals, self._arrived - sent, max(0.0, sent - called), resent
        )

    def _take_head(self, data: bytes) -> bytes:
        """Parse the head and return what follows it; an incomplete head is kept."""
        while True:
            end = data.find(b"\n\r\n")
            blank = 3
            if (bare := data.find(b"\n\n", 0, end + 1 if end >= 0 else len(data))) >= 0:
                end, blank = bare, 2
            if not data.startswith(b"HTTP/") and not b"HTTP/".startswith(data[:5]):
                raise BadReply(_NOT_HTTP, "Received HTTP/0.9 when not allowed")
            if end < 0:
                if len(data) > _MAX_HEAD_BYTES:
                    raise BadReply(_WEIRD, f"the headers are longer than {_MAX_HEAD_BYTES:,} bytes")
                self._rest = data
                return b""
            first, *lines = data[:end].split(b"\n")
            data = data[end + blank :]
            if not (status := _status(first)):
                raise BadReply(_NOT_HTTP, f"not a status line: {first[:60]!r}")
            if status < 200 and status != 101:  # an interim reply: the real one follows
                continue
            self.status, self.headers = status, _fields(lines)
            self._choose_body(first)
            if self._receiver is not None:
                self._receiver.on_head(status, self.headers)
            return data

    def _choose_body(self, status_line: bytes) -> None:
        """Decide from the headers how the body is to be read, and whether the connection may be used again."""
        headers = self.headers
        if not _DECIDING.isdisjoint(headers) or status_line.startswith(b"HTTP/1.0") or self.status in (204, 304):
            self._choose_unusual_body(status_line)
        elif "content-length" in headers:
            self._next = _SIZED
        else:
            self._next = _UNSIZED
        if self._next == _SIZED:
            self._left = _length(headers.get("content-length", "0"))
            if self.status in (204, 304):
                self._left = 0
            if self._left > self._max_bytes:
                raise BadReply(_TOO_LONG, f"the answer has {self._left:,} bytes, at most {self._max_bytes:,} are read")

    def _choose_unusual_body(self, status_line: bytes) -> None:
        headers = self.headers
        transfer = headers.get("transfer-encoding", "identity").lower()
        if transfer not in ("identity", "chunked"):
            raise BadReply(_BAD_ENCODING, f"unknown transfer encoding {transfer[:60]!r}")
        if self.status in (204, 304):
            self._next = _SIZED
        elif transfer == "chunked":
            self._next = _CHUNK_SIZE
        else:
            self._next = _SIZED if "content-length" in headers else _UNSIZED
        options = headers.get("connection", "").lower()
        self.keeps_connection = "keep-alive" in options or not status_line.startswith(b"HTTP/1.0")
        if "close" in options:
            self.keeps_connection = False
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._decoder = zlib.decompressobj(_GZIP_OR_ZLIB)
        elif encoding != "identity":
            raise BadReply(_BAD_ENCODING, f"unknown content encoding {encoding[:60]!r}")

    def _take_sized(self, data: bytes) -> bool:
        if len(data) > self._left:  # more than the reply: what it is cannot be known
            data, self.keeps_connection = data[: self._left], False
        self._left -= len(data)
        if data:
            self._keep(data)
        if self._left:
            return False
        self._check_decoded()
        return True

    def _take_chunks(self, data: bytes) -> bool:
        start, size = 0, len(data)
        while start < size:
            if self._next == _CHUNK:
                piece = data[start : start + self._left]
                start += len(piece)
                self._left -= len(piece)
                self._keep(piece)
                if not self._left:
                    self._next = _CHUNK_END
                continue
            end = data.find(b"\n", start)
            if end < 0:
                self._rest = data[start:]
                if len(self._rest) > _MAX_CHUNK_LINE_BYTES:
                    raise BadReply(_WEIRD, "a line between chunks never ends")
                break
            line, start = data[start:end], end + 1
            if self._next == _CHUNK_SIZE:
                self._left = _chunk_size(line)
                self._next = _CHUNK if self._left else _TRAILER
            elif self._next == _CHUNK_END:
                if line not in (b"\r", b""):
                    raise BadReply(_WEIRD, "a chunk does not end where its size says")
                self._next = _CHUNK_SIZE
            elif line in (b"\r", b""):
                self.keeps_connection = self.keeps_connection and start == size
                self._check_decoded()
                return True
        return False

    def _keep(self, data: bytes) -> None:
        if self._decoder is not None:
            data = self._decoded(data)
            if not data:
                return
        self._size += len(data)
        if self._size > self._max_bytes:
            raise BadReply(_TOO_LONG, f"the answer has more than {self._max_bytes:,} bytes")
        self.chunks.append(data)
        self.arrivals.append(self._arrived)
        if self._receiver is not None:
            self._receiver.on_chunk(data)

    def _decoded(self, data: bytes) -> bytes:
        """Decompress a part, to no more than one byte above the limit."""
        assert self._decoder is not None
        try:
            return self._decoder.decompress(data, self._max_bytes - self._size + 1)
        except zlib.error as error:
            raise BadReply(_BAD_ENCODING, f"the answer is not compressed as it says: {error}") from None

    def _check_decoded(self) -> None:
        if self._decoder is not None and not self._decoder.eof and self.chunks:
            raise BadReply(_BAD_ENCODING, "the compressed answer is not whole")


def _fields(lines: list[bytes]) -> dict[str, str]:
    """Parse header lines; of those with the same name, the values are joined."""
    headers = dict(map(_checked_field, lines))
    if len(headers) == len(lines) and "" not in headers:  # no name twice, and no line without one: nearly all replies
        return headers
    headers = {}
    for line in _FOLD.sub(b" ", b"\n".join(lines)).split(b"\n") if lines else ():
        name, value = _checked_field(line)
        if not name:
            raise BadReply(_WEIRD, f"not a header: {line[:60]!r}")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


@lru_cache(maxsize=512)
def _checked_field(line: bytes) -> tuple[str, str]:
    """Parse a header line; the name is empty if it is none, or continues the line before."""
    name, colon, value = line.decode("latin-1").partition(":")
    return (name.lower(), value.strip()) if colon and name.strip() == name else ("", "")


@lru_cache(maxsize=512)
def _length(text: str) -> int:
    first, *others = (part.strip() for part in text.split(","))
    if not first.isascii() or not first.isdigit() or len(first) > 18 or any(other != first for other in others):
        raise BadReply(_WEIRD, f"content-length must be a number, got {text[:60]!r}")
    return int(first)


@lru_cache(maxsize=512)
def _chunk_size(line: bytes) -> int:
    size = chunk_size(line)
    if size is None:
        raise BadReply(_WEIRD, f"the size of a chunk must be hexadecimal, got {line[:40]!r}")
    return size


class Handover:
    """Delivers replies to their callers in order, a bounded number per event-loop iteration.

    The caller decodes, scores and records its answer. When hundreds of streams end at once, that would otherwise
    delay the timing of chunks on other streams.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[Waiting, Outcome]] = deque()
        self._left = _CHUNKS_PER_ITERATION
        self._iteration: asyncio.Handle | None = None

    def give(self, done: Waiting, outcome: Outcome) -> None:
        """Deliver an outcome: now, if this iteration has room for it, else in a later one."""
        if self._left <= 0:
            self._queue.append((done, outcome))
            return
        self._left -= _settle(done, outcome)
        if self._iteration is None:
            self._iteration = self._loop.call_soon(self._next_iteration)

    def reply_to(self, done: Waiting) -> HttpReply | None:
        """Return the reply that waits to be delivered to a caller that no longer waits for it."""
        outcome = next((outcome for waiting, outcome in self._queue if waiting is done), None)
        return outcome if isinstance(outcome, HttpReply) else None

    def close(self) -> None:
        """Deliver everything that is left."""
        if self._iteration is not None:
            self._iteration.cancel()
        while self._queue:
            _settle(*self._queue.popleft())

    def _next_iteration(self) -> None:
        self._iteration = None
        self._left = _CHUNKS_PER_ITERATION
        while self._queue and self._left > 0:
            self.give(*self._queue.popleft())


def _settle(done: Waiting, outcome: Outcome) -> int:
    """Set the future's outcome; returns the number of chunks, 0 when nobody waits for it any more."""
    if done.done():
        return 0
    if isinstance(outcome, HttpReply):
        done.set_result(outcome)
        return 1 + len(outcome.chunks)
    done.set_exception(outcome)
    return 1
