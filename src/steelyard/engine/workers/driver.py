"""The driver's side of a run over workers: assigns jobs, takes in records, replaces lost workers, keeps the counts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from steelyard.engine.adaptive import AdaptivePermits
from steelyard.engine.arrivals import Schedule
from steelyard.engine.workers.logs import log_here
from steelyard.engine.workers.messages import (
    CALL,
    EMITTED,
    ENDED,
    EXIT,
    LOGGED,
    RECORD,
    RETURNED,
    Batch,
    Message,
    WorkerExit,
    WorkerInfo,
)
from steelyard.engine.workers.pending import (
    NOT_YET,
    Assigned,
    OpenLoop,
    PendingJobs,
    WorkerHandle,
    divide_limit,
    lost_record,
)
from steelyard.engine.workers.pickling import DriverObjects
from steelyard.engine.workers.remote_limits import WorkerCalls
from steelyard.errors import SteelyardError, WorkersLost, describe
from steelyard.protocols import Cancellation, Emit, InFlight, Permits, Tally
from steelyard.records import EncodedRecord, EncodedRecords, Record, StoredSample, UnscoredAnswer
from steelyard.shutdown import WORKER_REPORT_SECONDS
from steelyard.stats.client_load import ClientLoad
from steelyard.stats.formatting import counted

log = logging.getLogger("steelyard")

_MAX_FALSE_STARTS = 3
EXPECTED_SECONDS = 3.0
"""How long a share is kept for a worker that is being started; after that the other workers use it meanwhile."""
_TOGETHER_SECONDS = 60.0
"""How long a load run waits for all of its workers."""
_MISSING_SECONDS = 10.0
"""How long a worker may take to start before that is reported."""
_SILENT_SECONDS = 10.0
"""How long a worker may send nothing before that is reported, and what is idle of its share is lent to others."""
_SILENCE_REPORTED_SECONDS = 60.0
"""How often that is reported of one worker."""
_RECONNECT_SECONDS = 30.0
"""How long a broken connection is tried again before its worker counts as lost."""
_RECONNECT_PAUSE = 0.5
_ROUNDS = 8
"""In how many parts each worker gets the jobs that it wants."""


class WorkerConnection(Protocol):
    """Reaches one worker, whatever is in between."""

    def begin(self, run: int, work: bytes, parallelism: int, grace: float, paced: bool) -> Awaitable[None]: ...

    async def clock_offset(self) -> float:
        """Return what to add to the clock of this process for the worker's."""

    def exchange(self, run: int, message: Message) -> Awaitable[Batch]:
        """Send a message, and wait for the next batch."""

    def send(self, run: int, message: Message) -> Awaitable[None] | None:
        """Send a message without a batch in return; None when there is nothing to wait for."""

    def close(self) -> None:
        """Let go of the worker: its part of the run is over, or does not matter any more."""


class WorkerPool(Protocol):
    """Starts workers and tells which errors mean that one is gone."""

    @property
    def size(self) -> int: ...

    @property
    def start_seconds(self) -> float:
        """How long a run without a single worker waits for one."""

    @property
    def failure(self) -> Exception | None:
        """What makes it impossible to reach any worker from now on."""

    async def worker(self, number: int) -> tuple[WorkerConnection, WorkerInfo]: ...

    def lose(self, number: int) -> None: ...

    def is_loss(self, error: BaseException) -> bool: ...

    def is_broken_connection(self, error: BaseException) -> bool:
        """Whether an error means that a worker cannot be reached now, but may be alive: the call is made again."""

    def cause(self, error: Exception) -> Exception: ...

    def why_lost(self, error: Exception) -> str:
        """Say in a line how a worker died."""


class NoPlaceForWorker(SteelyardError):
    """A worker is not started, nor another in its place: the run does without it."""

    topic = "workers-lost"


