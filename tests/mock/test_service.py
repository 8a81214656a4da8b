"""The mock's behaviour on demand: limits, faults, times, answers; and its statistics of them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import ConfigurationError, SuiteError
from steelyard.mock import MockOptions, MockServer
from steelyard.mock.service import Service
from steelyard.transport.http_server import BadRequest, Request, RequestReader, parse_head
from tests.support.mock import Mock, chat_request, read_all, read_until, request, running_mock

FAULTS: dict[str, Any] = {
    "error_rate": 0.2,
    "drop_rate": 0.2,
    "torn_rate": 0.3,
    "refusal_rate": 0.3,
    "output_tokens": "uniform:1,40",
    "reasoning_tokens": "uniform:0,9",
}
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


def answer_text(mock: Mock, prompt: str = "hello", headers: str = "", **more: Any) -> str:
    return json.loads(mock.chat(prompt, headers, **more)[1])["choices"][0]["message"]["content"]


def outcomes(mock: Mock, prompts: list[str]) -> list[tuple[int, bytes]]:
    """Collect every reply, without its time of creation."""
    replies = [mock.chat(prompt) for prompt in prompts]
    return [(status, body.partition(b'"created":')[0] + body.partition(b'"model"')[2]) for status, body in replies]


def test_a_request_gets_the_same_in_whatever_order_it_arrives() -> None:
    prompts = [f"p{number % 20}" for number in range(60)]
    with running_mock(seed=3, **FAULTS) as mock:
        forwards = outcomes(mock, prompts)
    with running_mock(seed=3, **FAULTS) as mock:
        backwards = outcomes(mock, prompts[::-1])
        stats = mock.stats()
        assert stats["requests"] == sum(stats["by_status"].values()) + stats["dropped"] == 60
    by_prompt = [
        {prompt: Counter(one for name, one in zip(order, got, strict=True) if name == prompt) for prompt in prompts}
        for order, got in ((prompts, forwards), (prompts[::-1], backwards))
    ]
    assert by_prompt[0] == by_prompt[1]
    assert {status for status, _ in forwards} == {0, 200, 500}
    with running_mock(seed=4, **FAULTS) as mock:
        assert outcomes(mock, prompts) != forwards


def test_asking_again_draws_again_so_that_a_fault_may_pass() -> None:
    with running_mock(error_rate=0.5) as mock:
        assert {mock.chat("the same")[0] for _ in range(20)} == {200, 500}


def test_after_a_reset_the_same_requests_get_the_same_again() -> None:
    with running_mock(**FAULTS) as mock:
        before = outcomes(mock, ["a", "a", "b"])
        mock.reset()
        assert outcomes(mock, ["a", "a", "b"]) == before


def test_rates_are_kept_on_the_whole() -> None:
    with running_mock(error_rate=0.25) as mock:
        mock.send(b"".join(chat_request(f"{number}") for number in range(2000)))
        assert 0.20 < mock.stats()["by_status"]["500"] / 2000 < 0.30


def test_one_rate_does_not_change_whom_another_hits() -> None:
    prompts = [f"{number}" for number in range(100)]
    with running_mock(error_rate=0.3) as mock:
        alone = [status == 500 for status, _ in outcomes(mock, prompts)]
    with running_mock(error_rate=0.3, drop_rate=0.3, latency="uniform:0ms,1ms") as mock:
        assert [status == 500 for status, _ in outcomes(mock, prompts)] == alone


def test_exactly_the_requests_above_the_concurrency_get_429() -> None:
    with running_mock(max_concurrency=5) as mock:
        slow = chat_request("slow", "x-mock: latency=60s\r\n")
        lines = [mock.line() for _ in range(5)]
        for number, line in enumerate(lines):
            line.sendall(slow)
            while mock.stats()["current_concurrency"] <= number:
                pass
        for _ in range(3):
            status, body = mock.chat("one too many")
            assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
        lines.pop().close()
        while mock.stats()["current_concurrency"] == 5:
            pass
        assert mock.chat("now there is room")[0] == 200
        for line in lines:
            line.close()
        stats = mock.stats()
        assert stats["peak_concurrency"] == 5
        assert stats["by_status"] == {"429": 3, "200": 1}


def test_under_a_crowd_the_peak_is_the_limit_and_everyone_is_answered() -> None:
    with running_mock(max_concurrency=4, latency="2ms") as mock, ThreadPoolExecutor(12) as pool:
        statuses = Counter(status for status, _ in pool.map(lambda number: mock.chat(f"{number}"), range(150)))
        stats = mock.stats()
    assert set(statuses) == {200, 429}
    assert stats["by_status"] == {str(status): count for status, count in statuses.items()}
    assert (stats["peak_concurrency"], stats["current_concurrency"]) == (4, 0)


def test_above_the_rate_comes_429_that_says_when_to_come_back() -> None:
    with running_mock(rate="3/h") as mock:
        assert [mock.chat(f"{number}")[0] for number in range(5)] == [200, 200, 200, 429, 429]
        head = mock.send(chat_request("x")).partition(b"\r\n\r\n")[0].decode()
        after = float(head.partition("retry-after: ")[2].split()[0])
        assert 1100 < after <= 1200
    with running_mock(rate="1/h", retry_after="50ms") as mock:
        mock.chat()
        assert "retry-after: 0.05\r\nretry-after-ms: 50\r\n" in mock.send(chat_request("x")).decode()


def test_the_first_token_comes_after_the_latency_and_the_others_at_their_interval() -> None:
    with running_mock(latency="80ms", chunk_interval="10ms", output_tokens=6) as mock:
        reply = mock.send(chat_request(stream=True, n=1).replace(b"host", b"x-mock-times: 1\r\nhost", 1))
        (times,) = mock.stats(times=True)["times"]
    stamps = [part.split(b"\n")[0].split() for part in reply.split(b": sent_ns=")[1:]]
    sent = [int(one[0]) for one in stamps]
    due = [int(one[1].removeprefix(b"due_ns=")) for one in stamps]
    assert len(sent) == 6
    assert all(at >= when for at, when in zip(sent, due, strict=True))
    assert [round((after - before) / 1e6) for before, after in pairwise(due)] == [10] * 5
    assert round((due[0] - times["received_ns"]) / 1e6) == 80
    assert times["first_ns"] == sent[0]
    assert times["first_token_delay_s"] == pytest.approx((sent[0] - times["received_ns"]) / 1e9)


def test_a_whole_answer_comes_when_its_last_token_would() -> None:
    with running_mock(latency="10ms", tokens_per_second=100, output_tokens=6) as mock:
        mock.chat()
        (times,) = mock.stats(times=True)["times"]
        assert times["first_token_delay_s"] >= 0.06


def test_a_slow_first_token_is_slower() -> None:
    with running_mock(slow_first_rate=1, slow_first="70ms") as mock:
        mock.chat()
        assert mock.stats(times=True)["times"][0]["first_token_delay_s"] >= 0.07


def test_two_streams_do_not_wait_for_each_other() -> None:
    with running_mock(output_tokens=4) as mock, mock.line() as slow:
        slow.sendall(chat_request("slow", "x-mock: chunk-interval=60s\r\n", stream=True))
        read_until(slow, b"\n\n\r\n")
        assert mock.chat("fast", stream=True)[1].endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("tear", ["cut", "end", "error"])
def test_a_torn_stream_lacks_its_end(path: str, tear: str) -> None:
    ask = {"model": "m", "stream": True, "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}
    with running_mock(output_tokens=10, chunk_interval="1ms") as mock:
        reply = mock.send(request(path, json.dumps(ask).encode(), f"x-mock: tear={tear}\r\n"))
        assert mock.stats()["torn"] == 1
    assert reply.startswith(b"HTTP/1.1 200")
    assert reply.count(b"delta") >= 5
    assert not any(end in reply for end in (b"[DONE]", b"response.completed", b"message_stop"))
    assert reply.endswith(b"0\r\n\r\n") is (tear != "cut")
    assert (b"told to fail" in reply) is (tear == "error")


@pytest.mark.parametrize("tear", ["cut", "end", "error"])
def test_a_torn_whole_answer_is_not_one(tear: str) -> None:
    with running_mock() as mock:
        reply = mock.send(chat_request("hi", f"x-mock: tear={tear}\r\n"))
    head, _, body = reply.partition(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].split()[0])
    assert (len(body) < length) is (tear == "cut")
    if tear == "error":
        assert json.loads(body)["error"]
    else:
        with pytest.raises(ValueError, match=r"."):
            json.loads(body)


def test_a_dropped_request_gets_not_one_byte() -> None:
    with running_mock(drop_rate=1) as mock:
        assert mock.send(chat_request()) == b""
        assert mock.stats()["dropped"] == 1


def test_stats_tell_what_came_and_what_went() -> None:
    with running_mock() as mock:
        for headers in ("x-mock-id: a\r\n", "x-mock-id: a\r\n", "x-mock-id: b\r\n", "", "", "x-mock: fail=503\r\n"):
            mock.chat("same", headers)
        mock.chat("other", stream=True)
        mock.get("/nowhere")
        stats = mock.stats()
        assert stats["requests"] == 7
        assert stats["by_path"] == {"/v1/chat/completions": {"200": 6, "503": 1}, "other": {"404": 1}}
        assert (stats["unique_ids"], stats["repeated_ids"]) == (4, 2)
        assert stats["connections_opened"] == 9
        assert stats["first_request_at"] <= stats["last_request_at"]
        assert stats["bytes_sent"] > stats["bytes_received"] > 0
        assert stats["chunks"] == 16
        mock.reset()
        assert (mock.stats()["requests"], mock.stats()["first_request_at"]) == (0, None)


def test_a_client_that_leaves_is_counted_as_gone_and_makes_room() -> None:
    with running_mock(max_concurrency=1) as mock:
        with mock.line() as line:
            line.sendall(chat_request("slow", "x-mock: latency=60s\r\n"))
            while not mock.stats()["current_concurrency"]:
                pass
        while not mock.stats()["abandoned"]:
            pass
        assert mock.stats()["current_concurrency"] == 0
        assert mock.chat("next")[0] == 200


def test_answers_come_from_a_suites_own_cases(tmp_path: Path) -> None:
    cases = [
        {"id": "fr", "prompt": "Capital of France?", "expected": "Paris"},
        {"id": "it", "messages": [{"role": "user", "content": "Capital of Italy?"}], "expected": ["Rome", "Roma"]},
        {"question": "2+2", "answer": 4},
    ]
    path = tmp_path / "cases.jsonl"
    path.write_text("\n\n".join(map(json.dumps, cases)))
    with running_mock(answers=path) as mock:
        assert answer_text(mock, "Capital of France?") == "Paris"
        assert answer_text(mock, "  Capital of Italy?\n") == "Rome"
        assert answer_text(mock, "Answer with one word. Capital of France?") == "Paris"
        assert answer_text(mock, "2+2") == "4"
        assert len(answer_text(mock, "Who knows?").split()) == 16
    with running_mock(answers=path, right_rate=0) as mock:
        assert "Paris" not in answer_text(mock, "Capital of France?")


@pytest.mark.parametrize(
    ("text", "named"),
    [('{"prompt": "p"}', "needs `prompt`"), ("[]", "not a JSON object"), ("{", "not a JSON object")],
)
def test_an_answer_that_is_none_is_named_with_its_line(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt": "p", "answer": "a"}\n' + text)
    with pytest.raises(SuiteError, match=named) as caught:
        MockServer(MockOptions(answers=path))
    assert caught.value.line == 2
    with pytest.raises(SuiteError, match="No such file"):
        MockServer(MockOptions(answers=tmp_path / "nowhere.jsonl"))


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ("latencey=5ms", "did you mean 'latency'"),
        ("latency=soon", "latency must be a length of time"),
        ("fail=200", "fail must be a status from 400 to 599"),
        ("error-rate=2", "error_rate must be a number from 0 to 1"),
        ("tear=off", "tear is one of cut, end, error"),
    ],
)
def test_a_header_that_asks_for_nonsense_is_400(header: str, named: str) -> None:
    with running_mock() as mock:
        status, body = mock.chat("hi", f"x-mock: {header}\r\n")
        assert status == 400
        assert named in json.loads(body)["error"]["message"]


def test_a_header_may_carry_a_distribution_and_more() -> None:
    with running_mock() as mock:
        header = "x-mock: latency=uniform:20ms,30ms, answer=a%2Cb=c ,output-tokens=3\r\n"
        assert answer_text(mock, "hi", header) == "a,b=c"
        assert mock.stats(times=True)["times"][0]["first_token_delay_s"] >= 0.02


def test_the_server_can_be_opened_from_python_and_leaves_nothing_behind() -> None:
    async def scenario() -> dict[str, Any]:
        async with MockServer(MockOptions(latency="60s")) as server:
            assert server.base_url == f"http://127.0.0.1:{server.port}/v1"
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(chat_request())
            while not server.stats()["current_concurrency"]:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0)
            port = server.port
        assert await reader.read() == b""  # closing does not wait for answers that are still to come
        writer.close()
        await writer.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        return server.stats()

    assert asyncio.run(scenario())["requests"] == 1


def test_a_port_that_is_taken_is_refused() -> None:
    async def scenario(port: int) -> None:
        async with MockServer(MockOptions(port=port)):
            pass

    with running_mock() as mock, pytest.raises(ConfigurationError, match=r"cannot listen on 127\.0\.0\.1:.*in use"):
        asyncio.run(scenario(mock.address[1]))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "user", "required", "function", "object"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "name", "function", "parameters", "input_schema", "properties"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = ("messages", "input", "system", "tools", "tool_choice", "max_tokens", "stream", "stream_options")


@given(
    st.dictionaries(st.sampled_from(FIELDS), ANYTHING), st.sampled_from(["chat/completions", "responses", "messages"])
)
@settings(max_examples=300, deadline=None)
def test_whatever_json_is_asked_is_answered_or_refused(fields: dict[str, Any], api: str) -> None:
    service = Service(MockOptions(tool_call_rate=1, reasoning_tokens=1))
    body = json.dumps({"model": "m", **fields}).encode()
    reply = service.reply(Request(parse_head(f"POST /v1/{api} HTTP/1.1".encode()), body, len(body)))
    assert reply.status in (200, 400)
    if reply.frames is not None:
        assert b"".join(reply.frames)
    assert service.limits.current == (reply.status == 200)


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    with running_mock() as mock:
        yield mock


def statuses(reply: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", reply)]


def drained(reader: RequestReader) -> list[Request]:
    return list(iter(reader.next, None))


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;name=value\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nx: y\r\n\r\n"


@given(
    st.lists(st.tuples(st.binary(max_size=60), st.integers(0, 20)), min_size=1, max_size=5),
    st.lists(st.integers(1, 40), min_size=1),
)
@settings(max_examples=200, deadline=None)
def test_requests_come_out_whole_and_in_order_however_their_bytes_arrive(
    bodies: list[tuple[bytes, int]], cuts: list[int]
) -> None:
    data = b""
    for body, size in bodies:  # a size of 0 means a body with a length
        head = b"POST /a?b=c HTTP/1.1\r\nHost: x\r\n"
        framing = b"transfer-encoding: chunked" if size else b"content-length: %d" % len(body)
        data += head + framing + b"\r\n\r\n" + (chunked(body, size) if size else body)
    reader, found, at = RequestReader(), [], 0
    while at < len(data):
        cut = cuts[at % len(cuts)]
        reader.feed(data[at : at + cut])
        found += drained(reader)
        at += cut
    assert [one.body for one in found] == [body for body, _ in bodies]
    assert {(one.head.path, one.head.query) for one in found} == {("/a", "b=c")}
    assert reader.held == 0


def test_a_large_body_is_read_without_looking_at_each_piece_again() -> None:
    reader = RequestReader()
    reader.feed(b"POST / HTTP/1.1\r\ncontent-length: 30000000\r\n\r\n")
    for _ in range(30_000):
        assert reader.next() is None
        reader.feed(b"x" * 1000)
    (found,) = drained(reader)
    assert len(found.body) == 30_000_000


def test_pipelined_requests_are_answered_in_order(mock: Mock) -> None:
    asks = [chat_request(f"p{at}", f"x-mock: answer=a{at},latency={(3 - at) * 10}ms\r\n") for at in range(3)]
    reply = mock.send(b"".join(asks))
    assert statuses(reply) == [200, 200, 200]
    assert [reply.index(b'"content":"a%d"' % at) for at in range(3)] == sorted(
        reply.index(b'"content":"a%d"' % at) for at in range(3)
    )


def test_a_connection_serves_many_requests_and_then_closes_when_asked(mock: Mock) -> None:
    with mock.line() as line:
        for number in range(3):
            line.sendall(chat_request(f"{number}"))
            assert read_until(line, b"}}}").startswith(b"HTTP/1.1 200 OK\r\n")
        line.sendall(chat_request("last", "connection: close\r\n"))
        assert b"connection: close" in read_all(line)


def test_a_chunked_request_is_understood(mock: Mock) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert statuses(mock.send(head + chunked(BODY, 7))) == [200]


def test_a_client_that_waits_for_100_continue_gets_it(mock: Mock) -> None:
    with mock.line() as line:
        line.sendall(request("/v1/chat/completions", BODY, "expect: 100-continue\r\n")[: -len(BODY)])
        assert read_until(line, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        line.sendall(BODY)
        assert read_until(line, b"}}}").startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_client_of_http_1_0_gets_an_unchunked_stream_and_the_end(mock: Mock) -> None:
    body = BODY.replace(b"{", b'{"stream":true,', 1)
    reply = mock.send(request("/v1/chat/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, stream = reply.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert stream.startswith(b"data: {")
    assert stream.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"GET /health HTTP/2.0\r\n\r\n", 400),
        (b"GET  /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nname : value\r\n\r\n", 400),
        (b"POST /v1/responses HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /v1/responses HTTP/1.1\r\ncontent-length: many\r\n\r\n", 400),
        (b"POST /v1/responses HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"POST /v1/responses HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd\r\n", 400),
        (b"POST /v1/responses HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"0" * 2000, 400),
        (b"POST /v1/responses HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"POST /v1/responses HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nfffffffff\r\n", 413),
        (b"GET /" + b"x" * 70_000, 431),
        (b"POST /v1/responses HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n", 501),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)
def test_a_malformed_request_gets_an_error_and_the_connection_is_closed(mock: Mock, data: bytes, status: int) -> None:
    with mock.line() as line:
        line.sendall(data)
        reply = read_all(line)  # ends only because the mock closes
    assert statuses(reply) == [status]
    assert b"connection: close" in reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    reader = RequestReader()
    reader.feed(data + b"\r\n\r\n")
    with suppress(BadRequest):
        drained(reader)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "JSON"),
        (b"[1]", "object"),
        (b'{"model": "m"', "JSON"),
        (b"\xff\xfe", "JSON"),
        (b'{"model": 5}', "model"),
        (b'{"messages": []}', "model"),
        (b'{"model": "m", "messages": []}', "nothing to answer"),
        (b'{"model": "m", "messages": "hi"}', "messages"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_body_that_asks_nothing_is_400_in_the_providers_words(mock: Mock, path: str, body: bytes, named: str) -> None:
    head, _, answer = mock.send(request(path, body)).partition(b"\r\n\r\n")
    assert statuses(head) == [400]
    error = json.loads(answer)["error"]
    assert error["type"] == "invalid_request_error"
    assert named.lower() in error["message"].lower()


def test_paths_and_methods_that_do_not_exist(mock: Mock) -> None:
    assert statuses(mock.send(b"GET /nowhere HTTP/1.1\r\n\r\n")) == [404]
    wrong = mock.send(b"GET /v1/messages HTTP/1.1\r\n\r\n")
    assert statuses(wrong) == [405]
    assert b"allow: POST" in wrong
    assert statuses(mock.send(b"DELETE /stats HTTP/1.1\r\n\r\n")) == [405]


def test_head_has_the_head_alone(mock: Mock) -> None:
    with mock.line() as line:
        line.sendall(b"HEAD /health HTTP/1.1\r\n\r\nGET /health HTTP/1.1\r\n\r\n")
        reply = read_until(line, b"}")
    assert statuses(reply) == [200, 200]
    assert reply.count(b'{"status":"ok"}') == 1
    assert reply.count(b"content-length: 15") == 2


def test_a_client_that_reads_slowly_gets_every_byte() -> None:
    with running_mock(output_tokens=20_000, chunk_interval="0.001ms") as mock, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(20)
        line.connect(mock.address)
        line.sendall(chat_request(stream=True))
        data = bytearray()
        while not data.endswith(b"0\r\n\r\n"):
            data += line.recv(50_000)
        assert data.count(b'"content":') == 20_001
