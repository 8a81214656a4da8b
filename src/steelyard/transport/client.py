"""The transport: requests over a pool of kept-alive connections, timed as they leave and as answers arrive."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from functools import lru_cache
from time import perf_counter
from typing import TypeAlias

import pycurl

from steelyard.errors import ConfigurationError, TargetError, TransportError
from steelyard.protocols import HttpReply, HttpRequest
from steelyard.transport.errors import fault
from steelyard.transport.event_loop import Bridge
from steelyard.transport.settings import Settings, check_method, checked_headers, checked_url

_MOST_STARTS = 64
"""Requests begun before everything else on the loop gets its turn: a thousand connections take a while to open."""


class _Call:
    """A request on its way: waiting for a free connection while `exchange` is None."""

    __slots__ = ("called", "done", "exchange", "headers", "request", "url")

    def __init__(self, request: HttpRequest, url: bytes, headers: list[bytes], done: asyncio.Future[HttpReply]) -> None:
        self.request = request
        self.url = url
        self.headers = headers
        self.done = done
        self.exchange: Exchange | None = None
        self.called = perf_counter()


class CurlTransport:
    """Sends requests through libcurl, at most `connections` at once; the rest wait, and that wait counts as queued.

    Bound to the event loop it was made on. A cancelled `send` closes its connection at once. HTTP/1.1, no redirects,
    no compression asked for. `proxy` is a URL, empty for none; else `http_proxy`, `https_proxy`, `all_proxy` and
    `no_proxy` of the environment are honoured. `ca_bundle` is a file or folder; else what `SSL_CERT_FILE`,
    `CURL_CA_BUNDLE` or `REQUESTS_CA_BUNDLE` name; else the system's. The errors are in `steelyard.transport.errors`.
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
        # Made at once: settings that libcurl will not take are refused here, and not when the first call waits.
        self._free = [_first_exchange(self._settings)]
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._bridge = Bridge(connections, self._on_finished, self._on_broken)
        self._handover = Handover(self._loop)
        self._waiting: deque[_Call] = deque()
        self._running: dict[pycurl.Curl, tuple[_Call, Exchange]] = {}
        self._starting: asyncio.Handle | None = None
        self._headers: tuple[tuple[tuple[str, str], ...], list[bytes]] = ((), checked_headers(()))
        self._url: tuple[str | None, bytes] = (None, b"")
        self._closed = False

    async def send(self, request: HttpRequest) -> HttpReply:
        """The answer, whatever its status; raises TransportError or a final TargetError when none comes whole."""
        if self._closed or asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the transport is closed" if self._closed else "the transport belongs to another loop")
        call = _Call(request, *self._checked(request), self._loop.create_future())
        self._waiting.append(call)
        self._start_soon()
        try:
            return await call.done
        except asyncio.CancelledError:
            self._withdraw(call)
            raise

    async def close(self) -> None:
        """Close every connection; what is in flight fails with a TransportError."""
        if self._closed:
            return
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        self._handover.close()
        self._fail_running("the transport was closed before an answer came")
        for call in self._waiting:
            if not call.done.done():
                call.done.set_exception(TransportError("the transport was closed before the request was sent"))
        self._waiting.clear()
        self._drop_bridge()

    def _checked(self, request: HttpRequest) -> tuple[bytes, list[bytes]]:
        """The request's URL and headers for libcurl; checked once for as long as the same ones are sent."""
        if request.url is not self._url[0]:
            self._url = (request.url, checked_url(request.url))
        if request.headers is not self._headers[0]:
            self._headers = (request.headers, checked_headers(request.headers))
        check_method(request)
        return self._url[1], self._headers[1]

    def _start_soon(self) -> None:
        if self._starting is None and not self._closed and len(self._running) < self._connections:
            self._starting = self._loop.call_soon(self._start)

    def _start(self) -> None:
        self._starting = None
        room = min(self._connections - len(self._running), _MOST_STARTS, len(self._waiting))
        handles = []
        for _ in range(room):
            call = self._waiting.popleft()
            exchange = self._free.pop() if self._free else Exchange(self._settings)
            exchange.prepare(call.request, call.url, call.headers, call.called)
            call.exchange = exchange
            self._running[exchange.handle] = (call, exchange)
            handles.append(exchange.handle)
        self._bridge.start(handles)
        if self._waiting:
            self._start_soon()

    def _withdraw(self, call: _Call) -> None:
        """Undo a send that nobody waits for any more."""
        exchange = call.exchange
        if exchange is None:
            if call in self._waiting:
                self._waiting.remove(call)
            return
        if exchange.handle in self._running:
            self._bridge.stop(exchange.handle)
            self._release(call, exchange)

    def _release(self, call: _Call, exchange: Exchange) -> None:
        del self._running[exchange.handle]
        call.exchange = None
        exchange.clear()
        self._free.append(exchange)
        if self._waiting:
            self._start_soon()

    def _on_finished(self, handle: pycurl.Curl, code: int, words: str) -> None:
        call, exchange = self._running[handle]
        outcome = (exchange.reply() if code == 0 else None) or exchange.fail(code, words, call.request.url)
        self._release(call, exchange)
        self._handover.give(call.done, outcome)

    def _on_broken(self, words: str) -> None:
        """Start over with a new bridge; what was on the old one fails, what waits is sent on the new one."""
        if self._closed:
            return
        self._fail_running(f"libcurl gave up on all that was in flight: {words}")
        self._drop_bridge()
        self._bridge = Bridge(self._connections, self._on_finished, self._on_broken)
        self._start_soon()

    def _fail_running(self, message: str) -> None:
        for call, exchange in self._running.values():
            call.exchange = None
            self._free.append(exchange)
            if not call.done.done():
                call.done.set_exception(TransportError(message))
        self._running.clear()

    def _drop_bridge(self) -> None:
        """Close the bridge with all its connections, and then the handles: libcurl calls these as it closes those."""
        self._bridge.close()
        for exchange in self._free:
            exchange.handle.close()
        self._free.clear()


