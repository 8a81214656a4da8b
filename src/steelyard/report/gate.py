"""Whether a run is good enough: its rules, one by one, and how far it may fall behind a baseline."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET

from steelyard.errors import ConfigurationError, suggestion
from steelyard.journal.files import RunState, run_state
from steelyard.journal.manifest import read_manifest
from steelyard.report.compare.compare import notes, ratio_of_times
from steelyard.report.compare.comparison import Ratio, signed
from steelyard.report.compare.pairs import Pairs, RunCases, Values
from steelyard.report.junit import attribute, content
from steelyard.report.markdown import code, markdown_table, words
from steelyard.run.analysis import add_slices
from steelyard.run.config import Gate
from steelyard.run.matrix import is_matrix, read_matrix
from steelyard.run.result import Result
from steelyard.stats.figures import SECONDS, nearest_figure
from steelyard.stats.formatting import counted, safe_text
from steelyard.stats.metrics import (
    Metrics,
    figure_of,
    figures,
    fixed_figures,
    percentile_of,
    slice_of,
    uncalibrated,
)
from steelyard.stats.paired import PairedDifference, non_inferiority, paired_difference
from steelyard.stats.rules import COMPARISONS, Rule, is_unit, read_rule, show, show_distinctly, unit_problem

_OF_A_MEAN = ("mean", "mean.ci_low", "mean.ci_high", "ci_low", "ci_high")
_CORRECTED = ("pass_rate_corrected", "pass_rate_corrected.ci_low")
_PRICES = "give the suite `prices`, or pip install 'steelyard[prices]' for a list of public ones"
GATE_VERSION = 1


class CheckedRule(msgspec.Struct, kw_only=True):
    """What became of a rule."""

    rule: str
    ok: bool
    value: float | None
    reason: str


WAIVERS = {
    "incomplete": "a run that is not finished",
    "client-bottleneck": "times although the client was late",
    "scoring-errors": "answers that could not be scored",
    "truncated": "answers that were cut off at the limit of tokens",
    "uncalibrated-judge": "a judge that was not compared with people's labels",
}
"""What would otherwise break a gate, by the name that `--allow` and a suite's `gate.allow` call it."""


def parse_waivers(names: Iterable[str]) -> frozenset[str]:
    """The conditions that may pass; ConfigurationError for a name that is none."""
    found = frozenset(names)
    for name in sorted(found - WAIVERS.keys()):
        raise ConfigurationError(f"{name!r} cannot be allowed; {suggestion(name, WAIVERS)}")
    return found


def parse_rule(text: str) -> Rule:
    """A rule as it is written: a name, one of < <= > >= == !=, and a number, with s, ms or % where that fits."""
    rule = read_rule(text)
    if rule is None or not is_unit(rule.unit):
        raise ConfigurationError(f"a rule is a metric, one of {' '.join(COMPARISONS)}, and a number, got {text!r}")
    if (problem := _nonsense(rule)) is not None:
        raise ConfigurationError(f"{text!r}: {problem}")
    return rule


def refuse_misspelt(rule: Rule) -> None:
    """ConfigurationError for a figure that no run could have."""
    if figure_of(rule.name) is None:
        hint = _hint(rule.name, fixed_figures())
        raise ConfigurationError(f"rule {rule.text!r}: no run has a metric {rule.name!r}; {hint}", topic="rule")


def check_gate(gate: Gate) -> None:
    """Refuse a rule or a waiver of a suite's `gate` that no run could be checked against, naming its place."""
    for number, rule in enumerate(gate.rules):
        try:
            refuse_misspelt(parse_rule(rule))
        except ConfigurationError as error:
            raise ConfigurationError(f"gate.rules[{number}]: {error}") from error
    try:
        parse_waivers(gate.allow)
    except ConfigurationError as error:
        raise ConfigurationError(f"gate.allow: {error}") from error


