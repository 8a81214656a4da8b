"""Amazon Bedrock's Converse API: requests in its shape, signed or with a bearer key, and answers whole or streamed.

A request is signed with AWS credentials (Signature Version 4, by libcurl) unless there is a Bedrock API key.
"""

from __future__ import annotations

import configparser
import hashlib
import inspect
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from steelyard.errors import ConfigurationError, TargetError, TransientError
from steelyard.masking import Secret
from steelyard.protocols import HttpReply, HttpRequest, RequestSigning
from steelyard.records import EvalCase
from steelyard.targets.anthropic import input_object
from steelyard.targets.auth import Headers, check_texts
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
from steelyard.targets.endpoint import EndpointConnection, EndpointTarget
from steelyard.targets.wire import (
    Reader,
    TextParts,
    as_arguments,
    earliest,
    expect_object,
    lenient_int,
    merge_fields,
    reported_error,
    usage_fields,
)
from steelyard.transport.sse import DAMAGED, MEDIA_TYPE, ServerSentEvent, frames

_INFERENCE = frozenset({"maxTokens", "temperature", "topP", "stopSequences"})
_OWN_FIELDS = frozenset(
    {
        "inferenceConfig", "guardrailConfig", "additionalModelRequestFields", "additionalModelResponseFieldPaths",
        "performanceConfig", "requestMetadata", "promptVariables", "serviceTier", "outputConfig",
    }
)  # fmt: skip
_FILTERED = ("content_filtered", "guardrail_intervened")
_OVERLOADED = ("throttlingException", "serviceUnavailableException", "modelNotReadyException")
_FINAL = ("validationException", "accessDeniedException", "resourceNotFoundException", "serviceQuotaExceededException")
_HOST_REGION = re.compile(r"bedrock-runtime(?:-fips)?\.([a-z0-9-]+)\.(?:amazonaws\.com|api\.aws)")
_IMAGE_FORMATS = {
    "image/png": "png",
    "image/jpeg": "jpeg",
    "image/jpg": "jpeg",
    "image/gif": "gif",
    "image/webp": "webp",
}
_DOCUMENT_FORMATS = {
    "application/pdf": "pdf",
    "text/csv": "csv",
    "application/msword": "doc",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "docx",
    "application/vnd.ms-excel": "xls",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "xlsx",
    "text/html": "html",
    "text/plain": "txt",
    "text/markdown": "md",
}
_AUDIO_FORMATS = {"mpeg": "mp3", "x-wav": "wav"}
_VIDEO_FORMATS = {"quicktime": "mov", "x-matroska": "mkv"}
_DEFAULT_REGION = "us-east-1"


class AwsCredentials(msgspec.Struct, frozen=True):
    """What a request is signed with."""

    key_id: str
    secret: str
    token: str | None = None

    def __repr__(self) -> str:
        return "AwsCredentials(***)"


