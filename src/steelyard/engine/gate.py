"""Who may take the next job, and when: permits that come and go, and moments that were planned."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from steelyard.contracts import Pace, Permits
from steelyard.engine.adaptive import AdaptivePermits
from steelyard.records import Job


class Gate:
    """Lets one worker after the other on, in the order in which they came.

    At most `permits.allowed` are inside; when that shrinks, those inside finish and no other comes in. With a pace,
    one of them at a time waits for the next planned moment and takes a job then.

    Permits that an endpoint's answers decide are about that endpoint alone: a job counts until it has its answer,
    however long that is weighed afterwards; and nobody comes in while all of them are on the wire, some perhaps by a
    judge that asks there too.
    """

    def __init__(self, permits: Permits | None, pace: Pace | None) -> None:
        self._permits = permits
        self._pace = pace
        self._pacing = asyncio.Lock()
        self._inside = 0
        """How many count towards the permits."""
        self._jobs: dict[asyncio.Task[Any] | None, tuple[str, int]] = {}
        """What each worker has taken, by case id and trial: only under permits that an endpoint decides."""
        self._unanswered: set[tuple[str, int]] = set()
        self._queue: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._adaptive = permits if isinstance(permits, AdaptivePermits) else None
        if self._adaptive is not None:
            self._adaptive.on_room(self._let_in)
            self._adaptive.on_answered(self._answered)
        elif permits is not None:
            permits.on_change(self._let_in)

    @property
    def has_waiting(self) -> bool:
        """Whether a worker waits for a permit or for its moment."""
        return bool(self._queue) or self._pacing.locked()

    async def enter(self, take: Callable[[], Awaitable[Job | None]]) -> Job | None:
        """The job that was taken with a permit, to be followed by `leave`; None when there are no more."""
        if self._pace is None:
            return await self._take(take)
        async with self._pacing:
            planned = None if self._closed else await self._pace.next_send()
            if planned is None:
                self._close()
                return None
            job = await self._take(take)
            if job is not None:
                job.planned_at = planned
            return job

    def leave(self) -> None:
        """Give the permit back, if the job still has it."""
        job = self._jobs.pop(asyncio.current_task(), None)
        if job is None:
            self._give_back()
        else:
            self._answered(*job)

    def _answered(self, case_id: str, trial: int) -> None:
        """Let another in: this job has its answer. Later calls for it wait for leave of their own."""
        if (case_id, trial) in self._unanswered:
            self._unanswered.remove((case_id, trial))
            self._give_back()

    def _give_back(self) -> None:
        self._inside -= 1
        self._let_in()

    async def _take(self, take: Callable[[], Awaitable[Job | None]]) -> Job | None:
        await self._permit()
        job = None
        try:
            job = await take()
        finally:
            if job is None:
                self._give_back()
        if job is None:
            self._close()
        elif self._adaptive is not None:
            self._jobs[asyncio.current_task()] = taken = (job.case.id, job.trial)
            self._unanswered.add(taken)
            if job.stored is not None:
                self._answered(*taken)
        return job

    async def _permit(self) -> None:
        if not self._queue and self._has_room():
            self._inside += 1
            return
        await self._wait_in_line(self._queue.append)
        while not self._has_room(beside=1):  # fewer are allowed than when this one was let in, a turn of the loop ago
            self._inside -= 1
            await self._wait_in_line(self._queue.appendleft)

    async def _wait_in_line(self, line_up: Callable[[asyncio.Future[None]], None]) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line_up(place)
        try:
            await place
        except asyncio.CancelledError:
            if place in self._queue:
                self._queue.remove(place)
            else:  # let in and cancelled in the same turn of the loop
                self._give_back()
            raise

    def _close(self) -> None:
        """There are no more jobs: nobody need wait any longer."""
        self._closed = True
        self._let_in()

    def _has_room(self, beside: int = 0) -> bool:
        """Whether one more may be inside; with `beside=1`, whether one that is counted already may."""
        if self._closed or self._permits is None:
            return True
        if self._adaptive is not None and not self._adaptive.has_room:
            return False
        return self._inside - beside < self._permits.allowed

    def _let_in(self) -> None:
        while self._queue and self._has_room():
            self._inside += 1
            place = self._queue.popleft()
            if not place.done():  # else it was cancelled a moment ago, and leaves as soon as it has its turn
                place.set_result(None)
