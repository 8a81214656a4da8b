"""HTTP client: requests over a pool of keep-alive connections, timed when they are sent and as replies arrive."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from time import perf_counter
from typing import Any

import pycurl

from steelyard.errors import ConfigurationError, TargetError, TransportError
from steelyard.protocols import HttpReply, HttpRequest, ReplyReceiver, RequestSigning
from steelyard.transport.errors import curl_error
from steelyard.transport.event_loop import (
    LOST_CODES,
    WATCH_SECONDS,
    Bridge,
    Endpoint,
    KeptConnections,
    OpenedSocket,
    opened_socket,
)
from steelyard.transport.plain import PlainTransport, is_plain
from steelyard.transport.replies import Handover, read_head
from steelyard.transport.settings import Settings, check_method, checked_url, curl_headers

_MAX_STARTS = 64
"""Requests started per event-loop iteration: opening a thousand connections at once would block the loop."""

_QUEUED = getattr(pycurl, "QUEUE_TIME_T", pycurl.PRETRANSFER_TIME_T)
_CONNECTED, _SECURED = pycurl.CONNECT_TIME_T, pycurl.APPCONNECT_TIME_T
_LAST_SENT = getattr(pycurl, "POSTTRANSFER_TIME_T", pycurl.PRETRANSFER_TIME_T)
"""When the request's last byte was handed to the socket; libcurl before 8.10 only reports the first."""
_SENT_AT_ONCE = 1 << 16
"""Bytes that a socket accepts at once."""


def new_transport(url: str, connections: int, *, signs: bool = False, **options: Any) -> CurlTransport | PlainTransport:
    """Return the transport for requests to URLs that begin like this one: plain where it can be, else libcurl's.

    Only libcurl's speaks TLS, uses a proxy and signs requests.
    """
    if not signs and is_plain(url, options.get("proxy")):
        return PlainTransport(connections, **options)
    return CurlTransport(connections, **options)


class _Call:
    """A request: waiting for a free connection while `transfer` is None."""

    __slots__ = ("called", "done", "headers", "receiver", "request", "resent", "transfer", "url")

    def __init__(
        self,
        request: HttpRequest,
        url: bytes,
        headers: list[bytes],
        done: asyncio.Future[HttpReply],
        receiver: ReplyReceiver | None,
    ) -> None:
        self.request = request
        self.receiver = receiver
        self.url = url
        self.headers = headers
        self.done = done
        self.transfer: Transfer | None = None
        self.resent = 0
        self.called = perf_counter()


