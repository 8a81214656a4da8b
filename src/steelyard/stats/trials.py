"""Cases that are tried several times: how often each passes, how sure that is, and which are flaky."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from steelyard.records import Score
from steelyard.stats.intervals import Interval, bootstrap_mean, rate_over_cases
from steelyard.stats.trial_scores import TrialScores, mean_or_none

Counts: TypeAlias = npt.NDArray[np.int32]

_UNDECIDED, _FAILED, _PASSED = 1, 2, 3
"""What is known of a slot; 0 is a slot that was never seen."""

_SAID = {None: _UNDECIDED, False: _FAILED, True: _PASSED}
_MOST_FLAKY = 50


class TrialStats:
    """Verdicts and scores by case and trial; the same in any order, the last word on a slot stands.

    A byte a slot (case × trial) for the verdict, and what `TrialScores` takes for each score name that occurs.
    """

    def __init__(self, cases: int, trials: int) -> None:
        if cases < 0:
            raise ValueError(f"cases must be >= 0, got {cases}")
        if trials < 1:
            raise ValueError(f"trials must be >= 1, got {trials}")
        self.cases = cases
        self.trials = trials
        self._verdicts = array("B", bytes(cases * trials))
        self._by_name: dict[str, TrialScores] = {}

    def update(self, position: int, trial: int, passed: bool | None, scores: list[Score]) -> None:
        """Take in one record by its case's position; `passed` is None for an error or an unscored answer.

        Of several scores with one name the last counts.
        """
        if not 0 <= position < self.cases:
            raise ValueError(f"position must be within 0..{self.cases - 1}, got {position}")
        if not 0 <= trial < self.trials:
            raise ValueError(f"trial must be within 0..{self.trials - 1}, got {trial}")
        slot = position * self.trials + trial
        if self._verdicts[slot]:
            for named in self._by_name.values():
                named.clear(slot)
        self._verdicts[slot] = _SAID[passed]
        for score in scores:
            self._named(score.name).put(slot, score)

    def merge(self, other: TrialStats) -> None:
        """Take in another's records, as if each had been seen here."""
        if (self.cases, self.trials) != (other.cases, other.trials):
            raise ValueError(
                f"both must have as many cases and trials, got {self.cases} × {self.trials} "
                f"and {other.cases} × {other.trials}"
            )
        theirs = np.asarray(other._verdicts)
        seen = theirs > 0
        np.asarray(self._verdicts)[seen] = theirs[seen]
        for name in {**self._by_name, **other._by_name}:
            self._named(name).take(other._by_name.get(name), seen)

    def case_counts(self) -> tuple[Counts, Counts]:
        """For each case, in order, how many trials passed and how many have a verdict."""
        verdicts = np.asarray(self._verdicts).reshape(self.cases, self.trials)
        passed = (verdicts == _PASSED).sum(axis=1, dtype=np.int32)
        return passed, (verdicts >= _FAILED).sum(axis=1, dtype=np.int32)

    def to_metrics(self, ids: Callable[[int], str] | None = None) -> dict[str, Any]:
        """The figures, JSON-able; `ids` names the case at a position, else the position does.

        `cases` has those with a verdict: each of them is flaky, passed `always` or passed `never`. `spread` is the
        mean over cases, of those with two trials or more, of the population standard deviation.
        """
        passed, tried = self.case_counts()
        flaky = _flaky(passed, tried)
        return {
            "trials": self.trials,
            **_rates(passed[tried > 0], tried[tried > 0]),
            **_estimates(passed, tried, self.trials),
            "always": int(((passed == tried) & (tried > 0)).sum()),
            "never": int(((passed == 0) & (tried > 0)).sum()),
            "flaky": len(flaky),
            "flaky_cases": [
                {
                    "id": str(position) if ids is None else ids(position),
                    "passed": int(passed[position]),
                    "tried": int(tried[position]),
                }
                for position in flaky[:_MOST_FLAKY].tolist()
            ],
            "scores": {name: self._by_name[name].to_metrics(self.cases, self.trials) for name in sorted(self._by_name)},
        }

    def _named(self, name: str) -> TrialScores:
        named = self._by_name.get(name)
        if named is None:
            named = self._by_name[name] = TrialScores(len(self._verdicts))
        return named


def _rates(passed: Counts, tried: Counts) -> dict[str, Any]:
    """The mean of the cases' pass rates, where it lies, and how much a case's verdict varies between trials."""
    rates = passed / tried
    several = rates[tried > 1]
    interval = _clustered_interval(passed, tried)
    return {
        "cases": len(rates),
        "pass_rate": mean_or_none(rates),
        "pass_rate_ci95": None if interval is None else list(interval),
        "spread": mean_or_none(np.sqrt(several * (1 - several))),
    }


def _clustered_interval(passed: Counts, tried: Counts) -> Interval | None:
    """The 95 % interval of the mean pass rate, by resampling whole cases: trials of one case are no new evidence.

    Where all cases have the same rate a resample cannot differ, and would claim certainty. There each case counts
    as one observation (Wilson), which is safe however alike its trials are.
    """
    cases = len(tried)
    if not cases:
        return None
    rates = passed / tried
    if rates.min() != rates.max():
        return bootstrap_mean(rates)
    return rate_over_cases(float(rates[0]), cases)


def _estimates(passed: Counts, tried: Counts, trials: int) -> dict[str, dict[str, Any]]:
    """pass@k (any of k trials passes) and pass^k (all k do), unbiased, over the cases with k verdicts or more.

    Both are ratios of binomials, 1 − C(n−c, k)/C(n, k) and C(c, k)/C(n, k), each k's made from the one before.
    """
    pairs, weights = np.unique(np.stack([passed, tried]), axis=1, return_counts=True)
    c, n = pairs
    all_failed, all_passed = np.ones(len(n)), np.ones(len(n))
    at: dict[str, Any] = {}
    hat: dict[str, Any] = {}
    cases: dict[str, Any] = {}
    for k in range(1, trials + 1):
        left = np.maximum(n - k + 1, 1)
        all_failed *= np.maximum(n - c - k + 1, 0) / left
        all_passed *= np.maximum(c - k + 1, 0) / left
        weight = np.where(n >= k, weights, 0)
        total = int(weight.sum())
        cases[str(k)] = total
        at[str(k)] = math.fsum(weight * (1 - all_failed)) / total if total else None
        hat[str(k)] = math.fsum(weight * all_passed) / total if total else None
    return {"cases_at_k": cases, "pass_at_k": at, "pass_hat_k": hat}


def _flaky(passed: Counts, tried: Counts) -> npt.NDArray[np.int64]:
    """The positions of cases that passed in some trials and not in others, the most balanced first."""
    positions = np.flatnonzero((passed > 0) & (passed < tried))
    c, n = passed[positions], tried[positions]
    ordered: npt.NDArray[np.int64] = positions[np.argsort(np.abs(2 * c - n) / n, kind="stable")]
    return ordered
