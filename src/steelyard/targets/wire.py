"""Replies of model APIs, read: JSON and stream events, texts joined from pieces, usage, and reported errors."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar

import msgspec

from steelyard.errors import TargetError, TransientError
from steelyard.protocols import HttpReply
from steelyard.transport.errors import error_message
from steelyard.transport.sse import ServerSentEvent

Piece = TypeVar("Piece")

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the expected JSON."""

_DONE = b"[DONE]"
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
_STREAM_STARTS = (b"data:", b"event:", b"id:", b"retry:", b":")
_OVERLOAD_WORDS = ("overloaded", "rate_limit", "ratelimit", "too_many_requests", "capacity")
_FINAL_WORDS = (
    "invalid", "bad_request", "badrequest", "authentication", "unauthorized", "permission", "forbidden", "not_found",
    "notfound", "quota", "billing", "filter", "policy", "unsupported", "context_length", "too_large", "moderation",
)  # fmt: skip
_OVERLOAD_CODES = (429, 503, 529)
_RETRYABLE_CODES = (408, 409, 425, 429)

NOTHING = msgspec.Raw(b"")
"""A field of an object that was not there."""

_IDENTIFYING = frozenset({"id", "index", "type", "role", "format", "name", "object", "model", "status"})
"""Fields that a stream repeats; any other text grows by its pieces."""


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

    def try_read(self, data: bytes) -> Piece | None:
        """Decode one object if it is just of this type, else return None."""
        try:
            return self._one.decode(data)
        except UNREADABLE:
            return None

    def try_read_all(self, events: Sequence[ServerSentEvent]) -> list[Piece] | None:
        """Decode the events if all are just of this type, else return None."""
        try:
            pieces = self._all.decode(b"[" + b",".join([event.data for event in events]) + b"]")
        except UNREADABLE:
            return None
        return pieces if len(pieces) == len(events) else None

    def read_all(self, events: Sequence[ServerSentEvent]) -> tuple[list[Piece], TargetError | None]:
        """Decode the events up to the first unreadable one, and return that one's error."""
        pieces = self.try_read_all(events)
        return (pieces, None) if pieces is not None else self._read_each(events)

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
    if stream and stream[-1].data == _DONE:
        contents = [event.data for event in stream]
        if all(contents) and contents.index(_DONE) == len(stream) - 1:
            return stream[:-1], True
    received: list[ServerSentEvent] = []
    for event in stream:
        data = event.data.strip()
        if data == _DONE:
            return received, True
        if data:
            received.append(event)
    return received, False


class TextParts:
    """The content of a message, joined from its pieces: plain text, or a list of parts as Mistral sends."""

    def __init__(self) -> None:
        self.first_text: float | None = None
        self.first_reasoning: float | None = None
        self._texts: list[str] = []
        self._times: list[float | None] = []
        self._other_times: list[float] = []
        self._parts: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, content: Any, at: float | None) -> None:
        """Add a piece: a text, or a list of parts; msgspec.ValidationError for anything else."""
        if content is None or content == "":
            return
        if isinstance(content, str):
            self.add_text(content, at)
            if self._parts is not None:
                self._add_part({"type": "text", "text": content})
            return
        if not isinstance(content, list):
            kind = type(content).__name__
            raise msgspec.ValidationError(f"Expected `str | array | null`, got `{kind}` - at `content`")
        if self._parts is None:
            self._parts = [{"type": "text", "text": self.text}] if self._texts else []
        for part in content:
            fields = {"type": "text", "text": part} if isinstance(part, str) else part
            if not isinstance(fields, dict):
                continue
            if fields.get("type") == "thinking" or "thinking" in fields:
                self.first_reasoning = at if self.first_reasoning is None else self.first_reasoning
                self.note_token(at)
            elif isinstance(fields.get("text"), str) and fields["text"]:
                self.add_text(fields["text"], at)
            self._add_part(fields)

    def add_text(self, text: str, at: float | None) -> None:
        """Add a piece of plain text that is not empty."""
        if self.first_text is None:
            self.first_text = at
        self._texts.append(text)
        self._times.append(at)

    def note_token(self, at: float | None) -> None:
        """Note the time of a piece that is no text: of reasoning, of a tool call, of a refusal."""
        if at is not None:
            self._other_times.append(at)

    def token_times(self) -> Sequence[float]:
        """Return when each piece arrived that brought a token, in order."""
        times = [at for at in self._times if at is not None]
        return sorted(times + self._other_times) if self._other_times else times

    def _add_part(self, part: dict[str, Any]) -> None:
        assert self._parts is not None
        last = self._parts[-1] if self._parts else None
        grows = "thinking" if part.get("type") == "thinking" else "text"
        if last is not None and last.get("type") == part.get("type") and grows in last and grows in part:
            last[grows] = _joined(last[grows], part[grows])
            merge_fields(last, {name: value for name, value in part.items() if name != grows})
        else:
            self._parts.append(dict(part))

    def native(self) -> str | list[dict[str, Any]]:
        """Return the content in the shape it came in."""
        return self.text if self._parts is None else self._parts

    def times(self) -> Sequence[tuple[int, float]]:
        """Return where each piece of a text ends that begins with a tag, and when it arrived; else nothing."""
        if not any(text.lstrip()[:1] == "<" for text in self._texts[:4]):
            return ()
        ends = accumulate(map(len, self._texts))
        return [(end, at) for end, at in zip(ends, self._times, strict=True) if at is not None]