class Bedrock(EndpointTarget):
    """A model behind `POST {base_url}/model/{model}/converse`, or `/converse-stream`.

    `model` is a model's id, an inference profile's, or an ARN. `region` names the place, `profile` a section of AWS's
    configuration files. `params` are fields of `inferenceConfig` (`maxTokens`, `temperature`, `topP`,
    `stopSequences`), of the body (`guardrailConfig`), or of the model alone (`additionalModelRequestFields`).
    """

    kind = "bedrock"
    default_base_url = ""
    base_url_variables = ("AWS_ENDPOINT_URL_BEDROCK_RUNTIME",)
    key_variables = ("AWS_BEARER_TOKEN_BEDROCK",)
    path = ""
    turns_field = b',"messages":'
    reserved = ("model", "modelId", "messages", "stream", "tools", "system", "toolConfig")
    tool_shape = "anthropic"
    stream_type = MEDIA_TYPE
    takes_back_all = True
    signs_requests = True

    def __init__(self, model: str, *, region: str | None = None, profile: str | None = None, **options: Any) -> None:
        check_texts(model=model, region=region, profile=profile)
        self.profile = profile
        self._given_region = region
        chosen = profile or os.environ.get("AWS_PROFILE", "").strip() or "default"
        given = any(options.get(name) is not None for name in ("api_key", "api_key_env", "api_key_command"))
        process = (
            None if given or (profile is None and _in_environment()) else _profile(chosen).get("credential_process")
        )
        if process:
            options = {**options, "api_key_command": shlex.split(process)}
        self._signing: tuple[Secret | None, RequestSigning | None] | None = None
        super().__init__(model, **options)
        found = _HOST_REGION.fullmatch(self._address.host)
        self.region = region or (found[1] if found else None) or _usual_region(chosen) or _DEFAULT_REGION

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_signing": None}

    def _usual_base_url(self) -> str:
        if address := super()._usual_base_url():
            return address
        chosen = self.profile or os.environ.get("AWS_PROFILE", "").strip() or "default"
        region = self._given_region or _usual_region(chosen)
        if region is None:
            raise ConfigurationError("bedrock needs a region: give it as region, or set AWS_REGION")
        if not re.fullmatch(r"[a-z0-9-]+", region):
            raise ConfigurationError(f"region must be a name such as us-east-1, got {region!r}")
        return f"https://bedrock-runtime.{region}.amazonaws.com"

    def _make_url(self) -> str:
        method = "converse-stream" if self.stream else "converse"
        return self._address.url(f"/model/{quote(self.model_id, safe='')}/{method}")

    def _check_credentials(self) -> None:
        if self._auth.source is not None or self._auth.find_key() is not None or self._credentials(None) is None:
            try:
                super()._check_credentials()
            except ConfigurationError as error:
                if self._auth.source is not None:
                    raise
                raise ConfigurationError(
                    f"no credentials for {self.base_url}: set AWS_BEARER_TOKEN_BEDROCK, or AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY, in the environment; name a profile; or give a program that prints them, "
                    "as api_key_command: [aws, configure, export-credentials]"
                ) from error

    def _credentials(self, fetched: Secret | None) -> AwsCredentials | None:
        """Return what requests are signed with; None where they carry a bearer key, or there is nothing."""
        if fetched is not None:
            return _from_json(fetched.reveal())
        if self._auth.source is not None or self._auth.find_key() is not None:
            return None
        return (None if self.profile else _from_environment()) or _from_profile(
            self.profile or os.environ.get("AWS_PROFILE", "").strip() or "default"
        )

    def _make_headers(self, fetched: Secret | None = None) -> Headers:
        """Return the headers; with AWS credentials there is no key among them, but there may be a session token."""
        credentials = self._credentials(fetched)
        if credentials is None:
            return super()._make_headers(fetched)
        self._auth.hide(credentials.secret, credentials.token or "")
        headers = self._auth.headers(self._plain_headers(), self._key_header, keyless=True)
        return headers if credentials.token is None else (*headers, ("x-amz-security-token", credentials.token))

    def _request(self, connection: EndpointConnection, headers: Headers, body: bytes) -> HttpRequest:
        signing = self._signing_with(connection.key)
        if signing is None:
            return super()._request(connection, headers, body)
        digest = ("x-amz-content-sha256", hashlib.sha256(body).hexdigest())
        return HttpRequest(self._url, (*headers, digest), body, signing=signing)

    def _signing_with(self, fetched: Secret | None) -> RequestSigning | None:
        """Return what requests with this key are signed with, made again only for a new key."""
        known = self._signing
        if known is None or known[0] is not fetched:
            found = self._credentials(fetched)
            scope = f"aws:amz:{self.region}:bedrock"
            known = (fetched, None if found is None else RequestSigning(scope, found.key_id, found.secret))
            self._signing = known
        return known[1]

    def _refuses_key(self, reply: HttpReply) -> bool:
        if reply.status != 403:
            return super()._refuses_key(reply)
        problem = reply.headers.get("x-amzn-errortype", "").encode() + reply.body[:2000]
        return any(word in problem for word in (b"ExpiredToken", b"UnrecognizedClient", b"expired"))

    def _fixed_fields(self) -> dict[str, Any]:
        own = {name: value for name, value in self.params.items() if name in _OWN_FIELDS}
        loose = {name: value for name, value in self.params.items() if name not in _OWN_FIELDS | {"toolChoice"}}
        inference = {name: value for name, value in loose.items() if name in _INFERENCE}
        others = {name: value for name, value in loose.items() if name not in _INFERENCE}
        fields = {**own, "inferenceConfig": {**(own.get("inferenceConfig") or {}), **inference}}
        if others:
            fields["additionalModelRequestFields"] = {**(own.get("additionalModelRequestFields") or {}), **others}
        return fields

    def _encode_tools(self, tools: list[dict[str, Any]]) -> bytes:
        if not tools:
            return b""
        config: dict[str, Any] = {"tools": list(map(_tool, tools))}
        if "toolChoice" in self.params:
            config["toolChoice"] = self.params["toolChoice"]
        return b',"toolConfig":' + encoded(config)

    def _opening(self, case: EvalCase) -> Conversation:
        turns, system = translated(asked_turns(case), case.system_prompt)
        rest = self._tools_of(case)
        return Conversation(turns, rest if not system else b',"system":' + encoded(system) + rest)

    def _is_stream(self, reply: HttpReply) -> bool:
        return reply.headers.get("content-type", "").startswith(MEDIA_TYPE) or super()._is_stream(reply)

    def _events(self, reply: HttpReply) -> list[ServerSentEvent]:
        return frames(reply.chunks, reply.arrivals)

    def _read_stream(self, stream: list[ServerSentEvent]) -> ModelAnswer:
        return read_bedrock_stream(stream)

    def _read_whole(self, body: bytes) -> ModelAnswer:
        return read_bedrock_whole(body)

    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:
        blocks = [
            {
                "toolResult": {
                    "toolUseId": call.id,
                    "content": [{"text": text}],
                    **({"status": "error"} if failed else {}),
                }
            }
            for call, text, failed in results
        ]
        return [{"role": "user", "content": blocks}]


