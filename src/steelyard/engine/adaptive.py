"""Finds how many calls at once an endpoint handles, while the run goes on: `parallelism: auto`."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from steelyard.errors import ConfigurationError

Outcome = Literal["ok", "overloaded", "error"]

_START = 4
_IN_USE = 0.9
"""The share of the permits that must have been in use before their number grows."""
_FAR_BELOW = 0.7
"""The share of the permits below which a refusal does not say that they are too many."""
_OFTEN = 0.1
"""The share of calls that are refused above which one step down is not enough."""
_AFTER_OVERLOAD = 0.85
_DEEPEST_CUT = 0.5
_AFTER_INFLATION = 0.7
_MIN_ANSWERS = 64
"""Answers after a cut, and at least four times the permits, before its effect on throughput is judged."""
_NO_GAIN = 0.2
"""Throughput that grows with less than this power of the parallelism is not worth its latency."""
_REAL_GAIN = 0.4
"""... and where it grows with more than this one, a cut is taken back."""
_ROUNDS_BEFORE_PROBE = 16
_FIRST_REST = 20
_MAX_REST = 80
"""A ceiling is probed again after this many times the time it took to get back below it; doubled each time it held."""
_FAR_ENOUGH = 1.4
"""How far above a ceiling that no longer holds a gain must show."""
_REMEMBERED = 32
_MAX_HISTORY = 512


class AdaptivePermits:
    """Allows more calls while that brings more answers, fewer when the endpoint says or shows that it has too many.

    A round is as many answers as there are permits. Their number doubles each round until the first sign of trouble,
    and then grows by small steps to just below the ceiling: where a call was refused last. The ceiling is tried
    again from time to time, and forgotten when it holds no more.

    A refused call takes the number to one less than there were calls on the wire; when refusals go on, to a fraction
    of that. It counts once: calls sent before the last cut, or with more on the wire than are allowed by now, only
    repeat what is known. A single refusal where all went well before is forgiven.

    Longer latencies alone are no reason: answers differ in length, and an endpoint that batches is slower and does
    more. What counts is whether more calls at once brought more answers a second. Where clearly not, the number is
    cut, and the cut put to the test: if throughput falls with it, it was wrong and is taken back; if not, it goes on.
    Latencies enter as logarithms, so that a few very long answers do not decide, and with their standard error.
    """

    def __init__(
        self, maximum: int, minimum: int = 1, start: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not 1 <= minimum <= maximum:
            raise ConfigurationError(f"permits must be at least 1 and at most {maximum}, got a minimum of {minimum}")
        self._maximum = maximum
        self._minimum = minimum
        self._allowed = min(max(_START if start is None else start, minimum), maximum)
        self._clock = clock
        self._began = self._cut_at = self._level_since = clock()
        self._doubling = True
        self._step = 1
        self._ceiling: int | None = None
        self._rested = 0
        self._back_at = 0.0
        self._rest = _FIRST_REST
        self._probed_from = 0
        self._cut_from = self._allowed
        self._in_use = 0
        self._burst = 0
        self._burst_refused = 0
        self._proven = 0
        self._refused = False
        self._refused_share = 0.0
        self._answers = 0
        self._sample = LatencySample()
        self._remembered: deque[LatencySample] = deque(maxlen=_REMEMBERED)
        self._on_trial: LatencySample | None = None
        self._settling = False
        self._doubted: LatencySample | None = None
        self._on_change: list[Callable[[], None]] = []
        self._on_room: list[Callable[[], None]] = []
        self._on_answered: list[Callable[[str, int], None]] = []
        self.history: list[tuple[float, int, str]] = [(0.0, self._allowed, "start")]
        """Seconds since the beginning, how many were allowed from then on, and why; thinned out when it grows long."""

    @property
    def allowed(self) -> int:
        return self._allowed

    @property
    def current(self) -> int:
        """The number as it is shown: the same as `allowed`."""
        return self._allowed

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have this called whenever `allowed` has changed."""
        self._on_change.append(callback)

    def on_room(self, callback: Callable[[], None]) -> None:
        """Have this called whenever one more call might be sent: one has left the wire, or more are allowed."""
        self._on_room.append(callback)

    def on_answered(self, callback: Callable[[str, int], None]) -> None:
        """Have this called with the id and trial of each case that has its answer."""
        self._on_answered.append(callback)

    @property
    def has_room(self) -> bool:
        """Whether fewer calls are on the wire than are allowed."""
        return self._in_use < self._allowed

    def answered(self, case_id: str, trial: int) -> None:
        """Report that a case has its answer: the time of its scoring is not the endpoint's."""
        for callback in self._on_answered:
            callback(case_id, trial)

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
        """Learn the outcome of a call that took `latency` seconds, sent when `in_use` calls were in flight."""
        now = self._clock()
        beside = self._allowed if in_use is None else in_use
        if outcome == "overloaded":
            fresh = now - latency >= self._cut_at
            self._burst_refused += not fresh
            if beside <= self._allowed and not self._is_forgiven(beside):
                self._cut_for_overload(now, beside, fresh=fresh)
        elif outcome == "ok" and latency > 0 and now - latency >= self._level_since:
            self._sample.add(latency, beside)
            self._refused_share -= self._refused_share / max(_MIN_ANSWERS, self._allowed)
            self._answers += 1
            if self._answers >= self._allowed:
                if not self._refused:
                    self._proven = max(self._proven, self._sample.most_in_use)
                self._answers, self._refused = 0, False
                self._end_round(now)

    def _is_forgiven(self, beside: int) -> bool:
        """Whether a refusal is chance: it is seldom, and a whole round went well there; some endpoints do that."""
        self._refused_share += (1 - self._refused_share) / max(_MIN_ANSWERS, self._allowed)
        first, self._refused = not self._refused, True
        if beside > self._proven or self._refused_share > _OFTEN:
            return False
        return first or beside <= _FAR_BELOW * self._allowed

    def _cut_for_overload(self, now: float, beside: int, *, fresh: bool) -> None:
        """Go below what was refused; by a call from before the last cut, no deeper than that cut might have gone."""
        if fresh:
            self._cut_from = self._allowed
            self._burst, self._burst_refused = max(self._in_use, beside), 1
            self._lengthen_rest()
        below = _AFTER_OVERLOAD * beside if self._refused_share > _OFTEN else beside - 1
        allowed = int(max(below, _DEEPEST_CUT * self._cut_from))
        if fresh or allowed < self._allowed:
            self._on_trial = None
            self._cut(now, allowed, "overloaded")
            self._ceiling = max(beside, self._allowed + 1)

    def _lengthen_rest(self) -> None:
        """Wait longer for the next probe when the ceiling of the last one held."""
        held = self._allowed <= 2 * self._probed_from
        self._rest = min(_MAX_REST, 2 * self._rest) if held else _FIRST_REST

    def _cut(self, now: float, allowed: int, reason: str) -> None:
        self._cut_at = now
        self._burst = self._burst if reason == "overloaded" else 0
        self._proven = min(self._proven, allowed)
        self._doubted = None
        self._doubling = False
        self._step = 1
        self._set(now, allowed, reason)

    def _end_round(self, now: float) -> None:
        """As many answers came as there are permits: is there a reason to change their number?"""
        sample, trial = self._sample, self._on_trial
        if self._burst - self._burst_refused > self._allowed:
            self._allow_what_was_not_refused(now)
        elif trial is not None:
            if self._settling:  # the first answers come from the queue of before
                self._settling, self._sample = False, LatencySample()
            elif sample.answers >= max(_MIN_ANSWERS, 4 * self._allowed):
                self._judge_cut(now, trial, sample)
        elif sample.most_in_use < _IN_USE * self._allowed:
            return
        elif not sample.judged and self._is_inflated(sample):
            self._cut_for_latency(now, sample)
        else:
            sample.judged = True
            self._grow(now)

    def _allow_what_was_not_refused(self, now: float) -> None:
        """Correct a cut: the calls of a burst may have arrived in another order than they were sent in."""
        allowed, self._burst = self._burst - self._burst_refused, 0
        self._set(now, allowed, "as many as were not refused")
        self._ceiling = max(self._ceiling or 0, self._allowed + 1)

    def _is_inflated(self, sample: LatencySample) -> bool:
        """Whether throughput clearly failed to grow since there were half as many calls on the wire, or fewer."""
        if self._doubted is not None and sample.level >= _FAR_ENOUGH * self._doubted.level:
            doubted, self._doubted = self._doubted, None
            if throughput_gain(doubted, sample)[0] < _NO_GAIN:
                return True
        for earlier in self._remembered:
            if earlier.level <= sample.level / 2:
                gain, error = throughput_gain(earlier, sample)
                if gain + 2 * error < _NO_GAIN:
                    return True
        return False

    def _cut_for_latency(self, now: float, sample: LatencySample, *, confirmed: bool = False) -> None:
        if not confirmed:
            self._lengthen_rest()
        sample.allowed, sample.confirmed = self._allowed, confirmed
        self._cut(now, int(_AFTER_INFLATION * self._allowed), "latency")
        self._ceiling = self._allowed + 1
        self._on_trial = sample if self._allowed < sample.allowed else None
        self._settling = True

    def _judge_cut(self, now: float, before: LatencySample, after: LatencySample) -> None:
        """Keep cutting where it cost no throughput; else undo the last cut."""
        gain, _ = throughput_gain(after, before)
        self._on_trial = None
        if gain < _NO_GAIN:
            self._cut_for_latency(now, after, confirmed=True)
        elif before.confirmed or gain < _REAL_GAIN:
            self._set(now, before.allowed, "a cut too many")
            self._ceiling = before.allowed + 1
        else:  # not even the first cut helped: lower levels were faster for another reason
            self._remembered.clear()
            self._set(now, before.allowed, "latency was not its doing")
            self._ceiling = None

    def _grow(self, now: float) -> None:
        if self._allowed == self._maximum:
            return
        if self._doubling:
            self._set(now, 2 * self._allowed, "doubled")
        elif self._ceiling is None:
            self._set(now, self._allowed + self._step, "above the old ceiling")
            self._step = min(2 * self._step, self._allowed)
        elif self._allowed + 1 < self._ceiling:
            self._set(now, min(self._allowed + math.isqrt(self._allowed), self._ceiling - 1), "increased")
        else:
            self._rest_or_probe(now)

    def _rest_or_probe(self, now: float) -> None:
        """Stay right below the ceiling, and see from time to time whether it is still there."""
        if self._rested == 0:
            self._back_at = now
        self._rested += 1
        rested_enough = now - self._back_at >= self._rest * (self._back_at - self._cut_at)
        if self._rested >= _ROUNDS_BEFORE_PROBE and rested_enough:
            self._probed_from, self._doubted, self._ceiling = self._allowed, self._sample, None
            self._set(now, self._allowed + 1, "probe")

    def _set(self, now: float, allowed: int, reason: str) -> None:
        """Change the number; what is learned from here on is about the new one."""
        allowed = min(max(allowed, self._minimum), self._maximum)
        if self._sample.answers:
            self._remembered.append(self._sample)
        self._sample = LatencySample()
        self._answers = self._rested = 0
        self._level_since = now
        if allowed == self._allowed:
            return
        self._allowed = allowed
        self.history.append((now - self._began, allowed, reason))
        if len(self.history) > _MAX_HISTORY:
            self.history[:] = [self.history[0], *self.history[2:-1:2], self.history[-1]]
        for callback in (*self._on_change, *self._on_room):
            callback()


