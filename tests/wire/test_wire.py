"""Wire quirks of providers: each transcript here is replayed, whole and in small pieces, and read as expected.

A file is of one provider: its name, the API that it speaks, cases. A case has a name, where its shape is documented,
what comes back (`deltas` or `events` of a stream, `frames` of a binary one, whose exceptions begin with `!`, or a
`body`; `raw` is text as on the wire) and how it is `read`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard import EvalCase, InvocationResponse
from steelyard.errors import TargetError, TransientError
from steelyard.protocols import HttpReply
from steelyard.scoring.trajectory import tool_calls
from steelyard.targets import AnthropicMessages, Bedrock, Gemini, OpenAIChat, OpenAIResponses
from steelyard.targets.endpoint import EndpointTarget
from steelyard.transport.sse import MEDIA_TYPE, frame
from tests.support.scripted_transport import CONTEXT, ScriptedTransport

KINDS: dict[str, type[EndpointTarget]] = {
    "openai-chat": OpenAIChat,
    "openai-responses": OpenAIResponses,
    "anthropic-messages": AnthropicMessages,
    "gemini": Gemini,
    "bedrock": Bedrock,
}
KEYS = {"name", "documented", "deltas", "events", "body", "raw", "finish", "usage", "done", "status", "headers", "read",
        "target", "named", "frames"}  # fmt: skip
FILES = sorted(Path(__file__).parent.glob("*.yaml"))
MIN_TRANSCRIPTS = 120


def transcripts() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in FILES:
        page = yaml.safe_load(path.read_text(encoding="utf-8"))
        for case in page["cases"]:
            assert case.keys() <= KEYS, (path.name, case["name"], case.keys() - KEYS)
            case = {"api": page.get("api"), "documented": page.get("documented"), **case}
            found.append((f"{path.stem}: {case['name']}", case))
    return found


TRANSCRIPTS = transcripts()


def test_there_are_enough_transcripts_and_each_says_where_its_shape_is_documented() -> None:
    assert len(TRANSCRIPTS) >= MIN_TRANSCRIPTS
    assert len({name for name, _ in TRANSCRIPTS}) == len(TRANSCRIPTS)
    assert all(str(case["documented"]).startswith("https://") for _, case in TRANSCRIPTS)


def wire_bytes(case: dict[str, Any]) -> list[bytes]:
    """What the server sends, event by event."""
    if "raw" in case:
        return [case["raw"].encode("utf-8", "surrogateescape")]
    if "body" in case:
        return [json.dumps(case["body"]).encode()]
    if "frames" in case:
        return [binary_frame(name, fields) for name, fields in case["frames"]]
    events = list(case.get("events", ()))
    for delta in case.get("deltas", ()):
        events.append({"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]})
    if "finish" in case:
        events.append({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": case["finish"]}]})
    if "usage" in case:
        events.append({"id": "c", "choices": [], "usage": case["usage"]})
    if case.get("done", case["api"] == "openai-chat"):
        events.append("[DONE]")
    chunks = []
    for event in events:
        name = f"event: {event['type']}\n" if case.get("named") else ""
        chunks.append(f"{name}data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
    return chunks


def binary_frame(name: str, fields: dict[str, Any]) -> bytes:
    """An event of Bedrock's binary stream, or an exception."""
    kind = "exception" if name.startswith("!") else "event"
    headers = {f"{kind}_type": name.removeprefix("!"), "content_type": "application/json", "message_type": kind}
    return frame(json.dumps(fields).encode(), **headers)


def reply_of(case: dict[str, Any], chunks: list[bytes]) -> HttpReply:
    streamed = "body" not in case and (
        "raw" not in case or case["raw"].lstrip("\ufeff").startswith(("data", "event", ":"))
    )
    media_type = "text/event-stream" if streamed else "application/json"
    if "frames" in case:
        media_type = MEDIA_TYPE
    headers = {"content-type": media_type, **{name: str(value) for name, value in case.get("headers", {}).items()}}
    arrivals = [float(number) for number in range(1, len(chunks) + 1)]
    return HttpReply(case.get("status", 200), headers, chunks, arrivals, arrivals[-1], 0.0)


def ask(case: dict[str, Any], chunks: list[bytes]) -> tuple[InvocationResponse | None, TargetError | None]:
    transport = ScriptedTransport(reply_of(case, chunks))
    own = {"stream": "body" not in case, "api_key": "k"} if case["api"] in ("gemini", "bedrock") else {}
    options = {**own, **case.get("target", {})}
    target = KINDS[case["api"]]("m", base_url="http://localhost/v1", transport=transport, **options)
    try:
        return asyncio.run(target.invoke(EvalCase(id="a", prompt="?"), CONTEXT)), None
    except TargetError as error:
        return error.partial, error


def reading(response: InvocationResponse | None, error: TargetError | None) -> dict[str, Any]:
    """What was read, as the files name it."""
    read: dict[str, Any] = {}
    if error is not None:
        overloaded = isinstance(error, TransientError) and error.overloaded
        read["error"] = "overloaded" if overloaded else "transient" if isinstance(error, TransientError) else "final"
        read["says"] = str(error)
        read["retry_after"] = getattr(error, "retry_after", None)
    if response is not None:
        tokens = (response.num_tokens_input, response.num_tokens_output, response.num_tokens_input_cached)
        read |= {
            "text": response.response_text,
            "stop": response.stop_reason,
            "tokens": [*tokens, response.num_tokens_output_reasoning, response.num_tokens_input_cache_write],
            "estimated": response.tokens_estimated,
            "cost": response.cost,
            "messages": response.messages,
            "calls": [[call.name, call.arguments] for call in tool_calls(response.messages or [])],
            "first": [response.time_to_first_reasoning_token, response.time_to_first_content_token],
        }
    return read


@pytest.mark.parametrize("case", [case for _, case in TRANSCRIPTS], ids=[name for name, _ in TRANSCRIPTS])
def test_a_transcript_is_read_as_its_provider_means_it(case: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    chunks = wire_bytes(case)
    with caplog.at_level(logging.WARNING, logger="steelyard"):
        read = reading(*ask(case, chunks))
    expected = dict(case["read"])
    warning = expected.pop("warns", None)
    assert (warning is None) == (not caplog.records), caplog.text
    assert warning is None or warning in caplog.text
    assert ("error" in read) == ("error" in expected), read
    check(read, expected)
    data = b"".join(chunks)
    pieces = [data[start : start + 7] for start in range(0, len(data), 7)]
    if "error" not in expected:
        expected.pop("first", None)
        check(reading(*ask(case, pieces)), expected)


def check(read: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if name == "says":
            assert value in read["says"]
        elif name == "tokens":
            assert read["tokens"][: len(value)] == value
        elif name == "message":
            assert read["messages"] == [value]
        else:
            assert read[name] == value, (name, read)
