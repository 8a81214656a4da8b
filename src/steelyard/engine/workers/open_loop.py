"""Open loop over several workers: each gets every W-th arrival of one schedule, shortly before it is due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from steelyard.engine.arrivals import Schedule
from steelyard.engine.workers.pending import NOT_YET, Assigned, PendingJobs, WorkerHandle
from steelyard.records import Job

_LEAD_SECONDS = 0.2
"""From the moment that all workers are ready to the first arrival: their first jobs have to reach them."""
_HORIZON_SECONDS = 1.0
"""How long before it is due a job is sent to its worker: a driver may be late by as much."""
_TICK_SECONDS = 0.05


class OpenLoop:
    """Hands jobs to workers with the time at which each is to be sent, by the worker's own clock.

    What a worker cannot send in time, because it is lost or because the time of the run is over, is not sent by
    another one: it is `unused`, and its arrival counts as missed.
    """

    def __init__(
        self, schedule: Schedule, pending: PendingJobs, assign: Callable[[WorkerHandle, Assigned], None]
    ) -> None:
        self._schedule = schedule
        self._pending = pending
        self._assign = assign
        self.unused: list[Job] = []

    async def run(self, workers: list[WorkerHandle]) -> None:
        """Hand out all arrivals of the schedule to these workers, in turn; a lost worker's until it is replaced not."""
        self._schedule.begin(time.monotonic() + _LEAD_SECONDS)
        for worker in workers:
            self.greet(worker)
        for number, planned in enumerate(self._schedule.planned()):
            while planned - time.monotonic() > _HORIZON_SECONDS:  # noqa: ASYNC110 - time is what it waits for
                await asyncio.sleep(_TICK_SECONDS)
            worker = workers[number % len(workers)]
            if not worker.can_be_reached:
                continue
            if (assigned := await self._next()) is None:
                break
            assigned.since = planned
            assigned.job.planned_at = planned + worker.clock_offset
            self._assign(worker, assigned)
        self._pending.close()

    async def _next(self) -> Assigned | None:
        """Return the next job; None when there are no more."""
        while (assigned := self._pending.next(probation=True)) == NOT_YET:  # noqa: ASYNC110 - the others may run
            await asyncio.sleep(0)
        return assigned if isinstance(assigned, Assigned) else None

    def greet(self, worker: WorkerHandle) -> None:
        """Tell a worker that has just begun until when it may send."""
        if self._schedule.ends_at is not None:
            worker.message.ends_at = self._schedule.ends_at + worker.clock_offset

    def drop_unsent(self, left: list[Assigned]) -> list[Assigned]:
        """Take the jobs of a lost worker whose time had not come; returns the others, which it had sent."""
        now = time.monotonic()
        self.unused += [assigned.job for assigned in left if assigned.since > now]
        return [assigned for assigned in left if assigned.since <= now]

    def report(self, worker: WorkerHandle) -> None:
        """Count what a worker sent, which is gone or has ended."""
        if worker.sends is not None:
            where = "" if worker.info is None or worker.info.node is None else f" on {worker.info.node}"
            self._schedule.count_worker(f"worker {worker.number + 1}{where}", worker.sends)
            worker.sends = None
