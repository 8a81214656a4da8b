"""The engine that spreads a run over the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.engine.ray.connect import RayConnection, check_installed
from steelyard.engine.ray.pool import RayWorkerPool
from steelyard.engine.workers.engine import WorkersEngine, check_workers
from steelyard.errors import ConfigurationError
from steelyard.shutdown import ENGINE_GRACE_SECONDS


class RayEngine(WorkersEngine):
    """Runs work on the actors of a Ray cluster; the same contract as LocalEngine.

    `address` is `host:port` or `auto`; without it a cluster is started on this machine. `workers` is how many actors;
    when None, one for each CPU of the cluster, those of nodes that join later included. A case whose worker dies is
    assigned again at most `max_reschedules` times. `working_dir` is sent along to a cluster at an address: a suite's
    module and the files next to it, without those that may hold keys. `runtime_env` is Ray's, merged with that of a
    job. A node that does not match this process is left out with a warning; with `strict_workers` it is an error.

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
        runtime_env: Mapping[str, Any] | None = None,
        strict_workers: bool = False,
    ) -> None:
        if workers is not None:
            check_workers(workers)
        super().__init__(max_reschedules=max_reschedules, grace=grace)
        check_installed()
        self._connection = RayConnection(address, working_dir, runtime_env)
        self._workers = workers
        self._strict_workers = strict_workers
        self._pool: RayWorkerPool | None = None

    def check(self, *, pace: bool = False) -> None:  # noqa: ARG002 - arrivals are shared, too
        """Connect to the cluster and start the workers; raises ConfigurationError for what cannot be done.

        Takes seconds: not for the event loop.
        """
        self._open().start()

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
            lost = False
            if self._pool is not None:
                self._pool.close()
                lost = self._pool.failure is not None
                self._pool = None
            self._connection.close(lost=lost)

    def _open(self) -> RayWorkerPool:
        with self._opening:
            if self._pool is None:
                self._connection.open()
                self._pool = RayWorkerPool(self._workers, strict=self._strict_workers)
            return self._pool
