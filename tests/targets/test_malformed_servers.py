"""Servers that misbehave, over the real transport: each ends as a clear record, and the run goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Record, Runner
from steelyard.targets import AnthropicMessages, OpenAIChat, OpenAIResponses
from steelyard.targets.endpoint import EndpointTarget
from tests.support.raw_server import CHUNKED, RawServer, Script, Visit, chunk, once, run
from tests.support.scripted_transport import chat_text, chat_whole

MEGABYTE = 1024 * 1024


def answer(body: bytes, media_type: str = "application/json", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def record_of(script: Script, kind: type[EndpointTarget] = OpenAIChat, **options: Any) -> Record:
    """What a run writes down of the one case that it asks such a server."""

    async def session() -> Record:
        async with RawServer(script) as server:
            target = kind("m", base_url=server.url("/v1"))
            suite = EvalSet("one", [EvalCase(id="a", prompt="Capital of France?")])
            result = await Runner(target, suite, retries=0, progress="off", **options).run()
            return result.responses[0]

    return run(session())


def stream(*events: Any, newline: bytes = b"\n", prefix: bytes = b"data: ") -> bytes:
    lines = [event if isinstance(event, bytes) else json.dumps(event, ensure_ascii=False).encode() for event in events]
    return b"".join(prefix + line + newline * 2 for line in lines)


PARIS = chat_text("Pa", "ris")
WHOLE = json.dumps(chat_whole({"content": "Paris"})).encode()
END = b"0\r\n\r\n"

GOOD: dict[str, Script] = {
    "in one piece": once(answer(WHOLE)),
    "data: without a space": once(CHUNKED, chunk(stream(*PARIS, b"[DONE]", prefix=b"data:")), END),
    "carriage returns": once(CHUNKED, chunk(stream(*PARIS, b"[DONE]", newline=b"\r\n")), END),
    "comments and keep-alives": once(
        CHUNKED, chunk(b": ping\n\n"), *(chunk(b":\n\n" + stream(one)) for one in (*PARIS, b"[DONE]")), END
    ),
    "no [DONE]": once(CHUNKED, chunk(stream(*PARIS)), END),
    "a [DONE] without its newlines": once(CHUNKED, chunk(stream(*PARIS) + b"data: [DONE]"), END),
    "closed right after [DONE]": once(CHUNKED, chunk(stream(*PARIS, b"[DONE]"))),
    "closed instead of a length": once(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + WHOLE),
    "JSON that calls itself a stream": once(answer(WHOLE, "text/event-stream")),
    "a stream that calls itself text": once(answer(stream(*PARIS, b"[DONE]"), "text/plain")),
}


@pytest.mark.parametrize("script", GOOD.values(), ids=GOOD)
def test_what_is_odd_but_whole_is_an_answer(script: Script) -> None:
    record = record_of(script)
    assert record.error is None
    assert (record.status, record.response_text) == ("ok", "Paris")


def test_a_character_cut_in_two_is_put_together() -> None:
    data = stream(*chat_text("Zür", "ich"), b"[DONE]")
    cut = data.index("ü".encode()) + 1
    record = record_of(once(CHUNKED, chunk(data[:cut]), chunk(data[cut:]), END))
    assert record.response_text == "Zürich"


HALF = stream(*PARIS[:2]) + b'data: {"choices": [{"ind'

BAD: dict[str, tuple[Script, list[str]]] = {
    "half a JSON": (once(answer(WHOLE[:60])), ["TransientError", "not JSON"]),
    "wrong content type": (
        once(answer(b"<html><h1>Sign in</h1></html>", "text/html")),
        ["TargetError", "text/html", "base_url"],
    ),
    "200 with an error body": (
        once(answer(b'{"error": {"message": "model is loading", "type": "server_error"}}')),
        ["TransientError", "model is loading (server_error)"],
    ),
    "200 with nothing": (once(answer(b"")), ["TransientError", "with an empty body"]),
    "an error page of a proxy": (
        once(answer(b"<html><body>Bad gateway</body></html>", "text/html", "502 Bad Gateway")),
        ["TransientError", "HTTP 502", "Bad gateway"],
    ),
    "closed mid-body": (once(CHUNKED, chunk(HALF)), ["ConnectionLost"]),
    "shorter than it said": (
        once(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n" + WHOLE[:20]),
        ["ConnectionLost"],
    ),
    "a stream that ends in good order, too early": (
        once(CHUNKED, chunk(HALF), END),
        ["TransientError", "ended before the answer did"],
    ),
    "a stream of nothing": (once(CHUNKED, END), ["TransientError"]),
    "an error in the stream": (
        once(CHUNKED, chunk(stream(PARIS[1], {"error": {"message": "out of memory", "code": 500}})), END),
        ["TransientError", "out of memory"],
    ),
    "bytes that are no UTF-8": (
        once(CHUNKED, chunk(b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n'), END),
        ["TransientError", "not UTF-8"],
    ),
    "no HTTP at all": (once(b"hello\r\n\r\n"), ["MalformedReply"]),
    "closed at once": (once(), ["ConnectionLost"]),
}


@pytest.mark.parametrize(("script", "words"), BAD.values(), ids=BAD)
def test_what_is_broken_is_a_record_that_says_how(script: Script, words: list[str]) -> None:
    record = record_of(script)
    assert record.status == "error"
    assert record.error is not None
    assert record.error_type == words[0]
    for word in words[1:]:
        assert word in record.error
    assert len(record.error) < 1000


@pytest.mark.parametrize("name", ["closed mid-body", "a stream that ends in good order, too early"])
def test_the_text_that_came_before_the_end_is_kept(name: str) -> None:
    record = record_of(BAD[name][0])
    assert record.response_text == "Pa"
    assert record.http_status == 200


@pytest.mark.slow
def test_a_line_of_50_megabytes_is_read() -> None:
    text = "x" * (50 * MEGABYTE)
    data = stream(*chat_text(text), b"[DONE]")
    pieces = [data[start : start + MEGABYTE] for start in range(0, len(data), MEGABYTE)]
    record = record_of(once(CHUNKED, *map(chunk, pieces), END))
    assert record.error is None
    assert record.response_text == text


def test_a_server_that_never_answers_costs_its_timeout_and_no_more() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.gone()

    record = record_of(script, timeout=0.2)
    assert (record.status, record.error_type) == ("error", "TimeoutError")


def test_a_stream_that_stops_talking_costs_its_timeout_and_no_more() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(CHUNKED + chunk(stream(*PARIS[:2])))
        await visit.gone()

    record = record_of(script, timeout=0.2)
    assert (record.status, record.error_type) == ("error", "TimeoutError")


@pytest.mark.parametrize("kind", [OpenAIResponses, AnthropicMessages])
def test_the_other_apis_end_as_clear_records_too(kind: type[EndpointTarget]) -> None:
    for name in (
        "half a JSON",
        "wrong content type",
        "200 with an error body",
        "closed at once",
        "a stream of nothing",
    ):
        script, words = BAD[name]
        record = record_of(script, kind)
        assert record.error_type == words[0], name
    torn = [{"type": "response.created", "response": {}}, {"type": "message_start", "message": {}}]
    record = record_of(once(CHUNKED, chunk(stream(*torn)), END), kind)
    assert record.error_type == "TransientError"
    assert "ended before the answer did" in (record.error or "")


def test_one_bad_answer_among_good_ones_is_one_bad_record() -> None:
    async def script(visit: Visit) -> None:
        while True:
            request = await visit.request()
            await visit.send(answer(WHOLE[:30] if b"bad" in request.body else WHOLE))

    async def session() -> list[Record]:
        async with RawServer(script) as server:
            cases = [EvalCase(id=name, prompt=name) for name in ("a", "bad", "c")]
            target = OpenAIChat("m", base_url=server.url("/v1"))
            return (await Runner(target, EvalSet("s", cases), retries=0, progress="off").run()).responses

    assert [record.status for record in asyncio.run(session())] == ["ok", "error", "ok"]
