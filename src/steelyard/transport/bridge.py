"""libcurl's multi interface on an asyncio event loop: its sockets, its timer, and what has finished."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic

import pycurl

from steelyard.transport.watch import new_watch

Finished = Callable[[pycurl.Curl, int, str], None]
"""Takes in a transfer that has ended: its handle, libcurl's error code (0 is none) and libcurl's words for it."""


Broken = Callable[[str], None]
"""Told, once, when libcurl has lost its way: the bridge is of no more use, and no transfer on it will end by itself."""


class Bridge:
    """Drives transfers from the loop it was made on. `finished` is called in batches, outside libcurl's callbacks."""

    def __init__(self, connections: int, finished: Finished, broken: Broken) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished = finished
        self._broken = broken
        self._watch = new_watch(self._give_up)
        self._attached = 0
        self._collecting: asyncio.Handle | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        self._due: float | None = None
        self._starting = False
        self._given_up = False
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch.on_socket)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._on_timer)
        self._multi.setopt(pycurl.M_MAXCONNECTS, connections)
        self._multi.setopt(pycurl.M_MAX_TOTAL_CONNECTIONS, connections)
        # One request a connection: with several multiplexed on one, each would wait behind the others' bytes.
        self._multi.setopt(pycurl.M_PIPELINING, 0)
        self._loop.add_reader(self._watch.fileno(), self._on_ready)

    def start(self, handles: Iterable[pycurl.Curl]) -> None:
        """Send these requests now, as far as their connections are there."""
        self._starting = True
        for handle in handles:
            self._multi.add_handle(handle)
            self._attached += 1
        self._starting = False
        self._act(pycurl.SOCKET_TIMEOUT, 0)

    def stop(self, handle: pycurl.Curl) -> None:
        """Take a transfer out, whatever it was doing; its connection is closed unless it had finished."""
        self._attached -= 1
        try:
            self._multi.remove_handle(handle)
        except pycurl.error as error:
            self._give_up(error)

    def close(self) -> None:
        """Close every connection and let go of the loop."""
        for handle in (self._collecting, self._timer):
            if handle is not None:
                handle.cancel()
        self._loop.remove_reader(self._watch.fileno())
        self._multi.close()
        self._watch.close()

    def _on_timer(self, milliseconds: int) -> None:
        """Remember when libcurl wants to be called; a timer that comes too early is left alone and set again then."""
        if self._starting:
            return  # it wants to be called at once, and is about to be
        if milliseconds < 0:
            self._due = None
            return
        # Not the loop's own clock: uvloop's stands still within a turn, and would be early at the end of a long one.
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
        if self._due > monotonic():  # called early, libcurl would do nothing, and not ask again
            self._set_timer(self._due)
            return
        self._due = None
        self._act(pycurl.SOCKET_TIMEOUT, 0)
        if self._due is None and not self._given_up:
            # libcurl's clock may run a little behind this one: nothing was due yet, and it does not say so again.
            self._on_timer(self._multi.timeout())

    def _on_ready(self) -> None:
        for descriptor, events in self._watch.ready():
            self._act(descriptor, events)

    def _act(self, descriptor: int, events: int) -> None:
        try:
            _, running = self._multi.socket_action(descriptor, events)
        except pycurl.error as error:
            self._give_up(error)
            return
        if running < self._attached and self._collecting is None:
            self._collecting = self._loop.call_soon(self._collect)

    def _give_up(self, error: Exception) -> None:
        if not self._given_up:
            self._given_up = True
            self._loop.call_soon(self._broken, str(error))

    def _collect(self) -> None:
        self._collecting = None
        left = 1
        while left and not self._given_up:
            left, finished, failed = self._multi.info_read()
            for handle, code, words in (*((handle, 0, "") for handle in finished), *failed):
                self.stop(handle)
                if self._given_up:
                    return
                self._finished(handle, code, words)
