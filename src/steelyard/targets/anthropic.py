"""Anthropic's messages API: requests in its shape, and answers read from one object or from a stream."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from steelyard.errors import TargetError
from steelyard.records import EvalCase
from steelyard.targets.conversation import Call, Conversation, ModelAnswer, TokenUsage, asked_turns, encoded, media_of
from steelyard.targets.endpoint import EndpointTarget
from steelyard.targets.keys import is_access_token
from steelyard.targets.wire import (
    Reader,
    TextParts,
    before_done,
    earliest,
    is_blank,
    lenient_int,
    reported_error,
    usage_fields,
)
from steelyard.transport.sse import ServerSentEvent

DEFAULT_MAX_TOKENS = 4096
"""The API requires a value; `params: {max_tokens: …}` sets another."""

_API_VERSION = "2023-06-01"

_SYSTEM_ROLES = ("system", "developer")

MALFORMED_INPUT = "INVALID_JSON"
"""Key that wraps a tool call's input when it is not a JSON object: the API accepts only objects."""

_THINKING = ("thinking", "redacted_thinking")


class AnthropicMessages(EndpointTarget):
    """A model behind `POST {base_url}/v1/messages`. `api_version` is the `anthropic-version` header."""

    kind = "anthropic-messages"
    default_base_url = "https://api.anthropic.com"
    base_url_variables = ("ANTHROPIC_BASE_URL",)
    key_variables = ("ANTHROPIC_API_KEY",)
    path = "/v1/messages"
    turns_field = b',"messages":'
    reserved = ("model", "messages", "stream", "tools", "system")
    tool_shape = "anthropic"

    def _fixed_fields(self) -> dict[str, Any]:
        return {"max_tokens": DEFAULT_MAX_TOKENS, **super()._fixed_fields()}

    def _opening(self, case: EvalCase) -> Conversation:
        turns, system = split_system(asked_turns(case), case.system_prompt)
        rest = self._tools_of(case)
        return Conversation(turns, rest if system is None else b',"system":' + encoded(system) + rest)

    def _make_url(self) -> str:
        path = self.path.removeprefix("/v1") if self._address.path.endswith("/v1") else self.path
        return self._address.url(path)

    def _own_headers(self) -> list[tuple[str, str]]:
        return [("anthropic-version", self.api_version or _API_VERSION)]

    def _key_header(self, key: str) -> tuple[str, str]:
        """Access tokens, as of Entra ID and of gateways, are bearer tokens; a key of Anthropic has its own header."""
        return super()._key_header(key) if is_access_token(key) else ("x-api-key", key)

    def _read_stream(self, stream: list[ServerSentEvent]) -> ModelAnswer:
        return read_anthropic_stream(stream)

    def _read_whole(self, body: bytes) -> ModelAnswer:
        return read_anthropic_whole(body)

    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:
        blocks = [
            {"type": "tool_result", "tool_use_id": call.id, "content": text, **({"is_error": True} if failed else {})}
            for call, text, failed in results
        ]
        return [{"role": "user", "content": blocks}]


def split_system(
    messages: Sequence[dict[str, Any]], system_prompt: str | None
) -> tuple[list[dict[str, Any]], str | list[dict[str, Any]] | None]:
    """Return the turns in this API's shape and, separately, the system prompt, which is not a turn here."""
    turns: list[dict[str, Any]] = []
    parts: list[Any] = [] if system_prompt is None else [system_prompt]
    for message in messages:
        role = message.get("role")
        if role in _SYSTEM_ROLES:
            content = message.get("content")
            parts.extend(content if isinstance(content, list) else [content or ""])
        elif role == "tool":
            _add_result(turns, message)
        else:
            turns.append(_turn(message))
    return turns, _system(parts)


def _system(parts: list[Any]) -> str | list[dict[str, Any]] | None:
    if not parts:
        return None
    if all(isinstance(part, str) for part in parts):
        return "\n\n".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _add_result(turns: list[dict[str, Any]], message: Mapping[str, Any]) -> None:
    """Put a tool's result into the user's turn: results of parallel calls belong in one turn."""
    block = {
        "type": "tool_result",
        "tool_use_id": message.get("tool_call_id"),
        "content": _content(message.get("content")) or "",
    }
    last = turns[-1] if turns else None
    if last is not None and last["role"] == "user" and _is_results(last["content"]):
        last["content"].append(block)
    else:
        turns.append({"role": "user", "content": [block]})


