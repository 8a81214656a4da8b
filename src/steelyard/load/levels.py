"""Levels of a sweep: their figures, the parallelisms to measure, and the objectives (SLOs) they are checked against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import UNSET

from steelyard.engine.arrivals import Arrivals, parse_arrivals
from steelyard.errors import ConfigurationError
from steelyard.load.search_rule import Flags, SloVerdict, Throughput, decide_slo, steady_throughput
from steelyard.load.timings import TIMES, Timings, latency_of
from steelyard.stats.client_load import ClientLoad
from steelyard.stats.errors import ErrorRow, error_rows, ranked
from steelyard.stats.figures import SECONDS, STATS, Figure, nearest_figure
from steelyard.stats.formatting import counted, format_number, format_seconds
from steelyard.stats.intervals import Interval, clopper_pearson, effective_n_of
from steelyard.stats.metrics import LatencyMetrics, Metrics, figures, fixed_figures
from steelyard.stats.rules import COMPARISONS, Rule, read_rule, unit_problem

PERCENTILES = ("p50", "p90", "p99")
"""The percentiles of a time that a sweep shows."""
KEEPS_UP = 0.9
"""Open loop: where answers are shown to come at less than this share of the rate, the endpoint falls behind."""
MAX_MISSED = 0.01
"""Open loop: the share of planned calls that may not have been sent."""
Unit = Literal["seconds", "share", "number"]
_VERDICTS = ("pass_rate", "pass_rate_ci95", "pass_rate_all")


class CheckedObjective(msgspec.Struct, frozen=True, kw_only=True):
    """What a level showed of one objective."""

    text: str
    """The objective as it was written."""
    outcome: Literal["kept", "broken", "cannot tell"]
    says: str
    """The figure and the limit in words, and how many more requests would tell."""
    above: int | None = None
    """Of a percentile of a time: how many requests took longer than the objective allows, timeouts included."""
    n: int | None = None
    share_ci: Interval | None = None
    """Of the share above it, as sure as this look may be."""
    more_requests: int | None = None
    """About how many more requests would settle it."""


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one load: a row of the table, a point of the plot, an entry of sweep.json."""

    level: int | float
    """Calls in flight; of a sweep over arrival rates, requests per second."""
    run: str
    """Its run directory, relative to the sweep's."""
    runs: list[str] = []
    """All of its run directories, one for each block of requests."""
    requests: int
    active_seconds: float
    requests_per_second: float
    """Answers without errors in the steady state; over the whole time where that was too short to tell."""
    requests_per_second_ci95: Interval | None = None
    goodput: float | None = None
    """Of these, the answers that keep every objective on a time; None without such an objective."""
    goodput_ci95: Interval | None = None
    error_rate: float | None
    pass_rate: float | None
    pass_rate_ci95: tuple[float, float] | None
    output_tps: float | None
    """Output tokens a second, over the same time as the answers."""
    time_to_first_token: dict[str, float | None]
    time_to_last_token: dict[str, float | None]
    latency: dict[str, LatencyMetrics] = {}
    """The percentiles with their intervals, as in the metrics of a run, over all blocks."""
    peak_in_flight: int
    client: ClientLoad
    invalid: str | None = None
    """Why this client was the bottleneck; None when it was not."""
    objectives: list[CheckedObjective] = []
    broken: list[str] = []
    """The objectives that were not met, in words."""
    undecided: list[str] = []
    """The objectives of which it cannot be told whether they are met, in words."""
    error_kinds: dict[str, int] = {}
    """The number of errors of each kind, the most frequent first."""
    worst_error: str | None = None
    """The message of one error of the most frequent kind; None when there were none."""
    resent: int = 0
    """Requests sent again at once, as their kept-alive connection was closed before anyone read them."""
    judged: bool = False
    """Whether the pass rate comes from judges that were asked afterwards, in `<run>/judged`."""
    reached: bool = True
    """Whether the load was really there: as many calls in flight, or as many sent."""

    @property
    def usable(self) -> bool:
        """Whether its figures are those of the endpoint under this load."""
        return self.invalid is None and self.reached

    @property
    def few(self) -> bool:
        """Whether it sent too few requests for a steady state."""
        return self.requests_per_second_ci95 is None

    @property
    def more_requests(self) -> int | None:
        """About how many more requests would settle its objectives; None where they are settled, or none would."""
        return max((one.more_requests for one in self.objectives if one.more_requests is not None), default=None)

    def to_metrics(self) -> dict[str, Any]:
        """Return the level as an entry of sweep.json."""
        return {**msgspec.to_builtins(self), "few": self.few}


