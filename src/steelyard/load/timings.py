"""When the requests of a level were sent and came back: what its percentiles, throughput and goodput are made from."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.journal.files import OUTPUTS
from steelyard.journal.reader import Entry, entries_backward, readable_end
from steelyard.stats.errors import TIMEOUTS
from steelyard.stats.intervals import Floats
from steelyard.stats.metrics import LatencyMetrics
from steelyard.stats.running import Timeouts, latency_metrics, timed_out_after

Flags = npt.NDArray[np.bool_]

TIMES = ("time_to_first_token", "time_to_last_token", "time_per_output_token")
_LATE_AFTER = 0.01
"""Open loop: a call that was sent later than this after its planned moment counts from that moment."""


class Timings(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The requests of a block in the order in which they ended; 8 bytes for each number."""

    sent: Floats
    """Seconds from the beginning of the block, as `ended`."""
    ended: Floats
    ok: Flags
    timed_out: Flags
    times: dict[str, Floats]
    """Each time; NaN where there is none, of a call that timed out how long it was waited for."""
    tokens: Floats
    """How many tokens each answer has; NaN where that is not known."""

    def __len__(self) -> int:
        return len(self.ended)

    @property
    def latencies(self) -> Floats:
        """How long answers took, and at least took: of timeouts their limit. Other errors are left out."""
        return self.times["time_to_last_token"][self.ok | self.timed_out]


def read_timings(run: Path) -> Timings:
    """Read what a load run recorded."""
    descriptor = os.open(run / OUTPUTS, os.O_RDONLY)
    try:
        rows: list[tuple[float, ...]] = []
        for block in entries_backward(descriptor, readable_end(descriptor)):
            rows += [_row(entry) for entry in block.entries]
    finally:
        os.close(descriptor)
    table = np.array(rows, dtype=np.float64).reshape(len(rows), 5 + len(TIMES))
    table = table[np.argsort(table[:, 1], kind="stable")]
    return Timings(
        sent=table[:, 0],
        ended=table[:, 1],
        ok=table[:, 2] > 0,
        timed_out=table[:, 3] > 0,
        times={name: table[:, 5 + place] for place, name in enumerate(TIMES)},
        tokens=table[:, 4],
    )


def _row(entry: Entry) -> tuple[float, ...]:
    ok = entry.status == "ok"
    timed_out = not ok and entry.error_type in TIMEOUTS
    first, last, each = entry.time_to_first_token, entry.time_to_last_token, entry.time_per_output_token
    if ok and last is None:
        last = entry.elapsed
    if timed_out:
        last = timed_out_after(entry)
        first = last if first is None else first
    late = _lateness(entry, last)
    known = ok or timed_out
    return (
        entry.run_time - entry.elapsed,
        entry.run_time,
        float(ok),
        float(timed_out),
        math.nan if entry.num_tokens_output is None or not ok else entry.num_tokens_output,
        math.nan if first is None or not known else first + late,
        math.nan if last is None or not known else last + late,
        math.nan if each is None or not ok else each,
    )


def _lateness(entry: Entry, last: float | None) -> float:
    """By how much a call of an open loop was sent after its planned moment, where that matters."""
    if entry.time_from_planned is None or last is None:
        return 0.0
    late = entry.time_from_planned - last
    return late if late > _LATE_AFTER else 0.0


def latency_of(blocks: Sequence[Timings], metric: str) -> LatencyMetrics | None:
    """The percentiles of a time over all blocks, timeouts included; None where it was not measured."""
    answers, timeouts = [], Timeouts()
    seen = 0
    for block in blocks:
        times = block.times[metric]
        known = ~np.isnan(times)
        answers.append(times[known & block.ok])
        if metric != "time_per_output_token":
            before = seen + np.cumsum(known & block.ok)[block.timed_out]
            timeouts.seconds.extend(times[block.timed_out])
            timeouts.after.extend(before.astype(np.float64))
        seen += int((known & block.ok).sum())
    values = np.concatenate(answers) if answers else np.empty(0)
    return latency_metrics(values, timeouts, load=True) if len(values) or len(timeouts) else None
