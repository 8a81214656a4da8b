"""The gateway: the real SDKs through it, what it passes on and refuses, what it records, and the limits it keeps."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from steelyard.engine.rate_limit import EndpointLimits, RateLimited
from steelyard.errors import ConfigurationError
from steelyard.records import CaseLimits, InvocationResponse
from steelyard.units import RateLimit
from steelyard.workspace.gateway import Gateway, GatewaySession
from steelyard.workspace.recording import read_calls
from steelyard.workspace.upstream import UsageFilter
from tests.support.gateway import PRICES, REAL_KEY, Signal, gateway_to, session_of
from tests.support.mock import Mock, running_mock
from tests.support.raw_server import CHUNKED, Asked, RawServer, Visit, always, chunk

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
MESSAGES_TOOLS: Any = [{"name": "weather", "input_schema": SCHEMA}]


def open_ai(session: GatewaySession, **options: Any) -> openai.AsyncOpenAI:
    given = {"base_url": session.addresses.openai, "api_key": session.addresses.key, "max_retries": 0, **options}
    return openai.AsyncOpenAI(**given)


def claude(session: GatewaySession, **options: Any) -> anthropic.AsyncAnthropic:
    given = {"base_url": session.addresses.anthropic, "api_key": session.addresses.key, "max_retries": 0, **options}
    return anthropic.AsyncAnthropic(**given)


async def chat(client: Any, *, stream: bool = False, **more: Any) -> Any:
    reply = await client.chat.completions.create(**{"model": "m", "messages": ASK, "stream": stream, **more})
    return [piece async for piece in reply] if stream else reply


async def every_api(session: GatewaySession) -> list[str]:
    """The text of one answer of each API, streamed and not."""
    async with open_ai(session) as client, claude(session) as messages:
        texts = [(await chat(client)).choices[0].message.content]
        pieces = await chat(client, stream=True)
        texts.append("".join(piece.choices[0].delta.content or "" for piece in pieces))
        texts.append((await client.responses.create(model="m", input="hello")).output_text)
        async with client.responses.stream(model="m", input="hello") as stream:
            texts.append((await stream.get_final_response()).output_text)
        whole = await messages.messages.create(model="m", max_tokens=99, messages=ASK)
        texts.append(whole.content[0].text)
        async with messages.messages.stream(model="m", max_tokens=99, messages=ASK) as stream:
            texts.append(await stream.get_final_text())
        assert [model.id for model in (await client.models.list()).data] == ["mock"]
        counted = await messages.messages.count_tokens(model="m", messages=ASK)
        assert counted.input_tokens > 0
    return texts


def raw_request(session: GatewaySession, method: str = "GET", path: str = "/v1/models", **headers: str) -> bytes:
    host = session.addresses.url.removeprefix("http://")
    given = {"host": host, "authorization": f"Bearer {session.addresses.key}", **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in given.items() if value]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


async def raw(session: GatewaySession, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes and read one reply that has a length."""
    port = int(session.addresses.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(first.split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))
    finally:
        writer.close()


def test_the_sdks_work_unchanged_and_their_calls_are_counted_as_the_provider_counts_them(tmp_path: Path) -> None:
    async def main(mock: Mock) -> None:
        path = tmp_path / "calls.jsonl"
        answers = {"x-mock": "answer=Paris%2C%20of%20course"}
        async with (
            gateway_to(mock.base_url, mock.url, headers=answers) as gateway,
            session_of(gateway, path) as session,
        ):
            texts = await every_api(session)
            summary = await session.end()
        received = mock.stats()
        assert texts == ["Paris, of course"] * 6
        assert summary.turns == 6
        assert summary.calls == 8
        assert sum(sum(of.values()) for path, of in received["by_path"].items() if "count" not in path) == 6
        assert (summary.num_tokens_input, summary.num_tokens_output) == (
            received["tokens_input"],
            received["tokens_output"],
        )
        cached = summary.num_tokens_input_cached or 0
        expected = (summary.num_tokens_input - cached) * 1.0 + cached * 0.5 + summary.num_tokens_output * 2.0
        assert summary.cost == pytest.approx(expected / 1e6)
        assert not summary.tokens_estimated
        (recorded,) = read_calls(path)
        assert [call.line.response.response_text for call in recorded.calls if call.line.generates] == texts
        assert recorded.end is not None
        assert recorded.end.calls == 8
        assert REAL_KEY not in path.read_text()

    with running_mock(key=REAL_KEY) as mock:
        asyncio.run(main(mock))


