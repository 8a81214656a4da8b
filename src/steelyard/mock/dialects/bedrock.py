"""Requests and answers as Amazon Bedrock's Converse API has them; streams are binary frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from steelyard.mock.answers import AnswerUsage, ParsedRequest, SimulatedAnswer
from steelyard.transport.sse import frame

_encode = msgspec.json.encode
_SIGNATURE = "bW9jaw=="
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "refusal": "content_filtered"}
_ERRORS = {
    400: "ValidationException",
    401: "UnrecognizedClientException",
    403: "AccessDeniedException",
    404: "ResourceNotFoundException",
    408: "ModelTimeoutException",
    424: "ModelErrorException",
    429: "ThrottlingException",
    503: "ServiceUnavailableException",
}


class _ToolConfig(msgspec.Struct, rename="camel"):
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None


class _InferenceConfig(msgspec.Struct, rename="camel"):
    max_tokens: int | None = None


class _Request(msgspec.Struct, rename="camel"):
    messages: list[dict[str, Any]] | None = None
    system: list[dict[str, Any]] | None = None
    tool_config: _ToolConfig | None = None
    inference_config: _InferenceConfig | None = None


_decoder = msgspec.json.Decoder(_Request)


def parse(body: bytes) -> ParsedRequest:
    """Decode a body; raises msgspec.DecodeError or ValidationError."""
    request = _decoder.decode(body)
    config = request.tool_config or _ToolConfig()
    specs = [tool["toolSpec"] for tool in config.tools or () if isinstance(tool.get("toolSpec"), dict)]
    choice: str | dict[str, Any] | None = None
    if isinstance(config.tool_choice, dict):
        named = config.tool_choice.get("tool")
        choice = (
            {"type": "tool", **named}
            if isinstance(named, dict)
            else "required"
            if "any" in config.tool_choice
            else None
        )
    return ParsedRequest(
        messages=[_turn(message) for message in request.messages or ()],
        system=request.system,
        tools=[{**spec, "parameters": (spec.get("inputSchema") or {}).get("json")} for spec in specs],
        tool_choice=choice,
        max_tokens=request.inference_config.max_tokens if request.inference_config else None,
    )


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    is_result = any(isinstance(part, dict) and "toolResult" in part for part in parts)
    return {"role": "tool" if is_result else message.get("role"), "content": parts}


def whole(answer: SimulatedAnswer) -> bytes:
    """Encode an answer that is not streamed."""
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        text = {"text": "".join(answer.reasoning), "signature": _SIGNATURE}
        content.append({"reasoningContent": {"reasoningText": text}})
    if answer.tool_call is not None:
        arguments = msgspec.Raw(answer.tool_call.arguments.encode())
        content.append({"toolUse": {**_tool_use(answer), "input": arguments}})
    elif answer.tokens:
        content.append({"text": answer.text})
    return _encode(
        {
            "output": {"message": {"role": "assistant", "content": content}},
            "stopReason": _STOP_REASONS[answer.stop],
            "usage": _usage(answer.usage),
            "metrics": {"latencyMs": 1},
        }
    )


def frames(answer: SimulatedAnswer) -> Iterator[bytes]:
    """Yield the frames of a stream: a piece for each token, then the end."""
    before = _event("messageStart", role="assistant")
    index = 0
    if answer.reasoning:
        for token in answer.reasoning:
            yield before + _delta(0, {"reasoningContent": {"text": token}})
            before = b""
        before = _delta(0, {"reasoningContent": {"signature": _SIGNATURE}}) + _event(
            "contentBlockStop", contentBlockIndex=0
        )
        index = 1
    if answer.tool_call is not None:
        before += _event("contentBlockStart", contentBlockIndex=index, start={"toolUse": _tool_use(answer)})
    for token in answer.tokens:
        yield before + _delta(index, {"text": token} if answer.tool_call is None else {"toolUse": {"input": token}})
        before = b""
    if answer.tokens:
        before += _event("contentBlockStop", contentBlockIndex=index)
    ending = _event("messageStop", stopReason=_STOP_REASONS[answer.stop])
    yield before + ending + _event("metadata", usage=_usage(answer.usage), metrics={"latencyMs": 1})


def broken(message: str) -> bytes:
    """Encode an error in the middle of a stream."""
    return frame(
        _encode({"message": message}),
        exception_type="serviceUnavailableException",
        content_type="application/json",
        message_type="exception",
    )


def failure(status: int, message: str, request_id: str) -> bytes:  # noqa: ARG001 - AWS's is in a header alone
    """Encode an error body as AWS writes it."""
    kind = _ERRORS.get(status, "InternalServerException" if status >= 500 else "ValidationException")
    return _encode({"__type": kind, "message": message})


def _event(kind: str, **fields: Any) -> bytes:
    return frame(_encode(fields), event_type=kind, content_type="application/json", message_type="event")


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return _event("contentBlockDelta", contentBlockIndex=index, delta=delta)


def _tool_use(answer: SimulatedAnswer) -> dict[str, Any]:
    assert answer.tool_call is not None
    return {"toolUseId": f"tooluse_{answer.tool_call.id}", "name": answer.tool_call.name}


def _usage(usage: AnswerUsage | None) -> dict[str, Any]:
    """Here, as at Anthropic, what was cached is not among the input tokens. The API never leaves the usage out."""
    if usage is None:
        return {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
    cached = {"cacheReadInputTokens": usage.cached} if usage.cached else {}
    return {
        "inputTokens": usage.input - usage.cached,
        "outputTokens": usage.output,
        "totalTokens": usage.input + usage.output,
        **cached,
    }
