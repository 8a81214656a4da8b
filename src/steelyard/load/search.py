"""Which level a sweep recommends, and why: from what each level showed and which steps brought more throughput."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from steelyard.load.levels import Level
from steelyard.load.search_rule import Found, Gain, LevelSearch, Measure
from steelyard.stats.intervals import Floats

GROWTH = "growth means at least 19 % more answers per doubling"


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """A level and why; None when none of those measured can be recommended."""

    level: int | float | None
    reason: str
    decided: bool = True
    """Whether what was measured settles it: else an interval left it open, and the estimate was taken."""
    more_requests: int | None = None
    """About how many more requests would settle what is open."""
    unit: str = ""
    """What follows the number: `/s` of an arrival rate."""

    def describe(self) -> str:
        """Return the sentence under a table."""
        open_end = "" if self.decided else f"; undecided{self._more()}"
        if self.level is None:
            return f"no level can be recommended: {self.reason}{open_end}"
        return f"recommended: {self.level:,}{self.unit}: {self.reason}{open_end}"

    def _more(self) -> str:
        return "" if self.more_requests is None else f": about {self.more_requests:,} more requests would tell"


def found_so_far(
    levels: Sequence[Level], latencies: Mapping[int | float, Sequence[Floats]]
) -> tuple[Found, LevelSearch]:
    """What the levels measured so far tell, without measuring more."""
    sizes = [int(level.level) for level in levels]
    search = LevelSearch(sizes=sizes, max_blocks=0)
    for level in levels:
        exclude(search, level, listed=True)
        for block in latencies[level.level]:
            search.add(int(level.level), block)
    step = search.step
    while isinstance(step, Measure):  # all of it was handed over
        search.skip(step.level)
        step = search.step
    return step, search


def exclude(search: LevelSearch, level: Level, *, listed: bool) -> None:
    """Report a level that cannot be recommended to the search: broken, open, or not of the endpoint."""
    size = int(level.level)
    if level.invalid is not None or (listed and not level.reached):
        search.skip(size)
    elif not level.reached or level.broken or level.undecided:
        search.reject(size)


def recommend(levels: Sequence[Level], found: Found, search: LevelSearch) -> Recommendation:
    """The level that the search found, with what stands in the way of a higher one."""
    ordered = sorted(levels, key=lambda level: level.level)
    above = [level for level in ordered if found.level is None or level.level > found.level]
    obstacle, is_open, more = _obstacle(above, found, search)
    decided = found.decided and not is_open
    numbers = [number for number in (found.more_requests, more) if number is not None]
    reason = obstacle or (_open_end(found.level, ordered) if found.level is not None else "nothing was measured")
    return Recommendation(
        level=found.level,
        reason=reason,
        decided=decided,
        more_requests=None if decided else max(numbers, default=None),
    )


def _obstacle(above: Sequence[Level], found: Found, search: LevelSearch) -> tuple[str, bool, int | None]:
    """Why no level above is recommended; whether that is open, and how many requests would settle it."""
    for level in above:
        if level.invalid is not None or not level.reached or level.broken or level.undecided:
            return why_not(level), level.usable and not level.broken, level.more_requests
        gain = None if found.level is None else search.gain(int(found.level), int(level.level))
        if gain is not None:
            return _no_growth(int(found.level or 0), int(level.level), gain), False, None
        return f"at {level.level:,} there were too few answers to compare", True, None
    return "", False, None


def why_not(level: Level, unit: str = "") -> str:
    """Why a level cannot be recommended."""
    at = f"at {level.level:,}{unit}"
    if level.invalid is not None:
        return f"{at} this client was the bottleneck: {level.invalid}"
    if level.broken:
        return f"{at} {level.broken[0]}"
    if not level.reached:
        return f"{at} only {level.peak_in_flight:,} were in flight at once" if not unit else f"{at} calls were not sent"
    return f"{at} {level.undecided[0]}"


def _no_growth(low: int, high: int, gain: Gain) -> str:
    """What a step brought, as a change of throughput, with its 90 % interval."""
    change, least, most = (math.expm1(each) for each in (gain.value, gain.value - gain.reach, gain.value + gain.reach))
    between = f"from {low:,} to {high:,} ({least:+.0%} to {most:+.0%})"
    if abs(change) < 0.005:
        return f"throughput did not grow {between}; {GROWTH}"
    if change < 0:
        return f"throughput fell by {-change:.0%} {between}; {GROWTH}"
    return f"throughput grew only {change:.0%} {between}; {GROWTH}"


def _open_end(best: int | float, levels: Sequence[Level]) -> str:
    lower = [level for level in levels if level.level < best and level.usable]
    if not lower:
        return "the only level that was measured" if len(levels) == 1 else "the only level that can be trusted"
    before, now = lower[-1], next(level for level in levels if level.level == best)
    if before.requests_per_second <= 0:
        return "the highest level measured; the ceiling may be higher"
    gain = now.requests_per_second / before.requests_per_second - 1
    return (
        f"the highest level measured; throughput still grew {gain:.0%} from {before.level:,} to {best:,},"
        " so the ceiling may be higher"
    )


def recommend_rate(levels: Sequence[Level]) -> Recommendation:
    """The highest arrival rate before one at which an objective breaks, or cannot be told to hold."""
    best: Level | None = None
    notes: list[str] = []
    stopped_by: Level | None = None
    for level in sorted(levels, key=lambda one: one.level):
        if not level.usable:
            notes.append(why_not(level, "/s"))
        elif level.broken or level.undecided:
            stopped_by = level
            notes.insert(0, why_not(level, "/s"))
            break
        else:
            best, notes = level, []
    is_open = stopped_by is not None and not stopped_by.broken
    if best is not None and not notes:
        notes = ["the highest rate measured; the objectives held, so the ceiling may be higher"]
    return Recommendation(
        level=None if best is None else best.level,
        reason=notes[0] if notes else "nothing was measured",
        decided=not is_open,
        more_requests=stopped_by.more_requests if is_open and stopped_by is not None else None,
        unit="/s",
    )
