"""Google's Gemini API (`generateContent`): requests in its shape, and answers read from one object or from a stream.

The same API is at Vertex AI, with another address (project and location in its path) and an access token as the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from steelyard.records import EvalCase
from steelyard.targets.anthropic import input_object
from steelyard.targets.conversation import (
    CONTENT_FILTER,
    Call,
    Conversation,
    Media,
    ModelAnswer,
    TokenUsage,
    asked_turns,
    encoded,
    translated_parts,
)
from steelyard.targets.endpoint import EndpointTarget
from steelyard.targets.keys import is_access_token
from steelyard.targets.wire import (
    Reader,
    TextParts,
    before_done,
    earliest,
    expect_object,
    is_blank,
    reported_error,
    usage_fields,
)
from steelyard.transport.sse import ServerSentEvent

_OWN_FIELDS = frozenset(
    {"safetySettings", "toolConfig", "cachedContent", "generationConfig", "labels", "serviceTier", "modelArmorConfig"}
)
"""Fields of the body that may be given as `params`; all others are fields of `generationConfig`."""
_FILTERED = frozenset(
    {
        "SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY", "IMAGE_PROHIBITED_CONTENT",
        "IMAGE_RECITATION", "MODEL_ARMOR", "LANGUAGE",
    }
)  # fmt: skip
"""Finish reasons of answers that a filter stopped."""
_API_KEYS = ("AIza", "AQ.")
"""How Google's API keys begin; whatever else a program prints is an access token."""
_UNSIGNED = "skip_thought_signature_validator"
"""What Gemini 3 takes in place of the signature of a call that it has not made itself."""


class Gemini(EndpointTarget):
    """A model behind `POST {base_url}/models/{model}:generateContent`, or `:streamGenerateContent?alt=sse`.

    `params` are fields of `generationConfig` (`temperature`, `maxOutputTokens`), or of the body (`safetySettings`).
    """

    kind = "gemini"
    default_base_url = "https://generativelanguage.googleapis.com/v1beta"
    base_url_variables = ("GOOGLE_GEMINI_BASE_URL", "GEMINI_BASE_URL")
    key_variables = ("GEMINI_API_KEY", "GOOGLE_API_KEY")
    path = ""
    turns_field = b',"contents":'
    reserved = ("model", "contents", "stream", "tools", "systemInstruction", "system_instruction")
    tool_shape = "anthropic"
    takes_back_all = True

    def _fixed_fields(self) -> dict[str, Any]:
        own = {name: value for name, value in self.params.items() if name in _OWN_FIELDS}
        loose = {name: value for name, value in self.params.items() if name not in _OWN_FIELDS}
        config = own.pop("generationConfig", None)
        return {**own, "generationConfig": {**(config if isinstance(config, dict) else {}), **loose}}

    def _make_url(self) -> str:
        path, model = self._address.path, self.model_id.removeprefix("models/")
        place = "" if any(part[:1] == "v" and part[1:2].isdigit() for part in path.split("/")) else "/v1beta"
        if "/" in model:  # tunedModels/…, publishers/…/models/…, endpoints/…
            place += "/"
        elif "/projects/" in path and "/publishers/" not in path:
            place += "/publishers/google/models/"
        else:
            place += "/models/"
        method = "streamGenerateContent" if self.stream else "generateContent"
        return self._address.url(f"{place}{quote(model, safe='/@')}:{method}", "alt=sse" if self.stream else "")

    def _key_header(self, key: str) -> tuple[str, str]:
        is_token = is_access_token(key) or (self._auth.source is not None and not key.startswith(_API_KEYS))
        return super()._key_header(key) if is_token else ("x-goog-api-key", key)

    def _encode_tools(self, tools: list[dict[str, Any]]) -> bytes:
        """Encode the tools: functions in one list, the provider's own (`googleSearch`) each by itself."""
        functions = [_declaration(tool) for tool in tools if isinstance(tool.get("name"), str)]
        others = [tool for tool in tools if not isinstance(tool.get("name"), str)]
        every = [*([{"functionDeclarations": functions}] if functions else ()), *others]
        return super()._encode_tools(every)

    def _opening(self, case: EvalCase) -> Conversation:
        turns, system = translated(asked_turns(case), case.system_prompt, signed=self.model_id.find("gemini-3") >= 0)
        rest = self._tools_of(case)
        return Conversation(turns, rest if not system else b',"systemInstruction":' + encoded({"parts": system}) + rest)

    def _read_stream(self, stream: list[ServerSentEvent]) -> ModelAnswer:
        return read_gemini_stream(stream)

    def _read_whole(self, body: bytes) -> ModelAnswer:
        return read_gemini_whole(body)

    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:
        return [
            {"role": "user", "parts": [_response(call.name, call.id, text, failed) for call, text, failed in results]}
        ]


