"""ScoreStats: verdicts and scores of a run as they arrive, pass rates and their confidence intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from steelyard.records import Better, Score, overrules, verdict
from steelyard.stats.intervals import Interval, StudentMean, bounded_mean_interval, clopper_pearson
from steelyard.stats.metrics import JuryMetrics, ScoreMetrics
from steelyard.stats.sketch import Blocks

_SEAL_EVERY = 1024
_MAX_EXAMPLE = 300
MAX_LABELS = 100
"""How many labels of a scorer are counted each for itself: the most frequent ones."""
MAX_KNOWN_LABELS = 10_000
"""How many are told apart while the run goes on."""
OTHER_LABELS = "(other)"


def is_scoring_error(score: Score) -> bool:
    """Whether the scorer failed instead of scoring: that says nothing about the answer."""
    return score.value is None and bool(score.errors)


def verdict_without(scores: Sequence[Score], judge: str) -> bool | None:
    """What the verdict would be without the judge of that name; other escalated judges overrule what they overruled.

    A combined score that is made of the judge's goes with it.
    """
    left: list[Score] = []
    for score in scores:
        if score.name == judge or (score.combines is not None and judge in score.combines):
            continue
        if overrules(score):
            left = [one if one.passed is not False or one.advisory else _marked(one, True) for one in left]
        left.append(_marked(score, False) if score.overruled else score)
    return verdict(left)


def _marked(score: Score, overruled: bool) -> Score:
    return msgspec.structs.replace(score, overruled=overruled)


def _is_plain(score: Score) -> bool:
    """Whether it is a deterministic scorer's finite value that counts: not a judge's, overruled or advisory."""
    value = score.value
    return (
        value is not None
        and -math.inf < value < math.inf
        and score.by is None
        and not score.overruled
        and not score.advisory
        and score.label is None
        and not score.is_number
    )


def top_labels(counts: Mapping[str, int]) -> dict[str, int]:
    """The most frequent labels with their counts, and all others together as `(other)`."""
    ordered = sorted(counts.items(), key=lambda one: (one[0] == OTHER_LABELS, -one[1], one[0]))
    kept = dict(ordered[:MAX_LABELS])
    if rest := sum(count for _, count in ordered[MAX_LABELS:]):
        kept[OTHER_LABELS] = kept.get(OTHER_LABELS, 0) + rest
    return kept


class _NamedScores:
    """The scores of one scorer over all records."""

    def __init__(self) -> None:
        self.n = 0
        self.decided = 0
        self.passed = 0
        self.errors = 0
        self.error_example: str | None = None
        self.escalated = 0
        self.overruled = 0
        self.advisory = False
        self.uncalibrated = 0
        self.more_scored = 0
        self.more_passed = 0
        """How many more records would have a verdict, or would have passed, without this judge."""
        self.pairs = 0
        self.agreeing_pairs = 0
        self.voted = 0
        self.unanimous = 0
        self.labels: Counter[str] = Counter()
        self.is_number = False
        self.unit: str | None = None
        self.better: Better | None = None
        self.judges: set[str] = set()
        self.spreads = Blocks()
        self.values: Blocks = Blocks()

    def update(self, score: Score) -> None:
        value = score.value
        if value is None and score.errors:
            self.errors += 1
            self._keep_example(score.errors[0])
            if score.by is not None:
                self.judges.add(score.by)
                self.advisory = self.advisory or score.advisory
                self.uncalibrated += not score.calibrated
            return
        self.n += 1
        if score.by is not None:
            self._count_judge(score)
        if score.passed is not None:
            self.decided += 1
            self.passed += score.passed
        if score.label is not None:
            self._count_label(score.label, 1)
        if score.is_number:
            self._note_number(score.unit, score.better)
        if value is not None and -math.inf < value < math.inf:
            self.values.append(value)
            if not self.n % _SEAL_EVERY:
                self.values.seal()

    def _count_label(self, label: str, count: int) -> None:
        known = label in self.labels or len(self.labels) < MAX_KNOWN_LABELS
        self.labels[label if known else OTHER_LABELS] += count

    def _note_number(self, unit: str | None, better: Better | None) -> None:
        """Keep the alphabetically first of units that differ, which does not depend on the order of records."""
        self.is_number = True
        self.unit = min(filter(None, (self.unit, unit)), default=None)
        self.better = self.better if better is None or self.better == "higher" else better

    def take_all(self, values: list[float], decided: int, passed: int) -> None:
        """Add plain scores: all have a finite value, none is a judge's."""
        before = self.n
        self.n += len(values)
        self.decided += decided
        self.passed += passed
        self.values.append_all(values)
        if before // _SEAL_EVERY != self.n // _SEAL_EVERY:
            self.values.seal()

    def merge(self, other: _NamedScores) -> None:
        self.n += other.n
        self.decided += other.decided
        self.passed += other.passed
        self.errors += other.errors
        if other.error_example is not None:
            self._keep_example(other.error_example)
        self.escalated += other.escalated
        self.overruled += other.overruled
        self.advisory = self.advisory or other.advisory
        self.uncalibrated += other.uncalibrated
        self.more_scored += other.more_scored
        self.more_passed += other.more_passed
        self.pairs += other.pairs
        self.agreeing_pairs += other.agreeing_pairs
        self.voted += other.voted
        self.unanimous += other.unanimous
        for label, count in other.labels.items():
            self._count_label(label, count)
        if other.is_number:
            self._note_number(other.unit, other.better)
        self.judges |= other.judges
        self.spreads.extend(other.spreads.joined())
        self.values.extend(other.values.joined())

    def to_metrics(self, scored: int, passed: int) -> ScoreMetrics:
        """The figures, given how many records of the run have a verdict and passed."""
        values = self.values.joined()
        metrics = ScoreMetrics(
            n=self.n,
            mean=_mean(values),
            mean_ci95=StudentMean(values).interval() if self.is_number else bounded_mean_interval(values),
            passed=self.passed,
            pass_rate=_rate(self.passed, self.decided),
            pass_rate_ci95=clopper_pearson(self.passed, self.decided),
            errors=self.errors,
            error_example=UNSET if self.error_example is None else self.error_example,
        )
        if self.is_number:
            metrics.unit, metrics.better = self.unit or UNSET, self.better or UNSET
            found = [float(value) for value in np.percentile(values, (0, 50, 100))] if len(values) else [None] * 3
            metrics.min, metrics.p50, metrics.max = found
        if self.labels:
            metrics.labels, total = top_labels(self.labels), self.labels.total()
            metrics.shares = {label: count / total for label, count in metrics.labels.items()}
            metrics.shares_ci95 = {label: clopper_pearson(n, total) for label, n in metrics.labels.items()}
        if self.judges:
            metrics.by = sorted(self.judges)
            metrics.std_dev = _mean(self.spreads.joined())
            metrics.escalated, metrics.advisory = self.escalated, self.advisory
            metrics.overruled = self.overruled
            metrics.calibrated = not (self.uncalibrated or self.advisory)
            metrics.scored_without, metrics.passed_without = scored + self.more_scored, passed + self.more_passed
            metrics.pass_rate_without = _rate(metrics.passed_without, metrics.scored_without)
        if self.voted:
            unanimous, agreement = self.unanimous / self.voted, _rate(self.agreeing_pairs, self.pairs)
            metrics.jury = JuryMetrics(votes=self.voted, unanimous=unanimous, agreement=agreement)
        return metrics

    def _keep_example(self, error: str) -> None:
        """Keep the alphabetically first error, which does not depend on the order of records."""
        shown = error[:_MAX_EXAMPLE]
        self.error_example = shown if self.error_example is None else min(self.error_example, shown)

    def _count_judge(self, score: Score) -> None:
        assert score.by is not None
        self.judges.add(score.by)
        self.escalated += score.escalated
        self.overruled += overrules(score)
        self.advisory = self.advisory or score.advisory
        self.uncalibrated += not score.calibrated
        if score.votes:
            self._count_votes([vote for vote in score.votes.values() if vote is not None])
        if score.std_dev is not None:
            self.spreads.append(score.std_dev)

    def _count_votes(self, votes: list[bool]) -> None:
        """How far the members of a jury agree: on all, and pair by pair."""
        passes, n = sum(votes), len(votes)
        self.voted += 1
        self.unanimous += passes in (0, n)
        self.pairs += n * (n - 1) // 2
        self.agreeing_pairs += (passes * (passes - 1) + (n - passes) * (n - passes - 1)) // 2

    def count_without(self, with_it: bool | None, without_it: bool | None) -> None:
        """Note what the verdict on a record is with this judge and would be without it."""
        self.more_scored += (without_it is not None) - (with_it is not None)
        self.more_passed += (without_it is True) - (with_it is True)