class PermitsShare:
    """Permits that several runs share, as one of them sees them: it hears of the answers to its own cases alone."""

    def __init__(self, shared: AdaptivePermits) -> None:
        self.shared = shared
        self.on_change = shared.on_change
        self._on_answered: list[Callable[[str, int], None]] = []

    @property
    def allowed(self) -> int:
        return self.shared.allowed

    @property
    def has_room(self) -> bool:
        """Whether fewer calls are on the wire than are allowed."""
        return self.shared.has_room

    @property
    def history(self) -> list[tuple[float, int, str]]:
        """How many were allowed, from when on, and why."""
        return self.shared.history

    def on_answered(self, callback: Callable[[str, int], None]) -> None:
        """Have this called with the id and trial of each case of this run that has its answer."""
        self._on_answered.append(callback)

    def answered(self, case_id: str, trial: int) -> None:
        """Report that a case of this run has its answer."""
        for callback in self._on_answered:
            callback(case_id, trial)


class LatencySample:
    """The answers at one level: how many, and mean and spread of the logarithms of their latencies."""

    __slots__ = ("_beside", "_squares", "allowed", "answers", "confirmed", "judged", "mean", "most_in_use")

    def __init__(self) -> None:
        self.answers = 0
        self.mean = 0.0
        self.most_in_use = 0
        self.allowed = 0
        """How many calls were allowed, when a cut was made for what this sample shows."""
        self.confirmed = False
        """Whether an earlier cut for latency had proved right by then."""
        self.judged = False
        self._squares = 0.0
        self._beside = 0

    def add(self, latency: float, beside: int) -> None:
        """Add an answer to a call that was sent when `beside` calls were in flight."""
        self.answers += 1
        logarithm = math.log(latency)
        off = logarithm - self.mean
        self.mean += off / self.answers
        self._squares += off * (logarithm - self.mean)
        self._beside += beside
        self.most_in_use = max(self.most_in_use, beside)

    @property
    def level(self) -> float:
        """How many calls were on the wire, on average."""
        return self._beside / self.answers

    def variance_with(self, other: LatencySample) -> float:
        """Of the logarithms, in both samples together; without end when there are too few to tell."""
        freedom = self.answers + other.answers - 2
        return (self._squares + other._squares) / freedom if freedom >= 4 else math.inf


def throughput_gain(lower: LatencySample, higher: LatencySample) -> tuple[float, float]:
    """The power of the parallelism with which throughput grew from the lower level to the higher, and its error.

    1 when twice as many calls bring twice as many answers, 0 when they only wait twice as long. By Little's law
    answers a second are calls on the wire over their latency, so that latencies tell, and no clock runs through the
    gaps in which nothing was sent.
    """
    growth = math.log(higher.level / lower.level)
    if growth <= 0:
        return 1.0, math.inf
    error = math.sqrt(lower.variance_with(higher) * (1 / lower.answers + 1 / higher.answers))
    return 1 - (higher.mean - lower.mean) / growth, error / growth