def _nonsense(rule: Rule) -> str | None:
    """Why no figure could be checked against the rule, whatever the run; None where one could."""
    if (
        slice_of(rule.name) is None
        and not rule.name.startswith(("score.", "trials.score."))
        and any(sign in rule.name for sign in COMPARISONS)
    ):
        return "that is more than one rule: give each for itself"
    problem = unit_problem(rule)
    if problem is not None and rule.unit in SECONDS and (match := nearest_figure(rule.name, ())) is not None:
        return f"{problem}; did you mean {match!r}?"
    return problem


def check_rule(
    rule: Rule, metrics: Metrics, known: Mapping[str, float | None], allowed: Collection[str] = ()
) -> CheckedRule:
    """Whether the rule is kept, and why not in words; ConfigurationError for a name that no figure has."""
    value = known[rule.name] if rule.name in known else _absent(rule, metrics, known)
    _refuse_share_above_1(rule, metrics)
    reason = _not_usable(rule, value, metrics, allowed)
    if reason is None:
        assert value is not None
        found = f"is {show_distinctly(value, rule)}{_of_how_many(rule, metrics)}"
        if rule.of_speed and "client-bottleneck" not in allowed and bottleneck(metrics) is not None:
            found += " although the client was late, which can only add to it"
        return CheckedRule(rule=rule.text, ok=rule.holds(value), value=value, reason=found)
    return CheckedRule(rule=rule.text, ok=False, value=value, reason=reason)


def _of_how_many(rule: Rule, metrics: Metrics) -> str:
    """Of how many cases the figure of a slice is; that they are few, where they are."""
    named = slice_of(rule.name)
    found = [one for one in metrics.slices or () if named is not None and (one.key, one.value) == named[1:]]
    few = ", few to tell by" if found and found[0].small else ""
    return f" ({counted(found[0].cases, 'case')}{few})" if found else ""


def _refuse_share_above_1(rule: Rule, metrics: Metrics) -> None:
    """Refuse a limit that no mean of this score can have: only a measurement's may be above 1."""
    for name, score in metrics.scores.items():
        if rule.limit > 1 and score.max is UNSET and rule.name in (f"score.{name}.{part}" for part in _OF_A_MEAN):
            meant = "" if rule.unit else f"; did you mean {rule.limit:g}%?"
            raise ConfigurationError(f"{rule.text!r}: that is a share above 1{meant}")


def check_caveats(
    metrics: Metrics, rules: Sequence[Rule], allowed: Collection[str] = (), *, of_quality: bool = False
) -> tuple[list[CheckedRule], list[str]]:
    """What makes the figures of a run say less than they seem to: as broken rules, and as warnings.

    It breaks a gate that is about how good the answers are: by a rule, or (`of_quality`) by a baseline. A rule on the
    very figure decides in its place.
    """
    matters = of_quality or any(rule.of_quality for rule in rules)
    named = {rule.name for rule in rules}
    checks, warnings = [], []
    for name, title, reason, deciding in _caveats(metrics):
        if named.intersection(deciding):
            continue
        if name in allowed or not matters:
            warnings.append(f"{title}: {reason}")
        if matters:
            note = ", which is allowed" if name in allowed else f" (--allow {name} lets that pass)"
            checks.append(CheckedRule(rule=title, ok=name in allowed, value=None, reason=reason + note))
    return checks, warnings


