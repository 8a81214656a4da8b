"""Rules on the figures of a run, such as `pass_rate>=0.8`: how they are read, and whether they are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from steelyard.errors import ConfigurationError, nearest, suggestion
from steelyard.stats.formatting import counted
from steelyard.stats.metrics import Metrics, figure_of, fixed_figures, percentile_of, uncalibrated
from steelyard.stats.rules import COMPARISONS, Rule, is_unit, read_rule, show, show_distinctly, unit_problem
from steelyard.stats.spec import SECONDS, SHORT_NAMES

_CORRECTED = ("pass_rate_corrected", "pass_rate_corrected.ci_low")
_PRICES = "give the suite `prices`, or pip install 'steelyard[prices]' for a list of public ones"


class Checked(msgspec.Struct, kw_only=True):
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
        raise ConfigurationError(f"rule {rule.text!r}: no run has a metric {rule.name!r}; {hint}")


def _nonsense(rule: Rule) -> str | None:
    """Why no figure could be checked against the rule, whatever the run; None where one could."""
    if not rule.name.startswith(("score.", "trials.score.")) and any(sign in rule.name for sign in COMPARISONS):
        return "that is more than one rule: give each for itself"
    problem = unit_problem(rule)
    if problem is not None and rule.unit in SECONDS and (match := nearest(rule.name, SHORT_NAMES)) is not None:
        return f"{problem}; did you mean {match!r}?"
    return problem


def check_rule(
    rule: Rule, metrics: Metrics, known: Mapping[str, float | None], allowed: Collection[str] = ()
) -> Checked:
    """Whether the rule is kept, and why not in words; ConfigurationError for a name that no figure has."""
    value = known[rule.name] if rule.name in known else _absent(rule, known)
    reason = _not_usable(rule, value, metrics, allowed)
    if reason is None:
        assert value is not None
        found = f"is {show_distinctly(value, rule)}"
        if rule.of_speed and "client-bottleneck" not in allowed and bottleneck(metrics) is not None:
            found += " although the client was late, which can only add to it"
        return Checked(rule=rule.text, ok=rule.holds(value), value=value, reason=found)
    return Checked(rule=rule.text, ok=False, value=value, reason=reason)


def check_conditions(
    metrics: Metrics, rules: Sequence[Rule], allowed: Collection[str] = (), *, of_quality: bool = False
) -> tuple[list[Checked], list[str]]:
    """What makes the figures of a run say less than they seem to: as broken rules, and as warnings.

    It breaks a gate that is about how good the answers are: by a rule, or (`of_quality`) by a baseline. A rule on the
    very figure decides in its place.
    """
    matters = of_quality or any(rule.of_quality for rule in rules)
    named = {rule.name for rule in rules}
    checks, warnings = [], []
    for name, title, reason, figures in _conditions(metrics):
        if named.intersection(figures):
            continue
        if name in allowed or not matters:
            warnings.append(f"{title}: {reason}")
        if matters:
            note = ", which is allowed" if name in allowed else f" (--allow {name} lets that pass)"
            checks.append(Checked(rule=title, ok=name in allowed, value=None, reason=reason + note))
    return checks, warnings


def _conditions(metrics: Metrics) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Each condition that a run is in: its waiver, a title, what is so, and the figures whose rules decide instead."""
    ok = metrics.counts.ok
    if metrics.scoring_errors:
        said = f"{metrics.scoring_errors:,} of {counted(ok, 'answer')} could not be scored, and are in no pass rate"
        yield "scoring-errors", "scoring errors", said, ("scoring_errors", "failure_rate", "unscored")
    if metrics.truncated:
        said = f"{metrics.truncated:,} of {counted(ok, 'answer')} were cut off at the limit of tokens"
        yield "truncated", "truncated answers", said, ("truncated", "truncated_rate")
    for sentence in uncalibrated(metrics):
        # A rate that labels correct has the judges' errors taken out, calibrated or not.
        yield "uncalibrated-judge", "uncalibrated judge", sentence, _CORRECTED


def bottleneck(metrics: Metrics) -> str | None:
    """Why the times of a run say nothing of the target: its client was the bottleneck. None when it was not."""
    client = metrics.client
    if not client or not client.bottleneck:
        return None
    return f"the client was the bottleneck: {client.reason or 'it had no time to spare'}"


def _absent(rule: Rule, known: Mapping[str, float | None]) -> float:
    if rule.name.startswith(("errors.", "error_kinds.")):
        return 0.0  # errors of a kind that did not come up
    hint = _hint(rule.name, known)
    raise ConfigurationError(f"rule {rule.text!r}: no metric of this run is named {rule.name!r}; {hint}")


def _hint(name: str, known: Iterable[str]) -> str:
    match = nearest(name, [*known, *SHORT_NAMES])
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
