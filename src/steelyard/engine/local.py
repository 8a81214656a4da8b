"""A fixed pool of workers over one shared iterator of jobs, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from steelyard.engine.adaptive import AdaptivePermits, PermitsShare
from steelyard.engine.base import Engine
from steelyard.errors import ConfigurationError
from steelyard.protocols import Cancellation, Emit, InFlight, Pace, Permits, Tally, Work
from steelyard.records import EncodedRecords, EvalCase, Job, Record, StoredSample, UnscoredAnswer
from steelyard.shutdown import ENGINE_GRACE_SECONDS

_MAX_TURN = 0.005
"""Seconds that all workers together may run without yielding to the event loop, when a target never awaits."""


_NO_MORE = Job(index=-1, trial=0, case=EvalCase(), case_fp="", scored_by="")


class LocalEngine(Engine):
    """Runs cases in this process: exactly `parallelism` calls in flight while work remains, never a task per case.

    With `permits`, as many as they allow. With a `pace`, at the planned times: when all workers are busy at one of
    them, the call is sent late, as soon as a worker is free. `grace` is how long cancelled work may take to end before
    it is abandoned: a target that swallows cancellation must not block the exit.
    """

    def __init__(self, *, grace: float = ENGINE_GRACE_SECONDS) -> None:
        self.grace = grace
        self._runs: list[_Pool] = []

    async def run(
        self,
        work: Work,
        jobs: Iterator[Job | None],
        emit: Emit,
        *,
        parallelism: int,
        token: Cancellation,
        permits: Permits | None = None,
        pace: Pace | None = None,
        together: bool = False,  # noqa: ARG002 - this process is ready
    ) -> Tally:
        """Run all jobs, or until the token is cancelled, or until work raises: then cancel the rest and raise."""
        if parallelism < 1:
            raise ConfigurationError(f"parallelism must be >= 1, got {parallelism}")
        if token.cancelled:
            return Tally()
        pool = _Pool(work, jobs, emit, token, self._gate(parallelism, permits, pace))
        self._runs.append(pool)
        try:
            return await pool.run(parallelism, self.grace)
        finally:
            self._runs.remove(pool)

    def _gate(self, parallelism: int, permits: Permits | None, pace: Pace | None) -> JobGate | None:  # noqa: ARG002
        """What workers pass before each job; None where each may take its next job at once."""
        return JobGate(permits, pace) if permits is not None or pace is not None else None

    def in_flight(self) -> InFlight:
        """Return how many calls are in flight, and which has been so longest."""
        calls = [(pool.since[number], pool, number) for pool in self._runs for number in pool.in_flight]
        if not calls:
            return InFlight(0, None, 0.0)
        since, pool, number = min(calls, key=lambda call: call[0])
        return InFlight(len(calls), pool.in_flight[number].case.id, time.monotonic() - since)


class _Pool:
    """The workers of one run, what they have in flight, and how it ends."""

    def __init__(
        self, work: Work, jobs: Iterator[Job | None], emit: Emit, token: Cancellation, gate: JobGate | None
    ) -> None:
        self.in_flight: dict[int, Job] = {}
        """By the worker's number."""
        self.since: list[float] = []
        """When each worker took its job."""
        self._work = work
        self._jobs = jobs
        self._emit = emit
        self._token = token
        self._gate = gate
        self._tally = Tally()
        self._turn = _Turn()
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._closed = False
        self._over = False
        self._workers: list[asyncio.Task[None]] = []
        self._parallelism = 0
        self._running = 0
        self._may_grow = gate is None
        self._failure: BaseException | None = None

    async def run(self, parallelism: int, grace: float) -> Tally:
        """Return the tally when no worker is left, or none that ends within the grace; raises the first failure."""
        self._parallelism = parallelism
        self._start_worker()
        watcher = asyncio.create_task(self._token.wait(), name="steelyard-cancellation")
        watcher.add_done_callback(self._end)
        try:
            await self._stop
        except BaseException:
            # The caller cancelled this run, and does not wait for its records any more.
            self._closed = self._over = True
            raise
        finally:
            self._stopping = True
            try:
                await _cancel_all([*self._workers, watcher], grace)
            finally:
                self._close()
        if self._failure is not None:
            raise self._failure
        return self._tally

    def _start_worker(self) -> None:
        """Start the next worker, if there may be one more."""
        number = len(self._workers)
        if number < self._parallelism:
            worker = asyncio.create_task(self._worker(number), name=f"steelyard-worker-{number}")
            worker.add_done_callback(self._worker_ended)
            self._workers.append(worker)
            self.since.append(0.0)
            self._running += 1

    def _grow(self) -> None:
        """Start two more workers for each, if all of them wait for an answer.

        All are there in a few turns of the loop, a parallelism far above the number of jobs costs nothing, and a
        target that never awaits keeps one worker.
        """
        if len(self.in_flight) == self._running:
            for _ in range(2 * self._running):
                self._start_worker()
        self._may_grow = len(self._workers) < self._parallelism

    def _close(self) -> None:
        """Count what never finished as cancelled; from here on nothing changes the tally."""
        self._closed = self._over = True
        self.in_flight.clear()
        self._tally.cancelled = self._tally.started - self._tally.finished

    async def _worker(self, number: int) -> None:
        """Run one job after the other. Every case pays for each line of this loop."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        tally, calls, since, turn, token = self._tally, self.in_flight, self.since, self._turn, self._token
        work, emit, jobs, gate, monotonic = self._work, self._emit, self._jobs, self._gate, time.monotonic

        def deliver(item: Record | UnscoredAnswer | StoredSample | EncodedRecords) -> None:
            if self._over:  # the recorder and the journal may be closed by now
                raise asyncio.CancelledError("the run has ended")
            emit(item)

        while not (self._stopping or token.cancelled):
            job = next(jobs, _NO_MORE) if gate is None else await self._enter_gate(gate, task)
            if job is _NO_MORE:
                return
            if job is None:  # none yet: finished cases are being skipped, and the event loop has calls to serve
                await asyncio.sleep(0)
                continue
            since[number] = now = monotonic()
            calls[number] = job
            if self._may_grow and len(calls) == self._running:
                self._may_grow = False
                loop.call_soon(self._grow)
            tally.started += 1
            if len(calls) > tally.peak_in_flight:
                tally.peak_in_flight = len(calls)
            try:
                await work(job, deliver)
                if not self._closed:
                    tally.finished += 1
            except asyncio.CancelledError:
                if self._stopping:
                    raise
            except KeyboardInterrupt:
                # Not let out of this task: asyncio would leave its event loop there and then, with nothing written.
                tally.interrupted_by = tally.interrupted_by or job.case.id
                self._end()
                return
            finally:
                calls.pop(number, None)
                if gate is not None:
                    gate.leave()
            if task.cancelling():
                await _clear_cancellation(task)
            if now > turn.ends:
                turn.end()
                await asyncio.sleep(0)

    async def _enter_gate(self, gate: JobGate, task: asyncio.Task[None]) -> Job | None:
        """Return the next job as soon as the gate allows one, or `_NO_MORE`."""
        try:
            job = await gate.enter(self._next_job)
        except asyncio.CancelledError:
            if self._stopping:
                raise
            await _clear_cancellation(task)
            return None
        if job is None:
            return _NO_MORE
        if not gate.has_waiting:  # as many workers as needed, and one or two to wait for the next permit
            self._start_worker()
            self._start_worker()
        return job

    async def _next_job(self) -> Job | None:
        """Return the next job; None when there is none, or when the run is stopping."""
        while not (self._stopping or self._token.cancelled):
            job = next(self._jobs, _NO_MORE)
            if job is not None:
                return None if job is _NO_MORE else job
            await asyncio.sleep(0)
        return None

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        self._running -= 1
        error = None if worker.cancelled() else worker.exception()
        if self._failure is None and error is not None:
            self._failure = error
            self._over = True
        if self._running == 0 or self._failure is not None:
            self._end()

    def _end(self, _: object = None) -> None:
        self._stopping = True
        if not self._stop.done():
            self._stop.set_result(None)


class _Turn:
    """A time slice that all workers share: after it, each of them yields to the event loop once."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self.ends = time.monotonic() + _MAX_TURN
        self._ending = False

    def end(self) -> None:
        """Begin the next slice after the loop has run, once for all workers that ask for it."""
        if not self._ending:
            self._ending = True
            asyncio.get_running_loop().call_soon(self._renew)


