"""What only the plain transport decides: which requests are plain, its connections, and what it sends."""

from __future__ import annotations

import asyncio
import base64

import pytest

from steelyard.errors import ConfigurationError
from steelyard.protocols import HttpRequest, RequestSigning
from steelyard.transport import CurlTransport, RequestRefused, plain
from steelyard.transport.client import new_transport
from steelyard.transport.errors import CannotConnect, CannotResolve
from steelyard.transport.plain import PlainTransport, is_plain
from tests.support.raw_server import CHUNKED, OK, Asked, RawServer, Visit, always, chunk, each_loop, run

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


def post(url: str, body: bytes = b"{}", **options: object) -> HttpRequest:
    return HttpRequest(url, (("Content-Type", "application/json"),), body, **options)


@pytest.mark.parametrize(
    ("url", "proxy", "expected"),
    [
        ("http://localhost:8000/v1", None, True),
        ("HTTP://10.0.0.1/v1", None, True),
        ("http://[::1]:8000/v1", None, True),
        ("http://me:p%40ss@localhost:8000/v1", "", True),
        ("https://api.example/v1", None, False),
        ("http://localhost:8000/v1", "http://proxy:3128", False),
        ("http://b\u00fccher.example/v1", None, False),
        ("http://[fe80::1%25eth0]:8000/v1", None, False),
        ("http://[no-address", None, False),
    ],
)
def test_only_requests_without_tls_and_proxy_are_plain(url: str, proxy: str | None, expected: bool) -> None:
    assert is_plain(url, proxy) is expected


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_is_for_libcurl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert not is_plain("http://model.example/v1", None)
    assert is_plain("http://model.example/v1", "")


def test_each_url_gets_the_transport_that_can_send_to_it() -> None:
    async def main() -> list[type]:
        made = [
            new_transport("http://localhost/v1", 1),
            new_transport("https://localhost/v1", 1),
            new_transport("http://localhost/v1", 1, signs=True),
            new_transport("http://localhost/v1", 1, proxy="http://127.0.0.1:9"),
        ]
        for one in made:
            await one.close()
        return [type(one) for one in made]

    assert run(main()) == [PlainTransport, CurlTransport, CurlTransport, CurlTransport]


def test_what_it_cannot_send_is_refused() -> None:
    signing = RequestSigning(scope="aws:amz:us-east-1:bedrock", key_id="id", secret="word")

    async def main(request: HttpRequest) -> None:
        client = PlainTransport(1)
        try:
            await client.send(request)
        finally:
            await client.close()

    for request in (post("https://127.0.0.1:9/"), post("http://127.0.0.1:9/", signing=signing)):
        with pytest.raises(RequestRefused, match="not a request over a plain connection"):
            run(main(request))

    async def made() -> None:
        PlainTransport(1, proxy="http://127.0.0.1:9")

    with pytest.raises(ConfigurationError, match="do not use a proxy"):
        run(made())


def test_a_name_and_password_in_the_url_are_sent_as_a_header_unless_there_is_one() -> None:
    asked: list[Asked] = []

    async def main() -> None:
        async with RawServer(always(OK, asked)) as server:
            client = PlainTransport(2)
            url = server.url(credentials="me:p%40ss@")
            await client.send(post(url))
            await client.send(HttpRequest(url, (("authorization", "Bearer key"), ("host", "elsewhere"))))
            await client.close()

    run(main())
    assert asked[0].header("authorization") == "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert asked[1].header("authorization") == "Bearer key"
    assert asked[1].header("host") == "elsewhere"
    assert asked[0].header("accept") == "*/*"


def test_a_name_with_several_addresses_is_tried_at_each() -> None:
    """`localhost` may be ::1 first, where this server does not listen."""

    async def main() -> bytes:
        async with RawServer(always(OK)) as server:
            client = PlainTransport(1)
            reply = await client.send(post(server.url().replace("127.0.0.1", "localhost")))
            await client.close()
            return reply.body

    assert run(main()) == b"hello"


