"""Trials: pass rates of cases that are tried several times, flaky ones, and the variance of agent and judge."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.records import Score
from steelyard.stats.intervals import Floats, Interval, bootstrap_mean, mean_interval, rate_over_cases
from steelyard.stats.metrics import FlakyCase, TrialMetrics, TrialScoreMetrics, VarianceMetrics

Counts: TypeAlias = npt.NDArray[np.int32]

_UNDECIDED, _FAILED, _PASSED = 1, 2, 3
"""The state of a slot; 0 is a slot without a record."""

_VERDICTS = {None: _UNDECIDED, False: _FAILED, True: _PASSED}
_MAX_FLAKY = 50

Mask: TypeAlias = npt.NDArray[np.bool_]

_MAX_RUNS = 65_535
_ROUNDING = 1e-12
_DOMINANT_SHARE = 2 / 3


class TrialStats:
    """Verdicts and scores by case and trial; the same in any order, the last record of a slot counts.

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
        """Add one record by its case's position; `passed` is None for an error or an unscored answer.

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
        self._verdicts[slot] = _VERDICTS[passed]
        for score in scores:
            self._named(score.name).put(slot, score)

    def merge(self, other: TrialStats) -> None:
        """Add another's records, as if each had been seen here."""
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
        """Return for each case, in order, how many trials passed and how many have a verdict."""
        verdicts = np.asarray(self._verdicts).reshape(self.cases, self.trials)
        passed = (verdicts == _PASSED).sum(axis=1, dtype=np.int32)
        return passed, (verdicts >= _FAILED).sum(axis=1, dtype=np.int32)

    def to_metrics(self, ids: Callable[[int], str] | None = None) -> TrialMetrics:
        """The figures; `ids` names the case at a position, else the position does.

        `cases` has those with a verdict: each of them is flaky, passed `always` or passed `never`. `spread` is the
        mean over cases, of those with two trials or more, of the population standard deviation.
        """
        passed, tried = self.case_counts()
        flaky = _flaky(passed, tried)
        return TrialMetrics(
            trials=self.trials,
            **_rates(passed[tried > 0], tried[tried > 0]),
            **_estimates(passed, tried, self.trials),
            always=int(((passed == tried) & (tried > 0)).sum()),
            never=int(((passed == 0) & (tried > 0)).sum()),
            flaky=len(flaky),
            flaky_cases=[
                FlakyCase(
                    id=str(position) if ids is None else ids(position),
                    passed=int(passed[position]),
                    tried=int(tried[position]),
                )
                for position in flaky[:_MAX_FLAKY].tolist()
            ],
            scores={name: self._by_name[name].to_metrics(self.cases, self.trials) for name in sorted(self._by_name)},
        )

    def _named(self, name: str) -> TrialScores:
        named = self._by_name.get(name)
        if named is None:
            named = self._by_name[name] = TrialScores(len(self._verdicts))
        return named


