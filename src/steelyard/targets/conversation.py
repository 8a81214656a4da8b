"""A conversation with a model: the turns that are sent, and what its answers mean as responses."""

from __future__ import annotations

import json
import mimetypes
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from operator import sub
from typing import Any

import msgspec

from steelyard.errors import TargetError, TransientError, TransportError
from steelyard.protocols import HttpReply
from steelyard.records import EvalCase, InvocationResponse
from steelyard.targets.wire import as_cost, earliest
from steelyard.transport.errors import named_problem, request_id

CONTENT_FILTER = "content_filter"
_COST_HEADER = "x-litellm-response-cost"
STALL_SECONDS = 0.5
"""A gap between two tokens that is as long as this is a stall: a reader notices it."""


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
    name: str = "attachment"

    @property
    def kind(self) -> str:
        """`image`, `audio`, `video`, `text` or `application`."""
        return (self.media_type or "").partition("/")[0]

    @property
    def format(self) -> str:
        """The second part of the media type: `png`, `pdf`, `mp3`."""
        return (self.media_type or "").partition("/")[2]


_is_data_url = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.-]+)*;base64,(.*)", re.DOTALL).fullmatch


def translated_parts(content: Any, translate: Callable[[Media], dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a message as `{"text": …}` and what `translate` makes of media; anything else is unchanged."""
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
    """Return the image, audio or file of a message's part in the shape of OpenAI's APIs; None for any other part."""
    kind = part.get("type")
    if kind in ("image_url", "input_image"):
        image = part.get("image_url")
        return _media_at(image.get("url") if isinstance(image, Mapping) else image)
    if kind == "input_audio" and isinstance(audio := part.get("input_audio"), Mapping):
        return Media(f"audio/{audio.get('format')}", data=audio.get("data"))
    if kind not in ("file", "input_file"):
        return None
    inner = part.get("file")
    file = inner if isinstance(inner, Mapping) else part
    media = _media_at(file.get("file_data") or file.get("file_url"))
    if media is None:
        return None
    given = part.get("media_type") or media.media_type
    return msgspec.structs.replace(media, name=str(file.get("filename") or "attachment"), media_type=given)


def _media_at(url: Any) -> Media | None:
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
    token_times: Sequence[float] = ()
    """When each piece of a stream arrived that brought a token."""
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
    cost = usage.cost
    if cost is None and _COST_HEADER in reply.headers:
        cost = as_cost(reply.headers[_COST_HEADER])
    response = InvocationResponse(
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
    if len(answer.token_times) > 1:
        _set_gaps(response, answer.token_times)
    return response


def _set_gaps(response: InvocationResponse, times: Sequence[float]) -> None:
    """Summarize the gaps between tokens, as they arrived: pieces that came in one read are 0 s apart."""
    gaps = sorted(map(sub, times[1:], times))
    response.time_between_tokens_p50 = _percentile(gaps, 0.5)
    response.time_between_tokens_p99 = _percentile(gaps, 0.99)
    response.time_between_tokens_max = gaps[-1]
    response.stalls = len(gaps) - bisect_left(gaps, STALL_SECONDS)


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile, interpolated linearly as in a run's figures."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


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