def _caveats(metrics: Metrics) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Each condition that a run is in: its waiver, a title, what is so, and the figures whose rules decide instead."""
    ok = metrics.counts.ok
    if metrics.scoring_errors:
        reason = f"a scorer failed on {metrics.scoring_errors:,} of {counted(ok, 'answer')}"
        if metrics.unscored:
            reason += f"; no pass rate counts the {metrics.unscored:,} without a verdict"
        yield "scoring-errors", "scoring errors", reason, ("scoring_errors", "failure_rate", "unscored")
    if metrics.truncated:
        reason = f"{metrics.truncated:,} of {counted(ok, 'answer')} were cut off at the limit of tokens"
        yield "truncated", "truncated answers", reason, ("truncated", "truncated_rate")
    for sentence in uncalibrated(metrics):
        # A rate that labels correct has the judges' errors taken out, calibrated or not.
        yield "uncalibrated-judge", "uncalibrated judge", sentence, _CORRECTED


def bottleneck(metrics: Metrics) -> str | None:
    """Why the times of a run say nothing of the target: its client was the bottleneck. None when it was not."""
    client = metrics.client
    if not client or not client.bottleneck:
        return None
    return f"the client was the bottleneck: {client.reason or 'it had no time to spare'}"


def gated_keys(rules: Iterable[Rule]) -> list[str]:
    """The metadata keys of the slices that rules name."""
    named = [slice_of(rule.name) for rule in rules]
    return list(dict.fromkeys(one[1] for one in named if one is not None))


def _refuse_slice(rule: Rule, metrics: Metrics, known: Iterable[str]) -> None:
    """ConfigurationError for a slice that the run does not have, or a figure that no slice has."""
    named = slice_of(rule.name)
    if named is None:
        return
    figure, key, value = named
    there = [one.value for one in metrics.slices or () if one.key == key]
    if not there:
        problem = f"the run has no slices by {key!r}: add it to `by`"
    elif value not in there:
        problem = f"no case has {key}={value}; {suggestion(value, there)}"
    else:
        problem = f"a slice has no {figure!r}; {_hint(rule.name, [name for name in known if slice_of(name)])}"
    raise ConfigurationError(f"rule {rule.text!r}: {problem}")


def _absent(rule: Rule, metrics: Metrics, known: Mapping[str, float | None]) -> float:
    _refuse_slice(rule, metrics, known)
    if rule.name.startswith(("errors.", "error_kinds.")):
        return 0.0  # errors of a kind that did not come up
    if rule.name.startswith(tuple(f"score.{name}.share." for name, score in metrics.scores.items() if score.labels)):
        return 0.0  # a label that no answer got
    hint = _hint(rule.name, known)
    raise ConfigurationError(f"rule {rule.text!r}: no metric of this run is named {rule.name!r}; {hint}", topic="rule")


def _hint(name: str, known: Iterable[str]) -> str:
    match = nearest_figure(name, known)
    return f"did you mean {match!r}?" if match else "steelyard report RUN -f json shows them all"


def _not_usable(rule: Rule, value: float | None, metrics: Metrics, allowed: Collection[str]) -> str | None:
    for name, score in metrics.scores.items():
        if score.advisory and rule.name.startswith((f"score.{name}.", f"trials.score.{name}.")):
            return "is from a judge that is not calibrated: advisory, it cannot pass a gate"
    if value is None:
        return f"is not known: {_why_unknown(rule, metrics)}"
    late = bottleneck(metrics) if rule.of_speed and "client-bottleneck" not in allowed else None
    if late is not None and not (rule.holds_though_late and rule.holds(value)):
        return f"is {show(value, rule.unit)}, which says nothing of the target: {late}"
    found = percentile_of(metrics, rule.name)
    if found is not None and found.at_least and rule.holds(value) and not rule.operator.startswith(">"):
        return f"is at least {show(value, rule.unit)}: it lies among calls that timed out"
    if rule.of_cost and not rule.operator.startswith(">") and (missing := _without_cost(metrics)):
        return f"is {show(value, rule.unit)} or more: the cost of {missing} is not known"
    return None


def _why_unknown(rule: Rule, metrics: Metrics) -> str:
    metric = (metrics.run_metrics or {}).get(rule.name.removeprefix("metric."))
    if rule.name.startswith("metric.") and metric is not None and metric.error:
        return f"the metric failed: {metric.error}"
    if rule.name.startswith("pass_rate_corrected"):
        if metrics.correction and metrics.correction.why_not:
            return metrics.correction.why_not
        return "no labels correct it; steelyard calibrate RUN --audit 20 draws answers to label"
    if not rule.of_cost or metrics.cost is not None:
        return "there was nothing to measure"
    return f"{metrics.cost_unknown_because or 'no call has a known cost'}; {_PRICES}"


def _without_cost(metrics: Metrics) -> str:
    """What is not in the cost of a run, and was paid for in all likelihood: calls that failed are mostly not billed."""
    answers, judges = metrics.cost_unknown, metrics.cost_unknown_judges
    missing = [counted(answers, "answer")] if answers else []
    return " and ".join([*missing, f"{counted(judges, 'call')} of judges"] if judges else missing)


class Gated(msgspec.Struct, kw_only=True):
    """What became of each rule of a gate."""

    v: int = GATE_VERSION
    run: str
    baseline: str | None
    suite: str
    model_id: str | None
    passed: bool
    checks: list[CheckedRule]
    notes: list[str]
    """What else is different between the run and its baseline."""
    warnings: list[str] = []
    """What must be known of the figures and breaks nothing here: scoring errors, truncated answers, judges."""

    @property
    def broken(self) -> list[CheckedRule]:
        return [check for check in self.checks if not check.ok]

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return gate_lines(self.checks, mark=True)


def hold_to(
    run: Path | Metrics,
    rules: Sequence[Rule],
    *,
    baseline: Path | None = None,
    allowance: Allowance | None = None,
    allowed: Collection[str] = (),
) -> Gated:
    """The run, or its figures alone, checked against every rule.

    A name that no figure has is a ConfigurationError before any is judged. `allowed` are the conditions
    (`rules.WAIVERS`) that may pass.
    """
    cases = None if baseline is None or isinstance(run, Metrics) else RunCases(run)
    metrics = run if isinstance(run, Metrics) else cases.metrics if cases else Result.load(run).typed_metrics
    if not isinstance(run, Metrics):
        add_slices(metrics, run, read_manifest(run), gated_keys(rules))
    known = figures(metrics)
    checks = [_complete(metrics, allowed)]
    checks += [check_rule(rule, metrics, known, allowed) for rule in rules]
    differences: list[str] = []
    of_quality = False
    if baseline is not None and cases is not None:
        more, pairs = check_regressions(RunCases(baseline), cases, allowance or Allowance(), allowed)
        checks += more
        of_quality = any(not check.rule.startswith(("error_rate ", "time_")) for check in more)
        differences = [*notes(pairs), *_unpaired(pairs)]
    caveats, warnings = check_caveats(metrics, rules, allowed, of_quality=of_quality)
    checks += caveats
    return Gated(
        run="" if isinstance(run, Metrics) else str(run),
        baseline=None if baseline is None else str(baseline),
        suite=metrics.suite,
        model_id=metrics.model_id,
        passed=all(check.ok for check in checks),
        checks=checks,
        notes=differences,
        warnings=warnings,
    )


def hold_matrix_to(
    folder: Path,
    rules: Sequence[Rule],
    *,
    baseline: Path | None = None,
    allowance: Allowance | None = None,
    allowed: Collection[str] = (),
) -> Gated:
    """Every variant of a matrix checked against every rule; each check begins with the variant's name.

    A baseline that is a matrix has one variant for each of the same name; any other is the baseline of all.
    """
    matrix = read_matrix(folder)
    gated = Gated(
        run=str(folder),
        baseline=None if baseline is None else str(baseline),
        suite=matrix.suite,
        model_id=None,
        passed=False,
        checks=[],
        notes=[],
    )
    baselines = None if baseline is None or not is_matrix(baseline) else read_matrix(baseline).runs(baseline)
    for name, run in matrix.runs(folder).items():
        if run_state(run) is RunState.FRESH:
            kept = "incomplete" in allowed
            found = [
                CheckedRule(
                    rule="the run", ok=kept, value=None, reason="has not begun (--allow incomplete lets that pass)"
                )
            ]
            gated.checks += _of_variant(name, found)
            continue
        other = baseline if baselines is None else baselines.get(name)
        if baselines is not None and other is None:
            gated.notes.append(f"{name}: the baseline has no variant of this name")
        one = hold_to(run, rules, baseline=other, allowance=allowance, allowed=allowed)
        gated.checks += _of_variant(name, one.checks)
        gated.notes += [f"{name}: {note}" for note in one.notes]
        gated.warnings += [f"{name}: {warning}" for warning in one.warnings]
    gated.passed = bool(gated.checks) and not gated.broken
    return gated


def _of_variant(name: str, checks: Iterable[CheckedRule]) -> list[CheckedRule]:
    return [msgspec.structs.replace(check, rule=f"{name}: {check.rule}") for check in checks]


def _unpaired(pairs: Pairs) -> Iterator[str]:
    """What the baseline cannot speak of, and what it speaks of in vain."""
    if len(pairs.only_a):
        yield f"{len(pairs.only_a):,} of {len(pairs.baseline.ids):,} cases of the baseline are not in this run"
    if len(pairs.only_b):
        yield f"{len(pairs.only_b):,} of {len(pairs.other.ids):,} cases are not in the baseline"


def _complete(metrics: Metrics, allowed: Collection[str]) -> CheckedRule:
    if metrics.complete:
        return CheckedRule(rule="the run", ok=True, value=None, reason="is complete")
    reason = f"is not complete: {metrics.n:,} of {metrics.counts.planned:,} done"
    ok = "incomplete" in allowed
    note = ", which is allowed" if ok else " (--allow incomplete lets that pass)"
    return CheckedRule(rule="the run", ok=ok, value=None, reason=reason + note)


_MAX_CHARS = 400


def gate_lines(checks: list[CheckedRule], *, mark: bool) -> str:
    """A line for each rule, safe for a terminal; `mark` says for each whether it is kept."""
    signs = {True: "ok      ", False: "broken  "} if mark else {True: "", False: ""}
    return "\n".join(f"{signs[check.ok]}{safe_text(check.rule)}: {safe_text(check.reason)}" for check in checks)


def gate_markdown(gated: Gated) -> str:
    """The verdict and a table of the rules; what else is different from the baseline is folded."""
    broken = len(gated.broken)
    verdict = "✅ gate passed" if gated.passed else f"❌ gate failed: {broken:,} of {len(gated.checks):,} broken"
    named = " on ".join(code(name, 60) for name in (gated.suite, gated.model_id) if name)
    against = "" if gated.baseline is None else f", against {code(gated.baseline)}"
    ordered = [*gated.broken, *(check for check in gated.checks if check.ok)]
    checks = markdown_table(
        ["", "rule", "found"],
        (["✅" if check.ok else "❌", code(check.rule), code(check.reason, _MAX_CHARS)] for check in ordered),
    )
    parts = [f"### {verdict}", f"{named}: {code(gated.run)}{against}", checks]
    parts += [f"> [!WARNING]\n> {words(warning)}" for warning in gated.warnings]
    if gated.notes:
        listed = "\n".join(f"- {code(note, _MAX_CHARS)}" for note in gated.notes)
        parts.append(f"<details><summary>What else is different</summary>\n\n{listed}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def gate_junit(gated: Gated, timestamp: str) -> str:
    """A test suite with a test case for each rule; `timestamp` is when, in UTC to the second."""
    name = attribute(f"steelyard gate: {gated.suite}")
    head = (
        f'<testsuite name={name} package={name} id="0" timestamp={attribute(timestamp)} hostname="localhost" '
        f'tests="{len(gated.checks)}" failures="{len(gated.broken)}" errors="0" skipped="0" time="0">'
    )
    cases = "\n".join(_case(check, gated.suite) for check in gated.checks)
    properties = "".join(
        f"\n      <property name={attribute(key)} value={attribute(value)}/>"
        for key, value in (("run", gated.run), ("baseline", gated.baseline), ("model_id", gated.model_id))
        if value is not None
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>\n'
        f"  {head}\n    <properties>{properties}\n    </properties>\n{cases}\n"
        "    <system-out/>\n    <system-err/>\n  </testsuite>\n</testsuites>\n"
    )


def _case(check: CheckedRule, suite: str) -> str:
    opening = f'    <testcase name={attribute(check.rule)} classname={attribute(f"gate.{suite}")} time="0"'
    if check.ok:
        return f"{opening}/>"
    text = f"{check.rule}: {check.reason}"
    return (
        f'{opening}><failure type="broken rule" message={attribute(check.reason)}>{content(text)}</failure></testcase>'
    )


_DEFAULT = {"pass_rate": 0.0, "error_rate": 0.0}
_ALLOWED = re.compile(r"\s*(?P<name>.+?)\s*=\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<percent>%)?\s*", re.S)


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """By how much a run may be worse than the baseline."""

    drops: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Of a rate or a mean score, as a difference; of the two rates 0 where nothing is said."""
    slowdown: float | None = None
    """Of the time to the last token, as a ratio."""

    def __post_init__(self) -> None:
        if self.slowdown is not None and not 1 <= self.slowdown < math.inf:
            raise ConfigurationError(f"the largest slowdown must be a ratio of 1 or more, got {self.slowdown:g}")


