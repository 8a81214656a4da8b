"""Client load: how late Steelyard's event loop runs and how busy it is, and whether that bent a measurement."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated

import msgspec
import numpy as np

from steelyard.stats.figures import Figure
from steelyard.stats.formatting import format_seconds
from steelyard.stats.sketch import PercentileSketch

TICK = 0.02
"""Seconds between two ticks: fine enough to see what hurts a measurement, too rare to cost anything."""

DRIVER = "the driver"
"""The `process` of figures about the process that owns a run on workers."""

BUSY = 0.9
"""CPU share from which the event loop's thread counts as saturated."""

LATE = 0.02
"""Seconds of event-loop lag, at the 99th percentile, below which the client is not the bottleneck."""

DRIVER_LATE = 0.05
"""The same of a driver, whose workers have work for a while: lateness that they feel."""

_MIN_LATE_TICKS = 3
"""Ticks that must be late: in a short measurement one hiccup of the machine is the 99th percentile."""

LATE_SHARE = 0.1
"""... and the share of the median time to first token from which lag distorts it."""

STOOD_STILL = 30.0
"""Seconds without a tick from which the whole process counts as suspended or stopped."""

MIN_SECONDS = 0.2
"""Seconds that must be observed before the client is judged: importing and connecting keep any loop busy."""

_FOLD_EVERY = 1024
_WORST = ("loop_lag_p50", "loop_lag_p99", "loop_lag_max", "loop_lag_sustained")
_EARLIER = "in an earlier launch "

_TIME = Figure("seconds", None, "client")
_LOOP_LAG = Figure("seconds", "lower", "client")
_BUSY = Figure("ratio", "lower", "client")


class ClientLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy this process was during a measurement, and whether it was the bottleneck."""

    seconds: Annotated[float, _TIME]
    """How long it was observed, without the time it was suspended."""
    loop_lag_p50: Annotated[float, _LOOP_LAG]
    loop_lag_p99: Annotated[float, _LOOP_LAG]
    loop_lag_max: Annotated[float, _LOOP_LAG]
    loop_lag_sustained: Annotated[float, _LOOP_LAG]
    """The 99th percentile or, where that would be one or two ticks, the third largest lag."""
    cpu_share: Annotated[float, _BUSY]
    """CPU time of all threads over the time observed: 1.0 is one whole core."""
    loop_cpu_share: Annotated[float, _BUSY]
    """The same of the event loop's thread alone."""
    peak_rss: Annotated[int | None, Figure("bytes", "lower", "client")] = None
    """Peak memory of the process so far, in bytes; None where the system does not report it."""
    stood_still: Annotated[float, _LOOP_LAG] = 0.0
    """Seconds in which the whole process seems to have been suspended: each such time counts as one late tick."""
    bottleneck: bool = False
    reason: str | None = None
    """Why it was, in words."""
    launches: Annotated[int, Figure("count", None, "client")] = 1
    """Number of launches of the run that these figures cover."""
    process: str | None = None
    """Which process these figures are of, where a run has several: its busiest worker, or its driver."""

    @property
    def remedy(self) -> str | None:
        """What to do where the client was the bottleneck; None where no option helps."""
        if not self.bottleneck or self.process == DRIVER:
            return None
        if self.process is None:
            return "spread the calls over processes: --workers N, or engine=ProcessEngine(N) in Python"
        return "spread the calls over more workers: --workers"


def judge_client(load: ClientLoad, p50_first_token: float | None) -> ClientLoad:
    """Return the load with its verdict: the client was the bottleneck when its loop was saturated, or late.

    Late means that the sustained lag is large in itself and against the median time to first token (to the last one
    where nothing streamed); None where nothing was measured that it could have distorted.
    """
    reason = None
    if load.seconds + load.stood_still >= MIN_SECONDS:
        whose = "its" if load.process is None else f"{load.process}'s"
        if load.loop_cpu_share >= BUSY:
            reason = f"{whose} event loop was busy {load.loop_cpu_share:.0%} of the time"
        elif p50_first_token is not None and load.loop_lag_sustained >= max(LATE, LATE_SHARE * p50_first_token):
            reason = (
                f"{whose} event loop ran {format_seconds(load.loop_lag_sustained)} late,"
                f" with a median time to first token of {format_seconds(p50_first_token)}"
            )
    return msgspec.structs.replace(load, bottleneck=reason is not None, reason=reason)


