"""The trajectory scorer: reads the tool calls from messages of any API and compares them with the expected ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast, get_args

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.patterns import PATTERNS_VERSION, Pattern
from steelyard.protocols import Identity
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.base import PlainScorer, as_text, check_choice, check_share, shown
from steelyard.scoring.structured import same_json

_ANTHROPIC_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
_WRAPPED_CALLS = (("functionCall", "id"), ("toolUse", "toolUseId"))
"""Calls of Gemini and Bedrock: the key that holds one, and what its id is called."""
_ARGUMENTS = ("arguments", "args", "input", "parameters", "action")

Mode: TypeAlias = Literal["exact", "in_order", "any_order", "subset", "superset"]

MODES: tuple[Mode, ...] = get_args(Mode)
ARGUMENT_RULES = ("ignore", "equal", "subset", "regex")

_CALL_KEYS = {"name", "tool", "arguments", "args", "match"}

Counts: TypeAlias = Mapping[str, int | Mapping[str, int]]

_CASE_KEYS = ("calls", "mode", "arguments", "forbidden", "counts")


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call. `arguments` is the decoded JSON or, when it is `malformed`, the text."""

    name: str
    arguments: Any = msgspec.field(default_factory=dict)
    id: str | None = None
    malformed: bool = False


ArgumentFunction: TypeAlias = Callable[[ToolCall, ToolCall], bool]
ArgumentRule: TypeAlias = Literal["ignore", "equal", "subset", "regex"] | ArgumentFunction


class Expected(msgspec.Struct, frozen=True):
    """One expected call and how its arguments are compared."""

    call: ToolCall
    rule: ArgumentRule

    def accepts(self, got: ToolCall) -> bool:
        """Whether a call is the expected one."""
        if got.name != self.call.name:
            return False
        if callable(self.rule):
            return bool(self.rule(self.call, got))
        wanted = self.call.arguments
        if self.rule == "ignore" or wanted is None:
            return True
        if self.rule == "equal":
            return same_json(wanted, got.arguments)
        return _includes(wanted, got.arguments, patterns=self.rule == "regex")


@dataclass(frozen=True)
class _Plan:
    """What one case expects of its tool calls."""

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

    @property
    def immediate(self) -> bool:
        """Whether it only computes: a user's function that compares arguments may do anything."""
        return super().immediate and not callable(self.arguments)

    def _check(self) -> None:
        check_share("min_efficiency", self.min_efficiency)
        _mode(self.mode)
        _argument_rule(self.arguments)
        _forbidden(self.forbidden)
        _limits(self.counts)

    def identity(self) -> Identity:
        """Its arguments, and which engine reads the patterns: any case may ask for `match: regex`."""
        return {**super().identity(), "patterns": PATTERNS_VERSION}

    def score(self, case: EvalCase, response: InvocationResponse) -> list[Score] | None:
        """Return two scores; None when neither the case nor the scorer expects anything of the calls."""
        if case.expected_trajectory is None and not self.forbidden and not self.counts:
            return None
        if response.messages is None:
            raise ValueError("the response has no messages: its target does not report the tool calls")
        plan = self._plan(case.expected_trajectory)
        calls = tool_calls(response.messages)
        fault = _fault(plan, calls)
        return [self._score(fault is None, fault), self._efficiency(plan, calls)]

    def _plan(self, expected: Any) -> _Plan:
        """Return what is expected of the calls: the scorer's arguments, overridden by the case's."""
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
        """Score the share of calls that were needed. A repeated call is also an extra one: the two are not added."""
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
    """Describe the first fault: a forbidden tool, the calls themselves, or how often a tool was called."""
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
    """Return the mode, checked."""
    check_choice("mode", mode, MODES)
    return cast(Mode, mode)


def _argument_rule(rule: Any) -> ArgumentRule:
    """Return the rule for comparing arguments, checked."""
    if not callable(rule):
        check_choice("arguments", rule, ARGUMENT_RULES)
    return cast(ArgumentRule, rule)


def _forbidden(names: Any) -> frozenset[str]:
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"forbidden must be a list of tools' names, got {names!r}")
    return frozenset(names)


