"""The figures of a comparison as rows of words, the same for every format."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from steelyard.report.comparison import Against, CaseChange, Change, Listed, Ratio
from steelyard.stats.intervals import Interval
from steelyard.stats.spending import format_money
from steelyard.stats.wording import format_seconds

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


def lists(one: Against) -> Iterator[tuple[str, Listed]]:
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