class CurlTransport:
    """Sends requests through libcurl over a pool of at most `connections`; others wait, and that time is `queued`.

    A request that finds its kept-alive connection closed is sent again on a new one, once, if the server is known not
    to have read it (see `steelyard.transport.event_loop`); `resent` in the reply counts that. An endpoint that often
    closes kept-alive connections gets a new one for each request.

    Bound to the event loop it was created on. A cancelled `send` closes its connection at once. HTTP/1.1, no
    redirects, no compression. `proxy` is a URL, or empty for none; by default `http_proxy`, `https_proxy`, `all_proxy`
    and `no_proxy` of the environment apply. `ca_bundle` is a file or folder; by default what `SSL_CERT_FILE`,
    `CURL_CA_BUNDLE` or `REQUESTS_CA_BUNDLE` name, else the system's. The errors are in `steelyard.transport.errors`.
    """

    def __init__(
        self,
        connections: int,
        *,
        proxy: str | None = None,
        ca_bundle: str | None = None,
        verify: bool = True,
        connect_timeout: float = 30.0,
        max_response_bytes: int = 64 * 2**20,
    ) -> None:
        if connections < 1:
            raise ConfigurationError(f"connections must be >= 1, got {connections}")
        self._settings = Settings(
            proxy=proxy,
            ca_bundle=ca_bundle,
            verify=verify,
            connect_timeout=connect_timeout,
            max_response_bytes=max_response_bytes,
        )
        # Created now, so that settings which libcurl rejects fail here and not at the first call.
        self._free = [_first_transfer(self._settings)]
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._bridge = Bridge(connections, self._on_finished, self._on_broken)
        self._handover = Handover(self._loop)
        self._waiting: deque[_Call] = deque()
        self._running: dict[pycurl.Curl, tuple[_Call, Transfer]] = {}
        self._starting: asyncio.Handle | None = None
        self._kept = KeptConnections()
        self._watching: tuple[Endpoint, OpenedSocket] | None = None
        self._url: str | None = None
        self._headers: tuple[tuple[str, str], ...] = ()
        self._checked_url = b""
        self._checked_headers = curl_headers(())
        self._closed = False

    async def send(self, request: HttpRequest, receiver: ReplyReceiver | None = None) -> HttpReply:
        """Send a request and return the reply, whatever its status; without a whole reply raise a TransportError
        (retryable) or another TargetError (final). A `receiver` gets each part of the reply as it arrives, too. A
        CancelledError has as `reply` what had arrived, if anything."""
        if self._closed or asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the transport is closed" if self._closed else "the transport belongs to another loop")
        if request.url is not self._url or request.headers is not self._headers or request.method != "POST":
            self._check(request)
        call = _Call(request, self._checked_url, self._checked_headers, self._loop.create_future(), receiver)
        self._waiting.append(call)
        if self._starting is None:
            self._start_soon()
        try:
            return await call.done
        except asyncio.CancelledError as error:
            error.reply = self._withdraw(call)  # type: ignore[attr-defined]
            raise

    @property
    def in_use(self) -> int:
        """How many requests are on a connection."""
        return len(self._running)

    async def close(self) -> None:
        """Close every connection; requests in flight fail with a TransportError."""
        if self._closed:
            return
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        self._watching = None
        self._handover.close()
        self._fail_running("the transport was closed before an answer came")
        for call in self._waiting:
            if not call.done.done():
                call.done.set_exception(TransportError("the transport was closed before the request was sent"))
        self._waiting.clear()
        self._drop_bridge()

    def _check(self, request: HttpRequest) -> None:
        """Check the method, and the URL and headers where they differ from those of the last request."""
        check_method(request)
        if request.url is not self._url:
            self._checked_url, self._url = checked_url(request.url), request.url
        if request.headers is not self._headers:
            self._checked_headers, self._headers = curl_headers(request.headers), request.headers

    def _start_soon(self) -> None:
        if self._starting is None and not self._closed and len(self._running) < self._connections:
            if self._watching is None:
                self._starting = self._loop.call_soon(self._start)
            else:
                self._starting = self._loop.call_later(WATCH_SECONDS, self._end_watch)

    def _end_watch(self) -> None:
        """Decide whether the endpoint keeps its connections alive, and send what waits."""
        if self._watching is not None:
            endpoint, watched = self._watching
            endpoint.closes = endpoint.closes or watched.has_ended
            self._watching = None
        self._start()

    def _start(self) -> None:
        self._starting = None
        if self._watching is None:
            self._bridge.collect()  # a reply may be there that tells how this endpoint treats its connections
        if self._watching is not None:
            self._start_soon()
            return
        self._kept.sweep()
        waiting, running, free, kept = self._waiting, self._running, self._free, self._kept
        handles = []
        for _ in range(min(self._connections - len(running), _MAX_STARTS, len(waiting))):
            call = waiting.popleft()
            call.transfer = transfer = free.pop() if free else Transfer(self._settings)
            fresh = call.resent > 0 or kept.endpoint(call.url).closes
            transfer.prepare(call.request, call.url, call.headers, call.called, fresh=fresh)
            if call.receiver is not None:
                transfer.stream_to(call.receiver)
            running[transfer.handle] = (call, transfer)
            handles.append(transfer.handle)
        self._bridge.start(handles)
        if self._waiting:
            self._start_soon()

    def _withdraw(self, call: _Call) -> HttpReply | None:
        """Cancel a request whose caller no longer waits; returns what has arrived of its reply."""
        transfer = call.transfer
        if transfer is None:
            if call in self._waiting:
                self._waiting.remove(call)
            return self._handover.reply_to(call.done)
        if transfer.handle not in self._running:
            return None
        self._bridge.stop(transfer.handle)
        reply = transfer.reply()
        if reply is not None:
            reply.resent = call.resent
        self._kept.adopt(transfer.opened, 0)
        self._kept.forget(transfer.handle.getinfo(pycurl.LOCAL_PORT))
        self._release(call, transfer)
        return reply

    def _release(self, call: _Call, transfer: Transfer) -> None:
        del self._running[transfer.handle]
        call.transfer = None
        transfer.clear()
        self._free.append(transfer)
        if self._waiting and self._starting is None:
            self._start_soon()

    def _on_finished(self, handle: pycurl.Curl, code: int, words: str) -> None:
        call, transfer = self._running[handle]
        reply = transfer.reply(call.resent) if code == 0 else None
        if reply is not None:
            endpoint, headers = self._kept.endpoint(call.url), reply.headers
            endpoint.requests += 1
            if transfer.opened:
                self._after_connecting(transfer, endpoint, headers)
            elif "connection" in headers or not ("content-length" in headers or "transfer-encoding" in headers):
                self._after_unusual(transfer, headers)
            self._release(call, transfer)
            self._handover.give(call.done, reply)
            return
        failure = transfer.fail(code, words, call.request.url)
        resends = self._may_resend(call, transfer, code, words)
        self._release(call, transfer)
        if resends:
            call.resent += 1
            self._waiting.appendleft(call)
            self._start_soon()
        else:
            self._handover.give(call.done, failure)

    def _after_connecting(self, transfer: Transfer, endpoint: Endpoint, headers: dict[str, str]) -> None:
        """Note a new connection, and watch it if it is the endpoint's first stream."""
        if not endpoint.watched and headers.get("content-type", "").startswith("text/event-stream"):
            endpoint.watched = True
            if transfer.opened[-1].is_open and not endpoint.closes:
                self._watching = (endpoint, transfer.opened[-1])
        self._kept.adopt(transfer.opened, transfer.handle.getinfo(pycurl.LOCAL_PORT))

    def _after_unusual(self, transfer: Transfer, headers: dict[str, str]) -> None:
        """Let go of a reused connection whose reply says, or shows, that it is its last."""
        if headers.get("connection", "close").lower() != "keep-alive":
            self._kept.forget(transfer.handle.getinfo(pycurl.LOCAL_PORT))  # libcurl has closed it

    def _may_resend(self, call: _Call, transfer: Transfer, code: int, words: str) -> bool:
        """Whether a failed request was on a kept-alive connection, and is known not to have been acted on."""
        getinfo = transfer.handle.getinfo
        port = getinfo(pycurl.LOCAL_PORT)
        lost = code in LOST_CODES and not transfer.has_begun and not getinfo(pycurl.NUM_CONNECTS)
        not_read = lost and self._kept.was_not_read(call.url, port, words)
        self._kept.adopt(transfer.opened, 0)
        self._kept.forget(port)
        if lost:
            self._kept.endpoint(call.url).note_loss()
        return not_read and not call.resent and not call.done.done()

    def _on_broken(self, words: str) -> None:
        """Replace a broken bridge: requests in flight fail, waiting ones are sent on the new one."""
        if self._closed:
            return
        self._fail_running(f"libcurl failed for all requests in flight: {words}")
        self._drop_bridge()
        self._bridge = Bridge(self._connections, self._on_finished, self._on_broken)
        self._start_soon()

    def _fail_running(self, message: str) -> None:
        for call, transfer in self._running.values():
            self._kept.adopt(transfer.opened, 0)
            call.transfer = None
            self._free.append(transfer)
            if not call.done.done():
                call.done.set_exception(TransportError(message))
        self._running.clear()

    def _drop_bridge(self) -> None:
        """Close the bridge and its connections, then the handles: closing a connection calls into its handle."""
        self._bridge.close()
        self._kept.close()
        for transfer in self._free:
            transfer.handle.close()
        self._free.clear()


