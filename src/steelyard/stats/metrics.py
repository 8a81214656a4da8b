"""The figures of a run as a tree of types: what `metrics.json` and `partial.json` hold, and what reads them.

A figure that a run cannot tell is None; a group that a run does not have is UNSET and is not written.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from steelyard.records import Better
from steelyard.stats.client_load import ClientLoad
from steelyard.stats.correction import Correction
from steelyard.stats.figures import STATS, Figure, as_expression, patterns, values
from steelyard.stats.formatting import counted
from steelyard.stats.intervals import Interval

METRICS_VERSION = 1

FAILURE_RATE = "failure_rate"
"""The share of records without an answer, or whose scoring broke down: what a suite's `max_error_rate` limits."""

_COUNT = Figure("count")
_FAULTS = Figure("count", "lower")
_PASS_RATE = Figure("share", "higher", "quality", "the pass rate")
_QUALITY = Figure("share", "higher", "quality")
_MEAN = Figure("ratio", "higher", "quality")
"""Of a score within 0..1, or of a measurement, which has no bounds."""
_MEASURED = Figure("number", None, "quality")
_SHARE = Figure("share", None, "quality")
_SPREAD = Figure("share", "lower", "quality")
_TIME = Figure("seconds", "lower", "speed", lateness_adds=True)
_COST = Figure("money", "lower", "cost")
_VARIANCE = Figure("number", None, "quality")


class Counts(msgspec.Struct, kw_only=True):
    """Where each planned (case, trial) is, each counted once."""

    planned: Annotated[int, _COUNT]
    ok: Annotated[int, _COUNT]
    error: Annotated[int, _FAULTS]
    cancelled: Annotated[int, _FAULTS]
    not_started: Annotated[int, _FAULTS]
    not_asked: Annotated[int | UnsetType, _COUNT] = UNSET
    """Left out because every rule was settled before (`stop_when: decided`)."""


class DecidedRule(msgspec.Struct, kw_only=True):
    """What became of a rule of a run that stops when it is decided."""

    rule: str
    outcome: str
    """`holds`, `broken` or `cannot tell`."""


class DecidedMetrics(msgspec.Struct, kw_only=True):
    """What a run that stops when its rules are settled decided, and what that saved."""

    settled: bool
    """Whether every rule was settled, so that the rest was not asked."""
    rules: list[DecidedRule]
    asked: Annotated[int, _COUNT]
    not_asked: Annotated[int, _COUNT]


class ErrorExample(msgspec.Struct, kw_only=True):
    """One of the cases that failed in some way, and its message."""

    id: str
    error: str


class JuryMetrics(msgspec.Struct, kw_only=True):
    """How far the models of a jury agree."""

    votes: Annotated[int, _COUNT]
    """Answers that were voted on."""
    unanimous: Annotated[float | None, _QUALITY]
    """The share of them on which all that voted agree."""
    agreement: Annotated[float | None, _QUALITY]
    """The share of pairs of votes that agree."""


class JudgeCalibration(msgspec.Struct, kw_only=True, frozen=True):
    """What labels by people have shown of a judge: its error rates, or rho for graded labels."""

    labels: Annotated[int, _COUNT]
    trusted: bool
    sensitivity: Annotated[float | None, _QUALITY] = None
    specificity: Annotated[float | None, _QUALITY] = None
    rho: Annotated[float | None, _QUALITY] = None
    created: str = ""


