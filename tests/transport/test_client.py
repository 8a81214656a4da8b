"""What a transport sends, what it gives back, and how it is shared."""

from __future__ import annotations

import asyncio
import gzip
import os
from pathlib import Path
from time import perf_counter

import pytest

from steelyard.errors import ConfigurationError, TargetError, TransportError
from steelyard.protocols import HttpReply, HttpRequest, Transport
from steelyard.transport import CurlTransport, RequestRefused
from steelyard.transport.event_loop import Bridge, EpollPoller, SelectorPoller
from tests.support.raw_server import (
    CHUNKED,
    OK,
    Asked,
    RawServer,
    Visit,
    always,
    certificate,
    chunk,
    each_loop,
    once,
    run,
)
from tests.support.transports import Current, transport

pytestmark = pytest.mark.usefixtures("each_kind")

HEADERS = (("Content-Type", "application/json"), ("Authorization", "Bearer secret-key"))


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def post(url: str, body: bytes = b"{}") -> HttpRequest:
    return HttpRequest(url, HEADERS, body)


async def answer_to(*pieces: bytes, **options: object) -> HttpReply:
    """The reply to one request which a server answers with these pieces before it closes the connection."""
    async with RawServer(once(*pieces)) as server, transport(**options) as client:
        return await client.send(post(server.url()))


@each_loop
def test_a_request_goes_out_and_its_answer_comes_back(new_loop) -> None:
    asked: list[Asked] = []

    async def main() -> HttpReply:
        async with RawServer(always(OK, asked)) as server, transport() as client:
            seam: Transport = client
            return await seam.send(post(server.url("/v1/a?b=c"), b'{"q": "caf\xc3\xa9"}'))

    reply = run(main(), new_loop)
    assert (reply.status, reply.body) == (200, b"hello")
    assert reply.headers == {"content-type": "text/plain", "content-length": "5"}
    assert asked[0].line == "POST /v1/a?b=c HTTP/1.1"
    assert asked[0].body == b'{"q": "caf\xc3\xa9"}'
    assert asked[0].header("Authorization") == "Bearer secret-key"
    assert asked[0].header("Content-Type") == "application/json"


def test_a_long_body_is_sent_whole_without_asking_first() -> None:
    asked: list[Asked] = []
    body = os.urandom(3_000_000)

    async def main() -> None:
        async with RawServer(always(OK, asked)) as server, transport() as client:
            await client.send(post(server.url(), body))

    run(main())
    assert asked[0].body == body
    assert asked[0].header("Expect") is None
    assert asked[0].header("Accept-Encoding") == "identity"
    assert str(asked[0].header("User-Agent")).startswith("steelyard/")


def test_methods_alternate_on_one_handle() -> None:
    """A handle that sent a POST sends a bare GET, then a PUT, then a POST again."""
    asked: list[Asked] = []

    async def main() -> None:
        async with RawServer(always(OK, asked)) as server, transport(1) as client:
            for method, body in (("POST", b"one"), ("GET", b""), ("PUT", b"two"), ("POST", b"three"), ("POST", b"")):
                await client.send(HttpRequest(server.url("/"), (("X-Empty", ""),), body, method))

    run(main())
    assert [request.line.split()[0] for request in asked] == ["POST", "GET", "PUT", "POST", "POST"]
    assert [request.body for request in asked] == [b"one", b"", b"two", b"three", b""]
    assert asked[1].header("Content-Length") is None
    assert {request.header("X-Empty") for request in asked} == {""}
    assert {request.header("Content-Type") for request in asked} == {None}


@each_loop
def test_sequential_requests_share_one_connection(new_loop) -> None:
    async def main() -> int:
        async with RawServer(always(OK)) as server, transport() as client:
            for _ in range(20):
                await client.send(post(server.url()))
            return server.connections

    assert run(main(), new_loop) == 1


@each_loop
def test_never_more_connections_than_asked_for(new_loop) -> None:
    """With 7 connections, 200 sends at once are served 7 at a time, over 7 connections."""
    busy = 0
    most = 0

    async def script(visit: Visit) -> None:
        nonlocal busy, most
        while True:
            await visit.request()
            busy += 1
            most = max(most, busy)
            await asyncio.sleep(0.001)
            busy -= 1
            await visit.send(OK)

    async def main() -> int:
        async with RawServer(script) as server, transport(7) as client:
            replies = await asyncio.gather(*(client.send(post(server.url())) for _ in range(200)))
            assert all(reply.body == b"hello" for reply in replies)
            return server.connections

    assert run(main(), new_loop) == 7
    assert most == 7


