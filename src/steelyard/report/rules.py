"""Rules on the figures of a run, such as `pass_rate>=0.8`: how they are read, and whether they are kept."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from steelyard.errors import ConfigurationError, nearest

FAILURE_RATE = "failure_rate"
"""The share of records without an answer, or whose scoring broke down: what a suite's `max_error_rate` limits."""

_OPERATORS = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_RULE = re.compile(
    r"\s*(?P<name>.+?)\s*(?P<operator><=|>=|==|!=|<|>)\s*"
    r"(?P<number>[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>us|µs|ms|s|min|%)?\s*",
    re.S,
)
_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "%": 0.01, "": 1.0}
_IN_SECONDS = re.compile(r"^(time_|p50_latency_s|active_seconds|client\.(lag_|seconds|stood_still))|load\.duration")
_A_SHARE = re.compile(r"rate|share|pass_at_k|pass_hat_k|^(trials\.)?score\.|spread")
_OF_SPEED = re.compile(r"^(time_|p50_latency_s|requests_per_minute|output_tps|active_seconds)")
_NOT_FIGURES = ("v", "seed", "target", "error_examples", "scores", "stats", "trials")


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
        return bool(_OF_SPEED.match(self.name))


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
    name, unit = found["name"], found["unit"] or ""
    name = re.sub(r"^scores\.", "score.", name)
    if unit == "%" and not _A_SHARE.search(name):
        raise ConfigurationError(f"{text!r}: {name} is not a share that could be given in %")
    if unit not in ("", "%") and not _IN_SECONDS.search(name):
        raise ConfigurationError(f"{text!r}: {name} is not a time that could be given in {unit}")
    limit = float(found["number"]) * _UNITS[unit]
    return Rule(text=text.strip(), name=name, operator=found["operator"], limit=limit, unit=unit)


def figures(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Every figure of a run by the name that a rule calls it; None for one that is not known."""
    found = dict(_flat("", {key: value for key, value in metrics.items() if key not in _NOT_FIGURES}))
    found.update(_flat("", metrics["stats"]))
    trials = metrics.get("trials") or {}
    found.update(_flat("trials.", {key: value for key, value in trials.items() if key != "scores"}))
    for prefix, scores in (("score.", metrics["scores"]), ("trials.score.", trials.get("scores") or {})):
        for name, score in scores.items():
            found.update(_flat(f"{prefix}{name}.", score))
            for end in ("ci_low", "ci_high"):
                found[f"{prefix}{name}.{end}"] = found.get(f"{prefix}{name}.mean.{end}")
    n = metrics["n"]
    found[FAILURE_RATE] = (metrics["counts"]["error"] + metrics["scoring_errors"]) / n if n else None
    return found


def check_rule(rule: Rule, metrics: Mapping[str, Any], known: Mapping[str, float | None], leave: Leave) -> Checked:
    """Whether the rule is kept, and why not in words; ConfigurationError for a name that no figure has."""
    value = known[rule.name] if rule.name in known else _absent(rule, known)
    reason = _not_usable(rule, value, metrics, leave)
    if reason is None:
        assert value is not None
        ok = bool(_OPERATORS[rule.operator](value, rule.limit))
        return Checked(rule=rule.text, ok=ok, value=value, reason=f"is {_shown(value, rule.unit)}")
    return Checked(rule=rule.text, ok=False, value=value, reason=reason)


def bottleneck(metrics: Mapping[str, Any]) -> str | None:
    """Why the times of a run say nothing of the target: its client was the bottleneck. None when it was not."""
    client = metrics.get("client") or {}
    if not client.get("bottleneck"):
        return None
    return f"the client was the bottleneck: {client.get('reason') or 'it had no time to spare'}"


def _absent(rule: Rule, known: Mapping[str, float | None]) -> float:
    if rule.name.startswith("errors."):
        return 0.0  # errors of a kind that did not come up
    match = nearest(rule.name, known)
    hint = f"did you mean {match!r}?" if match else "steelyard report RUN -f json shows them all"
    raise ConfigurationError(f"rule {rule.text!r}: no metric of this run is named {rule.name!r}; {hint}")


def _not_usable(rule: Rule, value: float | None, metrics: Mapping[str, Any], leave: Leave) -> str | None:
    for name, score in metrics["scores"].items():
        if score.get("advisory") and rule.name.startswith((f"score.{name}.", f"trials.score.{name}.")):
            return "is from a judge that is not calibrated: advisory, it cannot pass a gate"
    if value is None:
        because = metrics.get("cost_unknown_because") if rule.name.startswith("cost") else None
        return f"is not known: {because or 'there was nothing to measure'}"
    if rule.of_speed and not leave.client_bottleneck and (why := bottleneck(metrics)) is not None:
        return f"is {_shown(value, rule.unit)}, which says nothing of the target: {why}"
    return None


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
        elif value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            yield name, value


def _shown(value: float, unit: str) -> str:
    number = value / _UNITS[unit]
    text = f"{number:,.0f}" if float(number).is_integer() and abs(number) < 1e15 else f"{number:,.4g}"
    return text + (f" {unit}" if unit else "")