class Block(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One load run of a level: its metrics, what judges said of its answers, and when its requests came back."""

    run: str
    metrics: Metrics
    judged: Metrics | None
    timings: Timings

    @property
    def quality(self) -> Metrics:
        """The metrics that have the verdicts."""
        return self.metrics if self.judged is None else self.judged


def make_level(
    level: int | float,
    blocks: Sequence[Block],
    objectives: Sequence[Objective],
    *,
    looks: int = 1,
    open_loop: bool = False,
) -> Level:
    """Make a level from its blocks; of up to `looks` of them each looks at the objectives."""
    metrics = merged(blocks)
    timings = [block.timings for block in blocks]
    latency = {name: found for name in TIMES if (found := latency_of(timings, name)) is not None}
    throughput, goodput, tokens = _throughput(level, timings, objectives, open_loop=open_loop)
    checked = [_check(objective, metrics, timings, looks) for objective in objectives]
    if open_loop and throughput is not None and throughput.ci95[1] < KEEPS_UP * (sent := _sent_rate(timings)):
        checked.append(_falls_behind(level, sent, throughput))
    client = max((client_of(block.metrics) for block in blocks), key=lambda one: (one.bottleneck, one.loop_cpu_share))
    errors = error_rows(metrics)
    peak = max(block.metrics.peak_in_flight or 0 for block in blocks)
    return Level(
        level=level,
        run=blocks[0].run,
        runs=[block.run for block in blocks],
        requests=metrics.n,
        active_seconds=metrics.active_seconds,
        requests_per_second=(metrics.stats["requests_per_minute"] or 0.0) / 60
        if throughput is None
        else throughput.rate,
        requests_per_second_ci95=None if throughput is None else throughput.ci95,
        goodput=None if goodput is None else goodput.rate,
        goodput_ci95=None if goodput is None else goodput.ci95,
        error_rate=metrics.error_rate,
        pass_rate=metrics.pass_rate,
        pass_rate_ci95=metrics.pass_rate_ci95,
        output_tps=metrics.stats["output_tps"] if tokens is None else tokens.rate,
        time_to_first_token=_percentiles(latency.get("time_to_first_token")),
        time_to_last_token=_percentiles(latency.get("time_to_last_token")),
        latency=latency,
        peak_in_flight=peak,
        client=client,
        invalid=(client.reason or "it had no time to spare") if client.bottleneck else None,
        objectives=checked,
        broken=[one.says for one in checked if one.outcome == "broken"],
        undecided=[one.says for one in checked if one.outcome == "cannot tell"],
        error_kinds={row.kind: row.number for row in errors},
        worst_error=_worst_error(errors),
        resent=metrics.resent,
        judged=any(block.judged is not None for block in blocks),
        reached=_sent(blocks) if open_loop else peak >= level,
    )


def merged(blocks: Sequence[Block]) -> Metrics:
    """The metrics of all blocks of a level together, with the verdicts of judges that were asked afterwards."""
    every = [block.metrics for block in blocks]
    first, n, seconds = every[0], sum(one.n for one in every), math.fsum(one.active_seconds for one in every)
    scored, passed = (sum(getattr(block.quality, name) for block in blocks) for name in ("scored", "passed"))
    verdicts: dict[str, Any] = {name: getattr(blocks[0].quality, name) for name in _VERDICTS}
    if len(blocks) > 1:
        ok = sum(block.quality.counts.ok for block in blocks) or None
        verdicts = {
            "pass_rate": passed / scored if scored else None,
            "pass_rate_ci95": clopper_pearson(passed, scored) if scored else None,
            "pass_rate_all": passed / n if ok and scored else None,
        }
    answers = math.fsum((one.stats["requests_per_minute"] or 0.0) * one.active_seconds for one in every)
    tokens = math.fsum((one.stats["output_tps"] or 0.0) * one.active_seconds for one in every)
    known = any(one.stats["output_tps"] is not None for one in every)
    stats = {
        **_mean_stats(every),
        "requests_per_minute": answers / seconds if seconds else None,
        "output_tps": tokens / seconds if seconds and known else None,
    }
    return msgspec.structs.replace(
        first,
        n=n,
        active_seconds=seconds,
        error_rate=math.fsum((one.error_rate or 0.0) * one.n for one in every) / n if n else None,
        resent=sum(one.resent for one in every),
        stalls=sum(one.stalls for one in every),
        errors=ranked(pair for one in every for pair in one.errors.items()),
        error_kinds=ranked(pair for one in every for pair in (one.error_kinds or one.errors).items()),
        error_examples={k: v for one in reversed(every) for k, v in one.error_examples.items()},
        error_kind_examples={k: v for one in reversed(every) for k, v in (one.error_kind_examples or {}).items()},
        stats=first.stats if len(blocks) == 1 else stats,
        **verdicts,
    )


def _mean_stats(every: Sequence[Metrics]) -> dict[str, float | int | None]:
    """Averages, least and greatest over all blocks; the other figures of `stats` are weighted by their requests."""
    found: dict[str, float | int | None] = {}
    for name in every[0].stats:
        pairs = [(value, one.n) for one in every if (value := one.stats.get(name)) is not None]
        values = [value for value, _ in pairs]
        weight = sum(n for _, n in pairs)
        if not values or not weight:
            found[name] = None
        elif name.endswith(("-min", "-max")):
            found[name] = min(values) if name.endswith("-min") else max(values)
        else:
            found[name] = math.fsum(value * n for value, n in pairs) / weight
    return found


def _throughput(
    level: int | float, timings: Sequence[Timings], objectives: Sequence[Objective], *, open_loop: bool
) -> tuple[Throughput | None, Throughput | None, Throughput | None]:
    """Answers a second in the steady state, those of them that keep every objective on a time, and output tokens."""
    ramp = min(len(block) for block in timings) // 20 if open_loop else int(level)
    blocks = [(block.sent, block.ended) for block in timings]
    steady = partial(steady_throughput, blocks, ramp=ramp, open_loop=open_loop)
    throughput = steady(counts=[block.ok for block in timings])
    if throughput is None:
        return None, None, None
    if not open_loop and not throughput.answers and any(block.ok.any() for block in timings):
        return None, None, None  # all answers came while the level filled up, or emptied
    goodput = tokens = None
    if timed := [one for one in objectives if one.metric is not None]:
        good = [block.ok & ~np.any([one.misses(block) for one in timed], axis=0) for block in timings]
        goodput = steady(counts=good)
    if not all(np.isnan(block.tokens).all() for block in timings):
        tokens = steady(counts=[np.nan_to_num(block.tokens) for block in timings])
    return throughput, goodput, tokens


def _check(objective: Objective, metrics: Metrics, timings: Sequence[Timings], looks: int) -> CheckedObjective:
    """Whether a level keeps an objective: by the share of requests above a percentile's limit, else by its value."""
    value = figures(metrics).get(objective.figure)
    if objective.percent is None or objective.comparison not in ("<", "<="):
        outcome: Literal["kept", "broken"] = "kept" if objective.holds(value) else "broken"
        return CheckedObjective(text=objective.text, outcome=outcome, says=objective.describe(value))
    seen = [objective.seen(block) for block in timings]
    above = np.concatenate([objective.misses(block)[kept] for block, kept in zip(timings, seen, strict=True)])
    if not len(above):
        return CheckedObjective(text=objective.text, outcome="broken", says=objective.describe(None))
    found = decide_slo(int(above.sum()), len(above), objective.percent, looks=looks, effective_n=effective_n_of(above))
    return CheckedObjective(
        text=objective.text,
        outcome=found.outcome,
        says=objective.describe_share(found),
        above=found.above,
        n=found.n,
        share_ci=found.interval,
        more_requests=found.more_requests,
    )


def _sent_rate(timings: Sequence[Timings]) -> float:
    """Open loop: how many calls a second were really sent, over the middle of each block."""
    spans = [np.quantile(block.sent, (0.05, 0.95)) for block in timings]
    seconds = math.fsum(float(last - first) for first, last in spans)
    return 0.9 * sum(map(len, timings)) / seconds if seconds > 0 else 0.0


def _falls_behind(level: int | float, sent: float, throughput: Throughput) -> CheckedObjective:
    low, high = (format_number(end) for end in throughput.ci95)
    says = (
        f"answers come at {format_number(throughput.rate)}/s (95 % CI {low} – {high}) where {format_number(sent)}/s "
        "are sent: the endpoint falls behind"
    )
    return CheckedObjective(text=f"answers/s keep up with {level:g}/s", outcome="broken", says=says)


def _sent(blocks: Sequence[Block]) -> bool:
    """Open loop: whether nearly all planned calls were sent."""
    sends = [block.metrics.load.sends for block in blocks if block.metrics.load and block.metrics.load.sends]
    planned, missed = sum(one.planned for one in sends), sum(one.missed for one in sends)
    return missed <= planned * MAX_MISSED


def client_of(metrics: Metrics) -> ClientLoad:
    """Return how busy the client of a load run was; every load run says so."""
    if metrics.client is UNSET:
        raise ConfigurationError("the metrics of a level do not say how busy the client was: measure it again")
    return metrics.client


def _worst_error(errors: Sequence[ErrorRow]) -> str | None:
    """Return the message of one error of the most frequent kind."""
    if not errors:
        return None
    kind, _, example = errors[0]
    return kind if example is None else example.error or kind


def _percentiles(latency: LatencyMetrics | None) -> dict[str, float | None]:
    return {name: None if latency is None else getattr(latency, name).value for name in PERCENTILES}


def parse_levels(levels: str | Sequence[int]) -> list[int] | Literal["auto"]:
    """Parse the parallelisms to measure, ascending, each once; or "auto"."""
    if isinstance(levels, str):
        if levels.strip() == "auto":
            return "auto"
        levels = [_number(part) for part in levels.split(",") if part.strip()]
    parallelisms = sorted(set(levels))
    if not parallelisms:
        raise ConfigurationError("levels: name at least one parallelism, like 1,10,50, or auto")
    for level in parallelisms:
        if not isinstance(level, int) or isinstance(level, bool) or level < 1:
            raise ConfigurationError(f"levels must be whole numbers >= 1, got {level!r}")
    return parallelisms


def _number(part: str) -> int:
    try:
        return int(part)
    except ValueError:
        raise ConfigurationError(f"levels must be whole numbers like 1,10,50, or auto, got {part.strip()!r}") from None


def parse_rates(text: str) -> list[Arrivals]:
    """Parse the arrival rates to measure, `poisson:5/s,10/s,20/s`, lowest first, each once."""
    kind, colon, rates = text.partition(":")
    if not colon:
        raise ConfigurationError(f"arrivals must be like poisson:5/s,10/s,20/s, got {text!r}")
    parts = [part.strip() for part in rates.split(",") if part.strip()]
    if not parts:
        raise ConfigurationError(f"arrivals: name at least one rate, like {kind}:5/s,10/s, got {text!r}")
    found = {one.rate.per_second: one for one in (parse_arrivals(f"{kind}:{part}") for part in parts)}
    return [found[rate] for rate in sorted(found)]


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """An objective: a figure of a run, a comparison and a limit."""

    text: str
    """As it was written."""
    figure: str
    """Its name in the metrics: `error_rate`, `time_to_first_token-p99`."""
    name: str
    """Its name in a sentence."""
    comparison: str
    limit: float
    unit: Unit

    @property
    def metric(self) -> str | None:
        """The time that it limits from above; None for any other objective."""
        metric, _, aggregate = self.figure.partition("-")
        return metric if aggregate and metric in TIMES and self.comparison in ("<", "<=") else None

    @property
    def percent(self) -> float | None:
        """The percentile of a time that it is about; None for any other objective."""
        aggregate = self.figure.partition("-")[2]
        return float(aggregate[1:]) if self.metric is not None and aggregate[:1] == "p" else None

    def seen(self, block: Timings) -> Flags:
        """Which requests of a block say something of it: those that have the time, and timeouts."""
        return block.timed_out | (block.ok & ~np.isnan(block.times[self.metric or ""]))

    def misses(self, block: Timings) -> Flags:
        """Which requests took longer than it allows; timeouts did, unless the time came before."""
        times = block.times[self.metric or ""]
        with np.errstate(invalid="ignore"):
            longer: Flags = times >= self.limit if self.comparison == "<" else times > self.limit
        return longer | (block.timed_out if self.metric != "time_to_first_token" else block.timed_out & longer)

    def holds(self, value: float | None) -> bool:
        """Whether a value meets the objective; None, not measured, never does."""
        return value is not None and COMPARISONS[self.comparison](value, self.limit)

    def describe(self, value: float | None) -> str:
        """Describe a value and the limit: `the error rate is 12% (limit 1%)`."""
        found = "was not measured" if value is None else f"is {_format(value, self.unit)}"
        return f"{self.name} {found} (limit {_format(self.limit, self.unit)})"

    def describe_share(self, found: SloVerdict) -> str:
        """Describe how many requests were above the limit, and what that tells."""
        low, high = found.interval
        allowed = 1 - (self.percent or 0.0) / 100
        share = f"{found.above:,} of {found.n:,} requests took longer than {_format(self.limit, self.unit)}"
        if found.outcome == "kept":
            return f"{self.name} is kept: {share}, so at most {percent(high)} do (allowed {percent(allowed)})"
        if found.outcome == "broken":
            return f"{self.name} is broken: {share}, so at least {percent(low)} do (allowed {percent(allowed)})"
        more = (
            "no number of requests would tell"
            if found.more_requests is None
            else f"{counted(found.more_requests, 'more request')} would tell"
        )
        return (
            f"{self.name}: cannot tell: {share}, {percent(low)} – {percent(high)} (allowed {percent(allowed)}): {more}"
        )


Objectives: TypeAlias = tuple[Objective, ...]


def parse_slo(text: str) -> Objectives:
    """Parse objectives separated by commas; an unknown figure is refused, with the nearest name."""
    return tuple(_parse_one(part) for part in text.split(",") if part.strip())


def _parse_one(part: str) -> Objective:
    text = part.strip()
    rule = read_rule(text.lower())
    if rule is None or rule.operator in ("==", "!=") or rule.limit < 0:
        raise ConfigurationError(f"slo: cannot read {text!r}; write it like ttft_p99<500ms or error_rate<1%")
    known = _figures_for_objectives()
    if rule.name not in known:
        match = nearest_figure(rule.name, [name for name in known if name not in STATS or "-" not in name])
        remedy = f"known here: {_KNOWN}" if match is None else f"did you mean {match!r}?"
        raise ConfigurationError(f"slo: no figure is named {rule.name!r}; {remedy}")
    figure = known[rule.name]
    _check_unit(text, rule, figure)
    return Objective(
        text=text,
        figure=rule.name,
        name=figure.label or rule.name.replace("_", " ").replace("-", " "),
        comparison=rule.operator,
        limit=rule.limit,
        unit=figure.unit if figure.unit in ("seconds", "share") else "number",
    )


_KNOWN = (
    "error_rate, pass_rate, pass_rate_all, output_tps, requests_per_minute, stalls, itl_p50, itl_p99, itl_max, and "
    "ttft, ttlt, latency or tpot with _p50, _p90, _p95, _p99, _average, _min or _max"
)
"""The figures that load.md lists; others of a run can be named too."""


def _figures_for_objectives() -> dict[str, Figure]:
    """Return the figures of quality and speed of which it is known which direction is better."""
    found = fixed_figures().items()
    return dict(
        sorted((name, figure) for name, figure in found if figure.better and figure.kind in ("quality", "speed"))
    )


def _check_unit(text: str, rule: Rule, figure: Figure) -> None:
    """Refuse a unit that does not fit. A time must have one: 500 may be meant in ms or in s."""
    units = {"seconds": tuple(SECONDS), "share": ("%", "")}.get(figure.unit, ("",))
    if rule.unit not in units:
        if units == ("",):
            raise ConfigurationError(f"slo: {text!r} takes a number without a unit, got {rule.unit!r}")
        wrong = f"got {rule.unit!r}" if rule.unit else "got none"
        raise ConfigurationError(f"slo: {text!r} needs a unit ({', '.join(filter(None, units))}), {wrong}")
    if (problem := unit_problem(rule)) is not None:
        raise ConfigurationError(f"slo: {text!r}: {problem}")


def _format(value: float, unit: Unit) -> str:
    if unit == "seconds":
        return format_seconds(value)
    return percent(value) if unit == "share" else format_number(value)


def percent(share: float) -> str:
    """Format a share with at most three digits: 12%, 1.04%, 0.04%."""
    return f"{share * 100:.3g}%"
