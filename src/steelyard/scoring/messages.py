"""The tool calls in a message log, whichever API's shape its messages have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

_ANTHROPIC_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
_ARGUMENTS = ("arguments", "args", "input", "parameters", "action")


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool. `arguments` is what the JSON says, or, when it is `malformed`, the text as it came."""

    name: str
    arguments: Any = msgspec.field(default_factory=dict)
    id: str | None = None
    malformed: bool = False


def tool_calls(messages: Iterable[Any]) -> list[ToolCall]:
    """All tool calls of a log, in order: OpenAI chat and responses, Anthropic, or a mixture of them."""
    return [call for message in messages for call in _calls_in(message)]


def _calls_in(item: Any) -> Iterator[ToolCall]:
    """The calls in one message, or the one call that a Responses item is."""
    if not isinstance(item, Mapping):
        return
    kind = item.get("type")
    if isinstance(kind, str) and (kind in _ANTHROPIC_CALLS or kind.endswith("_call")):
        yield _responses_call(item, kind)
        return
    for part in (*_list(item, "content"), *_list(item, "output")):
        yield from _calls_in(part)
    for call in _list(item, "tool_calls"):
        if isinstance(call, Mapping):
            yield _chat_call(call)
    legacy = item.get("function_call")
    if isinstance(legacy, Mapping):
        yield _made(legacy.get("name"), legacy, None)


def _chat_call(call: Mapping[str, Any]) -> ToolCall:
    """`{id, function: {name, arguments}}`, a custom tool's `{id, custom: {name, input}}`, or the fields at the top."""
    inner = call.get("function") or call.get("custom") or call
    body = inner if isinstance(inner, Mapping) else call
    return _made(body.get("name"), body, call.get("id"))


def _responses_call(item: Mapping[str, Any], kind: str) -> ToolCall:
    """`function_call` and `tool_use` name their tool; `web_search_call` and its like are named by their type."""
    return _made(item.get("name") or kind.removesuffix("_call"), item, item.get("call_id") or item.get("id"))


def _made(name: object, body: Mapping[str, Any], call_id: object) -> ToolCall:
    raw: Any = next((body[key] for key in _ARGUMENTS if body.get(key) is not None), {})
    arguments, malformed = _read(raw)
    return ToolCall(
        name if isinstance(name, str) else "", arguments, call_id if isinstance(call_id, str) else None, malformed
    )


def _read(raw: Any) -> tuple[Any, bool]:
    """Arguments and whether they were malformed. Chat models write JSON text, some of them an empty one for none."""
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
