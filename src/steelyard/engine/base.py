"""The contract of an engine: what runs the cases of a run, many at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from steelyard.protocols import Cancellation, Emit, InFlight, Pace, Permits, Tally, Work
from steelyard.records import Job
from steelyard.stats.client_load import ClientLoad

EngineT = TypeVar("EngineT", bound="Engine")


class Engine(ABC):
    """Runs work over jobs, at most `parallelism` at once, in the order in which they are taken.

    Derive from it to run cases elsewhere: `run` and `in_flight` are required, the rest has defaults that fit an engine
    of this process. One engine serves one run after another until it is closed.
    """

    runs_in_other_processes: bool = False
    """Whether work runs in other processes, which then open and monitor their own connections."""

    @abstractmethod
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
        """Run all jobs, or until the token is cancelled, or until work raises: then cancel the rest and raise.

        `jobs` may yield None: there is none yet, and the caller should let other tasks run before asking again.
        `permits` may allow fewer than `parallelism` for a while. With a `pace`, a job is taken at its planned time.
        """

    @abstractmethod
    def in_flight(self) -> InFlight:
        """Return how many calls are in flight, and which has been so longest."""

    def check(self, *, pace: bool = False) -> None:  # noqa: B027 - an engine that can always run need not override it
        """Raise ConfigurationError, before any call, when this engine cannot run; `pace`: an open-loop load run.

        May take seconds: not for the event loop.
        """

    def check_workspaces(self) -> None:  # noqa: B027 - an engine of this machine can run cases in workspaces
        """Raise ConfigurationError when this engine cannot run cases that have workspaces."""

    def client_loads(self) -> Sequence[ClientLoad]:
        """Return how busy each other process was during the last run; empty when all work ran in this one."""
        return ()

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Release what the engine holds. It may be called more than once."""

    def __enter__(self: EngineT) -> EngineT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
