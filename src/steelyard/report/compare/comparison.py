"""What a comparison holds, as it is written to JSON, and its verdict in words."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from steelyard.stats.costs import format_money
from steelyard.stats.formatting import counted, format_seconds
from steelyard.stats.intervals import Interval

COMPARISON_VERSION = 1
SIGNIFICANT = 0.05


class RunFacts(msgspec.Struct, kw_only=True):
    """Which run it is."""

    run: str
    label: str
    suite: str
    model_id: str | None
    complete: bool
    cases: int
    trials: int


class Change(msgspec.Struct, kw_only=True):
    """A mean over the paired cases in both runs, and the difference with its 95 % interval."""

    cases: int
    baseline: float
    run: float
    difference: float
    ci95: Interval | None


class Split(msgspec.Struct, kw_only=True):
    """On how many cases a run is better or worse, and how likely that is by chance."""

    better: int
    worse: int
    same: int
    p: float
    p_adjusted: float
    """Raised (Holm) when several runs are compared with the baseline, else the same."""
    smallest_visible: float | None
    """The difference that this many cases would show four times in five."""


class Ratio(msgspec.Struct, kw_only=True):
    """A figure of the paired cases in both runs, and how many times as much it is in the typical case."""

    cases: int
    baseline: dict[str, float]
    run: dict[str, float]
    ratio: float | None
    """The median over the cases of each case's own ratio."""
    ci95: Interval | None


class CaseChange(msgspec.Struct, kw_only=True):
    """A case that came out differently: how many of its trials passed and have a verdict, and an answer's beginning."""

    id: str
    baseline_passed: int
    baseline_tried: int
    run_passed: int
    run_tried: int
    baseline_answer: str
    run_answer: str


class CaseList(msgspec.Struct, kw_only=True):
    """Some cases by their ids, and how many there are."""

    total: int
    ids: list[str]


class Against(msgspec.Struct, kw_only=True):
    """One run against the baseline."""

    run: RunFacts
    verdict: str
    outcome: str
    """`better`, `worse`, `no difference` or `unknown`."""
    paired: int
    pass_rate: Change | None
    split: Split | None
    scores: dict[str, Change]
    scores_left_out: int
    error_rate: Change
    times: dict[str, Ratio]
    cost: Ratio | None
    better: list[CaseChange]
    worse: list[CaseChange]
    only_in_baseline: CaseList
    only_here: CaseList
    edited: CaseList
    notes: list[str]


class Comparison(msgspec.Struct, kw_only=True):
    """Runs against a baseline."""

    v: int = COMPARISON_VERSION
    baseline: RunFacts
    currency: str
    against: list[Against]


def outcome_of(split: Split | None) -> str:
    if split is None:
        return "unknown"
    if split.p_adjusted >= SIGNIFICANT:
        return "no difference"
    return "better" if split.better > split.worse else "worse"


def verdict_of(one: Against, *, several: bool) -> str:
    name, split = one.run.label, one.split
    if split is None:
        return f"nothing is known of {name}: no case has a verdict in both runs"
    p = format_p(split.p_adjusted) + (" (Holm)" if several else "")
    counts = f"better on {counted(split.better, 'case')}, worse on {split.worse:,}: {p}"
    if one.outcome == "worse":
        counts = f"worse on {counted(split.worse, 'case')}, better on {split.better:,}: {p}"
    if one.outcome != "no difference":
        return f"{name} is {counts}"
    n = split.better + split.worse + split.same
    cases = counted(n, "case")
    if split.smallest_visible is None:
        return f"no difference: {name} is {counts}; {cases} are too few to show any"
    points = f"{split.smallest_visible * 100:.2g} points"
    return f"no difference that {cases} could show: {name} is {counts}; the smallest that they could is about {points}"


