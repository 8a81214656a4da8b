"""Does keeping statistics cost the same at a million responses as at ten thousand?"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.rows import Row
from steelyard.records import InvocationResponse
from steelyard.stats.figures import parse_progress_bar_stats
from steelyard.stats.running import RunningStats

SMALL, LARGE = 10_000, 1_000_000
UPDATE_LIMIT, SNAPSHOT_LIMIT = 1.5, 3.0
_CHUNK = 10_000


def measure() -> list[Row]:
    """The cost of an update and of a snapshot at a million responses, as a multiple of that at ten thousand."""
    responses = _responses(1000)
    small, large = _filled(responses, SMALL), _filled(responses, LARGE)
    update_small = _best(9, lambda: _update_seconds(_filled(responses, SMALL), responses))
    update_large = _best(9, lambda: _update_seconds(large, responses))
    snapshot_small = _best(30, lambda: _snapshot_seconds(small, responses))
    snapshot_large = _best(30, lambda: _snapshot_seconds(large, responses))
    return [
        _row("RunningStats.update, five metrics, at a million", update_small, update_large, UPDATE_LIMIT),
        _row("RunningStats.snapshot, default spec, at a million", snapshot_small, snapshot_large, SNAPSHOT_LIMIT),
    ]


def _responses(count: int) -> list[InvocationResponse]:
    rng = random.Random(1)
    return [
        InvocationResponse(
            time_to_first_token=rng.lognormvariate(-1.5, 0.4),
            time_to_last_token=rng.lognormvariate(0.5, 0.4),
            time_per_output_token=rng.lognormvariate(-4.5, 0.3),
            num_tokens_input=rng.randrange(4000),
            num_tokens_output=rng.randrange(900),
        )
        for _ in range(count)
    ]


def _filled(responses: list[InvocationResponse], count: int) -> RunningStats:
    stats = RunningStats()
    for _ in range(count // len(responses)):
        for response in responses:
            stats.update(response)
    return stats


def _update_seconds(stats: RunningStats, responses: list[InvocationResponse]) -> float:
    started = time.perf_counter()
    for _ in range(_CHUNK // len(responses)):
        for response in responses:
            stats.update(response)
    return (time.perf_counter() - started) / _CHUNK


def _snapshot_seconds(stats: RunningStats, responses: list[InvocationResponse]) -> float:
    """One snapshot with a few new responses to take in, as between two ticks of a display."""
    spec = parse_progress_bar_stats(None)
    for response in responses[:100]:
        stats.update(response)
    started = time.perf_counter()
    stats.snapshot(spec)
    return time.perf_counter() - started


def _best(times: int, run: Callable[[], float]) -> float:
    return min(run() for _ in range(times))


def _row(what: str, small: float, large: float, limit: float) -> Row:
    detail = f"{small * 1e6:.2f} µs at {SMALL:,}, {large * 1e6:.2f} µs at {LARGE:,}"
    return Row(what, large / small, limit, detail)