def test_tool_calls_and_their_results_become_the_trajectory() -> None:
    async def main(mock: Mock) -> None:
        async with gateway_to(mock.base_url, mock.url) as gateway, session_of(gateway) as session:
            async with open_ai(session) as client, claude(session) as messages:
                reply = (await chat(client, tools=CHAT_TOOLS)).choices[0].message
                turns = [*ASK, reply.model_dump(exclude_none=True)]
                turns.append({"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "18 degrees"})
                await chat(client, stream=True, messages=turns, tools=CHAT_TOOLS)
                async with messages.messages.stream(
                    model="m", max_tokens=99, messages=ASK, tools=MESSAGES_TOOLS
                ) as stream:
                    used = await stream.get_final_message()
            summary = await session.end()
        assert [message.get("role") for message in summary.messages] == ["assistant", "tool", "assistant", "assistant"]
        assert summary.messages[1]["content"] == "18 degrees"
        assert summary.messages[3]["content"][0]["name"] == used.content[0].name == "weather"
        assert [message.get("thread", 1) for message in summary.messages] == [1, 1, 1, 2]

    with running_mock(tool_call_rate=1.0) as mock:
        asyncio.run(main(mock))


def test_an_sdk_retries_as_it_would_without_the_gateway_which_does_not() -> None:
    async def main(mock: Mock) -> None:
        async with (
            gateway_to(mock.base_url, mock.url, headers={"x-mock": "fail=500"}) as gateway,
            session_of(gateway) as session,
            open_ai(session, max_retries=2) as client,
        ):
            with pytest.raises(openai.InternalServerError, match="told to fail"):
                await chat(client)
            assert mock.stats()["requests"] == 3
            async with claude(session) as messages:
                with pytest.raises(anthropic.InternalServerError, match="told to fail"):
                    await messages.messages.create(model="m", max_tokens=9, messages=ASK)
            summary = await session.end()
        assert mock.stats()["requests"] == 4
        assert summary.calls == 4
        assert summary.turns == 0

    with running_mock() as mock:
        asyncio.run(main(mock))


def test_a_chunk_reaches_the_agent_before_the_next_is_sent() -> None:
    async def main() -> None:
        seen: asyncio.Queue[str] = asyncio.Queue()

        async def script(visit: Visit) -> None:
            await visit.request()
            await visit.send(CHUNKED.replace(b"text/plain", b"text/event-stream"))
            for number in range(3):
                delta = {"choices": [{"index": 0, "delta": {"content": f"{number} "}}]}
                await visit.send(chunk(f"data: {json.dumps(delta)}\n\n".encode()))
                assert await seen.get() == f"{number} "
            await visit.send(chunk(b"data: [DONE]\n\n") + chunk(b""))

        async with (
            RawServer(script) as server,
            gateway_to(server.url("/v1")) as gateway,
            session_of(gateway) as session,
            open_ai(session) as client,
        ):
            async for piece in await client.chat.completions.create(model="m", messages=ASK, stream=True):
                seen.put_nowait(piece.choices[0].delta.content or "")

    asyncio.run(asyncio.wait_for(main(), 30))


def test_what_is_refused_and_how() -> None:
    async def main(mock: Mock) -> None:
        async with gateway_to(mock.base_url) as gateway, session_of(gateway) as session:
            other = await gateway.session("case-2")
            for status, request in (
                (401, raw_request(session, authorization="Bearer sk-wrong")),
                (401, raw_request(session, authorization="")),
                (401, raw_request(session, authorization="", x_api_key=other.addresses.key)),
                (421, raw_request(session, host="evil.example")),
                (421, raw_request(session, host="")),
                (426, raw_request(session, path="/v1/responses", upgrade="websocket", connection="Upgrade")),
                (404, raw_request(session, path="/v1/files")),
                (404, raw_request(session, path="/v1/models/../files")),
                (404, raw_request(session, path="/stats")),
                (404, raw_request(session, "POST", "/v1/messages")),  # not among the suite's APIs
                (405, raw_request(session, "DELETE", "/v1/models")),
                (400, b"nonsense\r\n\r\n"),
                (200, raw_request(session)),
                (200, raw_request(session, authorization="", x_api_key=session.addresses.key)),
                (200, raw_request(session, host=session.addresses.url.replace("http://127.0.0.1", "localhost"))),
            ):
                found, headers, body = await raw(session, request)
                assert found == status, (request, body)
                if status >= 400:
                    assert json.loads(body)["type" if b"messages" in request else "error"], body
                    assert headers.get("x-should-retry", "false") == "false"
            received = mock.stats()
            assert received["requests"] == 0
            assert "other" not in received["by_path"]
            await other.end()
            with pytest.raises(ConnectionError):
                await raw(other, raw_request(other))

    with running_mock() as mock:
        asyncio.run(main(mock))


def test_a_request_on_an_open_connection_after_the_end_of_its_case_gets_nothing() -> None:
    async def main(mock: Mock) -> None:
        async with gateway_to(mock.base_url) as gateway, session_of(gateway) as session:
            port = int(session.addresses.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw_request(session))
            await reader.readuntil(b"\r\n\r\n")
            await session.end()
            assert b"HTTP" not in await _rest(reader)
            writer.close()

    with running_mock() as mock:
        asyncio.run(main(mock))


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


def test_allowed_headers_and_queries_pass_and_the_key_is_replaced() -> None:
    asked: list[Asked] = []

    async def main() -> None:
        body = b'{"input_tokens": 3}'
        ok = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nset-cookie: a=b\r\nanthropic-x: y\r\n"
        answer = ok + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        async with (
            RawServer(always(answer, asked)) as server,
            gateway_to(anthropic=server.url("")) as gateway,
            session_of(gateway) as session,
        ):
            sent = b'{"model": "m", "messages": []}'
            request = raw_request(
                session,
                "POST",
                "/v1/messages/count_tokens?beta=true",
                anthropic_beta="b1",
                anthropic_version="2023-06-01",
                cookie="c",
                x_forwarded_for="1.2.3.4",
                content_length=str(len(sent)),
            )
            status, headers, _ = await raw(session, request + sent)
        assert status == 200
        assert headers["anthropic-x"] == "y"
        assert "set-cookie" not in headers
        (one,) = asked
        assert one.line == "POST /v1/messages/count_tokens?beta=true HTTP/1.1"
        assert one.header("anthropic-beta") == "b1"
        assert one.header("x-api-key") == REAL_KEY
        assert one.header("cookie") is one.header("x-forwarded-for") is one.header("authorization") is None
        assert one.body == sent

    asyncio.run(main())


def test_the_real_key_is_masked_where_a_provider_repeats_it() -> None:
    async def main() -> None:
        body = json.dumps({"error": {"message": f"bad key {REAL_KEY}"}}).encode()
        head = f"HTTP/1.1 401 Unauthorized\r\nx-key: {REAL_KEY}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        async with (
            RawServer(always(head + body)) as server,
            gateway_to(server.url("/v1")) as gateway,
            session_of(gateway) as session,
        ):
            status, headers, got = await raw(session, raw_request(session))
        assert status == 401
        assert REAL_KEY.encode() not in got
        assert b"bad key ***" in got
        assert "x-key" not in headers

    asyncio.run(main())


def test_a_provider_that_cannot_be_reached_is_an_error_in_its_own_shape() -> None:
    async def main() -> None:
        async with RawServer(always(b"")) as server:
            closed = server.url("/v1")
        async with (
            gateway_to(closed, closed) as gateway,
            session_of(gateway) as session,
            open_ai(session) as client,
            claude(session) as messages,
        ):
            with pytest.raises(openai.InternalServerError, match="no reply"):
                await chat(client)
            with pytest.raises(anthropic.InternalServerError, match="no reply"):
                await messages.messages.create(model="m", max_tokens=9, messages=ASK)

    asyncio.run(main())


def test_a_stream_that_breaks_off_breaks_off_for_the_agent_too(tmp_path: Path) -> None:
    async def main(mock: Mock) -> None:
        path = tmp_path / "calls.jsonl"
        async with gateway_to(mock.base_url) as gateway, session_of(gateway, path) as session:
            async with open_ai(session) as client:
                with pytest.raises(Exception, match=r"(?i)incomplete|closed|disconnected|connection"):
                    await chat(client, stream=True)
            summary = await session.end()
        assert summary.turns == 1
        assert summary.tokens_estimated
        (call,) = read_calls(path)[0].calls
        assert call.line.response.error_type == "ConnectionLost"
        assert call.line.response.messages

    with running_mock(torn_rate=1.0, seed=3, tokens_per_second="1000") as mock:
        asyncio.run(main(mock))


@pytest.mark.parametrize("stream", [True, False])
def test_an_agent_that_hangs_up_ends_the_call_which_is_kept_as_far_as_it_came(tmp_path: Path, stream: bool) -> None:
    async def main() -> None:
        gone = asyncio.Event()
        path = tmp_path / "calls.jsonl"

        async def script(visit: Visit) -> None:
            await visit.request()
            delta = {"choices": [{"index": 0, "delta": {"content": "half an answer"}}]}
            start = CHUNKED.replace(b"text/plain", b"text/event-stream")
            await visit.send(start + chunk(f"data: {json.dumps(delta)}\n\n".encode()) if stream else b"")
            await visit.gone()
            gone.set()

        async with (
            RawServer(script) as server,
            gateway_to(server.url("/v1")) as gateway,
            session_of(gateway, path) as session,
            open_ai(session) as client,
        ):
            call = asyncio.create_task(chat(client, stream=stream))
            await server.until_open(1)
            # No event tells that the gateway has a chunk.
            while not any(call.exchange.chunks or not stream for call in session.under_way if call.exchange):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            call.cancel()
            await asyncio.wait([call])
            await gone.wait()
            summary = await session.end()
        (recorded,) = read_calls(path)[0].calls
        assert recorded.line.aborted
        assert recorded.line.response.error_type == "Aborted"
        assert summary.turns == stream
        if stream:
            assert recorded.line.response.response_text == "half an answer"
            assert recorded.line.response.num_tokens_output == 4
            assert recorded.line.response.tokens_estimated

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_chat_stream_is_counted_without_the_agent_seeing_counts_it_did_not_ask_for(tmp_path: Path) -> None:
    async def main(mock: Mock) -> None:
        path = tmp_path / "calls.jsonl"
        async with (
            gateway_to(mock.base_url) as gateway,
            session_of(gateway, path) as session,
            open_ai(session) as client,
        ):
            plain = await chat(client, stream=True)
            asked = await chat(client, stream=True, stream_options={"include_usage": True})
        assert all(piece.choices and piece.usage is None for piece in plain)
        assert asked[-1].usage is not None
        first, second = (call.line.response for call in read_calls(path)[0].calls)
        assert first.num_tokens_output == second.num_tokens_output == asked[-1].usage.completion_tokens
        assert not first.tokens_estimated
        assert "stream_options" not in read_calls(path)[0].calls[0].body

    with running_mock() as mock:
        asyncio.run(main(mock))


def test_a_server_that_refuses_stream_options_is_asked_without_and_the_tokens_are_estimated() -> None:
    asked: list[bytes] = []

    async def script(visit: Visit) -> None:
        while True:
            request = await visit.request()
            asked.append(request.body)
            if b"stream_options" in request.body:
                body = b'{"error": {"message": "unknown field stream_options"}}'
                await visit.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            else:
                delta = {"choices": [{"index": 0, "delta": {"content": "four"}, "finish_reason": "stop"}]}
                event = f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n".encode()
                await visit.send(CHUNKED.replace(b"text/plain", b"text/event-stream") + chunk(event) + chunk(b""))

    async def main() -> None:
        async with (
            RawServer(script) as server,
            gateway_to(server.url("/v1")) as gateway,
            session_of(gateway) as session,
            open_ai(session) as client,
        ):
            for _ in range(2):
                assert (await chat(client, stream=True))[0].choices[0].delta.content == "four"
            summary = await session.end()
        assert [b"stream_options" in body for body in asked] == [True, False, False]
        assert summary.turns == summary.num_tokens_output == 2
        assert summary.tokens_estimated

    asyncio.run(main())


def test_events_are_filtered_however_they_are_cut() -> None:
    usage = b'data: {"id":"x","choices": [],"usage":{"prompt_tokens":1}}\n\n'
    text = b'data: {"choices":[{"delta":{"content":"a"}}],"usage":null}\r\n\r\n'
    azure = b'data: {"choices":[],"prompt_filter_results":[1],"usage":null}\n\n'
    stream = azure + text + usage + text + b"data: [DONE]\n\n"
    for size in range(1, len(stream)):
        sieve = UsageFilter()
        passed = b"".join(sieve.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + sieve.rest()
        assert passed == stream.replace(usage, b"")


def test_calls_beyond_a_limit_get_an_error_that_no_sdk_retries() -> None:
    async def main(mock: Mock) -> None:
        async with gateway_to(mock.base_url, mock.url) as gateway:
            cost = 8 * 1e-6 + 16 * 2e-6
            for limits, reason, allowed in (
                (CaseLimits(turns=2), "turn_limit", 2),
                (CaseLimits(tokens=30), "token_limit", 2),
                (CaseLimits(cost=cost * 1.01), "cost_limit", 2),
            ):
                mock.reset()
                signal = Signal()
                async with session_of(gateway, limits=limits, signal=signal) as session:
                    async with open_ai(session, max_retries=5) as client, claude(session, max_retries=5) as messages:
                        for _ in range(allowed):
                            await chat(client)
                            assert signal.reached is None
                        with pytest.raises(openai.BadRequestError, match=reason.replace("_", " ")) as refused:
                            await chat(client, stream=True)
                        assert refused.value.code == reason
                        with pytest.raises(anthropic.BadRequestError, match=reason.replace("_", " ")):
                            await messages.messages.create(model="m", max_tokens=9, messages=ASK)
                        await client.models.list()  # is no turn
                    summary = await session.end()
                assert signal.said == [reason]
                assert summary.limit == reason
                assert summary.turns == allowed
                assert mock.stats()["requests"] == allowed

    with running_mock() as mock:
        asyncio.run(main(mock))


@pytest.mark.parametrize("limits", [CaseLimits(turns=3), CaseLimits(tokens=60), CaseLimits(cost=105e-6)])
def test_calls_at_once_do_not_pass_a_limit_by_more_than_one(limits: CaseLimits) -> None:
    async def main(mock: Mock) -> None:
        async with (
            gateway_to(mock.base_url) as gateway,
            session_of(gateway, limits=limits) as session,
            open_ai(session) as client,
        ):
            asked = [chat(client, messages=[{"role": "user", "content": f"{'word ' * 8}{n}"}]) for n in range(10)]
            got = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(not isinstance(one, Exception) for one in got) == 3
        assert mock.stats()["requests"] == 3

    with running_mock(latency="20ms") as mock:
        asyncio.run(main(mock))


def test_a_cost_limit_without_a_price_refuses_the_call_and_says_why() -> None:
    async def main(mock: Mock) -> None:
        prices = {"other": PRICES}
        async with (
            gateway_to(mock.base_url, prices=prices) as gateway,
            session_of(gateway, limits=CaseLimits(cost=1.0)) as session,
            open_ai(session) as client,
        ):
            with pytest.raises(openai.BadRequestError, match="`prices` has none for model 'm'"):
                await chat(client)
            assert "prices" in ((await session.end()).problem or "")
        assert mock.stats()["requests"] == 0

    with running_mock() as mock:
        asyncio.run(main(mock))


def test_the_runs_rate_limit_holds_calls_back_and_stops_the_time_limit_meanwhile(tmp_path: Path) -> None:
    async def main(mock: Mock) -> None:
        limits = EndpointLimits(rate=RateLimit(3, 1.0))
        signal, path = Signal(), tmp_path / "calls.jsonl"
        async with (
            gateway_to(mock.base_url, limited=lambda upstream: RateLimited(upstream, limits)) as gateway,
            session_of(gateway, path, signal=signal) as session,
            open_ai(session) as client,
        ):
            for _ in range(3):
                await chat(client)
            summary = await session.end()
        waits = [call.line.response.time_waiting for call in read_calls(path)[0].calls]
        assert waits[0] is None
        assert all(wait is not None and wait > 0 for wait in waits[1:])
        assert signal.said == ["pause", "resume"] * 2
        assert summary.time_waiting == pytest.approx(sum(filter(None, waits)), abs=0.05)
        response = InvocationResponse(response_text="done", num_tokens_input=1)
        summary.apply(response)
        assert response.num_turns == 3
        assert response.num_tokens_input == summary.num_tokens_input
        assert (response.time_in_model, response.time_in_tools) == (summary.time_in_model, summary.time_in_tools)

    with running_mock() as mock:
        asyncio.run(main(mock))


def test_a_429_reaches_the_agent_and_pauses_all_calls_to_the_endpoint() -> None:
    async def main(mock: Mock) -> None:
        limits = EndpointLimits()
        headers = {"x-mock": "fail=429,retry-after=0.2"}
        limited = lambda upstream: RateLimited(upstream, limits)  # noqa: E731
        async with (
            gateway_to(mock.base_url, limited=limited, headers=headers) as gateway,
            session_of(gateway) as session,
            open_ai(session) as client,
        ):
            with pytest.raises(openai.RateLimitError):
                await chat(client)
            assert limits.permit_now(0) is None

    with running_mock() as mock:
        asyncio.run(main(mock))


def test_the_time_of_an_attempt_is_split_without_a_rest() -> None:
    from steelyard.workspace.limits import TimeSplit

    now, signal = [0.0], Signal()
    split = TimeSplit(signal, lambda: now[0])

    def step(seconds: float, do: Any, **more: Any) -> None:
        now[0] += seconds
        do(**more)

    step(1, split.change, waiting=1)  # 1 s of tools
    step(2, split.change, waiting=1)  # 2 s of waiting
    step(4, split.change, waiting=-1, answering=1)  # 4 s more
    step(8, split.change, answering=-1)  # 8 s of the model, while the other waits
    step(16, split.change, waiting=-1, answering=1)  # 16 s of waiting
    step(32, split.change, answering=-1)
    step(64, split.end)
    assert (split.tools, split.waiting, split.model) == (65, 22, 40)
    assert signal.said == ["pause", "resume", "pause", "resume"]


def test_an_attempt_without_a_call_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with gateway_to("http://127.0.0.1:9/v1") as gateway, session_of(gateway):
            pass

    with caplog.at_level(logging.WARNING, "steelyard"):
        asyncio.run(main())
    assert "case case-1: 0 model calls: is it pointed at the gateway?" in caplog.text


def test_the_cost_of_a_killed_attempt_is_told_by_the_next(tmp_path: Path) -> None:
    async def main(mock: Mock) -> None:
        path = tmp_path / "calls.jsonl"
        async with gateway_to(mock.base_url) as gateway:
            async with session_of(gateway, path) as session, open_ai(session) as client:
                await chat(client)
                first = await session.end()
            lines = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(b"".join(lines[:-1]))  # as if the run had been killed before the agent ended
            async with session_of(gateway, path) as session, open_ai(session) as client:
                await chat(client)
                second = await session.end()
        assert second.lost_cost == first.cost
        assert sum(one.cost for one in read_calls(path)) == pytest.approx(first.cost + second.cost)

    with running_mock() as mock:
        asyncio.run(main(mock))


def test_a_disk_that_refuses_a_line_is_a_problem_of_the_attempt(tmp_path: Path) -> None:
    async def main(mock: Mock) -> None:
        (tmp_path / "file").touch()
        async with (
            gateway_to(mock.base_url) as gateway,
            session_of(gateway, tmp_path / "file" / "calls.jsonl") as session,
            open_ai(session) as client,
        ):
            await chat(client)
            summary = await session.end()
        assert "could not be recorded" in (summary.problem or "")

    with running_mock() as mock:
        asyncio.run(main(mock))


def test_pipelined_requests_are_answered_in_order() -> None:
    async def main(mock: Mock) -> None:
        async with gateway_to(mock.base_url) as gateway, session_of(gateway) as session:
            port = int(session.addresses.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            one = raw_request(session)
            two = raw_request(session, path="/v1/models/abc")
            writer.write(one + two + raw_request(session, path="/nothing", connection="close"))
            everything = await reader.read()
            writer.close()
        assert re.findall(rb"HTTP/1\.1 (\d+)", everything) == [b"200", b"200", b"404"]
        assert everything.index(b'"object":"list"') < everything.index(b'"id":"abc"')

    with running_mock() as mock:
        asyncio.run(main(mock))


@pytest.mark.parametrize(
    ("apis", "message"),
    [
        ({}, "must name an API"),
        ({"gemini": {}}, "unknown key gateway.gemini; known here: openai, anthropic"),
        ({"openai": {"url": "x"}}, "gateway.openai"),
        ({"openai": 3}, "takes a mapping"),
        ({"openai": {"base_url": "ftp://x"}}, "base_url must begin with http"),
    ],
)
def test_a_gateway_that_makes_no_sense_is_refused(apis: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Gateway(apis)


def test_a_gateway_travels_to_a_worker_without_its_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", REAL_KEY)
    gateway = Gateway({"openai": {}})
    data = pickle.dumps(gateway)
    assert REAL_KEY.encode() not in data
    assert pickle.loads(data).identity() == gateway.identity()
