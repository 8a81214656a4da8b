"""A message log as turns that can be shown: who spoke, the text, the tools called. Any API's shape will do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from steelyard.records import EvalCase, Record
from steelyard.scoring.messages import ToolCall, tool_calls

_TEXTS = ("text", "content", "output", "summary", "thinking", "refusal")
"""Where the APIs keep the words of a message or of one of its parts."""
_SYSTEM = ("system", "developer")


class Turn(msgspec.Struct, omit_defaults=True):
    """One message: its role, its words, and the tools it calls."""

    role: str
    text: str
    calls: list[ToolCall] = []


def turns(record: Record, case: EvalCase | None) -> list[Turn]:
    """The conversation of a record: what was asked, unless the target told that too, and what came back."""
    system = case.system_prompt if case is not None else None
    asked = [_turn(message) for message in _asked(record, case)]
    found = [_turn(message) for message in record.messages or []]
    if not _tells_what_was_asked(found, asked):
        found = [*asked, *found]
    if system and not any(turn.role in _SYSTEM for turn in found):
        found.insert(0, Turn("system", system))
    if record.response_text and not (record.messages and found and found[-1].role == "assistant"):
        found.append(Turn("assistant", record.response_text))
    return found


def question(record: Record, case: EvalCase | None) -> str:
    """What was asked, in short: the prompt, or the last words of the user."""
    if record.input_prompt or (case is not None and case.prompt):
        return record.input_prompt or (case.prompt if case is not None else None) or ""
    said = [turn.text for turn in map(_turn, record.messages or _asked(record, case)) if turn.role == "user"]
    return said[-1] if said else ""


def as_text(value: Any) -> str:
    """A value as people write it: text as it is, anything else as indented JSON."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _asked(record: Record, case: EvalCase | None) -> list[dict[str, Any]]:
    messages = list(case.messages or []) if case is not None else []
    prompt = record.input_prompt or (case.prompt if case is not None else None)
    return [*messages, *([{"role": "user", "content": prompt}] if prompt else [])]


def _tells_what_was_asked(found: Sequence[Turn], asked: Sequence[Turn]) -> bool:
    """Whether a target's log begins with the question, in its own words perhaps: an endpoint's has the answer alone."""
    first = next((turn for turn in found if turn.role not in _SYSTEM), None)
    if first is not None and first.role == "user":
        return True
    return any(turn.role == "user" and turn.text == asked[-1].text for turn in found) if asked else True


def _turn(message: Any) -> Turn:
    if not isinstance(message, Mapping):
        return Turn("", as_text(message))
    role = message.get("role") or _role_of_kind(str(message.get("type") or ""))
    return Turn(str(role), "\n\n".join(_words(message)), tool_calls([message]))


def _role_of_kind(kind: str) -> str:
    """Items of the Responses API without a role: a call is the assistant's, its output the tool's."""
    return "tool" if kind.endswith("_output") else "assistant" if kind.endswith("_call") else kind


def _words(part: Any) -> Iterator[str]:
    """The texts in a message or part, nested ones too; what is not text is named by its type."""
    if isinstance(part, str):
        if part:
            yield part
    elif isinstance(part, list):
        for one in part:
            yield from _words(one)
    elif isinstance(part, Mapping):
        found = [part[key] for key in _TEXTS if isinstance(part.get(key), str | list | dict) and part[key]]
        kind = part.get("type")
        if found:
            for one in found:
                yield from _words(one)
        elif isinstance(kind, str) and not tool_calls([part]) and "role" not in part:
            yield f"[{kind}]"
