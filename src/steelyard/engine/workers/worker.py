"""A worker: a process in which a local engine runs the jobs that the driver assigns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any

from steelyard._version import __version__
from steelyard.engine.arrivals import EARLY_ENOUGH, LATE_AFTER
from steelyard.engine.base import CancellationToken
from steelyard.engine.local import LocalEngine
from steelyard.engine.workers.logs import LogForwarder
from steelyard.engine.workers.messages import (
    BATCH_BYTES,
    EMITTED,
    ENDED,
    EXIT,
    RECORD,
    RETURNED,
    Batch,
    Message,
    MessageQueue,
    WorkerExit,
    WorkerInfo,
)
from steelyard.engine.workers.pickling import pickle_error, pickle_item, unpickle_work
from steelyard.engine.workers.remote_limits import DriverLink
from steelyard.protocols import Emit, Work
from steelyard.records import Job, Record, UnscoredAnswer
from steelyard.stats.client_load import LoopMonitor
from steelyard.stats.metrics import WorkerSends

_KEPT_SECONDS = 60.0
"""How long a run that is over is kept: its last batch may have to be sent again."""
_SILENCE_SECONDS = 5.0
"""A driver sends its workers a message at least once a second. One that is silent for longer may have assigned their
jobs to others: jobs that have not begun by then wait for its next message."""


class Worker:
    """Hosts one part of each run that its engine runs. On Ray it is the class of the actors."""

    def __init__(self, node: str | None, *, ray_version: str | None = None) -> None:
        self._node = node
        self._ray_version = ray_version
        self._runs: dict[int, HostedRun] = {}
        _allow_open_files()

    async def handshake(self) -> WorkerInfo:
        """Report node and versions; called before anything else."""
        return WorkerInfo(self._node, os.getpid(), platform.python_version(), __version__, self._ray_version)

    async def clock(self) -> float:
        """Return this process's clock: planned times are by it."""
        return time.monotonic()

    async def begin(self, run: int, work: bytes, parallelism: int, grace: float, paced: bool = False) -> None:
        """Unpickle the work and open its endpoints; raises what makes that impossible."""
        now = time.monotonic()
        self._runs = {number: hosted for number, hosted in self._runs.items() if hosted.is_kept(now)}
        if run not in self._runs:  # else the connection broke before the reply to the first call arrived
            hosted = self._runs[run] = HostedRun(self._node, parallelism, grace, paced=paced)
            hosted.beginning = asyncio.create_task(hosted.begin(work))
        try:
            await asyncio.shield(self._runs[run].beginning)
        except Exception:
            self._runs.pop(run, None)
            raise

    async def receive(self, run: int, message: Message) -> None:
        """Take in a message."""
        if run in self._runs:
            self._runs[run].receive(message)

    async def exchange(self, run: int, message: Message) -> Batch:
        """Take in a message and return the next batch, waiting a moment for it."""
        hosted = self._runs[run]
        hosted.receive(message)
        return await hosted.batch(message.acknowledged)


