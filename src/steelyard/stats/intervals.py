"""How far a rate or a mean may be from the truth: intervals that do not depend on the order of the values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Interval: TypeAlias = tuple[float, float]
Floats: TypeAlias = npt.NDArray[np.float64]

# A resample costs a draw per distinct value: 2,000 of them take some 0.3 s. With more distinct values than that
# there are at least as many values, and the mean of so many is normal to more digits than anyone reads.
_MOST_DISTINCT = 2_000
_BLOCK_CELLS = 1_000_000  # draws held at once: 8 MB
_BLOCK_VALUES = 65_536


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval | None:
    """The Wilson score interval of a rate; None when nothing was tried."""
    _check_confidence(confidence)
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be within 0..{n}, got {successes}")
    if n == 0:
        return None
    z = _normal_quantile(confidence)
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # The formula meets 0 and 1 exactly at these ends; floating point only nearly.
    low = 0.0 if successes == 0 else max(centre - reach, 0.0)
    high = 1.0 if successes == n else min(centre + reach, 1.0)
    return low, high


def rate_over_cases(rate: float, cases: int) -> Interval:
    """The 95 % interval of a rate over trials, each case counted as one observation: safe however alike its trials."""
    successes = rate * cases
    nearest = round(successes)
    if math.isclose(successes, nearest):  # a third of three is one, whatever floating point makes of it
        successes = nearest
    lower, upper = wilson(math.floor(successes), cases), wilson(math.ceil(successes), cases)
    assert lower is not None
    assert upper is not None
    return lower[0], upper[1]


def mean_interval(values: Sequence[float] | Floats, *, least: float = 0.0, most: float = 1.0) -> Interval | None:
    """The 95 % interval of a mean of values within least..most; None without values.

    A mean of noughts and ones is a rate. Other values are resampled. Where they are all the same a resample cannot
    differ, and would claim certainty: there the share of values that may yet be otherwise is bounded as for a rate of
    which none was seen, and these are taken to differ as much as they could.
    """
    numbers: Floats = np.asarray(values, dtype=np.float64)
    if not len(numbers):
        return None
    if least == 0.0 and bool(((numbers == 0.0) | (numbers == 1.0)).all()):
        return wilson(int(numbers.sum()), len(numbers))
    value = float(numbers[0])
    if not bool((numbers == value).all()):
        return bootstrap_mean(numbers)
    unseen = wilson(0, len(numbers))
    assert unseen is not None
    return value - unseen[1] * (value - least), value + unseen[1] * (most - value)


def bootstrap_mean(
    values: Sequence[float] | Floats, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval | None:
    """The percentile bootstrap interval of a mean, the same in any order of the values; None without values."""
    _check_confidence(confidence)
    if resamples < 1:
        raise ValueError(f"resamples must be >= 1, got {resamples}")
    numbers: Floats = np.asarray(values, dtype=np.float64)
    if not len(numbers):
        return None
    least, most = float(numbers.min()), float(numbers.max())
    if least == most:
        return least, most
    tally = _tally(numbers)
    if tally is None:
        low, high = _normal_interval(numbers, confidence)
    else:
        means = np.concatenate(list(_resampled_means(*tally, resamples, seed)))
        tail = (1 - confidence) / 2 * 100
        low, high = np.percentile(means, (tail, 100 - tail)).tolist()
    return max(low, least), min(high, most)


def _tally(numbers: Floats) -> tuple[Floats, npt.NDArray[np.int64]] | None:
    """The distinct values, sorted, and how often each comes; None when there are too many. A block at a time."""
    tally: dict[float, int] = {}
    for start in range(0, len(numbers), _BLOCK_VALUES):
        distinct, counts = np.unique(numbers[start : start + _BLOCK_VALUES], return_counts=True)
        for value, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            tally[value] = tally.get(value, 0) + count
        if len(tally) > _MOST_DISTINCT:
            return None
    ordered = sorted(tally)
    return np.array(ordered), np.array([tally[value] for value in ordered], dtype=np.int64)


def _resampled_means(distinct: Floats, counts: npt.NDArray[np.int64], resamples: int, seed: int) -> Iterator[Floats]:
    """The means of resamples of the same size, a block of them at a time.

    To draw n values with replacement is to draw how often each distinct value comes: one multinomial.
    """
    rng = np.random.default_rng(seed)
    n = int(counts.sum())
    rows = max(1, _BLOCK_CELLS // len(distinct))
    for start in range(0, resamples, rows):
        draws = rng.multinomial(n, counts / n, size=min(rows, resamples - start))
        yield (draws * distinct).sum(axis=1) / n


def _normal_interval(numbers: Floats, confidence: float) -> Interval:
    n = len(numbers)
    mean = math.fsum(numbers) / n
    variance = math.fsum((number - mean) ** 2 for number in numbers.flat) / (n - 1)
    reach = _normal_quantile(confidence) * math.sqrt(variance / n)
    return mean - reach, mean + reach


def _normal_quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
