"""Runs against a baseline, case by case: what is better, what is worse, how sure that is, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from steelyard.errors import ConfigurationError
from steelyard.records import Record
from steelyard.report.compare.comparison import (
    Against,
    CaseChange,
    CaseList,
    Change,
    Comparison,
    ErrorCases,
    Ratio,
    RunFacts,
    Split,
    outcome_of,
    verdict_of,
)
from steelyard.report.compare.pairs import TIMES, Counts, Floats, Pairs, RunCases, Values
from steelyard.stats.formatting import one_line
from steelyard.stats.metrics import uncalibrated
from steelyard.stats.paired import (
    holm,
    measured_difference,
    median_interval,
    paired_difference,
    shown_outcome,
    smallest_detectable,
)

MAX_LISTED = 20
PERCENTILES = (50, 90, 99)
_MAX_SCORES = 50
_MAX_ANSWER_CHARS = 200


def compare_runs(runs: Sequence[Path], *, with_edited: bool = False, most: int | None = MAX_LISTED) -> Comparison:
    """The first run against each of the others; `most` limits how many cases are listed, None lists all."""
    if len(runs) < 2:
        raise ConfigurationError(f"a comparison needs a baseline and at least one other run, got {len(runs)}")
    labels = run_labels(runs)
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
    currency = str(baseline.metrics.currency or "")
    return Comparison(baseline=_facts(baseline, labels[0]), currency=currency, against=against)


def change_of(values: Values, *, lower_is_better: bool = False, measured: bool = False) -> Change | None:
    """The mean of the differences between two runs of the same cases; None without any.

    `measured` says that they have no bounds, as of a number of steps.
    """
    difference = measured_difference if measured else paired_difference
    found = difference(values.differences, values.groups)
    if found is None:
        return None
    return Change(
        cases=found.cases,
        groups=found.groups,
        changed=int(np.count_nonzero(values.differences)),
        baseline=float(np.mean(values.baseline)),
        run=float(np.mean(values.run)),
        difference=found.difference,
        ci95=found.ci95,
        p=found.p,
        p_adjusted=found.p,
        outcome=shown_outcome(found.difference, found.p, found.p, lower_is_better=lower_is_better),
    )


def ratio_of_times(pairs: Pairs, name: str) -> Ratio | None:
    """A time's percentiles in both runs, and the typical case's ratio; None where either run has no such times."""
    values = pairs.both(pairs.baseline.times(name), pairs.other.times(name))
    if not len(values.run):
        return None
    before, now = pairs.baseline.all_times(name, pairs.a), pairs.other.all_times(name, pairs.b)
    return _ratio(values, _percentiles(before), _percentiles(now))


def _against(pairs: Pairs, label: str, most: int | None) -> Against:
    passes = pairs.pass_rates()
    errors = change_of(pairs.error_rates(), lower_is_better=True)
    assert errors is not None
    times = {name: ratio for name in TIMES if (ratio := ratio_of_times(pairs, name)) is not None}
    scores, left_out = _scores(pairs)
    better, worse = _flips(pairs, most)
    return Against(
        run=_facts(pairs.other, label),
        verdict="",
        outcome="unknown",
        paired=len(pairs),
        pass_rate=change_of(passes),
        split=_split(passes),
        scores=scores,
        scores_left_out=left_out,
        error_rate=errors,
        errors=_error_cases(pairs),
        times=times,
        cost=_cost(pairs),
        better=better,
        worse=worse,
        only_in_baseline=_listed(pairs.baseline, pairs.only_a, most),
        only_here=_listed(pairs.other, pairs.only_b, most),
        edited=_listed(pairs.other, pairs.edited, most),
        notes=notes(pairs),
    )


def _split(values: Values) -> Split | None:
    """How many cases are higher and lower in the second run, and what they could show; None without cases."""
    differences = values.differences
    if not len(differences):
        return None
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    return Split(
        better=better,
        worse=worse,
        same=len(differences) - better - worse,
        smallest_detectable=smallest_detectable(differences, values.groups),
    )


def _error_cases(pairs: Pairs) -> ErrorCases:
    failing = pairs.now_failing()
    return ErrorCases(
        now_failing=len(failing),
        no_longer_failing=len(pairs.no_longer_failing()),
        kinds=pairs.other.error_kinds(failing),
    )


def _correct(against: list[Against]) -> None:
    """Raise the p-values for the number of rows that carry a verdict, and put into words what is then shown.

    A row in which no case differs can show nothing, and a score that differs exactly as the pass rate does is the
    same row twice: neither is counted.
    """
    tested = [(change, lower) for one in against for change, lower in _tested_rows(one)]
    for (change, lower), p in zip(tested, holm([change.p for change, _ in tested]), strict=True):
        change.p_adjusted = p
        change.outcome = shown_outcome(change.difference, change.p, p, lower_is_better=lower)
    for one in against:
        for name in one.scores:
            if one.pass_rate is not None and _is_same(one.scores[name], one.pass_rate):
                one.scores[name].p_adjusted = one.pass_rate.p_adjusted
                one.scores[name].outcome = one.pass_rate.outcome
        one.outcome = outcome_of(one)
        one.verdict = verdict_of(one, raised=len(tested) > 1)


def _tested_rows(one: Against) -> Iterator[tuple[Change, bool]]:
    """The rows that carry a verdict, and whether lower is better in them."""
    rows = [] if one.pass_rate is None else [(one.pass_rate, False)]
    rows.append((one.error_rate, True))
    rows += [
        (score, score.better == "lower")
        for score in one.scores.values()
        if (one.pass_rate is None or not _is_same(score, one.pass_rate)) and score.better is not None
    ]
    yield from (row for row in rows if row[0].changed)


def _is_same(score: Change, passes: Change) -> bool:
    return (score.cases, score.difference, score.ci95) == (passes.cases, passes.difference, passes.ci95)


def _scores(pairs: Pairs) -> tuple[dict[str, Change], int]:
    """The change of each score that both runs have, the most frequent ones, and how many more there are."""
    a, b = pairs.baseline.score_counts(), pairs.other.score_counts()
    names = sorted(a.keys() & b.keys(), key=lambda name: (-a[name], name))
    changes = {}
    for name in names[:_MAX_SCORES]:
        unit, better = pairs.measured(name)
        values = pairs.both(pairs.baseline.score(name), pairs.other.score(name))
        change = change_of(values, measured=unit is not None, lower_is_better=better == "lower")
        if change is not None:
            change.unit, change.better = unit, better
            if better is None:
                change.outcome = "no difference"
            changes[name] = change
    return changes, max(len(names) - _MAX_SCORES, 0)


def _cost(pairs: Pairs) -> Ratio | None:
    """What the paired cases cost; None where it is not known of both runs, or not in one currency."""
    if pairs.baseline.metrics.currency != pairs.other.metrics.currency:
        return None
    values = pairs.both(pairs.baseline.costs(), pairs.other.costs())
    if not len(values.run):
        return None
    return _ratio(values, {"total": math.fsum(values.baseline)}, {"total": math.fsum(values.run)})


def _ratio(values: Values, baseline: dict[str, float], run: dict[str, float]) -> Ratio:
    """The figures of both runs with the median of the cases' ratios, and where it lies."""
    a, b, groups = values
    known = a > 0
    ratios = b[known] / a[known]
    of_them = None if groups is None else [group for group, there in zip(groups, known, strict=True) if there]
    typical = float(np.median(ratios)) if len(ratios) else None
    return Ratio(cases=len(a), baseline=baseline, run=run, ratio=typical, ci95=median_interval(ratios, groups=of_them))