@each_loop
def test_an_answer_that_comes_before_the_request_is_sent_whole_is_read(new_loop) -> None:
    """A server that refuses a long request may not read it to its end."""

    async def script(visit: Visit) -> None:
        await visit.reader.readuntil(b"\r\n\r\n")
        await visit.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        while await visit.reader.read(1_000_000):
            pass

    async def main() -> tuple[int, bytes, int]:
        async with RawServer(script) as server:
            client = PlainTransport(1)
            reply = await client.send(post(server.url(), bytes(20_000_000)))
            await server.until_open(0)  # the connection cannot be used again
            server.script = always(OK)
            await client.send(post(server.url()))
            await client.close()
            return reply.status, reply.body, server.connections

    assert run(main(), new_loop) == (413, b"big", 2)


def test_two_servers_share_the_connections() -> None:
    """An idle connection to one is closed where the other needs it."""

    async def main() -> list[int]:
        async with RawServer(always(OK)) as one, RawServer(always(OK)) as other:
            client = PlainTransport(2)
            for server in (one, one, other, other, one):
                await asyncio.gather(*(client.send(post(server.url())) for _ in range(4)))
                assert one.open + other.open <= 4  # a server notices a moment later that one was closed
            await client.close()
            return [one.connections, other.connections]

    one, other = run(main())
    assert one >= 2
    assert other == 2


def test_a_connection_that_was_idle_for_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MAX_IDLE_SECONDS", -1.0)

    async def main() -> int:
        async with RawServer(always(OK)) as server:
            client = PlainTransport(2)
            for _ in range(3):
                await client.send(post(server.url()))
            await client.close()
            return server.connections

    assert run(main()) == 3


def test_each_waiting_call_gets_its_own_failure_to_connect() -> None:
    async def main() -> list[object]:
        client = PlainTransport(2)
        sends = [client.send(post("http://127.0.0.1:1/")) for _ in range(5)]
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        await client.close()
        return [type(outcome) for outcome in outcomes]

    assert run(main()) == [CannotConnect] * 5


def test_an_unknown_name_is_said_to_be_that() -> None:
    async def main() -> None:
        client = PlainTransport(1)
        try:
            await client.send(post("http://nowhere.invalid/"))
        finally:
            await client.close()

    with pytest.raises(CannotResolve, match=r"cannot resolve http://nowhere\.invalid"):
        run(main())


def test_closing_while_connections_are_opened_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[object]:
        async with RawServer(always(OK)) as server:
            client = PlainTransport(5)
            sends = [asyncio.ensure_future(client.send(post(server.url()))) for _ in range(9)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await client.close()
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
            await server.until_open(0)
            return outcomes

    assert all("closed before the request was sent" in str(outcome) for outcome in run(main()))


def test_what_comes_on_an_idle_connection_closes_it() -> None:
    """A server says 408 when it closes an idle connection: that is no answer to the next request."""
    sent = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(OK)
        if visit.number == 1:
            await visit.send(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
            await visit.gone()
            sent.set()

    async def main() -> int:
        async with RawServer(script) as server:
            client = PlainTransport(1)
            await client.send(post(server.url()))
            await sent.wait()
            status = (await client.send(post(server.url()))).status
            await client.close()
            return status

    assert run(main()) == 200


def test_the_part_of_a_stream_that_came_before_a_cancellation_is_in_it() -> None:
    async def main() -> tuple[int, bytes]:
        began = asyncio.Event()

        class Seen:
            def on_head(self, status: int, headers: dict[str, str]) -> None:
                pass

            def on_chunk(self, data: bytes) -> None:
                began.set()

        async def script(visit: Visit) -> None:
            await visit.request()
            await visit.send(CHUNKED + chunk(b"part"))
            await visit.gone()

        async with RawServer(script) as server:
            client = PlainTransport(1)
            call = asyncio.create_task(client.send(post(server.url()), Seen()))
            await began.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await call
            await server.until_open(0)
            await client.close()
            reply = cancelled.value.reply
            return reply.status, reply.body

    assert run(main()) == (200, b"part")
