"""ScoreStats: verdicts and scores of a run as they arrive, pass rates and their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from steelyard.records import Score
from steelyard.stats.intervals import Interval, mean_interval, wilson
from steelyard.stats.metrics import ScoreMetrics
from steelyard.stats.sketch import Blocks

_SEAL_EVERY = 1024
_MAX_EXAMPLE = 300


def is_scoring_error(score: Score) -> bool:
    """Whether the scorer failed instead of scoring: that says nothing about the answer."""
    return score.value is None and bool(score.errors)


def verdict(scores: Iterable[Score]) -> bool | None:
    """Whether a case passed: every score that decides must have passed.

    None, for "unscored", when no score decides or when one could not be made. A score without `passed` is only
    a measurement and decides nothing; nor does one that was overruled, or an advisory one.
    """
    passes: bool | None = None
    for score in scores:
        if score.overruled or score.advisory:
            continue
        if score.value is None and score.errors:
            return None
        passed = score.passed
        if passed is not None and passes is not False:
            passes = passed
    return passes


def _is_plain(score: Score) -> bool:
    """Whether it is a deterministic scorer's finite value that counts: not a judge's, overruled or advisory."""
    value = score.value
    return (
        value is not None
        and -math.inf < value < math.inf
        and score.by is None
        and not score.overruled
        and not score.advisory
    )


class _NamedScores:
    """The scores of one scorer over all records."""

    def __init__(self) -> None:
        self.n = 0
        self.decided = 0
        self.passed = 0
        self.errors = 0
        self.error_example: str | None = None
        self.escalated = 0
        self.advisory = False
        self.judges: set[str] = set()
        self.spreads = Blocks()
        self.values: Blocks = Blocks()

    def update(self, score: Score) -> None:
        value = score.value
        if value is None and score.errors:
            self.errors += 1
            self._keep_example(score.errors[0])
            return
        self.n += 1
        if score.by is not None:
            self._count_judge(score)
        if score.passed is not None:
            self.decided += 1
            self.passed += score.passed
        if value is not None and -math.inf < value < math.inf:
            self.values.append(value)
            if not self.n % _SEAL_EVERY:
                self.values.seal()

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
        self.advisory = self.advisory or other.advisory
        self.judges |= other.judges
        self.spreads.extend(other.spreads.joined())
        self.values.extend(other.values.joined())

    def to_metrics(self) -> ScoreMetrics:
        values = self.values.joined()
        metrics = ScoreMetrics(
            n=self.n,
            mean=_mean(values),
            mean_ci95=mean_interval(values),
            passed=self.passed,
            pass_rate=_rate(self.passed, self.decided),
            pass_rate_ci95=wilson(self.passed, self.decided),
            errors=self.errors,
            error_example=UNSET if self.error_example is None else self.error_example,
        )
        if self.judges:
            metrics.by = sorted(self.judges)
            metrics.std_dev = _mean(self.spreads.joined())
            metrics.escalated, metrics.advisory = self.escalated, self.advisory
        return metrics

    def _keep_example(self, error: str) -> None:
        """Keep the alphabetically first error, which does not depend on the order of records."""
        shown = error[:_MAX_EXAMPLE]
        self.error_example = shown if self.error_example is None else min(self.error_example, shown)

    def _count_judge(self, score: Score) -> None:
        assert score.by is not None
        self.judges.add(score.by)
        self.escalated += score.escalated
        self.advisory = self.advisory or score.advisory
        if score.std_dev is not None:
            self.spreads.append(score.std_dev)


class ScoreStats:
    """Verdicts and scores of the records seen so far; the same in any order.

    `n` counts every record and equals `errors + scored + unscored`. A record whose scorer failed is unscored
    and counts in `scoring_errors`: it is never silently a wrong answer.
    """

    def __init__(self) -> None:
        self.n = 0
        self.errors = 0
        self.scored = 0
        self.passed = 0
        self.unscored = 0
        self.scoring_errors = 0
        self._by_name: dict[str, _NamedScores] = {}

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
            (by_name.get(score.name) or self._named(score.name)).update(score)

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
        """The pass rate's 95 % confidence interval (Wilson)."""
        return wilson(self.passed, self.scored)

    def to_metrics(self) -> dict[str, ScoreMetrics]:
        """The figures of each scorer, by its name; None where nothing divides."""
        return {name: self._by_name[name].to_metrics() for name in sorted(self._by_name)}

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