def _all_arguments() -> inspect.Signature:
    """Return the signature with the arguments of every endpoint, for those who ask which there are."""
    own = [one for one in inspect.signature(Bedrock.__init__).parameters.values() if one.name in ("region", "profile")]
    first, *rest = [one for one in inspect.signature(EndpointTarget.__init__).parameters.values() if one.name != "self"]
    return inspect.Signature([first, *own, *rest])


Bedrock.__signature__ = _all_arguments()  # type: ignore[attr-defined]


def _in_environment() -> bool:
    return any(os.environ.get(name, "").strip() for name in ("AWS_BEARER_TOKEN_BEDROCK", "AWS_ACCESS_KEY_ID"))


def _from_environment() -> AwsCredentials | None:
    key_id, secret, token = (
        os.environ.get(name, "").strip() for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    )
    return AwsCredentials(key_id, secret, token or None) if key_id and secret else None


def _from_profile(name: str) -> AwsCredentials | None:
    fields = _profile(name)
    key_id, secret = fields.get("aws_access_key_id"), fields.get("aws_secret_access_key")
    return AwsCredentials(key_id, secret, fields.get("aws_session_token")) if key_id and secret else None


def _from_json(text: str) -> AwsCredentials | None:
    """Read credentials as programs print them for AWS's tools; None for any other text, which is a bearer key."""
    try:
        fields = msgspec.json.decode(text) if text.startswith("{") else None
    except msgspec.DecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    key_id, secret, token = (fields.get(name) for name in ("AccessKeyId", "SecretAccessKey", "SessionToken"))
    if not isinstance(key_id, str) or not isinstance(secret, str):
        raise TargetError("the credentials have no AccessKeyId or no SecretAccessKey")
    return AwsCredentials(key_id, secret, token if isinstance(token, str) and token else None)


def _usual_region(profile: str) -> str | None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if value := os.environ.get(name, "").strip():
            return value
    return _profile(profile).get("region")


def _profile(name: str) -> dict[str, str]:
    """Return a profile's fields from AWS's configuration and credentials files; empty where there is none."""
    fields: dict[str, str] = {}
    for variable, usual, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(Path(os.environ.get(variable) or usual).expanduser(), encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue  # a file of another program: its own tools complain of it
        if parser.has_section(section):
            fields |= dict(parser.items(section))
    return fields


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in this API's shape; what is not a function (`cachePoint`) is unchanged."""
    if not isinstance(tool.get("name"), str):
        return tool
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"toolSpec": {"name": tool["name"], **described, "inputSchema": {"json": tool.get("input_schema")}}}


