"""A fixed pool of workers over one shared iterator of jobs, in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from steelyard.contracts import Cancellation, Emit, InFlight, Tally, Work
from steelyard.records import Job

_LONGEST_TURN = 0.005
"""Seconds a worker may go on without giving the loop a turn, when its target never really waits."""


class LocalEngine:
    """Exactly `parallelism` calls in flight while work remains; never a task per case.

    `grace` is how long cancelled work may take to wind up before it is abandoned: a target that
    swallows cancellation must not hold up the exit.
    """

    def __init__(self, *, grace: float = 4.0) -> None:
        self._grace = grace
        self._started: dict[int, tuple[Job, float]] = {}

    async def run(self, work: Work, jobs: Iterator[Job], emit: Emit, *, parallelism: int, token: Cancellation) -> Tally:
        """Run all jobs, or until the token is cancelled, or until work raises: then cancel the rest and raise."""
        tally = Tally()
        if token.cancelled:
            return tally
        stop = _Stop(parallelism)
        workers = [
            asyncio.create_task(self._worker(number, work, jobs, emit, tally), name=f"steelyard-worker-{number}")
            for number in range(parallelism)
        ]
        for worker in workers:
            worker.add_done_callback(stop.worker_ended)
        watcher = asyncio.create_task(token.wait(), name="steelyard-cancellation")
        watcher.add_done_callback(stop.now)
        try:
            await stop.reached
        finally:
            watcher.cancel()
            await self._wind_up(workers, tally)
        if stop.failure is not None:
            raise stop.failure
        return tally

    def in_flight(self) -> InFlight:
        """How many calls are out, and which has been out longest."""
        if not self._started:
            return InFlight(0, None, 0.0)
        job, since = min(self._started.values(), key=lambda entry: entry[1])
        return InFlight(len(self._started), job.case.id, time.monotonic() - since)

    async def _worker(self, number: int, work: Work, jobs: Iterator[Job], emit: Emit, tally: Tally) -> None:
        started = self._started
        turn_began = time.monotonic()
        for job in jobs:
            now = time.monotonic()
            started[number] = (job, now)
            tally.started += 1
            if len(started) > tally.peak_in_flight:
                tally.peak_in_flight = len(started)
            try:
                await work(job, emit)
                tally.finished += 1
            finally:
                started.pop(number, None)
            if now - turn_began > _LONGEST_TURN:
                await asyncio.sleep(0)
                turn_began = now

    async def _wind_up(self, workers: list[asyncio.Task[None]], tally: Tally) -> None:
        """End what still runs, wait for it within the grace, and count what never finished as cancelled."""
        running = [worker for worker in workers if not worker.done()]
        for worker in running:
            worker.cancel()
        if running:
            await asyncio.wait(running, timeout=self._grace)
        for worker in workers:
            if worker.done() and not worker.cancelled():
                worker.exception()  # seen: the first failure is raised by run(), the others are its echo
        self._started.clear()
        tally.cancelled = tally.started - tally.finished


class _Stop:
    """Resolves when all workers have ended, one of them failed, or it is told to."""

    def __init__(self, workers: int) -> None:
        self._running = workers
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: BaseException | None = None

    def worker_ended(self, worker: asyncio.Task[None]) -> None:
        self._running -= 1
        if not worker.cancelled() and worker.exception() is not None and self.failure is None:
            self.failure = worker.exception()
        if self._running == 0 or self.failure is not None:
            self.now()

    def now(self, _: object = None) -> None:
        if not self.reached.done():
            self.reached.set_result(None)
