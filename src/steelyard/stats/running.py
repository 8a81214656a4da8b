"""RunningStats: counts, tokens and latency percentiles of a run as responses arrive, also by node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from steelyard.stats.errors import TIMEOUTS, error_name
from steelyard.stats.figures import DETAILS, METRICS, ProgressSpec, ProgressStat, parse_progress_bar_stats
from steelyard.stats.intervals import Percentile, effective_n, percentiles
from steelyard.stats.metrics import LatencyMetrics, NodeMetrics, PercentileMetrics
from steelyard.stats.sketch import LIMIT, Blocks, PercentileSketch

_FOLD_EVERY = 1024
_PERCENTILES = (50, 90, 95, 99)

_read_metrics = attrgetter(*METRICS)
_read_details = attrgetter(*DETAILS)
_COUNTS = ("resent", "stalls", "reasoning_in_text", "tokens_estimated", "retries")
_read_rare = attrgetter(*_COUNTS, "fields_left_out", *(name for name in DETAILS if name != "time_queued"))
_NOTHING_RARE = (*(0 for _ in _COUNTS), None, *(None for _ in DETAILS[1:]))
"""What it reads of most whole answers of an endpoint."""


_TRUNCATIONS = frozenset(
    {
        "length", "max_tokens", "max_output_tokens", "max_completion_tokens", "model_length",
        "model_context_window_exceeded", "context_length_exceeded",
    }
)  # fmt: skip


def is_truncation(reason: str) -> bool:
    """Whether a stop reason says that the answer was cut off at a limit of tokens, as any of the APIs spells it."""
    return reason.strip().lower().replace("-", "_") in _TRUNCATIONS


class Detailed(Protocol):
    """Times of a response or record that only some targets and ways of sending have."""

    @property
    def time_queued(self) -> float | None: ...
    @property
    def time_waiting(self) -> float | None: ...
    @property
    def time_in_backoff(self) -> float | None: ...
    @property
    def time_in_failed_tries(self) -> float | None: ...
    @property
    def time_from_planned(self) -> float | None: ...
    @property
    def retries(self) -> int: ...
    @property
    def tokens_estimated(self) -> bool: ...
    @property
    def resent(self) -> int: ...
    @property
    def stalls(self) -> int: ...
    @property
    def reasoning_in_text(self) -> bool: ...
    @property
    def fields_left_out(self) -> list[str] | None: ...


class Details:
    """The values of each detail that occurred; one that never did costs nothing and is not reported."""

    def __init__(self) -> None:
        self._values: dict[str, Blocks] = {}
        self.resent = 0
        self.stalls = 0
        self.reasoning_in_text = 0
        self.fields_left_out: set[str] = set()
        self.retried = 0
        self.retry_causes: Counter[str] = Counter()
        self.tokens_estimated = 0

    @staticmethod
    def has_details(response: Detailed) -> bool:
        """Whether a response has any of these times: it was queued, rate limited, retried, or planned."""
        return not (
            response.time_queued is None
            and response.time_waiting is None
            and response.time_in_backoff is None
            and response.time_from_planned is None
        )

    def update(self, response: Detailed) -> None:
        """Add the response's details."""
        queued = response.time_queued
        if queued is not None and -LIMIT < queued < LIMIT and _read_rare(response) == _NOTHING_RARE:
            self._column("time_queued").append(queued)
            return
        self.resent += response.resent
        self.stalls += response.stalls
        self.reasoning_in_text += response.reasoning_in_text
        self.tokens_estimated += response.tokens_estimated
        if response.retries:
            self.retried += 1
            # A response has no causes, only its record.
            self.retry_causes.update({error_name(one).kind for one in getattr(response, "retry_errors", ())})
        if response.fields_left_out is not None:
            self.fields_left_out.update(response.fields_left_out)
        for name, value in zip(DETAILS, _read_details(response), strict=True):
            if value is not None and -LIMIT < value < LIMIT:
                self._column(name).append(value)

    def _column(self, name: str) -> Blocks:
        if name not in self._values:
            self._values[name] = Blocks()
        return self._values[name]

    def seal(self) -> None:
        """Put recent values away; to be called every thousand or so."""
        for values in self._values.values():
            values.seal()

    def update_all(self, responses: Iterable[Detailed]) -> None:
        """Add the details of many responses."""
        for response in responses:
            if self.has_details(response):
                self.update(response)

    def merge(self, other: Details) -> None:
        """Add another's values."""
        self.resent += other.resent
        self.stalls += other.stalls
        self.reasoning_in_text += other.reasoning_in_text
        self.fields_left_out |= other.fields_left_out
        self.retried += other.retried
        self.retry_causes += other.retry_causes
        self.tokens_estimated += other.tokens_estimated
        for name, values in other._values.items():
            self._values.setdefault(name, Blocks()).extend(values.joined())

    def columns(self) -> dict[str, Blocks]:
        """Return the values of each detail, in the order of reports."""
        return {name: self._values[name] for name in DETAILS if name in self._values}