def parse_drop(text: str) -> tuple[str, float]:
    """`pass_rate=0.02` or `score.exact=2%`: a metric and by how much it may drop."""
    found = _ALLOWED.fullmatch(text)
    drop = math.nan if found is None else float(found["number"]) / (100 if found["percent"] else 1)
    if found is None or not 0 <= drop < 1:
        raise ConfigurationError(f"a largest regression is a metric, = and a drop within 0..1, got {text!r}")
    return re.sub(r"^scores?\.(.+?)(\.mean)?$", r"score.\1", found["name"], flags=re.S), drop


def check_regressions(
    baseline: RunCases, run: RunCases, allowance: Allowance, allowed: Collection[str] = ()
) -> tuple[list[CheckedRule], Pairs]:
    """Each metric that may not get worse, checked over the cases that both runs have; and these."""
    pairs = Pairs(baseline, run)
    if not len(pairs):
        raise ConfigurationError(f"no case of {run.run} is in the baseline {baseline.run}: nothing can be paired")
    drops = {**_DEFAULT, **allowance.drops}
    if "pass_rate" not in allowance.drops and _never_scored(baseline) and _never_scored(run):
        del drops["pass_rate"]
    checked = [_check_drop(pairs, name, drop) for name, drop in drops.items()]
    if allowance.slowdown is not None:
        checked.append(_check_slowdown(pairs, allowance.slowdown, allowed))
    return checked, pairs