def _rates(passed: Counts, tried: Counts) -> dict[str, Any]:
    """Return the mean of the cases' pass rates, its interval, and how much verdicts vary between trials."""
    rates = passed / tried
    several = rates[tried > 1]
    interval = _clustered_interval(passed, tried)
    return {
        "cases": len(rates),
        "pass_rate": mean_or_none(rates),
        "pass_rate_ci95": interval,
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


def _estimates(passed: Counts, tried: Counts, trials: int) -> dict[str, Any]:
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
    """Return the positions of cases that passed in some trials and not in others, the most balanced first."""
    positions = np.flatnonzero((passed > 0) & (passed < tried))
    c, n = passed[positions], tried[positions]
    ordered: npt.NDArray[np.int64] = positions[np.argsort(np.abs(2 * c - n) / n, kind="stable")]
    return ordered


class VarianceSplit(msgspec.Struct, frozen=True, kw_only=True):
    """A score's variance, split into the agent's and the judge's; None where it cannot be known.

    `judge` is the variance of one judgement of one answer, `judge_in_mean` what is left of it in an answer's mean
    over the runs that were made. `agent` is the variance between trials (`between_trials`) less `judge_in_mean`.
    """

    between_trials: float | None
    judge: float | None
    judge_in_mean: float | None
    judged: bool

    @property
    def agent(self) -> float | None:
        """The agent's variance. An estimate below 0, which noise can make, is taken as 0: see `floored`."""
        if self.between_trials is None or not self.judged:
            return self.between_trials
        return None if self.judge_in_mean is None else max(self.between_trials - self.judge_in_mean, 0.0)

    @property
    def floored(self) -> bool:
        """Whether the trials differ by less than the judge's noise alone would make them."""
        if self.between_trials is None or self.judge_in_mean is None:
            return False
        return self.between_trials < self.judge_in_mean

    @property
    def dominates(self) -> str | None:
        """Which has more than two thirds of the variance: agent, judge or neither; None unless both are known."""
        if self.agent is None or self.judge is None:
            return None
        most = _DOMINANT_SHARE * (self.agent + self.judge)
        if self.agent > most:
            return "agent"
        return "judge" if self.judge > most else "neither"

    @property
    def says(self) -> str | None:
        """The split in words, and what would make the figures surer; None when nothing is known."""
        if self.agent is not None and self.judge is not None:
            return self._compared(self.agent, self.judge)
        if self.judge is not None:
            varies = f"varies between runs: std_dev {_root(self.judge)}" if self.judge else "said the same in every run"
            return f"the judge {varies}; the agent's part shows where a case is judged in two trials or more"
        if self.between_trials is None:
            return None
        varies = f"between trials: std_dev {_root(self.between_trials)}"
        if self.judged:
            return f"agent and judge together vary {varies}: num_runs >= 2 would tell them apart"
        return f"the agent varies {varies}; no judge was asked"

    def _compared(self, agent: float, judge: float) -> str:
        if agent == judge == 0:
            return "neither the agent nor the judge varies"
        in_mean = self.judge_in_mean or 0.0
        if self.dominates == "agent":
            return (
                f"the agent varies more than the judge: std_dev {_root(agent)} against {_root(judge)}: "
                "more trials help, more judge runs do not"
            )
        if self.dominates == "neither":
            return (
                f"the agent and the judge vary about alike: std_dev {_root(agent)} and {_root(judge)}: "
                "more trials help, more judge runs a little"
            )
        more = f"the judge varies more than the agent: std_dev {_root(judge)} against {_root(agent)}"
        if in_mean <= agent:
            # What counts in the end is the mean over the runs, and there are enough of them already.
            return f"{more}, but {_root(in_mean)} in the mean of its runs: more trials help, more judge runs hardly"
        floored = " (the judge alone explains more than the trials differ, so the agent's is taken as 0)"
        return f"{more}: more judge runs help" + (floored if self.floored else "")

    def to_metrics(self) -> VarianceMetrics:
        """The parts, their roots and the words."""
        return VarianceMetrics(
            judged=self.judged,
            between_trials=self.between_trials,
            agent=self.agent,
            agent_floored=self.floored,
            judge=self.judge,
            judge_in_mean=self.judge_in_mean,
            agent_std_dev=None if self.agent is None else math.sqrt(self.agent),
            judge_std_dev=None if self.judge is None else math.sqrt(self.judge),
            dominates=self.dominates,
            says=self.says,
        )


class TrialScores:
    """One scorer's values by slot (case × trial): 8 bytes a slot, and 10 more once a judge gives several samples."""

    def __init__(self, slots: int) -> None:
        self._values = _missing(slots)
        self._variances: array[float] | None = None
        self._runs: array[int] | None = None
        self._means: array[float] | None = None
        """The means of the samples, kept only where an aggregator makes the value something else."""
        self._judged = False

    def put(self, slot: int, score: Score) -> None:
        """Set this slot's score, replacing what was there."""
        self.clear(slot)
        value = score.value
        if value is not None and math.isfinite(value):
            self._values[slot] = value
        if score.by is not None:
            self._judged = True
        if score.samples is not None:
            self._put_samples(slot, [s for s in score.samples if s is not None and math.isfinite(s)])

    def clear(self, slot: int) -> None:
        """Clear this slot."""
        self._values[slot] = math.nan
        if self._variances is not None:
            self._variances[slot] = math.nan
        if self._runs is not None:
            self._runs[slot] = 0
        if self._means is not None:
            self._means[slot] = math.nan

    def _put_samples(self, slot: int, samples: list[float]) -> None:
        if not samples:
            return
        self._judged = True
        if self._variances is None or self._runs is None:
            self._variances = _missing(len(self._values))
            self._runs = array("H", bytes(2 * len(self._values)))
        # Measured from the first sample: equal ones then vary by exactly 0.
        shifted = [sample - samples[0] for sample in samples]
        n = len(samples)
        centre = math.fsum(shifted) / n
        self._runs[slot] = min(n, _MAX_RUNS)
        if n > 1:
            self._variances[slot] = math.fsum((each - centre) ** 2 for each in shifted) / (n - 1)
        mean = samples[0] + centre
        if abs(mean - self._values[slot]) > _ROUNDING:
            if self._means is None:
                self._means = _missing(len(self._values))
            self._means[slot] = mean

    def take(self, other: TrialScores | None, seen: Mask) -> None:
        """Copy another's slots where it has records; None means that it has none of this scorer."""
        slots = len(self._values)
        theirs = other or TrialScores(slots)
        self._judged |= theirs._judged
        np.asarray(self._values)[seen] = np.asarray(theirs._values)[seen]
        if self._variances is not None or theirs._variances is not None:
            self._variances = _overlaid(self._variances or _missing(slots), theirs._variances or _missing(slots), seen)
            none = array("H", bytes(2 * slots))
            self._runs = _overlaid(self._runs or none, theirs._runs or none, seen)
        if self._means is not None or theirs._means is not None:
            self._means = _overlaid(self._means or _missing(slots), theirs._means or _missing(slots), seen)

    def to_metrics(self, cases: int, trials: int) -> TrialScoreMetrics:
        """The mean over cases with its interval clustered by case, the spread between trials, and whose it is."""
        counts, means, squares = _by_case(np.asarray(self._values).reshape(cases, trials))
        means = means[counts > 0]
        several = counts > 1
        return TrialScoreMetrics(
            cases=len(means),
            mean=mean_or_none(means),
            mean_ci95=mean_interval(means),
            spread=mean_or_none(np.sqrt(squares[several] / counts[several])),
            variance=self.split(cases, trials).to_metrics(),
        )

    def split(self, cases: int, trials: int) -> VarianceSplit:
        """The variance between trials, split into the agent's and the judge's."""
        values = np.asarray(self._values)
        if self._means is not None:
            means = np.asarray(self._means)
            values = np.where(np.isnan(means), values, means)
        table = values.reshape(cases, trials)
        counts, _, squares = _by_case(table)
        several = counts > 1
        judge = None if self._variances is None else mean_or_none(_present(np.asarray(self._variances)))
        noise = None
        if judge is not None:
            in_means = self._noise(judge).reshape(cases, trials).sum(axis=1, where=~np.isnan(table))
            noise = mean_or_none(in_means[several] / counts[several])
        return VarianceSplit(
            between_trials=mean_or_none(squares[several] / (counts[several] - 1)),
            judge=judge,
            judge_in_mean=noise,
            judged=self._judged,
        )

    def _noise(self, judge: float) -> Floats:
        """Return the judge's variance in each slot's mean; with one sample there, the average variance is used."""
        assert self._variances is not None
        assert self._runs is not None
        variances = np.asarray(self._variances)
        noise: Floats = np.where(np.isnan(variances), judge, variances) / np.maximum(np.asarray(self._runs), 1)
        return noise


def _by_case(table: Floats) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Return for each row the number of values, their mean, and the sum of squared distances from it."""
    present = ~np.isnan(table)
    counts = present.sum(axis=1)
    # Measured from the least: equal values then have a distance of exactly 0.
    least = np.fmin.reduce(table, axis=1)
    shifted = table - least[:, np.newaxis]
    centres = shifted.sum(axis=1, where=present) / np.maximum(counts, 1)
    squares: Floats = ((shifted - centres[:, np.newaxis]) ** 2).sum(axis=1, where=present)
    return counts, least + centres, squares


def mean_or_none(values: Floats) -> float | None:
    """Return the mean, summed exactly; None without values."""
    return math.fsum(values) / len(values) if len(values) else None


def _present(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _missing(slots: int) -> array[float]:
    return array("d", (math.nan,)) * slots


def _overlaid(mine: array[Any], theirs: array[Any], seen: Mask) -> array[Any]:
    np.asarray(mine)[seen] = np.asarray(theirs)[seen]
    return mine


def _root(variance: float) -> str:
    return f"{math.sqrt(variance):.2g}"
