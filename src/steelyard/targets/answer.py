"""One turn of a model, whichever API it came through, and what a record says of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from steelyard.contracts import HttpReply
from steelyard.errors import TargetError, TransientError, TransportError
from steelyard.records import InvocationResponse
from steelyard.targets.timing import time_per_output_token
from steelyard.transport.status import request_id


class Call(msgspec.Struct, gc=False):
    """A tool call that the model asks for; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


class Usage(msgspec.Struct, gc=False):
    """Tokens as the server counted them. `input` has those read from a cache and written to it in it, `output` the
    reasoning ones."""

    input: int | None = None
    output: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    cache_write: int | None = None


class Answer(msgspec.Struct):
    """What a model said in one turn. Arrival times are None where the answer came in one piece."""

    messages: list[dict[str, Any]] = []
    """The turn in its API's own shape, fit to be sent back."""
    text: str = ""
    refusal: str | None = None
    """What the model said instead of an answer; empty where it only said that it refuses."""
    calls: Sequence[Call] = ()
    stop_reason: str | None = None
    usage: Usage | None = None
    first_content: float | None = None
    first_reasoning: float | None = None
    complete: bool = True
    """The model had finished when the server ended the answer."""
    terminated: bool = True
    """The API's own last word was there: whatever happened to the connection then, nothing is missing."""
    fault: TargetError | None = None

    @property
    def empty(self) -> bool:
        return not (self.text or self.calls) and self.refusal is None


def response_of(answer: Answer, reply: HttpReply, asked_at: datetime, prompt: str | None) -> InvocationResponse:
    """The response that one turn makes: its text (or its refusal), its times, its tokens."""
    usage = answer.usage or _UNTOLD
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


_UNTOLD = Usage()


def partial_of(answer: Answer, reply: HttpReply | None, asked_at: datetime, prompt: str | None) -> InvocationResponse:
    """What came before something went wrong. Times are kept only where some of an answer did."""
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


def raise_if_wanting(answer: Answer, broken: TransportError | None) -> None:
    """Refuse an answer that tells of an error, is not whole, or says nothing at all."""
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
