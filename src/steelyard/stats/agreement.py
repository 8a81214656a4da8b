"""How well two raters agree: a judge with people, or two judges with each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from statistics import NormalDist
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.stats.intervals import Floats, Interval

Integers: TypeAlias = npt.NDArray[np.int64]

_BLOCK_CELLS = 500_000  # draws held at once; with what is computed from them some 25 MB


class Confusion(msgspec.Struct, frozen=True):
    """How often each pair of labels came: `counts[row][column]`, rows for the first rater, columns for the second."""

    labels: tuple[Any, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def n(self) -> int:
        return sum(map(sum, self.counts))


def spearman(x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> float | None:
    """Spearman's rho, ties by average ranks; None when it is undefined: under two pairs, or one side all the same."""
    pairs = _pairs(x, y)
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    if len(distinct) < 2:
        return None
    (rho,) = _weighted_rho(_Sides(distinct), counts[np.newaxis, :]).tolist()
    return None if math.isnan(rho) else rho


def spearman_interval(
    x: Sequence[float] | Floats,
    y: Sequence[float] | Floats,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval | None:
    """The percentile bootstrap interval of rho, the same in any order of the pairs; None when rho is undefined.

    Resamples in which rho is undefined are left out.
    """
    _check_confidence(confidence)
    if resamples < 1:
        raise ValueError(f"resamples must be >= 1, got {resamples}")
    if spearman(x, y) is None:
        return None
    distinct, counts = np.unique(_pairs(x, y), axis=0, return_counts=True)
    drawn = np.concatenate(list(_resampled(distinct, counts, resamples, seed)))
    drawn = drawn[~np.isnan(drawn)]
    if not len(drawn):
        return None
    tail = (1 - confidence) / 2 * 100
    low, high = np.percentile(drawn, (tail, 100 - tail)).tolist()
    return low, high


def labels_needed(rho: float, n: int, lower: float = 0.70, confidence: float = 0.95) -> int | None:
    """About how many more labels than `n` would bring the lower end of rho's interval above `lower`.

    0 when `n` should do; None when rho itself is not above `lower`, so that no number of labels would.
    By Fisher's z with the variance of Bonett and Wright (2000): an estimate, where the verdict is the bootstrap's.
    """
    _check_confidence(confidence)
    for name, value in (("rho", rho), ("lower", lower)):
        if not -1 <= value <= 1:
            raise ValueError(f"{name} must be within -1..1, got {value}")
    if n < 0:
        raise ValueError(f"n must be >= 0, got {n}")
    if rho <= lower:
        return None
    reach = NormalDist().inv_cdf((1 + confidence) / 2)
    distance = math.inf if rho == 1 or lower == -1 else math.atanh(rho) - math.atanh(lower)
    variance = 1 + rho * rho / 2
    # The least total with reach * sqrt(variance / (total - 3)) < distance.
    total = 4 + math.floor(variance * (reach / distance) ** 2)
    return max(total - n, 0)


def confusion(a: Sequence[Hashable], b: Sequence[Hashable]) -> Confusion:
    """The table of which labels met; its labels are those that either rater used, sorted."""
    if len(a) != len(b):
        raise ValueError(f"both raters must label the same cases, got {len(a)} and {len(b)} labels")
    met = Counter(zip(a, b, strict=True))
    labels = _sorted({label for pair in met for label in pair})
    return Confusion(labels, tuple(tuple(met[row, column] for column in labels) for row in labels))


def cohen_kappa(a: Sequence[Hashable], b: Sequence[Hashable]) -> float | None:
    """Cohen's kappa, for two labels or more; None when it is undefined: no labels, or only one, used by both."""
    table = confusion(a, b)
    n = table.n
    agreed = sum(table.counts[i][i] for i in range(len(table.labels)))
    by_chance = sum(
        sum(row) * sum(column) for row, column in zip(table.counts, zip(*table.counts, strict=True), strict=True)
    )
    # In whole numbers, so that it is exactly 1, 0 or undefined where it should be.
    if by_chance == n * n:
        return None
    return float((agreed * n - by_chance) / (n * n - by_chance))


class _Sides:
    """Distinct pairs, and for each side how to get from counts of pairs to the average rank of each pair."""

    def __init__(self, distinct: Floats) -> None:
        self._sides = [_Side(distinct[:, column]) for column in (0, 1)]

    def centred_ranks(self, counts: Integers) -> tuple[Floats, Floats]:
        first, second = (side.centred_ranks(counts) for side in self._sides)
        return first, second


class _Side:
    def __init__(self, values: Floats) -> None:
        _, self._value_of_pair = np.unique(values, return_inverse=True)
        self._order = np.argsort(self._value_of_pair, kind="stable")
        ordered = self._value_of_pair[self._order]
        self._starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])

    def centred_ranks(self, counts: Integers) -> Floats:
        """The average rank of each pair's value in each resample (a row of counts), less the mean of all ranks."""
        ties = np.add.reduceat(counts[:, self._order], self._starts, axis=1)
        last = np.cumsum(ties, axis=1)
        ranks = last - (ties - 1) / 2 - (last[:, -1:] + 1) / 2
        centred: Floats = ranks[:, self._value_of_pair]
        return centred


def _weighted_rho(sides: _Sides, counts: Integers) -> Floats:
    """Rho for each row of counts of the distinct pairs; NaN where a side has a single value."""
    first, second = sides.centred_ranks(counts)
    together = (counts * first * second).sum(axis=1)
    # Ranks are halves, so the sums are exact; one root of the product makes perfect agreement exactly 1.
    apart = np.sqrt((counts * first * first).sum(axis=1) * (counts * second * second).sum(axis=1))
    rho: Floats = np.full(len(counts), np.nan)
    np.divide(together, apart, out=rho, where=apart > 0)
    return np.clip(rho, -1.0, 1.0)


def _resampled(distinct: Floats, counts: Integers, resamples: int, seed: int) -> Iterator[Floats]:
    """Rho of resamples of the same size, a block at a time: how often each distinct pair comes is one multinomial."""
    rng = np.random.default_rng(seed)
    n = int(counts.sum())
    sides = _Sides(distinct)
    rows = max(1, _BLOCK_CELLS // len(distinct))
    for start in range(0, resamples, rows):
        yield _weighted_rho(sides, rng.multinomial(n, counts / n, size=min(rows, resamples - start)))


def _pairs(x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> Floats:
    if len(x) != len(y):
        raise ValueError(f"x and y must be as long as each other, got {len(x)} and {len(y)} values")
    # Adding zero makes -0.0 and 0.0 the one value that they are.
    pairs: Floats = np.column_stack([np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)]) + 0.0
    missing = np.flatnonzero(np.isnan(pairs).any(axis=1))
    if len(missing):
        raise ValueError(f"a pair must not hold NaN, got one at {int(missing[0])}")
    return pairs


def _sorted(labels: set[Hashable]) -> tuple[Hashable, ...]:
    """In their own order where they have one; else by type and spelling."""
    try:
        return tuple(sorted(labels))  # type: ignore[type-var]
    except TypeError:
        return tuple(sorted(labels, key=lambda label: (type(label).__name__, repr(label))))


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
