"""Requests and answers as Google's Gemini API (`generateContent`) has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from steelyard.mock.answers import AnswerUsage, ParsedRequest, SimulatedAnswer

_encode = msgspec.json.encode
_SIGNATURE = "bW9jaw=="
_FINISH_REASONS = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP", "refusal": "SAFETY"}
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_SCHEMAS = ("parametersJsonSchema", "parameters_json_schema", "parameters")
_CHOICES = {"ANY": "required", "NONE": "none"}


class _Declarations(msgspec.Struct, rename="camel"):
    function_declarations: list[dict[str, Any]] | None = None


class _Content(msgspec.Struct):
    parts: list[dict[str, Any]] | None = None
    role: str | None = None


class _CallingConfig(msgspec.Struct, rename="camel"):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class _ToolConfig(msgspec.Struct, rename="camel"):
    function_calling_config: _CallingConfig | None = None


class _GenerationConfig(msgspec.Struct, rename="camel"):
    max_output_tokens: int | None = None


class _Request(msgspec.Struct, rename="camel"):
    contents: list[_Content] | None = None
    system_instruction: _Content | None = None
    tools: list[_Declarations] | None = None
    tool_config: _ToolConfig | None = None
    generation_config: _GenerationConfig | None = None


_decoder = msgspec.json.Decoder(_Request)


def parse(body: bytes) -> ParsedRequest:
    """Decode a body; raises msgspec.DecodeError or ValidationError."""
    request = _decoder.decode(body)
    declared = [one for tool in request.tools or () for one in tool.function_declarations or ()]
    calling = (request.tool_config and request.tool_config.function_calling_config) or _CallingConfig()
    choice: str | dict[str, Any] | None = _CHOICES.get(calling.mode or "")
    if choice == "required" and calling.allowed_function_names:
        choice = {"type": "function", "name": calling.allowed_function_names[0]}
    system = request.system_instruction
    return ParsedRequest(
        messages=[_turn(content) for content in request.contents or ()],
        system=list(system.parts or ()) if system is not None else None,
        tools=[{**tool, "parameters": _schema(tool)} for tool in declared],
        tool_choice=choice,
        max_tokens=request.generation_config.max_output_tokens if request.generation_config else None,
    )


def _schema(tool: dict[str, Any]) -> Any:
    """Return a function's schema; Google takes either spelling of a field, and its own client sends both."""
    return next((tool[name] for name in _SCHEMAS if tool.get(name)), None)


def _turn(content: _Content) -> dict[str, Any]:
    parts = content.parts or []
    is_result = any("functionResponse" in part for part in parts)
    return {"role": "tool" if is_result else "assistant" if content.role == "model" else "user", "content": parts}


def whole(answer: SimulatedAnswer) -> bytes:
    """Encode an answer that is not streamed."""
    parts: list[dict[str, Any]] = []
    if answer.reasoning:
        parts.append({"text": "".join(answer.reasoning), "thought": True})
    if answer.tool_call is not None:
        parts.append(_call(answer))
    elif answer.tokens and answer.stop != "refusal":
        parts.append({"text": answer.text})
    return _encode(_chunk(answer, parts, is_last=True))


def frames(answer: SimulatedAnswer) -> Iterator[bytes]:
    """Yield the events of a stream: a piece for each token, then the end. A call comes whole, with its last token."""
    start = b'data: {"candidates":[{"content":{"parts":[{"text":'
    rest = b'}],"role":"model"},"index":0}],"modelVersion":%b,"responseId":%b}\n\n' % (
        _encode(answer.model),
        _encode(answer.id),
    )
    for token in answer.reasoning:
        yield b"%b%b%b%b" % (start, _encode(token), b',"thought":true', rest)
    is_text = answer.tool_call is None and answer.stop != "refusal"
    for number, token in enumerate(answer.tokens, 1):
        if answer.tool_call is not None and number == len(answer.tokens):
            yield b"data: %b\n\n" % _encode(_chunk(answer, [_call(answer)]))
        else:
            yield b"%b%b%b" % (start, _encode(token) if is_text else b'""', rest)
    yield b"data: %b\n\n" % _encode(_chunk(answer, [], is_last=True))


def broken(message: str) -> bytes:
    """Encode an error in the middle of a stream."""
    return b"data: %b\n\n" % failure(503, message, "")


def failure(status: int, message: str, request_id: str) -> bytes:  # noqa: ARG001 - Google's is in no body
    """Encode an error body as Google writes it."""
    kind = _STATUSES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
    return _encode({"error": {"code": status, "message": message, "status": kind}})


def _call(answer: SimulatedAnswer) -> dict[str, Any]:
    assert answer.tool_call is not None
    arguments = msgspec.Raw(answer.tool_call.arguments.encode())
    call = {"id": answer.tool_call.id, "name": answer.tool_call.name, "args": arguments}
    return {"functionCall": call, "thoughtSignature": _SIGNATURE}


def _chunk(answer: SimulatedAnswer, parts: list[dict[str, Any]], *, is_last: bool = False) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    body: dict[str, Any] = {"candidates": [candidate], "modelVersion": answer.model, "responseId": answer.id}
    if is_last:
        candidate["finishReason"] = _FINISH_REASONS[answer.stop]
        if answer.stop == "refusal":
            candidate["finishMessage"] = answer.text
        if answer.usage is not None:
            body["usageMetadata"] = _usage(answer.usage)
    return body


def _usage(usage: AnswerUsage) -> dict[str, Any]:
    """Here, unlike at OpenAI, reasoning is not among the tokens of the answer."""
    counts = {
        "promptTokenCount": usage.input,
        "candidatesTokenCount": usage.output - usage.reasoning,
        "totalTokenCount": usage.input + usage.output,
    }
    if usage.cached:
        counts["cachedContentTokenCount"] = usage.cached
    if usage.reasoning:
        counts["thoughtsTokenCount"] = usage.reasoning
    return counts
