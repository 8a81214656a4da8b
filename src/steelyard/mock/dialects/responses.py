"""Answers in the format of OpenAI's responses API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from steelyard.mock.answers import AnswerUsage, SimulatedAnswer

_encode = msgspec.json.encode


def whole(answer: SimulatedAnswer) -> bytes:
    """Encode the body of an answer that is not streamed."""
    return _encode(_response(answer, _status(answer), _items(answer)))


def frames(answer: SimulatedAnswer) -> Iterator[bytes]:
    """Encode the events of a stream, one piece for each token, then the end."""
    events = _Events()
    begun = _response(answer, "in_progress", [])
    before = events.event("response.created", response=begun) + events.event("response.in_progress", response=begun)
    items = _items(answer)
    for index, item in enumerate(items):
        before += events.event("response.output_item.added", output_index=index, item=_empty(item))
        item_events = _item_events(answer, item, {"item_id": item["id"], "output_index": index})
        before += item_events.opening(events)
        for piece in events.deltas(item_events.kind, item_events.place, item_events.tokens):
            yield before + piece
            before = b""
        before += item_events.closing(events)
        before += events.event("response.output_item.done", output_index=index, item=item)
    ending = "response.incomplete" if answer.stop == "length" else "response.completed"
    yield before + events.event(ending, response=_response(answer, _status(answer), items))


def broken(message: str) -> bytes:
    """Encode an error in the middle of a stream."""
    return _Events().event("error", code="server_error", message=message, param=None)


class _Events:
    """Writes events, each with the next number."""

    def __init__(self) -> None:
        self.number = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        body = _encode({"type": kind, "sequence_number": self.number, **fields})
        self.number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)

    def deltas(self, kind: str, place: dict[str, Any], tokens: Sequence[str]) -> Iterator[bytes]:
        name = kind.encode()
        start = b'event: %b\ndata: {"type":"%b",%b,"sequence_number":' % (name, name, _encode(place)[1:-1])
        for token in tokens:
            yield b'%b%d,"delta":%b}\n\n' % (start, self.number, _encode(token))
            self.number += 1


class _ItemEvents(msgspec.Struct):
    """The events of one output item: those before its tokens, of them and after them."""

    kind: str
    place: dict[str, Any]
    tokens: Sequence[str]
    before: tuple[str, dict[str, Any]] | None
    after: list[tuple[str, dict[str, Any]]]

    def opening(self, events: _Events) -> bytes:
        return events.event(self.before[0], **self.before[1]) if self.before else b""

    def closing(self, events: _Events) -> bytes:
        return b"".join(events.event(kind, **fields) for kind, fields in self.after)


def _item_events(answer: SimulatedAnswer, item: dict[str, Any], place: dict[str, Any]) -> _ItemEvents:
    if item["type"] == "function_call":
        kind, arguments = "response.function_call_arguments", item["arguments"]
        done = (f"{kind}.done", {**place, "name": item["name"], "arguments": arguments})
        return _ItemEvents(f"{kind}.delta", place, answer.tokens, None, [done])
    if item["type"] == "reasoning":
        part, place = item["summary"][0], {**place, "summary_index": 0}
        tokens, kind, part_kind = answer.reasoning, "response.reasoning_summary_text", "reasoning_summary_part"
        field = "text"
    else:
        part, place = item["content"][0], {**place, "content_index": 0}
        field = "refusal" if answer.stop == "refusal" else "text"
        kind = "response.refusal" if answer.stop == "refusal" else "response.output_text"
        tokens, part_kind = answer.tokens, "content_part"
    logprobs: dict[str, Any] = {"logprobs": []} if kind == "response.output_text" else {}
    after = [
        (f"{kind}.done", {**place, field: part[field], **logprobs}),
        (f"response.{part_kind}.done", {**place, "part": part}),
    ]
    before = (f"response.{part_kind}.added", {**place, "part": {**part, field: ""}})
    return _ItemEvents(f"{kind}.delta", {**place, **logprobs}, tokens, before, after)


def _items(answer: SimulatedAnswer) -> list[dict[str, Any]]:
    """Make the complete output items: reasoning if there is any, then the tool call or the message."""
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": "".join(answer.reasoning)}]
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": summary})
    call = answer.tool_call
    if call is not None:
        names = {"id": f"fc_{call.id}", "call_id": f"call_{call.id}", "name": call.name}
        items.append({"type": "function_call", **names, "arguments": call.arguments, "status": "completed"})
    elif answer.tokens:
        part: dict[str, Any] = {"type": "output_text", "text": answer.text, "annotations": []}
        if answer.stop == "refusal":
            part = {"type": "refusal", "refusal": answer.text}
        message = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part]}
        items.append({**message, "status": _status(answer)})
    return items


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """Make an output item as it is announced, before any of its content."""
    nothing: dict[str, Any] = {"summary": [], "content": [], "arguments": "", "status": "in_progress"}
    return {name: nothing.get(name, value) for name, value in item.items()}


def _status(answer: SimulatedAnswer) -> str:
    return "incomplete" if answer.stop == "length" else "completed"


def _response(answer: SimulatedAnswer, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    is_finished = status != "in_progress"
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": answer.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": _usage(answer.usage) if answer.usage and is_finished else None,
    }


def _usage(usage: AnswerUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.input + usage.output,
    }
