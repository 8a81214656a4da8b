"""The contract of an engine, which runs the cases of a run, many at once; and the token that cancels them."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
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
        together: bool = False,
    ) -> Tally:
        """Run all jobs, or until the token is cancelled, or until work raises: then cancel the rest and raise.

        `jobs` may yield None: there is none yet, and the caller should let other tasks run before asking again.
        `permits` may allow fewer than `parallelism` for a while. With a `pace`, a job is taken at its planned time.
        With `together`, in a load run, none is taken before all can be: the clock starts with the first job.
        """

    @abstractmethod
    def in_flight(self) -> InFlight:
        """Return how many calls are in flight, and which has been so longest."""

    def check(self, *, pace: bool = False) -> None:  # noqa: B027 - an engine that can always run need not override it
        """Raise ConfigurationError, before any call, when this engine cannot run; `pace`: an open-loop load run.

        May take seconds: not for the event loop.
        """

    def check_sent(self, objects: Sequence[object]) -> None:  # noqa: B027 - nothing is sent within a process
        """Raise ConfigurationError, before anything is sent, when one of these must not leave this process."""

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


class CancellationToken:
    """Cooperative cancellation: `cancel(reason)` once, then `cancelled` is true and every `wait()` returns.

    Safe to use from other threads, other event loops and signal handlers: there is no lock that a handler could wait
    for while the code that it interrupted holds it. Each step is one operation on a list, which nothing can divide.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self._reasons: list[str] = []
        self._callbacks: list[Callable[[], None]] = []

    @property
    def reason(self) -> str | None:
        """The reason given by the first caller of `cancel`."""
        return self._reasons[0] if self._reasons else None

    def cancel(self, reason: str = "cancelled") -> None:
        """Stop what observes this token. The first reason stays; later calls change nothing."""
        self._reasons.append(reason)
        self.cancelled = True
        while True:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return
            callback()

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when cancelled (at once if it already is); returns a function that unregisters it."""

        def forget() -> None:
            self._forget(callback)

        self._callbacks.append(callback)
        # Checked only now: a cancellation in between either finds this callback or leaves it to us.
        if self._reasons and self._forget(callback):
            callback()
        return forget

    def _forget(self, callback: Callable[[], None]) -> bool:
        """Unregister a callback; False when it was called or unregistered before."""
        try:
            self._callbacks.remove(callback)
        except ValueError:
            return False
        return True

    async def wait(self) -> str:
        """Return the reason as soon as there is one."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def wake_from_anywhere() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody is left to wake
                loop.call_soon_threadsafe(wake)

        forget = self.on_cancel(wake_from_anywhere)
        try:
            await woken
        finally:
            forget()
        return self._reasons[0]