class ScoreStats:
    """Verdicts and scores of the records seen so far; the same in any order.

    `n` counts every record and equals `errors + scored + unscored`. A record whose scorer failed is unscored
    and counts in `scoring_errors`: it is never silently a wrong answer. One whose `when: failed` judge failed keeps
    the verdict that it had, and counts there too.
    """

    def __init__(self) -> None:
        self.n = 0
        self.errors = 0
        self.scored = 0
        self.passed = 0
        self.unscored = 0
        self.scoring_errors = 0
        self._by_name: dict[str, _NamedScores] = {}

    @property
    def is_uncalibrated(self) -> bool:
        """Whether a judge decides that is not calibrated."""
        return any(one.n and one.uncalibrated and not one.advisory for one in self._by_name.values())

    def update(self, record_scores: list[Score], failed: bool) -> None:
        """Add a record; one that failed (no answer) has no scores."""
        if failed:
            self.n += 1
            self.errors += 1
        else:
            self.take(record_scores, verdict(record_scores))

    def take(self, scores: list[Score], passed: bool | None) -> None:
        """Add an answer whose verdict is already known."""
        self.n += 1
        if passed is None:
            self.unscored += 1
            if not scores:
                return
            self.scoring_errors += any(is_scoring_error(score) for score in scores)
        else:
            self.scored += 1
            self.passed += passed
        by_name = self._by_name
        for score in scores:
            named = by_name.get(score.name) or self._named(score.name)
            named.update(score)
            if score.by is not None:
                self._count_judge(named, score, scores, passed)

    def _count_judge(self, named: _NamedScores, score: Score, scores: list[Score], passed: bool | None) -> None:
        """Note what a judge has changed; one that gave no verdict where its word counts is a scoring error."""
        if score.escalated and passed is not None and not score.advisory and is_scoring_error(score):
            self.scoring_errors += 1
        named.count_without(passed, passed if score.advisory else verdict_without(scores, score.name))

    def take_all(self, answers: Sequence[list[Score]]) -> None:
        """Add many answers: faster where each has one plain score of the same scorer."""
        plain = [scores[0] for scores in answers if len(scores) == 1 and _is_plain(scores[0])]
        if len(plain) < len(answers) or len({score.name for score in plain}) != 1:
            for scores in answers:
                self.take(scores, verdict(scores))
            return
        passes = [score.passed for score in plain]
        decided, passed = len(passes) - passes.count(None), passes.count(True)
        self.n += len(plain)
        self.scored += decided
        self.unscored += len(plain) - decided
        self.passed += passed
        self._named(plain[0].name).take_all(
            [score.value for score in plain if score.value is not None], decided, passed
        )

    def merge(self, other: ScoreStats) -> None:
        """Add another's records, as if each had been seen here."""
        self.n += other.n
        self.errors += other.errors
        self.scored += other.scored
        self.passed += other.passed
        self.unscored += other.unscored
        self.scoring_errors += other.scoring_errors
        for name, scores in other._by_name.items():
            self._named(name).merge(scores)

    @property
    def pass_rate(self) -> float | None:
        """Passed of those that have a verdict."""
        return _rate(self.passed, self.scored)

    @property
    def pass_rate_all(self) -> float | None:
        """Passed of all records, answered or not."""
        return _rate(self.passed, self.n)

    @property
    def error_rate(self) -> float | None:
        """The share of records that brought no answer."""
        return _rate(self.errors, self.n)

    @property
    def pass_rate_ci95(self) -> Interval | None:
        """The pass rate's 95 % confidence interval (Clopper and Pearson)."""
        return clopper_pearson(self.passed, self.scored)

    @property
    def pass_rate_all_ci95(self) -> Interval | None:
        """That of the rate over all records."""
        return clopper_pearson(self.passed, self.n)

    def to_metrics(self) -> dict[str, ScoreMetrics]:
        """The figures of each scorer, by its name; None where nothing divides."""
        named = self._by_name
        return {name: named[name].to_metrics(self.scored, self.passed) for name in sorted(named)}

    def _named(self, name: str) -> _NamedScores:
        scores = self._by_name.get(name)
        if scores is None:
            scores = self._by_name[name] = _NamedScores()
        return scores


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: npt.NDArray[np.float64]) -> float | None:
    if not len(values):
        return None
    # Rounding may carry the mean of equal values past them.
    return min(max(math.fsum(values) / len(values), float(values.min())), float(values.max()))
