"""Rate limits of one endpoint: calls and tokens per period, adaptive permits, a pause for all when it is overloaded."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from steelyard.engine.adaptive import Outcome
from steelyard.errors import ConfigurationError, TransientError, TransportError
from steelyard.protocols import InvocationContext, Target, TargetWrapper
from steelyard.records import EvalCase, InvocationResponse
from steelyard.units import RateLimit

_MIN_LEARNING_RATE = 1 / 16
_MINUTE = 60.0


class Sent(msgspec.Struct, gc=False):
    """A send permit: when it was granted, the tokens reserved for the call, and how many calls were in flight then."""

    at: float
    estimate: float
    reserved: float
    in_use: int


class _Waiting(msgspec.Struct, eq=False):
    """A call that waits for a send permit, with what it will need of the token budget."""

    permit: asyncio.Future[Sent]
    estimate: float
    reserved: float


class CallPermits(Protocol):
    """How many calls may be on the wire to one endpoint at once."""

    @property
    def has_room(self) -> bool: ...

    def on_room(self, callback: Callable[[], None]) -> None: ...

    def began(self) -> int: ...

    def ended(self) -> None: ...

    def observe(self, outcome: Outcome, latency: float, in_use: int | None = None) -> None: ...


class FixedPermits:
    """Limit the calls in flight at an endpoint that several callers share: a target and its judge, say."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_use = 0
        self._on_room: list[Callable[[], None]] = []

    @property
    def has_room(self) -> bool:
        """Whether fewer calls are on the wire than are allowed."""
        return self._in_use < self._limit

    def on_room(self, callback: Callable[[], None]) -> None:
        """Have this called whenever a call has left the wire."""
        self._on_room.append(callback)

    def began(self) -> int:
        """A call is sent; how many are on the wire with it."""
        self._in_use += 1
        return self._in_use

    def ended(self) -> None:
        """A call is off the wire, however it ended."""
        self._in_use -= 1
        for callback in self._on_room:
            callback()

    def observe(self, outcome: Outcome, latency: float, in_use: int | None = None) -> None:
        """Learn nothing: the number is given."""


