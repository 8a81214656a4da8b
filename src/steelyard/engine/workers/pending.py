"""What the driver keeps of a run's jobs and workers: pending jobs, worker shares and handles, arrivals in open loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from steelyard.engine.arrivals import Schedule
from steelyard.engine.workers.messages import Batch, Message, WorkerInfo
from steelyard.engine.workers.remote_limits import WorkerCalls
from steelyard.records import RECORD_VERSION, Job, Record
from steelyard.stats.formatting import counted
from steelyard.stats.metrics import WorkerSends

NOT_YET = "not yet"
"""There is no job to assign now, but there may be one later."""

_AHEAD_SECONDS = 0.1
_AHEAD_SHARE = 1 / 4
"""A worker has jobs waiting for this long at its pace, or this part of its share if that is more: many calls that end
at once must not wait for the driver. At the end of a run waiting jobs are recalled where other workers are idle."""
_RATE_SECONDS = 0.3
"""Over how long a worker's pace is averaged: calls that began together also end together."""
_LEAD_SECONDS = 0.2
"""From the moment that all workers are ready to the first arrival: their first jobs have to reach them."""
_HORIZON_SECONDS = 1.0
"""How long before it is due a job is sent to its worker: a driver may be late by as much."""
_TICK_SECONDS = 0.05


class Assigned(msgspec.Struct, gc=False):
    """A job that was assigned to a worker."""

    job: Job
    since: float
    losses: int = 0
    """How many workers died with it."""
    recorded: bool = False


class PendingJobs:
    """Jobs to assign: fresh ones in order, and those whose worker was lost, up to a limit of reschedules.

    A job for which one more loss would be the last is `on_probation`. No worker has two of these at once, so that the
    job that kills its workers is found, and jobs that were only on the same worker are not blamed.
    """

    def __init__(self, jobs: Iterator[Job | None], max_reschedules: int) -> None:
        self._jobs = jobs
        self._max_reschedules = max_reschedules
        self._again: deque[Assigned] = deque()
        self._on_probation: deque[Assigned] = deque()
        self._exhausted = False
        self.started = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to assign, as far as is known."""
        return self._exhausted and not self._again and not self._on_probation

    @property
    def is_running_out(self) -> bool:
        """Whether no fresh jobs are left: a job that is assigned now should begin at once."""
        return self._exhausted

    def on_probation(self, assigned: Assigned) -> bool:
        return 0 < self._max_reschedules <= assigned.losses

    def next(self, *, probation: bool) -> Assigned | str | None:
        """Take the next job to assign; NOT_YET when there may be one later, None when there is none now.

        With `probation`, the worker may have a job that is on probation.
        """
        for lost in (self._on_probation if probation else deque(), self._again):
            if lost:
                assigned = lost.popleft()
                assigned.since = time.monotonic()
                return assigned
        if self._exhausted:
            return None
        try:
            job = next(self._jobs)
        except StopIteration:
            self._exhausted = True
            return None
        if job is None:
            return NOT_YET
        self.started += 1
        return Assigned(job, time.monotonic())

    def close(self) -> None:
        """Take no more jobs."""
        self._exhausted = True

    def put_back(self, assigned: Assigned) -> None:
        """Take back a job that has not begun; it is assigned before fresh ones."""
        (self._on_probation if self.on_probation(assigned) else self._again).append(assigned)

    def reschedule(self, assigned: Assigned) -> bool:
        """Take back a job whose worker was lost; False when that has happened too often to assign it again."""
        assigned.losses += 1
        if assigned.losses > self._max_reschedules:
            return False
        self.put_back(assigned)
        return True


def lost_record(assigned: Assigned, worker: WorkerInfo | None, reason: str) -> Record:
    """Make the error record of a case whose workers all died, the last of them this one."""
    job = assigned.job
    died = counted(assigned.losses, "worker")
    last = "" if worker is None else f", the last was {worker.name}"
    error = f"WorkerLost: {died} died while this case was in flight{last}: {reason}"
    return Record(
        RECORD_VERSION,
        job.case.id,
        job.trial,
        job.index,
        "error",
        assigned.losses,
        time.monotonic() - assigned.since,
        job.case_fp,
        job.scored_by,
        0.0,
        error=error,
        error_type="WorkerLost",
        node=None if worker is None else worker.node,
        scores=[],
        group=job.case.group,
    )


class WorkerShare:
    """How many calls one worker may have in flight.

    A smaller limit binds only when the worker has received it: until then the larger one stays `reserved`.
    """

    def __init__(self) -> None:
        self.limit = 0
        """The limit last sent."""
        self.number = 0
        """Counts up with each limit sent."""
        self._reserved = 0

    @property
    def reserved(self) -> int:
        """The most calls that the worker can have in flight now."""
        return max(self.limit, self._reserved)

    def set_limit(self, limit: int) -> None:
        """Set a new limit, which is about to be sent."""
        self._reserved = self.reserved
        self.limit = limit
        self.number += 1

    def confirm(self, number: int, in_flight: int) -> None:
        """Take in a worker's report: the last limit it received, and its calls in flight."""
        if number == self.number:
            self._reserved = in_flight

    def lend(self, in_use: int) -> None:
        """Keep only as much as the jobs of a worker that is out of reach can use; the rest is free for others."""
        self.limit = min(self.limit, in_use)
        self._reserved = min(self._reserved, in_use)
        self.number += 1

    def clear(self) -> None:
        """Free the whole share: the worker is gone, and its calls with it."""
        self.limit = self._reserved = 0


