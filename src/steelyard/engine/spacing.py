"""When the next call may go: an allowance spread evenly, and a pause that ends gently. Arithmetic on clock readings."""

from __future__ import annotations

import math

from steelyard.rates import RateLimit

_TOLERANCE = 0.01
"""The share of an allowance's period that late sends may catch up on; it is also what that costs of the allowance."""
_LONGEST_TOLERANCE = 0.05
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 30.0
_LONGEST_ASKED = 600.0
"""Seconds that an endpoint may ask all calls to wait, which is as long as one is tried again: no time limit of a case
runs meanwhile, so that nothing else would end the wait."""
_LONGEST_WHILE_ANSWERING = 2.0
_PAUSE_DECAY = 0.5
"""What an answer leaves of the next pause: where less than half of the calls are refused by chance, it stays short."""
_SHORTEST_RAMP_STEP = 0.02
_LONGEST_RAMP_STEP = 0.5
"""Seconds in which, after a pause, the number of calls that were let through doubles: about twice as long as a refusal
takes to come back, so that not many more are sent before it is heard."""
_FIRST_OUTAGE = 10
"""Failures in a row, without any answer, before it is said that an endpoint cannot be reached."""
_LONGEST_OUTAGE = 2.0


class Spacing:
    """Spreads an allowance evenly over its period: the generic cell rate algorithm, with a small tolerance.

    A bucket would let a whole allowance go at once and the next one right behind it; here at most `count` calls of
    one unit begin in any window as long as the period. Timers fire late, and a strict distance between sends would
    lose what they are late: up to 50 ms, at most 1 % of the period, may be caught up on, and the distance is longer
    by as much, so that the allowance holds all the same.
    """

    def __init__(self, rate: RateLimit) -> None:
        self._tolerance = min(_LONGEST_TOLERANCE, _TOLERANCE * rate.per_seconds)
        self._interval = (rate.per_seconds + self._tolerance) / rate.count
        self._free_at = -math.inf

    def ready_at(self) -> float:
        """The clock's reading from which on the next call may go."""
        return self._free_at - self._tolerance

    def take(self, now: float, units: float = 1.0) -> None:
        """Use up so many units of the allowance. A call that is larger than what is left delays those after it."""
        self._free_at = max(now, self._free_at) + units * self._interval

    def correct(self, units: float) -> None:
        """Use up so many units more or, below 0, give so many back."""
        self._free_at += units * self._interval


class Pause:
    """Nobody is let through while an endpoint that said it was overloaded recovers; afterwards not all at once.

    An endpoint that does not say how long is given 0.1 s, twice as long each time it is overloaded again, up to
    30 s, or 2 s where there was an answer in between; each answer takes half of that back. One that asks for more
    than ten minutes, or has refused everything for as long, gets 0.1 s: each call is to fail with what it was told,
    and a run to end instead of standing still.

    After the pause as many as were answered since the one before go at once, and from there on twice as many
    each time that a refusal has had the time to come back.
    """

    def __init__(self) -> None:
        self._began = -math.inf
        self._until = -math.inf
        self._seconds = 0.0
        self._released = 0
        self._ramp_step = _SHORTEST_RAMP_STEP
        self._answers = 0
        """Since the last pause."""
        self._burst = 1
        self._refused_since: float | None = None
        """When it began to refuse everything; None while it answers."""

    def overloaded(self, now: float, sent: float, retry_after: float | None) -> None:
        """Begin or prolong the pause; of calls that were sent before it began only a retry_after is news."""
        retry_after = retry_after or None  # to be asked again at once, and to refuse again, is no advice
        if self._refused_since is None:
            self._refused_since = now
        if max(retry_after or 0.0, now - self._refused_since) > _LONGEST_ASKED:
            retry_after = _FIRST_PAUSE
        if sent >= self._began:
            longest = _LONGEST_WHILE_ANSWERING if self._answers else _LONGEST_PAUSE
            self._seconds = min(longest, max(_FIRST_PAUSE, 2 * self._seconds))
            self._ramp_step = min(_LONGEST_RAMP_STEP, max(_SHORTEST_RAMP_STEP, 2 * (now - sent)))
            self._began, self._burst, self._answers = now, max(1, self._answers), 0
        elif retry_after is None:
            return
        self._until = max(self._until, now + (self._seconds if retry_after is None else retry_after))
        self._released = 0

    def answered(self) -> None:
        """The endpoint can answer: should it be overloaded again, the pause is shorter."""
        self._refused_since = None
        self._answers += 1
        if self._seconds:
            self._seconds = self._seconds * _PAUSE_DECAY if self._seconds > _FIRST_PAUSE else 0.0

    def ready_at(self) -> float:
        """The clock's reading from which on the next call may go: the n-th after a pause waits with log2(n)."""
        if self._released < self._burst:
            return self._until
        return self._until + self._ramp_step * math.log2((1 + self._released) / self._burst)

    def take(self) -> None:
        """One more was let through."""
        self._released += 1


class Outage:
    """Nobody is let through for a moment when call after call has found nobody there.

    One lost connection says little, ten in a row do: then calls wait 0.1 s, twice as long each time, up to 2 s.
    Connecting costs an endpoint that is back nothing, and so all that wait may go when the time is up.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._began = -math.inf
        self._until = -math.inf
        self._seconds = 0.0

    def failed(self, now: float, sent: float) -> None:
        """A call did not get through; one that was sent before the last wait began is no news."""
        self._failures += 1
        if self._failures >= _FIRST_OUTAGE and sent >= self._began:
            self._seconds = min(_LONGEST_OUTAGE, max(_FIRST_PAUSE, 2 * self._seconds))
            self._began, self._until = now, now + self._seconds

    def reached(self) -> None:
        """Somebody is there, whatever was said."""
        if self._failures:
            self._failures, self._seconds, self._until = 0, 0.0, -math.inf

    def ready_at(self) -> float:
        """The clock's reading from which on the next call may go."""
        return self._until