@each_loop
def test_a_thousand_at_once_each_get_their_own_answer(new_loop) -> None:
    async def script(visit: Visit) -> None:
        while True:
            body = (await visit.request()).body
            await visit.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async def main() -> None:
        async with RawServer(script) as server, transport(1000) as client:
            bodies = [b"number %d" % number for number in range(1000)]
            replies = await asyncio.gather(*(client.send(post(server.url(), body)) for body in bodies))
            assert [reply.body for reply in replies] == bodies

    run(main(), new_loop)


@each_loop
def test_chunks_carry_the_moment_of_their_arrival(new_loop) -> None:
    """Absolute arrivals lie just after the moments at which the server, on the same clock, sent each chunk."""
    sent: list[float] = []
    got: list[Asked] = []

    async def script(visit: Visit) -> None:
        got.append(await visit.request())
        await visit.send(CHUNKED)
        for word in (b"one", b"two", b"three"):
            await asyncio.sleep(0.1)
            sent.append(await visit.send(chunk(word)))
        await asyncio.sleep(0.1)
        sent.append(await visit.send(b"0\r\n\r\n"))

    async def main() -> tuple[float, HttpReply]:
        async with RawServer(script) as server, transport() as client:
            called = perf_counter()
            return called, await client.send(post(server.url()))

    called, reply = run(main(), new_loop)
    began = called + reply.queued
    assert reply.chunks == [b"one", b"two", b"three"]
    # Both ends share one loop and a busy machine: what must not happen is that a pause of the server's is mistaken.
    assert abs(got[0].at - began) < 0.08
    late = [began + at - moment for at, moment in zip([*reply.arrivals, reply.ended], sent, strict=True)]
    assert all(-0.02 < each < 0.08 for each in late), late


def test_waiting_for_a_connection_is_queued_time_and_not_the_servers() -> None:
    async def script(visit: Visit) -> None:
        for pause in (0.2, 0.0):
            await visit.request()
            await asyncio.sleep(pause)
            await visit.send(OK)

    async def main() -> list[HttpReply]:
        async with RawServer(script) as server, transport(1) as client:
            return await asyncio.gather(*(client.send(post(server.url())) for _ in range(2)))

    first, second = run(main())
    assert first.queued < 0.1
    assert 0.19 < first.arrivals[0] <= first.ended
    assert second.queued > 0.19
    assert second.ended < 0.1


def test_uploading_is_not_the_servers_time() -> None:
    """The clock starts when the last byte of a long request has left, not the first."""
    body = bytes(20_000_000)

    async def script(visit: Visit) -> None:
        await visit.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.5)  # nothing is read: the socket's buffers are full after a part of it
        await visit.reader.readexactly(len(body))
        await visit.send(OK)

    async def main() -> HttpReply:
        async with RawServer(script) as server, transport() as client:
            return await client.send(post(server.url(), body))

    reply = run(main())
    assert reply.queued > 0.49
    assert reply.ended < 0.4


def test_interim_answers_and_trailers_are_no_headers() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nX-Which: hint\r\n\r\n"
    head = b"HTTP/1.1 201 Created\r\nX-Which: real\r\nX-Two: a\r\nx-two: b\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = run(answer_to(hints, head, chunk(b"body"), b"0\r\nX-Which: trailer\r\n\r\n"))
    assert (reply.status, reply.body) == (201, b"body")
    assert reply.headers["x-which"] == "real"
    assert reply.headers["x-two"] == "a, b"


@pytest.mark.parametrize("line", [b"HTTP/odd: x", b"HTTP/odd: 500", b"HTTP/1.1: 500 x"])
def test_a_header_that_looks_like_a_status_is_a_header(line: bytes) -> None:
    reply = run(answer_to(b"HTTP/1.1 200 OK\r\nX-A: b\r\n%b\r\nContent-Length: 2\r\n\r\nok" % line))
    assert (reply.status, reply.body, reply.headers["x-a"]) == (200, b"ok", "b")


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    reply = run(answer_to(b"HTTP/1.0 200 Fine\r\nX-A: ", b"b\r\n\r\nsome ", b"text"))
    assert (reply.status, reply.headers, reply.body) == (200, {"x-a": "b"}, b"some text")


def test_an_empty_answer_has_no_chunks() -> None:
    reply = run(answer_to(b"HTTP/1.1 204 No Content\r\n\r\n"))
    assert (reply.status, reply.chunks, reply.arrivals) == (204, [], [])
    assert reply.ended >= 0


def test_an_answer_compressed_unasked_is_decoded() -> None:
    packed = gzip.compress(b"plain after all")
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    assert run(answer_to(head + packed)).body == b"plain after all"


