"""The engine that spreads a run over the workers of a Ray cluster."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from steelyard.engine.ray.connect import RayConnection, check_installed
from steelyard.engine.workers.engine import WorkersEngine, check_workers
from steelyard.engine.workers.messages import Batch, Message, WorkerInfo, check_same_versions
from steelyard.engine.workers.worker import Worker
from steelyard.errors import ConfigurationError
from steelyard.shutdown import ENGINE_GRACE_SECONDS

_FIRST_WORKER_SECONDS = 60.0
_ROUND_TRIPS = 8
"""How often a worker is asked for its clock."""
_MAX_CONCURRENT_CALLS = 1000
"""Actor calls at once: messages, exchanges and handshakes, never the cases themselves."""


class RayEngine(WorkersEngine):
    """Runs work on the actors of a Ray cluster; the same contract as LocalEngine.

    `address` is `host:port` or `auto`; without it a cluster is started on this machine. `workers` is how many actors,
    one for each CPU of the cluster when None. A case whose worker dies is assigned again at most `max_reschedules`
    times. `working_dir` is sent along to a cluster at an address: a suite's module and the files next to it.

    Workers stay until `close()`, or the end of a `with` block, so that the next run finds them ready.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        max_reschedules: int = 3,
        grace: float = ENGINE_GRACE_SECONDS,
        working_dir: str | Path | None = None,
    ) -> None:
        if workers is not None:
            check_workers(workers)
        super().__init__(max_reschedules=max_reschedules, grace=grace)
        check_installed()
        self._connection = RayConnection(address, working_dir)
        self._workers = workers
        self._pool: RayWorkerPool | None = None

    def check(self, *, pace: bool = False) -> None:  # noqa: ARG002 - arrivals are shared, too
        """Connect to the cluster and start a first worker; raises ConfigurationError for what cannot be done.

        Takes seconds: not for the event loop.
        """
        self._open().start_first()

    def check_workspaces(self) -> None:
        """Refuse: a workspace is a folder of this machine, and is graded, kept and resumed from here."""
        raise ConfigurationError(
            "a suite with workspaces cannot run on Ray yet: its folders, logs and graders are on this machine; "
            "use the local engine"
        )

    def close(self) -> None:
        """End the workers, and the cluster if this engine started it."""
        self._connection.give_up()
        with self._opening:
            if self._pool is not None:
                self._pool.close()
                self._pool = None
            self._connection.close()

    def _open(self) -> RayWorkerPool:
        with self._opening:
            if self._pool is None:
                self._connection.open()
                self._pool = RayWorkerPool(self._workers)
            return self._pool


class RayWorker(Worker):
    """The actor's class."""

    def __init__(self, paths: Sequence[str]) -> None:
        import ray

        # Several nodes may share a host name, and a node's id alone means nothing to a reader.
        node = f"{socket.gethostname()}/{ray.get_runtime_context().get_node_id()[:8]}"
        super().__init__(node, ray_version=ray.__version__)
        sys.path.extend(path for path in paths if path not in sys.path and os.path.isdir(path))


class ActorConnection:
    """A worker's actor, called as the driver calls any worker."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def begin(self, run: int, work: bytes, parallelism: int, grace: float, paced: bool) -> Awaitable[None]:
        called: Awaitable[None] = self._actor.begin.remote(run, work, parallelism, grace, paced)
        return called

    async def clock_offset(self) -> float:
        """Compare the two clocks by the quickest of some round trips: right to half of what that took."""
        took, offset = float("inf"), 0.0
        for _ in range(_ROUND_TRIPS):
            before = time.monotonic()
            there = await self._actor.clock.remote()
            after = time.monotonic()
            if after - before < took:
                took, offset = after - before, there - (before + after) / 2
        return offset

    def send(self, run: int, message: Message) -> Awaitable[None]:
        called: Awaitable[None] = self._actor.receive.remote(run, message)
        return called

    def exchange(self, run: int, message: Message) -> Awaitable[Batch]:
        called: Awaitable[Batch] = self._actor.exchange.remote(run, message)
        return called

    def close(self) -> None:
        """Do nothing: an actor takes the calls of all runs."""


class RayWorkerPool:
    """The actors of an engine, by worker number."""

    def __init__(self, workers: int | None) -> None:
        import ray

        cpus = ray.cluster_resources().get("CPU", 1.0)
        self.size = workers or max(1, int(cpus))
        self._cpus_each = min(1.0, cpus / self.size)
        self.failure: Exception | None = None
        self._actors: dict[int, Any] = {}
        self._infos: dict[int, WorkerInfo] = {}

    def start_first(self) -> None:
        """Start a first worker, and check that its versions match this process."""
        import ray

        if 0 not in self._infos:
            try:
                info = ray.get(self._actor(0).handshake.remote(), timeout=_FIRST_WORKER_SECONDS)
            except ray.exceptions.GetTimeoutError:
                raise ConfigurationError(
                    f"the cluster started no worker within {_FIRST_WORKER_SECONDS:.0f} s: are all its CPUs taken?"
                ) from None
            except ray.exceptions.RayError as error:
                raise ConfigurationError(f"no worker could be started: {_cause(error)}") from error
            self._register(0, info)

    async def worker(self, number: int) -> tuple[Any, WorkerInfo]:
        """Return the worker of a number, started and checked."""
        actor = self._actor(number)
        if number not in self._infos:
            self._register(number, await actor.handshake.remote())
        return ActorConnection(actor), self._infos[number]

    def lose(self, number: int) -> None:
        """Forget a worker that is gone, so that the next call of `worker` starts another.

        One that is only out of reach is ended too: its cases are assigned again, and must not also run there.
        """
        import ray

        self._infos.pop(number, None)
        if (actor := self._actors.pop(number, None)) is not None:
            ray.kill(actor)

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error means that a worker is gone, and not that its code raised."""
        import ray

        return isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError)

    def is_broken_connection(self, error: BaseException) -> bool:
        """Whether Ray cannot reach an actor now, and does not know it to be dead."""
        import ray

        return isinstance(error, ray.exceptions.ActorUnavailableError)

    def cause(self, error: Exception) -> Exception:
        """Return what a worker raised, without Ray's wrapper."""
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, Exception) else error

    def close(self) -> None:
        """End all workers."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        self._infos.clear()

    def _actor(self, number: int) -> Any:
        if number not in self._actors:
            import ray

            actor_class = ray.remote(RayWorker).options(
                num_cpus=self._cpus_each, max_concurrency=_MAX_CONCURRENT_CALLS, scheduling_strategy="SPREAD"
            )
            self._actors[number] = actor_class.remote([path for path in sys.path if path])
        return self._actors[number]

    def _register(self, number: int, info: WorkerInfo) -> None:
        check_same_versions(info)
        self._infos[number] = info


def _cause(error: BaseException) -> str:
    return str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