def _limits(counts: Any) -> dict[str, tuple[int, int | None]]:
    """Read the minimum and maximum calls of each tool: `search: 2`, or `search: {min: 1, max: 3}`."""
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


def tool_calls(messages: Iterable[Any]) -> list[ToolCall]:
    """Return all tool calls of messages, in order: of OpenAI's APIs, Anthropic, Gemini, Bedrock, or a mixture."""
    return [call for message in messages for call in _calls_in(message)]


def _calls_in(item: Any) -> Iterator[ToolCall]:
    """Yield the calls in one message, or the one call that a Responses item is."""
    if not isinstance(item, Mapping):
        return
    kind = item.get("type")
    if isinstance(kind, str) and (kind in _ANTHROPIC_CALLS or kind.endswith("_call")):
        yield _responses_call(item, kind)
        return
    for name, identifier in _WRAPPED_CALLS:
        if isinstance(call := item.get(name), Mapping):
            yield _tool_call(call.get("name"), call, call.get(identifier))
    for part in (*_list(item, "content"), *_list(item, "output"), *_list(item, "parts")):
        yield from _calls_in(part)
    for call in _list(item, "tool_calls"):
        if isinstance(call, Mapping):
            yield _chat_call(call)
    legacy = item.get("function_call")
    if isinstance(legacy, Mapping):
        yield _tool_call(legacy.get("name"), legacy, None)


def _chat_call(call: Mapping[str, Any]) -> ToolCall:
    """Read `{id, function: {name, arguments}}`, a custom tool's `{id, custom: {name, input}}`, or flat fields."""
    inner = call.get("function") or call.get("custom") or call
    body = inner if isinstance(inner, Mapping) else call
    return _tool_call(body.get("name"), body, call.get("id"))


def _responses_call(item: Mapping[str, Any], kind: str) -> ToolCall:
    """Read a `function_call` or `tool_use`, which name their tool, or a `web_search_call`, named by its type."""
    return _tool_call(item.get("name") or kind.removesuffix("_call"), item, item.get("call_id") or item.get("id"))


def _tool_call(name: object, body: Mapping[str, Any], call_id: object) -> ToolCall:
    raw: Any = next((body[key] for key in _ARGUMENTS if body.get(key) is not None), {})
    arguments, malformed = _read(raw)
    return ToolCall(
        name if isinstance(name, str) else "", arguments, call_id if isinstance(call_id, str) else None, malformed
    )


def _read(raw: Any) -> tuple[Any, bool]:
    """Return the arguments and whether they are malformed. Chat models write JSON text, some an empty one for none."""
    if not isinstance(raw, str):
        return raw, False
    if not raw.strip():
        return {}, False
    try:
        return json.loads(raw), False
    except (ValueError, RecursionError):
        return raw, True


def _list(item: Mapping[str, Any], key: str) -> list[Any]:
    value = item.get(key)
    return value if isinstance(value, list) else []


def read_calls(raw: Any, rule: ArgumentRule) -> list[Expected]:
    """Read the expected calls: names, or mappings with `name` (or `tool`), `arguments` (or `args`) and `match`."""
    if not isinstance(raw, (list, tuple)):
        raise ValueError(f"expected_trajectory must be a list of calls, or a mapping with `calls`, got {shown(raw)}")
    return [_read_call(item, rule) for item in raw]


def _read_call(raw: Any, rule: ArgumentRule) -> Expected:
    item = {"name": raw} if isinstance(raw, str) else raw
    name = (item.get("name") or item.get("tool")) if isinstance(item, Mapping) else None
    if not isinstance(name, str) or not name or set(item) - _CALL_KEYS:
        raise ValueError(f"an expected call must be a name, or name (tool), arguments (args) and match: {shown(raw)}")
    own = item.get("match", rule)
    if not callable(own) and own not in ARGUMENT_RULES:
        raise ValueError(f"match must be one of {', '.join(ARGUMENT_RULES)}, got {shown(own)}")
    return Expected(ToolCall(name, item.get("arguments", item.get("args"))), own)


