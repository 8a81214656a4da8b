"""What all HTTP model APIs share on the wire: conversations, answers, JSON and stream events, and reported errors."""

from __future__ import annotations

import json
import math
import mimetypes
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar

import msgspec

from steelyard.errors import TargetError, TransientError, TransportError
from steelyard.protocols import HttpReply
from steelyard.records import EvalCase, InvocationResponse
from steelyard.transport.errors import error_message, named_problem, request_id
from steelyard.transport.sse import ServerSentEvent

Piece = TypeVar("Piece")

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the expected JSON."""

CONTENT_FILTER = "content_filter"
_COST_HEADER = "x-litellm-response-cost"
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
    echoes: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """Those of the turns that the model gave, and that are sent back to it."""

    def echo(self, turns: Sequence[dict[str, Any]], without: Collection[str]) -> None:
        """Add turns that the model gave, without the fields that its endpoint refuses; the originals are unchanged."""
        for turn in turns:
            copied = without_fields(turn, without)
            self.turns.append(copied)
            self.echoes.append(copied)

    def drop(self, name: str) -> None:
        """Remove a field from all turns that are sent back."""
        for turn in self.echoes:
            cleaned = without_fields(turn, (name,))
            turn.clear()
            turn.update(cleaned)


_WANTS_MORE = re.compile(r"\b(missing|required|must be (passed|provided|sent|included))\b", re.IGNORECASE)
_NESTED = frozenset({"content", "tool_calls", "function", "custom", "summary"})
"""Fields of a turn whose objects are part of the API's shape, not of the model's or the user's."""
_ESSENTIAL = frozenset(
    {
        "role", "content", "tool_calls", "function", "custom", "id", "type", "name", "arguments", "input", "text",
        "call_id", "tool_use_id", "output", "thinking", "signature", "data", "action", "operation", "summary",
    }
)  # fmt: skip
"""Fields without which a turn would say something else: these are never left out."""


def echoed_fields(turns: Iterable[Any]) -> set[str]:
    """Return the names of the fields that could be left out of turns that are sent back."""
    names: set[str] = set()
    for turn in turns:
        for name, value in turn.items() if isinstance(turn, dict) else ():
            if name not in _ESSENTIAL:
                names.add(name)
            elif name in _NESTED:
                names |= echoed_fields(value if isinstance(value, list) else [value])
    return names


def without_fields(turn: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a copy of a turn without these fields, at the places where `echoed_fields` finds them."""
    return {
        name: _without_fields(value, names) if name in _NESTED else value
        for name, value in turn.items()
        if name not in names
    }


def _without_fields(value: Any, names: Collection[str]) -> Any:
    if isinstance(value, list):
        return [_without_fields(one, names) for one in value]
    return without_fields(value, names) if isinstance(value, dict) else value


def refused_field(reply: HttpReply, conversation: Conversation, params: Collection[str]) -> str | None:
    """Return the field of a turn sent back that the server refuses by name; never one that the user asked for."""
    if reply.status not in (400, 422) or not conversation.echoes:
        return None
    message = named_problem(reply.body)
    if _WANTS_MORE.search(message):
        return None  # it names a field that it does not find
    for name in sorted(echoed_fields(conversation.echoes), key=len, reverse=True):
        found = re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", message)
        if found and (name not in params or re.search(r"(messages|input)\W", message[: found.start()])):
            return name
    return None


class Media(msgspec.Struct, frozen=True):
    """An image or another file in a message: its base64, or where it is."""

    media_type: str | None
    data: str | None = None
    url: str | None = None


_is_data_url = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.-]+)*;base64,(.*)", re.DOTALL).fullmatch


def translated_parts(content: Any, translate: Callable[[Media], dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a message as `{"text": …}` and what `translate` makes of images; anything else is unchanged."""
    if not isinstance(content, list):
        return [{"text": content}] if content else []
    return [_translated_part(part, translate) for part in content]


def _translated_part(part: Any, translate: Callable[[Media], dict[str, Any]]) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        return {"text": str(part)}
    if part.get("type") in ("text", "input_text", "output_text"):
        return {"text": part.get("text", "")}
    media = media_of(part)
    return dict(part) if media is None else translate(media)


def media_of(part: Mapping[str, Any]) -> Media | None:
    """Return the image of a message's part in the shape of OpenAI's APIs; None for any other part."""
    if part.get("type") not in ("image_url", "input_image"):
        return None
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str):
        return None
    data = _is_data_url(url)
    if data is not None:
        return Media(data[1], data=data[2])
    return Media(mimetypes.guess_type(url.partition("?")[0])[0], url=url)


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
    """A tool call that the model asks for; `arguments` is JSON text as the model wrote it, or plain text."""

    id: str
    name: str
    arguments: str = ""
    kind: str = "function"
    """What the API calls this kind of call; of a `custom` one the arguments are plain text."""


