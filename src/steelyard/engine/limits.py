"""How fast one endpoint may be asked: a rate, a token budget, and a pause for all when it has too much to do."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

import msgspec

from steelyard.contracts import InvocationContext, Target, TargetAround
from steelyard.engine.adaptive import AdaptivePermits
from steelyard.engine.spacing import Pause, Spacing
from steelyard.errors import ConfigurationError, TransientError
from steelyard.rates import RateLimit
from steelyard.records import EvalCase, InvocationResponse

_SLOWEST_LEARNING = 1 / 16
_MINUTE = 60.0


class Sent(msgspec.Struct, gc=False):
    """A call that was given leave: when, what was set aside for it, and how many were on the wire with it."""

    at: float
    estimate: float
    reserved: float
    in_use: int


class EndpointLimits:
    """What all calls to one endpoint share; first come, first served.

    With `pauses` off, an endpoint that is overloaded is asked on as before: for load runs, which measure just that.
    """

    def __init__(
        self,
        *,
        rate: RateLimit | None = None,
        tokens_per_min: int | None = None,
        permits: AdaptivePermits | None = None,
        pauses: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if tokens_per_min is not None and tokens_per_min < 1:
            raise ConfigurationError(f"tokens_per_min must be >= 1, got {tokens_per_min}")
        self._clock = clock
        self._permits = permits
        self._rate = Spacing(rate) if rate is not None else None
        self._tokens = Spacing(RateLimit(tokens_per_min, _MINUTE)) if tokens_per_min is not None else None
        self._pause = Pause() if pauses else None
        self._overrun = 0.0
        self._settled = 0
        self._queue: deque[tuple[asyncio.Future[None], float]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_counted(self) -> bool:
        """Whether there is more than a pause: something of which there must be one for all calls, wherever made."""
        return self._rate is not None or self._tokens is not None or self._permits is not None

    @property
    def pauses(self) -> bool:
        """Whether an endpoint that is overloaded is left alone for a while."""
        return self._pause is not None

    @property
    def waiting(self) -> int:
        """How many calls wait for leave to be sent."""
        return len(self._queue)

    def leave_now(self, estimate: float) -> Sent | None:
        """Leave to send a call of about so many tokens, if it can be had without waiting."""
        now = self._clock()
        if self._queue or self._ready_at() > now:
            return None
        reserved = self._to_reserve(estimate)
        self._take(now, reserved)
        return self._sent(now, estimate, reserved)

    async def leave(self, estimate: float, context: InvocationContext) -> Sent:
        """The same, waiting for it; meanwhile the case's own time stands still."""
        reserved = self._to_reserve(estimate)
        await self._wait(reserved, context)
        return self._sent(self._clock(), estimate, reserved)

    def answered(self, sent: Sent, response: InvocationResponse) -> None:
        """A call came back with this."""
        if self._tokens is not None:
            self._settle(self._tokens, sent, _tokens_of(response))
        if self._pause is not None:
            self._pause.answered()
        if self._permits is not None:
            latency = response.time_to_last_token
            if latency is None:
                latency = self._clock() - sent.at
            self._permits.observe("ok" if response.error is None else "error", latency, sent.in_use)

    def failed(self, sent: Sent, error: Exception) -> None:
        """A call ended in this. An endpoint that is overloaded is left alone, by all calls."""
        now = self._clock()
        # Without a word about tokens they count as used: some endpoints count what they refuse.
        if self._tokens is not None:
            self._settle(self._tokens, sent, _tokens_of(getattr(error, "partial", None)))
        overload = error if isinstance(error, TransientError) and error.overloaded else None
        if overload is not None and self._pause is not None:
            self._pause.overloaded(now, sent.at, overload.retry_after)
        if self._permits is not None:
            self._permits.observe("error" if overload is None else "overloaded", now - sent.at, sent.in_use)

    def ended(self) -> None:
        """A call that was given leave is over, however it ended."""
        if self._permits is not None:
            self._permits.ended()

    def _to_reserve(self, estimate: float) -> float:
        return max(1.0, estimate + self._overrun) if self._tokens is not None else 0.0

    def _sent(self, now: float, estimate: float, reserved: float) -> Sent:
        return Sent(now, estimate, reserved, self._permits.began() if self._permits is not None else 0)

    def _ready_at(self) -> float:
        """The clock's reading from which on the next call may go."""
        ready = self._pause.ready_at() if self._pause is not None else -math.inf
        if self._rate is not None:
            ready = max(ready, self._rate.ready_at())
        if self._tokens is not None:
            ready = max(ready, self._tokens.ready_at())
        return ready

    def _take(self, now: float, tokens: float) -> None:
        if self._pause is not None:
            self._pause.take()
        if self._rate is not None:
            self._rate.take(now)
        if self._tokens is not None:
            self._tokens.take(now, tokens)

    async def _wait(self, tokens: float, context: InvocationContext) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (place, tokens)
        self._queue.append(entry)
        if len(self._queue) == 1:
            self._set_timer()
        began = self._clock()
        if context.clock is not None:
            context.clock.stop()
        try:
            await place
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise
        finally:
            context.waiting += self._clock() - began
            if context.clock is not None:
                context.clock.start()

    def _withdraw(self, entry: tuple[asyncio.Future[None], float]) -> None:
        """Take a cancelled call out of the queue; or give back what it was given in the same turn of the loop."""
        if entry in self._queue:
            self._queue.remove(entry)
        else:
            if self._rate is not None:
                self._rate.correct(-1)
            if self._tokens is not None:
                self._tokens.correct(-entry[1])
        self._set_timer()

    def _let_through(self) -> None:
        """Give leave to as many as may go now."""
        now = self._clock()
        while self._queue and self._ready_at() <= now:
            place, tokens = self._queue.popleft()
            self._take(now, tokens)
            if not place.done():
                place.set_result(None)
        self._set_timer()

    def _set_timer(self) -> None:
        """Wake when the first in the queue may go; nobody waits, no timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue:
            delay = max(0.0, self._ready_at() - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._let_through)

    def _settle(self, budget: Spacing, sent: Sent, used: float | None) -> None:
        """Put what a call really used, where that is known, in place of what was set aside for it."""
        if used is None:
            return
        budget.correct(used - sent.reserved)
        self._settled += 1
        share = max(_SLOWEST_LEARNING, 1 / self._settled)
        self._overrun += share * (used - sent.estimate - self._overrun)
        self._set_timer()


class Limited(TargetAround):
    """A target that asks for leave before each call and tells the endpoint's limits how it went.

    It belongs inside `Retrying`, so that every try is counted and a pause holds up the retries too. `estimate` says
    how many tokens a case will come to; what it leaves out, the answer's own length for one, is learned.
    """

    def __init__(
        self, target: Target, limits: EndpointLimits, *, estimate: Callable[[EvalCase], float] | None = None
    ) -> None:
        self._target = target
        self._limits = limits
        self._estimate = estimate

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """The target's answer, asked for when there is leave."""
        limits = self._limits
        estimate = self._estimate(case) if self._estimate is not None else 0.0
        sent = limits.leave_now(estimate) or await limits.leave(estimate, context)
        try:
            response = await self._target.invoke(case, context)
        except Exception as error:
            limits.failed(sent, error)
            raise
        finally:
            limits.ended()
        if isinstance(response, InvocationResponse):  # else not ours to judge: the work names it for what it is
            limits.answered(sent, response)
        return response


def _tokens_of(response: InvocationResponse | None) -> float | None:
    """All tokens of a call, as far as they are known."""
    if response is None or (response.num_tokens_input is None and response.num_tokens_output is None):
        return None
    return (response.num_tokens_input or 0) + (response.num_tokens_output or 0)