def divergence(mode: Mode, expected: Sequence[Expected], calls: Sequence[ToolCall]) -> str | None:
    """Describe where the calls first differ from the expected ones; None when they agree."""
    if mode == "exact":
        return _exact(expected, calls)
    if mode == "in_order":
        return _in_order(expected, calls)
    pairs = _paired(expected, calls)
    if mode != "subset":
        for index, item in enumerate(expected):
            if index not in pairs:
                return f"expected {call_text(item.call)}, which was not called{_instead(item, calls, pairs)}"
    if mode != "superset":
        taken = set(pairs.values())
        for index, call in enumerate(calls):
            if index not in taken:
                return f"call {index + 1}: {call_text(call)} was not expected"
    return None


def _exact(expected: Sequence[Expected], calls: Sequence[ToolCall]) -> str | None:
    for number, (item, call) in enumerate(zip(expected, calls, strict=False), 1):
        if not item.accepts(call):
            return f"call {number}: expected {call_text(item.call)}, got {call_text(call)}"
    number = min(len(expected), len(calls))
    if len(expected) > number:
        return f"call {number + 1}: expected {call_text(expected[number].call)}, got no more calls"
    if len(calls) > number:
        return f"call {number + 1}: expected no more calls, got {call_text(calls[number])}"
    return None


def _in_order(expected: Sequence[Expected], calls: Sequence[ToolCall]) -> str | None:
    """Match greedily: the earliest call that fits is always a right one, so one pass decides."""
    position = 0
    for item in expected:
        start = position
        while position < len(calls) and not item.accepts(calls[position]):
            position += 1
        if position == len(calls):
            got = f"got {call_text(calls[start])}" if start < len(calls) else "got no more calls"
            return f"call {start + 1}: expected {call_text(item.call)} from here on, {got}"
        position += 1
    return None


def _paired(expected: Sequence[Expected], calls: Sequence[ToolCall]) -> dict[int, int]:
    """Pair as many expected calls as possible, each with a different call (Kuhn's algorithm).

    Taking the first that fits would not do: `search(q: .*)` may take the only call that fits `search(q: x)`.
    """
    fitting = [[index for index, call in enumerate(calls) if item.accepts(call)] for item in expected]
    owner: dict[int, int] = {}

    def place(item: int, tried: set[int]) -> bool:
        for index in fitting[item]:
            if index not in tried:
                tried.add(index)
                if index not in owner or place(owner[index], tried):
                    owner[index] = item
                    return True
        return False

    for item in range(len(expected)):
        place(item, set())
    return {item: index for index, item in owner.items()}


def _instead(item: Expected, calls: Sequence[ToolCall], pairs: Mapping[int, int]) -> str:
    """Mention an unpaired call of the same tool, if there is one: often only its arguments differ."""
    taken = set(pairs.values())
    for index, call in enumerate(calls):
        if index not in taken and call.name == item.call.name:
            return f"; call {index + 1} is {call_text(call)}"
    return ""


def _includes(wanted: Any, got: Any, *, patterns: bool) -> bool:
    """Whether everything wanted is present; with `patterns`, wanted texts are regular expressions."""
    if isinstance(wanted, Mapping):
        return isinstance(got, Mapping) and all(
            key in got and _includes(item, got[key], patterns=patterns) for key, item in wanted.items()
        )
    if patterns and isinstance(wanted, str):
        text = got if isinstance(got, str) else json.dumps(got) if isinstance(got, (dict, list)) else as_text(got)
        return Pattern(wanted).search(text) is not None
    return same_json(wanted, got)


def distinct(calls: Sequence[ToolCall]) -> int:
    """Count the different calls, by tool and arguments."""
    return len({(call.name, json.dumps(call.arguments, sort_keys=True, default=str)) for call in calls})


def call_text(call: ToolCall) -> str:
    """Return a call as a reason quotes it: `search(q='x')`."""
    name = call.name[:100] or "(no name)"
    if call.malformed:
        return f"{name}(malformed arguments {shown(call.arguments)})"
    if isinstance(call.arguments, Mapping):
        inside = ", ".join(f"{str(key)[:50]}={shown(item)}" for key, item in list(call.arguments.items())[:5])
        return f"{name}({inside}{', …' if len(call.arguments) > 5 else ''})"
    return name if call.arguments is None else f"{name}({shown(call.arguments)})"
