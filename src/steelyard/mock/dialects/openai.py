"""Answers in the formats of OpenAI's APIs: chat completions, completions (which base models have), responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from steelyard.mock.answers import AnswerUsage, SimulatedAnswer

_encode = msgspec.json.encode


def chat_whole(answer: SimulatedAnswer) -> bytes:
    """Encode the body of an answer that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.tool_call is not None:
        message.update(content=None, tool_calls=[_tool_call(answer, answer.tool_call.arguments)])
    elif answer.stop == "refusal":
        message.update(content=None, refusal=answer.text)
    if answer.reasoning:
        message["reasoning_content"] = "".join(answer.reasoning)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(answer)}
    return _whole(answer, "chatcmpl", "chat.completion", choice)


def _whole(answer: SimulatedAnswer, prefix: str, kind: str, choice: dict[str, Any]) -> bytes:
    """The body of an answer with one choice, in whichever of the two APIs."""
    body = {
        "id": f"{prefix}-{answer.id}",
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
    }
    if answer.usage is not None:
        body["usage"] = usage_fields(answer.usage)
    return _encode(body)


def chat_frames(answer: SimulatedAnswer) -> Iterator[bytes]:
    """Encode the events of a stream, one piece for each token, then the end."""
    start = b'data: {"id":"chatcmpl-%b","object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
        answer.id.encode(),
        answer.created,
        _encode(answer.model),
    )
    reports_usage = answer.include_usage and answer.usage is not None
    end = b'],"usage":null}\n\n' if reports_usage else b"]}\n\n"
    delta, rest = start + b'{"index":0,"delta":', b',"finish_reason":null}' + end
    before = delta + b'{"role":"assistant","content":""}' + rest
    for token in answer.reasoning:
        yield b'%b%b{"reasoning_content":%b}%b' % (before, delta, _encode(token), rest)
        before = b""
    if answer.tool_call is not None:
        before += b'%b{"tool_calls":[%b]}%b' % (delta, _encode({"index": 0, **_tool_call(answer, "")}), rest)
    opening, closing = _around_token(answer)
    opening, rest_of_token = delta + opening, closing + rest
    for token in answer.tokens:
        yield b"%b%b%b%b" % (before, opening, _encode(token), rest_of_token)
        before = b""
    reason = _encode(_finish_reason(answer))
    last = b'%b%b{"index":0,"delta":{},"finish_reason":%b}%b' % (before, start, reason, end)
    if reports_usage and answer.usage is not None:
        last += b'%b],"usage":%b}\n\n' % (start, _encode(usage_fields(answer.usage)))
    yield last + b"data: [DONE]\n\n"


def chat_broken(message: str) -> bytes:
    """Encode an error in the middle of a stream."""
    return b"data: %b\n\n" % _encode({"error": {"message": message, "type": "server_error", "code": None}})


def _around_token(answer: SimulatedAnswer) -> tuple[bytes, bytes]:
    if answer.tool_call is not None:
        return b'{"tool_calls":[{"index":0,"function":{"arguments":', b"}}]}"
    return (b'{"refusal":' if answer.stop == "refusal" else b'{"content":'), b"}"


def _tool_call(answer: SimulatedAnswer, arguments: str) -> dict[str, Any]:
    assert answer.tool_call is not None
    function = {"name": answer.tool_call.name, "arguments": arguments}
    return {"id": f"call_{answer.tool_call.id}", "type": "function", "function": function}


def _finish_reason(answer: SimulatedAnswer) -> str:
    return "stop" if answer.stop == "refusal" else answer.stop


def usage_fields(usage: AnswerUsage) -> dict[str, Any]:
    """Return the usage as OpenAI's older APIs write it."""
    return {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.input + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def completion_whole(answer: SimulatedAnswer) -> bytes:
    """Encode an answer that is not streamed."""
    choice = {"index": 0, "text": answer.text, "logprobs": None, "finish_reason": _completion_finish_reason(answer)}
    return _whole(answer, "cmpl", "text_completion", choice)


def completion_frames(answer: SimulatedAnswer) -> Iterator[bytes]:
    """Yield the events of a stream: a piece for each token, then the end. There is no reasoning: it is left blank."""
    start = b'data: {"id":"cmpl-%b","object":"text_completion","created":%d,"model":%b,"choices":[' % (
        answer.id.encode(),
        answer.created,
        _encode(answer.model),
    )
    piece = start + b'{"index":0,"text":%b,"logprobs":null,"finish_reason":%b}]}\n\n'
    for _ in answer.reasoning:
        yield piece % (b'""', b"null")
    for token in answer.tokens:
        yield piece % (_encode(token), b"null")
    last = piece % (b'""', _encode(_completion_finish_reason(answer)))
    if answer.include_usage and answer.usage is not None:
        last += b'%b],"usage":%b}\n\n' % (start, _encode(usage_fields(answer.usage)))
    yield last + b"data: [DONE]\n\n"


def _completion_finish_reason(answer: SimulatedAnswer) -> str:
    return "length" if answer.stop == "length" else "stop"


def response_whole(answer: SimulatedAnswer) -> bytes:
    """Encode the body of an answer that is not streamed."""
    return _encode(_response(answer, _response_status(answer), _items(answer)))


def response_frames(answer: SimulatedAnswer) -> Iterator[bytes]:
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
    yield before + events.event(ending, response=_response(answer, _response_status(answer), items))


def response_broken(message: str) -> bytes:
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
        items.append({**message, "status": _response_status(answer)})
    return items


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """Make an output item as it is announced, before any of its content."""
    nothing: dict[str, Any] = {"summary": [], "content": [], "arguments": "", "status": "in_progress"}
    return {name: nothing.get(name, value) for name, value in item.items()}


def _response_status(answer: SimulatedAnswer) -> str:
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
        "usage": _response_usage(answer.usage) if answer.usage and is_finished else None,
    }


def _response_usage(usage: AnswerUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.input + usage.output,
    }
