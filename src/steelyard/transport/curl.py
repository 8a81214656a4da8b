"""The transport: requests over a pool of kept-alive connections, timed as they leave and as answers arrive."""

from __future__ import annotations

import asyncio
from collections import deque
from time import perf_counter

import pycurl

from steelyard.contracts import HttpReply, HttpRequest
from steelyard.errors import ConfigurationError, TransportError
from steelyard.transport.bridge import Bridge
from steelyard.transport.exchange import Exchange
from steelyard.transport.handover import Handover
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
    `CURL_CA_BUNDLE` or `REQUESTS_CA_BUNDLE` name; else the system's. The errors are in `steelyard.transport.faults`.
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
