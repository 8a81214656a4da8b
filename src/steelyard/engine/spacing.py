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
_PAUSE_DECAY = 0.9
_RAMP_STEP = 0.02
"""Seconds in which, after a pause, the number of calls that were let through doubles."""


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
    30 s; each answer takes a tenth of that back. One that asks for more than ten minutes, or has refused everything
    for as long, gets 0.1 s: each call is to fail with what it was told, and a run to end instead of standing still.
    """

    def __init__(self) -> None:
        self._began = -math.inf
        self._until = -math.inf
        self._seconds = 0.0
        self._released = 0
        self._refused_since: float | None = None
        """When it began to refuse everything; None while it answers."""

    def overloaded(self, now: float, sent: float, retry_after: float | None) -> None:
        """Begin or prolong the pause; of calls that were sent before it began only a retry_after is news."""
        if self._refused_since is None:
            self._refused_since = now
        if max(retry_after or 0.0, now - self._refused_since) > _LONGEST_ASKED:
            retry_after = _FIRST_PAUSE
        if sent >= self._began:
            self._seconds = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self._seconds))
            self._began = now
        elif retry_after is None:
            return
        self._until = max(self._until, now + (self._seconds if retry_after is None else retry_after))
        self._released = 0

    def answered(self) -> None:
        """The endpoint can answer: should it be overloaded again, the pause is shorter."""
        self._refused_since = None
        if self._seconds:
            self._seconds = self._seconds * _PAUSE_DECAY if self._seconds > _FIRST_PAUSE else 0.0

    def ready_at(self) -> float:
        """The clock's reading from which on the next call may go: the n-th after a pause waits with log2(n)."""
        return self._until + _RAMP_STEP * math.log2(1 + self._released) if self._released else self._until

    def take(self) -> None:
        """One more was let through."""
        self._released += 1
