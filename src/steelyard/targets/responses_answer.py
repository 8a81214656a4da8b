"""Reads what the responses API answers: one object, or a stream of events whose last one has that object in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from steelyard.targets.answer import Answer, Call, Usage
from steelyard.targets.replies import Reader, before_done, reported
from steelyard.transport.sse import Event


class _InputDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None

    def plain(self) -> Usage:
        cached, reasoning = self.input_tokens_details, self.output_tokens_details
        return Usage(
            self.input_tokens,
            self.output_tokens,
            None if cached is None else cached.cached_tokens,
            None if reasoning is None else reasoning.reasoning_tokens,
        )


class _Incomplete(msgspec.Struct, gc=False):
    reason: str | None = None


class _Response(msgspec.Struct, gc=False):
    status: str | None = None
    output: list[dict[str, Any]] | None = None
    usage: _Usage | None = None
    incomplete_details: _Incomplete | None = None
    error: Any = None


class _StreamEvent(msgspec.Struct, gc=False):
    """The whole objects inside are left as bytes: of the many that a stream has, only the last one counts."""

    type: str = ""
    delta: Any = None
    output_index: int = 0
    item: msgspec.Raw = msgspec.Raw(b"null")
    response: msgspec.Raw = msgspec.Raw(b"null")


_RESPONSES = Reader(_Response)
_EVENTS = Reader(_StreamEvent)
_TERMINATORS = ("response.completed", "response.incomplete", "response.failed")
_ITEMS: Reader[dict[str, Any]] = Reader(dict[str, Any])


def read_response_whole(body: bytes) -> Answer:
    """The answer in one object."""
    response = _RESPONSES.read(body)
    if response.output is None or response.error is not None or response.status in ("failed", "cancelled"):
        raise reported(msgspec.json.decode(body))
    return _answer(response, response.output)


def read_response_stream(stream: list[Event]) -> Answer:
    """The answer in a stream, which is whole with its `response.completed` or `response.incomplete`."""
    told, _ = before_done(stream)
    pieces, fault = _EVENTS.read_all(told)
    response: _Response | None = None
    items: dict[int, dict[str, Any]] = {}
    first: dict[bool, float] = {}
    for event, piece in zip(told, pieces, strict=False):
        kind = piece.type
        if kind in _TERMINATORS:
            response = _RESPONSES.read(bytes(piece.response))
            if kind == "response.failed" and fault is None:
                fault = reported(response.error or "the response failed")
        elif kind == "error" and fault is None:
            fault = reported(_without_kind(msgspec.json.decode(event.data)))
        elif kind == "response.output_item.done":
            items[piece.output_index] = _ITEMS.read(bytes(piece.item))
        if (is_reasoning := _token_kind(piece)) is not None:
            first.setdefault(is_reasoning, event.at)
    output = [items[index] for index in sorted(items)] or _from_deltas(pieces)
    answer = _answer(response or _Response(), (response.output if response is not None else None) or output)
    answer.first_content, answer.first_reasoning = first.get(False), first.get(True)
    answer.terminated = answer.complete = response is not None
    answer.fault = fault
    return answer


def _without_kind(error: Any) -> Any:
    """An error event's own fields: its type is always `error`, which says nothing."""
    return {key: value for key, value in error.items() if key != "type"} if isinstance(error, dict) else error


def _token_kind(piece: _StreamEvent) -> bool | None:
    """True when the event brings reasoning, False when it brings a part of the answer, None when it brings neither."""
    if piece.type.endswith(".delta"):
        return "reasoning" in piece.type if piece.delta else None
    if piece.type == "response.output_item.added":
        return False if str(_ITEMS.read(bytes(piece.item)).get("type")).endswith("_call") else None
    return None


def _from_deltas(pieces: Sequence[_StreamEvent]) -> list[dict[str, Any]]:
    """The text of a stream that broke off, as the item that it would have become."""
    kind = "response.output_text.delta"
    text = "".join(piece.delta for piece in pieces if piece.type == kind and isinstance(piece.delta, str))
    content = [{"type": "output_text", "text": text}]
    return [{"type": "message", "role": "assistant", "content": content}] if text else []


def _answer(response: _Response, output: list[dict[str, Any]]) -> Answer:
    texts: list[str] = []
    refusals: list[str] = []
    for item in output:
        for part in item.get("content") or () if item.get("type") == "message" else ():
            if part.get("type") == "output_text":
                texts.append(part.get("text") or "")
            elif part.get("type") == "refusal":
                refusals.append(part.get("refusal") or "")
    calls = [_call(item) for item in output if item.get("type") == "function_call"]
    return Answer(
        messages=output,
        text="".join(texts),
        refusal="".join(refusals) if refusals else None,
        calls=calls,
        stop_reason=_stop_reason(response, bool(calls)),
        usage=None if response.usage is None else response.usage.plain(),
    )


def _call(item: dict[str, Any]) -> Call:
    return Call(str(item.get("call_id") or ""), str(item.get("name") or ""), str(item.get("arguments") or ""))


def _stop_reason(response: _Response, called: bool) -> str | None:
    """Why the model stopped, in the chat API's words where this API has none of its own."""
    if response.status == "incomplete":
        details = response.incomplete_details
        return (details.reason if details is not None else None) or "incomplete"
    if response.status == "completed":
        return "tool_calls" if called else "stop"
    return response.status