def translated(
    messages: Sequence[dict[str, Any]], system_prompt: str | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the turns in this API's shape, those of one role joined, and, separately, the system prompt's blocks."""
    turns: list[dict[str, Any]] = []
    system: list[dict[str, Any]] = [] if system_prompt is None else [{"text": system_prompt}]
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role in ("system", "developer"):
            system.extend(_blocks(content))
            continue
        if role == "tool":
            text = {"toolUseId": message.get("tool_call_id"), "content": _blocks(content) or [{"text": ""}]}
            role, blocks = "user", [{"toolResult": text}]
        else:
            blocks = [*_blocks(content), *map(_tool_use, message.get("tool_calls") or ())]
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] = [*turns[-1]["content"], *blocks]
        else:
            turns.append({"role": role, "content": blocks})
    return turns, system


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    value = input_object(arguments) if isinstance(arguments, str) else arguments
    return {"toolUse": {"toolUseId": call.get("id"), "name": function.get("name"), "input": value}}


def _blocks(content: Any) -> list[dict[str, Any]]:
    return translated_parts(content, _media)


def _media(media: Media) -> dict[str, Any]:
    """Return an image, a document or audio in this API's shape."""
    block, form = _block_of(media)
    if media.data is not None:
        source: dict[str, Any] = {"bytes": media.data}
    elif media.url is not None and media.url.startswith("s3://"):
        source = {"s3Location": {"uri": media.url}}
    else:
        raise TargetError("bedrock fetches nothing from the web: give the file's data, or an s3:// address")
    name = {"name": _document_name(media.name)} if block == "document" else {}
    return {block: {"format": form, **name, "source": source}}


def _block_of(media: Media) -> tuple[str, str]:
    """Return which block a file goes into, and what the API calls its format."""
    kind = media.media_type or "an unknown type"
    if media.kind == "audio":
        return "audio", _AUDIO_FORMATS.get(media.format, media.format)
    if media.kind == "video":
        return "video", _VIDEO_FORMATS.get(media.format, media.format)
    if kind in _IMAGE_FORMATS:
        return "image", _IMAGE_FORMATS[kind]
    if kind in _DOCUMENT_FORMATS:
        return "document", _DOCUMENT_FORMATS[kind]
    if media.kind == "image" or media.media_type is None:
        raise TargetError(f"bedrock takes images as png, jpeg, gif or webp, got {kind}")
    raise TargetError(f"bedrock takes documents as {', '.join(_DOCUMENT_FORMATS.values())}, got {kind}: {media.name}")


def _document_name(name: str) -> str:
    """Return a file's name in the characters that the API takes: letters, digits, spaces, hyphens and brackets."""
    plain = re.sub(r"[^A-Za-z0-9\s()\[\]-]+", "-", Path(name).stem)
    return re.sub(r"\s+", " ", plain).strip(" -")[:200] or "attachment"


def read_usage(usage: Any, oddities: list[str]) -> TokenUsage | None:
    """Read this API's usage: `inputTokens` excludes cache reads and writes, which were sent too."""
    fields = usage_fields(usage, oddities)
    if fields is None:
        return None
    read, written = fields.count("cacheReadInputTokens"), fields.count("cacheWriteInputTokens")
    counts = [count for count in (fields.count("inputTokens"), read, written) if count is not None]
    return TokenUsage(sum(counts) if counts else None, fields.count("outputTokens"), read, None, written)


_OBJECTS: Reader[dict[str, Any]] = Reader(dict[str, Any])


def read_bedrock_whole(body: bytes) -> ModelAnswer:
    """Read an answer that came as one object."""
    fields = _OBJECTS.read(body)
    output = fields.get("output")
    message = output.get("message") if isinstance(output, dict) else None
    if not isinstance(message, dict):
        raise reported_error(fields)
    content = message.get("content")
    blocks = [expect_object("content", block) for block in content] if isinstance(content, list) else []
    answer = _answer(blocks, fields.get("stopReason"))
    answer.usage = read_usage(fields.get("usage"), answer.oddities)
    return answer


def read_bedrock_stream(stream: list[ServerSentEvent]) -> ModelAnswer:
    """Read a streamed answer; it is complete only with its `messageStop`."""
    blocks: dict[int, dict[str, Any]] = {}
    content = TextParts()
    stop_reason: Any = None
    usage: Any = None
    stopped = False
    fault: TargetError | None = None
    first: dict[bool, float] = {}
    for event in stream:
        if event.name.startswith("!"):
            fault = fault or _exception(event)
            continue
        fields = _OBJECTS.read(event.data)
        index = lenient_int(fields.get("contentBlockIndex")) or 0
        if event.name == "contentBlockStart":
            start = fields.get("start")
            if isinstance(start, dict) and start:
                merge_fields(blocks.setdefault(index, {}), start)
                first.setdefault(False, event.at)
                content.note_token(event.at)
        elif event.name == "contentBlockDelta":
            delta = expect_object("delta", fields.get("delta"))
            if isinstance(text := delta.get("text"), str) and text:
                content.add_text(text, event.at)
            elif text is None:
                first.setdefault("reasoningContent" in delta, event.at)
                content.note_token(event.at)
            _add_delta(blocks.setdefault(index, {}), delta)
        elif event.name == "messageStop":
            stopped, stop_reason = True, fields.get("stopReason")
        elif event.name == "metadata":
            usage = fields.get("usage")
    answer = _answer([blocks[index] for index in sorted(blocks)], stop_reason)
    answer.usage = read_usage(usage, answer.oddities)
    answer.first_call, answer.first_reasoning = first.get(False), first.get(True)
    answer.first_content = earliest(content.first_text, answer.first_call)
    answer.token_times = content.token_times()
    if content.text == answer.text:
        answer.text_times = content.times()
    answer.terminated = answer.complete = stopped
    answer.fault = fault
    return answer


def _add_delta(block: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to its block, in the shape that the block has when it comes in one piece."""
    reasoning = delta.get("reasoningContent")
    if isinstance(reasoning, dict):
        texts = {name: reasoning[name] for name in ("text", "signature") if name in reasoning}
        others = {name: reasoning[name] for name in reasoning if name not in texts}
        delta = {"reasoningContent": {**({"reasoningText": texts} if texts else {}), **others}}
    merge_fields(block, delta)


def _exception(event: ServerSentEvent) -> TargetError:
    """Return the error that a frame reports in the middle of a stream."""
    if event.name == DAMAGED:
        return TransientError(f"the stream is damaged: {event.data.decode()}")
    kind = event.name.removeprefix("!")
    try:
        fields = msgspec.json.decode(event.data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = None
    message = fields.get("message") if isinstance(fields, dict) else None
    text = f"the server reported an error in its answer: {message or 'no message'} ({kind})"
    kind = kind[:1].lower() + kind[1:]
    return TargetError(text) if kind in _FINAL else TransientError(text, overloaded=kind in _OVERLOADED)


def _answer(blocks: list[dict[str, Any]], stop_reason: Any) -> ModelAnswer:
    blocks = [block for block in blocks if block and block.get("text") != ""]
    calls = [_call(block["toolUse"]) for block in blocks if isinstance(block.get("toolUse"), dict)]
    text = "".join(block["text"] for block in blocks if isinstance(block.get("text"), str))
    filtered = stop_reason in _FILTERED
    return ModelAnswer(
        messages=[{"role": "assistant", "content": blocks}] if blocks else [],
        text=text,
        refusal=f"a filter stopped the answer: {stop_reason}" if filtered and not text else None,
        calls=[call for call in calls if call.kind != "server_tool_use"],
        stop_reason=CONTENT_FILTER if filtered else stop_reason if isinstance(stop_reason, str) else None,
    )


def _call(use: dict[str, Any]) -> Call:
    """Return a tool call; its input becomes the object that the API expects back."""
    value = use.get("input")
    text = as_arguments(value) or "{}"
    use["input"] = value if isinstance(value, dict) else input_object(text)
    return Call(str(use.get("toolUseId") or ""), str(use.get("name") or ""), text, str(use.get("type") or "function"))
