"""Search for the best level, and the recommendation: double until throughput stops growing, then close in on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from steelyard.load.levels import Level

MAX_LEVELS = 12
"""How many levels a search measures at most."""
CLOSE_ENOUGH = 1.15
"""Two levels nearer to each other than this factor need none in between."""
GAIN_PER_DOUBLING = 0.05
"""How much more throughput twice the parallelism must bring to be worth it."""
MIN_GAIN = 0.02
"""How much more throughput any step must bring: less cannot be distinguished from noise."""
_MAX_UNUSABLE_AT_START = 3
"""How many unusable levels at the start end the search."""
_PROPORTIONAL_SHARE = 0.75
"""A step that brought this share of the growth in parallelism has no knee between its ends."""


class Recommendation(msgspec.Struct, frozen=True):
    """A level and why; None when none of those measured can be recommended."""

    level: int | None
    reason: str

    def describe(self) -> str:
        """Return the sentence under a table."""
        if self.level is None:
            return f"no level can be recommended: {self.reason}"
        return f"recommended: {self.level:,}: {self.reason}"


def recommend(levels: Sequence[Level]) -> Recommendation:
    """Recommend the highest level before an objective breaks or throughput stops growing.

    A level where this client was the bottleneck does not measure the endpoint, and one that was not reached does not
    measure that many calls at once: neither is recommended. Growth is measured against the last level that grew, so
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


def next_level(levels: Sequence[Level], highest_allowed: int) -> int | None:
    """Return the parallelism to measure next, at most `highest_allowed`; None when the search has ended."""
    if not levels:
        return 1
    measured = {level.level: level for level in levels}
    best = recommend(levels).level
    highest = max(measured)
    if len(measured) >= MAX_LEVELS:
        return None
    if best is None:
        # A level that failed, or that this client limited, is no better higher up; a hiccup at the start may be over.
        all_unusable = all(level.invalid is not None for level in levels) and len(levels) < _MAX_UNUSABLE_AT_START
        return 2 * highest if all_unusable and 2 * highest <= highest_allowed else None
    if best == highest:
        return min(2 * highest, highest_allowed) if highest < highest_allowed else None
    above = min(level for level in measured if level > best)
    if (between := _between(best, above)) is not None:
        return between
    below = [level for level in measured.values() if level.level < best and level.usable]
    if not below:
        return None
    before = max(below, key=lambda level: level.level)
    return None if _proportional(before, measured[best]) else _between(before.level, best)


def grew(lower: Level, higher: Level) -> bool:
    """Whether the higher level brought enough more throughput for its parallelism."""
    doublings = math.log2(higher.level / lower.level)
    wanted = max((1 + GAIN_PER_DOUBLING) ** doublings - 1, MIN_GAIN)
    return higher.requests_per_second >= lower.requests_per_second * (1 + wanted) and higher.requests_per_second > 0


def _between(lower: int, higher: int) -> int | None:
    """Return the level halfway, by ratio; None when the two are close enough."""
    if higher / lower <= CLOSE_ENOUGH or higher - lower < 2:
        return None
    return min(max(round(math.sqrt(lower * higher)), lower + 1), higher - 1)


def _proportional(lower: Level, higher: Level) -> bool:
    """Whether throughput grew about as much as parallelism did, so that the endpoint was not full yet."""
    promised = higher.level / lower.level - 1
    gained = higher.requests_per_second / lower.requests_per_second - 1 if lower.requests_per_second > 0 else promised
    return gained >= _PROPORTIONAL_SHARE * promised


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
