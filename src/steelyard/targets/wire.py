"""What all HTTP model APIs share on the wire: conversations, answers, JSON and stream events, and reported errors."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

import msgspec

from steelyard.errors import TargetError, TransientError, TransportError
from steelyard.protocols import HttpReply
from steelyard.records import EvalCase, InvocationResponse
from steelyard.transport.errors import error_message, request_id
from steelyard.transport.sse import ServerSentEvent

Piece = TypeVar("Piece")

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the expected JSON."""

_DONE = b"[DONE]"
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
_data_of = attrgetter("data")
_STREAM_STARTS = (b"data:", b"event:", b"id:", b"retry:", b":")
_OVERLOAD_WORDS = ("overloaded", "rate_limit", "ratelimit", "too_many_requests", "capacity")
_FINAL_WORDS = (
    "invalid", "bad_request", "badrequest", "authentication", "unauthorized", "permission", "forbidden", "not_found",
    "notfound", "quota", "billing", "filter", "policy", "unsupported", "context_length", "too_large", "moderation",
)  # fmt: skip
_OVERLOAD_CODES = (429, 503, 529)
_RETRYABLE_CODES = (408, 409, 425, 429)


def time_per_output_token(first: float | None, last: float | None, output_tokens: int | None) -> float | None:
    """Return the seconds per token after the first, or None where that is not known."""
    if first is None or last is None or output_tokens is None or output_tokens < 2:
        return None
    return (last - first) / (output_tokens - 1)


class Conversation(msgspec.Struct):
    """A request's conversation: turns, which grow in a tool loop, and the rest of the body, which does not change."""

    turns: list[dict[str, Any]]
    rest: bytes = b""
    """More fields of the body, each with a comma before it."""


def asked_turns(case: EvalCase) -> list[dict[str, Any]]:
    """Return the case's messages and its prompt in a new list."""
    turns = list(case.messages) if case.messages else []
    if case.prompt is not None:
        turns.append({"role": "user", "content": case.prompt})
    if not turns:
        raise TargetError("the case has neither a prompt nor messages")
    return turns


def encoded(value: Any) -> bytes:
    """Encode the value as JSON, lone surrogates escaped; TargetError for what JSON cannot hold."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise TargetError(f"the case cannot be written as JSON: {error}") from error


class Call(msgspec.Struct, gc=False):
    """A tool call that the model asks for; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


class TokenUsage(msgspec.Struct, gc=False):
    """Tokens as the server counted them. `input` includes cache reads and writes, `output` includes reasoning."""

    input: int | None = None
    output: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    cache_write: int | None = None


class ModelAnswer(msgspec.Struct):
    """A model's answer in one turn. Arrival times are None where it came in one piece."""

    messages: list[dict[str, Any]] = []
    """The turn in its API's shape, ready to be sent back."""
    text: str = ""
    refusal: str | None = None
    """The refusal's text; empty where the model only signalled that it refuses."""
    calls: Sequence[Call] = ()
    stop_reason: str | None = None
    usage: TokenUsage | None = None
    first_content: float | None = None
    first_reasoning: float | None = None
    complete: bool = True
    """The model had finished when the server ended the answer."""
    terminated: bool = True
    """The API's end marker arrived: nothing is missing, whatever happened to the connection afterwards."""
    fault: TargetError | None = None

    @property
    def empty(self) -> bool:
        return not (self.text or self.calls) and self.refusal is None


def response_of(answer: ModelAnswer, reply: HttpReply, asked_at: datetime, prompt: str | None) -> InvocationResponse:
    """Build the response of one turn: its text (or its refusal), times and tokens."""
    usage = answer.usage or _NO_USAGE
    first, reasoning = answer.first_content, answer.first_reasoning
    if reasoning is not None and (first is None or reasoning < first):
        first = reasoning
    last = reply.arrivals[-1] if reply.arrivals else reply.ended
    refused = answer.refusal is not None and not answer.text
    return InvocationResponse(
        response_text=answer.refusal if refused else answer.text,
        input_prompt=prompt,
        messages=answer.messages,
        time_to_first_token=first,
        time_to_last_token=last,
        time_per_output_token=time_per_output_token(first, last, usage.output),
        num_tokens_input=usage.input,
        num_tokens_output=usage.output,
        num_tokens_input_cached=usage.cached,
        num_tokens_output_reasoning=usage.reasoning,
        request_time=asked_at,
        stop_reason="refusal" if refused else answer.stop_reason,
        time_to_first_content_token=answer.first_content,
        time_to_first_reasoning_token=reasoning,
        time_queued=reply.queued,
        http_status=reply.status,
        request_id=request_id(reply.headers),
        num_tokens_input_cache_write=usage.cache_write,
    )


_NO_USAGE = TokenUsage()


def partial_of(
    answer: ModelAnswer, reply: HttpReply | None, asked_at: datetime, prompt: str | None
) -> InvocationResponse:
    """Build the response of a failed turn from what was received. Times are kept only if part of an answer arrived."""
    if reply is None:
        return InvocationResponse(input_prompt=prompt, request_time=asked_at)
    if not answer.messages:
        return InvocationResponse(
            input_prompt=prompt,
            request_time=asked_at,
            time_queued=reply.queued,
            http_status=reply.status,
            request_id=request_id(reply.headers),
            stop_reason=answer.stop_reason,
        )
    response = response_of(answer, reply, asked_at, prompt)
    response.response_text = response.response_text or None
    return response


