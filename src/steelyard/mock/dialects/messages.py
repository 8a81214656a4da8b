"""Answers in the format of Anthropic's messages API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from steelyard.mock.answers import AnswerUsage, SimulatedAnswer

_encode = msgspec.json.encode
_SIGNATURE = "bW9jaw=="
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "refusal": "refusal"}
_STOPPED = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_DELTA_TYPES = {"thinking": "thinking_delta", "text": "text_delta", "partial_json": "input_json_delta"}


def whole(answer: SimulatedAnswer) -> bytes:
    """Encode the body of an answer that is not streamed."""
    message = _message(answer, output=answer.usage.output if answer.usage else 0)
    message["stop_reason"] = _STOP_REASONS[answer.stop]
    if answer.reasoning:
        thinking = "".join(answer.reasoning)
        message["content"].append({"type": "thinking", "thinking": thinking, "signature": _SIGNATURE})
    if answer.tool_call is not None:
        arguments = msgspec.Raw(answer.tool_call.arguments.encode())
        message["content"].append({**_block(answer), "input": arguments})
    elif answer.tokens:
        message["content"].append({"type": "text", "text": answer.text})
    return _encode(message)


def frames(answer: SimulatedAnswer) -> Iterator[bytes]:
    """Encode the events of a stream, one piece for each token, then the end."""
    before = _event("message_start", message=_message(answer, output=1 if answer.usage else 0))
    index = 0
    if answer.reasoning:
        before += _started(0, {"type": "thinking", "thinking": "", "signature": ""})
        for piece in _deltas(0, "thinking", answer.reasoning):
            yield before + piece
            before = b""
        before = _event("content_block_delta", index=0, delta={"type": "signature_delta", "signature": _SIGNATURE})
        before += _STOPPED % 0
        index = 1
    if answer.tokens:
        before += _started(index, {**_block(answer), "input": {}} if answer.tool_call else _block(answer))
        for piece in _deltas(index, "partial_json" if answer.tool_call else "text", answer.tokens):
            yield before + piece
            before = b""
        before = _STOPPED % index
    delta = {"stop_reason": _STOP_REASONS[answer.stop], "stop_sequence": None}
    usage = _usage(answer.usage, answer.usage.output) if answer.usage else {"output_tokens": 0}
    yield before + _event("message_delta", delta=delta, usage=usage) + _event("message_stop")


def broken(message: str) -> bytes:
    """Encode an error in the middle of a stream."""
    return _event("error", error={"type": "overloaded_error", "message": message})


def _deltas(index: int, field: str, tokens: Iterator[str] | Any) -> Iterator[bytes]:
    start = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":' % (
        index,
        _DELTA_TYPES[field].encode(),
        field.encode(),
    )
    for token in tokens:
        yield b"%b%b}}\n\n" % (start, _encode(token))


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _started(index: int, block: dict[str, Any]) -> bytes:
    return _event("content_block_start", index=index, content_block=block)


def _block(answer: SimulatedAnswer) -> dict[str, Any]:
    if answer.tool_call is None:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": f"toolu_{answer.tool_call.id}", "name": answer.tool_call.name}


def _message(answer: SimulatedAnswer, output: int) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer.usage, output) if answer.usage else {"input_tokens": 0, "output_tokens": 0},
    }


def _usage(usage: AnswerUsage, output: int) -> dict[str, Any]:
    """Encode the usage; unlike OpenAI's, its input tokens do not include the cached ones."""
    return {
        "input_tokens": usage.input - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": min(usage.reasoning, output)},
    }
