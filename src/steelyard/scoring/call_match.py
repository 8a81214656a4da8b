"""Tool calls held against expected ones, in five modes; the first divergence in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from steelyard.scoring.json_text import same_json
from steelyard.scoring.messages import ToolCall
from steelyard.scoring.plain import as_text, shown

Mode: TypeAlias = Literal["exact", "in_order", "any_order", "subset", "superset"]
ArgumentFunction: TypeAlias = Callable[[ToolCall, ToolCall], bool]
ArgumentRule: TypeAlias = Literal["ignore", "equal", "subset", "regex"] | ArgumentFunction

MODES: tuple[Mode, ...] = get_args(Mode)
ARGUMENT_RULES = ("ignore", "equal", "subset", "regex")

_CALL_KEYS = {"name", "tool", "arguments", "args", "match"}


class Expected(msgspec.Struct, frozen=True):
    """One expected call and how its arguments are compared."""

    call: ToolCall
    rule: ArgumentRule

    def accepts(self, got: ToolCall) -> bool:
        """Whether a call is this one."""
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


def read_calls(raw: Any, rule: ArgumentRule) -> list[Expected]:
    """The expected calls: names, or mappings with `name` (or `tool`), `arguments` (or `args`) and their own `match`."""
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
    """Where the calls first differ from the expected ones, in words; None when they agree."""
    if mode == "exact":
        return _exact(expected, calls)
    if mode == "in_order":
        return _in_order(expected, calls)
    pairs = _paired(expected, calls)
    if mode != "subset":
        for index, item in enumerate(expected):
            if index not in pairs:
                return f"expected {spelled(item.call)}, which was not called{_instead(item, calls, pairs)}"
    if mode != "superset":
        taken = set(pairs.values())
        for index, call in enumerate(calls):
            if index not in taken:
                return f"call {index + 1}: {spelled(call)} was not expected"
    return None


def _exact(expected: Sequence[Expected], calls: Sequence[ToolCall]) -> str | None:
    for number, (item, call) in enumerate(zip(expected, calls, strict=False), 1):
        if not item.accepts(call):
            return f"call {number}: expected {spelled(item.call)}, got {spelled(call)}"
    number = min(len(expected), len(calls))
    if len(expected) > number:
        return f"call {number + 1}: expected {spelled(expected[number].call)}, got no more calls"
    if len(calls) > number:
        return f"call {number + 1}: expected no more calls, got {spelled(calls[number])}"
    return None


def _in_order(expected: Sequence[Expected], calls: Sequence[ToolCall]) -> str | None:
    """The earliest call that fits is always a right one to take, so one pass decides."""
    position = 0
    for item in expected:
        start = position
        while position < len(calls) and not item.accepts(calls[position]):
            position += 1
        if position == len(calls):
            got = f"got {spelled(calls[start])}" if start < len(calls) else "got no more calls"
            return f"call {start + 1}: expected {spelled(item.call)} from here on, {got}"
        position += 1
    return None


def _paired(expected: Sequence[Expected], calls: Sequence[ToolCall]) -> dict[int, int]:
    """As many expected calls as can be, each with a call of its own (Kuhn's algorithm).

    Taking the first that fits would not do: `search(q: .*)` may take the call that only `search(q: x)` needed fits.
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
    """The unpaired call of the same tool, if there is one: most often only its arguments are off."""
    taken = set(pairs.values())
    for index, call in enumerate(calls):
        if index not in taken and call.name == item.call.name:
            return f"; call {index + 1} is {spelled(call)}"
    return ""


def _includes(wanted: Any, got: Any, *, patterns: bool) -> bool:
    """Whether everything wanted is there; with `patterns`, wanted texts are searched for as regular expressions."""
    if isinstance(wanted, Mapping):
        return isinstance(got, Mapping) and all(
            key in got and _includes(item, got[key], patterns=patterns) for key, item in wanted.items()
        )
    if patterns and isinstance(wanted, str):
        text = got if isinstance(got, str) else json.dumps(got) if isinstance(got, (dict, list)) else as_text(got)
        return re.search(wanted, text) is not None
    return same_json(wanted, got)


def distinct(calls: Sequence[ToolCall]) -> int:
    """How many different calls there are, by tool and arguments."""
    return len({(call.name, json.dumps(call.arguments, sort_keys=True, default=str)) for call in calls})


def spelled(call: ToolCall) -> str:
    """A call as a reason quotes it: `search(q='x')`."""
    name = call.name[:100] or "(no name)"
    if call.malformed:
        return f"{name}(malformed arguments {shown(call.arguments)})"
    if isinstance(call.arguments, Mapping):
        inside = ", ".join(f"{str(key)[:50]}={shown(item)}" for key, item in list(call.arguments.items())[:5])
        return f"{name}({inside}{', …' if len(call.arguments) > 5 else ''})"
    return name if call.arguments is None else f"{name}({shown(call.arguments)})"