def format_p(p: float) -> str:
    """A p-value to two digits; below 0.001 only that it is."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


_TIMES = {"time_to_first_token": "time to first token", "time_to_last_token": "time to last token"}


class Row(msgspec.Struct, frozen=True):
    """A figure in both runs and how it changed. `name` is from elsewhere: to be escaped."""

    label: str
    name: str = ""
    baseline: str = ""
    run: str = ""
    change: str = ""
    interval: str = ""


def rows(one: Against, currency: str) -> list[Row]:
    """Verdicts, errors, scores, times and cost: what there is of them."""
    found = []
    if one.pass_rate is not None:
        n = one.pass_rate.cases
        found.append(_points("passed" if n == one.paired else f"passed, of {n:,} with a verdict", one.pass_rate))
    found.append(_points("errors", one.error_rate))
    for name, change in one.scores.items():
        found.append(_score(name, change))
    for name, ratio in one.times.items():
        found += _times(_TIMES[name], ratio)
    if one.cost is not None:
        found += _cost(one.cost, currency)
    return found


def outcomes(case: CaseChange) -> tuple[str, str]:
    """How a case came out in each run: in a word, or in how many of its trials it passed."""
    return _came_out(case.baseline_passed, case.baseline_tried), _came_out(case.run_passed, case.run_tried)


def lists(one: Against) -> Iterator[tuple[str, CaseList]]:
    """The cases that were not compared, and why."""
    for title, listed in (
        ("only in the baseline", one.only_in_baseline),
        ("not in the baseline", one.only_here),
        ("edited in between", one.edited),
    ):
        if listed.total:
            yield title, listed


def _came_out(passed: int, tried: int) -> str:
    if tried == 1:
        return "passed" if passed else "failed"
    return f"{passed:,} of {tried:,}"


def _points(label: str, change: Change) -> Row:
    return Row(
        label=label,
        baseline=f"{change.baseline:.1%}",
        run=f"{change.run:.1%}",
        change=f"{signed(change.difference * 100, 1)} points",
        interval=_interval(change.ci95, 100, 1),
    )


def _score(name: str, change: Change) -> Row:
    return Row(
        label="score",
        name=name,
        baseline=f"{change.baseline:.3f}",
        run=f"{change.run:.3f}",
        change=signed(change.difference, 3),
        interval=_interval(change.ci95, 1, 3),
    )


def _times(label: str, ratio: Ratio) -> Iterator[Row]:
    for percentile, value in ratio.baseline.items():
        yield Row(
            label=f"{label}, {percentile}",
            baseline=format_seconds(value),
            run=format_seconds(ratio.run[percentile]),
            change=_times_as_much(ratio.run[percentile], value),
        )
    yield _typical(label, ratio)


def _cost(ratio: Ratio, currency: str) -> Iterator[Row]:
    before, now = ratio.baseline["total"], ratio.run["total"]
    yield Row(
        label="cost",
        baseline=format_money(before, currency),
        run=format_money(now, currency),
        change=_times_as_much(now, before),
    )
    yield _typical("cost", ratio)


def _typical(label: str, ratio: Ratio) -> Row:
    interval = "" if ratio.ci95 is None else f"{ratio.ci95[0]:.2f} – {ratio.ci95[1]:.2f}"
    shown = "" if ratio.ratio is None else f"× {ratio.ratio:.2f}"
    return Row(label=f"{label}, typical case", change=shown, interval=interval)


def _times_as_much(now: float, before: float) -> str:
    return f"× {now / before:.2f}" if before > 0 else ""


def _interval(interval: Interval | None, factor: float, digits: int) -> str:
    if interval is None:
        return ""
    return f"{signed(interval[0] * factor, digits)} – {signed(interval[1] * factor, digits)}"


def signed(value: float, digits: int) -> str:
    """A number with its sign, but for nothing at all: +1.0, −0.5, 0.0."""
    text = f"{abs(value):.{digits}f}"
    if not float(text):
        return text
    return ("+" if value > 0 else "−") + text
