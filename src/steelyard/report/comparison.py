"""What a comparison holds, as it is written to JSON, and its verdict in words."""

from __future__ import annotations

import msgspec

from steelyard.stats.intervals import Interval
from steelyard.stats.wording import counted

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
    """Raised (Holm) when several runs are held against the baseline, else the same."""
    smallest_visible: float | None
    """The difference that so many cases would show four times in five."""


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


class Listed(msgspec.Struct, kw_only=True):
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
    only_in_baseline: Listed
    only_here: Listed
    edited: Listed
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
