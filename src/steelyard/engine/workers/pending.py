"""The jobs of a run as the driver hands them out: fresh ones in order, lost ones again, but not for ever."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from steelyard.engine.workers.messages import Batch, Message
from steelyard.engine.workers.remote_limits import Calls
from steelyard.records import RECORD_VERSION, Job, Record
from steelyard.stats.formatting import counted

NOT_YET = "not yet"


class Assigned(msgspec.Struct, gc=False):
    """A job that was handed out."""

    job: Job
    since: float
    losses: int = 0
    """How many workers died with it."""
    recorded: bool = False


class PendingJobs:
    """Fresh jobs, and those whose worker was lost.

    A job for which one more loss would be the last is `on_probation`: no worker has two of these at once, so that
    the one that kills its workers is found, and those that were only near it are not blamed.
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
        """Whether there is nothing left to hand out, as far as is known."""
        return self._exhausted and not self._again and not self._on_probation

    @property
    def is_running_out(self) -> bool:
        """Whether no fresh jobs are left: what is handed out now should begin at once."""
        return self._exhausted

    def on_probation(self, given: Assigned) -> bool:
        return 0 < self._max_reschedules <= given.losses

    def next(self, *, probation: bool) -> Assigned | str | None:
        """The next to hand out; NOT_YET when there may be one later, None when there is none now.

        With `probation`, to a worker that may have one of those.
        """
        for lost in (self._on_probation if probation else deque(), self._again):
            if lost:
                given = lost.popleft()
                given.since = time.monotonic()
                return given
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

    def give_back(self, given: Assigned) -> None:
        """Not begun: it is the next to be handed out."""
        (self._on_probation if self.on_probation(given) else self._again).append(given)

    def lose(self, given: Assigned) -> bool:
        """Its worker is gone; True when it is handed out again, False when that has happened too often."""
        given.losses += 1
        if given.losses > self._max_reschedules:
            return False
        self.give_back(given)
        return True


def lost_record(given: Assigned, node: str, reason: str) -> Record:
    """The record of a case that no worker survived."""
    job = given.job
    died = counted(given.losses, "worker")
    error = f"WorkerLost: {died} died while this case was in flight, the last on {node}: {reason}"
    return Record(
        RECORD_VERSION,
        job.case.id,
        job.trial,
        job.index,
        "error",
        given.losses,
        time.monotonic() - given.since,
        job.case_fp,
        job.scored_by,
        0.0,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        error,
        error_type="WorkerLost",
        node=node,
        scores=[],
    )


class WorkerShare:
    """One worker's part: what it was told, and what it may still have in flight of what it was told before."""

    def __init__(self) -> None:
        self.told = 0
        self.number = 0
        self._held = 0

    @property
    def held(self) -> int:
        """The most that it can have in flight at this moment."""
        return max(self.told, self._held)

    def tell(self, share: int) -> None:
        """A new share is on its way; a smaller one binds only when the worker has heard of it."""
        self._held = self.held
        self.told = share
        self.number += 1

    def heard(self, number: int, inside: int) -> None:
        """The worker said which share it knows and how many calls it has in flight."""
        if number == self.number:
            self._held = inside

    def clear(self) -> None:
        """The worker is gone, and its calls with it."""
        self.told = self._held = 0


def share_out(total: int, shares: Sequence[WorkerShare], expected: int = 0) -> list[WorkerShare]:
    """Divide evenly, leaving room for as many workers as are still expected; those that changed.

    What one worker is to give up is given to another only when it is free.
    """
    places = len(shares) + expected
    fair = [total // places + (place < total % places) for place in range(places)] if places else []
    changed = []
    for share, wanted in zip(shares, fair, strict=False):
        if wanted < share.told:
            share.tell(wanted)
            changed.append(share)
    free = total - sum(share.held for share in shares)
    for share, wanted in zip(shares, fair, strict=False):
        more = min(wanted - share.told, free + share.held - share.told)
        if more > 0:
            free -= max(0, share.told + more - share.held)
            share.tell(share.told + more)
            changed.append(share)
    return changed


_AHEAD_SECONDS = 0.1
_AHEAD_SHARE = 1 / 4
"""A worker has jobs waiting for so long at its pace, or this part of its share if that is more: many calls that end at
once must not wait for the driver. At the end of a run what waits is taken back where others have nothing to do."""
_SMOOTHING = 0.3


class WorkerHandle:
    """One worker, seen from the driver. The worker may die and be replaced: the seat stays."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.actor: Any = None
        self.node = "?"
        self.share = WorkerShare()
        self.given: dict[int, Assigned] = {}
        """By ticket, the oldest first."""
        self.calls: Calls | None = None
        self.is_missed = False
        """Whether it was said that no worker came."""
        self.peak = 0
        """The most it had in flight between its last two batches."""
        self.on_probation: int | None = None
        """The ticket of the one job on probation that it has."""
        self.letter = Message()
        """What is to be said with the next opportunity."""
        self._rate = 0.0
        self._heard_at = time.monotonic()

    @property
    def is_live(self) -> bool:
        return self.actor is not None

    def wants(self, *, ahead: bool) -> int:
        """How many more jobs it should have: to begin at once and, with `ahead`, when those in flight end."""
        share = self.share.told
        if not (ahead and share):
            return share - len(self.given)
        return share + max(math.ceil(self._rate * _AHEAD_SECONDS), int(share * _AHEAD_SHARE)) - len(self.given)

    @property
    def waiting(self) -> int:
        """How many of its jobs cannot have begun."""
        return len(self.given) - self.share.told

    def sit_down(self, actor: Any, node: str, calls: Calls) -> None:
        """A worker took the seat."""
        self.actor, self.node, self.calls = actor, node, calls
        self.letter, self.is_missed = Message(), False
        self._rate, self._heard_at = 0.0, time.monotonic()

    def leave(self) -> list[Assigned]:
        """The worker is gone; what it had."""
        lost = list(self.given.values())
        if self.calls is not None:
            self.calls.close()
        self.share.clear()
        self.given.clear()
        self.actor, self.calls, self.peak, self.on_probation = None, None, 0, None
        return lost

    def hear(self, batch: Batch, ended: int) -> None:
        """Learn how it stands, and how fast it goes."""
        now = time.monotonic()
        rate = ended / max(now - self._heard_at, 1e-3)
        self._rate += _SMOOTHING * (rate - self._rate)
        self._heard_at = now
        self.share.heard(batch.share_number, batch.inside)

    def next_letter(self) -> Message:
        """What has gathered to be said."""
        letter, self.letter = self.letter, Message()
        return letter
