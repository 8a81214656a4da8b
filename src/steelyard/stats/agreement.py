"""How well two raters agree: a judge with people, or two judges with each other."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from statistics import NormalDist
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.stats.intervals import BoundedMean, Floats, Interval, rate_lower

Integers: TypeAlias = npt.NDArray[np.int64]

MIN_RATE = 0.80
"""What sensitivity, specificity and rho must reach each for a judge to be trusted."""
MIN_LOWER = 0.70
"""What their one-sided 95 % lower ends must exceed."""
MIN_GRADED = 10
"""The fewest graded labels that say anything."""

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


class KindAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """How often the judge says the same of answers that people called right, or of those they called wrong."""

    labels: int
    cases: int
    """The cases these labels are of: several labels of one case are not new evidence."""
    rate: float | None
    lower: float
    """The one-sided 95 % lower end: Clopper and Pearson's, or Gaffke's over cases with several labels."""


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a judge may decide, and what it would take."""

    trusted: bool
    reason: str
    scarce: str | None = None
    """Which labels are missing most: "passed", "failed", or "graded"; None where no number of labels would help."""
    more: int | None = None
    """About how many more labels of that kind would settle it."""


class PassFailAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """A judge's pass/fail verdicts against people's."""

    sensitivity: KindAgreement
    specificity: KindAgreement
    balanced_accuracy: float | None
    kappa: float | None
    trust: Trust


class GradedAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """A judge's scores against people's grades."""

    labels: int
    cases: int
    rho: float | None
    lower: float | None
    """The one-sided 95 % lower end (Bonett and Wright), each case counted once."""
    trust: Trust


class HumanCeiling(msgspec.Struct, frozen=True, kw_only=True):
    """How well each labeller agrees with the others: no judge can be shown to do better."""

    labellers: int
    cases: int
    """The cases with two labels or more."""
    sensitivity: float | None = None
    specificity: float | None = None
    balanced_accuracy: float | None = None
    kappa: float | None = None
    """The mean of Cohen's kappa over pairs of labellers."""
    rho: float | None = None
    """The mean over labellers of Spearman's rho with the mean of the others."""


def pass_fail_agreement(
    labels: Sequence[bool],
    verdicts: Sequence[bool],
    cases: Sequence[Hashable] | None = None,
    *,
    bar: float = MIN_RATE,
    lower_bar: float = MIN_LOWER,
) -> PassFailAgreement:
    """How the judge's verdicts agree with people's labels, answer by answer, and whether it may be trusted.

    Trusted is a judge that lets pass at least `bar` of the right answers and fails at least `bar` of the wrong ones,
    each shown to be above `lower_bar` by its one-sided 95 % lower end. Kappa and balanced accuracy do not decide:
    they move with how many answers are right.
    """
    if not len(labels) == len(verdicts) == (len(labels) if cases is None else len(cases)):
        raise ValueError(f"each label needs a verdict and a case, got {len(labels)} and {len(verdicts)}")
    of = range(len(labels)) if cases is None else cases
    sensitivity = _kind(labels, verdicts, of, True)
    specificity = _kind(labels, verdicts, of, False)
    both = None if sensitivity.rate is None or specificity.rate is None else (sensitivity.rate, specificity.rate)
    return PassFailAgreement(
        sensitivity=sensitivity,
        specificity=specificity,
        balanced_accuracy=None if both is None else sum(both) / 2,
        kappa=cohen_kappa(labels, verdicts),
        trust=pass_fail_trust(sensitivity, specificity, bar, lower_bar),
    )


def pass_fail_trust(
    sensitivity: KindAgreement, specificity: KindAgreement, bar: float = MIN_RATE, lower_bar: float = MIN_LOWER
) -> Trust:
    """Whether a judge with these rates may be trusted."""
    return _trust({"passed": sensitivity, "failed": specificity}, bar, lower_bar)