class Served(Protocol):
    """What NodeStats reads of a response that a node served."""

    @property
    def node(self) -> str | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def cached(self) -> bool: ...
    @property
    def time_to_last_token(self) -> float | None: ...


class NodeFigures:
    """The figures of one node."""

    def __init__(self) -> None:
        self.requests = 0
        self.failed = 0
        self.latencies = Blocks()


class NodeStats:
    """Requests, failures and latencies by node; 8 bytes a response, exact, in any order."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeFigures] = {}

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def update(self, response: Served) -> None:
        """Add a response, if a node served it."""
        if response.node is None:
            return
        figures = self._nodes.get(response.node)
        if figures is None:
            figures = self._nodes[response.node] = NodeFigures()
        figures.requests += 1
        latency = response.time_to_last_token
        if response.error is not None:
            figures.failed += 1
        elif latency is not None and not response.cached and -LIMIT < latency < LIMIT:
            figures.latencies.append(latency)

    def merge(self, other: NodeStats) -> None:
        """Add another's figures."""
        for node, theirs in other._nodes.items():
            ours = self._nodes.setdefault(node, NodeFigures())
            ours.requests += theirs.requests
            ours.failed += theirs.failed
            ours.latencies.extend(theirs.latencies.joined())

    def seal(self) -> None:
        """Put recent values away; to be called every thousand responses or so."""
        for figures in self._nodes.values():
            figures.latencies.seal()

    def to_metrics(self) -> dict[str, NodeMetrics]:
        """What each node served, as metrics.json has it."""
        return {node: _described(figures) for node, figures in sorted(self._nodes.items())}


def _described(figures: NodeFigures) -> NodeMetrics:
    latencies = figures.latencies.joined()
    p50, p99 = np.percentile(latencies, (50, 99)).tolist() if len(latencies) else (None, None)
    return NodeMetrics(requests=figures.requests, failed=figures.failed, p50=p50, p99=p99)


class Measured(Detailed, Served, Protocol):
    """What RunningStats reads of a response or a record."""

    @property
    def error(self) -> str | None: ...
    @property
    def cached(self) -> bool: ...
    @property
    def stop_reason(self) -> str | None: ...
    @property
    def time_to_first_token(self) -> float | None: ...
    @property
    def time_to_last_token(self) -> float | None: ...
    @property
    def time_per_output_token(self) -> float | None: ...
    @property
    def num_tokens_input(self) -> int | None: ...
    @property
    def num_tokens_output(self) -> int | None: ...
    @property
    def error_type(self) -> str | None: ...


