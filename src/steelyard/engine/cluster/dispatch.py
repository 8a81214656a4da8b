"""What workers are told: their shares, their jobs, and that there are no more."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

from steelyard.contracts import Cancellation, Permits
from steelyard.engine.adaptive import AdaptivePermits
from steelyard.engine.cluster.seat import Seat
from steelyard.engine.cluster.shares import share_out
from steelyard.engine.cluster.supply import NOT_YET, Given, Supply
from steelyard.errors import describe

log = logging.getLogger("steelyard")

EXPECTED_SECONDS = 10.0
"""How long a worker that is being started has its share kept for it; then the others have it meanwhile."""
_ROUNDS = 8
"""In how many parts each worker gets the jobs that it wants."""


class Dispatch:
    """Hands out jobs and shares to the seats of one run."""

    def __init__(
        self,
        run: int,
        seats: list[Seat],
        supply: Supply,
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

    def expect(self, seat: Seat) -> None:
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

    def settle(self, given: Given) -> None:
        """A job has ended, or is to be handed out again."""
        self._answered.discard((given.job.case.id, given.job.trial))

    @property
    def weighed(self) -> int:
        """How many cases have their answer and have not ended."""
        return len(self._answered)

    def feed(self, seats: list[Seat]) -> None:
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

    def _wanted(self, seat: Seat) -> int:
        return seat.wants(ahead=not self._supply.is_running_out) if seat.is_live else 0

    def _hand_out(self, seat: Seat, count: int) -> Given | str | None:
        """Give a worker up to so many jobs; the last of them, NOT_YET, or None when there was none for it."""
        given: Given | str | None = None
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

    def tell_soon(self, seat: Seat) -> None:
        """Send a seat's letter at the end of this turn of the loop, with whatever else it has gathered by then."""
        asyncio.get_running_loop().call_soon(self.tell, seat)

    def tell(self, seat: Seat) -> None:
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
