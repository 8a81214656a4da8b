"""Opens TCP connections with libcurl, which resolves names, tries several addresses, and keeps a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import pycurl

from steelyard.errors import TargetError, TransportError
from steelyard.transport.errors import curl_error, origin
from steelyard.transport.event_loop import Bridge, OpenedSocket, opened_socket
from steelyard.transport.settings import Settings

Key = TypeVar("Key")

_MAX_STARTS = 64
"""Connections whose opening begins per event-loop iteration: a thousand at once would block the loop."""


class Opener(Generic[Key]):
    """Opens connections on the event loop; calls `opened` with the key given for one, and its socket or an error."""

    def __init__(
        self, connections: int, settings: Settings, opened: Callable[[Key, socket.socket | TargetError], None]
    ) -> None:
        self._connections = connections
        self._settings = settings
        self._opened = opened
        self._loop = asyncio.get_running_loop()
        self._bridge = Bridge(connections, self._on_finished, self._on_broken)
        self._queue: deque[tuple[str, Key]] = deque()
        self._running: dict[pycurl.Curl, tuple[_Attempt, Key]] = {}
        self._free: list[_Attempt] = []
        self._starting: asyncio.Handle | None = None

    def open(self, url: str, key: Key) -> None:
        """Begin to open a connection to the host of a URL, in this iteration of the event loop or one of the next."""
        self._queue.append((url, key))
        if self._starting is None:
            self._starting = self._loop.call_soon(self._start)

    def close(self) -> None:
        """Give up all that is being opened."""
        if self._starting is not None:
            self._starting.cancel()
        self._bridge.close()
        for attempt in (*(attempt for attempt, _ in self._running.values()), *self._free):
            attempt.close()
        self._running.clear()
        self._free.clear()

    def _start(self) -> None:
        handles = []
        for _ in range(min(_MAX_STARTS, len(self._queue))):
            url, key = self._queue.popleft()
            attempt = self._free.pop() if self._free else _Attempt(self._settings)
            attempt.prepare(url)
            self._running[attempt.handle] = (attempt, key)
            handles.append(attempt.handle)
        self._bridge.start(handles)
        self._starting = self._loop.call_soon(self._start) if self._queue else None

    def _on_finished(self, handle: pycurl.Curl, code: int, words: str) -> None:
        attempt, key = self._running.pop(handle)
        opened = attempt.take_socket(code, words)
        self._free.append(attempt)
        self._opened(key, opened)

    def _on_broken(self, words: str) -> None:
        running, self._running = self._running, {}
        self._bridge.close()
        self._bridge = Bridge(self._connections, self._on_finished, self._on_broken)
        for attempt, key in running.values():
            attempt.close()
            self._opened(key, TransportError(f"libcurl failed for all connections being opened: {words}"))


class _Attempt:
    """A libcurl handle that connects and sends nothing. Its sockets are copied, as libcurl closes its own."""

    def __init__(self, settings: Settings) -> None:
        self._url = ""
        self._sockets: list[OpenedSocket] = []
        self.handle = pycurl.Curl()
        for option, value in settings.options():
            self.handle.setopt(option, value)
        self.handle.setopt(pycurl.CONNECT_ONLY, 1)
        self.handle.setopt(pycurl.FRESH_CONNECT, 1)
        self.handle.setopt(pycurl.SOCKOPTFUNCTION, self._on_opened)

    def prepare(self, url: str) -> None:
        if url != self._url:
            self.handle.setopt(pycurl.URL, url)
            self._url = url

    def take_socket(self, code: int, words: str) -> socket.socket | TargetError:
        """Return the connected socket, or why there is none."""
        try:
            if code:
                return curl_error(code, words, self._url, None)
            for one in self._sockets:
                if (connected := _connected(one)) is not None:
                    return connected
            return TransportError(f"the connection to {origin(self._url)} was closed at once")
        finally:
            self._close_sockets()

    def close(self) -> None:
        self._close_sockets()
        self.handle.close()

    def _on_opened(self, descriptor: int, _purpose: int) -> int:
        with contextlib.suppress(OSError):  # no file left: then there is no socket to take
            self._sockets.append(opened_socket(descriptor, copied=True))
        return pycurl.SOCKOPT_OK

    def _close_sockets(self) -> None:
        for one in self._sockets:
            one.close()
        self._sockets.clear()


def _connected(opened: OpenedSocket) -> socket.socket | None:
    """Take over the copy of a socket, if it is connected: others were for addresses that were slower."""
    if opened.copy is None:
        return None
    copy = socket.socket(fileno=opened.copy)
    try:
        copy.getpeername()
    except OSError:
        copy.detach()
        return None
    opened.copy = None
    copy.setblocking(False)
    return copy