class DriverRun:
    """The workers of one run, the jobs assigned to them, and how the run ends.

    With `together`, in a load run, no job is taken before all workers are ready. With a `schedule`, each of them gets
    its part of the arrivals.
    """

    def __init__(
        self,
        number: int,
        pool: WorkerPool,
        work: bytes,
        driver_objects: DriverObjects,
        pending: PendingJobs,
        emit: Emit,
        *,
        workers: int,
        parallelism: int,
        token: Cancellation,
        permits: Permits | None,
        grace: float,
        together: bool = False,
        schedule: Schedule | None = None,
    ) -> None:
        self._number = number
        self._pool = pool
        self._work = work
        self._driver_objects = driver_objects
        self._pending = pending
        self._emit = emit
        self._workers = [WorkerHandle(place) for place in range(workers)]
        self._parallelism = parallelism
        self._token = token
        self._grace = grace
        self._tally = Tally()
        self._failure: BaseException | None = None
        self._over = False
        self._stopping = False
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        """One for each worker number."""
        self._dispatch = Dispatch(
            number, self._workers, pending, parallelism=parallelism, permits=permits, token=token, fail=self._fail
        )
        self._dispatch.is_held = together or schedule is not None
        self._dispatch.is_paced = schedule is not None
        self._open_loop = None if schedule is None else OpenLoop(schedule, pending, self._dispatch.assign_at)
        self._arriving: asyncio.Task[None] | None = None
        self._began = time.monotonic()
        self.loads: list[ClientLoad] = []

    async def run(self) -> Tally:
        """Run until all jobs are done, the token is cancelled or something fails; raises the first failure."""
        self._start_tasks()
        watcher = asyncio.create_task(self._watch(), name="steelyard-cancellation")
        try:
            await self._stop.wait()
        except BaseException:
            self._over = True
            raise
        finally:
            await self._shut_down(watcher)
        if self._failure is not None:
            raise self._failure
        return self._tally

    def in_flight(self) -> InFlight:
        """Count the jobs that are assigned and have not ended; some may still be waiting in their worker."""
        oldest = min(
            (next(iter(worker.assigned.values())) for worker in self._workers if worker.assigned),
            key=lambda assigned: assigned.since,
            default=None,
        )
        if oldest is None:
            return InFlight(0, None, 0.0)
        now = time.monotonic()
        if self._open_loop is None:
            count = sum(len(worker.assigned) for worker in self._workers)
        else:  # the others wait for their time
            count = sum(one.since <= now for worker in self._workers for one in worker.assigned.values())
        return InFlight(count, oldest.job.case.id, max(0.0, now - oldest.since))

    # Start and end

    async def _watch(self) -> None:
        """Stop when the token is cancelled; fail when there is no worker for too long."""
        cancelled = asyncio.create_task(self._token.wait())
        try:
            without_since = time.monotonic()
            while not cancelled.done():
                await asyncio.wait([cancelled], timeout=1.0)
                now = time.monotonic()
                if self._pool.failure is not None:
                    self._fail(self._pool.failure)
                if any(worker.is_live for worker in self._workers):
                    without_since = now
                elif now - without_since > self._pool.start_seconds:
                    self._fail(WorkersLost(f"the cluster started no worker within {self._pool.start_seconds:.0f} s"))
                self._dispatch.warn_about_missing(now)
                self._dispatch.check_silence(now)
                self._follow_pool()
                self._start_together(now)
                self._dispatch.guarded(self._dispatch.rebalance)()
            self._end()
        finally:
            cancelled.cancel()

    def _start_tasks(self) -> None:
        """Start a task for each worker that has none."""
        for worker in self._workers[len(self._tasks) :]:
            task = asyncio.create_task(self._run_worker(worker), name="steelyard-worker")
            self._tasks.append(task)
            task.add_done_callback(self._worker_task_done)

    def _follow_pool(self) -> None:
        """Add workers when the pool has grown."""
        size = min(self._pool.size, self._parallelism)
        if size > len(self._workers) and not (self._stopping or self._pending.is_running_out):
            log.info("%d more, %s now", size - len(self._workers), counted(size, "worker"))
            self._workers.extend(WorkerHandle(place) for place in range(len(self._workers), size))
            self._start_tasks()

    def _start_together(self, now: float) -> None:
        """Begin a load run when all its workers are ready; when some are not for long, begin without them."""
        if not self._dispatch.is_held:
            return
        wanted = [worker for worker in self._workers if not worker.has_no_place]
        if not wanted:
            return
        ready = sum(worker.is_live for worker in wanted)
        if ready < len(wanted):
            if not ready or now - self._began < _TOGETHER_SECONDS:
                return
            log.warning(
                "the load starts with %d of %s: the others have not started within %.0f s",
                ready,
                counted(len(wanted), "worker"),
                _TOGETHER_SECONDS,
            )
        self._dispatch.is_held = False
        self._dispatch.guarded(self._dispatch.rebalance)()
        if self._open_loop is not None:
            self._arriving = asyncio.create_task(self._hand_out_arrivals(self._open_loop), name="steelyard-arrivals")

    async def _hand_out_arrivals(self, open_loop: OpenLoop) -> None:
        try:
            await open_loop.run([worker for worker in self._workers if worker.is_live])
            self._close_if_done()
        except Exception as error:  # noqa: BLE001 - raised where the run is awaited
            self._fail(error)

    def _end(self) -> None:
        """Assign no more jobs, and have `run` shut the workers down."""
        self._stopping = self._dispatch.is_over = True
        self._stop.set()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._over = True
        self._end()

    def _worker_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        if all(task.done() for task in self._tasks):
            if not (self._stopping or self._token.cancelled or self._pending.is_empty):
                self._fail(WorkersLost("no worker is left, nor a place for another: see the warnings above"))
            self._end()

    async def _shut_down(self, watcher: asyncio.Task[None]) -> None:
        """Cancel the workers and wait for their last batches, within the grace."""
        self._stopping = self._dispatch.is_over = True
        watcher.cancel()
        if self._arriving is not None:
            self._arriving.cancel()
            await asyncio.wait([self._arriving])
        reason = self._token.reason or "the run has ended"
        for worker, task in zip(self._workers, self._tasks, strict=True):
            if worker.is_live and not task.done():
                worker.message.cancelled = reason
                self._dispatch.send(worker)
            else:
                task.cancel()
        running = [task for task in self._tasks if not task.done()]
        try:
            if running:
                await asyncio.wait(running, timeout=self._grace + WORKER_REPORT_SECONDS)
        finally:
            self._close(watcher)
        await asyncio.wait([watcher, *self._tasks, *self._dispatch.sending])

    def _close(self, watcher: asyncio.Task[None]) -> None:
        """Count what never finished as cancelled; from here on nothing changes the counts."""
        self._over = True
        for task in [watcher, *self._tasks, *self._dispatch.sending]:
            task.cancel()
        for worker in self._workers:
            left = self._count_recorded(worker.detach())
            if self._open_loop is not None:
                self._open_loop.report(worker)
                self._open_loop.drop_unsent(left)
        self._tally.unused = () if self._open_loop is None else tuple(self._open_loop.unused)
        self._tally.started = self._pending.started - len(self._tally.unused)
        self._tally.cancelled = self._tally.started - self._tally.finished
        self._tally.peak_in_flight = min(self._tally.peak_in_flight, self._parallelism)

    # One worker, and the next when it is lost

    async def _run_worker(self, worker: WorkerHandle) -> None:
        """Start one worker after the other, until one of them reaches the end of the run."""
        false_starts = 0
        while not (self._stopping or self._token.cancelled):
            try:
                await self._start_worker(worker)
                await self._exchange_messages(worker)
                return
            except NoPlaceForWorker as error:
                log.warning("%s", error)
                worker.has_no_place = True
                self._start_together(time.monotonic())
                return
            except Exception as error:
                if not self._pool.is_loss(error):
                    raise self._pool.cause(error) from None
                # With cases in flight it may be one of them, and the number of reschedules is bounded.
                false_starts = 0 if worker.assigned else false_starts + 1
                self._lose(worker, error)
                if false_starts == _MAX_FALSE_STARTS:
                    raise WorkersLost(f"workers die before they do anything: {self._pool.why_lost(error)}") from error

    async def _start_worker(self, worker: WorkerHandle) -> None:
        actor, info = await self._pool.worker(worker.number)
        paced = self._open_loop is not None
        await actor.begin(self._number, self._work, self._parallelism, self._grace, paced)
        worker.clock_offset = await actor.clock_offset() if paced else 0.0

        def reply(call: int, value: Any) -> None:
            worker.message.replies.append((call, value))
            self._dispatch.send_soon(worker)

        worker.attach(actor, info, WorkerCalls(self._driver_objects.objects, reply))
        if self._open_loop is not None:
            self._open_loop.greet(worker)
        self._start_together(time.monotonic())
        self._dispatch.rebalance()
        self._close_if_done()

    async def _exchange_messages(self, worker: WorkerHandle) -> None:
        """Send messages and receive batches until the worker has finished its part."""
        while True:
            batch = await self._next_batch(worker)
            if self._handle_batch(worker, batch):
                return
            self._dispatch.assign_jobs(self._workers if self._pending.is_running_out else [worker])
            self._close_if_done()

    async def _next_batch(self, worker: WorkerHandle) -> Batch:
        """Send a message and wait for the next batch; a connection that breaks is tried again for a while.

        Messages and batches are numbered, so that each is taken in once: what was on its way is sent again.
        """
        broken_at: float | None = None
        while True:
            if worker.must_resend:
                self._dispatch.resend(worker)
            try:
                batch: Batch = await worker.actor.exchange(self._number, worker.take_message())
                break
            except Exception as error:
                if not self._pool.is_broken_connection(error):
                    raise
                now, name = time.monotonic(), worker.name
                if broken_at is None:
                    broken_at = now
                    log.warning("the connection to %s broke, trying again: %s", name, _first_line(error))
                    self._dispatch.out_of_reach(worker)
                if now - broken_at > _RECONNECT_SECONDS or self._stopping:
                    raise
                worker.must_resend = True
                await asyncio.sleep(_RECONNECT_PAUSE)
        self._dispatch.within_reach(worker)
        return batch

    def _lose(self, worker: WorkerHandle, error: Exception) -> None:
        """Reschedule the jobs of a lost worker, and make room for its replacement."""
        info, name, why = worker.info, worker.name, self._pool.why_lost(error)
        lost = worker.detach()
        for assigned in lost:
            self._dispatch.settle(assigned)
        self._pool.lose(worker.number)
        lost = self._count_recorded(lost)
        if self._stopping:
            return
        log.warning("%s was lost, with %s: %s", name, counted(len(lost), "case"), why)
        if self._open_loop is not None:
            self._open_loop.report(worker)
            lost = self._open_loop.drop_unsent(lost)
        for assigned in lost:
            # In an open loop what was sent is sent once: another time would not be the planned one.
            if self._open_loop is not None or not self._pending.reschedule(assigned):
                assigned.losses = max(1, assigned.losses)
                self._emit(lost_record(assigned, info, why))
                self._tally.finished += 1
        self._dispatch.rebalance()
        self._dispatch.assign_jobs(self._workers)
        self._close_if_done()

    def _count_recorded(self, left: list[Assigned]) -> list[Assigned]:
        """Count as finished the jobs with a record, though no message of their end came; returns the others."""
        others = [assigned for assigned in left if not assigned.recorded]
        self._tally.finished += len(left) - len(others)
        return others

    def _close_if_done(self) -> None:
        """Let the workers finish when nothing is left to assign and nothing is in flight."""
        if self._pending.is_empty and not any(worker.assigned for worker in self._workers):
            if not any(worker.is_live for worker in self._workers):
                self._end()
            for worker in self._workers:
                if worker.can_be_reached:
                    worker.message.no_more = True
                    self._dispatch.send_soon(worker)
                else:
                    self._tasks[worker.number].cancel()

    # What workers report

    def _handle_batch(self, worker: WorkerHandle, batch: Batch) -> bool:
        """Take in a batch; True when it is the worker's last."""
        ended, being_scored = 0, self._dispatch.being_scored
        worker.peak = batch.peak
        self._tally.peak_in_flight = max(self._tally.peak_in_flight, sum(one.peak for one in self._workers))
        records: list[EncodedRecord] = []
        ending: WorkerExit | None = None
        for kind, number, content in batch.items:
            if kind == RECORD:
                if (assigned := worker.assigned.get(number)) is not None and not self._over:
                    assigned.recorded = True
                    records.append(EncodedRecord(assigned.job.case.id, assigned.job.trial, content))
            elif kind == EMITTED:
                self._handle_emitted(worker.assigned.get(number), pickle.loads(content))
            elif kind == ENDED:
                ended += 1
                self._handle_ended(worker, number, content)
            elif kind == RETURNED:
                returned = self._unassign(worker, number)
                if self._open_loop is None:
                    self._pending.put_back(returned)
                else:
                    self._open_loop.unused.append(returned.job)
            elif kind == CALL:
                self._handle_call(worker, number, *content)
            elif kind == LOGGED:
                log_here(worker.info, content)
            elif kind == EXIT:
                ending = content
        if records:
            self._emit(EncodedRecords(records))
        worker.sends = batch.sends
        if ending is not None:
            self._handle_exit(worker, ending)
            return True
        before = worker.share.reserved
        worker.update(batch, ended)
        if worker.share.reserved < before or self._dispatch.being_scored != being_scored:
            self._dispatch.rebalance()
        return False

    def _handle_emitted(self, assigned: Assigned | None, item: Any) -> None:
        if assigned is None or self._over:
            return
        if isinstance(item, UnscoredAnswer):
            if item.record.status == "ok":  # should the worker die now, the answer only needs to be scored again
                assigned.job.stored = item.record
        elif isinstance(item, StoredSample):
            assigned.job.samples = (*assigned.job.samples, item)
        elif isinstance(item, Record):
            assigned.recorded = True
        self._emit(item)

    def _handle_ended(self, worker: WorkerHandle, ticket: int, finished: bool) -> None:
        self._unassign(worker, ticket)
        if finished and not self._over:
            self._tally.finished += 1

    def _unassign(self, worker: WorkerHandle, ticket: int) -> Assigned:
        if worker.on_probation == ticket:
            worker.on_probation = None
        assigned = worker.assigned.pop(ticket)
        self._dispatch.settle(assigned)
        return assigned

    def _handle_call(self, worker: WorkerHandle, call: int, number: int, name: str, args: tuple[Any, ...]) -> None:
        if worker.calls is None:
            return
        overload = worker.calls.handle(call, number, name, args)
        if overload is not False:
            for other in self._workers:
                if other is not worker and other.is_live:
                    other.message.overloads.append((number, overload))
                    self._dispatch.send_soon(other)

    def _handle_exit(self, worker: WorkerHandle, ending: WorkerExit) -> None:
        if ending.load is not None:
            self.loads.append(msgspec.structs.replace(ending.load, process=worker.name))
        if ending.failure is not None:
            self._fail(pickle.loads(ending.failure))
        elif ending.interrupted_by is not None:
            self._tally.interrupted_by = self._tally.interrupted_by or ending.interrupted_by
            self._end()


