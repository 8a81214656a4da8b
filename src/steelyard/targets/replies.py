"""What a reply with a good status holds: a stream of events, one JSON object, or something that is neither."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

import msgspec

from steelyard.contracts import HttpReply
from steelyard.errors import TargetError, TransientError
from steelyard.transport.sse import Event
from steelyard.transport.status import error_message

Piece = TypeVar("Piece")

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the JSON they should be."""

_DONE = b"[DONE]"
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
_data_of = attrgetter("data")
_STREAM_STARTS = (b"data:", b"event:", b"id:", b"retry:", b":")
_BUSY_WORDS = ("overloaded", "rate_limit", "ratelimit", "too_many_requests", "capacity")
_FINAL_WORDS = (
    "invalid", "bad_request", "badrequest", "authentication", "unauthorized", "permission", "forbidden", "not_found",
    "notfound", "quota", "billing", "filter", "policy", "unsupported", "context_length", "too_large", "moderation",
)  # fmt: skip
_BUSY_CODES = (429, 503, 529)
_PASSING_CODES = (408, 409, 425, 429)


class Reader(Generic[Piece]):
    """Reads JSON objects of one kind, one alone or a stream's all in one go; its decoders are made once.

    Half of a surrogate pair, which some servers send when they cut a text between its two, is read as U+FFFD.
    """

    def __init__(self, kind: type[Piece]) -> None:
        self._one = msgspec.json.Decoder(kind)
        self._all = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]

    def read(self, data: bytes) -> Piece:
        """The object; raises one of UNREADABLE."""
        try:
            return self._one.decode(data)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            mended = _ESCAPE.sub(_without_half_pair, data)
            if mended == data:
                raise
            return self._one.decode(mended)

    def read_all(self, events: Sequence[Event]) -> tuple[list[Piece], TargetError | None]:
        """The events up to the first that cannot be read, and what is wrong with that one."""
        try:
            pieces = self._all.decode(b"[" + b",".join([event.data for event in events]) + b"]")
            if len(pieces) == len(events):
                return pieces, None
        except UNREADABLE:
            pass
        return self._read_each(events)

    def _read_each(self, events: Sequence[Event]) -> tuple[list[Piece], TargetError | None]:
        pieces: list[Piece] = []
        for number, event in enumerate(events, 1):
            try:
                pieces.append(self.read(event.data))
            except UNREADABLE as error:
                if not event.terminated:
                    return pieces, None  # the stream broke off inside it: that is told when its end is missed
                return pieces, unreadable(f"event {number} of {len(events)} of the stream", event.data, error)
        return pieces, None


def _without_half_pair(escape: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if escape["half"] else escape[0]


def before_done(stream: list[Event]) -> tuple[list[Event], bool]:
    """The events that say something, up to OpenAI's `[DONE]`, and whether that was there."""
    if stream and stream[-1].data == _DONE and all(map(_data_of, stream)):
        return stream[:-1], True
    told: list[Event] = []
    for event in stream:
        data = event.data.strip()
        if data == _DONE:
            return told, True
        if data:
            told.append(event)
    return told, False


def unreadable(what: str, data: bytes, error: Exception) -> TargetError:
    """Half a JSON or bad UTF-8 may be whole the next time; JSON of another shape will not change."""
    shown = data[:200].decode("utf-8", "replace")
    if isinstance(error, msgspec.ValidationError):
        return TargetError(f"{what} is not what this API answers: {error}: {shown!r}")
    kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
    return TransientError(f"{what} is not {kind}: {error}: {shown!r}")


def form_of(reply: HttpReply) -> Literal["stream", "whole"]:
    """Which of the two it is, by what it begins with: some servers mislabel their answers, or ignore `stream`."""
    if reply.chunks and reply.chunks[0].startswith(b"{"):
        return "whole"
    start = next((chunk for chunk in reply.chunks if chunk.strip()), b"").lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"{"):
        return "whole"
    media_type = reply.headers.get("content-type", "").lower()
    if media_type.startswith("text/event-stream") or start.startswith(_STREAM_STARTS):
        return "stream"
    if not start:
        raise TransientError(f"the server answered {reply.status} with nothing")
    shown = reply.body[:200].decode("utf-8", "replace")
    if media_type.startswith(("application/json", "text/event-stream")):
        raise TransientError(f"the answer is not JSON: {shown!r}")
    named = media_type or "an answer without a type"
    raise TargetError(f"expected JSON or an event stream, got {named}: is base_url right? It begins {shown!r}")


def reported(error: Any) -> TargetError:
    """The failure that a server tells of inside an answer whose status was good."""
    inner = error.get("error") if isinstance(error, dict) else None
    fields: dict[str, Any] = inner if isinstance(inner, dict) else error if isinstance(error, dict) else {}
    kinds = [str(fields[key]) for key in ("type", "code") if fields.get(key) is not None]
    message = error_message(msgspec.json.encode(error)) or "no message"
    text = f"the server reported an error in its answer: {message}" + (f" ({', '.join(kinds)})" if kinds else "")
    words = " ".join(kinds).lower()
    codes = {int(kind) for kind in kinds if kind.isdecimal() and len(kind) == 3}
    if any(word in words for word in _BUSY_WORDS) or not codes.isdisjoint(_BUSY_CODES):
        return TransientError(text, overloaded=True)
    refused = any(400 <= code < 500 and code not in _PASSING_CODES for code in codes)
    return TargetError(text) if refused or any(word in words for word in _FINAL_WORDS) else TransientError(text)
