"""Runs against a baseline, case by case: what is better, what is worse, how sure that is, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from steelyard.errors import ConfigurationError
from steelyard.records import Record
from steelyard.report.compare_notes import notes
from steelyard.report.comparison import (
    Against,
    CaseChange,
    Change,
    Comparison,
    Listed,
    Ratio,
    RunFacts,
    Split,
    outcome_of,
    verdict_of,
)
from steelyard.report.pairs import TIMES, Counts, Floats, Pairs, RunCases
from steelyard.report.visible import one_line
from steelyard.stats.paired import holm, mcnemar_exact, median_interval, paired_interval, smallest_visible

MOST_LISTED = 20
PERCENTILES = (50, 90, 99)
_MOST_SCORES = 50
_LONGEST_ANSWER = 200


def compare(runs: Sequence[Path], *, with_edited: bool = False, most: int | None = MOST_LISTED) -> Comparison:
    """The first run against each of the others; `most` limits how many cases are listed, None lists all."""
    if len(runs) < 2:
        raise ConfigurationError(f"a comparison needs a baseline and at least one other run, got {len(runs)}")
    labels = _labels(runs)
    baseline = RunCases(runs[0])
    against = []
    for run, label in zip(runs[1:], labels[1:], strict=True):
        pairs = Pairs(baseline, RunCases(run), with_edited=with_edited)
        if not len(pairs):
            raise ConfigurationError(
                f"nothing can be paired: {runs[0]} has {len(baseline.ids):,} cases, {run} has"
                f" {len(pairs.other.ids):,}, and no id is in both"
            )
        against.append(_against(pairs, label, most))
    _correct(against)
    currency = str(baseline.metrics.get("currency") or "")
    return Comparison(baseline=_facts(baseline, labels[0]), currency=currency, against=against)


def change_of(a: Floats, b: Floats) -> Change | None:
    """The difference between two means of the same cases; None without any."""
    if not len(a):
        return None
    low, high = float(np.mean(a)), float(np.mean(b))
    return Change(cases=len(a), baseline=low, run=high, difference=float(np.mean(b - a)), ci95=paired_interval(b - a))


def pass_rates(pairs: Pairs) -> tuple[Floats, Floats]:
    """The share of trials that passed, by case, of the pairs in which both have a verdict."""
    a, b = pairs.scored()
    return pairs.baseline.passed[a] / pairs.baseline.tried[a], pairs.other.passed[b] / pairs.other.tried[b]


def error_rates(pairs: Pairs) -> tuple[Floats, Floats]:
    """The share of trials that brought no answer, by case."""
    a, b = pairs.a, pairs.b
    return pairs.baseline.errors[a] / pairs.baseline.records[a], pairs.other.errors[b] / pairs.other.records[b]


def ratio_of_times(pairs: Pairs, name: str) -> Ratio | None:
    """A time's percentiles in both runs, and the typical case's ratio; None where either run has no such times."""
    a, b = pairs.both(pairs.baseline.times(name), pairs.other.times(name))
    if not len(a):
        return None
    before, now = pairs.baseline.all_times(name, pairs.a), pairs.other.all_times(name, pairs.b)
    return _ratio(a, b, _percentiles(before), _percentiles(now))


def _against(pairs: Pairs, label: str, most: int | None) -> Against:
    a, b = pass_rates(pairs)
    errors = change_of(*error_rates(pairs))
    assert errors is not None
    times = {name: ratio for name in TIMES if (ratio := ratio_of_times(pairs, name)) is not None}
    scores, left_out = _scores(pairs)
    better, worse = _flips(pairs, most)
    return Against(
        run=_facts(pairs.other, label),
        verdict="",
        outcome="unknown",
        paired=len(pairs),
        pass_rate=change_of(a, b),
        split=split_of(a, b),
        scores=scores,
        scores_left_out=left_out,
        error_rate=errors,
        times=times,
        cost=_cost(pairs),
        better=better,
        worse=worse,
        only_in_baseline=_listed(pairs.baseline, pairs.only_a, most),
        only_here=_listed(pairs.other, pairs.only_b, most),
        edited=_listed(pairs.other, pairs.edited, most),
        notes=notes(pairs),
    )


def split_of(a: Floats, b: Floats) -> Split | None:
    """How many cases are higher and lower in the second run, and McNemar's exact p; None without cases."""
    if not len(a):
        return None
    better, worse = int((b > a).sum()), int((b < a).sum())
    p = mcnemar_exact(better, worse)
    same = len(a) - better - worse
    return Split(better=better, worse=worse, same=same, p=p, p_adjusted=p, smallest_visible=smallest_visible(b - a))


