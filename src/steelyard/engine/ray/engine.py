"""The engine that spreads a run over the workers of a Ray cluster."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steelyard.daemon_threads import DaemonThreads
from steelyard.engine.ray.connect import Connection, check_installed, check_same_versions
from steelyard.engine.workers.driver import DriverRun
from steelyard.engine.workers.messages import Greeting
from steelyard.engine.workers.pending import PendingJobs
from steelyard.engine.workers.pickling import Home, pack_work
from steelyard.errors import ConfigurationError
from steelyard.protocols import Cancellation, Emit, InFlight, Pace, Permits, Tally, Work
from steelyard.records import Job
from steelyard.stats.client_load import ClientLoad

_FIRST_WORKER_SECONDS = 60.0
_CONVERSATIONS = 1000
"""Calls that an actor takes at once: letters, exchanges and greetings, never the cases themselves."""


class RayEngine:
    """Runs work on the actors of a Ray cluster; the same contract as LocalEngine.

    `address` is `host:port` or `auto`; without it a cluster is started on this machine. `workers` is how many actors,
    one for each CPU of the cluster when None. A case whose worker dies is handed out again at most `max_reschedules`
    times. `working_dir` is sent along to a cluster at an address: a suite's module and the files beside it.

    Workers stay until `close()`, or the end of a `with`, so that one run after the other finds them ready.
    """

    works_elsewhere = True

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        max_reschedules: int = 3,
        grace: float = 4.0,
        working_dir: str | Path | None = None,
    ) -> None:
        if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
            raise ConfigurationError(f"workers must be a whole number >= 1, got {workers!r}")
        if max_reschedules < 0:
            raise ConfigurationError(f"max_reschedules must be >= 0, got {max_reschedules}")
        check_installed()
        self.loads: list[ClientLoad] = []
        """How hard each worker had to work for the last run."""
        self._connection = Connection(address, working_dir)
        self._workers = workers
        self._max_reschedules = max_reschedules
        self._grace = grace
        self._staff: RayWorkerPool | None = None
        self._opening = threading.Lock()
        self._numbers = itertools.count(1)
        self._runs: list[DriverRun] = []

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, *, pace: bool = False) -> None:
        """Refuse, before anything is called, what cannot be done: reaches the cluster and greets a first worker.

        Takes seconds: not for the event loop.
        """
        if pace:
            raise ConfigurationError(
                "arrivals need one clock: an open-loop load run is not spread over workers, use the local engine"
            )
        self._open().greet_one()

    def close(self) -> None:
        """Let the workers go, and the cluster if it was started for this."""
        self._connection.give_up()
        with self._opening:
            if self._staff is not None:
                self._staff.dismiss()
                self._staff = None
            self._connection.close()

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
    ) -> Tally:
        """Run all jobs, or until the token is cancelled, or until work raises: then cancel the rest and raise."""
        if parallelism < 1:
            raise ConfigurationError(f"parallelism must be >= 1, got {parallelism}")
        if pace is not None:
            self.check(pace=True)
        if token.cancelled:
            return Tally()
        home = Home()
        packed = pack_work(work, home)
        staff = await DaemonThreads().run(self._open)
        run = DriverRun(
            next(self._numbers),
            staff,
            packed,
            home,
            PendingJobs(jobs, self._max_reschedules),
            emit,
            seats=min(staff.size, parallelism),
            parallelism=parallelism,
            token=token,
            permits=permits,
            grace=self._grace,
        )
        self._runs.append(run)
        try:
            return await run.run()
        finally:
            self._runs.remove(run)
            self.loads = run.loads

    def in_flight(self) -> InFlight:
        """How many calls are out or waiting at a worker, and which has been out longest."""
        flights = [flight for run in self._runs if (flight := run.in_flight()).count]
        if not flights:
            return InFlight(0, None, 0.0)
        oldest = max(flights, key=lambda flight: flight.oldest_seconds)
        return InFlight(sum(flight.count for flight in flights), oldest.oldest_id, oldest.oldest_seconds)

    def _open(self) -> RayWorkerPool:
        with self._opening:
            if self._staff is None:
                self._connection.open()
                self._staff = RayWorkerPool(self._workers)
            return self._staff


class RayWorkerPool:
    """The actors of an engine, by the number of their seat."""

    def __init__(self, workers: int | None) -> None:
        import ray

        cpus = ray.cluster_resources().get("CPU", 1.0)
        self.size = workers or max(1, int(cpus))
        self._cpus_each = min(1.0, cpus / self.size)
        self._actors: dict[int, Any] = {}
        self._greetings: dict[int, Greeting] = {}

    def greet_one(self) -> None:
        """Have a first worker, and see that it runs on what this process runs on."""
        import ray

        if 0 not in self._greetings:
            try:
                greeting = ray.get(self._actor(0).hello.remote(), timeout=_FIRST_WORKER_SECONDS)
            except ray.exceptions.GetTimeoutError:
                raise ConfigurationError(
                    f"the cluster gave no worker within {_FIRST_WORKER_SECONDS:.0f} s: are all its CPUs taken?"
                ) from None
            except ray.exceptions.RayError as error:
                raise ConfigurationError(f"no worker could be started: {_cause(error)}") from error
            self._welcome(0, greeting)

    async def worker(self, seat: int) -> tuple[Any, Greeting]:
        """The worker of a seat, ready to begin."""
        actor = self._actor(seat)
        if seat not in self._greetings:
            self._welcome(seat, await actor.hello.remote())
        return actor, self._greetings[seat]

    def lose(self, seat: int) -> None:
        """Forget a worker that is gone: the seat's next one is another.

        One that is only out of reach is ended too: its cases are handed out again, and must not be asked on there.
        """
        import ray

        self._greetings.pop(seat, None)
        if (actor := self._actors.pop(seat, None)) is not None:
            ray.kill(actor)

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error says that a worker is gone, and not that it had something to say."""
        import ray

        return isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError)

    def cause(self, error: Exception) -> Exception:
        """What a worker raised, without Ray's account of where."""
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, Exception) else error

    def dismiss(self) -> None:
        """End all workers."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        self._greetings.clear()

    def _actor(self, seat: int) -> Any:
        if seat not in self._actors:
            import ray

            from steelyard.engine.workers.worker import Worker

            made = ray.remote(Worker).options(
                num_cpus=self._cpus_each, max_concurrency=_CONVERSATIONS, scheduling_strategy="SPREAD"
            )
            self._actors[seat] = made.remote([path for path in sys.path if path])
        return self._actors[seat]

    def _welcome(self, seat: int, greeting: Greeting) -> None:
        check_same_versions(greeting)
        self._greetings[seat] = greeting


def _cause(error: BaseException) -> str:
    return str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
