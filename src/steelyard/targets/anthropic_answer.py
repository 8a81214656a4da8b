"""Reads what the messages API answers: one object, or a stream of events that build its content block by block."""

from __future__ import annotations

from typing import Any

import msgspec

from steelyard.targets.answer import Answer, Call, Usage
from steelyard.targets.replies import Reader, before_done, reported
from steelyard.transport.sse import Event

MALFORMED_INPUT = "INVALID_JSON"
"""The key under which a tool call's input stands that is no JSON object: the API takes nothing else back."""

_THINKING = ("thinking", "redacted_thinking")


class _OutputDetails(msgspec.Struct, gc=False):
    thinking_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens_details: _OutputDetails | None = None

    def updated(self, later: _Usage) -> _Usage:
        """The counts of a stream are running totals: the last one that was told stands."""
        pairs = ((name, getattr(later, name)) for name in self.__struct_fields__)
        return msgspec.structs.replace(self, **{name: value for name, value in pairs if value is not None})

    def plain(self) -> Usage:
        """`input_tokens` leaves out what was read from the cache or written to it; all three were sent."""
        told = [
            count
            for count in (self.input_tokens, self.cache_read_input_tokens, self.cache_creation_input_tokens)
            if count is not None
        ]
        details = self.output_tokens_details
        return Usage(
            sum(told) if told else None,
            self.output_tokens,
            self.cache_read_input_tokens,
            None if details is None else details.thinking_tokens,
            self.cache_creation_input_tokens,
        )


class _Message(msgspec.Struct, gc=False):
    content: list[dict[str, Any]] | None = None
    stop_reason: str | None = None
    usage: _Usage | None = None


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
    index: int = 0
    message: _Message | None = None
    content_block: dict[str, Any] | None = None
    delta: _Delta | None = None
    usage: _Usage | None = None
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
        """The block as the API would have given it in one piece."""
        for name, pieces in (("text", self.texts), ("thinking", self.thoughts), ("signature", self.signatures)):
            if pieces:
                self.fields[name] = self.fields.get(name, "") + "".join(pieces)
        if self.inputs:
            self.fields["input"] = "".join(self.inputs)
        if self.citations:
            self.fields["citations"] = [*(self.fields.get("citations") or ()), *self.citations]
        return self.fields


def read_anthropic_whole(body: bytes) -> Answer:
    """The answer in one object."""
    message = _MESSAGES.read(body)
    if message.content is None:
        raise reported(msgspec.json.decode(body))
    answer = _answer(message.content, message.stop_reason)
    answer.usage = None if message.usage is None else message.usage.plain()
    return answer


def read_anthropic_stream(stream: list[Event]) -> Answer:
    """The answer in a stream, which is whole with its `message_stop` and not before."""
    told, _ = before_done(stream)
    pieces, fault = _EVENTS.read_all(told)
    blocks: dict[int, _Block] = {}
    usage = _Usage()
    has_usage = terminated = False
    stop_reason: str | None = None
    first: dict[bool, float] = {}
    for event, piece in zip(told, pieces, strict=False):
        later = piece.usage if piece.message is None else piece.message.usage
        if later is not None:
            usage, has_usage = usage.updated(later), True
        if piece.type == "content_block_start":
            blocks[piece.index] = _Block(piece.content_block or {})
        elif piece.type == "content_block_delta" and piece.delta is not None:
            blocks.setdefault(piece.index, _Block({"type": "text"})).add(piece.delta)
        elif piece.type == "message_delta" and piece.delta is not None:
            stop_reason = piece.delta.stop_reason or stop_reason
        elif piece.type == "message_stop":
            terminated = True
        elif piece.error is not None and fault is None:
            fault = reported(msgspec.json.decode(event.data))
        if (is_reasoning := _token_kind(piece)) is not None:
            first.setdefault(is_reasoning, event.at)
    answer = _answer([blocks[index].whole() for index in sorted(blocks)], stop_reason)
    answer.usage = usage.plain() if has_usage else None
    answer.first_content, answer.first_reasoning = first.get(False), first.get(True)
    answer.terminated = answer.complete = terminated
    answer.fault = fault
    return answer


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


def _answer(blocks: list[dict[str, Any]], stop_reason: str | None) -> Answer:
    blocks = [block for block in blocks if block.get("type") != "text" or block.get("text")]
    calls = [_call(block) for block in blocks if "input" in block]
    text = "".join(block["text"] for block in blocks if block.get("type") == "text")
    return Answer(
        messages=[{"role": "assistant", "content": blocks}] if blocks else [],
        text=text,
        refusal="" if stop_reason == "refusal" else None,
        calls=[call for call, block in calls if block.get("type") == "tool_use"],
        stop_reason=stop_reason,
    )


def _call(block: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
    """A tool's call; its input in the block becomes the object that the API wants to see again."""
    given = block["input"]
    text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    if isinstance(given, str):
        block["input"] = input_object(given)
    return Call(str(block.get("id") or ""), str(block.get("name") or ""), text), block


def input_object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {MALFORMED_INPUT: text}
