"""The scorer that checks an agent's tool calls against the expected ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, cast

from steelyard.errors import ConfigurationError
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.call_match import (
    ARGUMENT_RULES,
    MODES,
    ArgumentRule,
    Expected,
    Mode,
    distinct,
    divergence,
    read_calls,
)
from steelyard.scoring.messages import ToolCall, tool_calls
from steelyard.scoring.plain import PlainScorer, check_choice, check_share, shown

Counts: TypeAlias = Mapping[str, int | Mapping[str, int]]

_CASE_KEYS = ("calls", "mode", "arguments", "forbidden", "counts")


@dataclass(frozen=True)
class _Plan:
    """What one case asks of its tool calls."""

    calls: list[Expected] | None
    mode: Mode
    forbidden: frozenset[str]
    counts: Mapping[str, tuple[int, int | None]]


@dataclass(frozen=True, kw_only=True)
class Trajectory(PlainScorer):
    """Passes when the tool calls in the response's messages are those of the case's `expected_trajectory`.

    A second score, `<name>.efficiency`, is the share of calls that were neither repeated nor beyond the reference;
    it passes from `min_efficiency` on.
    """

    name: str = "trajectory"
    mode: Mode = "exact"
    arguments: ArgumentRule = "equal"
    forbidden: list[str] = field(default_factory=list)
    counts: Counts = field(default_factory=dict)
    min_efficiency: float = 0.0

    def _check(self) -> None:
        check_share("min_efficiency", self.min_efficiency)
        _mode(self.mode)
        _argument_rule(self.arguments)
        _forbidden(self.forbidden)
        _limits(self.counts)

    def score(self, case: EvalCase, response: InvocationResponse) -> list[Score] | None:
        """Two scores; None when neither the case nor the scorer says what is expected of the calls."""
        if case.expected_trajectory is None and not self.forbidden and not self.counts:
            return None
        if response.messages is None:
            raise ValueError("the response has no messages: its target does not report the tool calls")
        plan = self._plan(case.expected_trajectory)
        calls = tool_calls(response.messages)
        fault = _fault(plan, calls)
        return [self._score(fault is None, fault), self._efficiency(plan, calls)]

    def _plan(self, expected: Any) -> _Plan:
        """The scorer's own plan, with what the case says put over it."""
        own = expected if isinstance(expected, Mapping) else {"calls": expected}
        unknown = [key for key in own if key not in _CASE_KEYS]
        if unknown:
            raise ValueError(f"expected_trajectory has no {unknown[0]!r}; known here: {', '.join(_CASE_KEYS)}")
        rule = _argument_rule(own.get("arguments", self.arguments))
        calls = own.get("calls")
        return _Plan(
            calls=None if calls is None else read_calls(calls, rule),
            mode=_mode(own.get("mode", self.mode)),
            forbidden=self._forbidden | _forbidden(own.get("forbidden", [])),
            counts={**self._limits, **_limits(own.get("counts", {}))},
        )

    @cached_property
    def _forbidden(self) -> frozenset[str]:
        return _forbidden(self.forbidden)

    @cached_property
    def _limits(self) -> Mapping[str, tuple[int, int | None]]:
        return _limits(self.counts)

    def _efficiency(self, plan: _Plan, calls: list[ToolCall]) -> Score:
        """The share of calls that were needed. A repeated call is also one too many: the two are not added up."""
        repeated = len(calls) - distinct(calls)
        over = 0
        if plan.calls is not None:
            repeated -= len(plan.calls) - distinct([item.call for item in plan.calls])
            over = len(calls) - len(plan.calls)
        wasted = max(repeated, over, 0)
        value = (len(calls) - wasted) / len(calls) if calls else 1.0
        reason = f"{len(calls)} calls: {max(repeated, 0)} repeated, {max(over, 0)} beyond the reference"
        return Score(f"{self.name}.efficiency", value, value >= self.min_efficiency, reason if wasted else None)


def _fault(plan: _Plan, calls: list[ToolCall]) -> str | None:
    """What is wrong first: a forbidden tool, the calls themselves, or how often a tool was called."""
    for number, call in enumerate(calls, 1):
        if call.name in plan.forbidden:
            return f"call {number}: {call.name} is forbidden"
    fault = None if plan.calls is None else divergence(plan.mode, plan.calls, calls)
    if fault is not None:
        return fault
    times = Counter(call.name for call in calls)
    for name, (least, most) in plan.counts.items():
        if times[name] < least or (most is not None and times[name] > most):
            allowed = f"at least {least}" if most is None else str(least) if least == most else f"{least} to {most}"
            return f"{name} was called {times[name]} times, expected {allowed}"
    return None


def _mode(mode: Any) -> Mode:
    """The mode, if it is one."""
    check_choice("mode", mode, MODES)
    return cast(Mode, mode)


def _argument_rule(rule: Any) -> ArgumentRule:
    """The way of comparing arguments, if it is one."""
    if not callable(rule):
        check_choice("arguments", rule, ARGUMENT_RULES)
    return cast(ArgumentRule, rule)


def _forbidden(names: Any) -> frozenset[str]:
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"forbidden must be a list of tools' names, got {names!r}")
    return frozenset(names)


def _limits(counts: Any) -> dict[str, tuple[int, int | None]]:
    """The least and the most calls for each tool: `search: 2`, or `search: {min: 1, max: 3}`."""
    if not isinstance(counts, Mapping):
        raise ConfigurationError(f"counts must be a mapping from tools' names to numbers, got {counts!r}")
    limits: dict[str, tuple[int, int | None]] = {}
    for name, raw in counts.items():
        limit = raw if isinstance(raw, Mapping) else {"min": raw, "max": raw}
        least, most = limit.get("min", 0), limit.get("max")
        whole = [number for number in (least, 0 if most is None else most) if type(number) is int and number >= 0]
        if len(whole) < 2 or not limit or set(limit) - {"min", "max"} or (most is not None and most < least):
            raise ConfigurationError(f"counts.{name} must be a number >= 0 or min and max, got {shown(raw)}")
        limits[str(name)] = (least, most)
    return limits
