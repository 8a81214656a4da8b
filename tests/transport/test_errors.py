"""What goes wrong on the wire, and how it ends: cancelled, closed, cut off, refused; nothing left behind."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from steelyard.errors import TargetError, TransientError, TransportError
from steelyard.protocols import HttpReply, HttpRequest
from steelyard.transport import (
    CannotConnect,
    CertificateRefused,
    ConnectionLost,
    MalformedReply,
    ProxyFailed,
    ProxyRefused,
    ResponseTooLarge,
    TimedOut,
    TlsFailed,
)
from steelyard.transport.errors import curl_error, status_error
from steelyard.transport.settings import trusted_certificates
from tests.support.raw_server import (
    CHUNKED,
    OK,
    RawServer,
    Script,
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

CA_VARIABLES = ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    proxies = ("http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY", "no_proxy", "NO_PROXY")
    for name in (*proxies, *CA_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def post(url: str, body: bytes = b"{}") -> HttpRequest:
    return HttpRequest(url, (("Authorization", "Bearer secret-key"),), body)


async def asked_of(script: Script, **options: object) -> HttpReply:
    async with RawServer(script) as server, transport(**options) as client:
        return await client.send(post(server.url()))


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# Cancelling and closing


@each_loop
def test_a_cancelled_send_closes_its_connection_at_once(new_loop) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        asked.set()
        await visit.gone()
        gone.set()

    async def main() -> None:
        async with RawServer(script) as server, transport() as client:
            sending = asyncio.ensure_future(client.send(post(server.url())))
            await asked.wait()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await gone.wait()
            server.script = always(OK)
            assert (await client.send(post(server.url()))).body == b"hello"

    run(main(), new_loop)


@each_loop
def test_nothing_is_left_open_whatever_was_in_flight(new_loop) -> None:
    """Streams cancelled half way, sends that wait for a connection, silent servers: no file stays open."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(CHUNKED + chunk(b"half"))
        await visit.gone()

    async def main() -> None:
        async with RawServer(script) as server:
            await asyncio.sleep(0)
            before = open_files()
            client = Current.kind(20)
            sends = [asyncio.ensure_future(client.send(post(server.url()))) for _ in range(50)]
            await server.until_open(20)
            for number, send in enumerate(sends):
                if number % 2:
                    send.cancel()
            await asyncio.sleep(0.01)
            await client.close()
            await client.close()
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
            cancelled = [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes]
            assert cancelled == [bool(number % 2) for number in range(50)]
            failed = [outcome for outcome in outcomes if not isinstance(outcome, asyncio.CancelledError)]
            assert all(isinstance(outcome, TransportError) and "closed" in str(outcome) for outcome in failed)
            await server.until_open(0)
            assert open_files() <= before

    run(main(), new_loop)


@pytest.mark.parametrize("turns", range(12))
def test_a_send_can_be_cancelled_at_any_turn_of_the_loop(turns: int) -> None:
    """However far a send has come when it is cancelled, the only connection is free again for the next."""

    async def main() -> None:
        async with RawServer(always(OK)) as server, transport(1) as client:
            for _ in range(2):
                send = asyncio.ensure_future(client.send(post(server.url())))
                for _ in range(turns):
                    await asyncio.sleep(0)
                send.cancel()
                await asyncio.gather(send, return_exceptions=True)
            assert (await client.send(post(server.url()))).body == b"hello"
            assert client.in_use == 0

    run(main())


def test_a_send_that_waits_for_a_connection_can_be_cancelled() -> None:
    release = asyncio.Event()

    async def script(visit: Visit) -> None:
        while True:
            await visit.request()
            await release.wait()
            await visit.send(OK)

    async def main() -> None:
        async with RawServer(script) as server, transport(1) as client:
            sends = [asyncio.ensure_future(client.send(post(server.url()))) for _ in range(3)]
            await asyncio.sleep(0.01)
            sends[1].cancel()
            await asyncio.sleep(0)
            release.set()
            first, second, third = await asyncio.gather(*sends, return_exceptions=True)
            assert isinstance(second, asyncio.CancelledError)
            assert first.body == third.body == b"hello"

    run(main())