def graded_agreement(
    labels: Sequence[float] | Floats,
    scores: Sequence[float] | Floats,
    cases: Sequence[Hashable] | None = None,
    *,
    bar: float = MIN_RATE,
    lower_bar: float = MIN_LOWER,
) -> GradedAgreement:
    """How the judge's scores follow people's grades, and whether it may be trusted: rho and its lower end decide."""
    rho = spearman(labels, scores)
    distinct = len(labels) if cases is None else len(set(cases))
    lower = None if rho is None else spearman_lower(rho, distinct)
    trust = _graded_trust(rho, lower, distinct, bar, lower_bar)
    return GradedAgreement(labels=len(labels), cases=distinct, rho=rho, lower=lower, trust=trust)


def spearman_lower(rho: float, n: int, alpha: float = 0.05) -> float | None:
    """The one-sided lower end of Spearman's rho (Bonett and Wright 2000); None under four pairs.

    A rho of 1 is taken as half a step below it: two neighbours out of order would be the next.
    """
    if not -1 <= rho <= 1:
        raise ValueError(f"rho must be within -1..1, got {rho}")
    if n < 4:
        return None
    step = 6 / (n * (n * n - 1.0))
    inside = min(max(rho, -1 + step), 1 - step)
    return math.tanh(math.atanh(inside) - NormalDist().inv_cdf(1 - alpha) * math.sqrt((1 + inside**2 / 2) / (n - 3)))


def consensus(labels: Floats) -> Floats:
    """What several labellers (columns, NaN where one labelled nothing) say together of each answer: their mean."""
    labelled = ~np.isnan(labels)
    counts = labelled.sum(axis=1)
    means: Floats = np.full(len(labels), np.nan)
    np.divide(np.where(labelled, labels, 0.0).sum(axis=1), counts, out=means, where=counts > 0)
    return means


def human_ceiling(labels: Floats, *, pass_from: float = 0.5, graded: bool = False) -> HumanCeiling | None:
    """How each labeller (a column, NaN where one labelled nothing) agrees with the others; None without shared answers.

    For pass/fail each is compared with the majority of the others, where they have one.
    """
    table: Floats = np.asarray(labels, dtype=np.float64)
    shared = table[(~np.isnan(table)).sum(axis=1) > 1]
    if not len(shared):
        return None
    labellers = range(shared.shape[1])
    if graded:
        rhos = [_rho_with_others(shared, labeller) for labeller in labellers]
        return HumanCeiling(labellers=len(labellers), cases=len(shared), rho=_mean_of_known(rhos))
    votes = np.where(np.isnan(shared), np.nan, (shared >= pass_from).astype(np.float64))
    own = votes.T.ravel()
    # The share of the others who say pass; a tie, like a missing vote, is neither above nor below a half.
    others = np.concatenate([consensus(np.delete(votes, labeller, axis=1)) for labeller in labellers])
    own, others = own[~np.isnan(own)], others[~np.isnan(own)]
    sensitivity = _mean_of_known(own[others > 0.5].tolist())
    specificity = _mean_of_known((1 - own[others < 0.5]).tolist())
    kappas = [_kappa_of_pair(votes[:, [one, other]]) for one, other in itertools.combinations(labellers, 2)]
    both = sensitivity is not None and specificity is not None
    return HumanCeiling(
        labellers=len(labellers),
        cases=len(shared),
        sensitivity=sensitivity,
        specificity=specificity,
        balanced_accuracy=_mean_of_known([sensitivity, specificity]) if both else None,
        kappa=_mean_of_known(kappas),
    )