def _correct(against: list[Against]) -> None:
    """Raise the p-values for the number of runs, and put into words what then stands."""
    tested = [one.split for one in against if one.split is not None]
    for split, p in zip(tested, holm([split.p for split in tested]), strict=True):
        split.p_adjusted = p
    for one in against:
        one.outcome = outcome_of(one.split)
        one.verdict = verdict_of(one, several=len(against) > 1)


def _scores(pairs: Pairs) -> tuple[dict[str, Change], int]:
    """The change of each score that both runs have, the most frequent ones, and how many more there are."""
    a, b = pairs.baseline.score_counts(), pairs.other.score_counts()
    names = sorted(a.keys() & b.keys(), key=lambda name: (-a[name], name))
    changes = {}
    for name in names[:_MOST_SCORES]:
        change = change_of(*pairs.both(pairs.baseline.score(name), pairs.other.score(name)))
        if change is not None:
            changes[name] = change
    return changes, max(len(names) - _MOST_SCORES, 0)


def _cost(pairs: Pairs) -> Ratio | None:
    """What the paired cases cost; None where it is not known of both runs, or not in one currency."""
    if pairs.baseline.metrics.get("currency") != pairs.other.metrics.get("currency"):
        return None
    a, b = pairs.both(pairs.baseline.costs(), pairs.other.costs())
    if not len(a):
        return None
    return _ratio(a, b, {"total": math.fsum(a)}, {"total": math.fsum(b)})


def _ratio(a: Floats, b: Floats, baseline: dict[str, float], run: dict[str, float]) -> Ratio:
    """The figures of both runs with the median of the cases' ratios, and where it lies."""
    ratios = b[a > 0] / a[a > 0]
    typical = float(np.median(ratios)) if len(ratios) else None
    return Ratio(cases=len(a), baseline=baseline, run=run, ratio=typical, ci95=median_interval(ratios))


def _percentiles(values: Floats) -> dict[str, float]:
    found = np.percentile(values, PERCENTILES).tolist()
    return {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}


def _flips(pairs: Pairs, most: int | None) -> tuple[list[CaseChange], list[CaseChange]]:
    """The cases that came out better, and those that came out worse, the largest changes first."""
    a, b = pairs.scored()
    rates_a, rates_b = pass_rates(pairs)
    found = []
    for sign in (1, -1):
        change = sign * (rates_b - rates_a)
        order = np.argsort(-change, kind="stable")[: int((change > 0).sum())][:most]
        found.append(_changes(pairs, a[order], b[order]))
    return found[0], found[1]


def _changes(pairs: Pairs, a: Counts, b: Counts) -> list[CaseChange]:
    before, now = pairs.baseline.examples(a), pairs.other.examples(b)
    return [
        CaseChange(
            id=record.id,
            baseline_passed=int(pairs.baseline.passed[i]),
            baseline_tried=int(pairs.baseline.tried[i]),
            run_passed=int(pairs.other.passed[j]),
            run_tried=int(pairs.other.tried[j]),
            baseline_answer=_answer(record),
            run_answer=_answer(other),
        )
        for i, j, record, other in zip(a, b, before, now, strict=True)
    ]


def _answer(record: Record) -> str:
    return one_line(record.response_text or record.error or "", _LONGEST_ANSWER)


def _listed(run: RunCases, cases: Counts, most: int | None) -> Listed:
    return Listed(total=len(cases), ids=[record.id for record in run.examples(cases[:most])])


def _facts(run: RunCases, label: str) -> RunFacts:
    metrics = run.metrics
    return RunFacts(
        run=str(run.run),
        label=label,
        suite=metrics["suite"],
        model_id=metrics["model_id"],
        complete=metrics["complete"],
        cases=len(run.ids),
        trials=run.trials,
    )


def _labels(runs: Sequence[Path]) -> list[str]:
    """A short name for each run: its folder's, or the whole path where that is not enough."""
    names = [run.name or str(run) for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]