class TokenUsage(msgspec.Struct, gc=False):
    """Tokens as the server counted them. `input` includes cache reads and writes, `output` includes reasoning."""

    input: int | None = None
    output: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    cache_write: int | None = None
    cost: float | None = None
    """What the provider says that the call cost."""


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
    first_call: float | None = None
    """When the first part arrived that is neither text nor reasoning: a tool call, a refusal."""
    text_times: Sequence[tuple[int, float]] = ()
    """Where each piece of the text ends, and when it arrived; only of a text that may begin with a tag."""
    thinks_in_text: bool = False
    """The text began with a block of reasoning, which was taken out of it."""
    oddities: list[str] = msgspec.field(default_factory=list)
    """What was not as this API has it, and was read around."""

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
    stop_reason = "refusal" if refused and answer.stop_reason != CONTENT_FILTER else answer.stop_reason
    cost = usage.cost if usage.cost is not None else as_cost(reply.headers.get(_COST_HEADER))
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
        stop_reason=stop_reason,
        time_to_first_content_token=answer.first_content,
        time_to_first_reasoning_token=reasoning,
        time_queued=reply.queued,
        cost=cost,
        http_status=reply.status,
        request_id=request_id(reply.headers),
        num_tokens_input_cache_write=usage.cache_write,
        resent=reply.resent,
        reasoning_in_text=answer.thinks_in_text,
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


def filtered_answer(message: str) -> ModelAnswer:
    """Return the answer of a provider whose content filter let no model answer: an outcome, and a refusal."""
    return ModelAnswer(text="", refusal=message, stop_reason=CONTENT_FILTER, usage=TokenUsage(output=0))


_MAY_BEGIN_TAG = frozenset("< \t\r\n")


def separate_thinking(answer: ModelAnswer, tags: Sequence[str]) -> None:
    """Take one leading, closed block like `<think>…</think>` out of the text; `messages` keep it.

    What follows it is the answer, and the first content token is the first one of that.
    """
    text = answer.text
    if text[:1] not in _MAY_BEGIN_TAG:
        return
    begin = text.lstrip()
    tag = next((tag for tag in tags if begin.startswith(f"<{tag}>")), None)
    closing = "" if tag is None else f"</{tag}>"
    end = text.find(closing) if closing else -1
    if end < 0:
        return
    answer.text = text[end + len(closing) :].lstrip()
    answer.thinks_in_text = True
    if not answer.text_times:
        return
    start = len(text) - len(answer.text)
    answer.first_reasoning = earliest(answer.first_reasoning, answer.text_times[0][1])
    after = next((at for place, at in answer.text_times if place > start), None)
    answer.first_content = earliest(after, answer.first_call)


def raise_if_incomplete(answer: ModelAnswer, broken: TransportError | None) -> None:
    """Raise for an answer that reports an error, is incomplete, or is empty."""
    if broken is not None and not answer.terminated:
        raise broken
    if answer.fault is not None:
        raise answer.fault
    if not answer.complete:
        raise TransientError(f"the stream ended before the answer did, after {len(answer.text)} characters of text")
    if answer.empty and answer.stop_reason != CONTENT_FILTER:
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
            elif isinstance(fields.get("text"), str) and fields["text"]:
                self.add_text(fields["text"], at)
            self._add_part(fields)

    def add_text(self, text: str, at: float | None) -> None:
        """Add a piece of plain text that is not empty."""
        if self.first_text is None:
            self.first_text = at
        self._texts.append(text)
        self._times.append(at)

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
