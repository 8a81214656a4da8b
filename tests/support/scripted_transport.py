"""A Transport that answers from a script, and shapes of answers to put into one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from steelyard.errors import TransportError
from steelyard.protocols import HttpReply, HttpRequest, InvocationContext

CONTEXT = InvocationContext(case_id="case")

STREAM = {"content-type": "text/event-stream; charset=utf-8", "x-request-id": "req-1"}
JSON = {"content-type": "application/json", "x-request-id": "req-1"}


def stream(*data: Any, first: float = 0.1, step: float = 0.01, done: bool = True, names: bool = False) -> HttpReply:
    """A reply whose events arrive one by one, `step` seconds apart; objects become JSON, bytes stay as they are."""
    events = [event if isinstance(event, bytes) else json.dumps(event, ensure_ascii=False).encode() for event in data]
    named = [f"event: {event['type']}\n".encode() if names and isinstance(event, dict) else b"" for event in data]
    chunks = [name + b"data: " + event + b"\n\n" for name, event in zip(named, events, strict=True)]
    if done:
        chunks.append(b"data: [DONE]\n\n")
    return chunked(*chunks, first=first, step=step)


def chunked(*chunks: bytes, first: float = 0.1, step: float = 0.01, status: int = 200) -> HttpReply:
    """A stream in just these chunks."""
    arrivals = [first + step * number for number in range(len(chunks))]
    return HttpReply(status, dict(STREAM), list(chunks), arrivals, (arrivals or [first])[-1] + 0.001, 0.005)


def whole(body: Any, *, status: int = 200, headers: dict[str, str] | None = None, at: float = 0.25) -> HttpReply:
    """A reply in one piece."""
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return HttpReply(status, {**JSON, **(headers or {})}, [data] if data else [], [at] if data else [], at, 0.005)


class ScriptedTransport:
    """Gives the scripted replies one after another, the last one for ever; keeps what it was sent."""

    def __init__(self, *replies: HttpReply | Exception | Callable[[HttpRequest], HttpReply]) -> None:
        self._replies = list(replies)
        self.requests: list[HttpRequest] = []
        self.closed = 0

    async def send(self, request: HttpRequest) -> HttpReply:
        self.requests.append(request)
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, HttpReply) else reply(request)

    async def close(self) -> None:
        self.closed += 1

    @property
    def bodies(self) -> list[Any]:
        """What was asked, as JSON."""
        return [json.loads(request.body) for request in self.requests]

    @property
    def body(self) -> Any:
        return self.bodies[-1]

    @property
    def headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.requests[-1].headers}


def broken(reply: HttpReply) -> TransportError:
    """The connection was lost when this much had come."""
    return TransportError("connection lost", reply=reply)


def chat_chunk(finish: str | None = None, usage: Any = None, **delta: Any) -> dict[str, Any]:
    """A chunk of the chat API."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1715762479,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
        "usage": usage,
    }


def chat_usage(prompt: int = 9, completion: int = 4, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning, "accepted_prediction_tokens": 0},
    }


def chat_end(usage: Any) -> dict[str, Any]:
    """The chunk that only tells the usage."""
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [], "usage": usage}


def chat_text(*pieces: str, finish: str = "stop", usage: Any = None) -> list[dict[str, Any]]:
    """A plain answer as the chat API streams it: a role, the text in pieces, the finish reason, the usage."""
    opening = chat_chunk(role="assistant", content="", refusal=None)
    texts: Iterable[dict[str, Any]] = (chat_chunk(content=piece) for piece in pieces)
    return [opening, *texts, chat_chunk(finish), chat_end(usage or chat_usage())]


def chat_whole(message: dict[str, Any], finish: str = "stop", usage: Any = ...) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}],
        **({} if usage is None else {"usage": chat_usage() if usage is ... else usage}),
    }


def tool_fragment(index: int, arguments: str, **call: Any) -> dict[str, Any]:
    name = call.pop("name", None)
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function, **call}
