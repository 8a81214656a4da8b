"""Open-loop load: calls are sent at planned times, whatever became of those before them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal, get_args

import msgspec
from msgspec import UNSET

from steelyard.errors import ConfigurationError, suggestion
from steelyard.protocols import derived_rng
from steelyard.stats.metrics import SendCounts, WorkerSends
from steelyard.units import RateLimit, parse_rate

Kind = Literal["constant", "poisson"]

LATE_AFTER = 0.01
EARLY_ENOUGH = 0.0005
"""Seconds: timers of some loops count in whole milliseconds and fire as much too soon."""


class Arrivals(msgspec.Struct, frozen=True):
    """When calls are to be sent: at even distances, or at random as independent people would."""

    kind: Kind
    rate: RateLimit

    def offsets(self, seed: int = 0) -> Iterator[float]:
        """Seconds from the start to each send, without end; the same ones for the same seed."""
        return self._at_random(seed) if self.kind == "poisson" else self._evenly()

    def _evenly(self) -> Iterator[float]:
        # Multiplied, not added up: after a million sends the error is still one rounding.
        return (number * self.rate.per_seconds / self.rate.count for number in itertools.count())

    def _at_random(self, seed: int) -> Iterator[float]:
        between = derived_rng(seed, "arrivals", 0).expovariate
        return itertools.accumulate(between(self.rate.per_second) for _ in itertools.count())


def parse_arrivals(value: object, name: str = "arrivals") -> Arrivals:
    """The arrivals that are written as `constant:20/s` or `poisson:600/min`."""
    kind, colon, rate = value.partition(":") if isinstance(value, str) else ("", "", "")
    kind = kind.strip().lower()
    if not colon:
        raise ConfigurationError(f"{name} must be like constant:20/s or poisson:20/s, got {value!r}")
    if kind not in get_args(Kind):
        raise ConfigurationError(f"{name}: unknown kind {kind!r}; {suggestion(kind, get_args(Kind))}")
    return Arrivals("poisson" if kind == "poisson" else "constant", parse_rate(rate, f"{name}: the rate after {kind}:"))


class Schedule:
    """Plans when calls are sent, until the duration is over or `count` were sent (see `protocols.Pace`).

    Times are absolute, so that lateness does not add up. A send that comes late is made at once; one that could
    not be made before the duration was over is not made any more, and counts as missed.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        *,
        duration: float | None = None,
        count: int | None = None,
        seed: int = 0,
        late_after: float = LATE_AFTER,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._arrivals = arrivals
        self._duration = float("inf") if duration is None else duration
        self._count = count
        self._seed = seed
        self._late_after = late_after
        self._clock = clock
        self._sleep = sleep
        self._offsets = self._planned_offsets()
        self._began: float | None = None
        self._sends = WorkerSends()
        self._workers: dict[str, WorkerSends] = {}

    async def next_send(self) -> float | None:
        """Wait for the next planned time and return it, by the clock; None when there are no more."""
        if self._began is None:
            self.begin(self._clock())
        assert self._began is not None
        offset = next(self._offsets, None)
        if offset is None or self._clock() >= self._began + self._duration:
            return None
        planned = self._began + offset
        while (ahead := planned - self._clock()) > EARLY_ENOUGH:
            await self._sleep(ahead)
        self._sends.note(self._clock() - planned, self._late_after)
        return planned

    # Where workers send, each its part of the arrivals

    def begin(self, at: float) -> None:
        """Have the schedule begin at this reading of the clock."""
        self._began = at

    def planned(self) -> Iterator[float]:
        """Yield when each call is to be sent, by the clock; `begin` comes before."""
        assert self._began is not None
        return (self._began + offset for offset in self._planned_offsets())

    @property
    def ends_at(self) -> float | None:
        """When nothing is sent any more, by the clock; None without a duration."""
        return None if self._began is None or self._duration == float("inf") else self._began + self._duration

    def count_worker(self, name: str, sends: WorkerSends) -> None:
        """Count what a worker, or the one that took its place, has sent."""
        self._sends.add(sends)
        self._workers.setdefault(name, WorkerSends()).add(sends)

    def counts(self) -> SendCounts:
        """Return what became of the sends that were planned until now."""
        elapsed = 0.0 if self._began is None else min(self._clock() - self._began, self._duration)
        due = sum(1 for _ in itertools.takewhile(lambda offset: offset < elapsed, self._planned_offsets()))
        sends = self._sends
        planned = max(due, sends.sent)
        return SendCounts(
            planned=planned,
            sent=sends.sent,
            late=sends.late,
            missed=planned - sends.sent,
            late_after=self._late_after,
            worst_lateness=sends.worst_lateness,
            workers=self._workers or UNSET,
        )

    def _planned_offsets(self) -> Iterator[float]:
        offsets = itertools.takewhile(lambda offset: offset < self._duration, self._arrivals.offsets(self._seed))
        return itertools.islice(offsets, self._count)