# Connections that die

ACKNOWLEDGED = 0.3
"""Seconds after which the kernel has acknowledged what it received, however long it delays that."""


def test_a_kept_connection_that_the_server_closed_a_while_ago_is_replaced_unseen() -> None:
    async def main() -> int:
        async with RawServer(once(OK)) as server, transport(1) as client:
            assert (await client.send(post(server.url()))).body == b"hello"
            await server.until_open(0)
            await asyncio.sleep(1.1)  # libcurl looks after its idle connections once a second
            assert (await client.send(post(server.url()))).body == b"hello"
            return server.connections

    assert run(main()) == 2


@pytest.mark.parametrize("farewell", ["close", "reset"])
@pytest.mark.parametrize("body", [b"again", b"x" * 300_000], ids=["short", "long"])
def test_a_request_on_a_kept_connection_that_dies_is_not_sent_again_unseen(farewell: str, body: bytes) -> None:
    """The server has read the second request, and may have worked on it: whether to ask again is not for libcurl."""
    asked: list[int] = []

    async def script(visit: Visit) -> None:
        asked.append(len((await visit.request()).body))
        await visit.send(OK)
        asked.append(len((await visit.request()).body))
        if farewell == "reset":
            await asyncio.sleep(ACKNOWLEDGED)
            visit.reset()

    async def main() -> bytes:
        async with RawServer(script) as server, transport(1) as client:
            await client.send(post(server.url(), body))
            with pytest.raises(ConnectionLost, match=r"no answer from http://127\.0\.0\.1:\d+: it closed") as lost:
                await client.send(post(server.url(), body))
            assert lost.value.reply is None
            assert asked == [len(body)] * 2
            return (await client.send(post(server.url(), body))).body

    assert run(main()) == b"hello"
    assert asked == [len(body)] * 3


