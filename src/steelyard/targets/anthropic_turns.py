"""Messages in the chat API's shape as the messages API wants them; what has its shape already passes through."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from steelyard.targets.anthropic_answer import input_object

_SYSTEM_ROLES = ("system", "developer")
_is_data_url = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.-]+)*;base64,(.*)", re.DOTALL).fullmatch


def split_system(
    messages: Sequence[dict[str, Any]], system_prompt: str | None
) -> tuple[list[dict[str, Any]], str | list[dict[str, Any]] | None]:
    """The turns in this API's shape, and apart from them the system prompt, which is no turn here."""
    turns: list[dict[str, Any]] = []
    parts: list[Any] = [] if system_prompt is None else [system_prompt]
    for message in messages:
        role = message.get("role")
        if role in _SYSTEM_ROLES:
            content = message.get("content")
            parts.extend(content if isinstance(content, list) else [content or ""])
        elif role == "tool":
            _add_result(turns, message)
        else:
            turns.append(_turn(message))
    return turns, _system(parts)


def _system(parts: list[Any]) -> str | list[dict[str, Any]] | None:
    if not parts:
        return None
    if all(isinstance(part, str) for part in parts):
        return "\n\n".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _add_result(turns: list[dict[str, Any]], message: Mapping[str, Any]) -> None:
    """Put a tool's result into the user's turn: results of calls that were made together belong in one."""
    block = {
        "type": "tool_result",
        "tool_use_id": message.get("tool_call_id"),
        "content": _content(message.get("content")) or "",
    }
    last = turns[-1] if turns else None
    if last is not None and last["role"] == "user" and _is_results(last["content"]):
        last["content"].append(block)
    else:
        turns.append({"role": "user", "content": [block]})


def _is_results(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(block, dict) and block.get("type") == "tool_result" for block in content
    )


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    calls = message.get("tool_calls")
    if isinstance(content, str) and not calls:
        return message if len(message) == 2 else {"role": message["role"], "content": content}
    blocks = _content(content) or []
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    return {"role": message.get("role"), "content": [*blocks, *map(_tool_use, calls or ())]}


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    given = input_object(arguments) if isinstance(arguments, str) else arguments
    return {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": given}


def _content(content: Any) -> Any:
    return [_block(part) for part in content] if isinstance(content, list) else content


def _block(part: Any) -> Any:
    """A part of a message as a block: texts and images are translated, everything else is left as it is."""
    if not isinstance(part, Mapping):
        return {"type": "text", "text": str(part)}
    kind = part.get("type")
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text", "")}
    if kind not in ("image_url", "input_image"):
        return part
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    data = _is_data_url(url) if isinstance(url, str) else None
    if data is not None:
        return {"type": "image", "source": {"type": "base64", "media_type": data[1], "data": data[2]}}
    return {"type": "image", "source": {"type": "url", "url": url}}
