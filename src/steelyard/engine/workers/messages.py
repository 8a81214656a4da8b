"""Messages between the driver of a run and its workers, and the queue in which a worker collects its own.

The driver sends a `Message`, a worker replies with a `Batch` of items.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from steelyard._version import __version__
from steelyard.errors import ConfigurationError
from steelyard.records import Job
from steelyard.stats.client_load import ClientLoad
from steelyard.stats.metrics import WorkerSends

EMITTED, RECORD, ENDED, RETURNED = "emitted", "record", "ended", "returned"
CALL, LOGGED, EXIT = "call", "logged", "exit"
"""The kinds of items: what a job emits, its record encoded, its end, a job handed back before it began, a call to an
object in the driver, something that was logged, and the worker's last item."""

Item: TypeAlias = tuple[str, int, Any]
"""One thing that a worker reports: its kind, the ticket or call number, and the content (a record is pickled)."""

FLUSH_SECONDS = 0.02
"""How long the first item of a batch waits for others."""
_IDLE_SECONDS = 1.0
"""How often a worker with nothing to report sends an empty batch."""
BATCH_BYTES = 92 * 1024
"""Ray sends results of up to 100 KB along with the reply; larger ones take a detour through shared memory."""
_MAX_QUEUED_BYTES = 1024 * 1024
_ITEM_OVERHEAD = 64
"""Bytes of an item without its content, about."""


class Message(msgspec.Struct):
    """From the driver: jobs with their tickets, and anything else that has changed. None means unchanged."""

    jobs: list[tuple[int, Job]] = []
    share: int | None = None
    """How many calls the worker may have in flight."""
    share_number: int = 0
    """Counts up with each new share; a batch names the last one that the worker received."""
    replies: list[tuple[int, Any]] = []
    """Replies to the worker's calls, by call number."""
    overloads: list[tuple[int, float | None]] = []
    """Endpoints that refused another worker because of load, and the seconds they asked to wait."""
    recall: int = 0
    """How many jobs that have not begun the worker should hand back."""
    no_more: bool = False
    """Whether no more jobs will come."""
    cancelled: str | None = None
    ends_at: float | None = None
    """Open loop: when nothing more is sent, by the worker's clock."""
    number: int = 0
    """Counts up from 1. A worker takes each message once and in order, however often it is sent."""
    acknowledged: int = 0
    """The number of the last batch that the driver received."""


class Batch(msgspec.Struct):
    """From a worker: what happened since its last batch, in order, and its current state."""

    items: list[Item]
    in_flight: int
    """Calls in flight."""
    peak: int
    """The most calls in flight since the last batch."""
    share_number: int
    """The number of the last share received."""
    number: int = 0
    """Counts up from 1. Until the driver acknowledges it, a batch is sent again."""
    received: int = 0
    """The number of the last message received, with all before it."""
    sends: WorkerSends | None = None
    """Open loop: what the worker has sent so far."""


class WorkerExit(msgspec.Struct):
    """How one worker's part of a run ended."""

    failure: bytes | None = None
    """The exception that ended the run, pickled."""
    load: ClientLoad | None = None
    interrupted_by: str | None = None
    """The id of the case whose target or scorer raised KeyboardInterrupt."""


class WorkerInfo(msgspec.Struct):
    """The handshake's reply: which node and process a worker is, and its versions."""

    node: str | None
    """None for a process of this machine, which `ProcessEngine` started."""
    pid: int
    python: str
    steelyard: str
    ray: str | None = None
    deaths: dict[int, str] = {}
    """How earlier processes of the node ended, by their number."""

    @property
    def name(self) -> str:
        """What messages call the worker."""
        return f"worker process {self.pid}" if self.node is None else f"the worker on {self.node}"


def check_same_versions(info: WorkerInfo) -> None:
    """Raise ConfigurationError when a worker has another version of Python, Ray or Steelyard than this process."""
    ours = {"Python": platform.python_version(), "steelyard": __version__}
    theirs = {"Python": info.python, "steelyard": info.steelyard}
    if info.ray is not None:
        import ray

        ours["ray"], theirs["ray"] = ray.__version__, info.ray
    # Pickles of one Python 3.x are read by every patch release of it.
    alike = {name: _release(name, ours[name]) == _release(name, theirs[name]) for name in ours}
    wrong = [f"{name} {theirs[name]} there, {ours[name]} here" for name in ours if not alike[name]]
    if wrong:
        raise ConfigurationError(f"{info.name} does not match this process: {'; '.join(wrong)}")


def _release(name: str, version: str) -> str:
    return ".".join(version.split(".")[:2]) if name == "Python" else version


class MessageQueue:
    """A worker's items on their way to the driver. While it is full, no more work should begin."""

    def __init__(self, on_room: Callable[[], None], batch_bytes: int = BATCH_BYTES) -> None:
        self._batch_bytes = batch_bytes
        self._items: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._first = asyncio.Event()
        self._enough = asyncio.Event()
        self._on_room = on_room

    @property
    def is_full(self) -> bool:
        return self._bytes > max(_MAX_QUEUED_BYTES, 2 * self._batch_bytes)

    def put(self, item: Item, *, urgent: bool = False) -> None:
        """Add an item; an urgent one sends the batch at once."""
        size = _ITEM_OVERHEAD + (len(item[2]) if isinstance(item[2], bytes) else 0)
        self._items.append((item, size))
        self._bytes += size
        self._first.set()
        if urgent or self._bytes >= self._batch_bytes:
            self._enough.set()

    async def take(self) -> list[Item]:
        """Wait for the next batch: full, or a moment after its first item; empty after a second without any."""
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
        return self._take_batch()

    def _take_batch(self) -> list[Item]:
        batch: list[Item] = []
        was_full, total = self.is_full, 0
        while self._items and (not batch or total + self._items[0][1] <= self._batch_bytes):
            item, size = self._items.popleft()
            batch.append(item)
            total += size
        self._bytes -= total
        if self._bytes < self._batch_bytes:
            self._enough.clear()
        if was_full and not self.is_full:
            self._on_room()
        return batch
