"""Counting how often each digest was met, without a dictionary of a million entries."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

SMALLEST_BATCH = 4096


class Occurrences:
    """Numbers each digest's occurrences from 1, in 8 bytes for each one that is met once.

    Digests met once are kept in a sorted array; new ones wait in a small set until there are enough to
    merge. Only a digest that is met again costs a dictionary entry. Where the repeated ones are known
    from an earlier pass (`among`), nothing else is kept at all.
    """

    def __init__(self, among: frozenset[int] | None = None) -> None:
        self._among = among
        self._counts: dict[int, int] = {}
        self._recent: set[int] = set()
        self._settled = np.empty(0, dtype=np.uint64).data

    @property
    def repeated(self) -> frozenset[int]:
        """The digests that were met more than once."""
        return frozenset(digest for digest, count in self._counts.items() if count > 1)

    def count(self, digest: int) -> int:
        """Which occurrence of this digest this is."""
        count = self._counts.get(digest, 0)
        if not count:
            if self._among is not None:
                if digest not in self._among:
                    return 1
            elif digest not in self._recent and not self._is_settled(digest):
                self._remember(digest)
                return 1
            else:
                count = 1
        self._counts[digest] = count + 1
        return count + 1

    def _is_settled(self, digest: int) -> bool:
        place = bisect_left(self._settled, digest)
        return place < len(self._settled) and self._settled[place] == digest

    def _remember(self, digest: int) -> None:
        self._recent.add(digest)
        # A share of the whole, so that the merges together cost O(n log n), and small, as a set is bulky.
        if len(self._recent) >= max(SMALLEST_BATCH, len(self._settled) // 16):
            recent = np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))
            self._recent.clear()
            merged = np.concatenate([np.asarray(self._settled), recent])
            merged.sort()
            self._settled = merged.data
