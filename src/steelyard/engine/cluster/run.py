"""One run over the cluster, from the driver: jobs out, records in, the dead replaced, the books in one place."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from typing import Any, Protocol

from steelyard.contracts import Cancellation, Emit, InFlight, Permits, Tally
from steelyard.engine.cluster.dispatch import Dispatch
from steelyard.engine.cluster.leaves import Calls
from steelyard.engine.cluster.letters import CALL, ENDED, OVER, RETURNED, SAID, Batch, Ending, Greeting
from steelyard.engine.cluster.seat import Seat
from steelyard.engine.cluster.shipping import Home
from steelyard.engine.cluster.supply import Given, Supply, lost_record
from steelyard.errors import SteelyardError, describe
from steelyard.records import Record, StoredSample, Unjudged
from steelyard.stats.lag import ClientLoad
from steelyard.stats.wording import counted

log = logging.getLogger("steelyard")

_START_SECONDS = 60.0
"""How long a run without a single worker waits for one."""
_MOST_FALSE_STARTS = 3
_FAREWELL = 1.0


class Staff(Protocol):
    """Where workers come from."""

    async def worker(self, seat: int) -> tuple[Any, Greeting]: ...

    def lose(self, seat: int) -> None: ...

    def is_loss(self, error: BaseException) -> bool: ...

    def cause(self, error: Exception) -> Exception: ...


class ClusterRun:
    """The seats of one run, the jobs they have, and how it ends."""

    def __init__(
        self,
        number: int,
        staff: Staff,
        work: bytes,
        home: Home,
        supply: Supply,
        emit: Emit,
        *,
        seats: int,
        parallelism: int,
        token: Cancellation,
        permits: Permits | None,
        grace: float,
    ) -> None:
        self._number = number
        self._staff = staff
        self._work = work
        self._home = home
        self._supply = supply
        self._emit = emit
        self._seats = [Seat(place) for place in range(seats)]
        self._parallelism = parallelism
        self._token = token
        self._grace = grace
        self._tally = Tally()
        self._failure: BaseException | None = None
        self._over = False
        self._stopping = False
        self._stop = asyncio.Event()
        self._serving: list[asyncio.Task[None]] = []
        self._dispatch = Dispatch(
            number, self._seats, supply, parallelism=parallelism, permits=permits, token=token, fail=self._fail
        )
        self.loads: list[ClientLoad] = []

    async def run(self) -> Tally:
        """The tally when all jobs are done or what was begun has ended; raises the first failure."""
        self._serving = [asyncio.create_task(self._serve(seat), name="steelyard-seat") for seat in self._seats]
        for serving in self._serving:
            serving.add_done_callback(self._seat_ended)
        watcher = asyncio.create_task(self._watch(), name="steelyard-cancellation")
        try:
            await self._stop.wait()
        except BaseException:
            self._over = True
            raise
        finally:
            await self._wind_up(watcher)
        if self._failure is not None:
            raise self._failure
        return self._tally

    def in_flight(self) -> InFlight:
        """What was handed out and has not ended: of that, some may still be waiting in its worker."""
        oldest = min(
            (next(iter(seat.given.values())) for seat in self._seats if seat.given),
            key=lambda given: given.since,
            default=None,
        )
        if oldest is None:
            return InFlight(0, None, 0.0)
        count = sum(len(seat.given) for seat in self._seats)
        return InFlight(count, oldest.job.case.id, time.monotonic() - oldest.since)

    # Beginning and ending

    async def _watch(self) -> None:
        """Stop when the token is cancelled; give up when there is nobody to do the work."""
        cancelled = asyncio.create_task(self._token.wait())
        try:
            without_since = time.monotonic()
            while not cancelled.done():
                await asyncio.wait([cancelled], timeout=1.0)
                now = time.monotonic()
                if any(seat.is_live for seat in self._seats):
                    without_since = now
                elif now - without_since > _START_SECONDS:
                    self._fail(SteelyardError(f"the cluster gave no worker for {_START_SECONDS:.0f} s"))
                self._dispatch.tell_of_missing(now)
                self._dispatch.guarded(self._dispatch.share_out)()
            self._end()
        finally:
            cancelled.cancel()

    def _end(self) -> None:
        """No more jobs are handed out; the seats are left when the workers have said their last word."""
        self._stopping = self._dispatch.is_over = True
        self._stop.set()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._over = True
        self._end()

    def _seat_ended(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and (error := serving.exception()) is not None:
            self._fail(error)
        if all(task.done() for task in self._serving):
            self._end()

    async def _wind_up(self, watcher: asyncio.Task[None]) -> None:
        """Have the workers stop and say their last words, within the grace."""
        self._stopping = self._dispatch.is_over = True
        watcher.cancel()
        reason = self._token.reason or "the run has ended"
        for seat, serving in zip(self._seats, self._serving, strict=True):
            if seat.is_live and not serving.done():
                seat.letter.cancelled = reason
                self._dispatch.tell(seat)
            else:
                serving.cancel()
        running = [task for task in self._serving if not task.done()]
        try:
            if running:
                await asyncio.wait(running, timeout=self._grace + _FAREWELL)
        finally:
            self._close(watcher)
        await asyncio.wait([watcher, *self._serving, *self._dispatch.posting])

    def _close(self, watcher: asyncio.Task[None]) -> None:
        """Count what never finished as cancelled; from here on nothing changes the books."""
        self._over = True
        for task in [watcher, *self._serving, *self._dispatch.posting]:
            task.cancel()
        for seat in self._seats:
            self._count_recorded(seat.leave())
        self._tally.started = self._supply.started
        self._tally.cancelled = self._tally.started - self._tally.finished
        self._tally.peak_in_flight = min(self._tally.peak_in_flight, self._parallelism)

    # A seat and its workers

    async def _serve(self, seat: Seat) -> None:
        """One worker after the other, until one of them has come to the end of the run."""
        false_starts = 0
        while not (self._stopping or self._token.cancelled):
            try:
                await self._seat_a_worker(seat)
                await self._converse(seat)
                return
            except Exception as error:
                if not self._staff.is_loss(error):
                    raise self._staff.cause(error) from None
                # With cases in flight it may be one of them, and the number of reschedules is bounded.
                false_starts = 0 if seat.given else false_starts + 1
                self._lose(seat, error)
                if false_starts == _MOST_FALSE_STARTS:
                    raise SteelyardError(f"workers die before they do anything: {_first_line(error)}") from error

    async def _seat_a_worker(self, seat: Seat) -> None:
        actor, greeting = await self._staff.worker(seat.number)
        await actor.begin.remote(self._number, self._work, self._parallelism, self._grace)

        def answer(call: int, value: Any) -> None:
            seat.letter.answers.append((call, value))
            self._dispatch.tell_soon(seat)

        seat.sit_down(actor, greeting.node, Calls(self._home.kept, answer))
        self._dispatch.share_out()
        self._close_if_done()

    async def _converse(self, seat: Seat) -> None:
        """Exchange letters for batches until the worker is through."""
        while True:
            batch = await seat.actor.exchange.remote(self._number, seat.next_letter())
            if self._take(seat, batch):
                return
            self._dispatch.feed(self._seats if self._supply.is_running_out else [seat])
            self._close_if_done()

    def _lose(self, seat: Seat, error: BaseException) -> None:
        """Hand out again what the worker had, and see to a new one."""
        node, why = seat.node, _first_line(error)
        lost = seat.leave()
        for given in lost:
            self._dispatch.settle(given)
        self._staff.lose(seat.number)
        self._dispatch.expect(seat)
        lost = self._count_recorded(lost)
        if self._stopping:
            return
        log.warning("a worker on %s was lost, with %s: %s", node, counted(len(lost), "case"), why)
        for given in lost:
            if not self._supply.lose(given):
                self._emit(lost_record(given, node, why))
                self._tally.finished += 1
        self._dispatch.share_out()
        self._dispatch.feed(self._seats)
        self._close_if_done()

    def _count_recorded(self, left: list[Given]) -> list[Given]:
        """Count as finished what has a record, though word of its end never came; the others."""
        others = [given for given in left if not given.recorded]
        self._tally.finished += len(left) - len(others)
        return others

    def _close_if_done(self) -> None:
        """Let the workers go when there is nothing left and nothing under way."""
        if self._supply.is_empty and not any(seat.given for seat in self._seats):
            if not any(seat.is_live for seat in self._seats):
                self._end()
            for seat in self._seats:
                if seat.is_live:
                    seat.letter.no_more = True
                    self._dispatch.tell_soon(seat)
                else:
                    self._serving[seat.number].cancel()

    # What workers say

    def _take(self, seat: Seat, batch: Batch) -> bool:
        """Take in a batch; True when the worker is through."""
        ended, weighed = 0, self._dispatch.weighed
        seat.peak = batch.peak
        self._tally.peak_in_flight = max(self._tally.peak_in_flight, sum(one.peak for one in self._seats))
        for kind, number, content in batch.items:
            if kind == SAID:
                self._said(seat.given.get(number), pickle.loads(content))
            elif kind == ENDED:
                ended += 1
                self._ended(seat, number, content)
            elif kind == RETURNED:
                self._supply.give_back(self._off(seat, number))
            elif kind == CALL:
                self._called(seat, number, *content)
            elif kind == OVER:
                self._take_leave(content)
                return True
        before = seat.share.held
        seat.hear(batch, ended)
        if seat.share.held < before or self._dispatch.weighed != weighed:
            self._dispatch.share_out()
        return False

    def _said(self, given: Given | None, item: Any) -> None:
        if given is None or self._over:
            return
        if isinstance(item, Unjudged):  # should the worker die now, the answer is only to be judged again
            given.job.stored = item.record
        elif isinstance(item, StoredSample):
            given.job.samples = (*given.job.samples, item)
        elif isinstance(item, Record):
            given.recorded = True
        self._emit(item)

    def _ended(self, seat: Seat, ticket: int, finished: bool) -> None:
        self._off(seat, ticket)
        if finished and not self._over:
            self._tally.finished += 1

    def _off(self, seat: Seat, ticket: int) -> Given:
        if seat.on_probation == ticket:
            seat.on_probation = None
        given = seat.given.pop(ticket)
        self._dispatch.settle(given)
        return given

    def _called(self, seat: Seat, call: int, number: int, name: str, args: tuple[Any, ...]) -> None:
        if seat.calls is None:
            return
        overload = seat.calls.take(call, number, name, args)
        if overload is not False:
            for other in self._seats:
                if other is not seat and other.is_live:
                    other.letter.overloads.append((number, overload))
                    self._dispatch.tell_soon(other)

    def _take_leave(self, ending: Ending) -> None:
        if ending.load is not None:
            self.loads.append(ending.load)
        if ending.failure is not None:
            self._fail(pickle.loads(ending.failure))


def _first_line(error: BaseException) -> str:
    return describe(error).partition("\n")[0]