async def _cancel_all(tasks: list[asyncio.Task[None] | asyncio.Task[str]], grace: float) -> None:
    """Cancel what still runs and wait for it, no longer than the grace."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=grace)


async def _clear_cancellation(task: asyncio.Task[None]) -> None:
    """Clear a cancellation that did not come from the run, so that the next job does not meet it."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while task.uncancel():
        pass


class JobGate:
    """Decides when a worker may take its next job, in the order in which the workers came.

    At most `permits.allowed` are inside; when that shrinks, those inside finish and no other enters. With a pace, one
    worker at a time waits for the next planned time and takes a job then.

    Adaptive permits are about one endpoint alone: a job counts until it has its answer, however long the scoring takes
    afterwards; and no worker enters while all of them are in use, some perhaps by a judge at the same endpoint.
    """

    def __init__(self, permits: Permits | None, pace: Pace | None) -> None:
        self._permits = permits
        self._pace = pace
        self._pacing = asyncio.Lock()
        self._inside = 0
        """How many count towards the permits."""
        self._jobs: dict[asyncio.Task[Any] | None, tuple[str, int]] = {}
        """The job of each worker, by case id and trial: only with adaptive permits."""
        self._unanswered: set[tuple[str, int]] = set()
        self._queue: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._adaptive: AdaptivePermits | PermitsShare | None = None
        if isinstance(permits, AdaptivePermits):
            self._adaptive = permits
            permits.on_room(self._let_in)
            permits.on_answered(self._answered)
        elif permits is not None:
            permits.on_change(self._let_in)

    @property
    def has_waiting(self) -> bool:
        """Whether a worker waits for a permit or for its planned time."""
        return bool(self._queue) or self._pacing.locked()

    async def enter(self, take: Callable[[], Awaitable[Job | None]]) -> Job | None:
        """Take a job under a permit, to be followed by `leave`; None when there are no more."""
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
        """Return the permit, if the job still has it."""
        job = self._jobs.pop(asyncio.current_task(), None)
        if job is None:
            self._give_back()
        else:
            self._answered(*job)

    def _answered(self, case_id: str, trial: int) -> None:
        """Let another worker in: this job has its answer. Its later calls wait for their own send permits."""
        if (case_id, trial) in self._unanswered:
            self._unanswered.remove((case_id, trial))
            self._give_back()

    def _give_back(self) -> None:
        self._count(-1)
        self._let_in()

    def _count(self, change: int) -> None:
        self._inside += change

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
            self._count(1)
            return
        await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        await self._wait_in_line(self._queue.append)
        while not self._has_room(counted=1):  # fewer are allowed than when this one was let in
            self._count(-1)
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
        """Let all waiting workers go: there are no more jobs."""
        self._closed = True
        self._let_in()

    def _has_room(self, counted: int = 0) -> bool:
        """Whether one more may be inside; with `counted=1`, whether one that is already counted may stay."""
        if self._closed or self._permits is None:
            return True
        if self._adaptive is not None and not self._adaptive.has_room:
            return False
        return self._inside - counted < self._permits.allowed

    def _let_in(self) -> None:
        while self._queue and self._has_room():
            self._let_first_in()

    def _let_first_in(self) -> None:
        self._count(1)
        place = self._queue.popleft()
        if not place.done():  # else it was cancelled a moment ago
            place.set_result(None)
