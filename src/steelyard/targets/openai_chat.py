"""OpenAI's chat completions API, and what OpenAI's two APIs share: base URL, key, and Azure's URLs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from steelyard.errors import TransportError
from steelyard.protocols import HttpReply
from steelyard.records import EvalCase
from steelyard.targets.endpoint import EndpointConnection, EndpointTarget
from steelyard.targets.wire import (
    Call,
    Conversation,
    ModelAnswer,
    Reader,
    TokenUsage,
    asked_turns,
    before_done,
    reported_error,
)
from steelyard.transport.sse import ServerSentEvent

AZURE_KEY = "AZURE_OPENAI_API_KEY"
AZURE_BASE_URL = "AZURE_OPENAI_ENDPOINT"

_USAGE_FIELD = b'"stream_options":{"include_usage":true}'


class OpenAIEndpoint(EndpointTarget):
    """An OpenAI API: at OpenAI, at Azure (recognised by an `api_version` or the host name), or at another server."""

    default_base_url = "https://api.openai.com/v1"
    base_url_variables = ("OPENAI_BASE_URL",)
    key_variables = ("OPENAI_API_KEY",)
    names_deployment = False
    """Whether Azure's path names the deployment, which is the model."""

    @property
    def _is_azure(self) -> bool:
        return self.api_version is not None or self._address.is_azure

    def _key_names(self) -> tuple[str, ...]:
        return (AZURE_KEY, *self.key_variables) if self._is_azure else self.key_variables

    def _usual_base_url(self) -> str:
        azure = os.environ.get(AZURE_BASE_URL, "").strip() if self.api_version is not None else ""
        return azure or super()._usual_base_url()

    def _key_header(self, key: str) -> tuple[str, str]:
        return ("api-key", key) if self._is_azure else super()._key_header(key)

    def _make_url(self) -> str:
        if self.api_version is None:
            return self._address.url(self.path)
        return self._address.url(self._azure_path(), f"api-version={quote(self.api_version, safe='')}")

    def _azure_path(self) -> str:
        """Return the path from a resource's address to the call, without what the base URL already has."""
        path = self._address.path
        if path.endswith("/v1") or "/deployments/" in path:
            return self.path
        place = "" if path.endswith("/openai") else "/openai"
        if self.names_deployment:
            place += f"/deployments/{quote(self.model_id, safe='')}"
        return place + self.path


class OpenAIChat(OpenAIEndpoint):
    """A model behind `POST {base_url}/chat/completions`.

    Streams are requested with `stream_options: include_usage`; if the server rejects that, it is left out from then on.
    """

    kind = "openai-chat"
    path = "/chat/completions"
    names_deployment = True
    turns_field = b',"messages":'
    reserved = ("model", "messages", "stream", "tools")
    tool_shape = "chat"

    def _fixed_fields(self) -> dict[str, Any]:
        fields = super()._fixed_fields()
        if self.stream:
            fields.setdefault("stream_options", {"include_usage": True})
        return fields

    def _opening(self, case: EvalCase) -> Conversation:
        turns = asked_turns(case)
        if case.system_prompt is not None:
            turns.insert(0, {"role": "system", "content": case.system_prompt})
        return Conversation(turns, self._tools_of(case))

    async def _send(self, connection: EndpointConnection, body: bytes) -> tuple[HttpReply, TransportError | None]:
        reply, broken = await super()._send(connection, body)
        if _refuses_usage(reply) and _USAGE_FIELD in body and "stream_options" not in self.params:
            self._prefix = self._prefix.replace(b"," + _USAGE_FIELD, b"")
            return await super()._send(connection, body.replace(b"," + _USAGE_FIELD, b"", 1))
        return reply, broken

    def _read_stream(self, stream: list[ServerSentEvent]) -> ModelAnswer:
        return read_chat_stream(stream)

    def _read_whole(self, body: bytes) -> ModelAnswer:
        return read_chat_whole(body)

    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:
        return [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text, _ in results]


def _refuses_usage(reply: HttpReply) -> bool:
    return reply.status in (400, 422) and any(word in reply.body for word in (b"stream_options", b"include_usage"))


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct, gc=False):
    """A message, or a delta of one. Servers use different names for the reasoning."""

    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _InputDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    prompt_cache_hit_tokens: int | None = None
    """DeepSeek's name for cached tokens."""

    def plain(self) -> TokenUsage:
        cached, reasoning = self.prompt_tokens_details, self.completion_tokens_details
        return TokenUsage(
            self.prompt_tokens,
            self.completion_tokens,
            self.prompt_cache_hit_tokens if cached is None else cached.cached_tokens,
            None if reasoning is None else reasoning.reasoning_tokens,
        )


