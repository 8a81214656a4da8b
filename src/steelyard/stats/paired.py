"""Two measurements of the same cases: how sure a difference is, by intervals and exact tests that look at pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.stats.distributions import normal_quantile
from steelyard.stats.intervals import BoundedMean, Interval, StudentMean, percentile_ranks

Floats: TypeAlias = npt.NDArray[np.float64]

SIGNIFICANT = 0.05
_POWER = 0.8
_ALPHA = 0.025
_PLANNED = 60
"""Above this many changed cases a formula gives the power to a percent; below, samples are drawn and counted."""
_DRAWS = 3_000
_DRAWS_OF_MANY = 300
_MAX_CASES = 100_000_000

Outcome: TypeAlias = Literal["better", "worse", "no difference"]
Kept: TypeAlias = Literal["kept", "broken", "cannot tell"]


class PairedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The mean difference between two measurements of the same cases, and how sure it is, by one procedure."""

    cases: int
    groups: int
    """How many groups the cases belong to; as many as cases where they are not grouped."""
    difference: float
    ci95: Interval
    p: float
    """Two-sided: below 0.05 exactly where the interval leaves out 0."""


class NonInferiority(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a drop of more than a margin is ruled out."""

    margin: float
    outcome: Kept
    found: PairedDifference
    p: float
    """One-sided: the chance of so good a sample if the drop were as large as the margin."""
    cases_needed: int | None
    """About how many such cases would rule it out four times in five; None where it is decided or none would."""


def median_interval(
    values: Sequence[float] | Floats, confidence: float = 0.95, *, groups: Sequence[Hashable] | None = None
) -> Interval | None:
    """An interval that holds the median at least this often, whatever the distribution; None with too few values.

    Its ends are two of the values (order statistics). Grouped values count as many as would scatter as much alone.
    """
    numbers: Floats = np.sort(np.asarray(values, dtype=np.float64))
    if not len(numbers):
        return None
    independent = None
    if groups is not None:
        above = (np.asarray(values, dtype=np.float64) > np.median(numbers)).astype(np.float64)
        independent = len(numbers) / _design_effect(above, groups)
    low, high = percentile_ranks(len(numbers), 50, confidence, effective_n=independent)
    return None if low is None or high is None else (float(numbers[low - 1]), float(numbers[high - 1]))


def paired_mean(differences: Sequence[float] | Floats, groups: Sequence[Hashable] | None = None) -> BoundedMean:
    """The mean of per-case differences within −1..1 with its bounds, clustered by group where groups are given."""
    if groups is None:
        return BoundedMean(differences, low=-1.0)
    return BoundedMean.over_groups(differences, groups, low=-1.0)


def paired_difference(
    differences: Sequence[float] | Floats, groups: Sequence[Hashable] | None = None
) -> PairedDifference | None:
    """The mean of per-case differences (the run's share of passed trials less the baseline's); None without cases.

    Valid with unequal numbers of trials, few changes and few cases: the interval and p are Gaffke's, see `BoundedMean`.
    """
    if not len(differences):
        return None
    return _paired(paired_mean(differences, groups), len(differences))


def measured_difference(
    differences: Sequence[float] | Floats, groups: Sequence[Hashable] | None = None
) -> PairedDifference | None:
    """The same for a measurement, whose differences have no bounds, by Student's paired t.

    Where all differ by as much, their signs alone tell how sure it is. None without cases, and where one case, or one
    group, differs: of that nothing is known.
    """
    mean = StudentMean(differences, groups)
    interval, p = mean.interval(), mean.p_value(0.0)
    if interval is None:
        if mean.n < 1 or (mean.n == 1 and mean.mean):
            return None
        p = 2.0 ** (1 - mean.n) if mean.mean else 1.0
        near = mean.mean if p < SIGNIFICANT else 0.0
        interval = min(near, mean.mean), max(near, mean.mean)
    return PairedDifference(cases=len(differences), groups=mean.n, difference=mean.mean, ci95=interval, p=p)


def non_inferiority(
    differences: Sequence[float] | Floats,
    margin: float,
    groups: Sequence[Hashable] | None = None,
    *,
    alpha: float = _ALPHA,
    plan: bool = True,
) -> NonInferiority | None:
    """Whether a drop of more than `margin` is ruled out (kept), shown (broken) or neither; None without cases.

    A drop as large as the margin is taken for ruled out with a chance of at most alpha, however few the cases are.
    Without `plan` it is not worked out how many cases would do, which can take some tenths of a second.
    """
    if not 0 <= margin < 1:
        raise ValueError(f"margin must be within 0..1, got {margin}")
    if not len(differences):
        return None
    mean = paired_mean(differences, groups)
    p = mean.chance_below(-margin)
    outcome: Kept = "kept" if p <= alpha else "broken" if mean.chance_above(-margin) <= alpha else "cannot tell"
    needed = cases_needed(differences, margin, groups, alpha=alpha) if plan and outcome == "cannot tell" else None
    found = _paired(mean, len(differences))
    return NonInferiority(margin=margin, outcome=outcome, found=found, p=p, cases_needed=needed)


def unchanged_cases_needed(margin: float, alpha: float = _ALPHA) -> int:
    """How many cases, none of which changed, rule out a drop of `margin`: 368, 183, 72, 36 for 1, 2, 5, 10 points."""
    if not 0 < margin < 1:
        raise ValueError(f"margin must be between 0 and 1, got {margin}")
    return math.ceil(math.log(alpha) / math.log1p(-margin) - 1e-9)


def cases_needed(
    differences: Sequence[float] | Floats,
    margin: float = 0.0,
    groups: Sequence[Hashable] | None = None,
    *,
    alpha: float = _ALPHA,
    power: float = _POWER,
) -> int | None:
    """About how many cases, that change as these do, would show a mean above −margin four times in five.

    None where the mean is not above −margin, so that no number would. Grouped cases are counted as cases, in groups
    as alike as these.
    """
    numbers: Floats = np.asarray(differences, dtype=np.float64)
    if not len(numbers) or not float(numbers.mean()) > -margin + 1e-12:
        return None
    values, counts = np.unique(numbers, return_counts=True)
    plan = _Plan(values, counts / len(numbers), margin, alpha)
    found = plan.cases(power)
    return None if found is None else math.ceil(found * _design_effect(numbers, groups))


def smallest_detectable(
    differences: Sequence[float] | Floats,
    groups: Sequence[Hashable] | None = None,
    *,
    alpha: float = _ALPHA,
    power: float = _POWER,
) -> float | None:
    """The mean difference that as many cases, changing as much as these, would show four times in five; None if none.

    As many cases change, by as much; only more of them one way. Where that is not enough, more change as well.
    """
    numbers: Floats = np.asarray(differences, dtype=np.float64)
    cases = math.floor(len(numbers) / _design_effect(numbers, groups))
    return _detectable(
        cases, np.abs(numbers[numbers != 0]), np.count_nonzero(numbers) / max(len(numbers), 1), alpha, power
    )


def detectable_difference(
    cases: int, changed: float = 0.1, *, alpha: float = _ALPHA, power: float = _POWER
) -> float | None:
    """What a suite of this many cases, asked once each, can show four times in five, if this share of them changes."""
    if not 0 <= changed <= 1:
        raise ValueError(f"changed must be within 0..1, got {changed}")
    return _detectable(cases, np.ones(1), changed, alpha, power)


def shown_outcome(difference: float, p: float, p_adjusted: float, *, lower_is_better: bool = False) -> Outcome:
    """The verdict on a difference by a p that was raised for several rows; none that its interval does not support."""
    if max(p, p_adjusted) >= SIGNIFICANT:
        return "no difference"
    return "better" if (difference > 0) != lower_is_better else "worse"


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several tests, raised (Holm) so that the chance of any false alarm stays what it says."""
    order = sorted(range(len(p_values)), key=lambda position: p_values[position])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, position in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[position]))
        adjusted[position] = highest
    return adjusted


