"""What a comparison holds, as it is written to JSON, and its verdict in words."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from steelyard.records import Better
from steelyard.stats.formatting import counted, format_number, format_seconds
from steelyard.stats.intervals import Interval
from steelyard.stats.paired import SIGNIFICANT
from steelyard.stats.prices import format_money

COMPARISON_VERSION = 2


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
    """A mean over the paired cases in both runs, the mean of their differences, and how sure it is, by one procedure.

    The interval and p are from `paired_difference`: p is below 0.05 exactly where the interval leaves out 0.
    """

    cases: int
    groups: int
    """How many groups the cases belong to; as many as cases where they are not grouped."""
    changed: int
    """On how many of the cases the runs differ."""
    baseline: float
    run: float
    difference: float
    ci95: Interval
    p: float
    p_adjusted: float
    """Raised (Holm) for the number of rows, of all runs, that carry a verdict."""
    outcome: str
    """`better`, `worse` or `no difference`."""
    unit: str | None = None
    """Of a measurement: what it is measured in, which may be empty; its interval is Student's."""
    better: Better | None = "higher"
    """Which direction is better; None for a measurement that does not say."""


class Split(msgspec.Struct, kw_only=True):
    """On how many cases a run is better or worse, and what as many cases could show."""

    better: int
    worse: int
    same: int
    smallest_detectable: float | None
    """The difference that this many cases, changing as much, would show four times in five; None if none."""


class ErrorCases(msgspec.Struct, kw_only=True):
    """The cases whose answers stopped coming, or came again."""

    now_failing: int
    """Cases that have an error now and had none in the baseline."""
    no_longer_failing: int
    kinds: dict[str, int]
    """Of those that fail now, how many by each kind of error, the most frequent first."""


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
    """`better`, `worse`, `mixed`, `no difference` or `unknown`: by the pass rate and the errors together."""
    paired: int
    pass_rate: Change | None
    split: Split | None
    scores: dict[str, Change]
    scores_left_out: int
    error_rate: Change
    errors: ErrorCases
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

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from steelyard.report.notebook import comparison_html

        return comparison_html(self)


def outcome_of(one: Against) -> str:
    """What is shown of a run: errors count as well as verdicts, and where they point both ways it is mixed."""
    shown = {one.error_rate.outcome, "no difference" if one.pass_rate is None else one.pass_rate.outcome}
    if {"better", "worse"} <= shown:
        return "mixed"
    for outcome in ("worse", "better"):
        if outcome in shown:
            return outcome
    return "unknown" if one.pass_rate is None else "no difference"


def verdict_of(one: Against, *, raised: bool) -> str:
    """The verdict in a sentence: cases that fail now come first, then what is known of those with a verdict."""
    return "; ".join([*_of_errors(one, raised=raised), _of_passes(one, raised=raised), *_of_corrected(one)])


def _of_errors(one: Against, *, raised: bool) -> Iterator[str]:
    errors, change = one.errors, one.error_rate
    if errors.now_failing:
        yield f"{errors.now_failing:,} of {counted(one.paired, 'case')} {_now_failing(errors)}"
    if errors.no_longer_failing:
        yield f"{errors.no_longer_failing:,} of {one.paired:,} fail no longer"
    if errors.now_failing or errors.no_longer_failing or change.outcome != "no difference":
        shown = "not shown to be more or less than chance" if change.outcome == "no difference" else change.outcome
        yield f"errors {_how_sure(change, raised=raised)}: {shown}"


def _now_failing(errors: ErrorCases) -> str:
    if list(errors.kinds) == ["timeout"]:
        return "now time out"
    kinds = [f"{number:,} {kind}" for kind, number in errors.kinds.items()]
    shown = [*kinds[:_MAX_KINDS], f"{len(kinds) - _MAX_KINDS:,} more kinds"] if len(kinds) > _MAX_KINDS else kinds
    return f"now fail ({', '.join(shown)})"