def _allow_open_files() -> None:
    """Raise the limit of open files, and so of connections, to the highest the system allows."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not a POSIX system, or a limit that may not be moved
        import resource

        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


class HostedRun:
    """One run's jobs in this process: those waiting, those in flight, and the items to report."""

    def __init__(
        self,
        node: str | None,
        parallelism: int,
        grace: float,
        *,
        batch_bytes: int = BATCH_BYTES,
        paced: bool = False,
    ) -> None:
        self._node = node
        self._parallelism = parallelism
        self._grace = grace
        self._token = CancellationToken()
        self._queue = MessageQueue(self._notify_change, batch_bytes)
        self._link = DriverLink(self._queue)
        self._waiting: deque[tuple[int, Job]] = deque()
        self._tickets: dict[int, int] = {}
        """By the identity of a job that was taken and is about to begin."""
        self._share = self._share_number = 0
        self._active = self._peak = 0
        self._last_message_at = time.monotonic()
        self._no_more = False
        self._callbacks: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self._sends = WorkerSends() if paced else None
        """In an open loop, in which each job comes with the time at which it is to be sent."""
        self._ends_at: float | None = None
        self._received = 0
        """The number of the last message that was taken in."""
        self._early: dict[int, Message] = {}
        """Messages that overtook another one, by number."""
        self._batching = asyncio.Lock()
        self._last_batch = Batch([], 0, 0, 0)
        self._over_at: float | None = None
        self.beginning: asyncio.Task[None]

    def is_kept(self, now: float) -> bool:
        """Whether the driver may still ask for its last batch."""
        return self._over_at is None or now - self._over_at < _KEPT_SECONDS

    async def begin(self, pickled: bytes) -> None:
        """Unpickle the work, open its endpoints and start the engine."""
        self._log = LogForwarder(self._queue)
        self._log.install()
        try:
            await self._begin(pickled)
        except BaseException:
            self._log.remove()
            raise

    async def _begin(self, pickled: bytes) -> None:
        self._work: Work = unpickle_work(pickled, self._token, self._link)
        self._encode: Callable[[Record], bytes] | None = getattr(self._work, "encode", None)
        if (open_all := getattr(self._work, "open", None)) is not None:
            await open_all(self._parallelism)
        self._running = asyncio.create_task(self._run())

    def receive(self, message: Message) -> None:
        """Take in a message of the driver, after those before it; one that came already is dropped."""
        self._last_message_at = time.monotonic()
        if message.number == 0:
            self._take_in(message)
        elif message.number > self._received:
            self._early[message.number] = message
        while (following := self._early.pop(self._received + 1, None)) is not None:
            self._received += 1
            self._take_in(following)
        self._notify_change()

    def _take_in(self, message: Message) -> None:
        if message.share is not None and message.share_number > self._share_number:
            self._share, self._share_number = message.share, message.share_number
        self._waiting.extend(message.jobs)
        if message.ends_at is not None:
            self._ends_at = message.ends_at
        recalled = [self._waiting.pop() for _ in range(min(message.recall, len(self._waiting)))]
        for ticket, _ in reversed(recalled):
            self._queue.put((RETURNED, ticket, None), urgent=True)
        self._link.deliver(message.replies, message.overloads)
        self._no_more = self._no_more or message.no_more
        if message.cancelled is not None:
            self._token.cancel(message.cancelled)

    async def batch(self, acknowledged: int | None = None) -> Batch:
        """Wait for the next batch to report; the last one again if it is not the one that was acknowledged."""
        async with self._batching:
            if acknowledged is not None and self._last_batch.number > acknowledged:
                return self._last_batch
            items = await self._queue.take()
            peak, self._peak = self._peak, self._active
            number = self._last_batch.number + 1
            self._last_batch = Batch(
                items, self._active, peak, self._share_number, number, self._received, copy(self._sends)
            )
            if items and items[-1][0] == EXIT:
                self._over_at = time.monotonic()
            return self._last_batch

    def fail(self, error: BaseException) -> None:
        """End this part of the run with an error, which is raised in the driver."""
        self._queue.put((EXIT, 0, WorkerExit(pickle_error(error))), urgent=True)

    def abandon(self) -> None:
        """Cancel what is left: the driver does not wait for it."""
        self._token.cancel("the driver has ended the run")

    @property
    def allowed(self) -> int:
        """How many jobs may run: the share, as far as there are jobs; none while the driver is slow or silent."""
        if self._no_more and not self._waiting:
            return self._active + 1  # the next to ask finds no job left, and the engine ends
        if self._queue.is_full or time.monotonic() - self._last_message_at > _SILENCE_SECONDS:
            return 0
        return min(self._share, self._active + len(self._waiting))

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def _notify_change(self) -> None:
        self._changed.set()
        for callback in self._callbacks:
            callback()

    async def _run(self) -> None:
        monitor = LoopMonitor()
        monitor.start()
        failure, interrupted_by = None, None
        try:
            tally = await LocalEngine(grace=self._grace).run(
                self._run_job,
                self._jobs(),
                self._emit,
                parallelism=self._parallelism,
                token=self._token,
                permits=self,
                pace=None if self._sends is None else self,
            )
            interrupted_by = tally.interrupted_by
        except BaseException as error:  # noqa: BLE001 - raised in the driver
            failure = pickle_error(error)
        load = monitor.stop()
        try:
            if (close_all := getattr(self._work, "close", None)) is not None:
                await close_all()
        except BaseException as error:  # noqa: BLE001 - raised in the driver, which waits for the last item
            failure = failure or pickle_error(error)
        self._log.remove()
        self._queue.put((EXIT, 0, WorkerExit(failure, load, interrupted_by)), urgent=True)

    async def next_send(self) -> float | None:
        """Wait for the planned time of the next job and return it; None when there are no more (see `Pace`)."""
        assert self._sends is not None
        while self._waiting or not self._no_more:
            if not self._waiting:
                self._changed.clear()
                await self._changed.wait()
                continue
            ticket, job = self._waiting[0]
            now = time.monotonic()
            planned = now if job.planned_at is None else job.planned_at
            if self._ends_at is not None and now >= self._ends_at:
                self._waiting.popleft()
                self._queue.put((RETURNED, ticket, None))
            elif planned - now > EARLY_ENOUGH:
                await asyncio.sleep(planned - now)
            else:
                self._sends.note(now - planned, LATE_AFTER)
                return planned
        return None

    def _jobs(self) -> Iterator[Job | None]:
        while self._waiting or not self._no_more:
            if not self._waiting:
                yield None
                continue
            ticket, job = self._waiting.popleft()
            self._tickets[id(job)] = ticket
            self._active += 1
            self._peak = max(self._peak, self._active)
            yield job

    async def _run_job(self, job: Job, emit: Emit) -> None:
        """Do the work, and report when it has ended."""
        ticket = self._tickets.pop(id(job))
        finished = False
        try:
            await self._work(job, partial(self._emit_with_ticket, ticket, emit))
            finished = True
        finally:
            self._active -= 1
            # With no job left to begin, the driver is to know at once; but not of a failure before its cause.
            is_idle = finished and not (self._waiting or self._no_more or self._token.cancelled)
            self._queue.put((ENDED, ticket, finished), urgent=is_idle)

    def _emit_with_ticket(self, ticket: int, emit: Callable[[Any], None], item: Any) -> None:
        """Emit an item with its job's ticket; a record also gets the name of this node, if it has one."""
        record = item.record if isinstance(item, UnscoredAnswer) else item
        if isinstance(record, Record) and record.node is None:
            record.node = self._node
        emit((ticket, item))

    def _emit(self, ticket_and_item: Any) -> None:
        ticket, item = ticket_and_item
        if self._encode is not None and isinstance(item, Record):
            self._queue.put((RECORD, ticket, self._encode(item)))
            return
        self._queue.put((EMITTED, ticket, pickle_item(item)), urgent=isinstance(item, UnscoredAnswer))
