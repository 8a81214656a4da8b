"""What was asked and answered, in the shape that the GenAI conventions give to messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from steelyard.records import EvalCase, InvocationResponse


def system_instructions(case: EvalCase) -> str | None:
    """The system prompt as JSON; None where there is none."""
    return None if case.system_prompt is None else _as_json([_text(case.system_prompt)])


def input_messages(case: EvalCase) -> str:
    """The case's turns, its prompt the last, as JSON."""
    turns = list(case.messages or [])
    if case.prompt is not None:
        turns.append({"role": "user", "content": case.prompt})
    return _as_json([_message(turn) for turn in turns])


def output_messages(response: InvocationResponse) -> str:
    """What came back, as JSON: the trajectory where there is one, else the text."""
    turns = response.messages or [{"role": "assistant", "content": response.response_text}]
    messages = [_message(turn) for turn in turns]
    if response.stop_reason is not None:
        messages[-1]["finish_reason"] = response.stop_reason
    return _as_json(messages)


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    role = str(turn.get("role", "user"))
    if role == "tool":
        parts = [{"type": "tool_call_response", "id": turn.get("tool_call_id"), "result": turn.get("content")}]
    else:
        parts = [*_content(turn.get("content")), *_tool_calls(turn.get("tool_calls") or ())]
    return {"role": role, "parts": parts}


def _content(content: Any) -> Iterator[dict[str, Any]]:
    """The parts of a message: plain text is one; what is not text is passed on as it is."""
    if isinstance(content, str):
        yield _text(content)
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, dict):
                text = part.get("text")
                yield _text(text) if isinstance(text, str) else {"type": "unknown", **part}
            else:
                yield _text(str(part))


def _tool_calls(calls: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        named = function if isinstance(function, dict) else call if isinstance(call, dict) else {}
        identifier = call.get("id") if isinstance(call, dict) else None
        yield {"type": "tool_call", "id": identifier, "name": named.get("name"), "arguments": named.get("arguments")}


def _text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


def _as_json(value: object) -> str:
    # json's escapes, not msgspec's UTF-8: a lone surrogate would make the exporter lose the whole batch.
    return json.dumps(value, default=str)
