"""Which of several runs of the same cases is best, by how much, at what cost, and which cannot be told from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec
import numpy as np

from steelyard.errors import ConfigurationError
from steelyard.report.compare.compare import change_of
from steelyard.report.compare.comparison import Change
from steelyard.report.compare.pairs import Floats, Pairs, RunCases, Values
from steelyard.report.matrix.table import VariantRun, VariantRuns, variants_in, variants_of
from steelyard.stats.formatting import counted
from steelyard.stats.intervals import Interval
from steelyard.stats.metrics import Metrics, PercentileMetrics, correction_note, uncalibrated
from steelyard.stats.paired import SIGNIFICANT, cases_needed, holm, paired_mean, shown_outcome

LEADERBOARD_VERSION = 1
_LATENCY = "time_to_last_token"
_ENOUGH = 0.5
"""A run is ranked that has at least this share of the cases of the fullest one."""
_EQUAL = 1e-9
"""Pass rates that are nearer to each other than this are the same."""
_Name = TypeVar("_Name")

Place: TypeAlias = Literal["best", "tied", "worse", "not distinguishable", "better", "not ranked"]


class AgainstBest(msgspec.Struct, kw_only=True):
    """A variant compared with the best one, case by case."""

    change: Change
    """`baseline` is the best one; p is raised (Holm) for all pairs of variants."""
    cases_needed: int | None
    """About how many cases would show the difference four times in five; None where it is shown, or there is none."""


class Standing(msgspec.Struct, kw_only=True):
    """One variant: how good, how fast and how dear it is."""

    name: str
    run: str
    axes: dict[str, str]
    suite: str
    model_id: str | None
    complete: bool
    n: int
    """Records, planned or not: cases times trials."""
    planned: int
    cases: int
    trials: int
    rank: int | None
    """From 1, the same for equally good ones; None where too few of its cases are done, or none has a verdict."""
    place: Place
    against_best: AgainstBest | None
    """None of the best one, and where they share no case."""
    pass_rate: float | None
    pass_rate_ci95: Interval | None
    pass_rate_all: float | None
    """Errors count as not passed: what variants are ranked by."""
    pass_rate_all_ci95: Interval | None
    pass_rate_corrected: float | None
    pass_rate_corrected_ci95: Interval | None
    passed: int
    scored: int
    errors: int
    error_rate: float | None
    cost: float | None
    cost_per_case: float | None
    """Judges included; of cases whose answer did not come from the cache."""
    cost_per_passed_case: float | None
    latency_p50: PercentileMetrics | None
    """Of the time to last token."""
    latency_p95: PercentileMetrics | None
    tokens_input: float | None
    """Of an answer, on average."""
    tokens_output: float | None
    pareto: bool
    """Whether no other variant is at least as good, cheap and fast, and better in one of these."""
    uncalibrated: list[str]
    """What must be said of judges that decided and are not calibrated."""
    notes: list[str]
    """What its figures alone would not tell."""


class Leaderboard(msgspec.Struct, kw_only=True):
    """Variants from the best to the worst, then those that are not ranked."""

    v: int = LEADERBOARD_VERSION
    suite: str
    place: str | None
    axes: dict[str, list[str]]
    currency: str
    best: str | None
    """The others are compared with it; of several that are tied the cheapest, then the one that was named first."""
    verdict: str
    not_distinguishable: list[str]
    """The variants that cannot be told from the best one."""
    cases_in_common: int
    """The ranks are by the cases that all ranked variants have."""
    pairs_tested: int
    """p is raised for that many comparisons: which variant is best was found in the same cases."""
    pareto_by: list[str]
    """What the Pareto front is of: `pass rate`, `cost`, `latency`, as far as all ranked variants have them."""
    variants: list[Standing]
    not_begun: list[str]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from steelyard.report.notebook import leaderboard_html

        return leaderboard_html(self)


def leaderboard(source: Path | str | Sequence[Path | str]) -> Leaderboard:
    """The leaderboard of a matrix, by its folder, or of runs, by their directories."""
    if isinstance(source, str | Path):
        return rank(variants_in(Path(source)))
    return rank(variants_of([Path(run) for run in source]))


def rank(variants: VariantRuns, *, with_edited: bool = False) -> Leaderboard:
    """The leaderboard of these runs, finished or not."""
    if not variants.runs:
        raise ConfigurationError("a leaderboard needs at least one run")
    loaded = [RunCases(one.run) for one in variants.runs]
    # The variants of a matrix ask the same cases, however they ask them.
    field = _Field(loaded, with_edited=with_edited or variants.place is not None)
    order = [*field.order, *(number for number in range(len(loaded)) if number not in field.order)]
    standings = [_standing(variants.runs[number], field, number) for number in order]
    pareto_by = _mark_front([one for one in standings if one.rank is not None])
    currencies = {cases.metrics.currency for cases in loaded if cases.metrics.currency}
    board = Leaderboard(
        suite=variants.suite or loaded[0].metrics.suite,
        place=None if variants.place is None else str(variants.place),
        axes=variants.axes,
        currency=currencies.pop() if len(currencies) == 1 else "",
        best=variants.runs[field.order[0]].name if field.order else None,
        verdict="",
        not_distinguishable=[one.name for one in standings[1:] if one.place in ("tied", "not distinguishable")],
        cases_in_common=field.in_common,
        pairs_tested=field.tests,
        pareto_by=pareto_by,
        variants=standings,
        not_begun=variants.not_begun,
    )
    board.verdict = verdict_of(board)
    return board


class _Field:
    """The runs that can be ranked, in their order, and every pair of them compared, case by case."""

    def __init__(self, runs: Sequence[RunCases], *, with_edited: bool) -> None:
        self.runs = runs
        fullest = max(len(run.ids) for run in runs)
        able = [
            number
            for number, run in enumerate(runs)
            if len(run.ids) and len(run.ids) >= _ENOUGH * fullest and _has_verdicts(run)
        ]
        common = reduce(np.intersect1d, (runs[number].ids for number in able)) if able else np.empty(0)
        self.in_common = len(common)
        self.rates = {number: _rate(runs[number], common) for number in able} if self.in_common else {}
        # Of equally good ones the cheaper, then the one that was named first.
        self.order = sorted(self.rates, key=lambda number: (-self.rates[number], _cost(runs[number]), number))
        self._with_best: dict[int, Values] = {}
        self.notes: dict[int, list[str]] = {}
        p_values = {}
        for one, other in self._pairs():
            pairs = Pairs(runs[one], runs[other], with_edited=with_edited)
            values = pairs.pass_rates_all()
            if one == self.order[0]:
                self._with_best[other], self.notes[other] = values, list(_differences(pairs))
            # Where no case differs nothing can be shown: these are not counted.
            if other in self.rates and np.any(values.differences):
                p_values[one, other] = _p(values)
        self.tests = len(p_values)
        self._adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Every pair of ranked runs, as any of them might have come out best; and the best with those not ranked."""
        yield from combinations(self.order, 2)
        for number in range(len(self.runs)):
            if self.order and number not in self.rates:
                yield self.order[0], number

    def rank(self, number: int) -> int | None:
        """From 1, the same for equally good ones; None of a run that is not ranked."""
        own = self.rates.get(number)
        return None if own is None else 1 + sum(rate > own + _EQUAL for rate in self.rates.values())

    def against_best(self, number: int) -> AgainstBest | None:
        """A run compared with the best one; None of itself, and where they share no case."""
        if not self.order or number == self.order[0]:
            return None
        best = self.order[0]
        values = self._with_best[number]
        change = change_of(values)
        if change is None:
            return None
        change.p_adjusted = self._adjusted.get((best, number), 1.0)
        change.outcome = shown_outcome(change.difference, change.p, change.p_adjusted)
        return AgainstBest(change=change, cases_needed=self._needed(values, change))

    def _needed(self, values: Values, change: Change) -> int | None:
        if change.outcome != "no difference" or change.difference >= 0:
            return None
        return cases_needed(-values.differences, 0.0, values.groups, alpha=SIGNIFICANT / 2 / max(self.tests, 1))


