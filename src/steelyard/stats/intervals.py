"""How far a rate or a mean may be from the truth: intervals that do not depend on the order of the values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.stats.distributions import (
    beta_cdf,
    beta_quantile,
    binomial_cdf,
    gamma_sum_below_zero,
    increasing_root,
    normal_quantile,
    student_quantile,
)

Interval: TypeAlias = tuple[float, float]
Floats: TypeAlias = npt.NDArray[np.float64]

_MERGE_ABOVE = 4_096
"""With more different observations than this, near ones are merged into `_BINS`."""
_BINS = 4_096
_SIZE_BINS = 64
_PART = 16_384
"""How many observations are taken at a time: a run may have millions, and each step would copy them all."""
_ROUNDING = 1e-9


class BoundedMean:
    """The mean of observations that lie within `low`..`high`, with bounds that hold for few, equal or skewed ones.

    The bounds are Gaffke's (2005): the observations are weighted by Dirichlet(1, …, 1) draws together with one more
    at the far end of the range, and the bound is a quantile of the weighted mean. The quantile is computed, not drawn,
    so it is the same each time and in any order; equal observations are one gamma variable with their number as its
    shape. On noughts and ones this is exactly Clopper and Pearson's interval. That it holds in general is conjectured
    (Learned-Miller and Thomas 2019) and borne out by every simulation, not proved.

    An observation may be the mean of a cluster (the trials of a case, the cases of a document). With `sizes` the mean
    is that of all members, the sum of size × value over the sum of sizes, and the added cluster is as large as the
    largest.
    """

    def __init__(
        self,
        values: Sequence[float] | Floats,
        *,
        low: float = 0.0,
        high: float = 1.0,
        sizes: Sequence[float] | Floats | None = None,
    ) -> None:
        observed: Floats = np.asarray(values, dtype=np.float64)
        weights = _ones(len(observed)) if sizes is None else np.asarray(sizes, dtype=np.float64)
        if len(weights) != len(observed):
            raise ValueError(f"each value needs a size, got {len(observed)} values and {len(weights)} sizes")
        if len(weights) and not weights.min() > 0:
            raise ValueError(f"sizes must be > 0, got {weights.min()}")
        self._set(observed, weights, _ones(len(observed)), low, high)

    @classmethod
    def of_counts(
        cls, values: Sequence[float] | Floats, counts: Sequence[float] | Floats, *, low: float = 0.0, high: float = 1.0
    ) -> BoundedMean:
        """Observations given as distinct values and how often each came; a number may be a fraction, for planning."""
        mean = cls.__new__(cls)
        shapes: Floats = np.asarray(counts, dtype=np.float64)
        seen = shapes > 0
        observed: Floats = np.asarray(values, dtype=np.float64)
        mean._set(observed[seen], _ones(int(seen.sum())), shapes[seen], low, high)
        return mean

    @classmethod
    def over_groups(
        cls,
        values: Sequence[float] | Floats,
        groups: Sequence[Hashable] | npt.NDArray[Any],
        *,
        low: float = 0.0,
        high: float = 1.0,
    ) -> BoundedMean:
        """Observations clustered by the group each belongs to; a group of one is a plain observation."""
        observed: Floats = np.asarray(values, dtype=np.float64)
        if len(groups) != len(observed):
            raise ValueError(f"each value needs a group, got {len(observed)} values and {len(groups)} groups")
        numbers: dict[Hashable, int] = {}
        member_of = np.fromiter((numbers.setdefault(group, len(numbers)) for group in groups), np.int64, len(observed))
        sizes = np.bincount(member_of, minlength=len(numbers)).astype(np.float64)
        return cls(np.bincount(member_of, observed, len(numbers)) / sizes, low=low, high=high, sizes=sizes)

    def _set(self, values: Floats, sizes: Floats, shapes: Floats, low: float, high: float) -> None:
        if not low < high:
            raise ValueError(f"low must be below high, got {low} and {high}")
        if len(values) and not (low - _ROUNDING <= values.min() and values.max() <= high + _ROUNDING):
            raise ValueError(f"values must be within {low:g}..{high:g}, got {values.min():g}..{values.max():g}")
        self.low, self.high = low, high
        self.n = float(shapes.sum())
        """How many observations (clusters) there are."""
        if not len(values):
            self._sizes = self._totals = self._shapes = values
            self._largest, self.mean = 1.0, math.nan
            return
        self._largest = float(sizes.max())
        observations = _Observations(values, sizes, shapes, low, high)
        self.mean = observations.mean()
        """The mean of all members; NaN without any."""
        self._totals, self._sizes, self._shapes = observations.merged()
        self._successes = self._count_successes()

    def _count_successes(self) -> float | None:
        """Of observations that all lie at the ends, how many are at the upper one; None where others are."""
        if (self._sizes != self._largest).any():
            return None
        values = self._totals / self._largest
        at_top = values == self.high
        return float(self._shapes[at_top].sum()) if (at_top | (values == self.low)).all() else None

    def chance_below(self, at: float) -> float:
        """How likely so high a sample is if the true mean were `at`: the one-sided p of "the mean is at most this"."""
        if not len(self._totals) or at >= self.high:
            return 1.0
        if at <= self.low:
            return 1.0 if at == self.low and self.mean == self.low else 0.0
        if self._successes is not None:
            share = (at - self.low) / (self.high - self.low)
            return beta_cdf(share, self._successes, self.n - self._successes + 1)
        return self._weighted_below(at, self.low)

    def chance_above(self, at: float) -> float:
        """How likely so low a sample is if the true mean were `at`: the one-sided p of "the mean is at least this"."""
        if not len(self._totals) or at <= self.low:
            return 1.0
        if at >= self.high:
            return 1.0 if at == self.high and self.mean == self.high else 0.0
        if self._successes is not None:
            share = (at - self.low) / (self.high - self.low)
            return beta_cdf(1 - share, self.n - self._successes, self._successes + 1)
        return 1.0 - self._weighted_below(at, self.high)

    def _weighted_below(self, at: float, extreme: float) -> float:
        slopes = np.append(self._totals - at * self._sizes, (extreme - at) * self._largest)
        return gamma_sum_below_zero(slopes, np.append(self._shapes, 1.0))

    def lower(self, alpha: float = 0.025) -> float:
        """The lower bound: the true mean is below it with a chance of at most alpha."""
        _check_alpha(alpha)
        if not len(self._totals):
            return self.low
        if self._successes is not None:
            share = beta_quantile(alpha, self._successes, self.n - self._successes + 1) if self._successes else 0.0
            return self.low + share * (self.high - self.low)
        largest = float((self._totals / self._sizes).max())
        return self._bound(alpha, self.low, self.low, min(largest, self.high)) if largest > self.low else self.low

    def upper(self, alpha: float = 0.025) -> float:
        """The upper bound: the true mean is above it with a chance of at most alpha."""
        _check_alpha(alpha)
        if not len(self._totals):
            return self.high
        if self._successes is not None:
            failures = self.n - self._successes
            share = beta_quantile(1 - alpha, self._successes + 1, failures) if failures else 1.0
            return self.low + share * (self.high - self.low)
        smallest = float((self._totals / self._sizes).min())
        return self._bound(1 - alpha, self.high, max(smallest, self.low), self.high)

    def _bound(self, p: float, extreme: float, low: float, high: float) -> float:
        """The quantile of the weighted mean with one more observation at `extreme`, from a normal guess on."""
        if low >= high:
            return low
        wanted = normal_quantile(p)
        sizes, shapes = np.append(self._sizes, self._largest), np.append(self._shapes, 1.0)
        values = np.append(self._totals, extreme * self._largest) / sizes
        weights = sizes * shapes / float(sizes @ shapes)
        centre = float(weights @ values)
        spread = math.sqrt(max(float((weights * sizes) @ (values - centre) ** 2) / float(sizes @ shapes), 1e-300))

        def miss(at: float) -> float:
            found = normal_quantile(self._weighted_below(at, extreme))
            return min(max(found, -40.0), 40.0) - wanted

        return increasing_root(miss, low, high, centre + wanted * spread, 1 / spread)

    def interval(self, confidence: float = 0.95) -> Interval:
        """The two-sided interval, with as much outside at either end."""
        _check_confidence(confidence)
        alpha = (1 - confidence) / 2
        return self.lower(alpha), self.upper(alpha)

    def p_value(self, null: float) -> float:
        """The two-sided p of "the mean is `null`": below 0.05 exactly where the 95 % interval leaves it out."""
        return min(1.0, 2 * min(self.chance_below(null), self.chance_above(null)))


class StudentMean:
    """The mean of observations without known bounds, such as steps or words: its interval is Student's.

    With `groups` the observations of a group count together, and there are as many degrees of freedom as groups less
    one. Nothing is known of how far a mean may be off that is of one observation, or of equal ones.
    """

    def __init__(
        self,
        values: Sequence[float] | Floats,
        groups: Sequence[Hashable] | npt.NDArray[Any] | None = None,
    ) -> None:
        observed: Floats = np.asarray(values, dtype=np.float64)
        self.mean = math.fsum(observed) / len(observed) if len(observed) else math.nan
        residuals: Floats = observed - self.mean
        if groups is not None:
            numbers: dict[Hashable, int] = {}
            member_of = np.fromiter((numbers.setdefault(one, len(numbers)) for one in groups), np.int64, len(observed))
            residuals = np.bincount(member_of, residuals, len(numbers)).astype(np.float64)
        self.n = len(residuals)
        """How many observations, or groups of them, there are."""
        squares = float((residuals**2).sum())
        spread = math.sqrt(squares * self.n / (self.n - 1)) / len(observed) if self.n > 1 else 0.0
        # What is left of equal values is rounding.
        self.std_error = spread if len(observed) and spread > _ROUNDING * float(np.abs(observed).max()) else 0.0

    def interval(self, confidence: float = 0.95) -> Interval | None:
        """The two-sided interval; None with fewer than two observations, and where all are equal."""
        _check_confidence(confidence)
        if not self.std_error:
            return None
        reach = student_quantile(0.5 + confidence / 2, self.n - 1) * self.std_error
        return self.mean - reach, self.mean + reach

    def p_value(self, null: float) -> float:
        """The two-sided p of "the mean is `null`"; 1 where nothing is known."""
        if not self.std_error:
            return 1.0
        t, freedom = (self.mean - null) / self.std_error, self.n - 1
        return beta_cdf(freedom / (freedom + t * t), freedom / 2, 0.5)


def bounded_mean_interval(
    values: Sequence[float] | Floats,
    *,
    low: float = 0.0,
    high: float = 1.0,
    groups: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
) -> Interval | None:
    """The interval of a mean of values within low..high, clustered by group where given.

    None without values, and where some are outside: of what has no known range nothing is known for sure.
    """
    if not len(values) or np.min(values) < low - _ROUNDING or np.max(values) > high + _ROUNDING:
        return None
    if groups is not None:
        return BoundedMean.over_groups(values, groups, low=low, high=high).interval(confidence)
    return BoundedMean(values, low=low, high=high).interval(confidence)


def clopper_pearson(successes: float, n: float, confidence: float = 0.95) -> Interval | None:
    """The exact interval of a rate; None when nothing was tried."""
    _check_confidence(confidence)
    alpha = (1 - confidence) / 2
    return (rate_lower(successes, n, alpha), rate_upper(successes, n, alpha)) if n else None


def rate_lower(successes: float, n: float, alpha: float = 0.05) -> float:
    """The exact one-sided lower bound of a rate (Clopper and Pearson); 0 when nothing was tried."""
    _check_counts(successes, n)
    _check_alpha(alpha)
    return beta_quantile(alpha, successes, n - successes + 1) if successes > 0 else 0.0


def rate_upper(successes: float, n: float, alpha: float = 0.05) -> float:
    """The exact one-sided upper bound of a rate (Clopper and Pearson); 1 when nothing was tried."""
    _check_counts(successes, n)
    _check_alpha(alpha)
    return beta_quantile(1 - alpha, successes + 1, n - successes) if successes < n else 1.0


class Percentile(msgspec.Struct, frozen=True, kw_only=True):
    """A percentile, its interval by order statistics, and which of the figures are only known to be at least that."""

    n: int
    """How many values there are, those that were broken off included."""
    censored: int
    """How many of them were broken off (timed out), so that they are only known to be longer."""
    value: float | None
    value_at_least: bool
    """Whether the percentile lies among values that were broken off: it is this or more."""
    low: float | None
    """The interval's lower end; None where there are too few values for it."""
    high: float | None
    """The interval's upper end; infinite where it lies among values that were broken off, None with too few."""
    needed: int
    """How many values it takes for both ends."""

    @property
    def interval(self) -> Interval | None:
        """Both ends; None with too few values."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def percentile(
    values: Sequence[float] | Floats,
    percent: float,
    *,
    censored: Sequence[float] | Floats = (),
    confidence: float = 0.95,
    effective_n: float | None = None,
) -> Percentile:
    """A percentile of values in any order, with its interval; `censored` holds when each broken-off one was broken off.

    Ranks are certain where no broken-off value can change them. Elsewhere a figure is the least that it can be.
    With `effective_n` (see there) the interval is as wide as for that many independent values.
    """
    (found,) = percentiles(values, (percent,), censored=censored, confidence=confidence, effective_ns=(effective_n,))
    return found


def percentiles(
    values: Sequence[float] | Floats,
    percents: Sequence[float],
    *,
    censored: Sequence[float] | Floats = (),
    confidence: float = 0.95,
    effective_ns: Sequence[float | None] | None = None,
    overwrite_input: bool = False,
) -> list[Percentile]:
    """Several percentiles of the same values; see `percentile`. With `overwrite_input` the values are reordered."""
    whole: Floats = np.asarray(values, np.float64) if overwrite_input else np.array(values, np.float64)
    cut: Floats = np.asarray(censored, np.float64)
    n = len(whole) + len(cut)
    needs = [percentile_needs(percent, confidence) for percent in percents]
    if not n:
        return [_no_percentile(needed) for needed in needs]
    given = effective_ns or [None] * len(percents)
    ends = [
        percentile_ranks(n, percent, confidence, effective_n=effective)
        for percent, effective in zip(percents, given, strict=True)
    ]
    places = {place for percent in percents for place in _places(n, percent)}
    places.update(rank - 1 for pair in ends for rank in pair if rank is not None)
    # Broken-off ones as late as they can have ended, which is unknown, so infinite; and as early.
    latest = _ordered(whole, places)
    earliest = _ordered(np.concatenate([whole, cut]), places) if len(cut) else latest
    return [
        Percentile(
            n=n,
            censored=len(cut),
            value=(value := _interpolated(earliest, n, percent)),
            value_at_least=_interpolated(latest, n, percent) > value,
            low=None if low is None else earliest[low - 1],
            high=None if high is None else latest[high - 1],
            needed=needed,
        )
        for percent, (low, high), needed in zip(percents, ends, needs, strict=True)
    ]


def _no_percentile(needed: int) -> Percentile:
    return Percentile(n=0, censored=0, value=None, value_at_least=False, low=None, high=None, needed=needed)


def _ordered(values: Floats, places: Collection[int]) -> dict[int, float]:
    """What stands at some places once the values, which are reordered, are sorted; after them comes infinity."""
    there = sorted(place for place in places if place < len(values))
    if there:
        values.partition(there)
    return {**dict.fromkeys(places, math.inf), **{place: float(values[place]) for place in there}}


def percentile_bound(
    values: Sequence[float] | Floats,
    percent: float,
    *,
    upper: bool = True,
    censored: Sequence[float] | Floats = (),
    alpha: float = 0.05,
) -> float | None:
    """The one-sided bound of a percentile; infinite where it lies among broken-off values, None with too few."""
    found = percentile(values, percent, censored=censored, confidence=1 - 2 * alpha)
    return found.high if upper else found.low


def percentile_needs(percent: float, confidence: float = 0.95, *, one_sided: bool = False) -> int:
    """How many values an interval of this percentile takes: 6, 36, 72, 368 for p50, p90, p95, p99 with two sides."""
    _check_percent(percent)
    _check_confidence(confidence)
    alpha = 1 - confidence if one_sided else (1 - confidence) / 2
    share = percent / 100 if one_sided else max(percent, 100 - percent) / 100
    return math.ceil(math.log(alpha) / math.log(share) - 1e-9)


def percentile_ranks(
    n: int, percent: float, confidence: float = 0.95, *, effective_n: float | None = None
) -> tuple[int | None, int | None]:
    """The ranks, from 1, of the values that hold the percentile between them; None for an end that n is too small for.

    Fewer values than the lower rank are below the percentile with a chance of at most half of what is left outside;
    as for the upper one. With an effective n the ranks are found for that many values and stretched to all of them.
    """
    _check_percent(percent)
    _check_confidence(confidence)
    alpha, share = (1 - confidence) / 2, percent / 100
    independent = n if effective_n is None else max(1, min(n, math.floor(effective_n)))
    lower = _first(lambda k: binomial_cdf(k, independent, share) > alpha, 0, independent)
    upper = 1 + _first(lambda k: 1 - binomial_cdf(k, independent, share) <= alpha, 0, independent)
    low, high = lower or None, upper if upper <= independent else None
    if independent == n:
        return low, high
    stretch = (n + 1) / (independent + 1)
    return (
        None if low is None else max(1, math.floor(low * stretch)),
        None if high is None else min(n, math.ceil(high * stretch)),
    )


def effective_n(values: Sequence[float] | Floats, percent: float, batches: int = 10) -> float:
    """As how many independent values these, in the order in which they came, count for a percentile.

    Neighbours are alike under load. Whether a value is above the percentile is averaged in consecutive batches; what
    these differ by, against what independent values would differ by, is how much less they tell. Never more than
    there are. Broken-off values are given as infinite.
    """
    _check_percent(percent)
    numbers: Floats = np.asarray(values, dtype=np.float64)
    n, share = len(numbers), percent / 100
    if n < 2 * batches:
        return float(n)
    return effective_n_of(numbers > np.quantile(numbers, share, method="inverted_cdf"), share, batches)


def effective_n_of(above: npt.NDArray[np.bool_], share: float | None = None, batches: int = 10) -> float:
    """As how many independent answers these, in order, count for the share of those that are true; see `effective_n`.

    `share` is what of them are not, where that is known beforehand.
    """
    n = len(above)
    rate = float(above.mean()) if n else 0.0
    expected = rate * (1 - rate) if share is None else share * (1 - share)
    if n < 2 * batches or not expected:
        return float(n)
    variance = float(np.var([part.mean() for part in np.array_split(above, batches)], ddof=1)) / batches
    if variance * n <= expected:
        return float(n)
    # The batches' variance is itself uncertain: Student's t in place of the normal widens for that.
    inflation = (student_quantile(0.975, batches - 1) / normal_quantile(0.975)) ** 2
    return expected / (variance * inflation)


def _places(n: int, percent: float) -> tuple[int, ...]:
    """The place, or the two, from 0, between which the linear percentile of n sorted values lies."""
    place = percent / 100 * (n - 1)
    below = math.floor(place + 1e-9)
    return (below,) if place - below <= 1e-9 else (below, below + 1)


def _interpolated(ordered: Mapping[int, float], n: int, percent: float) -> float:
    """The linear percentile of sorted values; infinite where one of the two it lies between is."""
    below, *above = _places(n, percent)
    if not above:
        return ordered[below]
    first, second = ordered[below], ordered[below + 1]
    return second if math.isinf(second) else first + (percent / 100 * (n - 1) - below) * (second - first)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The least number from low on for which something holds, that then goes on to hold; `high` where none does."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


class _Observations:
    """Clusters as totals, sizes and shapes (how many are alike), a part at a time: each pass takes little memory."""

    def __init__(self, values: Floats, sizes: Floats, shapes: Floats, low: float, high: float) -> None:
        self._values, self._sizes, self._shapes = values, sizes, shapes
        self._low, self._high = low, high

    def _parts(self) -> Iterator[tuple[Floats, Floats, Floats]]:
        for start in range(0, len(self._values), _PART):
            part = slice(start, start + _PART)
            sizes = self._sizes[part]
            yield np.clip(self._values[part], self._low, self._high) * sizes + 0.0, sizes, self._shapes[part]

    def mean(self) -> float:
        """The mean of all members, summed exactly."""
        total = math.fsum(each for totals, _, shapes in self._parts() for each in (totals * shapes).tolist())
        members = math.fsum(each for _, sizes, shapes in self._parts() for each in (sizes * shapes).tolist())
        return min(max(total / members, self._low), self._high)

    def merged(self) -> tuple[Floats, Floats, Floats]:
        """Equal observations as one, with their number; where very many differ, near ones too: no shown digit moves."""
        pairs = self._distinct()
        if pairs is None:
            return self._in_bins()
        merged = np.zeros(len(pairs))
        for totals, sizes, shapes in self._parts():
            np.add.at(merged, np.searchsorted(pairs, totals + 1j * sizes), shapes)
        return pairs.real.copy(), pairs.imag.copy(), merged

    def _distinct(self) -> npt.NDArray[np.complex128] | None:
        """The different pairs of total and size, in order; None where they are more than are kept apart."""
        pairs = np.zeros(0, dtype=np.complex128)
        for totals, sizes, _ in self._parts():
            pairs = np.union1d(pairs, totals + 1j * sizes)
            if len(pairs) > _MERGE_ABOVE:
                return None
        return pairs

    def _in_bins(self) -> tuple[Floats, Floats, Floats]:
        columns = 1 if self._sizes.min() == self._sizes.max() else _SIZE_BINS
        by_value = _Bins((totals / sizes for totals, sizes, _ in self._parts()), _BINS // columns)
        by_size = _Bins((np.log(sizes) for _, sizes, _ in self._parts()), columns)
        sums = np.zeros((3, by_value.count * by_size.count))
        # Each is added in turn, so that the sums do not depend on where a part ends.
        for totals, sizes, shapes in self._parts():
            key = by_value.of(totals / sizes) * columns + by_size.of(np.log(sizes))
            for row, added in zip(sums, (totals * shapes, sizes * shapes, shapes), strict=True):
                np.add.at(row, key, added)
        totals, sizes, merged = sums[:, sums[2] > 0]
        return totals / merged, sizes / merged, merged


class _Bins:
    """As many equally wide bins as asked for, from the least of some values to the greatest."""

    def __init__(self, parts: Iterator[Floats], count: int) -> None:
        ends = [(float(part.min()), float(part.max())) for part in parts]
        self._low, self._high = min(low for low, _ in ends), max(high for _, high in ends)
        self.count = count

    def of(self, values: Floats) -> npt.NDArray[np.int64]:
        if self._high <= self._low or self.count < 2:
            return np.zeros(len(values), dtype=np.int64)
        scaled = (values - self._low) * (self.count / (self._high - self._low))
        return np.minimum(scaled, self.count - 1).astype(np.int64)


def _ones(count: int) -> Floats:
    """That many ones, to be read only: they take no memory."""
    ones: Floats = np.broadcast_to(np.float64(1.0), (count,))
    return ones


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")


def _check_percent(percent: float) -> None:
    if not 0 < percent < 100:
        raise ValueError(f"percent must be between 0 and 100, got {percent}")


def _check_counts(successes: float, n: float) -> None:
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be within 0..{n}, got {successes}")