class Timeouts:
    """When each call that timed out was given up, and how many answers had come before: 16 bytes each.

    Such a call is an observation all the same: its answer would have taken longer than that.
    """

    def __init__(self) -> None:
        self.seconds, self.after = Blocks(), Blocks()

    def __len__(self) -> int:
        return len(self.seconds)

    def append(self, seconds: float, after: int) -> None:
        """Add one that was given up after some seconds, when some answers had come."""
        self.seconds.append(seconds)
        self.after.append(after)

    def seal(self) -> None:
        """Put recent values away; to be called every thousand or so."""
        self.seconds.seal()
        self.after.seal()

    def merge(self, other: Timeouts, answers: int) -> None:
        """Add another's, which came after some of our answers."""
        self.seconds.extend(other.seconds.joined())
        self.after.extend(other.after.joined() + answers)

    def among(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """These values in the order in which they came, with an infinite one for each timeout."""
        places = np.minimum(self.after.joined(), len(values)).astype(np.int64)
        return np.insert(values, places, math.inf)


class RunningStats:
    """Counts, totals, averages and percentiles of the responses seen so far.

    Every value is kept, 8 bytes each, so that the final figures are exact and do not depend on the order of
    arrival. Live figures come from a sketch of fixed size: their cost does not grow with the responses.
    `active_seconds` is how long the run was active; the run keeps it current.
    """

    def __init__(self) -> None:
        self.total_requests = 0
        self.failed_requests = 0
        self.cached_requests = 0
        self.active_seconds = 0.0
        self.stop_reasons: Counter[str] = Counter()
        self.nodes = NodeStats()
        self._values: dict[str, Blocks] = {metric: Blocks() for metric in METRICS}
        self._details = Details()
        self._timeouts: dict[str, Timeouts] = {}
        """By the time that they would have been longer in; none while nothing has timed out."""
        self._prepare()

    def _prepare(self) -> None:
        """Set up what is derived from the values; it is rebuilt after unpickling."""
        self._appends = tuple(values.append for values in self._values.values())
        self._sketches = {metric: PercentileSketch() for metric in METRICS}
        for metric, values in self._values.items():
            self._sketches[metric].add(values.joined())

    @property
    def truncated_requests(self) -> int:
        """Answers that were cut off at the limit of tokens."""
        return sum(number for reason, number in self.stop_reasons.items() if is_truncation(reason))

    @property
    def resent_requests(self) -> int:
        """Requests that were sent again because their kept-alive connection was closed before anyone read them."""
        return self._details.resent

    @property
    def retried_requests(self) -> int:
        """Answers that came only after a failed try."""
        return self._details.retried

    @property
    def retry_causes(self) -> Counter[str]:
        """How many of these had a failed try of each kind."""
        return self._details.retry_causes

    @property
    def estimated_requests(self) -> int:
        """Answers whose numbers of tokens are estimates."""
        return self._details.tokens_estimated

    @property
    def stalls(self) -> int:
        """Gaps of half a second or longer between two tokens of a streamed answer."""
        return self._details.stalls

    @property
    def reasoning_in_text(self) -> int:
        """Answers whose text began with a block of reasoning."""
        return self._details.reasoning_in_text

    @property
    def fields_left_out(self) -> list[str]:
        """Fields of the model's own turns that the endpoint refused to take back."""
        return sorted(self._details.fields_left_out)

    def update(self, response: Measured) -> None:
        """Add a response: its figures when it succeeded, only its failure when it did not."""
        self.total_requests += 1
        if not self.total_requests % _FOLD_EVERY:
            self._fold()
        if response.node is not None:
            self.nodes.update(response)
        if response.error is not None:
            self.failed_requests += 1
            if response.error_type in TIMEOUTS:
                self._add_timeout(response)
            return
        if response.stop_reason is not None:
            self.stop_reasons[response.stop_reason] += 1
        if response.cached:
            self.cached_requests += 1
            return
        first, last, per_token, tokens_in, tokens_out = _read_metrics(response)
        append_first, append_last, append_per_token, append_in, append_out = self._appends
        # Written out, as this runs for every response. NaN and infinity fail the comparison too.
        if first is not None and -LIMIT < first < LIMIT:
            append_first(first)
        if last is not None and -LIMIT < last < LIMIT:
            append_last(last)
        if per_token is not None and -LIMIT < per_token < LIMIT:
            append_per_token(per_token)
        if tokens_in is not None and -LIMIT < tokens_in < LIMIT:
            append_in(tokens_in)
        if tokens_out is not None and -LIMIT < tokens_out < LIMIT:
            append_out(tokens_out)
        if (
            response.time_queued is not None
            or response.time_from_planned is not None
            or response.time_waiting is not None
            or response.time_in_backoff is not None
        ):
            self._details.update(response)

    def update_all(self, responses: Sequence[Measured]) -> None:
        """Add many responses, which is faster than one by one."""
        before = self.total_requests
        self.total_requests += len(responses)
        answered = [response for response in responses if response.error is None]
        measured = [response for response in answered if not response.cached]
        self.failed_requests += len(responses) - len(answered)
        self.stop_reasons.update(filter(None, map(attrgetter("stop_reason"), answered)))
        self.cached_requests += len(answered) - len(measured)
        for metric, values in self._values.items():
            read = attrgetter(metric)
            values.append_all([v for v in map(read, measured) if v is not None and -LIMIT < v < LIMIT])
        self._details.update_all(measured)
        for response in responses:
            self.nodes.update(response)
            if response.error is not None and response.error_type in TIMEOUTS:
                self._add_timeout(response)
        if before // _FOLD_EVERY != self.total_requests // _FOLD_EVERY:
            self._fold()

    def update_failed(self, count: int = 1) -> None:
        """Count requests that failed and left nothing to measure."""
        self.total_requests += count
        self.failed_requests += count

    def update_timeouts(self, seconds: npt.NDArray[np.float64]) -> None:
        """Add calls that timed out after so long and were counted as failed already."""
        answers = self._answers
        for given_up in seconds.tolist():
            for metric in ("time_to_first_token", "time_to_last_token"):
                self._timeouts.setdefault(metric, Timeouts()).append(given_up, answers)

    @property
    def _answers(self) -> int:
        return self.total_requests - self.failed_requests - self.cached_requests

    def _add_timeout(self, response: Measured) -> None:
        """Add a call that was given up; if its first token had come by then, the time of that is known."""
        seconds, first, planned = timed_out_after(response), response.time_to_first_token, response.time_from_planned
        if seconds is None:
            return
        if first is not None and 0 <= first <= seconds:
            self._values["time_to_first_token"].append(first)
        else:
            self._timeouts.setdefault("time_to_first_token", Timeouts()).append(seconds, self._answers)
        self._timeouts.setdefault("time_to_last_token", Timeouts()).append(seconds, self._answers)
        if planned is not None:
            self._timeouts.setdefault("time_from_planned", Timeouts()).append(planned, self._answers)

    def merge(self, other: RunningStats) -> None:
        """Add another's responses, as if each had been seen here. Both were active at the same time."""
        for metric, timeouts in other._timeouts.items():
            self._timeouts.setdefault(metric, Timeouts()).merge(timeouts, self._answers)
        self.total_requests += other.total_requests
        self.failed_requests += other.failed_requests
        self.cached_requests += other.cached_requests
        self.stop_reasons.update(other.stop_reasons)
        self.active_seconds = max(self.active_seconds, other.active_seconds)
        self._fold()
        for metric, values in self._values.items():
            numbers = other._values[metric].joined()
            values.extend(numbers)
            self._sketches[metric].add(numbers)
        self._details.merge(other._details)
        self.nodes.merge(other.nodes)

    def snapshot(self, spec: Mapping[str, Any] | ProgressSpec | None = None) -> dict[str, float | int | None]:
        """Return the live value for each label of a progress spec; percentiles are within 0.5 %."""
        self._fold()
        return {stat.label: self._live_value(stat) for stat in parse_progress_bar_stats(spec)}

    def to_stats(self) -> dict[str, int | float | None]:
        """Return the final figures, flat and exact; None where there is no value."""
        self._fold()
        described: dict[str, float | None] = {}
        for metric, values in {**self._values, **self._details.columns()}.items():
            # Joined in the call itself, so that never more than one metric is held twice.
            timeouts = self._timeouts.get(metric)
            figures = _describe(values.joined(), None if timeouts is None else timeouts.seconds.joined())
            described.update({f"{metric}-{name}": value for name, value in figures.items()})
        total_output = self._total("num_tokens_output")
        return {
            "total_requests": self.total_requests,
            "failed_requests": self.failed_requests,
            "failed_requests_rate": _ratio(self.failed_requests, self.total_requests),
            "total_input_tokens": self._total("num_tokens_input"),
            "total_output_tokens": total_output,
            "requests_per_minute": self._requests_per_minute(),
            "output_tps": _ratio(total_output, self.active_seconds),
            **described,
        }

    def to_latency(self, *, load: bool = False) -> dict[str, LatencyMetrics]:
        """Return the percentiles of each time that was measured, with their intervals, timeouts included.

        Under `load` neighbouring answers are alike: the intervals are as wide as for an effective number of them.
        """
        self._fold()
        columns = {metric: values for metric, values in self._values.items() if metric.startswith("time_")}
        if (planned := self._details.columns().get("time_from_planned")) is not None:
            columns["time_from_planned"] = planned
        found = {}
        for metric, values in columns.items():
            timeouts = self._timeouts.get(metric) or Timeouts()
            if len(values) or len(timeouts):
                found[metric] = latency_metrics(values.joined(), timeouts, load=load)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_appends", "_sketches")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def _fold(self) -> None:
        """Bring the sketches up to date with the values."""
        for metric, values in self._values.items():
            self._sketches[metric].add(values.seal())
        for timeouts in self._timeouts.values():
            timeouts.seal()
        self._details.seal()
        self.nodes.seal()

    def _total(self, metric: str) -> int:
        return round(math.fsum(self._values[metric]))

    def _requests_per_minute(self) -> float | None:
        asked = self.total_requests - self.failed_requests - self.cached_requests
        return _ratio(asked * 60, self.active_seconds)

    def _live_value(self, stat: ProgressStat) -> float | int | None:
        if stat.aggregate is None:
            return self._counter(stat.source)
        value = self._aggregate(self._sketches[stat.source], stat)
        if stat.inverse:
            return _ratio(1, value) if value is not None else None
        return value

    def _counter(self, name: str) -> float | int | None:
        match name:
            case "total":
                return self.total_requests
            case "failed":
                return self.failed_requests
            case "input_tokens":
                return round(self._sketches["num_tokens_input"].total)
            case "output_tokens":
                return round(self._sketches["num_tokens_output"].total)
            case "requests_per_minute":
                return self._requests_per_minute()
            case "pass_rate" | "cost":
                return None
            case _:
                return _ratio(self._sketches["num_tokens_output"].total, self.active_seconds)

    @staticmethod
    def _aggregate(sketch: PercentileSketch, stat: ProgressStat) -> float | None:
        if stat.percentile is not None:
            return sketch.percentile(stat.percentile)
        if not sketch.count:
            return None
        match stat.aggregate:
            case "average":
                return sketch.total / sketch.count
            case "min":
                return sketch.minimum
            case "max":
                return sketch.maximum
            case _:
                return sketch.total


def _ratio(numerator: float, denominator: float) -> float | None:
    """Divide; None where the denominator is zero, or so small that the ratio is not finite."""
    ratio = numerator / denominator if denominator else math.inf
    return ratio if math.isfinite(ratio) else None


def timed_out_after(response: Measured) -> float | None:
    """How long a call that timed out had been waited for, without what it waited before it was sent.

    None for a bare response: only a record says how long its case took.
    """
    elapsed: float | None = getattr(response, "elapsed", None)
    if elapsed is None:
        return None
    return max(elapsed - (response.time_waiting or 0.0) - (response.time_in_backoff or 0.0), 0.0)


def latency_metrics(values: npt.NDArray[np.float64], timeouts: Timeouts, *, load: bool) -> LatencyMetrics:
    """The percentiles of a time, given in the order in which the answers came. Reorders in place."""
    effective = None
    if load:
        ordered = timeouts.among(values) if len(timeouts) else values
        effective = [effective_n(ordered, percent) for percent in _PERCENTILES]
    censored = timeouts.seconds.joined()
    found = percentiles(values, _PERCENTILES, censored=censored, effective_ns=effective, overwrite_input=True)
    p50, p90, p95, p99 = map(_as_metrics, found)
    metrics = LatencyMetrics(n=len(values) + len(censored), timeouts=len(censored), p50=p50, p90=p90, p95=p95, p99=p99)
    if effective is not None:
        metrics.effective_n = {f"p{percent}": n for percent, n in zip(_PERCENTILES, effective, strict=True)}
    return metrics


def _as_metrics(found: Percentile) -> PercentileMetrics:
    ends = None
    if found.low is not None and found.high is not None:
        ends = found.low, None if math.isinf(found.high) else found.high
    return PercentileMetrics(value=found.value, at_least=found.value_at_least, ci95=ends, needed=found.needed)


def _describe(
    numbers: npt.NDArray[np.float64], timeouts: npt.NDArray[np.float64] | None = None
) -> dict[str, float | None]:
    """Return average, percentiles, min and max, in any order of values; each None without values. Reorders in place.

    Average, min and max are of answers. Timeouts count in the percentiles, which are then the least they can be.
    """
    names = ("average", *(f"p{percent}" for percent in _PERCENTILES), "min", "max")
    all_of_them = numbers if timeouts is None or not len(timeouts) else np.concatenate([numbers, timeouts])
    if not len(numbers):
        known: dict[str, float | None] = dict.fromkeys(names)
        if len(all_of_them):
            known.update(zip(names[1:-2], np.percentile(all_of_them, _PERCENTILES).tolist(), strict=True))
        return known
    numbers += 0.0  # turns -0.0 into 0.0: which of the two came first must not show
    low, high = float(numbers.min()), float(numbers.max())
    # Rounding may carry the mean of equal values past them.
    average = min(max(math.fsum(numbers) / len(numbers), low), high)
    found = np.percentile(all_of_them, _PERCENTILES, overwrite_input=True).tolist()
    return dict(zip(names, (average, *found, low, high), strict=True))