def _has_verdicts(run: RunCases) -> bool:
    """Whether anything says how good a run is: a verdict, or that it brought errors alone."""
    return bool(run.tried.sum()) or int(run.errors.sum()) == int(run.records.sum())


def _rate(run: RunCases, ids: Floats) -> float:
    """The mean over these cases of the share of their records that passed."""
    chosen = np.isin(run.ids, ids, assume_unique=True)
    return float(np.mean(run.passed[chosen] / run.records[chosen]))


def _p(values: Values) -> float:
    return paired_mean(values.differences, values.groups).p_value(0.0)


def _cost(run: RunCases) -> float:
    cost = cost_per_case(run.metrics)
    return math.inf if cost is None else cost


def cost_per_case(metrics: Metrics) -> float | None:
    """What a case costs: those whose answer came from the cache cost nothing, and say nothing."""
    asked = metrics.n - metrics.cached
    return None if metrics.cost is None or asked <= 0 else metrics.cost / asked


def _standing(variant: VariantRun, field: _Field, number: int) -> Standing:
    run = field.runs[number]
    metrics = run.metrics
    against = field.against_best(number)
    latency = metrics.latency.get(_LATENCY)
    per_case = cost_per_case(metrics)
    passed_share = metrics.passed / metrics.n if metrics.n else 0.0
    return Standing(
        name=variant.name,
        run=str(variant.run),
        axes=variant.axes,
        suite=metrics.suite,
        model_id=metrics.model_id,
        complete=metrics.complete,
        n=metrics.n,
        planned=metrics.counts.planned,
        cases=len(run.ids),
        trials=run.trials,
        rank=field.rank(number),
        place=_place(field, number, against),
        against_best=against,
        pass_rate=metrics.pass_rate,
        pass_rate_ci95=metrics.pass_rate_ci95,
        pass_rate_all=metrics.pass_rate_all,
        pass_rate_all_ci95=metrics.pass_rate_all_ci95,
        pass_rate_corrected=metrics.pass_rate_corrected,
        pass_rate_corrected_ci95=metrics.pass_rate_corrected_ci95,
        passed=metrics.passed,
        scored=metrics.scored,
        errors=metrics.counts.error,
        error_rate=metrics.error_rate,
        cost=metrics.cost,
        cost_per_case=per_case,
        cost_per_passed_case=None if per_case is None or not passed_share else per_case / passed_share,
        latency_p50=None if latency is None or latency.p50.value is None else latency.p50,
        latency_p95=None if latency is None or latency.p95.value is None else latency.p95,
        tokens_input=metrics.stats.get("num_tokens_input-average"),
        tokens_output=metrics.stats.get("num_tokens_output-average"),
        pareto=False,
        uncalibrated=uncalibrated(metrics),
        notes=[*_notes(field, number), *field.notes.get(number, [])],
    )


