"""What the engines with workers share: one run after the other over a pool of processes, here or on a cluster."""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from steelyard.daemon_threads import DaemonThreads
from steelyard.engine.arrivals import Schedule
from steelyard.engine.base import Engine
from steelyard.engine.workers.driver import DriverRun, WorkerPool
from steelyard.engine.workers.pending import PendingJobs
from steelyard.engine.workers.pickling import DriverObjects, pickle_work
from steelyard.errors import ConfigurationError
from steelyard.protocols import Cancellation, Emit, InFlight, Pace, Permits, Tally, Work
from steelyard.records import Job
from steelyard.shutdown import ENGINE_GRACE_SECONDS
from steelyard.stats.client_load import ClientLoad


class WorkersEngine(Engine):
    """Runs work in the processes of a pool, which stay until `close()` so that the next run finds them ready."""

    runs_in_other_processes = True
    sends_keys = False
    """Whether keys that were given in code may be sent to workers: only where nobody else can read them on the way."""

    def __init__(self, *, max_reschedules: int = 3, grace: float = ENGINE_GRACE_SECONDS) -> None:
        if max_reschedules < 0:
            raise ConfigurationError(f"max_reschedules must be >= 0, got {max_reschedules}")
        self._max_reschedules = max_reschedules
        self._grace = grace
        self._opening = threading.Lock()
        self._numbers = itertools.count(1)
        self._runs: list[DriverRun] = []
        self._loads: list[ClientLoad] = []
        self._was_cancelled = False
        """Whether the last run was cancelled: then there is no time for an orderly end."""

    @abstractmethod
    def _open(self) -> WorkerPool:
        """Return the pool, opened if it is not yet. Takes seconds: not for the event loop."""

    def check_sent(self, objects: Sequence[object]) -> None:
        """Refuse keys that were given in code or in the suite, where others could read them on their way."""
        if not self.sends_keys:
            pickle_work(list(objects), DriverObjects())  # type: ignore[arg-type]

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
        together: bool = False,
    ) -> Tally:
        """Run all jobs, or until the token is cancelled, or until work raises: then cancel the rest and raise."""
        if parallelism < 1:
            raise ConfigurationError(f"parallelism must be >= 1, got {parallelism}")
        if pace is not None and not isinstance(pace, Schedule):
            raise ConfigurationError("only arrivals can be spread over workers, not a pace of your own")
        if token.cancelled:
            return Tally()
        driver_objects = DriverObjects(sends_keys=self.sends_keys)
        pickled = pickle_work(work, driver_objects)
        pool = await DaemonThreads().run(self._open)
        run = DriverRun(
            next(self._numbers),
            pool,
            pickled,
            driver_objects,
            PendingJobs(jobs, self._max_reschedules),
            emit,
            workers=min(pool.size, parallelism),
            parallelism=parallelism,
            token=token,
            permits=permits,
            grace=self._grace,
            together=together,
            schedule=pace,
        )
        self._runs.append(run)
        try:
            return await run.run()
        finally:
            self._runs.remove(run)
            self._loads = run.loads
            self._was_cancelled = token.cancelled

    def client_loads(self) -> list[ClientLoad]:
        """Return how busy each worker was during the last run."""
        return self._loads

    def in_flight(self) -> InFlight:
        """Count the calls that are in flight or waiting on a worker, and find the oldest."""
        flights = [flight for run in self._runs if (flight := run.in_flight()).count]
        if not flights:
            return InFlight(0, None, 0.0)
        oldest = max(flights, key=lambda flight: flight.oldest_seconds)
        return InFlight(sum(flight.count for flight in flights), oldest.oldest_id, oldest.oldest_seconds)


def check_workers(workers: object) -> None:
    """Raise ConfigurationError unless this is how many workers there may be."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigurationError(f"workers must be a whole number >= 1, got {workers!r}")