def _is_results(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(block, dict) and block.get("type") == "tool_result" for block in content
    )


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    calls = message.get("tool_calls")
    if isinstance(content, str) and not calls:
        return message if len(message) == 2 else {"role": message["role"], "content": content}
    blocks = _content(content) or []
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    return {"role": message.get("role"), "content": [*blocks, *map(_tool_use, calls or ())]}


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    value = input_object(arguments) if isinstance(arguments, str) else arguments
    return {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": value}


def _content(content: Any) -> Any:
    return [_block(part) for part in content] if isinstance(content, list) else content


def _block(part: Any) -> Any:
    """Return a part of a message as a block: texts, images and documents are translated, anything else is unchanged."""
    if not isinstance(part, Mapping):
        return {"type": "text", "text": str(part)}
    kind = part.get("type")
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text", "")}
    media = media_of(part)
    if media is None:
        return part
    if media.kind == "text" and media.data is not None:
        text = base64.b64decode(media.data).decode("utf-8", "replace")
        source: dict[str, Any] = {"type": "text", "media_type": "text/plain", "data": text}
        return {"type": "document", "source": source, "title": media.name}
    if media.kind not in ("", "image") and media.media_type != "application/pdf":
        raise TargetError(f"anthropic-messages takes images, PDF and text files, got {media.media_type}: {media.name}")
    source = {"type": "url", "url": media.url}
    if media.data is not None:
        source = {"type": "base64", "media_type": media.media_type, "data": media.data}
    if media.media_type == "application/pdf":
        return {"type": "document", "source": source, "title": media.name}
    return {"type": "image", "source": source}


def read_usage(reports: Sequence[Any], oddities: list[str]) -> TokenUsage | None:
    """Read this API's usage, leniently. A stream reports running totals, one after another: the last value counts.

    `input_tokens` excludes cache reads and writes, which were sent too.
    """
    merged: dict[str, Any] = {}
    for report in reports:
        if isinstance(report, dict):
            merged |= {name: value for name, value in report.items() if value is not None}
        elif not is_blank(report):
            oddities.append(f"usage is {report!r:.50}")
    fields = usage_fields(merged, oddities)
    if fields is None:
        return None
    read, written = fields.count("cache_read_input_tokens"), fields.count("cache_creation_input_tokens")
    counts = [count for count in (fields.count("input_tokens"), read, written) if count is not None]
    return TokenUsage(
        sum(counts) if counts else None,
        fields.count("output_tokens"),
        read,
        fields.count("output_tokens_details.thinking_tokens"),
        written,
        fields.cost(),
    )


class _Message(msgspec.Struct, gc=False):
    content: list[dict[str, Any]] | None = None
    stop_reason: str | None = None
    usage: Any = None


class _Delta(msgspec.Struct, gc=False):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    citation: Any = None
    stop_reason: str | None = None


class _StreamEvent(msgspec.Struct, gc=False):
    type: str = ""
    index: Any = 0
    message: _Message | None = None
    content_block: dict[str, Any] | None = None
    delta: _Delta | None = None
    usage: Any = None
    error: Any = None


_MESSAGES = Reader(_Message)


_EVENTS = Reader(_StreamEvent)


class _Block:
    """A content block under construction."""

    __slots__ = ("citations", "fields", "inputs", "signatures", "texts", "thoughts")

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.signatures: list[str] = []
        self.inputs: list[str] = []
        self.citations: list[Any] = []

    def add(self, delta: _Delta) -> None:
        for pieces, piece in (
            (self.texts, delta.text),
            (self.thoughts, delta.thinking),
            (self.signatures, delta.signature),
            (self.inputs, delta.partial_json),
            (self.citations, delta.citation),
        ):
            if piece:
                pieces.append(piece)

    def whole(self) -> dict[str, Any]:
        """Return the block as the API would have sent it in one piece."""
        for name, pieces in (("text", self.texts), ("thinking", self.thoughts), ("signature", self.signatures)):
            if pieces:
                self.fields[name] = self.fields.get(name, "") + "".join(pieces)
        if self.inputs:
            self.fields["input"] = "".join(self.inputs)
        if self.citations:
            self.fields["citations"] = [*(self.fields.get("citations") or ()), *self.citations]
        return self.fields


def read_anthropic_whole(body: bytes) -> ModelAnswer:
    """Read an answer that came as one object."""
    message = _MESSAGES.read(body)
    if message.content is None:
        raise reported_error(msgspec.json.decode(body))
    answer = _answer(message.content, message.stop_reason)
    answer.usage = read_usage([message.usage], answer.oddities)
    return answer


def read_anthropic_stream(stream: list[ServerSentEvent]) -> ModelAnswer:
    """Read a streamed answer; it is complete only with its `message_stop`."""
    received, _ = before_done(stream)
    pieces, fault = _EVENTS.read_all(received)
    blocks: dict[int, _Block] = {}
    usages: list[Any] = []
    terminated = False
    content = TextParts()
    stop_reason: str | None = None
    first: dict[bool, float] = {}
    for event, piece in zip(received, pieces, strict=False):
        later = piece.usage if piece.message is None else piece.message.usage
        if later is not None:
            usages.append(later)
        index = lenient_int(piece.index) or 0
        if piece.type == "content_block_start":
            blocks[index] = _Block(piece.content_block or {})
        elif piece.type == "content_block_delta" and piece.delta is not None:
            blocks.setdefault(index, _Block({"type": "text"})).add(piece.delta)
        elif piece.type == "message_delta" and piece.delta is not None:
            stop_reason = piece.delta.stop_reason or stop_reason
        elif piece.type == "message_stop":
            terminated = True
        elif not is_blank(piece.error) and fault is None:
            fault = reported_error(msgspec.json.decode(event.data))
        text = _text_of(piece)
        if text:
            content.add_text(text, event.at)
        elif (is_reasoning := _token_kind(piece)) is not None:
            first.setdefault(is_reasoning, event.at)
            content.note_token(event.at)
    answer = _answer([blocks[index].whole() for index in sorted(blocks)], stop_reason)
    answer.usage = read_usage(usages, answer.oddities)
    if answer.usage is not None and len(usages) == 1 and not terminated:
        answer.usage.output = None  # what `message_start` has is the number before the first text
    answer.first_call, answer.first_reasoning = first.get(False), first.get(True)
    answer.first_content = earliest(content.first_text, answer.first_call)
    answer.token_times = content.token_times()
    if content.text == answer.text:
        answer.text_times = content.times()
    answer.terminated = answer.complete = terminated
    answer.fault = fault
    return answer


def _text_of(piece: _StreamEvent) -> str | None:
    """Return the text of the answer that an event brings."""
    if piece.content_block is not None:
        text = piece.content_block.get("text") if piece.content_block.get("type") == "text" else None
        return text if isinstance(text, str) else None
    return piece.delta.text if piece.delta is not None and piece.type == "content_block_delta" else None


def _token_kind(piece: _StreamEvent) -> bool | None:
    """True when the event brings reasoning, False when it brings a part of the answer, None when it brings neither."""
    block, delta = piece.content_block, piece.delta
    if block is not None:
        if block.get("type") in _THINKING:
            return True if block.get("thinking") or block.get("data") else None
        return False if block.get("text") or block.get("type") != "text" else None
    if delta is None or piece.type != "content_block_delta":
        return None
    if delta.thinking:
        return True
    return False if delta.text or delta.partial_json else None


def _answer(blocks: list[dict[str, Any]], stop_reason: str | None) -> ModelAnswer:
    blocks = [block for block in blocks if block.get("type") != "text" or block.get("text")]
    calls = [_call(block) for block in blocks if "input" in block]
    text = "".join(block["text"] for block in blocks if block.get("type") == "text")
    return ModelAnswer(
        messages=[{"role": "assistant", "content": blocks}] if blocks else [],
        text=text,
        refusal="" if stop_reason == "refusal" else None,
        calls=[call for call, block in calls if block.get("type") == "tool_use"],
        stop_reason=stop_reason,
    )


def _call(block: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
    """Return a tool call and its block; the block's input becomes the object that the API expects back."""
    value = block["input"]
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if isinstance(value, str):
        block["input"] = input_object(value)
    return Call(str(block.get("id") or ""), str(block.get("name") or ""), text), block


def input_object(text: str) -> dict[str, Any]:
    """Return a tool call's input as an object, wrapped where it is not one."""
    try:
        value = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {MALFORMED_INPUT: text}
