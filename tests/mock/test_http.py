"""The mock's HTTP by raw socket: pipelined, chunked, in pieces, too large, malformed."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.transport.http_server import BadRequest, Request, RequestReader
from tests.support.mock import Mock, chat_request, read_all, read_until, request, running_mock

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


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
