"""Which lines of a journal belong to the run: run.json and the metrics name those that do not, so that readers agree.

A line is left out when its case was edited since, or removed, or is not among those selected now. Of the lines that
belong, the last ok one of a (case, trial) counts, else its last error.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TypeAlias

import msgspec

from steelyard.journal.files import read_metrics
from steelyard.journal.manifest import last_launch
from steelyard.stats.metrics import JournalLines

Ranges: TypeAlias = list[tuple[int, int]]
"""Numbers of lines, from 1, each pair the first and the last of some that follow one another."""


class LeftOut:
    """Collects lines that are left out, by their distance from the end, as a journal is read from there."""

    def __init__(self) -> None:
        self.count = 0
        self._bounds = array("Q")

    def add(self, distance: int) -> None:
        """Add a line: 0 is the last one. Each distance must be larger than the one before."""
        self.count += 1
        if self._bounds and self._bounds[-1] == distance - 1:
            self._bounds[-1] = distance
        else:
            self._bounds.extend((distance, distance))

    def ranges(self, lines: int) -> Ranges:
        """The numbers of the lines, given how many there are in all."""
        numbers = [lines - distance for distance in reversed(self._bounds)]
        return list(zip(numbers[::2], numbers[1::2], strict=True))


def write_ranges(ranges: Ranges) -> str:
    """Ranges as text: `3-4,9`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def read_ranges(text: str) -> Ranges:
    """The ranges in a text; ValueError where it is none."""
    ranges = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        ranges.append((int(first), int(last or first)))
    return ranges


def left_out_lines(run: Path) -> Ranges:
    """The lines of a run's journal that do not belong to it, as its metrics or its last launch say."""
    known = metrics_lines(run)
    if known is not None:
        text = known.left_out
    else:
        launch = last_launch(run)
        text = launch.left_out if launch is not None else ""
    try:
        return read_ranges(text)
    except ValueError:
        return []


def metrics_lines(run: Path) -> JournalLines | None:
    """What the metrics of a complete run say of its lines; None when it is not complete, or they do not say."""
    found = (read_metrics(run) or {}).get("lines")
    try:
        return None if found is None else msgspec.convert(found, JournalLines)
    except msgspec.ValidationError:
        return None
