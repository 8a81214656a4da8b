"""A lane: several runs in this process that share one limit of calls in flight, and take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from steelyard.engine.adaptive import AdaptivePermits, PermitsShare
from steelyard.engine.local import JobGate, LocalEngine
from steelyard.protocols import Cancellation, Emit, Pace, Permits, Tally, Work
from steelyard.records import Job
from steelyard.shutdown import ENGINE_GRACE_SECONDS


class Lane:
    """Lets the workers of several runs take their jobs in turn: the run that is furthest behind comes first.

    At most `parallelism` jobs are in progress over all runs or, with adaptive permits, as many as those allow. None
    begins before every run has arrived, so that none gets ahead of the others.
    """

    def __init__(self, parallelism: int, permits: AdaptivePermits | None = None) -> None:
        self._parallelism = parallelism
        self._permits = permits
        self.inside = 0
        """How many jobs are in progress, over all runs."""
        self._gates: list[LaneGate] = []
        self._awaited: set[LaneEngine] = set()
        if permits is not None:
            permits.on_room(self.let_in)

    @property
    def allowed(self) -> int:
        """How many jobs may be in progress at this moment."""
        return self._parallelism if self._permits is None else self._permits.allowed

    def engine(self, grace: float = ENGINE_GRACE_SECONDS) -> LaneEngine:
        """Make the engine of one more run, which the others wait for."""
        engine = LaneEngine(self, grace)
        self._awaited.add(engine)
        return engine

    def join(self, gate: LaneGate, engine: LaneEngine) -> None:
        """Give the workers at this gate their turns."""
        self._gates.append(gate)
        self.stop_waiting_for(engine)

    def stop_waiting_for(self, engine: LaneEngine) -> None:
        """Let the others begin without this run: it has begun itself, or it never will."""
        self._awaited.discard(engine)
        self.let_in()

    def let_in(self) -> None:
        """Let in as many workers as there is room for."""
        if self._awaited:
            return
        while ready := [gate for gate in self._gates if gate.can_let_in]:
            min(ready, key=LaneGate.progress).let_first_in()


class LaneEngine(LocalEngine):
    """The engine of one run in a lane: its cases run in this process, in turn with those of the other runs."""

    def __init__(self, lane: Lane, grace: float) -> None:
        super().__init__(grace=grace)
        self._lane = lane
        self.progress = 0
        """How many jobs of the run were taken; to be set to what earlier launches did before it begins."""

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
        together: bool = False,  # noqa: ARG002 - this process is ready
    ) -> Tally:
        """Run all jobs, at most `parallelism` at once, or until the token is cancelled, or until work raises."""
        # One worker more, which waits for the run's next turn while all others are at work.
        return await super().run(work, jobs, emit, parallelism=parallelism + 1, token=token, permits=permits, pace=pace)

    def leave(self) -> None:
        """Let the other runs begin without this one, if it has not begun."""
        self._lane.stop_waiting_for(self)

    def _gate(self, parallelism: int, permits: Permits | None, pace: Pace | None) -> JobGate:
        share = permits if isinstance(permits, PermitsShare) else None
        gate = LaneGate(self._lane, self, parallelism - 1, share, pace)
        self._lane.join(gate, self)
        return gate


class LaneGate(JobGate):
    """Decides when a worker of one run may take its next job: in its turn, and when the lane has room."""

    def __init__(
        self, lane: Lane, engine: LaneEngine, limit: int, permits: PermitsShare | None, pace: Pace | None
    ) -> None:
        super().__init__(None, pace)
        self._lane = lane
        self._engine = engine
        self._limit = limit
        if permits is not None:  # the lane itself looks at room that becomes free
            self._adaptive = permits
            permits.on_answered(self._answered)

    def progress(self) -> int:
        """How far the run has come."""
        return self._engine.progress

    @property
    def can_let_in(self) -> bool:
        """Whether a worker waits that may enter."""
        return bool(self._queue) and self._has_room()

    def let_first_in(self) -> None:
        """Let in the worker that has waited longest."""
        self._engine.progress += 1
        self._let_first_in()

    def _count(self, change: int) -> None:
        super()._count(change)
        self._lane.inside += change

    def _let_in(self) -> None:
        self._lane.let_in()

    async def _permit(self) -> None:
        await self._wait_for_room()

    async def _wait_in_line(self, line_up: Callable[[asyncio.Future[None]], None]) -> None:
        def line_up_and_look(place: asyncio.Future[None]) -> None:
            line_up(place)
            self._lane.let_in()

        await super()._wait_in_line(line_up_and_look)

    def _has_room(self, counted: int = 0) -> bool:
        if self._closed:
            return True
        if self._adaptive is not None and not self._adaptive.has_room:
            return False
        return self._inside - counted < self._limit and self._lane.inside - counted < self._lane.allowed
