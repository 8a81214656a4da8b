"""Where to measure next when the level is to be found: double until something gives, then close in on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steelyard.load.levels import Level
from steelyard.load.recommend import recommend

MOST_LEVELS = 12
"""How many levels a search measures at most."""

CLOSE_ENOUGH = 1.15
"""Two levels nearer to each other than this factor need none in between."""

_TRIES_AT_THE_START = 3
"""How many levels may say nothing before the search is given up."""

_WORTH_HALVING = 0.75
"""A step that brought this share of what its parallelism promised left no knee between its ends."""


def next_level(levels: Sequence[Level], most: int) -> int | None:
    """The parallelism to measure after these; None when the search has ended. None is ever above `most`."""
    if not levels:
        return 1
    measured = {level.level: level for level in levels}
    best = recommend(levels).level
    highest = max(measured)
    if len(measured) >= MOST_LEVELS:
        return None
    if best is None:
        # What was too much, or this client's own doing, is no better higher up; a hiccup at the start may be over.
        says_nothing = all(level.invalid is not None for level in levels) and len(levels) < _TRIES_AT_THE_START
        return 2 * highest if says_nothing and 2 * highest <= most else None
    if best == highest:
        return min(2 * highest, most) if highest < most else None
    above = min(level for level in measured if level > best)
    if (between := _between(best, above)) is not None:
        return between
    below = [level for level in measured.values() if level.level < best and level.usable]
    if not below:
        return None
    before = max(below, key=lambda level: level.level)
    return None if _proportional(before, measured[best]) else _between(before.level, best)


def _between(lower: int, higher: int) -> int | None:
    """The level halfway, by ratio; None when the two are close enough."""
    if higher / lower <= CLOSE_ENOUGH or higher - lower < 2:
        return None
    return min(max(round(math.sqrt(lower * higher)), lower + 1), higher - 1)


def _proportional(lower: Level, higher: Level) -> bool:
    """Whether throughput grew about as much as parallelism did, so that the endpoint was not full yet."""
    promised = higher.level / lower.level - 1
    gained = higher.requests_per_second / lower.requests_per_second - 1 if lower.requests_per_second > 0 else promised
    return gained >= _WORTH_HALVING * promised
