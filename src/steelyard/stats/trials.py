"""Trials: pass rates of cases that are tried several times, flaky ones, and the variance of agent and judge."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from steelyard.records import Score
from steelyard.stats.distributions import student_quantile
from steelyard.stats.formatting import counted
from steelyard.stats.intervals import BoundedMean, Floats, Interval, StudentMean
from steelyard.stats.metrics import FlakyCase, TrialMetrics, TrialScoreMetrics, VarianceMetrics
from steelyard.stats.scores import MAX_KNOWN_LABELS, OTHER_LABELS, top_labels

Counts: TypeAlias = npt.NDArray[np.int32]
Digests: TypeAlias = npt.NDArray[np.uint64]

_UNDECIDED, _FAILED, _PASSED = 1, 2, 3
"""The state of a slot; 0 is a slot without a record."""

_VERDICTS = {None: _UNDECIDED, False: _FAILED, True: _PASSED}
_MAX_FLAKY = 50

Mask: TypeAlias = npt.NDArray[np.bool_]

_MAX_RUNS = 65_535
_ROUNDING = 1e-12
_DOMINANT_SHARE = 2 / 3
_FEWEST_CASES = 5


class TrialStats:
    """Verdicts and scores by case and trial; the same in any order, the last record of a slot counts.

    A byte a slot (case × trial) for the verdict, and what `TrialScores` takes for each score name that occurs. With
    `groups`, a digest a case and 0 for a case without a group, intervals are over groups; else over cases.
    """

    def __init__(self, cases: int, trials: int, groups: Digests | None = None) -> None:
        if cases < 0:
            raise ValueError(f"cases must be >= 0, got {cases}")
        if trials < 1:
            raise ValueError(f"trials must be >= 1, got {trials}")
        self.cases = cases
        self.trials = trials
        self._groups = groups
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

    def extend(self, cases: int) -> None:
        """Make room for this many cases, where their number was not known before."""
        more = (cases - self.cases) * self.trials
        if more > 0:
            self.cases = cases
            self._verdicts.frombytes(bytes(more))
            for named in self._by_name.values():
                named.extend(more)

    def set_groups(self, groups: Digests) -> None:
        """Set the groups of the cases, where they were not known before."""
        self._groups = groups

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
        records = (np.asarray(self._verdicts).reshape(self.cases, self.trials) > 0).sum(axis=1, dtype=np.int32)
        flaky = _flaky(passed, tried)
        clusters = Clusters(self._groups, self.cases)
        several = passed[tried > 1] / tried[tried > 1]
        rate, rate_all = clusters.rate(passed, tried), clusters.rate(passed, records)
        return TrialMetrics(
            trials=self.trials,
            cases=int((tried > 0).sum()),
            pass_rate=None if rate is None else rate.mean,
            pass_rate_ci95=None if rate is None else rate.interval(),
            pass_rate_all=None if rate_all is None else rate_all.mean,
            pass_rate_all_ci95=None if rate_all is None else rate_all.interval(),
            groups=UNSET if self._groups is None else clusters.count(records > 0),
            spread=mean_or_none(np.sqrt(several * (1 - several))),
            **_estimates(passed, tried, self.trials, clusters),
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
            scores={
                name: self._by_name[name].to_metrics(self.cases, self.trials, clusters, flaky=len(flaky))
                for name in sorted(self._by_name)
            },
        )

    def _named(self, name: str) -> TrialScores:
        named = self._by_name.get(name)
        if named is None:
            named = self._by_name[name] = TrialScores(len(self._verdicts))
        return named


class Clusters:
    """Which cases count together: those of a group, or each case for itself."""

    def __init__(self, groups: Digests | None, cases: int) -> None:
        self._numbers: npt.NDArray[np.int64] | None = None
        if groups is not None:
            _, numbers = np.unique(groups, return_inverse=True)
            alone = groups == 0
            numbers[alone] = cases + np.arange(int(alone.sum()))
            self._numbers = numbers.astype(np.int64)

    def count(self, chosen: Mask) -> int:
        """How many groups these cases belong to."""
        return int(chosen.sum()) if self._numbers is None else len(np.unique(self._numbers[chosen]))

    def mean(self, values: Floats, chosen: Mask) -> BoundedMean | None:
        """The mean over the chosen cases of what each has, with its bounds; None without any, or outside 0..1."""
        if not len(values) or values.min() < -_ROUNDING or values.max() > 1 + _ROUNDING:
            return None
        if self._numbers is None:
            distinct, counts = np.unique(values, return_counts=True)
            return BoundedMean.of_counts(distinct, counts.astype(np.float64))
        return BoundedMean.over_groups(values, self._numbers[chosen].tolist())

    def unbounded_interval(self, values: Floats, chosen: Mask) -> Interval | None:
        """The interval of the mean over the chosen cases of what each has, where that has no bounds."""
        return StudentMean(values, None if self._numbers is None else self._numbers[chosen].tolist()).interval()

    def rate(self, part: Counts, whole: Counts) -> BoundedMean | None:
        """The mean over cases of a share of each case's trials; None where no case has any."""
        chosen = whole > 0
        return self.mean(part[chosen] / whole[chosen], chosen)


