"""Rules on the figures of a run, such as `pass_rate>=0.8`: how they are read, and whether they are kept."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import msgspec

from steelyard.errors import ConfigurationError, nearest
from steelyard.run.metrics import Errors, RunCounts, compose
from steelyard.stats.costs import Spending
from steelyard.stats.formatting import counted
from steelyard.stats.running import RunningStats
from steelyard.stats.scores import ScoreStats
from steelyard.stats.spec import PERCENT, SECONDS, SHORT_NAMES, full_name

_OPERATORS = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_UNITS = {**SECONDS, "%": PERCENT, "": Decimal(1)}
_RULE = re.compile(
    r"\s*(?P<name>.+?)\s*(?P<operator><=|>=|==|!=|<|>)\s*"
    r"(?P<number>[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>us|µs|ms|s|min|m|%)?\s*",
    re.S,
)
_NESTED = ("score", "trials", "errors", "error_kinds", "nodes", "client", "load")
_IN_SECONDS = re.compile(
    r"(^|\.)time_|^(p50_latency_s|active_seconds|client\.(lag_|seconds|stood_still))|load\.duration"
)
_OF_SPEED = re.compile(r"(^|\.)time_|^(p50_latency_s|requests_per_minute|output_tps|active_seconds)")
_A_SHARE = re.compile(
    r"(trials\.)?((pass|error|failure|failed_requests)_rate(_all)?|pass_(at|hat)_k\.\d+|spread"
    r"|score\..+\.(mean|pass_rate|std_dev|spread))(\.ci_(low|high))?|(trials\.)?score\..+\.ci_(low|high)",
    re.S,
)
_IN_PERCENT = re.compile(r"client\..*share")
"""Not within 0..1, though: two busy cores are 200 %."""
_PRICES = "give the suite `prices`, or pip install 'steelyard[prices]' for a list of public ones"


class Rule(msgspec.Struct, frozen=True):
    """A figure's name, how it is compared, and with what, in the figure's own unit."""

    text: str
    name: str
    operator: str
    limit: float
    unit: str = ""

    @property
    def of_speed(self) -> bool:
        """Whether it is about latency or throughput: figures that a busy client bends."""
        return bool(_OF_SPEED.search(self.name))

    @property
    def of_cost(self) -> bool:
        """Whether it is about money, and not about how many calls' cost is known."""
        return self.name.startswith("cost") and not self.name.startswith(("cost_unknown", "cost_estimated"))


class Checked(msgspec.Struct, kw_only=True):
    """What became of a rule."""

    rule: str
    ok: bool
    value: float | None
    reason: str


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """What is let pass that would otherwise break a gate."""

    incomplete: bool = False
    client_bottleneck: bool = False


def parse_rule(text: str) -> Rule:
    """A rule as it is written: a name, one of < <= > >= == !=, and a number, with s, ms or % where that fits."""
    found = _RULE.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"a rule is a metric, one of {' '.join(_OPERATORS)}, and a number, got {text!r}")
    name, unit = full_name(found["name"]) or re.sub(r"^scores\.", "score.", found["name"]), found["unit"] or ""
    rule = Rule(text.strip(), name, found["operator"], float(Decimal(found["number"]) * _UNITS[unit]), unit)
    if (problem := _nonsense(rule)) is not None:
        raise ConfigurationError(f"{text!r}: {problem}")
    return rule


def refuse_misspelt(rule: Rule) -> None:
    """ConfigurationError for a figure that no run could have; of nested ones only the first part is known before it."""
    known = usual_names()
    first = rule.name.split(".")[0]
    if first in {*_NESTED, *(name.split(".")[0] for name in known)} or first.startswith("time_"):
        return
    raise ConfigurationError(f"rule {rule.text!r}: no run has a metric {rule.name!r}; {_hint(rule.name, known)}")


def _nonsense(rule: Rule) -> str | None:
    """Why no figure could be held to the rule, whatever the run; None where one could."""
    share = bool(_A_SHARE.fullmatch(rule.name))
    if not rule.name.startswith(("score.", "trials.score.")) and any(sign in rule.name for sign in _OPERATORS):
        return "that is more than one rule: give each for itself"
    if rule.unit == "%" and not share and not _IN_PERCENT.fullmatch(rule.name):
        return f"{rule.name} is not a share that could be given in %"
    if rule.unit in SECONDS and not _IN_SECONDS.search(rule.name):
        match = nearest(rule.name, SHORT_NAMES)
        hint = f"; did you mean {match!r}?" if match else ""
        return f"{rule.name} is not a time that could be given in {rule.unit}{hint}"
    if share and rule.limit > 1:
        return "that is a share above 1" + ("" if rule.unit else f"; did you mean {rule.limit:g}%?")
    return None


def check_rule(rule: Rule, metrics: Mapping[str, Any], known: Mapping[str, float | None], leave: Leave) -> Checked:
    """Whether the rule is kept, and why not in words; ConfigurationError for a name that no figure has."""
    value = known[rule.name] if rule.name in known else _absent(rule, known)
    reason = _not_usable(rule, value, metrics, leave)
    if reason is None:
        assert value is not None
        ok = bool(_OPERATORS[rule.operator](value, rule.limit))
        return Checked(rule=rule.text, ok=ok, value=value, reason=f"is {_told_apart(value, rule)}")
    return Checked(rule=rule.text, ok=False, value=value, reason=reason)


