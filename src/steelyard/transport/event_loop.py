"""libcurl's multi interface on an asyncio event loop: its sockets, its timer, finished transfers and connections."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import select
import selectors
import socket
import struct
import sys
import termios
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from time import monotonic
from typing import Protocol

import msgspec
import pycurl

from steelyard.transport.errors import origin

Finished = Callable[[pycurl.Curl, int, str], None]
"""Called for a transfer that has ended: its handle, libcurl's error code (0 is none) and libcurl's message."""

Broken = Callable[[str], None]
"""Called once when libcurl fails as a whole: the bridge is unusable, and none of its transfers will finish."""

READ, WRITE = 1, 2
"""libcurl's CURL_POLL_IN and OUT, also its CURL_CSELECT_IN and OUT. Any other value means: stop polling."""

_MAX_READY = 64
"""Sockets served per event-loop iteration; the kernel returns the waiting ones in rotation."""

Ready = list[tuple[int, int]]
Failed = Callable[[Exception], None]
"""Called when a socket cannot be polled: an error raised in libcurl's callback would leave transfers hanging."""
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


class Bridge:
    """Runs transfers on the loop it was created on. `finished` is called in batches, outside libcurl's callbacks."""

    def __init__(self, connections: int, finished: Finished, broken: Broken) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished = finished
        self._broken = broken
        self._poller = new_poller(self._give_up)
        self._attached = 0
        self._collecting: asyncio.Handle | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        self._due: float | None = None
        self._given_up = False
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._poller.on_socket)
        self._multi.setopt(pycurl.M_MAXCONNECTS, connections)
        self._multi.setopt(pycurl.M_MAX_TOTAL_CONNECTIONS, connections)
        # One request per connection: multiplexed requests would wait for each other's bytes.
        self._multi.setopt(pycurl.M_PIPELINING, 0)
        self._loop.add_reader(self._poller.fileno(), self._on_ready)

    def start(self, handles: Sequence[pycurl.Curl]) -> None:
        """Start these transfers; those with an open connection are sent now."""
        add_handle = self._multi.add_handle
        for handle in handles:
            add_handle(handle)
        self._attached += len(handles)
        self._act(((pycurl.SOCKET_TIMEOUT, 0),))

    def stop(self, handle: pycurl.Curl) -> None:
        """Remove a transfer; its connection is closed unless the transfer had finished."""
        self._attached -= 1
        try:
            self._multi.remove_handle(handle)
        except pycurl.error as error:
            self._give_up(error)

    def close(self) -> None:
        """Close every connection and detach from the loop."""
        for handle in (self._collecting, self._timer):
            if handle is not None:
                handle.cancel()
        self._loop.remove_reader(self._poller.fileno())
        self._multi.close()
        self._poller.close()

    def _note_timeout(self, milliseconds: int) -> None:
        """Note when libcurl wants to be called; a timer that is set too early is kept, and set again when it fires."""
        if milliseconds < 0:
            self._due = None
            return
        # Not the loop's clock: uvloop's does not advance within an iteration, and would fire early after a long one.
        self._due = monotonic() + milliseconds / 1000
        if self._timer is None or self._timer_at > self._due:
            self._set_timer(self._due)

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_later(max(0.0, due - monotonic()), self._on_time), due

    def _on_time(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._due > monotonic():
            self._set_timer(self._due)
            return
        self._act(((pycurl.SOCKET_TIMEOUT, 0),))

    def _on_ready(self) -> None:
        self._act(self._poller.ready())

    def _act(self, ready: Iterable[tuple[int, int]]) -> None:
        """Have libcurl serve these sockets; then ask it once when it wants to be called next.

        A timer callback would be called twice for each transfer.
        """
        socket_action = self._multi.socket_action
        running = self._attached
        try:
            for descriptor, events in ready:
                _, running = socket_action(descriptor, events)
            milliseconds = self._multi.timeout()
        except pycurl.error as error:
            self._give_up(error)
            return
        if running < self._attached and self._collecting is None:
            self._collecting = self._loop.call_soon(self._collect)
        self._note_timeout(milliseconds)

    def _give_up(self, error: Exception) -> None:
        if not self._given_up:
            self._given_up = True
            self._loop.call_soon(self._broken, str(error))

    def collect(self) -> None:
        """Hand over now what has finished."""
        if self._collecting is not None:
            self._collecting.cancel()
            self._collect()

    def _collect(self) -> None:
        self._collecting = None
        left = 1
        while left and not self._given_up:
            left, finished, failed = self._multi.info_read()
            for handle, code, words in chain(zip(finished, repeat(0), repeat("")), failed):
                self.stop(handle)
                if self._given_up:
                    return
                self._finished(handle, code, words)


class SocketPoller(Protocol):
    """The sockets of libcurl's connections, polled for reading and writing."""

    def fileno(self) -> int: ...

    def on_socket(self, what: int, descriptor: int, _multi: object, _data: object) -> None:
        """Register what libcurl waits for on a socket; this is libcurl's socket callback."""

    def ready(self) -> Ready:
        """Return sockets that are ready now: a bounded number, in fair rotation."""

    def close(self) -> None: ...


class EpollPoller:
    """Linux: one system call per change."""

    _MASKS = (0, select.EPOLLIN, select.EPOLLOUT, select.EPOLLIN | select.EPOLLOUT) if hasattr(select, "epoll") else ()

    def __init__(self, failed: Failed) -> None:
        self._failed = failed
        self._epoll = select.epoll()
        self._interests: dict[int, int] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def on_socket(self, what: int, descriptor: int, _multi: object, _data: object) -> None:
        interests, interest = self._interests, what & (READ | WRITE)
        try:
            if descriptor not in interests:
                if interest:
                    self._epoll.register(descriptor, self._MASKS[interest])
                    interests[descriptor] = interest
            elif not interest:
                del interests[descriptor]
                self._epoll.unregister(descriptor)
            elif interest != interests[descriptor]:
                self._epoll.modify(descriptor, self._MASKS[interest])
                interests[descriptor] = interest
        except OSError as error:
            self._failed(error)

    def ready(self) -> Ready:
        # Anything but "writable" counts as readable: data, end of stream or an error.
        return [
            (descriptor, (READ if events & ~select.EPOLLOUT else 0) | (WRITE if events & select.EPOLLOUT else 0))
            for descriptor, events in self._epoll.poll(0, _MAX_READY)
        ]

    def close(self) -> None:
        self._epoll.close()


class SelectorPoller:
    """Systems without epoll: kqueue, through the standard library."""

    def __init__(self, failed: Failed) -> None:
        self._failed = failed
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        return self._selector.fileno()

    def on_socket(self, what: int, descriptor: int, _multi: object, _data: object) -> None:
        known = descriptor in self._selector.get_map()
        interest = what & (READ | WRITE)  # the values of EVENT_READ and EVENT_WRITE too
        try:
            if known and interest:
                self._selector.modify(descriptor, interest)
            elif known:
                self._selector.unregister(descriptor)
            elif interest:
                self._selector.register(descriptor, interest)
        except OSError as error:
            self._failed(error)

    def ready(self) -> Ready:
        return [(key.fd, events) for key, events in self._selector.select(0)]

    def close(self) -> None:
        self._selector.close()


def new_poller(failed: Failed) -> SocketPoller:
    """Create the fastest poller that this system has."""
    return EpollPoller(failed) if hasattr(select, "epoll") else SelectorPoller(failed)


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
    """Whether each request gets a new connection."""
    watched: bool = False

    def note_loss(self) -> None:
        """Count a kept-alive connection that was found closed; too many, and no connection is reused."""
        self.lost += 1
        if self.lost > self.requests * _TOLERATED_LOSSES:
            self.closes = True


def request_was_not_read(unread: int | None, *, was_reset: bool, is_plain: bool) -> bool:
    """Whether the request on a lost connection is known not to have been acted on: bytes of it are unacknowledged.

    Of a connection with TLS that was closed in good order it is not known, as its own farewell is among the bytes.
    Where the system does not count them, a reset has to do.
    """
    if was_reset:
        return unread is None or unread > 0
    return is_plain and unread is not None and unread > 0


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
        """Whether the request on the lost connection at this local port is known not to have been acted on."""
        known = self._sockets.get(port)
        unread = None if known is None or known.copy is None else unacknowledged(known.copy)
        is_plain = url[:5].lower() == b"http:"
        return request_was_not_read(unread, was_reset=_is_reset(words) is not None, is_plain=is_plain)

    def close(self) -> None:
        for port in list(self._sockets):
            self.forget(port)
