"""The progress of a run while it runs, and word of it when nothing comes back."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from steelyard.contracts import InFlight
from steelyard.errors import ConfigurationError
from steelyard.stats.running import RunningStats
from steelyard.stats.spec import ProgressSpec, parse_progress_bar_stats
from steelyard.stats.surfaces import MODES, Frame, Mode, choose_surface
from steelyard.stats.wording import safe_text, segments, silence_notice


class LiveDisplay:
    """Draws how far a run is; to be refreshed by a ticker a few times a second, never per response.

    `initial` is what earlier sittings did: it counts as done but not in the rate. When nothing was finished for
    `silence_after` seconds, the display says what is being waited for. Of a run that goes on for a `duration` the total
    is not known, and is put at what it will be if the pace stays as it is.
    """

    def __init__(
        self,
        *,
        description: str,
        total: int,
        initial: int,
        duration: float | None = None,
        spec: Mapping[str, Any] | ProgressSpec | None = None,
        mode: Mode = "auto",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        silence_after: float = 60.0,
    ) -> None:
        if mode not in MODES:
            raise ConfigurationError(f"progress mode must be one of {', '.join(MODES)}, got {mode!r}")
        self._description = safe_text(description)
        self._total = total
        self._duration = duration
        self._initial = initial
        self._spec = parse_progress_bar_stats(spec)
        self._clock = clock
        self._silence_after = silence_after
        self._started = clock()
        self._done = initial
        self._grew_at = self._started
        self._stream = sys.stderr if stream is None else stream
        self._surface = choose_surface(mode, self._stream)

    def refresh(self, done: int, stats: RunningStats, in_flight: InFlight, parallelism: int) -> None:
        """Show the state of this moment."""
        if self._surface is None:
            return
        now = self._clock()
        if done > self._done:
            self._done, self._grew_at = done, now
        quiet = now - self._grew_at
        silence = silence_notice(quiet, in_flight) if quiet >= self._silence_after else None
        waiting = _in_flight(in_flight.count, parallelism)
        self._surface.draw(self._frame(done, stats, now, in_flight=waiting, silence=silence))

    def close(self, done: int, stats: RunningStats) -> None:
        """Show the final state and give the screen back; later calls do nothing."""
        if self._surface is not None:
            self._surface.close(self._frame(done, stats, self._clock()))
            self._surface = None

    def _frame(
        self, done: int, stats: RunningStats, now: float, *, in_flight: str = "", silence: str | None = None
    ) -> Frame:
        return Frame(
            description=self._description,
            done=done,
            total=self._total if self._duration is None else _outlook(done, now - self._started, self._duration),
            initial=self._initial,
            elapsed=now - self._started,
            segments=segments(self._spec, stats.snapshot(self._spec)),
            in_flight=in_flight,
            silence=silence,
        )


def _outlook(done: int, elapsed: float, duration: float) -> int:
    """How many there will be when the time is up, at the pace so far."""
    return done if elapsed >= duration else round(done * duration / max(elapsed, 1e-3))


def _in_flight(count: int, parallelism: int) -> str:
    """How many are being waited for, and of how many where that is fewer."""
    return f"{count:,} in flight" if count >= parallelism else f"{count:,} of {parallelism:,} in flight"