def _never_scored(cases: RunCases) -> bool:
    """Whether nobody wanted verdicts of the run, as in a load test: there are answers, and no scorer decided."""
    metrics = cases.metrics
    return bool(metrics.counts.ok) and not (metrics.scored or metrics.scoring_errors)


def _check_drop(pairs: Pairs, name: str, margin: float) -> CheckedRule:
    values = _values(pairs, name)
    by = f" by more than {margin:g}" if margin else ""
    rule = f"{name} not worse than {_label(pairs.baseline.run)}{by}"
    change = paired_difference(values.differences, values.groups)
    if change is None:
        return CheckedRule(rule=rule, ok=False, value=None, reason="is not known: no case has it in both runs")
    if _is_advisory(pairs.other.metrics, name):
        reason = "is from a judge that is not calibrated: advisory, it cannot pass a gate"
        return CheckedRule(rule=rule, ok=False, value=change.difference, reason=reason)
    figure = figure_of(name)
    sign = -1.0 if figure is not None and figure.better == "lower" else 1.0
    problem = _shown_worse(change, sign) if not margin else _not_ruled_out(values, margin, sign)
    grouped = "" if change.groups == change.cases else f" in {change.groups:,} groups"
    reason = (
        f"is {float(values.run.mean()):.4g} against {float(values.baseline.mean()):.4g} on {change.cases:,} cases"
        f"{grouped}: {signed(change.difference, 3)}, 95 % CI {' – '.join(signed(end, 3) for end in change.ci95)}"
    )
    return CheckedRule(rule=rule, ok=problem is None, value=change.difference, reason=reason + (problem or ""))