def _place(field: _Field, number: int, against: AgainstBest | None) -> Place:
    if number not in field.order:
        return "not ranked"
    leaders = leading(field.rates)
    if number in leaders:
        return "best" if len(leaders) == 1 else "tied"
    if against is None or against.change.outcome == "no difference":
        return "not distinguishable"
    return "worse" if against.change.outcome == "worse" else "better"


def _notes(field: _Field, number: int) -> Iterator[str]:
    run = field.runs[number]
    metrics = run.metrics
    if not metrics.complete:
        yield f"not complete: {metrics.n:,} of {metrics.counts.planned:,} done"
    if number not in field.order:
        yield "not ranked: " + ("too few of the cases are done" if _has_verdicts(run) else "no case has a verdict")
    if metrics.scoring_errors:
        yield f"a scorer failed on {metrics.scoring_errors:,} of {counted(metrics.counts.ok, 'answer')}"
    if metrics.unscored:
        yield f"{counted(metrics.unscored, 'answer')} without a verdict count as not passed"
    advisory = [name for name, score in metrics.scores.items() if score.advisory]
    if advisory:
        yield f"{', '.join(advisory)}: advisory, as the judge is not calibrated: it decides nothing"
    if metrics.correction:
        rate = metrics.pass_rate_corrected
        yield f"corrected pass rate{'' if rate is None else f' {rate:.1%}'}: {correction_note(metrics.correction)}"
    if metrics.cached:
        yield f"{metrics.cached:,} of {metrics.n:,} answers came from the cache: times and costs are of the others"
    if metrics.cost is not None and (
        metrics.cost_unknown or metrics.cost_unknown_errors or metrics.cost_unknown_judges
    ):
        yield "the cost of some calls is not known: it is at least this"
    if metrics.cost_estimated:
        yield f"the cost is an estimate: {counted(metrics.cost_estimated, 'answer')} had no token counts"
    client = metrics.client
    if client and client.bottleneck:
        yield f"the client was the bottleneck ({client.reason or 'it had no time to spare'}): times say little"


