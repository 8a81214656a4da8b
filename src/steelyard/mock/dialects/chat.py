"""Answers in the format of OpenAI's chat completions API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from steelyard.mock.answers import AnswerUsage, SimulatedAnswer

_encode = msgspec.json.encode


def whole(answer: SimulatedAnswer) -> bytes:
    """Encode the body of an answer that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.tool_call is not None:
        message.update(content=None, tool_calls=[_tool_call(answer, answer.tool_call.arguments)])
    elif answer.stop == "refusal":
        message.update(content=None, refusal=answer.text)
    if answer.reasoning:
        message["reasoning_content"] = "".join(answer.reasoning)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(answer)}
    body = {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
    }
    if answer.usage is not None:
        body["usage"] = usage_fields(answer.usage)
    return _encode(body)


def frames(answer: SimulatedAnswer) -> Iterator[bytes]:
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


def broken(message: str) -> bytes:
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
