"""Messages in the chat API's shape as items of the responses API; what is an item already passes through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def as_items(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that say the same: a message with tool calls becomes several, a tool's result one of its own kind."""
    return [item for message in messages for item in _items(message)]


def _items(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role is None:
        yield message
    elif role == "tool":
        output = content if isinstance(content, str) else _text(content)
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output}
    else:
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif isinstance(content, list):
            kind = "output_text" if role == "assistant" else "input_text"
            fields = {key: value for key, value in message.items() if key != "tool_calls"}
            yield {**fields, "content": [_part(part, kind) for part in content]}
        yield from map(_function_call, message.get("tool_calls") or ())


def _function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "type": "function_call",
        "call_id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments") or "{}",
    }


def _part(part: Any, text_kind: str) -> Any:
    if not isinstance(part, Mapping):
        return {"type": text_kind, "text": str(part)}
    if part.get("type") == "text":
        return {**part, "type": text_kind}
    if part.get("type") != "image_url":
        return part
    image = part.get("image_url")
    fields = dict(image) if isinstance(image, Mapping) else {"url": image}
    return {"type": "input_image", "image_url": fields.pop("url", None), **fields}


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))