def _paired(mean: BoundedMean, cases: int) -> PairedDifference:
    return PairedDifference(
        cases=cases, groups=round(mean.n), difference=mean.mean, ci95=mean.interval(), p=mean.p_value(0.0)
    )


class _Plan:
    """How often this many cases, drawn from a distribution of differences, show that their mean is above −margin."""

    def __init__(self, values: Floats, shares: Floats, margin: float, alpha: float) -> None:
        self._values, self._shares = values, shares
        self._margin, self._alpha = margin, alpha
        self.mean = float(values @ shares)
        self.changed = float(shares[values != 0].sum())

    def score(self, cases: float) -> float:
        """The normal score of the p that a typical sample of this many cases has."""
        typical = BoundedMean.of_counts(self._values, self._shares * cases, low=-1.0)
        return normal_quantile(typical.chance_below(-self._margin))

    def power(self, cases: int) -> float:
        """The chance that this many cases show it, by drawn samples."""
        flips = bool(np.isin(self._values, (-1.0, 0.0, 1.0)).all())
        draws = _DRAWS if flips else _DRAWS_OF_MANY
        shares = self._shares / self._shares.sum()
        drawn = np.random.default_rng(0).multinomial(cases, shares, draws)
        if flips:
            return self._share_of_flips(drawn)
        samples, times = np.unique(drawn, axis=0, return_counts=True)
        return float(np.dot([self._shows(sample) for sample in samples], times)) / draws

    def _shows(self, counts: Sequence[float] | Floats) -> bool:
        return BoundedMean.of_counts(self._values, counts, low=-1.0).chance_below(-self._margin) <= self._alpha

    def _share_of_flips(self, drawn: npt.NDArray[np.int64]) -> float:
        """How many samples of single trials show it: from some number of better cases on, higher the more got worse."""
        cases = int(drawn[0].sum())
        better, worse = (drawn[:, self._values == side].sum(axis=1) for side in (1.0, -1.0))
        kinds = {side: bool((self._values == side).any()) for side in (-1.0, 0.0, 1.0)}
        needed, most = int(better.min()), int(better.max())
        shown = 0
        for number in np.unique(worse).tolist():
            while needed <= most:
                counts = {-1.0: number, 0.0: cases - number - needed, 1.0: needed}
                if counts[0.0] < 0 or self._shows([float(counts[side]) for side in kinds if kinds[side]]):
                    break
                needed += 1
            shown += int((better[worse == number] >= needed).sum())
        return shown / len(drawn)

    def cases(self, power: float) -> int | None:
        """About how many cases show it this often."""
        wanted = normal_quantile(self._alpha) - normal_quantile(power)
        low, high = 1, 2
        while self.score(high) > wanted:
            low, high = high, 2 * high
            if high > _MAX_CASES:
                return None
        while high - low > max(1, low // 1000):
            middle = (low + high) // 2
            low, high = (middle, high) if self.score(middle) > wanted else (low, middle)
        if high * self.changed > _PLANNED:
            return high
        return self._nearest(high, power)

    def _nearest(self, about: int, power: float) -> int:
        """The number of cases near `about` whose power is nearest to this: with few changes it goes up in jumps."""
        if not self.changed:
            return _first_shown(lambda cases: self.power(cases) >= power, about)
        low, high = max(1, about // 2), about
        while self.power(high) < power:
            low, high = high, math.ceil(high * 1.1) + 1
        tried = {high: self.power(high)}
        while high - low > max(1, about // 100):
            middle = (low + high) // 2
            tried[middle] = self.power(middle)
            low, high = (middle, high) if tried[middle] < power else (low, middle)
        return min(tried, key=lambda cases: (abs(tried[cases] - power), cases))


def _first_shown(shown: Callable[[int], bool], about: int) -> int:
    low, high = 0, about
    while not shown(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shown(middle) else (middle, high)
    return high


def _detectable(cases: int, magnitudes: Floats, changed: float, alpha: float, power: float) -> float | None:
    """The least mean difference that this many cases show this often."""
    sizes, counts = np.unique(magnitudes if len(magnitudes) else np.ones(1), return_counts=True)
    shares = counts / counts.sum()
    if cases < 1 or BoundedMean.of_counts([1.0], [cases], low=-1.0).chance_below(0.0) > alpha:
        return None  # not even if every case got better

    def plan(difference: float) -> _Plan:
        return _Plan(*_one_way(sizes, shares, changed, difference), 0.0, alpha)

    wanted = normal_quantile(alpha) - normal_quantile(power)
    found = _halved(lambda difference: plan(difference).score(cases) <= wanted, 0.0, 1.0, 30)
    if cases * plan(found).changed > _PLANNED:
        return found
    return _halved(lambda difference: plan(difference).power(cases) >= power, found / 2, min(found * 1.3, 1.0), 8)


def _halved(holds: Callable[[float], bool], low: float, high: float, times: int) -> float:
    """About the least number between low and high for which something holds, that holds from there on."""
    for _ in range(times):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _one_way(sizes: Floats, shares: Floats, changed: float, difference: float) -> tuple[Floats, Floats]:
    """Differences with this mean: more of the changed ones for the better; where that is not enough, more of them."""
    typical = float(sizes @ shares)
    changed = max(changed, min(difference / typical, 1.0))
    full = max(difference - typical, 0.0) / (1 - typical) if typical < 1 else 0.0  # and at last, full ones
    one_way = min(difference / (changed * typical), 1.0)
    up, down = changed * (1 + one_way) / 2 * (1 - full), changed * (1 - one_way) / 2
    values = np.concatenate([-sizes[::-1], [0.0], sizes, [1.0]])
    parts = np.concatenate([down * shares[::-1], [1 - changed], up * shares, [full]])
    # Equal values are one, so that samples can be looked up.
    distinct, member_of = np.unique(values, return_inverse=True)
    return distinct, np.bincount(member_of, parts).astype(np.float64)


def _design_effect(numbers: Floats, groups: Sequence[Hashable] | None) -> float:
    """How many times as many cases it takes for being grouped: the mean's variance against that of single cases."""
    if groups is None or not len(numbers):
        return 1.0
    positions: dict[Hashable, int] = {}
    member_of = np.fromiter((positions.setdefault(group, len(positions)) for group in groups), np.int64, len(numbers))
    apart = numbers - numbers.mean()
    single = float(apart @ apart)
    if single == 0 or len(positions) < 2:
        return len(numbers) / max(len(positions), 1)
    together = float((np.bincount(member_of, apart) ** 2).sum()) * len(positions) / (len(positions) - 1)
    return max(1.0, together / single)