def labels_needed_for_rate(rate: float, cases: int, lower: float = MIN_LOWER, alpha: float = 0.05) -> int | None:
    """How many more labels bring the lower end of a rate above `lower`, if it stays as it is; None if none would."""
    if rate <= lower:
        return None
    total = max(cases, 1)
    while rate_lower(rate * total, total, alpha) <= lower:
        total += max(1, total // 50)
    return total - cases


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


def _kind(labels: Sequence[bool], verdicts: Sequence[bool], cases: Sequence[Hashable], kind: bool) -> KindAgreement:
    """The judge's agreement on the answers with one label."""
    same = [float(verdict == label) for label, verdict in zip(labels, verdicts, strict=True) if label == kind]
    of = [case for label, case in zip(labels, cases, strict=True) if label == kind]
    if not same:
        return KindAgreement(labels=0, cases=0, rate=None, lower=0.0)
    mean = BoundedMean.over_groups(same, of)
    return KindAgreement(labels=len(same), cases=round(mean.n), rate=mean.mean, lower=mean.lower(0.05))


def _trust(kinds: dict[str, KindAgreement], bar: float, lower_bar: float) -> Trust:
    """The verdict on a judge of passes and fails, and which labels would change it."""
    names = {"passed": "sensitivity", "failed": "specificity"}
    for kind, found in kinds.items():
        if found.rate is not None and found.rate < bar and found.cases >= _fewest(lower_bar):
            return Trust(trusted=False, reason=f"{names[kind]} {found.rate:.2f} is below {bar:.2f}")
    missing = {kind: more for kind, found in kinds.items() if (more := _missing_labels(found, bar, lower_bar))}
    if not missing:
        ends = " and ".join(f"{names[kind]} {found.rate:.2f}" for kind, found in kinds.items())
        return Trust(trusted=True, reason=f"{ends}, lower ends above {lower_bar:.2f}")
    scarce = max(missing, key=lambda kind: missing[kind])
    more = missing[scarce]
    noun = "label" if more == 1 else "labels"
    reason = f"the lower end of {names[scarce]} is {kinds[scarce].lower:.2f}, not above {lower_bar:.2f}"
    return Trust(
        trusted=False,
        reason=f"{reason}; about {more:,} more {noun} of answers that {scarce} would settle it",
        scarce=scarce,
        more=more,
    )


def _missing_labels(found: KindAgreement, bar: float, lower_bar: float) -> int:
    """How many more labels of a kind are needed; 0 where there are enough."""
    fewest = max(_fewest(lower_bar) - found.cases, 0)
    if found.rate is None or found.rate < bar:
        return max(fewest, 1)
    if found.lower > lower_bar and not fewest:
        return 0
    return max(fewest, labels_needed_for_rate(found.rate, found.cases, lower_bar) or 0, 1)


def _fewest(lower_bar: float) -> int:
    """How many labels of a kind, all of them right, bring the lower end above the bar: 9 for .70."""
    return math.floor(math.log(0.05) / math.log(lower_bar)) + 1


def _graded_trust(rho: float | None, lower: float | None, cases: int, bar: float, lower_bar: float) -> Trust:
    if cases < MIN_GRADED:
        more = MIN_GRADED - cases
        return Trust(trusted=False, reason=f"{cases} of at least {MIN_GRADED} labels", scarce="graded", more=more)
    if rho is None or lower is None:
        return Trust(trusted=False, reason="rho is undefined: every label, or every score, is the same")
    if rho < bar:
        return Trust(trusted=False, reason=f"rho {rho:.2f} is below {bar:.2f}")
    if lower > lower_bar:
        return Trust(trusted=True, reason=f"rho {rho:.2f}, its lower end {lower:.2f} above {lower_bar:.2f}")
    more = max(labels_needed(rho, cases, lower=lower_bar, confidence=0.9) or 1, 1)
    reason = (
        f"the lower end of rho is {lower:.2f}, not above {lower_bar:.2f}; about {more:,} more labels would settle it"
    )
    return Trust(trusted=False, reason=reason, scarce="graded", more=more)


def _rho_with_others(labels: Floats, labeller: int) -> float | None:
    others = consensus(np.delete(labels, labeller, axis=1))
    both = ~np.isnan(labels[:, labeller]) & ~np.isnan(others)
    return spearman(labels[both, labeller], others[both])


def _kappa_of_pair(votes: Floats) -> float | None:
    both = votes[~np.isnan(votes).any(axis=1)]
    return cohen_kappa(both[:, 0].tolist(), both[:, 1].tolist())


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
