"""Replies: their heads parsed, and handed over to their callers a few at a time."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from functools import lru_cache
from typing import TypeAlias

from steelyard.errors import TargetError
from steelyard.protocols import HttpReply

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