def _first_line(error: BaseException) -> str:
    return describe(error).partition("\n")[0]


class Dispatch:
    """Assigns jobs and shares to the workers of one run, and sends them their messages."""

    def __init__(
        self,
        run: int,
        workers: list[WorkerHandle],
        pending: PendingJobs,
        *,
        parallelism: int,
        permits: Permits | None,
        token: Cancellation,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._run = run
        self._workers = workers
        self._pending = pending
        self._parallelism = parallelism
        self._permits = permits
        self._token = token
        self._fail = fail
        self._tickets = itertools.count(1)
        self._answered: set[tuple[str, int]] = set()
        """Cases, by id and trial, whose answer is being scored: known only where the endpoint sets the parallelism."""
        self.is_over = False
        """Whether no more jobs are assigned."""
        self.is_held = False
        """Whether no jobs are assigned yet."""
        self.is_paced = False
        """Whether jobs are assigned at their planned times, and not when workers want some."""
        self.sending: set[asyncio.Task[None]] = set()
        """Messages being sent."""
        self._adaptive = isinstance(permits, AdaptivePermits)
        if permits is not None:
            permits.on_change(self.guarded(self.rebalance))
        if isinstance(permits, AdaptivePermits):
            permits.on_answered(lambda case_id, trial: self._answered.add((case_id, trial)))

    @property
    def being_scored(self) -> int:
        """How many cases have their answer and have not ended."""
        return len(self._answered)

    def rebalance(self) -> None:
        """Divide the allowed parallelism among the live workers and those that are about to start."""
        if self.is_held:
            return
        now = time.monotonic()
        live = [worker for worker in self._workers if worker.can_be_reached]
        expected = sum(worker.is_expected(now, EXPECTED_SECONDS) for worker in self._workers)
        allowed = self._parallelism
        if self._permits is not None:
            # The endpoint's limit is for calls in flight: a case whose answer is being scored does not use it.
            allowed = min(allowed, self._permits.allowed + len(self._answered))
        # Who has the larger share keeps it: a worker that joins does not take away a job that was about to begin.
        live.sort(key=lambda worker: -worker.share.limit)
        allowed -= sum(worker.share.reserved for worker in self._workers if worker.is_out_of_reach)
        changed_shares = divide_limit(allowed, [worker.share for worker in live], expected)
        changed = [worker for worker in live if worker.share in changed_shares]
        for worker in changed:
            worker.message.share, worker.message.share_number = worker.share.limit, worker.share.number
        self.assign_jobs(live)
        for worker in changed:
            self.send_soon(worker)

    def settle(self, assigned: Assigned) -> None:
        """Note that a job has ended, or is to be assigned again."""
        self._answered.discard((assigned.job.case.id, assigned.job.trial))

    def assign_jobs(self, workers: list[WorkerHandle]) -> None:
        """Assign jobs to workers that want some, in rounds: a few jobs should not all go to the first worker."""
        if self.is_paced:
            return
        wanting = [(worker, max(1, self._wanted(worker) // _ROUNDS)) for worker in workers if self._wanted(worker) > 0]
        while wanting and not self.is_over and not self._token.cancelled:
            still_wanting = []
            for worker, chunk in wanting:
                assigned = self._assign(worker, min(chunk, self._wanted(worker)))
                self.send_soon(worker)
                if assigned == NOT_YET:
                    asyncio.get_running_loop().call_soon(self.guarded(lambda: self.assign_jobs(self._workers)))
                    return
                if assigned is not None and self._wanted(worker) > 0:
                    still_wanting.append((worker, chunk))
            wanting = still_wanting
        if self._pending.is_empty:
            self._recall_waiting()

    def assign_at(self, worker: WorkerHandle, assigned: Assigned) -> None:
        """Assign a job whose time is planned."""
        ticket = next(self._tickets)
        worker.assigned[ticket] = assigned
        worker.message.jobs.append((ticket, assigned.job))
        if len(worker.message.jobs) == 1:
            self.send_soon(worker)

    def send_soon(self, worker: WorkerHandle) -> None:
        """Send a worker's message at the end of this turn of the loop, with all that it has collected by then."""
        asyncio.get_running_loop().call_soon(self.guarded(partial(self.send, worker)))

    def send(self, worker: WorkerHandle) -> None:
        """Send a worker's message now, if there is anything in it."""
        if worker.is_live and worker.message != type(worker.message)():
            self._send_in_background(worker, worker.actor.send(self._run, worker.take_message()))

    def resend(self, worker: WorkerHandle) -> None:
        """Send what the worker has not confirmed once more: it may not have arrived."""
        worker.must_resend = False
        for message in worker.unconfirmed:
            self._send_in_background(worker, worker.actor.send(self._run, message))

    def out_of_reach(self, worker: WorkerHandle) -> None:
        """Assign nothing more to a worker that cannot be reached; others get what its jobs do not use of its share.

        A worker begins nothing once it has heard nothing for some seconds, but what it began goes on.
        """
        worker.is_out_of_reach = True
        worker.share.lend(len(worker.assigned))
        worker.message.share, worker.message.share_number = worker.share.limit, worker.share.number
        self.guarded(self.rebalance)()

    def within_reach(self, worker: WorkerHandle) -> None:
        """Note that a worker answers."""
        if worker.is_out_of_reach:
            worker.is_out_of_reach = False
            log.info("%s answers again", worker.name)
            self.guarded(self.rebalance)()

    def check_silence(self, now: float) -> None:
        """Report workers that have sent nothing for too long: they send something once a second."""
        for worker in self._workers:
            silent = worker.silent_seconds(now)
            if not worker.is_live or worker.is_out_of_reach or silent < _SILENT_SECONDS:
                continue
            if now - worker.silence_reported_at > _SILENCE_REPORTED_SECONDS:
                worker.silence_reported_at = now
                jobs = counted(len(worker.assigned), "case")
                log.warning(
                    "%s has been silent for %.0f s, with %s: it gets no more until it answers; is its network "
                    "broken, or does something block it?",
                    worker.name,
                    silent,
                    jobs,
                )
            self.out_of_reach(worker)

    def warn_about_missing(self, now: float) -> None:
        """Warn, once each time, that workers could not be started and the others do their part."""
        missing = [
            worker
            for worker in self._workers
            if not (worker.is_live or worker.has_no_place or worker.missing_reported)
            and now > worker.starting_since + _MISSING_SECONDS
        ]
        for worker in missing:
            worker.missing_reported = True
        if missing:
            what = f"{counted(len(missing), 'worker')} could not be started for {_MISSING_SECONDS:.0f} s"
            log.warning("%s: has the cluster CPUs for all? The others do the work until then", what)

    def guarded(self, act: Callable[[], None]) -> Callable[[], None]:
        """Wrap a callback so that an exception ends the run."""

        def guarded() -> None:
            if self.is_over:
                return
            try:
                act()
            except Exception as error:  # noqa: BLE001 - raised where the run is awaited
                self._fail(error)

        return guarded

    def _wanted(self, worker: WorkerHandle) -> int:
        return worker.jobs_wanted(ahead=not self._pending.is_running_out) if worker.can_be_reached else 0

    def _assign(self, worker: WorkerHandle, count: int) -> Assigned | str | None:
        """Assign up to `count` jobs; returns the last of them, NOT_YET, or None when there was none for the worker."""
        assigned: Assigned | str | None = None
        for _ in range(count):
            assigned = self._pending.next(probation=worker.on_probation is None)
            if assigned is None or isinstance(assigned, str):
                return assigned
            ticket = next(self._tickets)
            worker.assigned[ticket] = assigned
            if self._adaptive and assigned.job.stored is not None:
                self._answered.add((assigned.job.case.id, assigned.job.trial))
            if self._pending.on_probation(assigned):
                worker.on_probation = ticket
            worker.message.jobs.append((ticket, assigned.job))
        return assigned

    def _recall_waiting(self) -> None:
        """At the end of a run, recall waiting jobs for workers that are idle."""
        idle = sum(max(0, worker.share.limit - len(worker.assigned)) for worker in self._workers if worker.is_live)
        for worker in self._workers:
            if idle > 0 and worker.is_live and worker.waiting > 0 and not worker.message.recall:
                worker.message.recall = min(idle, worker.waiting)
                idle -= worker.message.recall
                self.send_soon(worker)

    def _send_in_background(self, worker: WorkerHandle, sending: Awaitable[None] | None) -> None:
        """Send without waiting: a worker that no longer receives is noticed in the exchange, and it is sent again."""
        if sending is None:
            return

        async def send() -> None:
            try:
                await sending
            except Exception as error:  # noqa: BLE001
                log.debug("a message did not arrive: %s", describe(error))
                worker.must_resend = True

        task: asyncio.Task[None] = asyncio.create_task(send())
        self.sending.add(task)
        task.add_done_callback(self.sending.discard)