def divide_limit(total: int, shares: Sequence[WorkerShare], expected: int = 0) -> list[WorkerShare]:
    """Divide a limit evenly, with room for `expected` workers that are still starting; returns the changed shares.

    What one worker gives up goes to another only when it is free.
    """
    places = len(shares) + expected
    fair = [total // places + (place < total % places) for place in range(places)] if places else []
    changed = []
    for share, wanted in zip(shares, fair, strict=False):
        if wanted < share.limit:
            share.set_limit(wanted)
            changed.append(share)
    free = total - sum(share.reserved for share in shares)
    for share, wanted in zip(shares, fair, strict=False):
        more = min(wanted - share.limit, free + share.reserved - share.limit)
        if more > 0:
            free -= max(0, share.limit + more - share.reserved)
            share.set_limit(share.limit + more)
            changed.append(share)
    return changed


class WorkerHandle:
    """One worker as the driver sees it. A worker that dies is replaced; the handle and its number stay."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.actor: Any = None
        self.info: WorkerInfo | None = None
        self.share = WorkerShare()
        self.assigned: dict[int, Assigned] = {}
        """By ticket, the oldest first."""
        self.calls: WorkerCalls | None = None
        self.missing_reported = False
        """Whether a warning reported that no worker was started."""
        self.has_no_place = False
        """Whether no worker is started for it any more."""
        self.starting_since = time.monotonic()
        self.peak = 0
        """The most calls it had in flight between its last two batches."""
        self.clock_offset = 0.0
        """What to add to this process's clock for the worker's."""
        self.sends: WorkerSends | None = None
        """Open loop: what it has sent so far."""
        self.on_probation: int | None = None
        """The ticket of the one job on probation that it has."""
        self.message = Message()
        """What to send at the next opportunity."""
        self.is_out_of_reach = False
        """Whether its connection broke, or it has been silent for long: it gets no more jobs until it answers."""
        self.silence_reported_at = float("-inf")
        self.must_resend = False
        """Whether messages that it has not confirmed may be lost."""
        self.unconfirmed: deque[Message] = deque()
        """Messages that were sent, and that no batch has confirmed yet."""
        self._messages = 0
        self._batches = 0
        self._rate = 0.0
        self._last_batch_at = time.monotonic()

    @property
    def is_live(self) -> bool:
        return self.actor is not None

    @property
    def can_be_reached(self) -> bool:
        return self.actor is not None and not self.is_out_of_reach

    @property
    def name(self) -> str:
        """What messages call it."""
        return "a worker" if self.info is None else self.info.name

    def is_expected(self, now: float, seconds: float) -> bool:
        """Whether its worker should be there within that many seconds of its start."""
        return not (self.is_live or self.has_no_place) and now < self.starting_since + seconds

    def silent_seconds(self, now: float) -> float:
        """How long ago its last batch came, or its start."""
        return now - self._last_batch_at

    @property
    def waiting(self) -> int:
        """How many of its jobs cannot have begun."""
        return len(self.assigned) - self.share.limit

    def jobs_wanted(self, *, ahead: bool) -> int:
        """How many more jobs it should have: to begin at once and, with `ahead`, when those in flight end."""
        limit = self.share.limit
        if not (ahead and limit):
            return limit - len(self.assigned)
        return limit + max(math.ceil(self._rate * _AHEAD_SECONDS), int(limit * _AHEAD_SHARE)) - len(self.assigned)

    def attach(self, actor: Any, info: WorkerInfo, calls: WorkerCalls) -> None:
        """Bind a started worker to this handle."""
        self.actor, self.info, self.calls = actor, info, calls
        self.message, self.missing_reported = Message(), False
        self.is_out_of_reach = self.must_resend = False
        self.unconfirmed.clear()
        self._messages = self._batches = 0
        self._rate, self._last_batch_at = 0.0, time.monotonic()

    def detach(self) -> list[Assigned]:
        """Unbind a worker that is gone; returns the jobs it had."""
        lost = list(self.assigned.values())
        if self.actor is not None:
            self.actor.close()
        if self.calls is not None:
            self.calls.close()
        self.share.clear()
        self.assigned.clear()
        self.actor, self.calls, self.peak, self.on_probation = None, None, 0, None
        self.is_out_of_reach = False
        self.starting_since = time.monotonic()
        return lost

    def update(self, batch: Batch, ended: int) -> None:
        """Take in the state that a batch reports, with the number of jobs it ended."""
        now = time.monotonic()
        passed = max(now - self._last_batch_at, 1e-6)
        self._rate += (1 - math.exp(-passed / _RATE_SECONDS)) * (ended / passed - self._rate)
        self._last_batch_at = now
        self._batches = batch.number
        while self.unconfirmed and self.unconfirmed[0].number <= batch.received:
            self.unconfirmed.popleft()
        self.share.confirm(batch.share_number, batch.in_flight)

    def take_message(self) -> Message:
        """Take what has been collected to send."""
        message, self.message = self.message, Message()
        self._messages += 1
        message.number, message.acknowledged = self._messages, self._batches
        self.unconfirmed.append(message)
        return message


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