def _of_passes(one: Against, *, raised: bool) -> str:
    name, split, change = one.run.label, one.split, one.pass_rate
    if split is None or change is None:
        return f"nothing is known of {name}: no case has a verdict in both runs"
    of_those = "" if change.cases == one.paired else f"of the {change.cases:,} with a verdict in both, "
    counts = f"better on {counted(split.better, 'case')}, worse on {split.worse:,}"
    if change.outcome == "worse":
        counts = f"worse on {counted(split.worse, 'case')}, better on {split.better:,}"
    sure = _how_sure(change, raised=raised)
    if change.outcome != "no difference":
        return f"{of_those}{name} is {change.outcome}: passed {sure}; {counts}"
    cases = _units(change)
    if split.smallest_detectable is None:
        return f"{of_those}no difference: {name} passed {sure}; {counts}; {cases} are too few to show any"
    points = f"{split.smallest_detectable * 100:.2g} points"
    return (
        f"{of_those}no difference that {cases} could show: {name} passed {sure}; {counts}; "
        f"the smallest that they show four times in five is about {points}"
    )


def _of_corrected(one: Against) -> Iterator[str]:
    """Name the rows whose interval excludes 0 and which are still not shown, for the number of rows."""
    rows = {"errors": one.error_rate, **{f"score {name}": change for name, change in one.scores.items()}}
    if one.pass_rate is not None:
        same = one.pass_rate.difference, one.pass_rate.ci95
        rows = {name: change for name, change in rows.items() if (change.difference, change.ci95) != same}
        rows = {"passed": one.pass_rate, **rows}
    found = [name for name, change in rows.items() if is_corrected_away(change)]
    if found:
        named = ", ".join(found[:_MAX_NAMED]) + (f" and {len(found) - _MAX_NAMED:,} more" * (len(found) > _MAX_NAMED))
        yield f"the interval of {named} is for that row alone, p is raised for the number of rows: {GO_BY_P}"


GO_BY_P = "where it excludes 0 and p is not below 0.05, no difference is shown"


def is_corrected_away(change: Change) -> bool:
    """Whether a row would be shown if it were the only one: its interval is its own, p is raised for all of them."""
    return change.p < SIGNIFICANT <= change.p_adjusted and change.better is not None


def _how_sure(change: Change, *, raised: bool) -> str:
    p = format_p(change.p_adjusted) + (" (Holm)" if raised else "")
    return f"{signed(change.difference * 100, 1)} points, 95 % CI {_interval(change.ci95, 100, 1)}, {p}"


def _units(change: Change) -> str:
    cases = counted(change.cases, "case")
    return cases if change.groups == change.cases else f"{cases} in {counted(change.groups, 'group')}"


def format_p(p: float) -> str:
    """A p-value to two digits; below 0.001 only that it is."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


_MAX_KINDS = 3
_MAX_NAMED = 3
_TIMES = {"time_to_first_token": "time to first token", "time_to_last_token": "time to last token"}


class Row(msgspec.Struct, frozen=True):
    """A figure in both runs and how it changed. `name` is from elsewhere: to be escaped."""

    label: str
    name: str = ""
    baseline: str = ""
    run: str = ""
    change: str = ""
    interval: str = ""
    outcome: str = ""


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
        outcome=_shown_outcome(change),
    )


def _score(name: str, change: Change) -> Row:
    if change.unit is not None:
        sign = "+" if change.difference > 0 else ""
        ends = change.ci95 if change.changed else ()
        return Row(
            label="score",
            name=f"{name}, {change.unit}" if change.unit else name,
            baseline=format_number(change.baseline),
            run=format_number(change.run),
            change=f"{sign}{format_number(change.difference)}".replace("-", "−"),
            interval=" – ".join(format_number(end).replace("-", "−") for end in ends),
            outcome=_shown_outcome(change),
        )
    return Row(
        label="score",
        name=name,
        baseline=f"{change.baseline:.3f}",
        run=f"{change.run:.3f}",
        change=signed(change.difference, 3),
        interval=_interval(change.ci95, 1, 3),
        outcome=_shown_outcome(change),
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


def _shown_outcome(change: Change) -> str:
    return "" if change.outcome == "no difference" else change.outcome


def _interval(interval: Interval, factor: float, digits: int) -> str:
    return f"{signed(interval[0] * factor, digits)} – {signed(interval[1] * factor, digits)}"


def signed(value: float, digits: int) -> str:
    """A number with its sign, but for nothing at all: +1.0, −0.5, 0.0."""
    text = f"{abs(value):.{digits}f}"
    if not float(text):
        return text
    return ("+" if value > 0 else "−") + text
