"""The actor: a process of the cluster in which the local engine's pool works through what the driver hands it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from steelyard._version import __version__
from steelyard.engine.cancellation import CancellationToken
from steelyard.engine.local import LocalEngine
from steelyard.engine.workers.messages import (
    ENDED,
    OVER,
    RETURNED,
    SAID,
    Batch,
    Ending,
    Greeting,
    Message,
    MessageQueue,
)
from steelyard.engine.workers.pickling import pack, pack_error, unpack_work
from steelyard.engine.workers.remote_limits import DriverLink
from steelyard.protocols import Emit, Work
from steelyard.records import Job, Record, UnscoredAnswer
from steelyard.stats.client_load import LoopMonitor

_SILENCE_SECONDS = 5.0
"""A driver speaks to its workers once a second at least. One that is not heard any more may have given their jobs to
others: what has not begun by then waits until it is heard again."""


class Worker:
    """What a Ray actor is made of: it hosts one part of each run that its engine runs."""

    def __init__(self, paths: Sequence[str]) -> None:
        import ray

        # Several nodes may share a host's name, and a node's own name says nothing to anybody.
        self._node = f"{socket.gethostname()}/{ray.get_runtime_context().get_node_id()[:8]}"
        self._runs: dict[int, HostedRun] = {}
        sys.path.extend(path for path in paths if path not in sys.path and os.path.isdir(path))
        _allow_open_files()

    async def hello(self) -> Greeting:
        """Who this is; asked before anything else is sent."""
        import ray

        return Greeting(self._node, os.getpid(), platform.python_version(), __version__, ray.__version__)

    async def begin(self, run: int, work: bytes, parallelism: int, grace: float) -> None:
        """Unpack the work, open what it asks, and stand ready; raises what makes that impossible."""
        self._runs[run] = hosted = HostedRun(self._node, parallelism, grace)
        try:
            await hosted.begin(work)
        except BaseException:
            del self._runs[run]
            raise

    async def tell(self, run: int, letter: Message) -> None:
        """Take in a letter."""
        if run in self._runs:
            self._runs[run].read(letter)

    async def exchange(self, run: int, letter: Message) -> Batch:
        """Take in a letter, and give what there is to say, waiting a little for it."""
        hosted = self._runs[run]
        hosted.read(letter)
        batch = await hosted.batch()
        if batch.items and batch.items[-1][0] == OVER:
            del self._runs[run]
        return batch


def _allow_open_files() -> None:
    """Let this process have as many connections as its system allows: it exists for nothing else."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not a POSIX system, or a limit that may not be moved
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class HostedRun:
    """One run's jobs in this process: waiting, in flight, and what they said."""

    def __init__(self, node: str, parallelism: int, grace: float) -> None:
        self._node = node
        self._parallelism = parallelism
        self._grace = grace
        self._token = CancellationToken()
        self._outbox = MessageQueue(self._room_changed)
        self._post = DriverLink(self._outbox)
        self._waiting: deque[tuple[int, Job]] = deque()
        self._tickets: dict[int, int] = {}
        """By the identity of a job that was taken and is about to begin."""
        self._share = self._share_number = 0
        self._active = self._peak = 0
        self._heard_at = time.monotonic()
        self._no_more = False
        self._callbacks: list[Callable[[], None]] = []

    async def begin(self, packed: bytes) -> None:
        """Have the pool ready, its endpoints open."""
        self._work: Work = unpack_work(packed, self._token, self._post)
        if (open_all := getattr(self._work, "open", None)) is not None:
            await open_all(self._parallelism)
        self._running = asyncio.create_task(self._run())

    def read(self, letter: Message) -> None:
        """Take in what the driver says."""
        self._heard_at = time.monotonic()
        if letter.share is not None and letter.number > self._share_number:
            self._share, self._share_number = letter.share, letter.number
        self._waiting.extend(letter.jobs)
        wanted_back = [self._waiting.pop() for _ in range(min(letter.recall, len(self._waiting)))]
        for ticket, _ in reversed(wanted_back):
            self._outbox.put((RETURNED, ticket, None), urgent=True)
        self._post.deliver(letter.answers, letter.overloads)
        self._no_more = self._no_more or letter.no_more
        if letter.cancelled is not None:
            self._token.cancel(letter.cancelled)
        self._room_changed()

    async def batch(self) -> Batch:
        """What there is to say."""
        items = await self._outbox.take()
        peak, self._peak = self._peak, self._active
        return Batch(items, self._active, peak, self._share_number)

    @property
    def allowed(self) -> int:
        """How many may be at work: the share, as far as there are jobs, and none while the driver lags or is gone."""
        if self._no_more and not self._waiting:
            return self._active + 1  # whoever comes in finds that there is nothing left, and the pool ends
        if self._outbox.is_full or time.monotonic() - self._heard_at > _SILENCE_SECONDS:
            return 0
        return min(self._share, self._active + len(self._waiting))

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def _room_changed(self) -> None:
        for callback in self._callbacks:
            callback()

    async def _run(self) -> None:
        monitor = LoopMonitor()
        monitor.start()
        failure = None
        try:
            await LocalEngine(grace=self._grace).run(
                self._tracked,
                self._jobs(),
                self._say,
                parallelism=self._parallelism,
                token=self._token,
                permits=self,
            )
        except BaseException as error:  # noqa: BLE001 - raised where the run is owned
            failure = pack_error(error)
        load = monitor.stop()
        if (close_all := getattr(self._work, "close", None)) is not None:
            await close_all()
        self._outbox.put((OVER, 0, Ending(failure, load)), urgent=True)

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

    async def _tracked(self, job: Job, emit: Emit) -> None:
        """The work, with word of its end."""
        ticket = self._tickets.pop(id(job))
        finished = False
        try:
            await self._work(job, partial(self._stamped, ticket, emit))
            finished = True
        finally:
            self._active -= 1
            self._outbox.put((ENDED, ticket, finished))

    def _stamped(self, ticket: int, emit: Callable[[Any], None], item: Any) -> None:
        """Pass on what work says, with its ticket and, of an answer, the node that it came by."""
        record = item.record if isinstance(item, UnscoredAnswer) else item
        if isinstance(record, Record) and record.node is None:
            record.node = self._node
        emit((ticket, item))

    def _say(self, said: Any) -> None:
        ticket, item = said
        self._outbox.put((SAID, ticket, pack(item)))
