"""OpenAI's responses API: requests in its shape, and answers read from one object or from a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from steelyard.records import EvalCase
from steelyard.targets.openai_chat import OpenAIEndpoint
from steelyard.targets.wire import (
    Call,
    Conversation,
    ModelAnswer,
    Reader,
    TokenUsage,
    asked_turns,
    before_done,
    encoded,
    reported_error,
)
from steelyard.transport.sse import ServerSentEvent

_TERMINATORS = ("response.completed", "response.incomplete", "response.failed")
_ITEMS: Reader[dict[str, Any]] = Reader(dict[str, Any])


class OpenAIResponses(OpenAIEndpoint):
    """A model behind `POST {base_url}/responses`."""

    kind = "openai-responses"
    path = "/responses"
    turns_field = b',"input":'
    reserved = ("model", "input", "stream", "tools", "instructions")
    tool_shape = "responses"

    def _opening(self, case: EvalCase) -> Conversation:
        rest = self._tools_of(case)
        if case.system_prompt is not None:
            rest = b',"instructions":' + encoded(case.system_prompt) + rest
        return Conversation(as_items(asked_turns(case)), rest)

    def _read_stream(self, stream: list[ServerSentEvent]) -> ModelAnswer:
        return read_response_stream(stream)

    def _read_whole(self, body: bytes) -> ModelAnswer:
        return read_response_whole(body)

    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:
        return [{"type": "function_call_output", "call_id": call.id, "output": text} for call, text, _ in results]


def as_items(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as items of this API: one with tool calls becomes several, a tool's result a result item."""
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


class _InputDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None

    def plain(self) -> TokenUsage:
        cached, reasoning = self.input_tokens_details, self.output_tokens_details
        return TokenUsage(
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
    """One event. Nested objects stay bytes: a stream repeats them, and only the last is read."""

    type: str = ""
    delta: Any = None
    output_index: int = 0
    item: msgspec.Raw = msgspec.Raw(b"null")
    response: msgspec.Raw = msgspec.Raw(b"null")


_RESPONSES = Reader(_Response)


_EVENTS = Reader(_StreamEvent)


def read_response_whole(body: bytes) -> ModelAnswer:
    """Read an answer that came as one object."""
    response = _RESPONSES.read(body)
    if response.output is None or response.error is not None or response.status in ("failed", "cancelled"):
        raise reported_error(msgspec.json.decode(body))
    return _answer(response, response.output)


def read_response_stream(stream: list[ServerSentEvent]) -> ModelAnswer:
    """Read a streamed answer; it is complete with its `response.completed` or `response.incomplete`."""
    received, _ = before_done(stream)
    pieces, fault = _EVENTS.read_all(received)
    response: _Response | None = None
    items: dict[int, dict[str, Any]] = {}
    first: dict[bool, float] = {}
    for event, piece in zip(received, pieces, strict=False):
        kind = piece.type
        if kind in _TERMINATORS:
            response = _RESPONSES.read(bytes(piece.response))
            if kind == "response.failed" and fault is None:
                fault = reported_error(response.error or "the response failed")
        elif kind == "error" and fault is None:
            fault = reported_error(_without_kind(msgspec.json.decode(event.data)))
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
    """Return an error event's fields without its type, which is always `error`."""
    return {key: value for key, value in error.items() if key != "type"} if isinstance(error, dict) else error


def _token_kind(piece: _StreamEvent) -> bool | None:
    """True when the event brings reasoning, False when it brings a part of the answer, None when it brings neither."""
    if piece.type.endswith(".delta"):
        return "reasoning" in piece.type if piece.delta else None
    if piece.type == "response.output_item.added":
        return False if str(_ITEMS.read(bytes(piece.item)).get("type")).endswith("_call") else None
    return None


def _from_deltas(pieces: Sequence[_StreamEvent]) -> list[dict[str, Any]]:
    """Return the text of a stream that broke off, as the item it would have become."""
    kind = "response.output_text.delta"
    text = "".join(piece.delta for piece in pieces if piece.type == kind and isinstance(piece.delta, str))
    content = [{"type": "output_text", "text": text}]
    return [{"type": "message", "role": "assistant", "content": content}] if text else []


def _answer(response: _Response, output: list[dict[str, Any]]) -> ModelAnswer:
    texts: list[str] = []
    refusals: list[str] = []
    for item in output:
        for part in item.get("content") or () if item.get("type") == "message" else ():
            if part.get("type") == "output_text":
                texts.append(part.get("text") or "")
            elif part.get("type") == "refusal":
                refusals.append(part.get("refusal") or "")
    calls = [_call(item) for item in output if item.get("type") == "function_call"]
    return ModelAnswer(
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
    """Return why the model stopped, in the chat API's words where this API has no word for it."""
    if response.status == "incomplete":
        details = response.incomplete_details
        return (details.reason if details is not None else None) or "incomplete"
    if response.status == "completed":
        return "tool_calls" if called else "stop"
    return response.status
