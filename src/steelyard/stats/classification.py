"""How well labels are predicted: accuracy, and precision, recall and F1 of each label and over all, with intervals."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from steelyard.stats.intervals import BoundedMean, Floats, Interval, clopper_pearson

Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int64]

MAX_LABELS = 100
_OTHER = 0
"""The number of any label that is not counted."""


class Rated(NamedTuple):
    """A figure with its interval, and of how many predictions it is; None where nothing divides."""

    value: float | None
    ci95: Interval | None
    n: int


class _Ratio(NamedTuple):
    """A figure of one label: twice (or once) the hits over what they are compared with."""

    value: float
    low: float
    high: float
    influence: Floats
    """How much a prediction of each kind adds to it: what two labels have in common follows from these."""
    rated: Rated


class Predictions:
    """Pairs of a true and a predicted label, as they come: 12 bytes each.

    Labels that count are those given, else those that are true of some case; a prediction of any other is a miss.
    """

    def __init__(self, labels: Sequence[str] | None = None) -> None:
        self._numbers = {label: number for number, label in enumerate(labels or (), 1)}
        self._is_open = labels is None
        self._others: dict[str, int] = {}
        self._truths, self._predicted, self._clusters = array("h"), array("h"), array("Q")

    def add(self, truth: str, predicted: str, cluster: int) -> None:
        """Take in a prediction; those of one cluster, such as a case's trials, count together."""
        if self._is_open and truth not in self._numbers:
            if len(self._numbers) >= MAX_LABELS:
                raise ValueError(f"there are more than {MAX_LABELS} true labels: name those that count, `labels: […]`")
            self._numbers[truth] = len(self._numbers) + 1
        self._truths.append(self._numbers.get(truth, _OTHER))
        # A prediction of a label that is not yet known to be true of any case: its number is settled at the end.
        number = self._numbers.get(predicted)
        if number is None and self._is_open and len(self._others) < MAX_LABELS * MAX_LABELS:
            number = -self._others.setdefault(predicted, len(self._others) + 1)
        self._predicted.append(number or _OTHER)
        self._clusters.append(cluster)

    def __len__(self) -> int:
        return len(self._truths)

    def accuracy(self) -> Rated:
        """The share of predictions that are right."""
        truths, predicted = self._codes()
        return self._rate(truths == predicted, truths != _OTHER)

    def to_figures(self) -> dict[str, Rated]:
        """Accuracy; precision, recall and F1: macro, micro and weighted, and of each label."""
        found: dict[str, Rated] = {"accuracy": self.accuracy()}
        ratios = {kind: [self._ratio(kind, number) for number in self._numbers.values()] for kind in _KINDS}
        truths, _ = self._codes()
        support = np.array([int((truths == number).sum()) for number in self._numbers.values()], dtype=np.float64)
        equal = np.ones(len(support))
        for kind, ones in ratios.items():
            found[f"{kind}.macro"] = self._mean(ones, equal)
            found[f"{kind}.micro"] = self._micro(kind)
            found[f"{kind}.weighted"] = self._mean(ones, support)
        for place, label in enumerate(self._numbers):
            for kind, ones in ratios.items():
                found[f"label.{label}.{kind}"] = ones[place].rated
        return found

    def _codes(self) -> tuple[Codes, Codes]:
        """The true and the predicted labels by number, 0 for those that do not count."""
        truths, predicted = np.array(self._truths, dtype=np.int64), np.array(self._predicted, dtype=np.int64)
        names = [_OTHER, *(self._numbers.get(label, _OTHER) for label in self._others)]
        late = np.array(names, dtype=np.int64)
        return truths, np.where(predicted < 0, late[np.maximum(-predicted, 0)], predicted)

    def _rate(self, right: Bools, chosen: Bools) -> Rated:
        """The share of the chosen ones that are right; clustered where one cluster has several of all."""
        n = int(chosen.sum())
        if not n:
            return Rated(None, None, 0)
        clusters = np.asarray(self._clusters)[chosen]
        hits = right[chosen]
        if len(np.unique(np.asarray(self._clusters))) == len(self._clusters):
            return Rated(float(hits.mean()), clopper_pearson(int(hits.sum()), n), n)
        mean = BoundedMean.over_groups(hits.astype(np.float64), clusters.tolist())
        return Rated(mean.mean, mean.interval(), n)

    def _ratio(self, kind: str, number: int) -> _Ratio:
        truths, predicted = self._codes()
        is_true, is_predicted = truths == number, predicted == number
        chosen, transform = _chosen(kind, is_true, is_predicted), _KINDS[kind]
        found = self._rate(is_true & is_predicted, chosen)
        value = 0.0 if found.value is None else transform(found.value)
        low, high = (0.0, 1.0) if found.ci95 is None else (transform(found.ci95[0]), transform(found.ci95[1]))
        weight = is_true.astype(np.float64) * (kind != "precision") + is_predicted * (kind != "recall")
        hits = (is_true & is_predicted) * (2.0 if kind == "f1" else 1.0)
        influence = (hits - value * weight) / max(float(weight.sum()), 1.0)
        rated = Rated(None if found.value is None else value, None if found.ci95 is None else (low, high), found.n)
        return _Ratio(value, low, high, influence, rated)

    def _mean(self, ratios: Sequence[_Ratio], weights: Floats) -> Rated:
        """The weighted mean over labels. Its interval is made of theirs, and of how far they go together (MOVER)."""
        if not len(self) or not weights.sum():
            return Rated(None, None, len(self))
        shares = weights / weights.sum()
        value = math.fsum(share * ratio.value for share, ratio in zip(shares, ratios, strict=True))
        influences = np.array([ratio.influence for ratio in ratios])
        spread = np.sqrt((influences**2).sum(axis=1))
        together = influences @ influences.T
        scale = np.outer(spread, spread)
        # Of a label that is always right, or never, nothing shows how it goes with others: as far as it can.
        alike = np.divide(together, scale, out=np.ones_like(together), where=scale > 1e-15)
        ends = []
        for reach in ([r.value - r.low for r in ratios], [r.high - r.value for r in ratios]):
            far = shares * np.array(reach)
            ends.append(math.sqrt(max(float(far @ alike @ far), 0.0)))
        return Rated(value, (max(value - ends[0], 0.0), min(value + ends[1], 1.0)), len(self))

    def _micro(self, kind: str) -> Rated:
        """The same of all labels that count, taken together."""
        truths, predicted = self._codes()
        counts_true, counts_predicted = truths != _OTHER, predicted != _OTHER
        hits = (truths == predicted) & counts_true
        if kind != "f1":
            chosen = counts_true if kind == "recall" else counts_predicted
            return self._rate(hits, chosen)
        # A wrong prediction of a label that counts is a miss of one and a false alarm of another: it counts twice.
        twice = counts_true & counts_predicted & ~hits
        rights = np.concatenate([hits, np.zeros(int(twice.sum()), dtype=bool)])
        chosen = np.concatenate([counts_true | counts_predicted, np.ones(int(twice.sum()), dtype=bool)])
        clusters = np.concatenate([np.asarray(self._clusters), np.asarray(self._clusters)[twice]])
        if not chosen.any():
            return Rated(None, None, 0)
        found = BoundedMean.over_groups(rights[chosen].astype(np.float64), clusters[chosen].tolist())
        low, high = found.interval()
        return Rated(_f1(found.mean), (_f1(low), _f1(high)), int((counts_true | counts_predicted).sum()))


def _f1(share: float) -> float:
    """F1 of a share of hits among hits, misses and false alarms."""
    return 2 * share / (1 + share)


def _same(share: float) -> float:
    return share


_KINDS: Mapping[str, Callable[[float], float]] = {"precision": _same, "recall": _same, "f1": _f1}


def _chosen(kind: str, is_true: Bools, is_predicted: Bools) -> Bools:
    """Of which predictions a figure is: those of the label, those to which it is true, or both."""
    if kind == "f1":
        return is_true | is_predicted
    return is_predicted if kind == "precision" else is_true


def majority_share(answers: Sequence[Hashable], passed: Sequence[bool]) -> float:
    """Whether the most frequent answer is right; of answers that are equally frequent, the share that is."""
    votes: dict[Hashable, list[bool]] = {}
    for answer, is_right in zip(answers, passed, strict=True):
        votes.setdefault(answer, []).append(is_right)
    most = max(map(len, votes.values()))
    winners = [sum(verdicts) / len(verdicts) for verdicts in votes.values() if len(verdicts) == most]
    return sum(winners) / len(winners)