def test_a_new_connection_closed_without_a_byte_is_an_error() -> None:
    with pytest.raises(ConnectionLost, match=r"no answer from http://127\.0\.0\.1:\d+: Empty reply") as lost:
        run(asked_of(once()))
    assert lost.value.reply is None


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 200 OK\r\nX-Request-Id: r1\r\nContent-Length: 100\r\n\r\n", b"half an", b" answer"),
        (b"HTTP/1.1 200 OK\r\nX-Request-Id: r1\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"half an answer")),
        (b"HTTP/1.1 200 OK\r\nX-Request-Id: r1\r\nTransfer-Encoding: chunked\r\n\r\n", b"ff\r\nhalf an answer"),
    ],
    ids=["length", "chunked", "within a chunk"],
)
def test_an_answer_that_breaks_off_is_kept_as_far_as_it_came(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(ConnectionLost, match=r"\(after status 200 and 14 bytes\)") as lost:
        run(asked_of(once(*pieces)))
    reply = lost.value.reply
    assert reply is not None
    assert (reply.status, reply.body, reply.headers["x-request-id"]) == (200, b"half an answer", "r1")
    assert len(reply.arrivals) == len(reply.chunks)
    assert reply.ended >= reply.arrivals[-1] >= 0


def test_a_connection_reset_half_way_is_lost() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(CHUNKED + chunk(b"part"))
        await asyncio.sleep(0.05)
        visit.reset()

    with pytest.raises(ConnectionLost) as lost:
        run(asked_of(script))
    assert lost.value.reply is not None
    assert lost.value.reply.body == b"part"


@pytest.mark.parametrize(
    "pieces",
    [
        (b"I am not a web server\r\n" * 5,),
        (b"SSH-2.0-OpenSSH_9.2\r\n",),
        (b"HTTP/1.1 two hundred\r\n\r\n",),
        (CHUNKED, b"not hexadecimal\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\n", b"not gzip!"),
    ],
)
def test_what_is_not_http_is_told_apart(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(MalformedReply):
        run(asked_of(once(*pieces)))


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"], ids=["told", "untold"]
)
def test_an_answer_that_is_too_long_is_final(head: bytes) -> None:
    with pytest.raises(ResponseTooLarge, match="too long an answer") as refused:
        run(asked_of(once(head, b"x" * 5000), max_response_bytes=1000))
    assert not isinstance(refused.value, TransientError)


# No connection at all


def test_nobody_listens_and_no_credentials_are_told() -> None:
    async def main() -> None:
        async with transport() as client:
            await client.send(post(f"http://anna:hidden-word@127.0.0.1:{free_port()}/v1"))

    with pytest.raises(CannotConnect, match=r"cannot connect to http://127\.0\.0\.1:\d+: ") as refused:
        run(main())
    assert "hidden-word" not in str(refused.value)
    assert "secret-key" not in str(refused.value)


def test_a_connection_that_never_opens_times_out() -> None:
    """A listener whose queue is full lets a connection attempt hang."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())

        async def main() -> None:
            async with transport(connect_timeout=0.1) as client:
                await client.send(post(f"http://127.0.0.1:{listener.getsockname()[1]}/"))

        with pytest.raises(TimedOut, match="no connection in time"):
            run(main())


# TLS


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    return certificate(tmp_path_factory.mktemp("tls"))


async def over_tls(tls: object, **options: object) -> bytes:
    async with RawServer(always(OK), tls=tls) as server, transport(**options) as client:
        return (await client.send(post(server.url()))).body


@pytest.mark.libcurl
def test_an_unknown_authority_is_refused_for_good(proof) -> None:
    with pytest.raises(CertificateRefused, match=r"will not trust https://127\.0\.0\.1:\d+: ") as refused:
        run(over_tls(proof[1]))
    assert not isinstance(refused.value, TransientError)


@pytest.mark.libcurl
@each_loop
def test_an_authority_of_ones_own_can_be_named(proof, new_loop) -> None:
    assert run(over_tls(proof[1], ca_bundle=str(proof[0])), new_loop) == b"hello"


@pytest.mark.libcurl
@pytest.mark.parametrize("variable", CA_VARIABLES)
def test_the_environment_can_name_an_authority(proof, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, str(proof[0]))
    assert run(over_tls(proof[1])) == b"hello"


@pytest.mark.libcurl
def test_an_authority_named_by_the_environment_that_is_missing_is_told(proof, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    with pytest.raises(CertificateRefused, match=r"/nowhere/ca\.pem"):
        run(over_tls(proof[1]))


@pytest.mark.libcurl
def test_without_checking_anything_goes(proof) -> None:
    assert run(over_tls(proof[1], verify=False)) == b"hello"


@pytest.mark.libcurl
def test_a_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    known, tls = certificate(tmp_path, "elsewhere.example")
    with pytest.raises(CertificateRefused):
        run(over_tls(tls, ca_bundle=str(known)))


@pytest.mark.libcurl
def test_the_systems_own_authorities_are_found() -> None:
    place = trusted_certificates()
    assert place is not None
    assert os.path.exists(place)


@pytest.mark.libcurl
def test_tls_with_a_server_that_has_none_fails() -> None:
    async def script(visit: Visit) -> None:
        await visit.reader.read(1)
        await visit.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async def main() -> None:
        async with RawServer(script) as server, transport() as client:
            await client.send(post(server.url().replace("http:", "https:")))

    with pytest.raises(TlsFailed):
        run(main())


# Proxies


def proxy_script(seen: list[str]) -> Script:
    """A proxy that tunnels, or answers plain requests itself, and wants to be given a password."""

    async def script(visit: Visit) -> None:
        request = await visit.request()
        seen.append(request.line)
        if request.header("Proxy-Authorization") is None:
            await visit.send(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n")
        elif request.line.startswith("CONNECT "):
            host, _, port = request.line.split()[1].partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            await visit.send(b"HTTP/1.1 200 Connected\r\nX-Proxy: yes\r\n\r\n")
            ways = [passed_on(visit.reader, writer), passed_on(reader, visit.writer)]
            await asyncio.gather(*ways)
        else:
            await visit.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nvia proxy")

    return script


async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


@pytest.mark.libcurl
@pytest.mark.parametrize("by", ["option", "environment"])
def test_plain_requests_go_through_a_proxy(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def main() -> bytes:
        async with RawServer(proxy_script(seen)) as proxy:
            place = proxy.url("", credentials="anna:hidden-word@")
            if by == "environment":
                monkeypatch.setenv("http_proxy", place)
            async with transport(proxy=place if by == "option" else None) as client:
                return (await client.send(post("http://model.example/v1"))).body

    assert run(main()) == b"via proxy"
    assert seen == ["POST http://model.example/v1 HTTP/1.1"]


@pytest.mark.libcurl
def test_tls_goes_through_a_tunnel_whose_headers_are_not_the_answers(proof) -> None:
    seen: list[str] = []

    async def main() -> HttpReply:
        async with RawServer(always(OK), tls=proof[1]) as server, RawServer(proxy_script(seen)) as proxy:
            place = proxy.url("", credentials="anna:hidden-word@")
            async with transport(proxy=place, ca_bundle=str(proof[0])) as client:
                return await client.send(post(server.url()))

    reply = run(main())
    assert (reply.status, reply.body) == (200, b"hello")
    assert "x-proxy" not in reply.headers
    assert 0 <= reply.arrivals[0] < 5
    assert seen[0].startswith("CONNECT 127.0.0.1:")


def test_a_proxy_that_is_not_wanted_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    assert run(asked_of(always(OK), proxy="")).body == b"hello"


@pytest.mark.libcurl
def test_a_proxy_that_refuses_is_final_and_no_credentials_are_told() -> None:
    seen: list[str] = []

    async def main() -> None:
        async with RawServer(proxy_script(seen)) as proxy, transport(proxy=proxy.url("")) as client:
            await client.send(post("https://model.example/v1"))

    with pytest.raises(ProxyRefused, match=r"the proxy answered 407 on the way to https://model\.example"):
        run(main())


@pytest.mark.libcurl
def test_a_proxy_that_cannot_get_through_may_later() -> None:
    async def main() -> None:
        script = once(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
        async with RawServer(script) as proxy, transport(proxy=proxy.url("")) as client:
            await client.send(post("https://model.example/v1"))

    with pytest.raises(ProxyFailed, match="the proxy answered 502"):
        run(main())


@pytest.mark.libcurl
def test_a_proxy_that_is_not_there_is_named_without_its_password() -> None:
    async def main() -> None:
        async with transport(proxy=f"http://anna:hidden-word@127.0.0.1:{free_port()}") as client:
            await client.send(post("http://model.example/v1"))

    with pytest.raises(TransportError) as failed:
        run(main())
    assert "hidden-word" not in str(failed.value)


@pytest.mark.libcurl
def test_words_of_libcurl_lose_their_credentials() -> None:
    error = curl_error(7, "via http://anna:hidden@proxy:80/ to nowhere", "http://bert:word@host:1/v1?key=k", None)
    assert str(error) == "cannot connect to http://host:1: via http://proxy:80/ to nowhere"
    assert type(curl_error(999, "", "http://[bad", None)) is TransportError
    assert isinstance(curl_error(60, "", "https://host", None), TargetError)


@pytest.mark.libcurl
@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"error":{"message":"Unsupported value","param":"temperature","code":"unsupported_value"}}', "temperature"),
        (b'{"error":{"message":"No temperature here","param":"temperature"}}', None),
        (
            b'{"error":{"code":400,"message":"Invalid value","status":"INVALID_ARGUMENT","details":[{"fieldViolations":'
            b'[{"field":"generation_config.top_k","description":"too large"}]}]}}',
            "generation_config.top_k",
        ),
    ],
)
def test_an_error_400_names_the_parameter_where_the_provider_does(body: bytes, named: str | None) -> None:
    text = str(status_error(HttpReply(400, {}, [body], [0.0], 0.0, 0.0)))
    assert text.endswith(f"(parameter {named})") if named else "(parameter" not in text
