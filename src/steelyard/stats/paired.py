"""Two measurements of the same cases: how sure a difference is, by intervals and exact tests that look at pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from steelyard.stats.intervals import Interval, bootstrap_mean, mean_interval

Floats: TypeAlias = npt.NDArray[np.float64]

_RESAMPLES = 10_000
_RESAMPLES_OF_MANY = 2_000
_MANY_DISTINCT = 200
"""From so many different values on, a resample costs enough for fewer of them to do."""

_FEWEST_ONE_WAY = 6
"""The fewest cases, all changed one way, that are significant: 2 × 0.5⁶ is the first such number below 0.05."""

_POWER = 0.8


def mcnemar_exact(better: int, worse: int) -> float:
    """McNemar's exact two-sided p: how likely a split this uneven is, if each change were as likely either way.

    Cases that did not change do not enter. 1.0 when none did.
    """
    if better < 0 or worse < 0:
        raise ValueError(f"better and worse must be >= 0, got {better} and {worse}")
    below = _coin_cdf(better + worse)[min(better, worse)]
    return min(1.0, 2.0 * float(below))


def paired_interval(differences: Sequence[float] | Floats, seed: int = 0) -> Interval | None:
    """The 95 % interval of a mean difference of values within 0..1, by resampling whole cases; None without any.

    Where every case differs by the same amount that would claim certainty: see `mean_interval`.
    """
    numbers: Floats = np.asarray(differences, dtype=np.float64)
    if not len(numbers):
        return None
    least, most = float(numbers.min()), float(numbers.max())
    if least == most:
        return mean_interval(numbers, least=-1.0)
    many = len(np.unique(numbers)) > _MANY_DISTINCT
    return bootstrap_mean(numbers, resamples=_RESAMPLES_OF_MANY if many else _RESAMPLES, seed=seed)


def median_interval(values: Sequence[float] | Floats, confidence: float = 0.95) -> Interval | None:
    """An interval that holds the median at least this often, whatever the distribution; None with too few values.

    Its ends are two of the values: those between which a fair coin's heads stay that often in as many tosses.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    numbers: Floats = np.sort(np.asarray(values, dtype=np.float64))
    outside = int(np.searchsorted(_coin_cdf(len(numbers)), (1 - confidence) / 2, side="right"))
    if not outside:
        return None
    return float(numbers[outside - 1]), float(numbers[len(numbers) - outside])


def smallest_visible(differences: Sequence[float] | Floats) -> float | None:
    """The mean difference that as many cases, as scattered as these, would show four times in five; None if none.

    Never less than six cases that all change one way: fewer cannot reach p < 0.05.
    """
    numbers: Floats = np.asarray(differences, dtype=np.float64)
    if len(numbers) < _FEWEST_ONE_WAY:
        return None
    reach = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(_POWER)
    needed = max(_FEWEST_ONE_WAY / len(numbers), reach * float(numbers.std()) / math.sqrt(len(numbers)))
    return needed if needed <= 1 else None


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several tests, raised (Holm) so that the chance of any false alarm stays what it says."""
    order = sorted(range(len(p_values)), key=lambda position: p_values[position])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, position in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[position]))
        adjusted[position] = highest
    return adjusted


def _coin_cdf(tosses: int) -> Floats:
    """For each number of heads, how likely a fair coin shows no more than so many."""
    heads = np.arange(1, tosses + 1, dtype=np.float64)
    steps = np.log((tosses - heads + 1) / heads)
    logs = np.concatenate([[0.0], np.cumsum(steps)]) - tosses * math.log(2.0)
    return np.cumsum(np.exp(logs))