def _estimates(passed: Counts, tried: Counts, trials: int, clusters: Clusters) -> dict[str, Any]:
    """pass@k (any of k trials passes) and pass^k (all k do), unbiased, with their intervals.

    All are of the same cases, or pass@2 might be below pass@1: those with as many verdicts as at least half of the
    cases have. Both are ratios of binomials, 1 − C(n−c, k)/C(n, k) and C(c, k)/C(n, k), each k's made from the one
    before.
    """
    scored = np.sort(tried[tried > 0])
    verdicts = int(scored[len(scored) // 2]) if len(scored) else 0
    chosen = tried >= max(verdicts, 1)
    c, n = passed[chosen], tried[chosen]
    all_failed, all_passed = np.ones(len(n)), np.ones(len(n))
    found: dict[str, dict[str, Any]] = {"pass_at_k": {}, "pass_at_k_ci95": {}, "pass_hat_k": {}, "pass_hat_k_ci95": {}}
    for k in range(1, trials + 1):
        left = np.maximum(n - k + 1, 1)
        all_failed *= np.maximum(n - c - k + 1, 0) / left
        all_passed *= np.maximum(c - k + 1, 0) / left
        for name, shares in (("pass_at_k", 1 - all_failed), ("pass_hat_k", all_passed)):
            mean = clusters.mean(shares, chosen) if k <= verdicts else None
            found[name][str(k)] = None if mean is None else mean.mean
            found[f"{name}_ci95"][str(k)] = None if mean is None else mean.interval()
    return {"cases_for_k": len(n), "verdicts_for_k": verdicts, **found}


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
    agent_share_ci95: Interval | None = None
    """Of what the agent has of both variances together; None where it cannot be known."""
    cases: int = 0
    flaky: int = 0
    """Cases whose verdicts differ between trials, whatever this score does."""

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
    def agent_share(self) -> float | None:
        """What the agent has of the variance of both together; None unless both are known and one is not 0."""
        if self.agent is None or self.judge is None or not self.agent + self.judge:
            return None
        return self.agent / (self.agent + self.judge)

    @property
    def dominates(self) -> str | None:
        """Which has more than two thirds of the variance and surely more than half: agent, judge or neither.

        `cannot tell` where the interval leaves that open; None unless both are known.
        """
        share = self.agent_share
        if self.agent is None or self.judge is None:
            return None
        if share is None:
            return "neither"
        if self.agent_share_ci95 is None:
            return "cannot tell"
        low, high = self.agent_share_ci95
        if share > _DOMINANT_SHARE and low > 0.5:
            return "agent"
        if share < 1 - _DOMINANT_SHARE and high < 0.5:
            return "judge"
        return "neither" if low >= 1 - _DOMINANT_SHARE and high <= _DOMINANT_SHARE else "cannot tell"

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
            same = f"this score was the same in all trials of {counted(self.cases, 'case')} and all runs of the judge"
            return f"{same}; verdicts differ even so: see the flaky cases" if self.flaky else same
        in_mean = self.judge_in_mean or 0.0
        if self.dominates == "cannot tell":
            return self._undecided(agent, judge)
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

    def _undecided(self, agent: float, judge: float) -> str:
        doubt = f"cannot tell whether the agent or the judge varies more: std_dev {_root(agent)} and {_root(judge)}"
        if self.agent_share_ci95 is None:
            return f"{doubt} in {counted(self.cases, 'case')} are too little to say: more cases would"
        low, high = self.agent_share_ci95
        return f"{doubt}, the agent's share is {low:.0%} to {high:.0%} (95 % CI): more cases would tell"

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
            agent_share=self.agent_share,
            agent_share_ci95=self.agent_share_ci95,
            dominates=self.dominates,
            says=self.says,
        )


class TrialScores:
    """One scorer's values by slot (case × trial): 9 bytes a slot, 10 more once a judge gives several samples, and 2
    where it gives labels."""

    def __init__(self, slots: int) -> None:
        self._values = _missing(slots)
        self._verdicts = array("B", bytes(slots))
        self._variances: array[float] | None = None
        self._runs: array[int] | None = None
        self._means: array[float] | None = None
        """The means of the samples, kept only where an aggregator makes the value something else."""
        self._judged = False
        self._is_number = False
        self._labels: array[int] | None = None
        """The number of each slot's label; 0 where it has none."""
        self._label_numbers: dict[str, int] = {}

    def put(self, slot: int, score: Score) -> None:
        """Set this slot's score, replacing what was there."""
        self.clear(slot)
        value = score.value
        self._verdicts[slot] = _VERDICTS[score.passed]
        if value is not None and math.isfinite(value):
            self._values[slot] = value
        if score.by is not None:
            self._judged = True
        self._is_number = self._is_number or score.is_number
        if score.label is not None:
            if self._labels is None:
                self._labels = array("H", bytes(2 * len(self._values)))
            self._labels[slot] = self._label_number(score.label)
        if score.samples is not None:
            self._put_samples(slot, [s for s in score.samples if s is not None and math.isfinite(s)])

    def _label_number(self, label: str) -> int:
        numbers = self._label_numbers
        if label not in numbers and len(numbers) >= MAX_KNOWN_LABELS:
            label = OTHER_LABELS
        return numbers.setdefault(label, len(numbers) + 1)

    def clear(self, slot: int) -> None:
        """Clear this slot."""
        self._values[slot] = math.nan
        self._verdicts[slot] = 0
        if self._labels is not None:
            self._labels[slot] = 0
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

    def extend(self, slots: int) -> None:
        """Make room for this many more slots."""
        self._values.extend(_missing(slots))
        self._verdicts.frombytes(bytes(slots))
        if self._labels is not None:
            self._labels.frombytes(bytes(2 * slots))
        if self._variances is not None:
            self._variances.extend(_missing(slots))
        if self._runs is not None:
            self._runs.frombytes(bytes(2 * slots))
        if self._means is not None:
            self._means.extend(_missing(slots))

    def take(self, other: TrialScores | None, seen: Mask) -> None:
        """Copy another's slots where it has records; None means that it has none of this scorer."""
        slots = len(self._values)
        theirs = other or TrialScores(slots)
        self._judged |= theirs._judged
        self._is_number |= theirs._is_number
        if self._labels is not None or theirs._labels is not None:
            none = array("H", bytes(2 * slots))
            numbers = np.array([0, *map(self._label_number, theirs._label_numbers)], dtype=np.uint16)
            renumbered = array("H", numbers[np.asarray(theirs._labels or none)].tobytes())
            self._labels = _overlaid(self._labels or none, renumbered, seen)
        np.asarray(self._values)[seen] = np.asarray(theirs._values)[seen]
        np.asarray(self._verdicts)[seen] = np.asarray(theirs._verdicts)[seen]
        if self._variances is not None or theirs._variances is not None:
            self._variances = _overlaid(self._variances or _missing(slots), theirs._variances or _missing(slots), seen)
            none = array("H", bytes(2 * slots))
            self._runs = _overlaid(self._runs or none, theirs._runs or none, seen)
        if self._means is not None or theirs._means is not None:
            self._means = _overlaid(self._means or _missing(slots), theirs._means or _missing(slots), seen)

    def to_metrics(self, cases: int, trials: int, clusters: Clusters, *, flaky: int = 0) -> TrialScoreMetrics:
        """The mean and pass rate over cases, clustered, the spread between trials, and whose it is."""
        counts, means, squares = _by_case(np.asarray(self._values).reshape(cases, trials))
        valued, several = counts > 0, counts > 1
        verdicts = np.asarray(self._verdicts).reshape(cases, trials)
        passed = (verdicts == _PASSED).sum(axis=1, dtype=np.int32)
        rate = clusters.rate(passed, (verdicts >= _FAILED).sum(axis=1, dtype=np.int32))
        if self._is_number:
            interval = clusters.unbounded_interval(means[valued], valued)
        else:
            mean = clusters.mean(means[valued], valued)
            interval = None if mean is None else mean.interval()
        shares = self._shares(cases, trials, clusters)
        return TrialScoreMetrics(
            cases=int(valued.sum()),
            mean=mean_or_none(means[valued]),
            mean_ci95=interval,
            shares={label: share for label, (share, _) in shares.items()} or UNSET,
            shares_ci95={label: found for label, (_, found) in shares.items()} or UNSET,
            pass_rate=None if rate is None else rate.mean,
            pass_rate_ci95=None if rate is None else rate.interval(),
            spread=mean_or_none(np.sqrt(squares[several] / counts[several])),
            variance=self.split(cases, trials, flaky=flaky).to_metrics(),
        )

    def _shares(self, cases: int, trials: int, clusters: Clusters) -> dict[str, tuple[float | None, Interval | None]]:
        """The share of each label, the most frequent first: the mean over cases, clustered."""
        if self._labels is None:
            return {}
        table = np.asarray(self._labels).reshape(cases, trials)
        counts = np.bincount(table.ravel(), minlength=len(self._label_numbers) + 1)
        kept = top_labels({label: int(counts[number]) for label, number in self._label_numbers.items()})
        labelled = (table > 0).sum(axis=1, dtype=np.int32)
        found, rest = {}, labelled.copy()
        for label in kept:
            if label != OTHER_LABELS:
                part = (table == self._label_numbers[label]).sum(axis=1, dtype=np.int32)
                rest -= part
                found[label] = clusters.rate(part, labelled)
        if OTHER_LABELS in kept:
            found[OTHER_LABELS] = clusters.rate(rest, labelled)
        return {name: (None, None) if one is None else (one.mean, one.interval()) for name, one in found.items()}

    def split(self, cases: int, trials: int, *, flaky: int = 0) -> VarianceSplit:
        """The variance between trials, split into the agent's and the judge's."""
        values = np.asarray(self._values)
        if self._means is not None:
            means = np.asarray(self._means)
            values = np.where(np.isnan(means), values, means)
        table = values.reshape(cases, trials)
        counts, _, squares = _by_case(table)
        several = counts > 1
        between = squares[several] / (counts[several] - 1)
        judge = None if self._variances is None else mean_or_none(_present(np.asarray(self._variances)))
        noise = share = None
        if judge is not None:
            in_means = self._noise(judge).reshape(cases, trials).sum(axis=1, where=~np.isnan(table))
            in_means = in_means[several] / counts[several]
            noise = mean_or_none(in_means)
            share = _share_interval(between - in_means, self._judge_by_case(cases, trials)[several])
        return VarianceSplit(
            between_trials=mean_or_none(between),
            judge=judge,
            judge_in_mean=noise,
            judged=self._judged,
            agent_share_ci95=share,
            cases=int(several.sum()),
            flaky=flaky,
        )

    def _judge_by_case(self, cases: int, trials: int) -> Floats:
        """Return the judge's variance in each case; NaN where it is not known."""
        assert self._variances is not None
        table = np.asarray(self._variances).reshape(cases, trials)
        known = ~np.isnan(table)
        counts = known.sum(axis=1)
        sums: Floats = table.sum(axis=1, where=known)
        means: Floats = np.divide(sums, counts, out=np.full(cases, math.nan), where=counts > 0)
        return means

    def _noise(self, judge: float) -> Floats:
        """Return the judge's variance in each slot's mean; with one sample there, the average variance is used."""
        assert self._variances is not None
        assert self._runs is not None
        variances = np.asarray(self._variances)
        noise: Floats = np.where(np.isnan(variances), judge, variances) / np.maximum(np.asarray(self._runs), 1)
        return noise


def _share_interval(agent: Floats, judge: Floats) -> Interval | None:
    """The 95 % interval of the agent's share of the variance (Fieller): both vary from case to case.

    None with fewer than five cases in which both are known, or where the variances themselves are not above noise.
    """
    known = ~np.isnan(judge)
    agent, both = agent[known], agent[known] + judge[known]
    n = len(agent)
    if n < _FEWEST_CASES:
        return None
    covariance = np.cov(agent, both) * student_quantile(0.975, n - 1) ** 2 / n
    top, bottom = float(agent.mean()), float(both.mean())
    a = bottom**2 - float(covariance[1, 1])
    b = top * bottom - float(covariance[0, 1])
    c = top**2 - float(covariance[0, 0])
    if bottom <= 0 or a <= 0:
        return None
    reach = math.sqrt(max(b * b - a * c, 0.0))
    low, high = (min(max(end, 0.0), 1.0) for end in ((b - reach) / a, (b + reach) / a))
    return low, high


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