def _first_transfer(settings: Settings) -> Transfer:
    try:
        return Transfer(settings)
    except (pycurl.error, ValueError) as error:
        # libcurl's message is left out: a proxy URL may hold a password.
        raise ConfigurationError(f"libcurl rejects the proxy or the ca_bundle ({type(error).__name__})") from None


class Transfer:
    """One HTTP exchange on a reusable libcurl handle: records what arrives, and when.

    libcurl stamps the sending of a request, but on its own clock and from a start that only it knows. It also stamps
    the first byte of the answer, and delivers the first header line at the same moment: there this clock is read,
    and the difference of libcurl's two stamps leads back to the moment of sending.

    That moment is when the connection was ready, for most requests a few microseconds before their bytes are sent:
    libcurl's own stamps of sending are taken later. On a busy machine a local server may run and answer before such a
    stamp is taken, and the answer would look faster than it was. Only a long request, which takes time to send, is
    timed from the last of those stamps.
    """

    __slots__ = (
        "_arrivals",
        "_body",
        "_chunks",
        "_fresh",
        "_head",
        "_headed",
        "_headers",
        "_long",
        "_method",
        "_read",
        "_receiver",
        "_signing",
        "_url",
        "called",
        "handle",
        "opened",
    )

    def __init__(self, settings: Settings) -> None:
        self.handle = pycurl.Curl()
        self.called = 0.0
        self._long = False
        self._body = b""
        self._read = 0
        self._url = b""
        self._headers: list[bytes] = []
        self._method = ""
        self._fresh = False
        self.opened: list[OpenedSocket] = []
        """Sockets that this transfer opened: none where it reused a connection."""
        self._signing: RequestSigning | None = None
        self._receiver: ReplyReceiver | None = None
        self.clear()
        for option, value in settings.options():
            self.handle.setopt(option, value)
        self.handle.setopt(pycurl.HEADERFUNCTION, self._on_header)
        self.handle.setopt(pycurl.WRITEFUNCTION, self._on_body)
        self.handle.setopt(pycurl.READFUNCTION, self._next_of_body)
        self.handle.setopt(pycurl.SOCKOPTFUNCTION, self._on_opened)

    def prepare(
        self, request: HttpRequest, url: bytes, headers: list[bytes], called: float, *, fresh: bool = False
    ) -> None:
        """Set the handle up for a request; options that did not change are not set again."""
        setopt = self.handle.setopt
        if request.method != self._method:
            self._set_method(request.method)
        if url != self._url:
            setopt(pycurl.URL, url)
            self._url = url
        if headers is not self._headers:
            setopt(pycurl.HTTPHEADER, headers)
            self._headers = headers
        if request.signing is not self._signing:
            self._set_signing(request.signing)
        if request.method != "GET":
            setopt(pycurl.POSTFIELDSIZE_LARGE, len(request.body))
            self._body, self._read = request.body, 0
        if fresh != self._fresh:
            setopt(pycurl.FRESH_CONNECT, int(fresh))
            setopt(pycurl.FORBID_REUSE, int(fresh))
            self._fresh = fresh
        self._long = len(request.body) > _SENT_AT_ONCE
        self.called = called

    def _set_method(self, method: str) -> None:
        self.handle.setopt(pycurl.HTTPGET if method == "GET" else pycurl.POST, 1)
        if method in ("GET", "POST"):
            self.handle.unsetopt(pycurl.CUSTOMREQUEST)
        else:
            self.handle.setopt(pycurl.CUSTOMREQUEST, method)
        self._method = method

    @property
    def has_begun(self) -> bool:
        """Whether any byte of a reply has arrived."""
        return bool(self._head or self._chunks)

    def _on_opened(self, descriptor: int, _purpose: int) -> int:
        with contextlib.suppress(OSError):  # no file left: then a lost connection cannot be examined
            self.opened.append(opened_socket(descriptor, copied=not self._fresh))
        return pycurl.SOCKOPT_OK

    def _set_signing(self, signing: RequestSigning | None) -> None:
        """Have libcurl sign the request, or no longer. The body's hash must be among the headers: it is read once."""
        if signing is None:
            self.handle.setopt(pycurl.HTTPAUTH, pycurl.HTTPAUTH_BASIC)  # the default, which needs a name and a password
            self.handle.unsetopt(pycurl.USERPWD)
        else:
            self.handle.setopt(pycurl.AWS_SIGV4, signing.scope)
            self.handle.setopt(pycurl.USERNAME, signing.key_id)
            self.handle.setopt(pycurl.PASSWORD, signing.secret)
        self._signing = signing

    def _next_of_body(self, size: int) -> bytes:
        """Return the next bytes to send, each only once.

        libcurl silently resends a body that it holds when a kept-alive connection closes before any reply. But the
        server may have read the first copy: that would be two calls counted as one. The transport resends, where it
        is known that the server has not.
        """
        start = self._read
        self._read = start + size
        return self._body[start : self._read]

    def _on_header(self, line: bytes) -> None:
        if not self._head:
            self._headed = perf_counter()
        self._head.append(line)

    def _on_body(self, data: bytes) -> None:
        self._arrivals.append(perf_counter())
        self._chunks.append(data)

    def stream_to(self, receiver: ReplyReceiver | None) -> None:
        """Have the next reply passed on as it arrives, or no longer."""
        self._receiver = receiver
        self.handle.setopt(pycurl.HEADERFUNCTION, self._on_header if receiver is None else self._pass_header)
        self.handle.setopt(pycurl.WRITEFUNCTION, self._on_body if receiver is None else self._pass_body)

    def _pass_header(self, line: bytes) -> None:
        self._on_header(line)
        if line in (b"\r\n", b"\n") and not self._chunks and self._receiver is not None:
            status, headers = read_head(self._head)
            if status >= 200:  # not an interim one
                self._receiver.on_head(status, headers)

    def _pass_body(self, data: bytes) -> None:
        self._on_body(data)
        if self._receiver is not None:
            self._receiver.on_chunk(data)

    def clear(self) -> None:
        """Forget what was received, so that the handle can be reused."""
        if self._receiver is not None:
            self.stream_to(None)
        self._head: list[bytes] = []
        self._headed = 0.0
        self._chunks: list[bytes] = []
        self._arrivals: list[float] = []

    def fail(self, code: int, words: str, url: str) -> TargetError:
        """Return the error that ended the transfer."""
        return curl_error(code, words, url, self.reply(), proxy_status=self.handle.getinfo(pycurl.HTTP_CONNECTCODE))

    def reply(self, resent: int = 0) -> HttpReply | None:
        """Return the reply, whole or partial; None when not even a status arrived."""
        if not self._head:
            return None
        status, headers = read_head(self._head)
        getinfo = self.handle.getinfo
        first_byte = getinfo(pycurl.STARTTRANSFER_TIME_T)
        last_sent = getinfo(_LAST_SENT) if self._long else 0
        if not 0 < last_sent <= first_byte:  # all was sent at once, or the answer came before all was sent
            last_sent = max(getinfo(_QUEUED), getinfo(_CONNECTED), getinfo(_SECURED))
        sent = self._headed - max(0, first_byte - last_sent) / 1e6
        arrivals = [at - sent for at in self._arrivals]
        # libcurl's total includes a GET's attempt on a dead connection: then this clock is used.
        ended = min((getinfo(pycurl.TOTAL_TIME_T) - last_sent) / 1e6, perf_counter() - sent)
        if arrivals and arrivals[-1] > ended:
            ended = arrivals[-1]
        return HttpReply(status, headers, self._chunks, arrivals, ended, max(0.0, sent - self.called), resent)
