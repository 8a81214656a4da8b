"""Quality against cost and against latency: a point for each variant, and the Pareto front through the best of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from steelyard.report.chart import Axis, Chart, LegendEntry, Mark, Series, nice_ticks
from steelyard.report.matrix.leaderboard import Leaderboard, Standing, pareto_front
from steelyard.stats.formatting import format_seconds, one_line
from steelyard.stats.prices import format_money

_WIDE = 20
"""From this ratio of the highest value to the lowest on, the scale is logarithmic."""
_MAX_LABEL = 24
_MAX_POINTS_NAMED = 16

Price = Callable[[Standing], float | None]


def scatter_charts(board: Leaderboard) -> list[Chart]:
    """The pass rate against the cost of a case, and against the median latency; those that can be drawn."""
    unit = f" {board.currency}".rstrip()
    charts = [
        _scatter(board, "cost", lambda one: one.cost_per_case, _money, f"cost per case,{unit}".rstrip(","), unit),
        _scatter(board, "latency", _median, format_seconds, "median time to last token"),
    ]
    return [chart for chart in charts if chart is not None]


def _median(one: Standing) -> float | None:
    return None if one.latency_p50 is None else one.latency_p50.value


def _scatter(
    board: Leaderboard, name: str, price: Price, show: Callable[[float], str], label: str, unit: str = ""
) -> Chart | None:
    """None where fewer than two variants have both."""
    known = [
        (one, value, one.pass_rate_all)
        for one in board.variants
        if (value := price(one)) is not None and one.pass_rate_all is not None and one.rank is not None
    ]
    if len(known) < 2:
        return None
    front = pareto_front(np.array([[value, -rate] for _, value, rate in known]))
    marks = [
        _mark(one, value, rate, f"{name} {show(value)}{unit}", is_on, named=len(known) <= _MAX_POINTS_NAMED)
        for (one, value, rate), is_on in zip(known, front, strict=True)
    ]
    on_front = sorted((mark for mark, is_on in zip(marks, front, strict=True) if is_on), key=lambda mark: mark.x)
    rest = [mark for mark, is_on in zip(marks, front, strict=True) if not is_on]
    legend = [LegendEntry("good", f"Pareto front: none passes more for less {name}")]
    legend += [LegendEntry("level weak", "another is at least as good for less")] if rest else []
    return Chart(
        title=f"Pass rate against {name}",
        description=f"Pass rate against {name}, a point for each variant",
        x=_axis([value for _, value, _ in known], show, label),
        y=_share_axis([rate for _, _, rate in known]),
        series=[Series("good", on_front), *(Series("none", [mark]) for mark in rest)],
        legend=legend,
    )


def _mark(one: Standing, value: float, rate: float, shown: str, on_front: bool, *, named: bool) -> Mark:
    interval = one.pass_rate_all_ci95
    sure = "" if interval is None else f" (95 % CI {interval[0]:.1%} – {interval[1]:.1%})"
    text = f"{one_line(one.name, 80)}: {rate:.1%} passed{sure}, {shown}"
    label = one_line(one.name, _MAX_LABEL) if named else ""
    return Mark(value, rate, text, "good" if on_front else "level weak", 5, label=label, ringed=one.place == "best")


def _axis(values: Sequence[float], show: Callable[[float], str], label: str) -> Axis:
    """From zero; logarithmic where the dearest would press all the others against the axis."""
    least, most = min(values), max(values)
    if least > 0 and most / least >= _WIDE:
        powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        low, high = least / 1.6, most * 1.6
        within = [tick for tick in ticks if low <= tick <= high]
        return Axis(low, high, within[:: math.ceil(len(within) / 6)], show, label, log=True)
    high = most * 1.15 or 1.0
    return Axis(0, high, nice_ticks(high, 5), show, label)


def _share_axis(rates: Sequence[float]) -> Axis:
    """From a little below the lowest to a little above the highest, so that small differences are seen."""
    low, high = min(rates), max(rates)
    room = max((high - low) * 0.2, 0.02)
    low, high = max(low - room, -0.04), high + room
    step = nice_ticks(high - low, 5)[1]
    first = math.ceil(max(low, 0.0) / step - 1e-9)
    ticks = [number * step for number in range(first, int(min(high, 1.0) / step + 1e-9) + 1)]
    digits = 0 if step >= 0.0099 else 1
    return Axis(low, high, ticks, lambda rate: f"{rate:.{digits}%}")


def _money(amount: float) -> str:
    return "0" if not amount else format_money(amount, "").strip()
