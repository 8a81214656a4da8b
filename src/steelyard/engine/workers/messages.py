"""What the driver of a run and its workers say to each other: letters one way, batches the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from steelyard.records import Job
from steelyard.stats.client_load import ClientLoad

Item: TypeAlias = tuple[str, int, Any]
"""What a worker has to say: its kind, the ticket or number it is about, and the rest (pickled where it is a record)."""

SAID, ENDED, RETURNED, CALL, OVER = "said", "ended", "returned", "call", "over"


class Message(msgspec.Struct):
    """From the driver: jobs with their tickets, and whatever else has changed. What is None has not."""

    jobs: list[tuple[int, Job]] = []
    share: int | None = None
    """How many calls the worker may have in flight."""
    number: int = 0
    """Of the share, counting up: a batch says which one it knew."""
    answers: list[tuple[int, Any]] = []
    """To what the worker called for, by the call's number."""
    overloads: list[tuple[int, float | None]] = []
    """Endpoints that were too busy for another worker, and how long they asked to be left alone."""
    recall: int = 0
    """So many jobs that have not begun are wanted back."""
    no_more: bool = False
    cancelled: str | None = None


class Batch(msgspec.Struct):
    """From a worker: what happened since the last one, in order, and how it stands."""

    items: list[Item]
    inside: int
    """Calls in flight."""
    peak: int
    """The most there were since the last batch."""
    share_number: int
    """The last share it heard of."""


class Ending(msgspec.Struct):
    """How the work of one worker ended."""

    failure: bytes | None = None
    """The exception that ended the run, pickled."""
    load: ClientLoad | None = None


class Greeting(msgspec.Struct):
    """Who a worker is and what it runs on."""

    node: str
    pid: int
    python: str
    steelyard: str
    ray: str


FLUSH_SECONDS = 0.02
"""How long the first word of a batch waits for others."""

_IDLE_SECONDS = 1.0
_BATCH_BYTES = 64 * 1024
"""Ray sends results of up to 100 KB along with the reply; larger ones take a detour through shared memory."""
_MOST_BYTES = 1024 * 1024
_BESIDE = 64
"""What an item weighs beside its content, about."""


class MessageQueue:
    """Items on their way to the driver; says when there are so many that no more work should begin."""

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._items: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._first = asyncio.Event()
        self._enough = asyncio.Event()
        self._on_room = on_room

    @property
    def is_full(self) -> bool:
        return self._bytes > _MOST_BYTES

    def put(self, item: Item, *, urgent: bool = False) -> None:
        """Keep an item; an urgent one sends the batch on its way."""
        size = _BESIDE + (len(item[2]) if isinstance(item[2], bytes) else 0)
        self._items.append((item, size))
        self._bytes += size
        self._first.set()
        if urgent or self._bytes >= _BATCH_BYTES:
            self._enough.set()

    async def take(self) -> list[Item]:
        """The next batch, when there is enough for one or a moment after its first item; empty when all is quiet."""
        if not self._items:
            self._first.clear()
            self._enough.clear()
            try:
                await asyncio.wait_for(self._first.wait(), _IDLE_SECONDS)
            except TimeoutError:
                return []
        if not self._enough.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._enough.wait(), FLUSH_SECONDS)
        return self._cut()

    def _cut(self) -> list[Item]:
        batch: list[Item] = []
        was_full, size = self.is_full, 0
        while self._items and (not batch or size + self._items[0][1] <= _BATCH_BYTES):
            item, weight = self._items.popleft()
            batch.append(item)
            size += weight
        self._bytes -= size
        if self._bytes < _BATCH_BYTES:
            self._enough.clear()
        if was_full and not self.is_full:
            self._on_room()
        return batch
