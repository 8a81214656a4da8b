"""OpenAI's chat completions API, and what OpenAI's two APIs share: base URL, key, and Azure's URLs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeAlias
from urllib.parse import quote

import msgspec

from steelyard.errors import TargetError, TransientError
from steelyard.protocols import HttpReply
from steelyard.records import EvalCase
from steelyard.targets.conversation import Call, Conversation, ModelAnswer, TokenUsage, asked_turns
from steelyard.targets.endpoint import EndpointTarget
from steelyard.targets.keys import is_access_token
from steelyard.targets.wire import (
    NOTHING,
    Reader,
    TextParts,
    as_arguments,
    before_done,
    earliest,
    expect_object,
    is_blank,
    is_complete_json,
    lenient_int,
    merge_fields,
    reported_error,
    unreadable,
    usage_fields,
)
from steelyard.transport.sse import ServerSentEvent

AZURE_KEYS = ("AZURE_OPENAI_API_KEY", "AZURE_OPENAI_AD_TOKEN")
AZURE_BASE_URL = "AZURE_OPENAI_ENDPOINT"

_USAGE_FIELD = b'"stream_options":{"include_usage":true}'
_NULL = msgspec.Raw(b"null")
_Empty: TypeAlias = Annotated[list[Any], msgspec.Meta(max_length=0)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

_FAILED = {
    "error": "the provider failed while it generated",
    "insufficient_system_resource": "its inference system was out of resources",
    "network_error": "its inference system could not be reached",
}
"""Finish reasons that are failures: OpenRouter's, DeepSeek's and Zhipu's."""
_REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_text", "reasoning_details", "thinking")
"""Names that servers have for the reasoning."""
_READ_FIELDS = frozenset({"role", "content", "tool_calls", "function_call", "refusal", "audio"})
_CALL_FIELDS = frozenset({"index", "id", "type", "function", "custom"})
_FUNCTION_FIELDS = frozenset({"name", "arguments", "input"})


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
        return (*AZURE_KEYS, *self.key_variables) if self._is_azure else self.key_variables

    def _usual_base_url(self) -> str:
        azure = os.environ.get(AZURE_BASE_URL, "").strip() if self.api_version is not None else ""
        return azure or super()._usual_base_url()

    def _key_header(self, key: str) -> tuple[str, str]:
        """Azure takes its own keys in another header; tokens of Entra ID are bearer tokens everywhere."""
        return ("api-key", key) if self._is_azure and not is_access_token(key) else super()._key_header(key)

    def _make_url(self) -> str:
        if self.api_version is None:
            return self._address.url(self.path)
        return self._address.url(self._azure_path(), f"api-version={quote(self.api_version, safe='')}")

    def _azure_path(self) -> str:
        """Return the path from a resource's address to the call, without what the base URL already has."""
        path = self._address.path
        if path.endswith(("/v1", "/models")) or "/deployments/" in path:  # /models: the model is in the body
            return self.path
        place = "" if path.endswith("/openai") else "/openai"
        if self.names_deployment:
            place += f"/deployments/{quote(self.model_id, safe='')}"
        return place + self.path


class StreamUsage(OpenAIEndpoint):
    """An API whose streams tell their usage only if asked: `stream_options: include_usage`.

    If the server rejects that, it is left out from then on.
    """

    def _fixed_fields(self) -> dict[str, Any]:
        fields = super()._fixed_fields()
        if self.stream:
            fields.setdefault("stream_options", {"include_usage": True})
        return fields

    def _without_refused(self, reply: HttpReply, body: bytes) -> bytes | None:
        if refuses_usage(reply) and _USAGE_FIELD in body and "stream_options" not in self.params:
            self._prefix = self._prefix.replace(b"," + _USAGE_FIELD, b"")
            return body.replace(b"," + _USAGE_FIELD, b"", 1)
        return None