def test_an_error_status_is_an_answer() -> None:
    reply = run(answer_to(b"HTTP/1.1 429 Too Many\r\nRetry-After: 2\r\nContent-Length: 4\r\n\r\nbusy"))
    assert (reply.status, reply.body, reply.headers["retry-after"]) == (429, b"busy", "2")


def test_a_redirect_is_not_followed() -> None:
    asked: list[Asked] = []

    async def main() -> HttpReply:
        async with RawServer(always(OK, asked)) as other:
            return await answer_to(
                b"HTTP/1.1 307 Go\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % other.url().encode()
            )

    assert run(main()).status == 307
    assert not asked


def test_a_line_of_fifty_megabytes_comes_through() -> None:
    line = b"data: " + b"x" * 50_000_000 + b"\n\n"
    reply = run(answer_to(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(line), line))
    assert reply.body == line
    assert len(reply.chunks) == len(reply.arrivals)


@pytest.mark.parametrize(
    ("name", "value"),
    [("X-A", "one\r\nX-B: two"), ("X-A", "one\ntwo"), ("X-A\r\nX-B", "v"), ("X A", "v"), ("", "v"), ("X-A", "nul\0")],
)
def test_a_header_cannot_smuggle_in_another(name: str, value: str) -> None:
    async def main() -> None:
        async with transport() as client:
            await client.send(HttpRequest("http://127.0.0.1:9/", ((name, value),), b""))

    with pytest.raises(RequestRefused) as refused:
        run(main())
    assert "two" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9/a b",
        "http://127.0.0.1:9/a\r\nX: y",
        "file:///etc/passwd",
        "ftp://127.0.0.1/",
        "127.0.0.1:9",
        "me:secret@127.0.0.1:9/v1",
        "127.0.0.1:9/v1?key=secret",
        "",
    ],
)
def test_only_plain_web_addresses_are_used(url: str) -> None:
    async def main() -> None:
        async with transport() as client:
            await client.send(post(url))

    with pytest.raises(RequestRefused, match="a URL must begin with http:// or https://") as refused:
        run(main())
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("method", "body"), [("HEAD", b""), ("get", b""), ("GET", b"body"), ("PO ST", b"")])
def test_methods_that_are_not_known_are_refused(method: str, body: bytes) -> None:
    async def main() -> None:
        async with transport() as client:
            await client.send(HttpRequest("http://127.0.0.1:9/", (), body, method))

    with pytest.raises(RequestRefused):
        run(main())


def test_options_are_checked_when_it_is_made() -> None:
    async def made(connections: int = 1, **options: object) -> None:
        Current.kind(connections, **options)

    with pytest.raises(ConfigurationError, match="connections must be >= 1, got 0"):
        run(made(0))
    with pytest.raises(ConfigurationError, match="connect_timeout must be > 0, got -1"):
        run(made(connect_timeout=-1))
    with pytest.raises(ConfigurationError, match="max_response_bytes must be >= 1, got 0"):
        run(made(max_response_bytes=0))
    with pytest.raises(ConfigurationError, match=r"neither a file nor a folder: /nowhere/ca\.pem"):
        run(made(ca_bundle="/nowhere/ca.pem"))


@pytest.mark.libcurl
def test_paths_and_passwords_may_have_letters_beyond_ascii(tmp_path: Path) -> None:
    proof, tls = certificate(tmp_path)
    bundle = proof.rename(tmp_path / "jürgen.pem")

    async def main() -> None:
        async with RawServer(always(OK), tls=tls) as server, transport(ca_bundle=str(bundle)) as client:
            assert (await client.send(post(server.url()))).body == b"hello"
        async with RawServer(always(OK)) as proxy, transport(proxy=proxy.url("", credentials="me:pässword@")) as client:
            assert (await client.send(post("http://example.test/"))).body == b"hello"

    run(main())


@pytest.mark.libcurl
def test_settings_that_libcurl_will_not_take_are_refused_at_once_and_not_told() -> None:
    async def main() -> None:
        CurlTransport(1, proxy="http://me:secret\0@127.0.0.1:9")

    with pytest.raises(ConfigurationError, match="libcurl rejects") as refused:
        run(main())
    assert "secret" not in str(refused.value)


def test_it_belongs_to_the_loop_it_was_made_on() -> None:
    async def make() -> Transport:
        return Current.kind(1)

    async def use(client: Transport) -> None:
        await client.send(post("http://127.0.0.1:9/"))

    with asyncio.Runner() as runner:
        client = runner.run(make())
        with pytest.raises(RuntimeError, match="another loop"):
            run(use(client))
        runner.run(client.close())
        with pytest.raises(RuntimeError, match="closed"):
            runner.run(use(client))


