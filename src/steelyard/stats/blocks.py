"""Numbers kept as they arrive, 8 bytes each, without ever moving those that are there."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

LIMIT = 1e300
"""Past this a value is as good as infinite: a hundred million of them still add up to a float."""


class Blocks:
    """A column of numbers that only grows: recent ones in a small array, older ones in sealed blocks.

    One large array would have to be moved each time it outgrows its place. Several that grow side by side
    leave holes in the heap that cost a quarter of their size again.
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
        """Put the recent numbers away as a block, and return it; to be called every thousand or so."""
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
        """All numbers in one array of its own, which the caller may reorder."""
        return np.concatenate([*self._sealed, np.array(self._recent)])

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuilt, (self.joined(),))


def _rebuilt(numbers: npt.NDArray[np.float64]) -> Blocks:
    blocks = Blocks()
    blocks.extend(numbers)
    return blocks