def raise_if_incomplete(answer: ModelAnswer, broken: TransportError | None) -> None:
    """Raise for an answer that reports an error, is incomplete, or is empty."""
    if broken is not None and not answer.terminated:
        raise broken
    if answer.fault is not None:
        raise answer.fault
    if not answer.complete:
        raise TransientError(f"the stream ended before the answer did, after {len(answer.text)} characters of text")
    if answer.empty:
        ending = f"stop reason {answer.stop_reason!r}" if answer.stop_reason else "no stop reason"
        tokens = "" if answer.usage is None else f", {answer.usage.output} output tokens"
        raise TargetError(f"the answer is empty: no text, no tool call, no refusal ({ending}{tokens})")


class Reader(Generic[Piece]):
    """Decodes JSON objects of one type, a single one or all of a stream at once; its decoders are created once.

    Half of a surrogate pair, which some servers send when they cut a text inside it, is read as U+FFFD.
    """

    def __init__(self, kind: type[Piece]) -> None:
        self._one = msgspec.json.Decoder(kind)
        self._all = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]

    def read(self, data: bytes) -> Piece:
        """Decode one object; raises one of UNREADABLE."""
        try:
            return self._one.decode(data)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            fixed = _ESCAPE.sub(_without_half_pair, data)
            if fixed == data:
                raise
            return self._one.decode(fixed)

    def read_all(self, events: Sequence[ServerSentEvent]) -> tuple[list[Piece], TargetError | None]:
        """Decode the events up to the first unreadable one, and return that one's error."""
        try:
            pieces = self._all.decode(b"[" + b",".join([event.data for event in events]) + b"]")
            if len(pieces) == len(events):
                return pieces, None
        except UNREADABLE:
            pass
        return self._read_each(events)

    def _read_each(self, events: Sequence[ServerSentEvent]) -> tuple[list[Piece], TargetError | None]:
        pieces: list[Piece] = []
        for number, event in enumerate(events, 1):
            try:
                pieces.append(self.read(event.data))
            except UNREADABLE as error:
                if not event.terminated:
                    return pieces, None  # the stream broke off inside it: reported as a missing end
                return pieces, unreadable(f"event {number} of {len(events)} of the stream", event.data, error)
        return pieces, None


def _without_half_pair(escape: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if escape["half"] else escape[0]


def before_done(stream: list[ServerSentEvent]) -> tuple[list[ServerSentEvent], bool]:
    """Return the events that have data, up to OpenAI's `[DONE]`, and whether that was there."""
    if stream and stream[-1].data == _DONE and all(map(_data_of, stream)):
        return stream[:-1], True
    received: list[ServerSentEvent] = []
    for event in stream:
        data = event.data.strip()
        if data == _DONE:
            return received, True
        if data:
            received.append(event)
    return received, False


def unreadable(what: str, data: bytes, error: Exception) -> TargetError:
    """Return the error for undecodable data: cut JSON and bad UTF-8 are retryable, JSON of another shape is not."""
    shown = data[:200].decode("utf-8", "replace")
    if isinstance(error, msgspec.ValidationError):
        return TargetError(f"{what} is not what this API answers: {error}: {shown!r}")
    kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
    return TransientError(f"{what} is not {kind}: {error}: {shown!r}")


def form_of(reply: HttpReply) -> Literal["stream", "whole"]:
    """Detect the form of a reply from its first bytes: some servers mislabel their answers, or ignore `stream`."""
    if reply.chunks and reply.chunks[0].startswith(b"{"):
        return "whole"
    start = next((chunk for chunk in reply.chunks if chunk.strip()), b"").lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"{"):
        return "whole"
    media_type = reply.headers.get("content-type", "").lower()
    if media_type.startswith("text/event-stream") or start.startswith(_STREAM_STARTS):
        return "stream"
    if not start:
        raise TransientError(f"the server answered {reply.status} with an empty body")
    shown = reply.body[:200].decode("utf-8", "replace")
    if media_type.startswith(("application/json", "text/event-stream")):
        raise TransientError(f"the answer is not JSON: {shown!r}")
    named = media_type or "an answer without a type"
    raise TargetError(f"expected JSON or an event stream, got {named}: is base_url right? It begins {shown!r}")


def reported_error(error: Any) -> TargetError:
    """Return the error that a server reported inside an answer with a 2xx status."""
    inner = error.get("error") if isinstance(error, dict) else None
    fields: dict[str, Any] = inner if isinstance(inner, dict) else error if isinstance(error, dict) else {}
    kinds = [str(fields[key]) for key in ("type", "code") if fields.get(key) is not None]
    message = error_message(msgspec.json.encode(error)) or "no message"
    text = f"the server reported an error in its answer: {message}" + (f" ({', '.join(kinds)})" if kinds else "")
    words = " ".join(kinds).lower()
    codes = {int(kind) for kind in kinds if kind.isdecimal() and len(kind) == 3}
    if any(word in words for word in _OVERLOAD_WORDS) or not codes.isdisjoint(_OVERLOAD_CODES):
        return TransientError(text, overloaded=True)
    refused = any(400 <= code < 500 and code not in _RETRYABLE_CODES for code in codes)
    return TargetError(text) if refused or any(word in words for word in _FINAL_WORDS) else TransientError(text)
