"""One timer for all that is to happen: whatever is due is done in order, then the loop gets its turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from heapq import heappop, heappush
from time import monotonic
from typing import TypeAlias

Deed: TypeAlias = Callable[[float], float | None]
"""Takes the moment at which it was due, and gives the next one, if there is one."""


class Wheel:
    """Calls deeds when they are due; never early, and late by the timer's millisecond or by what the others took.

    A timer of the event loop for every chunk of every stream would cost more than the chunks do.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[tuple[float, int, Deed]] = []
        self._count = 0
        self._timer: asyncio.Handle | None = None
        self._armed_for = math.inf

    def add(self, due: float, deed: Deed) -> None:
        """Have a deed done at this reading of the monotonic clock."""
        self._count += 1
        heappush(self._due, (due, self._count, deed))
        if due < self._armed_for:
            self._arm()

    def close(self) -> None:
        """Do nothing more."""
        self._due.clear()
        self._disarm()

    def _tick(self) -> None:
        self._armed_for = -math.inf  # what is added meanwhile need not set the timer
        due = self._due
        now = monotonic()
        try:
            # At most one round: a backlog must not keep the loop from reading what comes in.
            for _ in range(len(due)):
                if not due or due[0][0] > now:
                    break
                when, _, deed = heappop(due)
                again = deed(when)
                if again is not None:
                    self._count += 1
                    heappush(due, (again, self._count, deed))
        finally:
            self._timer = None
            self._arm()

    def _arm(self) -> None:
        self._disarm()
        if not self._due:
            return
        self._armed_for = self._due[0][0]
        # Up to the next millisecond: event loops round, and one that rounds down would wake us for nothing.
        delay = math.ceil((self._armed_for - monotonic()) * 1000) / 1000
        self._timer = self._loop.call_later(delay, self._tick) if delay > 0 else self._loop.call_soon(self._tick)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_for = math.inf