def _differences(pairs: Pairs) -> Iterator[str]:
    """What makes a variant less comparable with the best one."""
    best, other = pairs.baseline, pairs.other
    if best.manifest is not None and other.manifest is not None:
        if best.manifest.suite != other.manifest.suite:
            yield f"another suite than the best: {other.manifest.suite}"
        if best.manifest.scorers != other.manifest.scorers:
            yield "scored by other scorers than the best"
        elif pairs.graded_otherwise and len(pairs) == pairs.shared:
            yield f"{counted(pairs.graded_otherwise, 'case')} expected another answer than with the best"
    if len(pairs) < pairs.shared:
        yield f"{len(pairs.edited):,} of {pairs.shared:,} cases were edited in between and are left out"
    if pairs.shared < max(len(best.ids), len(other.ids)):
        yield f"compared on the {counted(pairs.shared, 'case')} that it shares with the best"


def _mark_front(ranked: Sequence[Standing]) -> list[str]:
    """Mark the variants that no other one beats or equals in every respect; in which respects that is."""
    respects = {
        "pass rate": [None if one.pass_rate_all is None else -one.pass_rate_all for one in ranked],
        "cost": [one.cost_per_case for one in ranked],
        "latency": [None if one.latency_p50 is None else one.latency_p50.value for one in ranked],
    }
    known = {name: values for name, values in respects.items() if None not in values}
    if not ranked or len(known) < 2:
        return []
    points = np.array([*known.values()], dtype=np.float64).T
    for one, is_on in zip(ranked, pareto_front(points), strict=True):
        one.pareto = is_on
    return list(known)


def pareto_front(points: Floats) -> list[bool]:
    """Of each point, whether no other is at most as high in every coordinate and lower in one: lower is better."""
    at_most = (points[:, None, :] <= points[None, :, :]).all(axis=2)
    lower = (points[:, None, :] < points[None, :, :]).any(axis=2)
    beaten = np.any(at_most & lower, axis=0)
    return [not one for one in beaten]


_MAX_NAMED = 6


def verdict_of(board: Leaderboard) -> str:
    """What the leaderboard shows, in a sentence or two."""
    ranked = [one for one in board.variants if one.rank is not None]
    if not ranked:
        return "Nothing can be ranked: no case has a verdict, or the variants share none"
    best = ranked[0]
    leaders = [one.name for one in ranked if one.place in ("best", "tied")]
    rate = f"{best.pass_rate_all or 0.0:.1%}"
    if len(ranked) == 1:
        return f"{best.name} passed {rate}"
    if not any(one.pass_rate_all for one in ranked):
        return "No variant passed any case"
    it = "it" if len(leaders) == 1 else "them"
    first = f"{named(leaders)} {passed_words(leaders)}: {rate}"
    places: Mapping[str, list[str]] = {
        name: [one.name for one in ranked if one.place == name] for name in ("worse", "not distinguishable", "better")
    }
    if len(leaders) == len(ranked):
        return first
    if not places["worse"] and not places["better"]:
        return f"No variant is shown to be better than another: {first}, and {named(places['not distinguishable'])}" + (
            f" cannot be told from {it} by {counted(board.cases_in_common, 'case')}"
        )
    parts = [first]
    if places["not distinguishable"]:
        parts.append(f"{named(places['not distinguishable'])} cannot be told from {it}")
    if places["better"]:
        parts.append(f"{named(places['better'])} passed more of the cases that they share")
    if places["worse"]:
        parts.append(f"{named(places['worse'])} {'is' if len(places['worse']) == 1 else 'are'} shown to be worse")
    return "; ".join(parts)


def leading(rates: Mapping[_Name, float]) -> list[_Name]:
    """Those with the highest pass rate, in their order: one, or several that are tied."""
    most = max(rates.values(), default=0.0)
    return [name for name, rate in rates.items() if rate > most - _EQUAL]


def passed_words(leaders: Sequence[str]) -> str:
    """What is said of the variants with the highest pass rate: only one alone has passed most."""
    return "passed most" if len(leaders) == 1 else "passed equally many"


def named(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and 7 more`."""
    shown = list(names)
    if len(shown) > _MAX_NAMED:
        shown = [*shown[: _MAX_NAMED - 1], f"{len(names) - _MAX_NAMED + 1:,} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
