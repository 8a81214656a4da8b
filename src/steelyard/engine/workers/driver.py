"""One run over the cluster, from the driver: jobs out, records in, the dead replaced, the books in one place."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import time
from collections.abc import Callable
from typing import Any, Protocol

from steelyard.engine.adaptive import AdaptivePermits
from steelyard.engine.workers.messages import CALL, ENDED, OVER, RETURNED, SAID, Batch, Ending, Greeting
from steelyard.engine.workers.pending import NOT_YET, Assigned, PendingJobs, WorkerHandle, lost_record, share_out
from steelyard.engine.workers.pickling import Home
from steelyard.engine.workers.remote_limits import Calls
from steelyard.errors import SteelyardError, describe
from steelyard.protocols import Cancellation, Emit, InFlight, Permits, Tally
from steelyard.records import Record, StoredSample, UnscoredAnswer
from steelyard.stats.client_load import ClientLoad
from steelyard.stats.formatting import counted

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


class DriverRun:
    """The seats of one run, the jobs they have, and how it ends."""

    def __init__(
        self,
        number: int,
        staff: Staff,
        work: bytes,
        home: Home,
        supply: PendingJobs,
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
        self._seats = [WorkerHandle(place) for place in range(seats)]
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

    async def _serve(self, seat: WorkerHandle) -> None:
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

    async def _seat_a_worker(self, seat: WorkerHandle) -> None:
        actor, greeting = await self._staff.worker(seat.number)
        await actor.begin.remote(self._number, self._work, self._parallelism, self._grace)

        def answer(call: int, value: Any) -> None:
            seat.letter.answers.append((call, value))
            self._dispatch.tell_soon(seat)

        seat.sit_down(actor, greeting.node, Calls(self._home.kept, answer))
        self._dispatch.share_out()
        self._close_if_done()

    async def _converse(self, seat: WorkerHandle) -> None:
        """Exchange letters for batches until the worker is through."""
        while True:
            batch = await seat.actor.exchange.remote(self._number, seat.next_letter())
            if self._take(seat, batch):
                return
            self._dispatch.feed(self._seats if self._supply.is_running_out else [seat])
            self._close_if_done()

    def _lose(self, seat: WorkerHandle, error: BaseException) -> None:
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

    def _count_recorded(self, left: list[Assigned]) -> list[Assigned]:
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

    def _take(self, seat: WorkerHandle, batch: Batch) -> bool:
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

    def _said(self, given: Assigned | None, item: Any) -> None:
        if given is None or self._over:
            return
        if isinstance(item, UnscoredAnswer):  # should the worker die now, the answer is only to be judged again
            given.job.stored = item.record
        elif isinstance(item, StoredSample):
            given.job.samples = (*given.job.samples, item)
        elif isinstance(item, Record):
            given.recorded = True
        self._emit(item)

    def _ended(self, seat: WorkerHandle, ticket: int, finished: bool) -> None:
        self._off(seat, ticket)
        if finished and not self._over:
            self._tally.finished += 1

    def _off(self, seat: WorkerHandle, ticket: int) -> Assigned:
        if seat.on_probation == ticket:
            seat.on_probation = None
        given = seat.given.pop(ticket)
        self._dispatch.settle(given)
        return given

    def _called(self, seat: WorkerHandle, call: int, number: int, name: str, args: tuple[Any, ...]) -> None:
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


EXPECTED_SECONDS = 10.0
"""How long a worker that is being started has its share kept for it; then the others have it meanwhile."""
_ROUNDS = 8
"""In how many parts each worker gets the jobs that it wants."""


class Dispatch:
    """Hands out jobs and shares to the seats of one run."""

    def __init__(
        self,
        run: int,
        seats: list[WorkerHandle],
        supply: PendingJobs,
        *,
        parallelism: int,
        permits: Permits | None,
        token: Cancellation,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._run = run
        self._seats = seats
        self._supply = supply
        self._parallelism = parallelism
        self._permits = permits
        self._token = token
        self._fail = fail
        self._tickets = itertools.count(1)
        self._expected_until = [time.monotonic() + EXPECTED_SECONDS] * len(seats)
        self._answered: set[tuple[str, int]] = set()
        """Cases, by id and trial, with an answer that is being weighed: kept where an endpoint decides the number."""
        self.is_over = False
        """Whether no more jobs are handed out."""
        self.posting: set[asyncio.Task[None]] = set()
        """Letters on their way."""
        self._adaptive = isinstance(permits, AdaptivePermits)
        if permits is not None:
            permits.on_change(self.guarded(self.share_out))
        if isinstance(permits, AdaptivePermits):
            permits.on_answered(lambda case_id, trial: self._answered.add((case_id, trial)))

    def expect(self, seat: WorkerHandle) -> None:
        """Keep a share for the worker that is to come."""
        self._expected_until[seat.number] = time.monotonic() + EXPECTED_SECONDS

    def share_out(self) -> None:
        """Divide what is allowed among the workers there are and those that are about to come."""
        now = time.monotonic()
        live = [seat for seat in self._seats if seat.is_live]
        expected = sum(not seat.is_live and now < self._expected_until[seat.number] for seat in self._seats)
        allowed = self._parallelism
        if self._permits is not None:
            # What an endpoint bears is asked of it until it has answered, however long that is weighed afterwards.
            allowed = min(allowed, self._permits.allowed + len(self._answered))
        changed = share_out(allowed, [seat.share for seat in live], expected)
        told = [seat for seat in live if seat.share in changed]
        for seat in told:
            seat.letter.share, seat.letter.number = seat.share.told, seat.share.number
        self.feed(live)
        for seat in told:
            self.tell_soon(seat)

    def settle(self, given: Assigned) -> None:
        """A job has ended, or is to be handed out again."""
        self._answered.discard((given.job.case.id, given.job.trial))

    @property
    def weighed(self) -> int:
        """How many cases have their answer and have not ended."""
        return len(self._answered)

    def feed(self, seats: list[WorkerHandle]) -> None:
        """Hand out jobs to those who want some, in rounds: a few jobs should not all go to the first of them."""
        hungry = [(seat, max(1, self._wanted(seat) // _ROUNDS)) for seat in seats if self._wanted(seat) > 0]
        while hungry and not self.is_over and not self._token.cancelled:
            still = []
            for seat, chunk in hungry:
                given = self._hand_out(seat, min(chunk, self._wanted(seat)))
                self.tell_soon(seat)
                if given == NOT_YET:
                    asyncio.get_running_loop().call_soon(self.guarded(lambda: self.feed(self._seats)))
                    return
                if given is not None and self._wanted(seat) > 0:
                    still.append((seat, chunk))
            hungry = still
        if self._supply.is_empty:
            self._even_out()

    def _wanted(self, seat: WorkerHandle) -> int:
        return seat.wants(ahead=not self._supply.is_running_out) if seat.is_live else 0

    def _hand_out(self, seat: WorkerHandle, count: int) -> Assigned | str | None:
        """Give a worker up to so many jobs; the last of them, NOT_YET, or None when there was none for it."""
        given: Assigned | str | None = None
        for _ in range(count):
            given = self._supply.next(probation=seat.on_probation is None)
            if given is None or isinstance(given, str):
                return given
            ticket = next(self._tickets)
            seat.given[ticket] = given
            if self._adaptive and given.job.stored is not None:
                self._answered.add((given.job.case.id, given.job.trial))
            if self._supply.on_probation(given):
                seat.on_probation = ticket
            seat.letter.jobs.append((ticket, given.job))
        return given

    def _even_out(self) -> None:
        """At the end, have those who have jobs waiting give some back while others have nothing to do."""
        idle = sum(max(0, seat.share.told - len(seat.given)) for seat in self._seats if seat.is_live)
        for seat in self._seats:
            if idle > 0 and seat.is_live and seat.waiting > 0 and not seat.letter.recall:
                seat.letter.recall = min(idle, seat.waiting)
                idle -= seat.letter.recall
                self.tell_soon(seat)

    def tell_soon(self, seat: WorkerHandle) -> None:
        """Send a seat's letter at the end of this turn of the loop, with whatever else it has gathered by then."""
        asyncio.get_running_loop().call_soon(self.tell, seat)

    def tell(self, seat: WorkerHandle) -> None:
        if seat.is_live and seat.letter != type(seat.letter)():
            self._post(seat.actor.tell.remote(self._run, seat.next_letter()))

    def _post(self, sending: Any) -> None:
        """Send, and let go of it: a worker that cannot hear any more is noticed in the conversation."""

        async def send() -> None:
            try:
                await sending
            except Exception as error:  # noqa: BLE001
                log.debug("a letter did not arrive: %s", describe(error))

        task: asyncio.Task[None] = asyncio.create_task(send())
        self.posting.add(task)
        task.add_done_callback(self.posting.discard)

    def tell_of_missing(self, now: float) -> None:
        """Say, once for each time, that a worker is not there and the others do its part."""
        for seat in self._seats:
            if not seat.is_live and now > self._expected_until[seat.number] and not seat.is_missed:
                seat.is_missed = True
                log.warning("a worker has not been started for %.0f s: has the cluster a CPU for it?", EXPECTED_SECONDS)

    def guarded(self, act: Callable[[], None]) -> Callable[[], None]:
        """The same, but what it raises ends the run."""

        def guarded() -> None:
            if self.is_over:
                return
            try:
                act()
            except Exception as error:  # noqa: BLE001 - raised where the run is awaited
                self._fail(error)

        return guarded