def _percentiles(values: Floats) -> dict[str, float]:
    found = np.percentile(values, PERCENTILES).tolist()
    return {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}


def _flips(pairs: Pairs, most: int | None) -> tuple[list[CaseChange], list[CaseChange]]:
    """The cases that came out better, and those that came out worse, the largest changes first."""
    a, b = pairs.scored()
    differences = pairs.pass_rates().differences
    found = []
    for sign in (1, -1):
        change = sign * differences
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
    return one_line(record.response_text or record.error or "", _MAX_ANSWER_CHARS)


def _listed(run: RunCases, cases: Counts, most: int | None) -> CaseList:
    return CaseList(total=len(cases), ids=[record.id for record in run.examples(cases[:most])])


def _facts(run: RunCases, label: str) -> RunFacts:
    metrics = run.metrics
    return RunFacts(
        run=str(run.run),
        label=label,
        suite=metrics.suite,
        model_id=metrics.model_id,
        complete=metrics.complete,
        cases=len(run.ids),
        trials=run.trials,
    )


def run_labels(runs: Sequence[Path]) -> list[str]:
    """A short name for each run: its folder's, or the whole path where that is not enough."""
    names = [run.name or str(run) for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


_MAX_CHARS = 60
_BEFORE = 10
"""Characters that two long texts have in common which are shown before those in which they differ."""
_OPTIONS = {
    "trials": "trials of each case",
    "num_runs": "runs of each judge",
    "limit": "limit",
    "match": "selected cases",
    "where": "conditions on metadata",
    "failed_in": "cases that failed in a run",
    "sample": "cases drawn",
    "initial_session_file": "initial session file",
}
_PACE = ("parallelism", "rate", "tokens_per_min", "requests", "duration", "arrivals")


def notes(pairs: Pairs) -> list[str]:
    """Each difference as a line, the most important first."""
    a, b = pairs.baseline, pairs.other
    found = ["it is the same run"] if a.run.resolve() == b.run.resolve() else []
    found += [*_unfinished(a, "the baseline"), *_unfinished(b, "this run"), *_suites(pairs), *_graders(pairs)]
    if a.manifest is None or b.manifest is None:
        return [*found, *_clients(a, b), "a run.json is missing: the settings of the runs cannot be compared"]
    found += _of_mapping("target ", _target(a), _target(b))
    if a.manifest.seed != b.manifest.seed:
        found.append(f"seed: {a.manifest.seed} in the baseline, {b.manifest.seed} here")
    options_a, options_b = a.manifest.options, b.manifest.options
    found += _of_mapping("", _chosen(options_a, _OPTIONS), _chosen(options_b, _OPTIONS))
    pace = [*_of_mapping("", {key: options_a.get(key) for key in _PACE}, {key: options_b.get(key) for key in _PACE})]
    if pace:
        found += [*pace, "the calls were paced otherwise: times say less"]
    return [*found, *_clients(a, b)]


def _unfinished(run: RunCases, name: str) -> Iterator[str]:
    metrics = run.metrics
    if not metrics.complete:
        yield f"{name} is not complete: {metrics.n:,} of {metrics.counts.planned:,} done"


def _suites(pairs: Pairs) -> Iterator[str]:
    a, b = pairs.baseline.metrics.suite, pairs.other.metrics.suite
    if a != b:
        yield f"suite: {_show(a)} in the baseline, {_show(b)} here"
    if pairs.asked_otherwise * 2 > pairs.shared:
        what = "prompt, system prompt, template, tools or metadata"
        yield f"{pairs.asked_otherwise:,} of {pairs.shared:,} cases were asked otherwise ({what})"
    if len(pairs.edited):
        left = "are left out" if len(pairs) < pairs.shared else "are paired all the same"
        yield f"{len(pairs.edited):,} of {pairs.shared:,} cases were edited in between and {left}"


def _graders(pairs: Pairs) -> Iterator[str]:
    a, b = _scorers(pairs.baseline), _scorers(pairs.other)
    for name in a.keys() - b.keys():
        yield f"scorer {_show(name)}: only in the baseline"
    for name in b.keys() - a.keys():
        yield f"scorer {_show(name)}: not in the baseline"
    for name in sorted(a.keys() & b.keys()):
        yield from _of_mapping(f"scorer {name} ", a[name], b[name])
    if a == b and pairs.graded_otherwise * 2 > pairs.shared:
        yield f"{pairs.graded_otherwise:,} of {pairs.shared:,} cases expect another answer"
    scores = {**pairs.baseline.metrics.scores, **pairs.other.metrics.scores}
    for name in sorted(name for name, score in scores.items() if score.advisory):
        yield f"score {name} is advisory: its judge is not calibrated, so it decides nothing"
    for label, cases in (("the baseline", pairs.baseline), ("this run", pairs.other)):
        yield from (f"in {label} {sentence}" for sentence in uncalibrated(cases.metrics))


def _clients(a: RunCases, b: RunCases) -> Iterator[str]:
    for run, name in ((a, "the baseline"), (b, "this run")):
        client = run.metrics.client
        if client and client.bottleneck:
            why = client.reason or "it had no time to spare"
            yield f"in {name} the client was the bottleneck ({why}): its times say nothing of the target"
        if run.cached:
            yield f"{run.cached:,} answers of {name} came from the cache: their times and costs are left out"


def _scorers(run: RunCases) -> dict[str, Mapping[str, Any]]:
    if run.manifest is None:
        return {}
    return {str(one.get("name") or one.get("kind") or "scorer"): one for one in run.manifest.scorers}


def _target(run: RunCases) -> dict[str, Any]:
    """What the target was, but for its model: that is what is compared, and stands above."""
    assert run.manifest is not None
    return {key.lstrip("~"): value for key, value in run.manifest.target.items() if key != "model"}


def _chosen(options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {label: options.get(name) for name, label in names.items()}


def _of_mapping(prefix: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*a, *b}):
        one, other = a.get(key), b.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _of_mapping(f"{prefix}{key}.", one, other)
        elif one != other:
            start = _where_they_part(_text(one), _text(other))
            yield f"{prefix}{key}: {_show(one, start)} in the baseline, {_show(other, start)} here"


def _where_they_part(a: str, b: str) -> int:
    """From where on to show two texts so that their difference is seen: the beginning, if it is near enough."""
    shorter = min(len(a), len(b))
    common = next((place for place in range(shorter) if a[place] != b[place]), shorter)
    return 0 if common < _MAX_CHARS // 2 else common - _BEFORE


def _show(value: Any, start: int = 0) -> str:
    text = ("…" if start else "") + _text(value)[start:]
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
