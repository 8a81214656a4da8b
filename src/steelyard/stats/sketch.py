"""Streams of numbers: a percentile sketch in fixed memory for live figures, and compact columns of exact values."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

# A positive double's bits, read as an integer, grow with its value: exponent first, then mantissa. Keeping the
# exponent and the top seven bits of the mantissa sorts values into buckets at most 1/128 wide relative to their
# lower edge, so that the middle of a bucket is within 1/256 (0.39 %) of anything in it. No logarithm is taken.
_DROPPED_BITS = 52 - 7
_MIN_EXPONENT = -30  # 2**-30 s is 0.9 ns, finer than any clock here; what is below counts as zero
_MAX_EXPONENT = 34  # 2**34 is 17 thousand million: seconds or tokens
_FIRST = (1023 + _MIN_EXPONENT) << 7
_LAST_BUCKET = ((_MAX_EXPONENT - _MIN_EXPONENT) << 7) + 1

LIMIT = 1e300
"""Larger values count as infinite: a hundred million of these still sum to a finite float."""


class PercentileSketch:
    """Counts of values by size: percentiles within 0.5 % of numpy's linear ones, for values from 1e-9 to 1.7e10.

    Zero is exact, a negative value counts as zero, and no estimate leaves [minimum, maximum].
    """

    __slots__ = ("_buckets", "_cumulative", "count", "maximum", "minimum", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.minimum = math.inf
        self.maximum = -math.inf
        self._buckets: npt.NDArray[np.int64] = np.zeros(_LAST_BUCKET + 1, dtype=np.int64)
        self._cumulative: npt.NDArray[np.int64] | None = None

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Add these finite values."""
        if not len(values):
            return
        # A negative number's sign bit makes its integer negative, so that clipping sends it to the zero bucket.
        bucket = np.clip((values.view(np.int64) >> _DROPPED_BITS) - (_FIRST - 1), 0, _LAST_BUCKET)
        np.add.at(self._buckets, bucket, 1)
        self._cumulative = None
        self.count += len(values)
        self.total += float(values.sum())
        self.minimum = min(self.minimum, float(values.min()))
        self.maximum = max(self.maximum, float(values.max()))

    def percentile(self, percent: float) -> float | None:
        """Return the percentile, linear between neighbours; None when empty."""
        if not self.count:
            return None
        position = (self.count - 1) * percent / 100
        lower = math.floor(position)
        below = self._order_statistic(lower)
        above = self._order_statistic(min(lower + 1, self.count - 1))
        return below + (above - below) * (position - lower)

    def _order_statistic(self, rank: int) -> float:
        """Return the value of this rank, from 0: the middle of its bucket, exact at both ends."""
        if rank <= 0:
            return self.minimum
        if rank >= self.count - 1:
            return self.maximum
        if self._cumulative is None:
            self._cumulative = np.cumsum(self._buckets)
        bucket = int(np.searchsorted(self._cumulative, rank, side="right"))
        return min(max(_middle(bucket), self.minimum), self.maximum)


def _middle(bucket: int) -> float:
    """Return the middle of a bucket; 0 for the lowest, infinity for the highest."""
    if bucket == 0:
        return 0.0
    if bucket == _LAST_BUCKET:
        return math.inf
    bits = ((_FIRST + bucket - 1) << _DROPPED_BITS) | (1 << (_DROPPED_BITS - 1))
    middle: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return middle


class Blocks:
    """A column of numbers that only grows: recent ones in a small array, older ones in sealed blocks.

    One large array would be copied each time it grows. Several growing arrays would fragment the heap, at the cost
    of another quarter of their size.
    """

    def __init__(self) -> None:
        self._recent: array[float] = array("d")
        self._sealed: list[npt.NDArray[np.float64]] = []
        self.append = self._recent.append
        """Add one number: the array's own method, as this is called for every response."""

    def __len__(self) -> int:
        return sum(map(len, self._sealed)) + len(self._recent)

    def __iter__(self) -> Iterator[float]:
        for block in self._sealed:
            yield from block.tolist()
        yield from self._recent.tolist()

    def append_all(self, numbers: list[float]) -> None:
        """Add a few at once, to be sealed with those around them."""
        self._recent.fromlist(numbers)

    def seal(self) -> npt.NDArray[np.float64]:
        """Move the recent numbers to a block, and return it; call it every thousand numbers or so."""
        block: npt.NDArray[np.float64] = np.array(self._recent)
        if len(block):
            self._sealed.append(block)
            del self._recent[:]
        return block

    def extend(self, numbers: npt.NDArray[np.float64]) -> None:
        """Add many at once."""
        if len(numbers):
            self._sealed.append(numbers.copy())

    def joined(self) -> npt.NDArray[np.float64]:
        """Return all numbers in a new array, which the caller may reorder."""
        return np.concatenate([*self._sealed, np.array(self._recent)])

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuilt, (self.joined(),))


def _rebuilt(numbers: npt.NDArray[np.float64]) -> Blocks:
    blocks = Blocks()
    blocks.extend(numbers)
    return blocks
