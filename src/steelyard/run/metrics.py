"""The figures of a run, composed in one place: for `metrics.json`, `partial.json` and a run that is replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import UNSET

from steelyard.errors import CountsError
from steelyard.records import Record
from steelyard.stats.errors import ErrorName, by_kind, by_type, error_name, ranked
from steelyard.stats.metrics import (
    Counts,
    DecidedMetrics,
    ErrorExample,
    JournalLines,
    JudgeCalibration,
    LimitMetrics,
    Metrics,
    NotKept,
    RunMetric,
    ScoreMetrics,
    SliceMetrics,
    TrialMetrics,
)
from steelyard.stats.prices import Spending
from steelyard.stats.running import RunningStats
from steelyard.stats.scores import ScoreStats
from steelyard.stats.slices import over_cases

_MAX_EXAMPLE = 300


class RunCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Where each planned (case, trial) stands, each counted once."""

    planned: int
    ok: int
    error: int
    cancelled: int
    not_started: int
    not_asked: int = 0
    """Left out because every rule was settled."""
    to_redo: int = 0
    """How many of the ok and error ones were to be retried or scored again, and were not reached."""
    cut_short: bool = False
    """Something ended a run before its time that had no number of slots to reach, only a time."""

    @property
    def complete(self) -> bool:
        """Whether every planned (case, trial) has a record that stands."""
        return self.planned == self.ok + self.error + self.not_asked and not (self.to_redo or self.cut_short)

    def check(self, stats: RunningStats, scores: ScoreStats) -> None:
        """Raise CountsError unless the counts add up, among themselves and with the statistics."""
        if self.planned != self.ok + self.error + self.cancelled + self.not_started + self.not_asked:
            raise CountsError(f"the counts do not add up: {self}")
        counted = (stats.total_requests - stats.failed_requests, stats.failed_requests)
        if counted != (self.ok, self.error) or scores.n != self.ok + self.error:
            raise CountsError(f"the statistics count {counted} ok and error, the scores {scores.n}; the run: {self}")


class Errors:
    """How often each error came, by type and by kind, with an example of each: the first in case order, whenever it
    came."""

    def __init__(self) -> None:
        self.counts: Counter[ErrorName] = Counter()
        self._examples: dict[ErrorName, Record] = {}

    def add(self, record: Record) -> None:
        """Count an error record."""
        name = error_name(record)
        self.counts[name] += 1
        self._examples[name] = min(record, self._examples.get(name, record), key=_case_order)

    def to_metrics(self) -> dict[str, Any]:
        """The counts, the most frequent first, and the examples."""
        return {
            "errors": by_type(self.counts),
            "error_examples": self._shown(attrgetter("type")),
            "error_kinds": by_kind(self.counts),
            "error_kind_examples": self._shown(attrgetter("kind")),
        }

    def _shown(self, group: Callable[[ErrorName], str]) -> dict[str, ErrorExample]:
        """An example for each group of errors."""
        found: dict[str, Record] = {}
        for name, record in self._examples.items():
            found[group(name)] = min(record, found.get(group(name), record), key=_case_order)
        return {
            name: ErrorExample(id=record.id, error=(record.error or "")[:_MAX_EXAMPLE])
            for name, record in sorted(found.items())
        }


def _case_order(record: Record) -> tuple[int, int]:
    return record.index, record.trial


def compose(
    *,
    about: Mapping[str, Any],
    counts: RunCounts,
    stats: RunningStats,
    scores: ScoreStats,
    errors: Errors,
    left_out: int,
    stopped: str | None,
    lines: JournalLines | None = None,
    trials: TrialMetrics | None = None,
    repeated: bool = False,
    spending: Spending | None = None,
    load: bool = False,
    decided: DecidedMetrics | None = None,
    slices: list[SliceMetrics] | None = None,
    run_metrics: dict[str, RunMetric] | None = None,
    limits: Mapping[str, LimitMetrics] | None = None,
    not_kept: NotKept | None = None,
    sent: Callable[[Mapping[str, float | None]], Mapping[str, Any]] | None = None,
) -> Metrics:
    """The metrics of a run. The counts are checked first.

    `load` says that calls were made at once and round and round, so that neighbouring answers are alike. `sent` says,
    given the statistics, under which conditions the calls were made. `trials` has the rates by case, where cases count
    together in any way; it is a part of the metrics where they were `repeated`.
    """
    counts.check(stats, scores)
    about = dict(about)
    calibrations: Mapping[str, JudgeCalibration] = about.pop("calibrations", {})
    flat = stats.to_stats()
    # Trials of one case, and cases of one group, are not independent: they count together.
    rates: ScoreStats | TrialMetrics = scores if trials is None else trials
    return Metrics(
        complete=counts.complete,
        stopped=stopped,
        **about,
        n=counts.ok + counts.error,
        counts=_as_metrics(counts),
        to_redo=counts.to_redo,
        pass_rate=rates.pass_rate,
        pass_rate_ci95=rates.pass_rate_ci95,
        pass_rate_all=rates.pass_rate_all,
        pass_rate_all_ci95=rates.pass_rate_all_ci95,
        groups=UNSET if trials is None else trials.groups,
        error_rate=scores.error_rate,
        p50_latency_s=flat["time_to_last_token-p50"],
        scored=scores.scored,
        passed=scores.passed,
        unscored=scores.unscored,
        scoring_errors=scores.scoring_errors,
        truncated=stats.truncated_requests,
        truncated_rate=stats.truncated_requests / counts.ok if counts.ok else None,
        stop_reasons=ranked(stats.stop_reasons.items()),
        limits=dict(limits) if limits else UNSET,
        not_kept=not_kept if not_kept is not None and not_kept.cases else UNSET,
        cached=stats.cached_requests,
        resent=stats.resent_requests,
        retried=stats.retried_requests,
        retry_causes=ranked(stats.retry_causes.items()),
        tokens_estimated=stats.estimated_requests,
        stalls=stats.stalls,
        reasoning_in_text=stats.reasoning_in_text,
        fields_left_out=stats.fields_left_out,
        left_out=left_out,
        lines=UNSET if lines is None else lines,
        active_seconds=stats.active_seconds,
        **({} if spending is None else spending.to_metrics(n=counts.ok + counts.error, passed=scores.passed)),
        **errors.to_metrics(),
        scores=_named_scores(scores, trials, calibrations),
        stats=flat,
        latency=stats.to_latency(load=load),
        nodes=stats.nodes.to_metrics() if stats.nodes else UNSET,
        **({} if sent is None else sent(flat)),
        trials=trials if trials is not None and repeated else UNSET,
        decided=UNSET if decided is None else decided,
        slices=UNSET if slices is None else slices,
        run_metrics=UNSET if run_metrics is None else run_metrics,
    )


def _as_metrics(counts: RunCounts) -> Counts:
    names = (name for name in Counts.__struct_fields__ if name != "not_asked")
    return Counts(**{name: getattr(counts, name) for name in names}, not_asked=counts.not_asked or UNSET)


def _named_scores(
    scores: ScoreStats, trials: TrialMetrics | None, calibrations: Mapping[str, JudgeCalibration]
) -> dict[str, ScoreMetrics]:
    """The figures of each scorer; over cases or groups where these count together."""
    named = scores.to_metrics()
    for name, calibration in calibrations.items():
        if name in named and named[name].by:
            named[name].calibration = calibration
    return over_cases(named, trials)
