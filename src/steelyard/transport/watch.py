"""Which of libcurl's sockets are ready, behind one file descriptor that an event loop can wait for.

Handing each socket to the loop costs more than the rest of a request: a poll object made and thrown away with every
one on a kept-alive connection. One nested poll in the loop, and libcurl's sockets in that, is half again as fast.
"""

from __future__ import annotations

import select
import selectors
from collections.abc import Callable
from typing import Protocol

READ, WRITE = 1, 2
"""libcurl's CURL_POLL_IN and OUT, also its CURL_CSELECT_IN and OUT. Anything else it says means: wait no longer."""

_MOST_AT_ONCE = 64
"""Sockets served before everything else on the loop gets its turn. The kernel hands out those that wait in turn."""

Ready = list[tuple[int, int]]
Failed = Callable[[Exception], None]
"""Told when a socket cannot be watched: libcurl, asked to stop by its callback, would leave its transfers hanging."""


class Watch(Protocol):
    """Sockets and what they are waited for."""

    def fileno(self) -> int: ...

    def on_socket(self, what: int, descriptor: int, _multi: object, _data: object) -> None:
        """Take note of what libcurl waits for at a socket: this is the callback that it is given."""

    def ready(self) -> Ready:
        """Sockets that can be served now, without waiting; a bounded number, none of them passed over for ever."""

    def close(self) -> None: ...


class EpollWatch:
    """Linux: one system call a change."""

    _MASKS = (0, select.EPOLLIN, select.EPOLLOUT, select.EPOLLIN | select.EPOLLOUT) if hasattr(select, "epoll") else ()

    def __init__(self, failed: Failed) -> None:
        self._failed = failed
        self._epoll = select.epoll()
        self._interests: dict[int, int] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def on_socket(self, what: int, descriptor: int, _multi: object, _data: object) -> None:
        known, interest = self._interests.get(descriptor, 0), what & (READ | WRITE)
        try:
            if known and not interest:
                del self._interests[descriptor]
                self._epoll.unregister(descriptor)
            elif interest and not known:
                self._epoll.register(descriptor, self._MASKS[interest])
                self._interests[descriptor] = interest
            elif interest != known:
                self._epoll.modify(descriptor, self._MASKS[interest])
                self._interests[descriptor] = interest
        except OSError as error:
            self._failed(error)

    def ready(self) -> Ready:
        # Anything but "may be written" is for the reader to find out: bytes, an end or an error.
        return [
            (descriptor, (READ if events & ~select.EPOLLOUT else 0) | (WRITE if events & select.EPOLLOUT else 0))
            for descriptor, events in self._epoll.poll(0, _MOST_AT_ONCE)
        ]

    def close(self) -> None:
        self._epoll.close()


class SelectorWatch:
    """Where there is no epoll: kqueue, by way of the standard library."""

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


def new_watch(failed: Failed) -> Watch:
    """The quickest kind of watch that this system has."""
    return EpollWatch(failed) if hasattr(select, "epoll") else SelectorWatch(failed)