def _joined(first: Any, second: Any) -> Any:
    """Join two texts, or two lists of text parts, whose last and first are one text."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    whole: list[Any] = []
    for part in (*_as_list(first), *_as_list(second)):
        last = whole[-1] if whole else None
        if isinstance(last, dict) and isinstance(part, dict) and {last.get("type"), part.get("type")} == {"text"}:
            whole[-1] = {**last, "text": f"{last.get('text') or ''}{part.get('text') or ''}"}
        else:
            whole.append(part)
    return whole


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [{"type": "text", "text": value}] if isinstance(value, str) else [value]


def merge_fields(known: dict[str, Any], later: dict[str, Any]) -> None:
    """Merge the fields of a later delta into those so far: texts grow, objects are merged, lists by their `index`."""
    for name, value in later.items():
        present = known.get(name)
        if is_blank(value):
            continue
        if isinstance(value, dict) and isinstance(present, dict):
            merge_fields(present, value)
        elif isinstance(value, list) and isinstance(present, list):
            _merge_list(present, value)
        elif isinstance(value, str) and isinstance(present, str) and name not in _IDENTIFYING:
            known[name] = present + value
        elif isinstance(value, list):
            known[name] = []
            _merge_list(known[name], value)
        elif isinstance(value, dict):
            known[name] = dict(value)
        else:
            known[name] = value


def _merge_list(known: list[Any], later: list[Any]) -> None:
    for value in later:
        if not isinstance(value, dict):
            known.append(value)
            continue
        place = (value.get("index"), value.get("type"))
        same = (one for one in known if isinstance(one, dict) and (one.get("index"), one.get("type")) == place)
        found = next(same, None) if place[0] is not None else None
        if found is None:
            known.append(dict(value))
        else:
            merge_fields(found, value)


def is_blank(value: Any) -> bool:
    """Whether a field says nothing: null, false, empty. Some servers send these for fields that they do not use."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def expect_object(name: str, value: Any) -> dict[str, Any]:
    """Return the value if it is an object; msgspec.ValidationError otherwise."""
    if not isinstance(value, dict):
        raise msgspec.ValidationError(f"Expected `object`, got `{type(value).__name__}` - at `{name}`")
    return value


def lenient_int(value: Any) -> int | None:
    """Return a whole number that may be written as `10.0` or `"10"`; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) else None


def is_complete_json(text: str) -> bool:
    """Whether a tool call's arguments are all there."""
    try:
        msgspec.json.decode(text)
    except UNREADABLE:
        return False
    return True


def as_arguments(value: Any) -> str:
    """Return the arguments of a tool call as text; some servers send them as an object."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def earliest(*times: float | None) -> float | None:
    """Return the first of these moments, those that are known."""
    return min((at for at in times if at is not None), default=None)


class UsageFields:
    """Reads counts from a usage object, whatever a server made of it; what is odd is left out and noted."""

    def __init__(self, fields: dict[str, Any], oddities: list[str]) -> None:
        self._fields = fields
        self._oddities = oddities

    def count(self, *paths: str) -> int | None:
        """Return the first of these fields that is a number; `a.b` is the field b of the object a."""
        for path in paths:
            outer, _, inner = path.partition(".")
            value = self._fields.get(outer)
            if inner:
                value = value.get(inner) if isinstance(value, dict) else None
            if value is None:
                continue
            if type(value) is int and value >= 0:
                return value
            self._oddities.append(f"usage.{path} is {value!r:.50}")
            number = lenient_int(value)
            if number is not None and number >= 0:
                return number
        return None

    def cost(self) -> float | None:
        """Return what the call cost, as OpenRouter and LiteLLM report it, an upstream provider's own bill included."""
        reported = self._fields.get("cost")
        cost = as_cost(reported.get("total_cost") if isinstance(reported, dict) else reported)  # Perplexity's is one
        details = self._fields.get("cost_details")
        if cost is not None and self._fields.get("is_byok") is True and isinstance(details, dict):
            cost += as_cost(details.get("upstream_inference_cost")) or 0.0
        return cost


def as_cost(value: Any) -> float | None:
    """Return an amount of money, also where it is written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        amount = float(value)
    except ValueError:
        return None
    return amount if math.isfinite(amount) and amount >= 0 else None


def usage_fields(usage: Any, oddities: list[str]) -> UsageFields | None:
    """Return a usage object to read counts from; None where there is none."""
    if isinstance(usage, msgspec.Raw):
        usage = msgspec.json.decode(usage) if usage else None
    if is_blank(usage):
        return None
    if not isinstance(usage, dict):
        oddities.append(f"usage is {usage!r:.50}")
        return None
    return UsageFields(usage, oddities)


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
