"""Answers on their way to those who wait for them: a few at each turn of the loop, and sockets are read in between."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TypeAlias

from steelyard.contracts import HttpReply
from steelyard.errors import TargetError

_CHUNKS_A_TURN = 256
"""How much is handed over before the sockets are looked at again: dozens of whole answers, or a few streams. To decode
so much takes about as long as to read the sockets that are served in a turn, so that neither waits for the other."""

Outcome: TypeAlias = HttpReply | TargetError
Waiting: TypeAlias = asyncio.Future[HttpReply]


class Handover:
    """Settles futures in order. Whoever waits for one decodes the answer, scores it and writes it down: with hundreds
    of streams that end at once that takes longer than a chunk on another stream may wait to be timed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[Waiting, Outcome]] = deque()
        self._left = _CHUNKS_A_TURN
        self._turn: asyncio.Handle | None = None

    def give(self, done: Waiting, outcome: Outcome) -> None:
        """Hand this over: now, if the turn has room for it."""
        if self._left <= 0:
            self._queue.append((done, outcome))
            return
        self._left -= _settle(done, outcome)
        if self._turn is None:
            self._turn = self._loop.call_soon(self._next_turn)

    def close(self) -> None:
        """Hand over all that is left."""
        if self._turn is not None:
            self._turn.cancel()
        while self._queue:
            _settle(*self._queue.popleft())

    def _next_turn(self) -> None:
        self._turn = None
        self._left = _CHUNKS_A_TURN
        while self._queue and self._left > 0:
            self.give(*self._queue.popleft())


def _settle(done: Waiting, outcome: Outcome) -> int:
    """How many chunks it came to; none for one that nobody waits for any more."""
    if done.done():
        return 0
    if isinstance(outcome, HttpReply):
        done.set_result(outcome)
        return 1 + len(outcome.chunks)
    done.set_exception(outcome)
    return 1