class ScoreMetrics(msgspec.Struct, kw_only=True):
    """What one scorer found over all records."""

    n: Annotated[int, _COUNT]
    mean: Annotated[float | None, _MEAN]
    mean_ci95: Annotated[Interval | None, _MEAN] = None
    unit: str | UnsetType = UNSET
    """Of a measurement, as are the four below: what it is measured in."""
    better: Better | UnsetType = UNSET
    min: Annotated[float | UnsetType | None, _MEASURED] = UNSET
    p50: Annotated[float | UnsetType | None, _MEASURED] = UNSET
    max: Annotated[float | UnsetType | None, _MEASURED] = UNSET
    labels: Annotated[dict[str, int] | UnsetType, _COUNT] = UNSET
    """Of a label: how often each came, the most frequent first."""
    shares: Annotated[dict[str, float | None] | UnsetType, _SHARE] = UNSET
    """Of a label: the share of each."""
    shares_ci95: Annotated[dict[str, Interval | None] | UnsetType, _SHARE] = UNSET
    passed: Annotated[int, _COUNT] = 0
    pass_rate: Annotated[float | None, _QUALITY] = None
    pass_rate_ci95: Annotated[Interval | None, _QUALITY] = None
    errors: Annotated[int, _FAULTS] = 0
    error_example: str | UnsetType = UNSET
    by: list[str] | UnsetType = UNSET
    """Who judged; only of judges, as are the fields below."""
    std_dev: Annotated[float | UnsetType | None, _SPREAD] = UNSET
    escalated: Annotated[int | UnsetType, _COUNT] = UNSET
    advisory: bool | UnsetType = UNSET
    overruled: Annotated[int | UnsetType, _COUNT] = UNSET
    """How many answers passed only by this judge: the scorers before it had failed them."""
    calibrated: bool | UnsetType = UNSET
    """Whether every one of its scores is of a judge whose calibration was asked for and is good."""
    scored_without: Annotated[int | UnsetType, _COUNT] = UNSET
    passed_without: Annotated[int | UnsetType, _COUNT] = UNSET
    pass_rate_without: Annotated[float | UnsetType | None, _QUALITY] = UNSET
    """The run's pass rate without this judge; None where nothing else decides."""
    jury: JuryMetrics | UnsetType = UNSET
    calibration: JudgeCalibration | UnsetType = UNSET


class NodeMetrics(msgspec.Struct, kw_only=True):
    """What one node of a cluster served."""

    requests: Annotated[int, _COUNT]
    failed: Annotated[int, _FAULTS]
    p50: Annotated[float | None, _TIME] = msgspec.field(name="time_to_last_token-p50")
    p99: Annotated[float | None, _TIME] = msgspec.field(name="time_to_last_token-p99")


class PercentileMetrics(msgspec.Struct, kw_only=True):
    """A percentile of a time and how far it may be from the truth."""

    value: float | None
    """As in `stats`; the least it can be where it lies among timeouts."""
    at_least: bool = False
    """Whether it lies among timeouts, so that it is this or more."""
    ci95: tuple[float, float | None] | None = None
    """Its interval by order statistics: None where n is too small, the upper end None where it lies among timeouts."""
    needed: int = 0
    """How many requests it takes for an interval."""


class LatencyMetrics(msgspec.Struct, kw_only=True):
    """The percentiles of one time, over answers and timeouts."""

    n: Annotated[int, _COUNT]
    timeouts: Annotated[int, _COUNT] = 0
    """How many of them timed out: they would have taken longer."""
    p50: PercentileMetrics
    p90: PercentileMetrics
    p95: PercentileMetrics
    p99: PercentileMetrics
    effective_n: dict[str, float] | UnsetType = UNSET
    """Of a load run: as how many independent requests they count for each percentile, as neighbours are alike."""


class WorkerSends(msgspec.Struct, kw_only=True):
    """What one of several workers sent, as far as it reported."""

    sent: Annotated[int, _COUNT] = 0
    late: Annotated[int, _FAULTS] = 0
    worst_lateness: Annotated[float, Figure("seconds", "lower", "client")] = 0.0

    def note(self, lateness: float, late_after: float) -> None:
        """Count a send that was made that many seconds after its time."""
        self.sent += 1
        self.late += lateness > late_after
        self.worst_lateness = max(self.worst_lateness, lateness)

    def add(self, other: WorkerSends) -> None:
        """Add what another worker sent."""
        self.sent += other.sent
        self.late += other.late
        self.worst_lateness = max(self.worst_lateness, other.worst_lateness)


class SendCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the planned sends."""

    planned: Annotated[int, _COUNT]
    """Moments that came before the end."""
    sent: Annotated[int, _COUNT]
    late: Annotated[int, _FAULTS]
    """Of those sent: later than `late_after` seconds."""
    missed: Annotated[int, _FAULTS]
    """Planned and never sent."""
    late_after: Annotated[float, Figure("seconds", None, "client")]
    worst_lateness: Annotated[float, Figure("seconds", "lower", "client")]
    workers: dict[str, WorkerSends] | UnsetType = UNSET
    """Where several workers shared the arrivals: what each of them sent."""

    def really_sent(self, sent: int) -> SendCounts:
        """The counts for `sent` sends: a budget or a cancellation may stop a call at its planned time."""
        return msgspec.structs.replace(self, sent=sent, missed=self.planned - sent, late=min(self.late, sent))


class LoadMetrics(msgspec.Struct, kw_only=True):
    """How a load run was to send its requests, and what became of the plan."""

    requests: Annotated[int | None, _COUNT]
    duration: Annotated[float | None, Figure("seconds")]
    arrivals: str | None
    warmup: Annotated[int, _COUNT]
    sends: SendCounts | UnsetType = UNSET


class FlakyCase(msgspec.Struct, kw_only=True):
    """A case that passed in some of its trials and not in others."""

    id: str
    passed: int
    tried: int


class VarianceMetrics(msgspec.Struct, kw_only=True):
    """What of a score's variance is the agent's and what the judge's; None where it cannot be known."""

    judged: bool
    between_trials: Annotated[float | None, _VARIANCE]
    agent: Annotated[float | None, _VARIANCE]
    agent_floored: bool
    judge: Annotated[float | None, _VARIANCE]
    judge_in_mean: Annotated[float | None, _VARIANCE]
    agent_std_dev: Annotated[float | None, _VARIANCE]
    judge_std_dev: Annotated[float | None, _VARIANCE]
    agent_share: Annotated[float | None, _VARIANCE] = None
    """What the agent has of the variance of both together."""
    agent_share_ci95: Annotated[Interval | None, _VARIANCE] = None
    dominates: str | None
    """`agent`, `judge`, `neither` or `cannot tell`; None unless the variances of both are known."""
    says: str | None


class TrialScoreMetrics(msgspec.Struct, kw_only=True):
    """A score by case, over its trials."""

    cases: Annotated[int, _COUNT]
    mean: Annotated[float | None, _MEAN]
    mean_ci95: Annotated[Interval | None, _MEAN]
    pass_rate: Annotated[float | None, _QUALITY] = None
    pass_rate_ci95: Annotated[Interval | None, _QUALITY] = None
    shares: Annotated[dict[str, float | None] | UnsetType, _SHARE] = UNSET
    """Of a label: the mean over cases of the share of a case's trials that have it."""
    shares_ci95: Annotated[dict[str, Interval | None] | UnsetType, _SHARE] = UNSET
    spread: Annotated[float | None, Figure("ratio", "lower", "quality")]
    variance: VarianceMetrics


class TrialMetrics(msgspec.Struct, kw_only=True):
    """What repeating each case showed. A rate is the mean over cases of the share of a case's trials."""

    trials: Annotated[int, _COUNT]
    cases: Annotated[int, _COUNT]
    pass_rate: Annotated[float | None, _QUALITY]
    pass_rate_ci95: Annotated[Interval | None, _QUALITY]
    pass_rate_all: Annotated[float | None, _QUALITY] = None
    pass_rate_all_ci95: Annotated[Interval | None, _QUALITY] = None
    groups: Annotated[int | UnsetType, _COUNT] = UNSET
    """How many groups the cases belong to, where they are grouped."""
    spread: Annotated[float | None, _SPREAD]
    cases_for_k: Annotated[int, _COUNT]
    """Of how many cases pass@k and pass^k are, for every k: those with `verdicts_for_k` verdicts or more."""
    verdicts_for_k: Annotated[int, _COUNT]
    pass_at_k: Annotated[dict[str, float | None], _QUALITY]
    pass_at_k_ci95: Annotated[dict[str, Interval | None], _QUALITY] = {}
    pass_hat_k: Annotated[dict[str, float | None], _QUALITY]
    pass_hat_k_ci95: Annotated[dict[str, Interval | None], _QUALITY] = {}
    always: Annotated[int, _COUNT]
    never: Annotated[int, _COUNT]
    flaky: Annotated[int, _FAULTS]
    flaky_cases: list[FlakyCase]
    scores: dict[str, TrialScoreMetrics]


class JournalLines(msgspec.Struct, kw_only=True):
    """Which lines of `outputs.jsonl` belong to the run."""

    total: int
    left_out: str = ""
    """Those that do not, numbered from 1: `3-4,9`. Their cases were edited or removed since, or are not selected."""


class LimitMetrics(msgspec.Struct, kw_only=True):
    """Cases that reached a limit."""

    n: Annotated[int, _COUNT] = 0
    passed: Annotated[int, _COUNT] = 0
    """Those that passed all the same."""


class NotKept(msgspec.Struct, kw_only=True):
    """What was thrown away of agents' work because `max_disk` was used up."""

    cases: Annotated[int, _COUNT] = 0
    files: Annotated[int, _COUNT] = 0
    bytes: Annotated[int, _COUNT] = 0