def _first_exchange(settings: Settings) -> Exchange:
    try:
        return Exchange(settings)
    except (pycurl.error, ValueError) as error:
        # In other words than its own: a proxy may have a password in it.
        raise ConfigurationError(f"libcurl refuses the proxy or the ca_bundle ({type(error).__name__})") from None


_QUEUED = getattr(pycurl, "QUEUE_TIME_T", pycurl.PRETRANSFER_TIME_T)
_CONNECTED, _SECURED = pycurl.CONNECT_TIME_T, pycurl.APPCONNECT_TIME_T
_LAST_SENT = getattr(pycurl, "POSTTRANSFER_TIME_T", pycurl.PRETRANSFER_TIME_T)
"""When the request's last byte had been handed to the socket; libcurl before 8.10 only tells of the first."""
_SENT_AT_ONCE = 1 << 16
"""Bytes that a socket takes at once."""
_STATUS_LINE = re.compile(rb"HTTP/[0-9.]+ +([0-9]{3})")


class Exchange:
    """A libcurl handle that takes down what arrives, and when.

    libcurl stamps the sending of a request, but on its own clock and from a start that only it knows. It also stamps
    the first byte of the answer, and hands over the first header line in the same breath: there this clock is read,
    and the difference of libcurl's two stamps leads back to the moment of sending.

    That moment is when the connection was there, which for most requests is a few microseconds before their bytes go:
    libcurl's own stamps of sending are taken after it. Sending may wake up the server, and on a busy machine the
    server then runs, and answers, before the stamp is taken; the answer would look faster than it was. Only a long
    request, which takes its time to be sent, is timed from the last of those stamps.
    """

    __slots__ = (
        "_arrivals",
        "_body",
        "_chunks",
        "_head",
        "_headed",
        "_headers",
        "_long",
        "_method",
        "_read",
        "_url",
        "called",
        "handle",
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
        self.clear()
        for option, value in settings.options():
            self.handle.setopt(option, value)
        self.handle.setopt(pycurl.HEADERFUNCTION, self._on_header)
        self.handle.setopt(pycurl.WRITEFUNCTION, self._on_body)
        self.handle.setopt(pycurl.READFUNCTION, self._next_of_body)

    def prepare(self, request: HttpRequest, url: bytes, headers: list[bytes], called: float) -> None:
        """Make the handle ready for a request; what is as it was for the last one is not set again."""
        setopt = self.handle.setopt
        if request.method != self._method:
            self._set_method(request.method)
        if url != self._url:
            setopt(pycurl.URL, url)
            self._url = url
        if headers is not self._headers:
            setopt(pycurl.HTTPHEADER, headers)
            self._headers = headers
        if request.method != "GET":
            setopt(pycurl.POSTFIELDSIZE_LARGE, len(request.body))
            self._body, self._read = request.body, 0
        self._long = len(request.body) > _SENT_AT_ONCE
        self.called = called

    def _set_method(self, method: str) -> None:
        self.handle.setopt(pycurl.HTTPGET if method == "GET" else pycurl.POST, 1)
        if method in ("GET", "POST"):
            self.handle.unsetopt(pycurl.CUSTOMREQUEST)
        else:
            self.handle.setopt(pycurl.CUSTOMREQUEST, method)
        self._method = method

    def _next_of_body(self, size: int) -> bytes:
        """The next bytes to be sent, each of them only once.

        libcurl would send a body that it holds a second time, and say nothing of it, when a kept connection closes
        without a byte of an answer. Yet the server may have read the first: that would be two calls counted as one.
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

    def clear(self) -> None:
        """Forget what came, so that the handle can be used again."""
        self._head: list[bytes] = []
        self._headed = 0.0
        self._chunks: list[bytes] = []
        self._arrivals: list[float] = []

    def fail(self, code: int, words: str, url: str) -> TargetError:
        """The error that ended the exchange."""
        return fault(code, words, url, self.reply(), proxy_status=self.handle.getinfo(pycurl.HTTP_CONNECTCODE))

    def reply(self) -> HttpReply | None:
        """What came, in full or as far as it got; None when not even a status did."""
        if not self._head:
            return None
        status, headers = read_head(self._head)
        getinfo = self.handle.getinfo
        first_byte = getinfo(pycurl.STARTTRANSFER_TIME_T)
        last_sent = getinfo(_LAST_SENT) if self._long else 0
        if not 0 < last_sent <= first_byte:  # all went at once, or it was answered before all was sent
            last_sent = max(getinfo(_QUEUED), getinfo(_CONNECTED), getinfo(_SECURED))
        sent = self._headed - max(0, first_byte - last_sent) / 1e6
        arrivals = [at - sent for at in self._arrivals]
        # libcurl's total also counts a GET's try on a connection that turned out to be dead: then this clock says it.
        ended = min((getinfo(pycurl.TOTAL_TIME_T) - last_sent) / 1e6, perf_counter() - sent)
        if arrivals and arrivals[-1] > ended:
            ended = arrivals[-1]
        return HttpReply(status, headers, self._chunks, arrivals, ended, max(0.0, sent - self.called))


def read_head(lines: list[bytes]) -> tuple[int, dict[str, str]]:
    """The last status in these lines (interim ones may come before it) and its headers, names in lower case."""
    status, within = 0, False
    headers: dict[str, str] = {}
    for line in lines:
        if not within and (found := _STATUS_LINE.match(line)):
            status, within, headers = int(found[1]), True, {}
        elif line in (b"\r\n", b"\n"):
            within = False  # what comes after the blank line are trailers
        elif within:
            name, value = _field(line)
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return status, headers


@lru_cache(maxsize=512)
def _field(line: bytes) -> tuple[str, str]:
    """A header line's name and value; remembered, since most lines of an endpoint's answers are always the same."""
    name, _, value = line.decode("latin-1").partition(":")
    return name.lower(), value.strip()


_CHUNKS_A_TURN = 256
"""How much is handed over before the sockets are looked at again: dozens of whole answers, or a few streams. To decode
so much takes about as long as to read the sockets that are served in a turn, so that neither waits for the other."""

Outcome: TypeAlias = HttpReply | TargetError
Waiting: TypeAlias = asyncio.Future[HttpReply]


class Handover:
    """Settles futures in order. Whoever waits for one decodes the answer, scores it and writes it down: with hundreds
    of streams that end at once that takes longer than a chunk on another stream may wait to be timed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[Waiting, Outcome]] = deque()
        self._left = _CHUNKS_A_TURN
        self._turn: asyncio.Handle | None = None

    def give(self, done: Waiting, outcome: Outcome) -> None:
        """Hand this over: now, if the turn has room for it."""
        if self._left <= 0:
            self._queue.append((done, outcome))
            return
        self._left -= _settle(done, outcome)
        if self._turn is None:
            self._turn = self._loop.call_soon(self._next_turn)

    def close(self) -> None:
        """Hand over all that is left."""
        if self._turn is not None:
            self._turn.cancel()
        while self._queue:
            _settle(*self._queue.popleft())

    def _next_turn(self) -> None:
        self._turn = None
        self._left = _CHUNKS_A_TURN
        while self._queue and self._left > 0:
            self.give(*self._queue.popleft())


def _settle(done: Waiting, outcome: Outcome) -> int:
    """How many chunks it came to; none for one that nobody waits for any more."""
    if done.done():
        return 0
    if isinstance(outcome, HttpReply):
        done.set_result(outcome)
        return 1 + len(outcome.chunks)
    done.set_exception(outcome)
    return 1
