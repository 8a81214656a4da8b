"""The client's own load: how late its event loop runs and how busy it is, so that a result can say who was slow."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import msgspec
import numpy as np

from steelyard.stats.formatting import format_seconds
from steelyard.stats.sketch import PercentileSketch

TICK = 0.02
"""Seconds between two looks at the clock: fine enough for what hurts a measurement, too rare to cost anything."""

BUSY = 0.9
"""The share of the time from which the loop's thread counts as having had no time to spare."""

LATE = 0.02
"""Seconds of lag, at the 99th percentile, below which it is not held against the client."""

_FEWEST = 3
"""Ticks that must have come late: in a short measurement one hiccup of the machine is the 99th percentile."""

LATE_SHARE = 0.1
"""... and the share of the median time to first token from which it bends what was measured."""

STOOD_STILL = 30.0
"""Seconds without a tick from which the whole process is taken to have stood still: suspended, or stopped."""

SHORTEST = 0.2
"""Seconds that must have been watched before the client is judged: importing and connecting keep any loop busy."""

_FOLD_EVERY = 1024
_WORST = ("lag_p50", "lag_p99", "lag_max", "lag_sustained")
_EARLIER = "in an earlier launch "


class ClientLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How hard this process had to work for a measurement, and whether that decided what was measured."""

    seconds: float
    """How long it was watched, without the time it stood still."""
    lag_p50: float
    lag_p99: float
    lag_max: float
    lag_sustained: float
    """The 99th percentile or, where that would be one or two ticks, what the third latest of them had."""
    cpu_share: float
    """CPU time of all threads over the time watched: 1.0 is one whole core."""
    loop_cpu_share: float
    """The same of the event loop's thread alone."""
    peak_rss: int | None = None
    """The most memory that the process has held so far, in bytes; None where the system does not tell."""
    stood_still: float = 0.0
    """Seconds in which the whole process seems to have stood still: each such time counts as one late tick only."""
    bottleneck: bool = False
    reason: str | None = None
    """Why it was, in words."""
    launches: int = 1
    """How many launches of the run these figures speak of."""

    def to_metrics(self) -> dict[str, Any]:
        """The same as it stands in metrics.json."""
        return msgspec.structs.asdict(self)


def judge_client(load: ClientLoad, p50_first_token: float | None) -> ClientLoad:
    """The load with its verdict: the client was the bottleneck when it had no time to spare, or when it came late.

    Late means that the sustained lag is large in itself and against the median time to first token (to the last one
    where nothing streamed); None where nothing was measured that it could have bent.
    """
    reason = None
    if load.seconds + load.stood_still >= SHORTEST:
        if load.loop_cpu_share >= BUSY:
            reason = f"its event loop was busy {load.loop_cpu_share:.0%} of the time"
        elif p50_first_token is not None and load.lag_sustained >= max(LATE, LATE_SHARE * p50_first_token):
            reason = (
                f"its event loop ran {format_seconds(load.lag_sustained)} late,"
                f" with a median time to first token of {format_seconds(p50_first_token)}"
            )
    return msgspec.structs.replace(load, bottleneck=reason is not None, reason=reason)


def with_earlier(earlier: ClientLoad, last: ClientLoad) -> ClientLoad:
    """The load of a run's last launch and of those before it, each of them judged.

    Shares are of all the time that was watched. Percentiles cannot be joined: each is the worse one of the launches.
    A launch in which the client was the bottleneck has left its times in the figures of the whole run.
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
        launches=earlier.launches + last.launches,
    )


class LoopMonitor:
    """Watches the running event loop from `start()` to `stop()`, both called on the loop's own thread.

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
        """Begin to watch the loop that is running."""
        self._loop = asyncio.get_running_loop()
        # Not the loop's own clock: uvloop's stands still while callbacks run.
        self._began = time.monotonic()
        self._process_began, self._thread_began = time.process_time(), time.thread_time()
        self._due = self._began + self._tick
        self._timer = self._loop.call_later(self._tick, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        self._count(now)
        self._timer = self._loop.call_later(max(self._due - now, 0.0), self._look)

    def _count(self, now: float) -> None:
        """Count every tick that was due by now, and find the next one."""
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
        """Stop watching; what was seen, not judged yet."""
        now = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if now >= self._due:  # blocked up to this very moment: that counts too
            self._count(now)
        self._fold()
        seconds = max(now - self._began - self._stood_still, 1e-9)
        return ClientLoad(
            seconds=seconds,
            lag_p50=self._sketch.percentile(50) or 0.0,
            lag_p99=self._sketch.percentile(99) or 0.0,
            lag_max=max(self._sketch.maximum, 0.0),
            lag_sustained=self._sketch.percentile(self._sustained()) or 0.0,
            cpu_share=(time.process_time() - self._process_began) / seconds,
            loop_cpu_share=(time.thread_time() - self._thread_began) / seconds,
            peak_rss=_peak_rss(),
            stood_still=self._stood_still,
        )

    def _sustained(self) -> float:
        """Which percentile has at least so many ticks from it on."""
        others = self._sketch.count - 1
        return min(99.0, 100.0 * (1 - (_FEWEST - 1) / others)) if others >= _FEWEST else 0.0


def _peak_rss() -> int | None:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