class SliceMetrics(msgspec.Struct, kw_only=True):
    """The cases that share a value in their metadata: figures as those of the whole run, by the same procedures."""

    key: str
    value: str
    """As text; `(none)` for cases without the key, `(other)` for values beyond the first hundred."""
    n: Annotated[int, _COUNT]
    cases: Annotated[int, _COUNT]
    groups: Annotated[int | UnsetType, _COUNT] = UNSET
    small: bool = False
    """Whether so few cases, or groups, say little."""
    scored: Annotated[int, _COUNT] = 0
    passed: Annotated[int, _COUNT] = 0
    unscored: Annotated[int, _FAULTS] = 0
    scoring_errors: Annotated[int, _FAULTS] = 0
    errors: Annotated[int, _FAULTS] = 0
    pass_rate: Annotated[float | None, _PASS_RATE] = None
    pass_rate_ci95: Annotated[Interval | None, _QUALITY] = None
    pass_rate_all: Annotated[float | None, _QUALITY] = None
    pass_rate_all_ci95: Annotated[Interval | None, _QUALITY] = None
    error_rate: Annotated[float | None, _SPREAD] = None
    output_tokens: Annotated[float | None, Figure("tokens")] = None
    """The mean of an answer's."""
    cost: Annotated[float | None, _COST] = None
    """What its answers cost, without judges."""
    scores: dict[str, ScoreMetrics] = {}
    latency: dict[str, LatencyMetrics] = {}

    @property
    def name(self) -> str:
        """What rules write after a figure's name: `[category=safety]`."""
        return f"[{self.key}={self.value}]"

    def figures(self) -> dict[str, float | None]:
        """Its figures by the names that rules have for those of a run."""
        times = {
            f"{metric}-{name}": getattr(found, name).value
            for metric, found in self.latency.items()
            for name in ("p50", "p90", "p95", "p99")
        }
        return {**dict(values(self)), **times}