class OpenAIChat(StreamUsage):
    """A model behind `POST {base_url}/chat/completions`."""

    kind = "openai-chat"
    path = "/chat/completions"
    names_deployment = True
    turns_field = b',"messages":'
    reserved = ("model", "messages", "stream", "tools")
    tool_shape = "chat"
    takes_file_urls = False

    def _opening(self, case: EvalCase) -> Conversation:
        turns = asked_turns(case)
        if case.system_prompt is not None:
            turns.insert(0, {"role": "system", "content": case.system_prompt})
        return Conversation(turns, self._tools_of(case))

    def _read_stream(self, stream: list[ServerSentEvent]) -> ModelAnswer:
        return read_chat_stream(stream)

    def _read_whole(self, body: bytes) -> ModelAnswer:
        return read_chat_whole(body)

    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:
        return [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text, _ in results]


def refuses_usage(reply: HttpReply) -> bool:
    """Whether the server refuses to be asked for the usage of a stream."""
    return reply.status in (400, 422) and any(word in reply.body for word in (b"stream_options", b"include_usage"))


class _Delta(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A message, or a delta of one, with nothing in it but text. Any other is read as an object by `_Message`."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    function_call: None = None
    audio: None = None
    tool_calls: _Empty | None = None
    annotations: _Empty | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None
    error: None = None
    usage: None = None


class _Completion(msgspec.Struct, gc=False):
    """A chunk of a streamed completion, of the shape that nearly all have."""

    choices: list[_Choice] | None = None
    usage: msgspec.Raw = NOTHING
    x_groq: msgspec.Raw = NOTHING
    error: None = None
    object: str | None = None


class _InputDetails(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None
    cache_write_tokens: _Count | None = None


class _OutputDetails(msgspec.Struct, gc=False):
    reasoning_tokens: _Count | None = None


class _Usage(msgspec.Struct, gc=False):
    """Usage as OpenAI reports it; with fields of others, or of other types, it is read by `read_usage`."""

    prompt_tokens: _Count
    completion_tokens: _Count
    prompt_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    prompt_cache_hit_tokens: None = None
    cached_tokens: None = None
    reasoning_tokens: None = None
    cache_creation_input_tokens: None = None
    cost: None = None


class _WholeCompletion(_Completion, gc=False):
    """A completion in one piece, its usage included."""

    usage: _Usage | None = None  # type: ignore[assignment]


_PLAIN = Reader(_Completion)
_WHOLE = Reader(_WholeCompletion)
_USAGE = Reader(_Usage)
_OBJECTS: Reader[dict[str, Any]] = Reader(dict[str, Any])


class _Message:
    """One message, joined from its deltas; fields that are not known here are kept as they came.

    They are sent back under the names that they came with: a provider may need them again (signatures of thoughts),
    and knows no other names for them.
    """

    def __init__(self) -> None:
        self.content = TextParts()
        self.fields: dict[str, Any] = {}
        self.refusals: list[str] = []
        self.transcripts: list[str] = []
        self.calls: list[Call] = []
        self._native: list[dict[str, Any]] = []
        self._places: dict[int, int] = {}
        self.first_other: float | None = None
        self.first_reasoning: float | None = None
        self.oddities: list[str] = []

    def add(self, piece: dict[str, Any], at: float | None, *, whole: bool = False) -> None:
        """Add a delta, or a whole message; the first that is not empty sets the time of the first token."""
        self.content.add(piece.get("content"), at)
        calls = piece.get("tool_calls")
        if calls and not isinstance(calls, list):
            self.oddities.append(f"tool_calls is {type(calls).__name__}")
            calls = None
        touched: set[int] = set()
        for fragment in calls or ():
            touched.add(self._add_call(expect_object("tool_calls", fragment), touched, whole=whole))
        if isinstance(legacy := piece.get("function_call"), dict):
            self._add_call({"index": 0, "function": legacy}, touched, whole=False)
        if isinstance(refusal := piece.get("refusal"), str) and refusal:
            self.refusals.append(refusal)
        if isinstance(audio := piece.get("audio"), dict):
            self._add_audio(audio, at)
        extras = {name: value for name, value in piece.items() if name not in _READ_FIELDS and not is_blank(value)}
        for name in _REASONING_FIELDS:
            if name in extras and not isinstance(extras[name], str) and name != "reasoning_details":
                self.oddities.append(f"{name} is {type(extras[name]).__name__}")
        reasons = any(name in extras for name in _REASONING_FIELDS)
        if self.first_reasoning is None and reasons:
            self.first_reasoning = at
        if not piece.get("content") and (reasons or touched or refusal):
            self.content.note_token(at)
        merge_fields(self.fields, extras)
        if self.first_other is None and (touched or refusal or isinstance(legacy, dict)):
            self.first_other = at

    def _add_audio(self, audio: dict[str, Any], at: float | None) -> None:
        """Spoken answers have their text in a transcript; sent back, they are named by their id alone."""
        if isinstance(audio.get("id"), str):
            self.fields["audio"] = {"id": audio["id"]}
        if isinstance(text := audio.get("transcript"), str) and text:
            self.transcripts.append(text)
            self.first_other = at if self.first_other is None else self.first_other

    def _add_call(self, fragment: dict[str, Any], touched: set[int], *, whole: bool) -> int:
        """Add a fragment to its call, or begin a new one; returns the call's number."""
        number = len(self.calls) if whole else self._number_of(fragment, touched)
        if number == len(self.calls):
            self.calls.append(Call("", ""))
            self._native.append({})
        call, native = self.calls[number], self._native[number]
        merge_fields(native, {name: value for name, value in fragment.items() if name not in _CALL_FIELDS})
        call.id = call.id or (str(fragment["id"]) if fragment.get("id") else "")
        body = fragment.get("function")
        if isinstance(custom := fragment.get("custom"), dict):
            body, call.kind = custom, "custom"
        if isinstance(body, dict):
            call.name = call.name or str(body.get("name") or "")
            call.arguments += as_arguments(body.get("input" if call.kind == "custom" else "arguments"))
            inner = native.setdefault(call.kind, {})
            merge_fields(inner, {name: value for name, value in body.items() if name not in _FUNCTION_FIELDS})
        return number

    def _number_of(self, fragment: dict[str, Any], touched: set[int]) -> int:
        """Find a fragment's call: by its index; a new one where a server repeats or omits the index.

        That is one with another id, or with a name when the call so far is complete: all its arguments are there, it
        has another name, or this very delta has already brought a part of it.
        """
        place = lenient_int(fragment.get("index"))
        if place is None:
            place = max(self._places, default=0)
        number = self._places.get(place)
        if number is not None:
            call = self.calls[number]
            identifier = fragment.get("id")
            body = fragment.get("function") or fragment.get("custom")
            name = body.get("name") if isinstance(body, dict) else None
            if identifier and call.id:
                number = None if identifier != call.id else number
            elif name and (number in touched or call.name not in ("", name) or is_complete_json(call.arguments)):
                number = None
        if number is None:
            number = self._places[place] = len(self.calls)
        return number

    def answer(self) -> ModelAnswer:
        text = self.content.text or "".join(self.transcripts)
        refusal = "".join(self.refusals)
        message: dict[str, Any] = {"role": "assistant", "content": self.content.native() or None, **self.fields}
        if refusal:
            message["refusal"] = refusal
        if self.calls:
            message["tool_calls"] = [
                _native_call(call, native, number)
                for number, (call, native) in enumerate(zip(self.calls, self._native, strict=True))
            ]
        first_reasoning = earliest(self.first_reasoning, self.content.first_reasoning)
        return ModelAnswer(
            messages=[message] if len(message) > 2 or message["content"] else [],
            text=text,
            refusal=refusal or None,
            calls=self.calls,
            first_content=earliest(self.content.first_text, self.first_other),
            first_reasoning=first_reasoning,
            first_call=self.first_other,
            text_times=self.content.times(),
            token_times=self.content.token_times(),
            oddities=self.oddities,
        )


def _native_call(call: Call, native: dict[str, Any], number: int) -> dict[str, Any]:
    call.id = call.id or f"call_{number}"
    text = {"input" if call.kind == "custom" else "arguments": call.arguments}
    body = {"name": call.name, **text, **native.pop(call.kind, {})}
    return {"id": call.id, "type": call.kind, call.kind: body, **native}


def read_chat_whole(body: bytes) -> ModelAnswer:
    """Read an answer that came as one object."""
    completion = _WHOLE.try_read(body)
    if completion is not None and (answer := _plain_whole(completion)) is not None:
        return answer
    fields = _OBJECTS.read(body)
    choice = _first_choice(fields)
    message = None if choice is None else choice.get("message") or choice.get("delta")
    if choice is None or message is None:
        raise reported_error(fields)
    joined = _Message()
    joined.add(expect_object("message", message), None, whole=True)
    answer = joined.answer()
    answer.stop_reason = _text_or_none(choice.get("finish_reason"))
    answer.usage = _reported_usage([fields], answer.oddities)
    answer.fault = _fault_in(fields, choice)
    return answer


def _plain_whole(completion: _WholeCompletion) -> ModelAnswer | None:
    """Return the answer of a message that is only text, as most are; None for any other."""
    if not completion.choices or completion.object == "error" or completion.x_groq is not NOTHING:
        return None
    choice = completion.choices[0]
    message = choice.message
    if message is None or choice.index or choice.finish_reason in _FAILED:
        return None
    text = message.content
    if not text or message.reasoning_content or message.reasoning:
        return None
    usage = None if completion.usage is None else _plain_usage(completion.usage)
    return ModelAnswer([{"role": "assistant", "content": text}], text, stop_reason=choice.finish_reason, usage=usage)


def read_chat_stream(stream: list[ServerSentEvent]) -> ModelAnswer:
    """Read a streamed answer. It is complete with its `[DONE]`, or with a clean end after a finish reason, since many
    servers send no `[DONE]`.
    """
    received, done = before_done(stream)
    plain = _PLAIN.try_read_all(received)
    answer = None if plain is None else _plain_stream(received, plain)
    if answer is None:
        answer = _read_events(received)
    answer.terminated = done
    answer.complete = done or answer.stop_reason is not None
    return answer


def _plain_stream(received: list[ServerSentEvent], chunks: list[_Completion]) -> ModelAnswer | None:
    """Join chunks that bring only text and reasoning; None where one reports an error."""
    content = TextParts()
    reasoning: dict[str, list[str]] = {}
    stop_reason = first_reasoning = None
    usage = groq = NOTHING
    for event, chunk in zip(received, chunks, strict=True):
        if chunk.object == "error":
            return None
        if chunk.usage is not NOTHING and chunk.usage != _NULL:
            usage = chunk.usage
        if chunk.x_groq is not NOTHING:
            groq = chunk.x_groq
        for choice in chunk.choices or ():
            if choice.index:
                continue
            if choice.finish_reason is not None:
                if choice.finish_reason in _FAILED:
                    return None
                stop_reason = choice.finish_reason
            piece = choice.delta or choice.message
            if piece is None:
                continue
            if piece.content:
                content.add_text(piece.content, event.at)
            if piece.reasoning_content or piece.reasoning:
                first_reasoning = event.at if first_reasoning is None else first_reasoning
                if not piece.content:
                    content.note_token(event.at)
                for name in ("reasoning_content", "reasoning"):
                    if part := getattr(piece, name):
                        reasoning.setdefault(name, []).append(part)
    if groq is not NOTHING and b'"error"' in bytes(groq):
        return None
    text = content.text
    thoughts = {name: "".join(parts) for name, parts in reasoning.items()}
    answer = ModelAnswer(
        messages=[{"role": "assistant", "content": text or None, **thoughts}] if text or thoughts else [],
        text=text,
        stop_reason=stop_reason,
        first_content=content.first_text,
        first_reasoning=first_reasoning,
        text_times=content.times(),
        token_times=content.token_times(),
    )
    answer.usage = read_usage(usage, answer.oddities)
    if answer.usage is None and groq is not NOTHING:
        answer.usage = _reported_usage([{"x_groq": msgspec.json.decode(groq)}], answer.oddities)
    return answer


def _read_events(received: list[ServerSentEvent]) -> ModelAnswer:
    """Join chunks of any shape: tool calls, parts, fields of a provider's own, errors."""
    chunks, fault = _OBJECTS.read_all(received)
    joined = _Message()
    stop_reason: str | None = None
    read = 0
    try:
        for event, chunk in zip(received, chunks, strict=False):
            read += 1
            choice = _first_choice(chunk)
            if choice is not None:
                piece = choice.get("delta") or choice.get("message")
                if piece is not None:
                    joined.add(expect_object("delta", piece), event.at)
                stop_reason = _text_or_none(choice.get("finish_reason")) or stop_reason
            fault = fault or _fault_in(chunk, choice)
    except msgspec.ValidationError as error:
        fault = unreadable(f"event {read} of {len(received)} of the stream", received[read - 1].data, error)
    answer = joined.answer()
    answer.stop_reason = stop_reason
    answer.usage = _reported_usage(reversed(chunks), answer.oddities)
    answer.fault = fault
    return answer


def _first_choice(chunk: dict[str, Any]) -> dict[str, Any] | None:
    choices = chunk.get("choices")
    if choices is not None and not isinstance(choices, list):
        raise msgspec.ValidationError(f"Expected `array | null`, got `{type(choices).__name__}` - at `$.choices`")
    for choice in choices or ():
        if not lenient_int(expect_object("choices", choice).get("index")):
            return choice  # type: ignore[no-any-return]
    return None


def _fault_in(chunk: dict[str, Any], choice: dict[str, Any] | None) -> TargetError | None:
    """Return the error that a chunk or a completion reports: beside its choices, in one of them, or by how it ended."""
    if not is_blank(chunk.get("error")) or chunk.get("object") == "error":
        return reported_error(chunk)
    groq = chunk.get("x_groq")
    if isinstance(groq, dict) and not is_blank(groq.get("error")):
        return reported_error({"error": groq["error"]})
    if choice is None:
        return None
    if not is_blank(choice.get("error")):
        return reported_error({"error": choice["error"]})
    ending = choice.get("finish_reason")
    if isinstance(ending, str) and ending in _FAILED:
        return TransientError(f"the server ended its answer early: {_FAILED[ending]} (finish_reason {ending!r})")
    return None


def _reported_usage(chunks: Iterable[dict[str, Any]], oddities: list[str]) -> TokenUsage | None:
    """Return the usage in the first of these chunks that has one: beside the choices, in a choice, or under Groq's."""
    for chunk in chunks:
        choices = chunk.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        for place in (chunk, first, chunk.get("x_groq")):
            if isinstance(place, dict) and not is_blank(place.get("usage")):
                return read_usage(place["usage"], oddities)
    return None


def read_usage(usage: Any, oddities: list[str]) -> TokenUsage | None:
    """Read this API's usage, leniently: an odd count is left out and named, the answer is kept."""
    if isinstance(usage, msgspec.Raw) and (plain := _USAGE.try_read(bytes(usage))) is not None:
        return _plain_usage(plain)
    fields = usage_fields(usage, oddities)
    if fields is None:
        return None
    cached = fields.count("prompt_tokens_details.cached_tokens", "prompt_cache_hit_tokens", "cached_tokens")
    return TokenUsage(
        fields.count("prompt_tokens", "input_tokens"),
        fields.count("completion_tokens", "output_tokens"),
        cached,
        fields.count("completion_tokens_details.reasoning_tokens", "reasoning_tokens"),
        fields.count("prompt_tokens_details.cache_write_tokens", "cache_creation_input_tokens"),
        fields.cost(),
    )


def _plain_usage(usage: _Usage) -> TokenUsage:
    read, written = usage.prompt_tokens_details, usage.completion_tokens_details
    return TokenUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        None if read is None else read.cached_tokens,
        None if written is None else written.reasoning_tokens,
        None if read is None else read.cache_write_tokens,
    )


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