class EndpointLimits:
    """The rate limits that all calls to one endpoint share; first come, first served.

    With `pauses` off, calls to an overloaded endpoint continue as before: for load runs, which measure just that. An
    endpoint that cannot be reached gets short pauses in any case.
    """

    def __init__(
        self,
        *,
        rate: RateLimit | None = None,
        tokens_per_min: int | None = None,
        permits: CallPermits | None = None,
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
        self._outage = Outage()
        self._is_untroubled = not self.is_counted
        """Nothing is counted here, and no call has failed so far: each may be sent at once."""
        self.answers = 0
        """How many calls were answered so far."""
        self._overrun = 0.0
        self._settled = 0
        self._queue: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None
        if permits is not None:
            permits.on_room(self._grant)

    @property
    def is_counted(self) -> bool:
        """Whether there is more than a pause: a limit that all processes of a run must share."""
        return self._rate is not None or self._tokens is not None or self._permits is not None

    @property
    def is_rate_only(self) -> bool:
        """Whether nothing is counted but the calls of a period: then permits can be granted ahead of their time."""
        return self._rate is not None and self._tokens is None and self._permits is None

    @property
    def pauses(self) -> bool:
        """Whether calls pause for a while when the endpoint is overloaded."""
        return self._pause is not None

    @property
    def waiting(self) -> int:
        """How many calls wait for a send permit."""
        return len(self._queue)

    def permit_now(self, estimate: float) -> Sent | None:
        """Return a send permit for a call of about `estimate` tokens; None if it would have to wait."""
        now = self._clock()
        if self._is_untroubled:
            return Sent(now, 0.0, 0.0, 0)
        if self._queue or not self._has_room() or self._ready_at() > now:
            return None
        return self._take(now, estimate, self._to_reserve(estimate))

    def permits_ahead(self, count: int, seconds: float) -> list[Sent]:
        """Grant up to `count` permits for the times to come within these seconds, each for its own time (`at`).

        None while others wait: they came first. For limits that are a rate only.
        """
        now = self._clock()
        granted: list[Sent] = []
        while len(granted) < count and not self._queue and (at := max(now, self._ready_at())) <= now + seconds:
            granted.append(self._take(at, 0.0, 0.0))
        return granted

    async def permit(self, estimate: float, context: InvocationContext) -> Sent:
        """Wait for a send permit; the case's time limit is stopped meanwhile."""
        place = _Waiting(asyncio.get_running_loop().create_future(), estimate, self._to_reserve(estimate))
        self._queue.append(place)
        if len(self._queue) == 1:
            self._set_timer()
        began = self._clock()
        if context.clock is not None:
            context.clock.stop()
        try:
            return await place.permit
        except asyncio.CancelledError:
            self._withdraw(place)
            raise
        finally:
            context.waiting += self._clock() - began
            if context.clock is not None:
                context.clock.start()

    def answered(self, sent: Sent, response: InvocationResponse) -> None:
        """Learn from a call that was answered."""
        self.answers += 1
        if self._is_untroubled:
            return
        self._outage.reached()
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
        """Learn from a call that failed. When the endpoint is overloaded, all calls pause."""
        now = self._clock()
        if self._is_untroubled:
            self._is_untroubled = False
            if self._pause is not None:
                self._pause.answers = self.answers
        # When nothing is known about its tokens they count as used: some endpoints count what they refuse.
        if self._tokens is not None:
            self._settle(self._tokens, sent, _tokens_of(getattr(error, "partial", None)))
        if isinstance(error, TransportError) and error.reply is None:
            self._outage.failed(now, sent.at)
        else:
            self._outage.reached()
        overload = error if isinstance(error, TransientError) and error.overloaded else None
        if overload is not None and self._pause is not None:
            self._pause.overloaded(now, sent.at, overload.retry_after)
        if self._permits is not None:
            self._permits.observe("error" if overload is None else "overloaded", now - sent.at, sent.in_use)

    def cancelled(self, sent: Sent) -> None:
        """Learn nothing from a call that was cancelled or ran out of time; it has ended all the same."""

    def ended(self) -> None:
        """Release the permit of a call, however it ended."""
        if self._permits is not None:
            self._permits.ended()

    def _to_reserve(self, estimate: float) -> float:
        return max(1.0, estimate + self._overrun) if self._tokens is not None else 0.0

    def _has_room(self) -> bool:
        return self._permits is None or self._permits.has_room

    def _ready_at(self) -> float:
        """Return when the next call may be sent, by the clock, if the permits allow one more."""
        ready = self._outage.ready_at()
        if self._pause is not None:
            ready = max(ready, self._pause.ready_at())
        if self._rate is not None:
            ready = max(ready, self._rate.ready_at())
        if self._tokens is not None:
            ready = max(ready, self._tokens.ready_at())
        return ready

    def _take(self, now: float, estimate: float, reserved: float) -> Sent:
        """Grant one permit."""
        if self._pause is not None:
            self._pause.take()
        if self._rate is not None:
            self._rate.take(now)
        if self._tokens is not None:
            self._tokens.take(now, reserved)
        return Sent(now, estimate, reserved, self._permits.began() if self._permits is not None else 0)

    def _withdraw(self, place: _Waiting) -> None:
        """Remove a cancelled call from the queue, or return the permit that it got in the same turn of the loop."""
        if place in self._queue:
            self._queue.remove(place)
        elif not place.permit.cancelled():
            if self._rate is not None:
                self._rate.correct(-1)
            if self._tokens is not None:
                self._tokens.correct(-place.reserved)
            self.ended()
        self._set_timer()

    def _grant(self) -> None:
        """Grant permits to as many calls as may be sent now."""
        now = self._clock()
        while self._queue and self._has_room() and self._ready_at() <= now:
            place = self._queue.popleft()
            if not place.permit.done():  # else it was cancelled a moment ago
                place.permit.set_result(self._take(now, place.estimate, place.reserved))
        self._set_timer()

    def _set_timer(self) -> None:
        """Wake when the first call in the queue may be sent; no timer while none waits or all permits are in use."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue and self._has_room():
            delay = max(0.0, self._ready_at() - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._grant)

    def _settle(self, budget: Spacing, sent: Sent, used: float | None) -> None:
        """Replace the tokens reserved for a call by those it used, where that is known."""
        if used is None:
            return
        budget.correct(used - sent.reserved)
        self._settled += 1
        share = max(_MIN_LEARNING_RATE, 1 / self._settled)
        self._overrun += share * (used - sent.estimate - self._overrun)
        self._set_timer()


class RateLimited(TargetWrapper):
    """A target that waits for a send permit before each call and reports the outcome to the endpoint's limits.

    It belongs inside `Retry`, so that every attempt is counted and a pause delays the retries too. `estimate` returns
    how many tokens a case will use; what it does not cover, such as the length of the answer, is learned.
    """

    def __init__(
        self, target: Target, limits: EndpointLimits, *, estimate: Callable[[EvalCase], float] | None = None
    ) -> None:
        self._target = target
        self.limits = limits
        self._estimate = estimate

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Call the target as soon as there is a send permit."""
        limits = self.limits
        estimate = self._estimate(case) if self._estimate is not None else 0.0
        sent = limits.permit_now(estimate) or await limits.permit(estimate, context)
        try:
            response = await self._target.invoke(case, context)
        except Exception as error:
            limits.failed(sent, error)
            raise
        except asyncio.CancelledError:
            limits.cancelled(sent)
            raise
        finally:
            limits.ended()
        if isinstance(response, InvocationResponse):  # anything else is reported by the case runner
            limits.answered(sent, response)
        return response


def _tokens_of(response: InvocationResponse | None) -> float | None:
    """Return all tokens of a call, as far as they are known."""
    if response is None or (response.num_tokens_input is None and response.num_tokens_output is None):
        return None
    return (response.num_tokens_input or 0) + (response.num_tokens_output or 0)


_TOLERANCE = 0.01
"""The share of the period that late sends may catch up on; it is also how much lower the rate becomes."""
_MAX_TOLERANCE = 0.05
_FIRST_PAUSE = 0.1
_MAX_PAUSE = 30.0
_MAX_RETRY_AFTER = 600.0
"""Seconds that an endpoint may ask all calls to wait, which is as long as a call is retried: the time limits of cases
are stopped meanwhile, so that nothing else would end the wait."""
_MAX_PAUSE_WHILE_ANSWERING = 2.0
_PAUSE_DECAY = 0.5
"""Each answer shortens the next pause by this factor: it stays short while fewer than half are refused."""
_MIN_RAMP_STEP = 0.02
_MAX_RAMP_STEP = 0.5
"""Seconds in which, after a pause, the number of calls sent doubles: about twice as long as a refusal takes to come
back, so that not many more are sent before it is known."""
_FIRST_OUTAGE = 10
"""Failures in a row, without any answer, before an endpoint counts as unreachable."""
_MAX_OUTAGE = 2.0


class Spacing:
    """Spreads a rate limit evenly over its period: the generic cell rate algorithm, with a small tolerance.

    A token bucket would allow a whole period's calls at once and the next period's right after; here at most `count`
    calls of one unit begin in any window as long as the period. Timers fire late, and a strict interval between sends
    would lose that time: up to 50 ms, at most 1 % of the period, may be caught up on, and the interval is longer by as
    much, so that the limit still holds.
    """

    def __init__(self, rate: RateLimit) -> None:
        self._tolerance = min(_MAX_TOLERANCE, _TOLERANCE * rate.per_seconds)
        self._interval = (rate.per_seconds + self._tolerance) / rate.count
        self._free_at = -math.inf

    def ready_at(self) -> float:
        """Return when the next call may be sent, by the clock."""
        return self._free_at - self._tolerance

    def take(self, now: float, units: float = 1.0) -> None:
        """Use up `units` of the rate. A call that is larger than what is left delays those after it."""
        self._free_at = max(now, self._free_at) + units * self._interval

    def correct(self, units: float) -> None:
        """Use up `units` more or, below 0, return them."""
        self._free_at += units * self._interval


class Pause:
    """Holds all calls back while an overloaded endpoint recovers; afterwards releases them step by step.

    An endpoint that does not say how long to wait gets 0.1 s, twice as long each time it is overloaded again, up to
    30 s, or 2 s where there was an answer in between; each answer halves it again. One that asks for more than ten
    minutes, or has refused everything for that long, gets 0.1 s: then each call fails with the endpoint's message, and
    the run ends instead of waiting.

    After the pause as many calls as were answered since the previous one are sent at once, and from then on twice as
    many each time that a refusal has had the time to come back.
    """

    def __init__(self) -> None:
        self._began = -math.inf
        self._until = -math.inf
        self._seconds = 0.0
        self._released = 0
        self._ramp_step = _MIN_RAMP_STEP
        self.answers = 0
        """Since the last pause."""
        self._burst = 1
        self._refused_since: float | None = None
        """When it began to refuse everything; None while it answers."""

    def overloaded(self, now: float, sent: float, retry_after: float | None) -> None:
        """Begin or extend the pause; for calls that were sent before it began, only a retry_after matters."""
        retry_after = retry_after or None  # 0 is no advice: the endpoint would refuse again
        if self._refused_since is None:
            self._refused_since = now
        if max(retry_after or 0.0, now - self._refused_since) > _MAX_RETRY_AFTER:
            retry_after = _FIRST_PAUSE
        if sent >= self._began:
            longest = _MAX_PAUSE_WHILE_ANSWERING if self.answers else _MAX_PAUSE
            self._seconds = min(longest, max(_FIRST_PAUSE, 2 * self._seconds))
            self._ramp_step = min(_MAX_RAMP_STEP, max(_MIN_RAMP_STEP, 2 * (now - sent)))
            self._began, self._burst, self.answers = now, max(1, self.answers), 0
        elif retry_after is None:
            return
        self._until = max(self._until, now + (self._seconds if retry_after is None else retry_after))
        self._released = 0

    def answered(self) -> None:
        """Shorten the next pause: the endpoint can answer."""
        self._refused_since = None
        self.answers += 1
        if self._seconds:
            self._seconds = self._seconds * _PAUSE_DECAY if self._seconds > _FIRST_PAUSE else 0.0

    def ready_at(self) -> float:
        """Return when the next call may be sent: the n-th after a pause waits in proportion to log2(n)."""
        if self._released < self._burst:
            return self._until
        return self._until + self._ramp_step * math.log2((1 + self._released) / self._burst)

    def take(self) -> None:
        """Count one more call that was sent."""
        self._released += 1


class Outage:
    """Holds all calls back for a moment after several in a row could not connect.

    One lost connection says little, ten in a row do: then calls wait 0.1 s, twice as long each time, up to 2 s.
    Connecting costs a recovered endpoint nothing, so all waiting calls may be sent when the time is up.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._began = -math.inf
        self._until = -math.inf
        self._seconds = 0.0

    def failed(self, now: float, sent: float) -> None:
        """Count a call that could not connect; one that was sent before the last wait began changes nothing."""
        self._failures += 1
        if self._failures >= _FIRST_OUTAGE and sent >= self._began:
            self._seconds = min(_MAX_OUTAGE, max(_FIRST_PAUSE, 2 * self._seconds))
            self._began, self._until = now, now + self._seconds

    def reached(self) -> None:
        """Reset: the endpoint replied, whatever it said."""
        if self._failures:
            self._failures, self._seconds, self._until = 0, 0.0, -math.inf

    def ready_at(self) -> float:
        """Return when the next call may be sent, by the clock."""
        return self._until