def bottleneck(metrics: Mapping[str, Any]) -> str | None:
    """Why the times of a run say nothing of the target: its client was the bottleneck. None when it was not."""
    client = metrics.get("client") or {}
    if not client.get("bottleneck"):
        return None
    return f"the client was the bottleneck: {client.get('reason') or 'it had no time to spare'}"


def _absent(rule: Rule, known: Mapping[str, float | None]) -> float:
    if rule.name.startswith(("errors.", "error_kinds.")):
        return 0.0  # errors of a kind that did not come up
    hint = _hint(rule.name, known)
    raise ConfigurationError(f"rule {rule.text!r}: no metric of this run is named {rule.name!r}; {hint}")


def _hint(name: str, known: Iterable[str]) -> str:
    match = nearest(name, [*known, *SHORT_NAMES])
    return f"did you mean {match!r}?" if match else "steelyard report RUN -f json shows them all"


def _not_usable(rule: Rule, value: float | None, metrics: Mapping[str, Any], leave: Leave) -> str | None:
    for name, score in metrics["scores"].items():
        if score.get("advisory") and rule.name.startswith((f"score.{name}.", f"trials.score.{name}.")):
            return "is from a judge that is not calibrated: advisory, it cannot pass a gate"
    if value is None:
        return f"is not known: {_why_unknown(rule, metrics)}"
    if rule.of_speed and not leave.client_bottleneck and (why := bottleneck(metrics)) is not None:
        return f"is {_shown(value, rule.unit)}, which says nothing of the target: {why}"
    if rule.of_cost and not rule.operator.startswith(">") and (missing := _without_cost(metrics)):
        return f"is {_shown(value, rule.unit)} or more: the cost of {missing} is not known"
    return None


def _why_unknown(rule: Rule, metrics: Mapping[str, Any]) -> str:
    if not rule.of_cost or metrics.get("cost") is not None:
        return "there was nothing to measure"
    return f"{metrics.get('cost_unknown_because') or 'no call has a known cost'}; {_PRICES}"


def _without_cost(metrics: Mapping[str, Any]) -> str:
    """What is not in the cost of a run, and was paid for in all likelihood: calls that failed are mostly not billed."""
    answers, judges = metrics.get("cost_unknown"), metrics.get("cost_unknown_judges")
    missing = [counted(answers, "answer")] if answers else []
    return " and ".join([*missing, f"{counted(judges, 'call')} of judges"] if judges else missing)


def _told_apart(value: float, rule: Rule) -> str:
    """The value, with more digits where fewer would make it look like the limit."""
    shown = _shown(value, rule.unit)
    if value == rule.limit or shown != _shown(rule.limit, rule.unit):
        return shown
    return _with_unit(f"{value / float(_UNITS[rule.unit]):.12g}", rule.unit)


def _shown(value: float, unit: str) -> str:
    number = value / float(_UNITS[unit])
    text = f"{number:,.0f}" if float(number).is_integer() and abs(number) < 1e15 else f"{number:,.4g}"
    return _with_unit(text, unit)


def _with_unit(number: str, unit: str) -> str:
    return f"{number} {unit}" if unit not in ("", "%") else number + unit


FAILURE_RATE = "failure_rate"
"""The share of records without an answer, or whose scoring broke down: what a suite's `max_error_rate` limits."""

_NOT_FIGURES = (
    "v",
    "seed",
    "stopped",
    "target",
    "model_id",
    "currency",
    "cost_unknown_because",
    "error_examples",
    "error_kind_examples",
    "scores",
    "stats",
    "trials",
)
_OF_CALLS = ("parallelism", "peak_in_flight")
_TEXTS = ("reason", "dominates")
"""Within others: what is a text where it is there at all."""


def figures(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Every figure of a run by the name that a rule calls it; None for one that is not known."""
    found: dict[str, float | None] = {"cost": None}
    found.update(_flat("", {key: value for key, value in metrics.items() if key not in _NOT_FIGURES}))
    found.update(_flat("", metrics["stats"]))
    trials = metrics.get("trials") or {}
    found.update(_flat("trials.", {key: value for key, value in trials.items() if key != "scores"}))
    for name, score in metrics["scores"].items():
        found.update(_of_score(f"score.{name}.", score))
    for name, score in (trials.get("scores") or {}).items():
        found.update(_of_score(f"trials.score.{name}.", score))
    n = metrics["n"]
    found[FAILURE_RATE] = (metrics["counts"]["error"] + metrics["scoring_errors"]) / n if n else None
    return found


def usual_names() -> list[str]:
    """The names of figures that any run has, as far as they are known before there is one."""
    nothing = compose(
        about={},
        books=RunCounts(planned=0, ok=0, error=0, cancelled=0, not_started=0),
        stats=RunningStats(),
        scores=ScoreStats(),
        errors=Errors(),
        left_out=0,
        stopped=None,
        spending=Spending(),
    )
    return [*figures(nothing), *_OF_CALLS]


def _of_score(prefix: str, score: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    yield from _flat(prefix, score)
    low, high = score.get("mean_ci95") or (None, None)
    yield f"{prefix}ci_low", low
    yield f"{prefix}ci_high", high


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """The numbers in nested mappings, by their path; `x_ci95` becomes `x.ci_low` and `x.ci_high`."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key.endswith("_ci95"):
            low, high = value or (None, None)
            yield f"{name.removesuffix('_ci95')}.ci_low", low
            yield f"{name.removesuffix('_ci95')}.ci_high", high
        elif isinstance(value, Mapping):
            yield from _flat(f"{name}.", value)
        elif key in _TEXTS:
            continue
        elif value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            yield name, value