def judge_driver(load: ClientLoad, p50_last_token: float | None) -> ClientLoad:
    """Return the load of a driver with its verdict: it was the bottleneck when its workers had to wait for it.

    They have jobs for a while: a quarter of what they do at once, or a tenth of a second's work.
    """
    reason = None
    if load.seconds + load.stood_still >= MIN_SECONDS:
        if load.loop_cpu_share >= BUSY:
            reason = f"the driver's event loop was busy {load.loop_cpu_share:.0%} of the time"
        elif load.loop_lag_sustained >= max(DRIVER_LATE, LATE_SHARE * (p50_last_token or 0.0)):
            reason = (
                f"the driver's event loop ran {format_seconds(load.loop_lag_sustained)} late: "
                "its workers had to wait for it"
            )
    return msgspec.structs.replace(load, bottleneck=reason is not None, reason=reason, process=DRIVER)


def with_earlier(earlier: ClientLoad, last: ClientLoad) -> ClientLoad:
    """Combine the load of a run's last launch with that of earlier ones, each of them judged.

    Shares are of all the time observed. Percentiles cannot be combined: the worst of the launches is kept. A launch
    in which the client was the bottleneck has affected the figures of the whole run.
    """
    seconds = max(earlier.seconds + last.seconds, 1e-9)
    reason = last.reason
    if earlier.bottleneck and not last.bottleneck:
        reason = _EARLIER + (earlier.reason or "it had no time to spare").removeprefix(_EARLIER)
    return ClientLoad(
        seconds=seconds,
        **{name: max(getattr(earlier, name), getattr(last, name)) for name in _WORST},
        **{
            name: (getattr(earlier, name) * earlier.seconds + getattr(last, name) * last.seconds) / seconds
            for name in ("cpu_share", "loop_cpu_share")
        },
        peak_rss=max((load.peak_rss for load in (earlier, last) if load.peak_rss is not None), default=None),
        stood_still=earlier.stood_still + last.stood_still,
        bottleneck=earlier.bottleneck or last.bottleneck,
        reason=reason,
        process=earlier.process if earlier.bottleneck and not last.bottleneck else last.process,
        launches=earlier.launches + last.launches,
    )


class LoopMonitor:
    """Monitors the running event loop from `start()` to `stop()`, both called on the loop's thread.

    Ticks are due on a fixed grid. A loop that was blocked runs one of them, late, in place of several: those are
    counted too, each as late as it was, because whatever would have arrived meanwhile had to wait as long.
    """

    def __init__(self, tick: float = TICK) -> None:
        self._tick = tick
        self._sketch = PercentileSketch()
        self._recent: list[float] = []
        self._stood_still = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start monitoring the running loop, or start again."""
        if self._timer is not None:
            self._timer.cancel()
            self._sketch, self._stood_still = PercentileSketch(), 0.0
            self._recent.clear()
        self._loop = asyncio.get_running_loop()
        # Not the loop's clock: uvloop's does not advance while callbacks run.
        self._began = time.monotonic()
        self._process_began, self._thread_began = time.process_time(), time.thread_time()
        self._due = self._began + self._tick
        self._timer = self._loop.call_later(self._tick, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        self._count(now)
        self._timer = self._loop.call_later(max(self._due - now, 0.0), self._look)

    def _count(self, now: float) -> None:
        """Count every tick that was due by now, and set the next one."""
        late = now - self._due
        if late < self._tick:
            self._recent.append(max(late, 0.0))  # timers may fire a hair early
            self._due += self._tick
        elif late < STOOD_STILL:
            missed = int(late / self._tick) + 1
            self._recent.extend((late - self._tick * np.arange(missed)).tolist())
            self._due += self._tick * missed
        else:
            self._stood_still += late
            self._recent.append(late)
            self._due = now + self._tick
        if len(self._recent) >= _FOLD_EVERY:
            self._fold()

    def _fold(self) -> None:
        self._sketch.add(np.array(self._recent, dtype=np.float64))
        self._recent.clear()

    def stop(self) -> ClientLoad:
        """Stop monitoring and return the load, not judged yet."""
        now = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if now >= self._due:  # blocked until now: that counts too
            self._count(now)
        self._fold()
        seconds = max(now - self._began - self._stood_still, 1e-9)
        return ClientLoad(
            seconds=seconds,
            loop_lag_p50=self._sketch.percentile(50) or 0.0,
            loop_lag_p99=self._sketch.percentile(99) or 0.0,
            loop_lag_max=max(self._sketch.maximum, 0.0),
            loop_lag_sustained=self._sketch.percentile(self._sustained()) or 0.0,
            cpu_share=(time.process_time() - self._process_began) / seconds,
            loop_cpu_share=(time.thread_time() - self._thread_began) / seconds,
            peak_rss=_peak_rss(),
            stood_still=self._stood_still,
        )

    def _sustained(self) -> float:
        """Return the highest percentile, up to 99, with at least `_MIN_LATE_TICKS` ticks at or above it."""
        others = self._sketch.count - 1
        return min(99.0, 100.0 * (1 - (_MIN_LATE_TICKS - 1) / others)) if others >= _MIN_LATE_TICKS else 0.0


def _peak_rss() -> int | None:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