def _declaration(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's declaration: a JSON schema, or a schema in Google's own spelling (`OBJECT`)."""
    schema = tool.get("input_schema")
    own = isinstance(schema, Mapping) and isinstance(schema.get("type"), str) and schema["type"].isupper()
    fields = {name: tool[name] for name in tool if name != "input_schema"}
    return {**fields, "parameters" if own else "parametersJsonSchema": schema}


def _response(name: str, identifier: str, text: str, failed: bool) -> dict[str, Any]:
    """Return a tool's result; the API takes an object."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = text
    if failed:
        value = {"error": text}
    elif not isinstance(value, dict):
        value = {"result": value}
    return {"functionResponse": {"name": name, **({"id": identifier} if identifier else {}), "response": value}}


def translated(
    messages: Sequence[dict[str, Any]], system_prompt: str | None, *, signed: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the turns in this API's shape and, separately, the parts of the system prompt.

    With `signed`, calls without a signature get the text that the API takes in its place.
    """
    turns: list[dict[str, Any]] = []
    system: list[dict[str, Any]] = [] if system_prompt is None else [{"text": system_prompt}]
    names: dict[Any, str] = {}
    for message in messages:
        role = message.get("role")
        if "parts" in message:
            turns.append(message)
        elif role in ("system", "developer"):
            system.extend(_parts(message.get("content")))
        elif role == "tool":
            _add_result(turns, message, names)
        else:
            calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
            names |= {call.get("id"): str((call.get("function") or {}).get("name")) for call in calls}
            parts = [*_parts(message.get("content")), *map(_function_call, calls)]
            if signed and calls:
                first = next(part for part in parts if "functionCall" in part)
                first.setdefault("thoughtSignature", _UNSIGNED)
            turns.append({"role": "model" if role in ("assistant", "model") else "user", "parts": parts})
    return turns, system


def _add_result(turns: list[dict[str, Any]], message: Mapping[str, Any], names: Mapping[Any, str]) -> None:
    """Put a tool's result into the user's turn: results of parallel calls belong in one turn."""
    name = str(message.get("name") or names.get(message.get("tool_call_id")) or "tool")
    text = "".join(part["text"] for part in _parts(message.get("content")) if isinstance(part.get("text"), str))
    part = _response(name, "", text, failed=False)
    last = turns[-1] if turns else None
    if last is not None and last["role"] == "user" and all("functionResponse" in one for one in last["parts"]):
        last["parts"].append(part)
    else:
        turns.append({"role": "user", "parts": [part]})


def _function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    value = input_object(arguments) if isinstance(arguments, str) else arguments
    part: dict[str, Any] = {"functionCall": {"name": function.get("name"), "args": value}}
    google = (call.get("extra_content") or {}).get("google")  # as Google's API in OpenAI's shape has it
    if isinstance(google, Mapping) and google.get("thought_signature"):
        part["thoughtSignature"] = google["thought_signature"]
    return part


def _parts(content: Any) -> list[dict[str, Any]]:
    return translated_parts(content, _media)


def _media(media: Media) -> dict[str, Any]:
    """Return an image or another file in this API's shape."""
    if media.data is not None:
        return {"inlineData": {"mimeType": media.media_type, "data": media.data}}
    kind = {} if media.media_type is None else {"mimeType": media.media_type}
    return {"fileData": {**kind, "fileUri": media.url}}


def read_usage(usage: Any, oddities: list[str]) -> TokenUsage | None:
    """Read this API's usage: thoughts are counted apart from the answer, what tools brought apart from the prompt."""
    fields = usage_fields(usage, oddities)
    if fields is None:
        return None
    thoughts, answer = fields.count("thoughtsTokenCount"), fields.count("candidatesTokenCount")
    prompt, tools = fields.count("promptTokenCount"), fields.count("toolUsePromptTokenCount")
    total = fields.count("totalTokenCount")
    output = None if answer is None and thoughts is None else (answer or 0) + (thoughts or 0)
    if output is None and prompt is not None and total is not None:
        output = max(0, total - prompt - (tools or 0))
    return TokenUsage(
        None if prompt is None else prompt + (tools or 0), output, fields.count("cachedContentTokenCount"), thoughts
    )


class _Chunk(msgspec.Struct, gc=False):
    """A whole answer, or a chunk of a streamed one."""

    candidates: list[dict[str, Any]] | None = None
    promptFeedback: Any = None  # noqa: N815 - the API's name
    usageMetadata: Any = None  # noqa: N815
    error: Any = None


_CHUNKS = Reader(_Chunk)


class _Turn:
    """One turn of the model, joined from its chunks."""

    def __init__(self) -> None:
        self.content = TextParts()
        self.parts: list[dict[str, Any]] = []
        self.calls: list[Call] = []
        self.stop_reason: str | None = None
        self.blocked: str | None = None
        self.first_call: float | None = None
        self.first_reasoning: float | None = None
        self.usage: Any = None

    def add(self, chunk: _Chunk, at: float | None) -> None:
        if not is_blank(chunk.usageMetadata):
            self.usage = chunk.usageMetadata
        if isinstance(chunk.promptFeedback, dict) and chunk.promptFeedback.get("blockReason"):
            self._block(chunk.promptFeedback, "the prompt", chunk.promptFeedback["blockReason"])
        for candidate in chunk.candidates or ():
            if candidate.get("index"):
                continue
            content = candidate.get("content")
            for part in (content.get("parts") or ()) if isinstance(content, dict) else ():
                self._add_part(expect_object("parts", part), at)
            reason = candidate.get("finishReason")
            if isinstance(reason, str) and reason:
                self.stop_reason = reason
                if reason in _FILTERED:
                    self._block(candidate, "the answer", reason)
            return

    def _block(self, part: Mapping[str, Any], what: str, reason: object) -> None:
        message = part.get("blockReasonMessage") or part.get("finishMessage")
        ratings = part.get("safetyRatings")
        named = (
            [str(one.get("category")) for one in ratings if isinstance(one, dict) and one.get("blocked")]
            if isinstance(ratings, list)
            else []
        )
        reasons = ", ".join([str(reason), *named])
        self.blocked = str(message) if message else f"a filter blocked {what}: {reasons}"
        self.stop_reason = CONTENT_FILTER

    def _add_part(self, part: dict[str, Any], at: float | None) -> None:
        text = part.get("text")
        if part.get("thought") is True:
            if text:
                self.content.note_token(at)
                self.first_reasoning = at if self.first_reasoning is None else self.first_reasoning
        elif isinstance(text, str) and text:
            self.content.add_text(text, at)
        elif isinstance(call := part.get("functionCall"), dict):
            arguments = call.get("args")
            written = "{}" if arguments is None else msgspec.json.encode(arguments).decode()
            self.calls.append(Call(str(call.get("id") or ""), str(call.get("name") or ""), written))
        if "text" not in part and self.first_call is None:
            self.first_call = at
        last = self.parts[-1] if self.parts else None
        if last is not None and _is_plain(last) and _is_plain(part) and last.get("thought") == part.get("thought"):
            last["text"] += part["text"]
        elif text != "" or len(part) > 1:
            self.parts.append(dict(part))

    def answer(self) -> ModelAnswer:
        oddities: list[str] = []
        text = self.content.text
        return ModelAnswer(
            messages=[{"role": "model", "parts": self.parts}] if self.parts else [],
            text=text,
            refusal=None if self.blocked is None or text else self.blocked,
            calls=self.calls,
            stop_reason=self.stop_reason,
            usage=read_usage(self.usage, oddities),
            first_content=earliest(self.content.first_text, self.first_call),
            first_reasoning=self.first_reasoning,
            first_call=self.first_call,
            text_times=self.content.times(),
            token_times=self.content.token_times(),
            oddities=oddities,
        )


def _is_plain(part: Mapping[str, Any]) -> bool:
    """Whether a part is only text, so that it may be joined with the next; one with a signature is left as it came."""
    return isinstance(part.get("text"), str) and part.keys() <= {"text", "thought"}


def read_gemini_whole(body: bytes) -> ModelAnswer:
    """Read an answer that came as one object."""
    chunk = _CHUNKS.read(body)
    if not is_blank(chunk.error) or (chunk.candidates is None and is_blank(chunk.promptFeedback)):
        raise reported_error(msgspec.json.decode(body))
    turn = _Turn()
    turn.add(chunk, None)
    return turn.answer()


def read_gemini_stream(stream: list[ServerSentEvent]) -> ModelAnswer:
    """Read a streamed answer; it is complete with its finish reason, or when its prompt was blocked."""
    received, _ = before_done(stream)
    chunks, fault = _CHUNKS.read_all(received)
    turn = _Turn()
    for event, chunk in zip(received, chunks, strict=False):
        turn.add(chunk, event.at)
        if not is_blank(chunk.error) and fault is None:
            fault = reported_error(msgspec.json.decode(event.data))
    answer = turn.answer()
    answer.complete = answer.terminated = turn.stop_reason is not None
    answer.fault = fault
    return answer