def _is_advisory(metrics: Metrics, name: str) -> bool:
    """Whether a figure is the score of a judge that is not calibrated."""
    score = metrics.scores.get(name.removeprefix("score.")) if name.startswith("score.") else None
    return score is not None and bool(score.advisory)


def _values(pairs: Pairs, name: str) -> Values:
    if name == "pass_rate":
        return pairs.pass_rates()
    if name == "error_rate":
        return pairs.error_rates()
    score = name.removeprefix("score.")
    names = pairs.baseline.score_counts().keys() & pairs.other.score_counts().keys()
    if not name.startswith("score.") or score not in names:
        known = ["pass_rate", "error_rate", *(f"score.{one}" for one in sorted(names))]
        raise ConfigurationError(f"{name!r} cannot be compared with the baseline; {suggestion(name, known)}")
    if pairs.measured(score)[0] is not None:
        raise ConfigurationError(f"{name} is a measurement, not a share: check it with a rule, {name}.mean<=…")
    return pairs.both(pairs.baseline.score(score), pairs.other.score(score))


def _shown_worse(change: PairedDifference, sign: float) -> str | None:
    """Whether the whole interval is on the wrong side."""
    low, high = change.ci95
    return ": it is worse" if (high < 0 if sign > 0 else low > 0) else None


