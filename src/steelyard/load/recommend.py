"""Which of the measured levels to run at: the highest before something breaks or more of it brings nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from steelyard.load.levels import Level

GAIN_PER_DOUBLING = 0.05
"""How much more throughput twice the parallelism must bring to be worth it."""

LEAST_GAIN = 0.02
"""What any step must bring, however small: less is not told apart from noise."""


class Recommendation(msgspec.Struct, frozen=True):
    """A level and why; None when none of those measured can be recommended."""

    level: int | None
    reason: str

    def describe(self) -> str:
        """The sentence under a table."""
        if self.level is None:
            return f"no level can be recommended: {self.reason}"
        return f"recommended: {self.level:,}: {self.reason}"


def recommend(levels: Sequence[Level]) -> Recommendation:
    """The highest level before an objective breaks or throughput stops growing.

    A level where this client was the bottleneck says nothing about the endpoint, one that was not reached nothing
    about that many calls at once: neither is recommended. Growth is measured against the last level that grew, so
    that one noisy level in between neither ends the search nor hides a slow rise.
    """
    best: Level | None = None
    notes: list[str] = []
    for level in sorted(levels, key=lambda one: one.level):
        if level.invalid is not None:
            notes.append(f"at {level.level:,} this client was the bottleneck: {level.invalid}")
        elif level.broken:
            notes.append(f"at {level.level:,} {level.broken[0]}")
            break
        elif not level.reached:
            notes.append(f"at {level.level:,} only {level.peak_in_flight:,} were in flight at once")
        elif best is None or grew(best, level):
            best, notes = level, []
        else:
            notes.append(_no_growth(best, level))
    if best is None:
        return Recommendation(None, notes[0] if notes else "nothing was measured")
    return Recommendation(best.level, notes[0] if notes else _open_end(best, levels))


def grew(lower: Level, higher: Level) -> bool:
    """Whether the higher level brought enough more throughput for its parallelism."""
    doublings = math.log2(higher.level / lower.level)
    wanted = max((1 + GAIN_PER_DOUBLING) ** doublings - 1, LEAST_GAIN)
    return higher.requests_per_second >= lower.requests_per_second * (1 + wanted) and higher.requests_per_second > 0


def _no_growth(lower: Level, higher: Level) -> str:
    between = f"from {lower.level:,} to {higher.level:,}"
    gain = higher.requests_per_second / lower.requests_per_second - 1 if lower.requests_per_second > 0 else 0.0
    if abs(gain) < 0.005:
        return f"throughput did not grow {between}"
    if gain < 0:
        return f"throughput fell by {-gain:.0%} {between}"
    return f"throughput grew only {gain:.0%} {between}"


def _open_end(best: Level, levels: Sequence[Level]) -> str:
    lower = [level for level in levels if level.level < best.level and level.usable]
    if not lower:
        return "the only level that was measured" if len(levels) == 1 else "the only level that can be trusted"
    before = max(lower, key=lambda level: level.level)
    if before.requests_per_second <= 0:
        return "the highest level measured; the ceiling may be higher"
    gain = best.requests_per_second / before.requests_per_second - 1
    return (
        f"the highest level measured; throughput still grew {gain:.0%} from {before.level:,} to {best.level:,},"
        " so the ceiling may be higher"
    )