class RunMetric(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a function over all records gives: a figure, or why there is none."""

    value: float | None
    ci95: Interval | None = None
    unit: str | None = None
    better: Better | None = None
    n: int | None = None
    """Of how many records or cases it is."""
    error: str | None = None


class Metrics(msgspec.Struct, kw_only=True):
    """The figures of a run: what `metrics.json` holds, field by field.

    Fixed figures are fields; those whose names depend on the run (scorers, errors, nodes) are mappings. Fields that
    came later have a default, so that what an older version wrote can be read.
    """

    v: int = METRICS_VERSION
    complete: bool = False
    stopped: str | None = None
    suite: str
    target: dict[str, Any] = {}
    model_id: str | None = None
    seed: int = 0
    scored_from: str | UnsetType = UNSET
    n: Annotated[int, _COUNT]
    counts: Counts
    to_redo: Annotated[int, _FAULTS] = 0
    pass_rate: Annotated[float | None, _PASS_RATE] = None
    pass_rate_ci95: Annotated[Interval | None, _QUALITY] = None
    pass_rate_all: Annotated[float | None, Figure("share", "higher", "quality", "the pass rate, errors included,")] = (
        None
    )
    pass_rate_all_ci95: Annotated[Interval | None, _QUALITY] = None
    pass_rate_corrected: Annotated[float | None, Figure("share", "higher", "quality", "the corrected pass rate")] = None
    """With the errors of scorers and judges taken out by labels, where there are: from `correction.json`."""
    pass_rate_corrected_ci95: Annotated[Interval | None, _QUALITY] = None
    correction: Correction | UnsetType = UNSET
    groups: Annotated[int | UnsetType, _COUNT] = UNSET
    """How many groups the cases belong to, where they are grouped: intervals are then over groups."""
    error_rate: Annotated[float | None, Figure("share", "lower", "quality", "the error rate")] = None
    p50_latency_s: Annotated[float | None, _TIME] = None
    scored: Annotated[int, _COUNT] = 0
    passed: Annotated[int, _COUNT] = 0
    unscored: Annotated[int, _FAULTS] = 0
    scoring_errors: Annotated[int, _FAULTS]
    truncated: Annotated[int, _FAULTS] = 0
    """Answers that were cut off at the limit of tokens."""
    truncated_rate: Annotated[float | None, _SPREAD] = None
    """Their share of all answers."""
    stop_reasons: Annotated[dict[str, int], _COUNT] = {}
    """How many answers ended for each reason that a target gives, the most frequent first."""
    limits: dict[str, LimitMetrics] | UnsetType = UNSET
    """Cases that reached a limit of theirs, by its stop reason."""
    not_kept: NotKept | UnsetType = UNSET
    """What was thrown away of agents' work, if anything was."""
    cached: Annotated[int, _COUNT] = 0
    resent: Annotated[int, _COUNT] = 0
    """Requests sent again at once, as their kept-alive connection was closed before anyone read them."""
    retried: Annotated[int, _FAULTS] = 0
    """Answers that came only after a failed try."""
    retry_causes: Annotated[dict[str, int], _FAULTS] = {}
    """How many of these had a failed try of each kind, the most frequent first."""
    tokens_estimated: Annotated[int, _COUNT] = 0
    """Answers whose numbers of tokens, and what is computed from them, are estimates."""
    stalls: Annotated[int, Figure("count", "lower", "speed", "the number of stalls")] = 0
    """Gaps of half a second or longer between two tokens of a streamed answer."""
    reasoning_in_text: Annotated[int, _COUNT] = 0
    """Answers whose text began with a block of reasoning, which was taken out of it."""
    fields_left_out: list[str] = []
    """Fields of the model's own turns that the endpoint refused to take back."""
    left_out: Annotated[int, _COUNT] = 0
    lines: JournalLines | UnsetType = UNSET
    """Only of a run with a directory."""
    active_seconds: Annotated[float, Figure("seconds", None, "speed")] = 0.0
    cost: Annotated[float | None, _COST] = None
    cost_answers: Annotated[float | None, _COST] = None
    cost_errors: Annotated[float | None, _COST] = None
    cost_judges: Annotated[float | None, _COST] = None
    cost_per_1000_cases: Annotated[float | None, _COST] = None
    cost_per_passed_case: Annotated[float | None, _COST] = None
    cost_unknown: Annotated[int, _FAULTS] = 0
    cost_unknown_errors: Annotated[int, _FAULTS] = 0
    cost_unknown_judges: Annotated[int, _FAULTS] = 0
    cost_unknown_because: str | None = None
    cost_estimated: Annotated[int, _COUNT] = 0
    currency: str | None = None
    errors: Annotated[dict[str, int], _FAULTS]
    error_examples: dict[str, ErrorExample] = {}
    error_kinds: Annotated[dict[str, int] | UnsetType, _FAULTS] = UNSET
    error_kind_examples: dict[str, ErrorExample] | UnsetType = UNSET
    scores: dict[str, ScoreMetrics]
    stats: dict[str, int | float | None]
    """Latency, tokens and throughput, flat: `time_to_first_token-p99`; `figures.STATS` has their units."""
    latency: dict[str, LatencyMetrics] = {}
    """The percentiles of each time with their intervals, timeouts included."""
    nodes: dict[str, NodeMetrics] | UnsetType = UNSET
    parallelism: Annotated[int | Literal["auto"] | UnsetType, _COUNT] = UNSET
    peak_in_flight: Annotated[int | UnsetType, _COUNT] = UNSET
    parallelism_shortfall: str | UnsetType = UNSET
    """Why fewer calls were in flight than asked for, in words; only where work was left for more."""
    parallelism_history: list[tuple[float, int, str]] | UnsetType = UNSET
    client: ClientLoad | UnsetType = UNSET
    load: LoadMetrics | UnsetType = UNSET
    trials: TrialMetrics | UnsetType = UNSET
    decided: DecidedMetrics | UnsetType = UNSET
    run_metrics: dict[str, RunMetric] | UnsetType = UNSET
    """What the suite's `run_metrics` give, by name; rules call them `metric.NAME`."""
    slices: list[SliceMetrics] | UnsetType = UNSET
    """By each key that was asked for, in `by`: the figures of the cases that share a value."""

    @property
    def failure_rate(self) -> float | None:
        """The share of records without an answer, or whose scoring broke down."""
        return (self.counts.error + self.scoring_errors) / self.n if self.n else None


def percentile_of(metrics: Metrics, name: str) -> PercentileMetrics | None:
    """The percentile that a figure of `stats` is, such as `time_to_last_token-p99`; None for any other figure."""
    of_slice = slice_of(name)
    found = metrics.latency
    if of_slice is not None:
        name = of_slice[0]
        found = next((one.latency for one in metrics.slices or () if (one.key, one.value) == of_slice[1:]), {})
    metric, _, aggregate = name.rpartition("-")
    latency = found.get(metric)
    return None if latency is None else getattr(latency, aggregate, None) if aggregate[:1] == "p" else None


def correction_note(found: Correction) -> str:
    """What to know of a corrected rate, in words: its labels and what it assumes, or why there is none."""
    if found.why_not is not None:
        return found.why_not
    notes = [f"by {counted(found.labels, 'label')}" + (" of another run" if found.labels_of else "")]
    notes += ["assumes the same error rates"] if found.assumes_same_errors else []
    notes += ["trials and groups count as independent"] if found.clustered else []
    return ", ".join(notes)


def uncalibrated_judges(metrics: Metrics) -> list[str]:
    """The names of the judges that decide and are not calibrated; one without a verdict decided nothing."""
    judges = ((name, score) for name, score in metrics.scores.items() if score.by)
    return [name for name, score in judges if score.n and not score.advisory and not score.calibrated]


def not_calibrated(judges: Sequence[str]) -> str:
    """Say of these judges that they are not calibrated. One that is simply named `judge` is "the judge"."""
    if len(judges) > 1:
        return f"{len(judges)} judges ({', '.join(judges)}) are not calibrated"
    return "the judge is not calibrated" if judges[0] == "judge" else f"judge {judges[0]} is not calibrated"


def uncalibrated(metrics: Metrics) -> list[str]:
    """A sentence for each judge that decides and is not calibrated, with the pass rate without it."""
    return [f"{not_calibrated([name])}; {without_judge(metrics.scores[name])}" for name in uncalibrated_judges(metrics)]


def marked_pass_rate(metrics: Metrics) -> str:
    """The pass rate where there is no room for a sentence; marked where such a judge decided it."""
    if metrics.pass_rate is None:
        return "–"
    return f"{metrics.pass_rate:.1%}" + (" (judge not calibrated)" if uncalibrated_judges(metrics) else "")


def without_judge(score: ScoreMetrics) -> str:
    """What the pass rate is without a judge, in words."""
    if score.pass_rate_without is UNSET or score.pass_rate_without is None:
        return "without it nothing decides"
    return f"the pass rate without it is {score.pass_rate_without:.1%}"


def figures(metrics: Metrics) -> dict[str, float | None]:
    """Every figure of a run by the name that rules, objectives and reports call it; None for one that is not known."""
    sliced = {f"{name}{one.name}": value for one in metrics.slices or () for name, value in one.figures().items()}
    computed: dict[str, float | None] = {}
    for name, metric in (metrics.run_metrics or {}).items():
        low, high = metric.ci95 or (None, None)
        computed |= {f"metric.{name}": metric.value, f"metric.{name}.ci_low": low, f"metric.{name}.ci_high": high}
    return {**dict(values(metrics)), **metrics.stats, FAILURE_RATE: metrics.failure_rate, **computed, **sliced}


@functools.cache
def fixed_figures() -> dict[str, Figure]:
    """The figures that can be named before there is a run: those whose names do not depend on it."""
    named = {name: figure for name, figure in patterns(Metrics) if "*" not in name}
    return {**named, **STATS, FAILURE_RATE: Figure("share", "lower", "quality")}


@functools.cache
def _open_figures() -> list[tuple[re.Pattern[str], Figure]]:
    return [(as_expression(name), figure) for name, figure in patterns(Metrics) if "*" in name]


@functools.cache
def _slice_figures() -> dict[str, Figure]:
    """The figures that a slice has and a run has not, or calls otherwise."""
    return {name: figure for name, figure in patterns(SliceMetrics) if "*" not in name}


_SLICE = re.compile(r"(?P<name>.+?)\[(?P<key>[^\[\]=]+)=(?P<value>.*)\]", re.DOTALL)


def slice_of(name: str) -> tuple[str, str, str] | None:
    """The figure, the key and the value that `pass_rate[category=safety]` names; None where it names no slice."""
    found = _SLICE.fullmatch(name)
    return None if found is None else (found["name"], found["key"].strip(), found["value"].strip())


@functools.cache
def figure_of(name: str) -> Figure | None:
    """What is known of a figure by its name alone; None for a name that no run's figure has."""
    if (of_slice := slice_of(name)) is not None:
        return _slice_figures().get(of_slice[0]) or figure_of(of_slice[0])
    found = _MEAN if name.startswith("metric.") else fixed_figures().get(name)
    if found is not None:
        return found
    return next((figure for expression, figure in _open_figures() if expression.fullmatch(name)), None)