def _not_ruled_out(values: Values, margin: float, sign: float) -> str | None:
    """Whether a drop of more than the margin is shown, or only cannot be ruled out, and what could."""
    found = non_inferiority(sign * values.differences, margin, values.groups)
    assert found is not None
    if found.outcome == "kept":
        return None
    if found.outcome == "broken":
        return f": it is worse by more than {margin:g}"
    could = ""
    if found.cases_needed is not None:
        like_these = "such cases" if values.differences.any() else "cases, none of which changes,"
        could = f"; about {found.cases_needed:,} {like_these} could"
    return f": a drop of more than {margin:g} cannot be ruled out{could}"


def _check_slowdown(pairs: Pairs, most: float, allowed: Collection[str]) -> CheckedRule:
    """The typical case's time to the last token against the baseline's."""
    rule = f"time_to_last_token not above {most:g} × {_label(pairs.baseline.run)}"
    ratio = ratio_of_times(pairs, "time_to_last_token")
    problem = _slow(ratio, most)
    for cases in (pairs.baseline, pairs.other):
        if "client-bottleneck" not in allowed and (why := bottleneck(cases.metrics)) is not None:
            problem = f", which says nothing of the target: in {_label(cases.run)} {why}"
    if ratio is None or ratio.ratio is None:
        return CheckedRule(rule=rule, ok=False, value=None, reason="is not known: no case has a time in both runs")
    interval = "" if ratio.ci95 is None else f", 95 % CI {ratio.ci95[0]:.3f} – {ratio.ci95[1]:.3f}"
    reason = f"is × {ratio.ratio:.3f} in the typical of {ratio.cases:,} cases{interval}"
    return CheckedRule(rule=rule, ok=problem is None, value=ratio.ratio, reason=reason + (problem or ""))


def _slow(ratio: Ratio | None, allowed: float) -> str | None:
    if ratio is None or ratio.ci95 is None:
        return ": too few cases to tell"
    low, high = ratio.ci95
    if low > allowed:
        return ": it is slower"
    if allowed > 1 and high > allowed:
        return f": × {allowed:g} cannot be ruled out"
    return None


def _label(run: Path) -> str:
    return run.name or str(run)