@pytest.mark.libcurl
@pytest.mark.parametrize("poller", [EpollPoller, SelectorPoller])
def test_either_kind_of_watch_serves(poller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.transport.event_loop.new_poller", poller)

    async def main() -> None:
        async with RawServer(always(OK)) as server, transport(5) as client:
            body = bytes(2_000_000)  # more than a socket takes at once, so that it is waited for in both ways
            replies = await asyncio.gather(*(client.send(post(server.url(), body)) for _ in range(20)))
            assert all(reply.body == b"hello" for reply in replies)

    run(main())


@pytest.mark.libcurl
def test_many_ready_sockets_are_served_in_turns() -> None:
    """However many sockets are ready, a bounded number is served at once, and none is passed over."""
    pairs = [os.pipe() for _ in range(200)]
    poller = EpollPoller(pytest.fail)
    try:
        for reader, writer in pairs:
            poller.on_socket(1, reader, None, None)
            os.write(writer, b"!")
        turns = [poller.ready() for _ in range(4)]
        assert all(len(turn) == 64 for turn in turns)
        assert {descriptor for turn in turns for descriptor, _ in turn} == {reader for reader, _ in pairs}
    finally:
        poller.close()
        for descriptor in (descriptor for pair in pairs for descriptor in pair):
            os.close(descriptor)


@pytest.mark.libcurl
def test_if_a_socket_cannot_be_watched_all_calls_fail_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(EpollPoller):
        failing = True

        def on_socket(self, what: int, descriptor: int, *more: object) -> None:
            descriptor = 999_999 if Failing.failing else descriptor
            Failing.failing = False
            super().on_socket(what, descriptor, *more)

    monkeypatch.setattr("steelyard.transport.event_loop.new_poller", Failing)

    async def main() -> None:
        async with RawServer(always(OK)) as server, transport() as client:
            outcomes = await asyncio.gather(
                *(client.send(post(server.url())) for _ in range(3)), return_exceptions=True
            )
            assert all(isinstance(outcome, TransportError) for outcome in outcomes), outcomes
            assert (await client.send(post(server.url()))).body == b"hello"

    run(main())


def test_an_unknown_name_is_told_with_its_host() -> None:
    async def main() -> None:
        async with transport() as client:
            await client.send(post(f"http://{'a' * 70}.example/v1"))

    with pytest.raises(TargetError, match=r"aaaa\.example"):
        run(main())


@pytest.mark.libcurl
def test_a_bridge_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError):
        Bridge(1, lambda *_: None, lambda *_: None)


class Pieces:
    """A receiver that keeps what it is given, and says when something has come."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, dict[str, str]]] = []
        self.chunks: list[bytes] = []
        self.came = asyncio.Event()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.heads.append((status, headers))
        self.came.set()

    def on_chunk(self, data: bytes) -> None:
        self.chunks.append(data)
        self.came.set()

    async def wait(self) -> None:
        await self.came.wait()
        self.came.clear()


@each_loop
def test_a_receiver_gets_the_head_and_each_chunk_before_the_next_is_sent(new_loop) -> None:
    async def main() -> tuple[HttpReply, HttpReply, Pieces]:
        pieces = Pieces()

        async def script(visit: Visit) -> None:
            await visit.request()
            await visit.send(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + CHUNKED)
            await pieces.wait()
            for data in (b"one", b"two"):
                await visit.send(chunk(data))
                await pieces.wait()
            await visit.send(b"0\r\nlate: trailer\r\n\r\n")
            await visit.request()
            await visit.send(OK)

        async with RawServer(script) as server, transport(1) as client:
            streamed = await client.send(post(server.url()), pieces)
            return streamed, await client.send(post(server.url())), pieces

    streamed, plain, pieces = run(main(), new_loop)
    assert [status for status, _ in pieces.heads] == [200]
    assert pieces.heads[0][1]["transfer-encoding"] == "chunked"
    assert pieces.chunks == streamed.chunks == [b"one", b"two"]
    assert plain.body == b"hello"  # on the same handle, whose receiver is gone


def test_a_receiver_gets_nothing_more_after_its_call_was_cancelled() -> None:
    async def main() -> Pieces:
        pieces = Pieces()

        async def script(visit: Visit) -> None:
            await visit.request()
            await visit.send(CHUNKED + chunk(b"one"))
            await visit.gone()

        async with RawServer(script) as server, transport(1) as client:
            call = asyncio.create_task(client.send(post(server.url()), pieces))
            while not pieces.chunks:
                await pieces.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await server.until_open(0)
        return pieces

    assert run(main()).chunks == [b"one"]
