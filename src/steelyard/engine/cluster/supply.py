"""The jobs of a run as the driver hands them out: fresh ones in order, lost ones again, but not for ever."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import msgspec

from steelyard.records import RECORD_VERSION, Job, Record
from steelyard.stats.wording import counted

NOT_YET = "not yet"


class Given(msgspec.Struct, gc=False):
    """A job that was handed out."""

    job: Job
    since: float
    losses: int = 0
    """How many workers died with it."""
    recorded: bool = False


class Supply:
    """Fresh jobs, and those whose worker was lost.

    A job for which one more loss would be the last is `on_probation`: no worker has two of these at once, so that
    the one that kills its workers is found, and those that were only near it are not blamed.
    """

    def __init__(self, jobs: Iterator[Job | None], max_reschedules: int) -> None:
        self._jobs = jobs
        self._max_reschedules = max_reschedules
        self._again: deque[Given] = deque()
        self._on_probation: deque[Given] = deque()
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

    def on_probation(self, given: Given) -> bool:
        return 0 < self._max_reschedules <= given.losses

    def next(self, *, probation: bool) -> Given | str | None:
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
        return Given(job, time.monotonic())

    def give_back(self, given: Given) -> None:
        """Not begun: it is the next to be handed out."""
        (self._on_probation if self.on_probation(given) else self._again).append(given)

    def lose(self, given: Given) -> bool:
        """Its worker is gone; True when it is handed out again, False when that has happened too often."""
        given.losses += 1
        if given.losses > self._max_reschedules:
            return False
        self.give_back(given)
        return True


def lost_record(given: Given, node: str, reason: str) -> Record:
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
