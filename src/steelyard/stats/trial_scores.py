"""One scorer's figures over repeated trials: how far the agent varies, how far the judge, and which of them more."""

from __future__ import annotations

import math
from array import array
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.records import Score
from steelyard.stats.intervals import Floats, mean_interval

Mask: TypeAlias = npt.NDArray[np.bool_]

_MOST_RUNS = 65_535
_ROUNDING = 1e-12
_DOMINANT_SHARE = 2 / 3


class VarianceSplit(msgspec.Struct, frozen=True, kw_only=True):
    """What of a score's variance is the agent's and what the judge's; None where it cannot be known.

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

    def to_metrics(self) -> dict[str, Any]:
        """The parts, their roots and the words."""
        return {
            "judged": self.judged,
            "between_trials": self.between_trials,
            "agent": self.agent,
            "agent_floored": self.floored,
            "judge": self.judge,
            "judge_in_mean": self.judge_in_mean,
            "agent_std_dev": None if self.agent is None else math.sqrt(self.agent),
            "judge_std_dev": None if self.judge is None else math.sqrt(self.judge),
            "dominates": self.dominates,
            "says": self.says,
        }


class TrialScores:
    """What one scorer said in each slot (case × trial): 8 bytes a slot, and 10 more once a judge repeats itself."""

    def __init__(self, slots: int) -> None:
        self._values = _missing(slots)
        self._variances: array[float] | None = None
        self._runs: array[int] | None = None
        self._means: array[float] | None = None
        """The means of the samples, kept only where an aggregator makes the value something else."""
        self._judged = False

    def put(self, slot: int, score: Score) -> None:
        """Keep what was said in this slot, in place of what was there."""
        self.clear(slot)
        value = score.value
        if value is not None and math.isfinite(value):
            self._values[slot] = value
        if score.by is not None:
            self._judged = True
        if score.samples is not None:
            self._put_samples(slot, [s for s in score.samples if s is not None and math.isfinite(s)])

    def clear(self, slot: int) -> None:
        """Forget what was said in this slot."""
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
        self._runs[slot] = min(n, _MOST_RUNS)
        if n > 1:
            self._variances[slot] = math.fsum((each - centre) ** 2 for each in shifted) / (n - 1)
        mean = samples[0] + centre
        if abs(mean - self._values[slot]) > _ROUNDING:
            if self._means is None:
                self._means = _missing(len(self._values))
            self._means[slot] = mean

    def take(self, other: TrialScores | None, seen: Mask) -> None:
        """Take over another's slots where it has seen something; None is another that never saw this scorer."""
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

    def to_metrics(self, cases: int, trials: int) -> dict[str, Any]:
        """The mean over cases with its interval clustered by case, the spread between trials, and whose it is."""
        counts, means, squares = _by_case(np.asarray(self._values).reshape(cases, trials))
        means = means[counts > 0]
        several = counts > 1
        return {
            "cases": len(means),
            "mean": mean_or_none(means),
            "mean_ci95": None if (interval := mean_interval(means)) is None else list(interval),
            "spread": mean_or_none(np.sqrt(squares[several] / counts[several])),
            "variance": self.split(cases, trials).to_metrics(),
        }

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
        """The judge's variance in each slot's mean. One that was asked once there varies as it does elsewhere."""
        assert self._variances is not None
        assert self._runs is not None
        variances = np.asarray(self._variances)
        noise: Floats = np.where(np.isnan(variances), judge, variances) / np.maximum(np.asarray(self._runs), 1)
        return noise


def _by_case(table: Floats) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """For each row how many values it has, their mean, and the sum of their squared distances from it."""
    present = ~np.isnan(table)
    counts = present.sum(axis=1)
    # Measured from the least: equal values then have a distance of exactly 0.
    least = np.fmin.reduce(table, axis=1)
    shifted = table - least[:, np.newaxis]
    centres = shifted.sum(axis=1, where=present) / np.maximum(counts, 1)
    squares: Floats = ((shifted - centres[:, np.newaxis]) ** 2).sum(axis=1, where=present)
    return counts, least + centres, squares


def mean_or_none(values: Floats) -> float | None:
    """The mean, summed without loss; None of no values."""
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
