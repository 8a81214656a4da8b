"""When the mock was asked and when it answered, by its own word: what a client's figures are held against."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from urllib.request import urlopen


@dataclass(frozen=True)
class Answered:
    """One answer of the mock: seconds of the monotonic clock, which is one for all processes of a machine."""

    received: float
    first: float
    last: float


def forget(address: str) -> None:
    """Have the mock at this address count from nothing again."""
    urlopen(f"{address}/stats/reset", data=b"").close()


def answered(address: str) -> dict[str, Answered]:
    """What the mock has answered since, by request id."""
    with urlopen(f"{address}/stats?times=1") as page:
        times = json.load(page)["times"]
    return {
        one["request_id"]: Answered(*(one[f"{name}_ns"] / 1e9 for name in ("received", "first", "last")))
        for one in times
    }


def seconds(answers: dict[str, Answered], count: int) -> float:
    """From the first request that came in to the last answer that went out; there must be that many."""
    if len(answers) != count:
        raise AssertionError(f"{count} requests were to come, {len(answers)} came")
    return max(one.last for one in answers.values()) - min(one.received for one in answers.values())


def wall_to_monotonic() -> float:
    """What to add to a reading of the wall clock to have the monotonic one's: the least disturbed of many looks."""
    looks = []
    for _ in range(100):
        before = time.perf_counter()
        wall = time.time()
        after = time.perf_counter()
        looks.append((after - before, (before + after) / 2 - wall))
    return min(looks)[1]
