"""Kept-alive connections: whether an endpoint closes its own, and what became of a request on one that was lost.

A request that finds its kept-alive connection closed may be sent again only if the server cannot have acted on it. TCP
tells: of a server that had closed before, bytes of the request stay unacknowledged, and mostly a reset answers them;
one that read the request and then closed has acknowledged them. (One that reads, acts and resets within the 40 ms for
which an acknowledgement may be delayed cannot be told apart.) All this holds for the first hop: what a proxy did with a
request that it had read is not known, and then nothing is sent again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import socket
import struct
import sys
import termios
from time import monotonic

import msgspec

from steelyard.transport.errors import origin

LOST_CODES = frozenset({52, 55, 56, 65})
"""libcurl's codes for a connection that ended before a reply: GOT_NOTHING, SEND_ERROR, RECV_ERROR, SEND_FAIL_REWIND."""

WATCH_SECONDS = 0.05
"""How long the first stream's connection is watched for its end, before any connection to that endpoint is reused."""

_is_reset = re.compile(r"reset by peer|broken pipe", re.IGNORECASE).search
_ENDED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
_SWEEP_SECONDS = 1.0
_TOLERATED_LOSSES = 0.05
"""Share of requests that may find their connection closed before each gets a new one: a server that closes after a
hundred requests is still faster with kept-alive connections."""


class OpenedSocket(msgspec.Struct):
    """A socket that libcurl opened. `copy` keeps what the kernel knows of it when libcurl has closed its own."""

    descriptor: int
    inode: int
    copy: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether libcurl still has it open."""
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:
            return False

    @property
    def has_ended(self) -> bool:
        """Whether the other side has closed the connection."""
        if not self.is_open:
            return True
        poll = select.poll()
        poll.register(self.descriptor, _ENDED)
        return bool(poll.poll(0))

    @property
    def local_port(self) -> int | None:
        return None if self.copy is None else _local_port(self.copy)

    def close(self) -> None:
        """Close the copy: only then is the connection closed, where libcurl has closed it."""
        if self.copy is not None:
            with contextlib.suppress(OSError):
                os.close(self.copy)
            self.copy = None


def opened_socket(descriptor: int, *, copied: bool) -> OpenedSocket:
    """Note a socket that libcurl opens; `copied` where its connection is to be reused."""
    return OpenedSocket(descriptor, os.fstat(descriptor).st_ino, os.dup(descriptor) if copied else None)


def _local_port(descriptor: int) -> int | None:
    borrowed = socket.socket(fileno=descriptor)
    try:
        return int(borrowed.getsockname()[1])
    except (OSError, IndexError):
        return None
    finally:
        borrowed.detach()


def unacknowledged(descriptor: int) -> int | None:
    """Return how many bytes sent over a connection have not been acknowledged; None where that is not known."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:
        return None


class Endpoint(msgspec.Struct):
    """What is known of the connections of one scheme, host and port."""

    requests: int = 0
    lost: int = 0
    closes: bool = False
    watched: bool = False


class KeptConnections:
    """The sockets of a transport's connections, and what its endpoints do with theirs."""

    def __init__(self) -> None:
        self._sockets: dict[int, OpenedSocket] = {}
        """By local port."""
        self._endpoints: dict[str, Endpoint] = {}
        self._known: tuple[bytes, Endpoint] = (b"", Endpoint())
        self._swept = monotonic()

    def endpoint(self, url: bytes) -> Endpoint:
        """Return what is known of a URL's endpoint."""
        if url is not self._known[0]:
            self._known = (url, self._endpoints.setdefault(origin(url.decode()), Endpoint()))
        return self._known[1]

    def adopt(self, opened: list[OpenedSocket], port: int) -> None:
        """Keep the socket that became the connection at this local port, of all that were tried for it."""
        for one in opened:
            if one.copy is not None and one.local_port == port and one.is_open:
                self.forget(port)
                self._sockets[port] = one
            else:
                one.close()
        opened.clear()

    def forget(self, port: int) -> None:
        """Close the copy of a connection's socket."""
        if (known := self._sockets.pop(port, None)) is not None:
            known.close()

    def sweep(self) -> None:
        """Close the copies of connections that libcurl has closed; at most once a second."""
        moment = monotonic()
        if moment - self._swept > _SWEEP_SECONDS:
            self._swept = moment
            for port in [port for port, known in self._sockets.items() if not known.is_open]:
                self.forget(port)

    def was_not_read(self, url: bytes, port: int, words: str) -> bool:
        """Whether the request on a lost connection is known not to have been acted on: bytes of it are unacknowledged.

        Of a connection with TLS that was closed in good order it is not known, as its own farewell is among the bytes.
        Where the system does not count them, a reset has to do.
        """
        known = self._sockets.get(port)
        left = None if known is None or known.copy is None else unacknowledged(known.copy)
        if _is_reset(words):
            return left is None or left > 0
        return url[:5].lower() == b"http:" and left is not None and left > 0

    def note_loss(self, url: bytes) -> None:
        """Count a kept-alive connection that was found closed; too many, and no connection there is reused."""
        known = self.endpoint(url)
        known.lost += 1
        if known.lost > known.requests * _TOLERATED_LOSSES:
            known.closes = True

    def close(self) -> None:
        for port in list(self._sockets):
            self.forget(port)