class _Completion(msgspec.Struct, gc=False):
    """A whole completion, or a chunk of a streamed one."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None


_COMPLETIONS = Reader(_Completion)


class _Joined:
    """Joins the deltas of one message as they arrive."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.refusals: list[str] = []
        self.calls: list[Call] = []
        self._places: dict[int, Call] = {}
        self.first_content: float | None = None
        self.first_reasoning: float | None = None

    def add(self, piece: _Message, at: float | None) -> None:
        """Add a delta; the first that is not empty sets the time of the first token."""
        text = piece.content
        reasoning = piece.reasoning_content or piece.reasoning
        if isinstance(text, list):
            text, thought = _split_parts(text)
            reasoning = reasoning or thought
        if reasoning:
            self.reasoning.append(reasoning)
            if self.first_reasoning is None:
                self.first_reasoning = at
        if text:
            self.texts.append(text)
        if piece.refusal:
            self.refusals.append(piece.refusal)
        for call in piece.tool_calls or ():
            self._add_call(call)
        if piece.function_call is not None:
            self._add_call(_ToolCall(index=0, function=piece.function_call))
        if self.first_content is None and (text or piece.refusal or piece.tool_calls or piece.function_call):
            self.first_content = at

    def _add_call(self, fragment: _ToolCall) -> None:
        """Add a fragment to its call: by index, or by id where a server repeats or omits the index."""
        place = fragment.index if fragment.index is not None else max(len(self.calls) - 1, 0)
        call = self._places.get(place)
        if call is None or (fragment.id and call.id and fragment.id != call.id):
            call = self._places[place] = Call("", "")
            self.calls.append(call)
        call.id = call.id or fragment.id or ""
        if fragment.function is not None:
            call.name = call.name or fragment.function.name or ""
            arguments = fragment.function.arguments
            call.arguments += (
                msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else arguments or ""
            )

    def answer(self) -> ModelAnswer:
        text = "".join(self.texts)
        refusal = "".join(self.refusals)
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if refusal:
            message["refusal"] = refusal
        if self.calls:
            message["tool_calls"] = [_native(call, number) for number, call in enumerate(self.calls)]
        return ModelAnswer(
            messages=[message] if len(message) > 2 or text else [],
            text=text,
            refusal=refusal or None,
            calls=self.calls,
            first_content=self.first_content,
            first_reasoning=self.first_reasoning,
        )


def _native(call: Call, number: int) -> dict[str, Any]:
    call.id = call.id or f"call_{number}"
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _split_parts(parts: list[Any]) -> tuple[str, str]:
    """Return the text and the reasoning of content that comes in parts, as Mistral's does."""
    text, thoughts = [], []
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "thinking":
            inner = part.get("thinking")
            thoughts.append(_split_parts(inner)[0] if isinstance(inner, list) else str(inner or ""))
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            text.append(part["text"])
    return "".join(text), "".join(thoughts)


def read_chat_whole(body: bytes) -> ModelAnswer:
    """Read an answer that came as one object."""
    completion = _COMPLETIONS.read(body)
    choice = next((choice for choice in completion.choices or () if not choice.index), None)
    if choice is None or choice.message is None:
        raise reported_error(msgspec.json.decode(body))
    answer = _plain_answer(choice.message)
    if answer is None:
        joined = _Joined()
        joined.add(choice.message, None)
        answer = joined.answer()
    answer.stop_reason = choice.finish_reason
    answer.usage = None if completion.usage is None else completion.usage.plain()
    return answer


def _plain_answer(message: _Message) -> ModelAnswer | None:
    """Return the answer of a message that is only text, as most are; None for any other."""
    text = message.content
    if type(text) is not str or not text or message != _Message(text):
        return None
    return ModelAnswer([{"role": "assistant", "content": text}], text)


def read_chat_stream(stream: list[ServerSentEvent]) -> ModelAnswer:
    """Read a streamed answer. It is complete with its `[DONE]`, or with a clean end after a finish reason, since many
    servers send no `[DONE]`.
    """
    received, done = before_done(stream)
    chunks, fault = _COMPLETIONS.read_all(received)
    joined = _Joined()
    stop_reason = usage = None
    for event, chunk in zip(received, chunks, strict=False):
        if fault is None and (chunk.error is not None or chunk.object == "error"):
            fault = reported_error(msgspec.json.decode(event.data))
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices or ():
            piece = choice.delta or choice.message
            if not choice.index:
                if piece is not None:
                    joined.add(piece, event.at)
                stop_reason = choice.finish_reason or stop_reason
    answer = joined.answer()
    answer.stop_reason = stop_reason
    answer.usage = None if usage is None else usage.plain()
    answer.terminated = done
    answer.complete = done or stop_reason is not None
    answer.fault = fault
    return answer
