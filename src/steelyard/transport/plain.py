"""HTTP/1.1 over plain TCP, without TLS or a proxy: for servers on this machine or in its network.

libcurl opens the connections (`steelyard.transport.opener`). Requests and replies then go over the sockets themselves:
libcurl calls Python for each header and part of a reply, and prepares a transfer for each request, which takes twice
as much CPU.

What is known of an endpoint's connections, and when a request may be sent again, is as in
`steelyard.transport.event_loop`.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
from collections import deque
from time import perf_counter
from urllib.parse import unquote_to_bytes, urlsplit

from steelyard.errors import ConfigurationError, TargetError, TransportError
from steelyard.protocols import HttpReply, HttpRequest, ReplyReceiver
from steelyard.transport.errors import RequestRefused, curl_error, origin
from steelyard.transport.event_loop import (
    READ,
    WATCH_SECONDS,
    WRITE,
    Endpoint,
    new_poller,
    request_was_not_read,
    unacknowledged,
)
from steelyard.transport.opener import Opener
from steelyard.transport.replies import BadReply, Handover, ReplyReader
from steelyard.transport.settings import MAX_IDLE_SECONDS, Settings, check_method, checked_url, plain_headers

_PROXY_VARIABLES = ("http_proxy", "all_proxy", "ALL_PROXY")
_READ_BYTES = 1 << 16

_RECV_ERROR, _KEPT_CONNECTION_DIED = 56, 65
"""Codes of libcurl: see `steelyard.transport.errors`."""


def is_plain(url: str, proxy: str | None) -> bool:
    """Whether requests to a URL go over plain TCP, without TLS or a proxy. An empty proxy is none."""
    by_proxy = any(map(os.environ.get, _PROXY_VARIABLES)) if proxy is None else bool(proxy)
    try:
        host = urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:  # libcurl says what is wrong with it
        return False
    # Names in other scripts, and addresses that name an interface, are for libcurl.
    return url[:7].lower() == "http://" and url.isascii() and "%" not in host and not by_proxy


class _Call:
    """A request: waiting for a connection while `connection` is None."""

    __slots__ = ("called", "connection", "done", "payload", "place", "receiver", "resent")

    def __init__(
        self, place: Place, payload: bytes, done: asyncio.Future[HttpReply], receiver: ReplyReceiver | None
    ) -> None:
        self.place = place
        self.payload = payload
        self.done = done
        self.receiver = receiver
        self.connection: Connection | None = None
        self.resent = 0
        self.called = perf_counter()


class Place:
    """One host and port: its connections that are idle, and the calls that wait for one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.endpoint = Endpoint()
        self.idle: list[Connection] = []
        self.waiting: deque[_Call] = deque()
        self.fresh: deque[_Call] = deque()
        """Calls that need a new connection."""
        self.opening = 0


class Connection:
    """An open connection: idle while `call` is None."""

    __slots__ = (
        "call",
        "descriptor",
        "idle_since",
        "is_closed",
        "place",
        "reader",
        "replies",
        "sent",
        "socket",
        "unsent",
        "waits",
    )

    def __init__(self, place: Place, opened: socket.socket) -> None:
        self.place = place
        self.socket = opened
        self.descriptor = opened.fileno()
        self.call: _Call | None = None
        self.reader = ReplyReader(0)
        self.unsent: bytes | memoryview | None = None
        """What is left to be sent of the request."""
        self.sent = 0.0
        """When the last byte of the request was handed to the socket; 0 before the first."""
        self.waits = False
        """Whether it is polled for room to send more."""
        self.replies = 0
        self.idle_since = 0.0
        self.is_closed = False


class PlainTransport:
    """Sends requests over a pool of at most `connections` plain connections; others wait, and that time is `queued`.

    It takes the options of `CurlTransport` and makes the same promises: a request that finds its kept-alive connection
    closed is sent again on a new one, once, if the server is known not to have read it; a cancelled `send` closes its
    connection at once; no redirects, no compression.
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
        if proxy:
            raise ConfigurationError("plain connections do not use a proxy")
        settings = Settings(
            proxy="",
            ca_bundle=ca_bundle,
            verify=verify,
            connect_timeout=connect_timeout,
            max_response_bytes=max_response_bytes,
        )
        self._max_bytes = max_response_bytes
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._handover = Handover(self._loop)
        self._opener: Opener[Place] = Opener(connections, settings, self._on_opened)
        self._poller = new_poller(_raise)
        self._loop.add_reader(self._poller.fileno(), self._on_ready)
        self._open: dict[int, Connection] = {}
        """By descriptor."""
        self._opening = 0
        self._places: dict[str, Place] = {}
        self._assigned: list[Connection] = []
        """Those with a call that is sent at the end of this turn of the event loop."""
        self._watching: tuple[Endpoint, Connection] | None = None
        self._url = ""
        self._headers: tuple[tuple[str, str], ...] | None = None
        self._method = ""
        self._place = Place("")
        self._head = b""
        self._closed = False

    async def send(self, request: HttpRequest, receiver: ReplyReceiver | None = None) -> HttpReply:
        """Send a request and return the reply, whatever its status; without a whole reply raise a TransportError
        (retryable) or another TargetError (final). A `receiver` gets each part of the reply as it arrives, too. A
        CancelledError has as `reply` what had arrived, if anything."""
        if self._closed or asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the transport is closed" if self._closed else "the transport belongs to another loop")
        if (
            request.headers is not self._headers
            or request.url is not self._url
            or request.method != self._method
            or request.signing is not None
        ):
            self._prepare(request)
        body = request.body
        payload = b"%b%d\r\n\r\n%b" % (self._head, len(body), body) if self._method != "GET" else self._head
        place = self._place
        call = _Call(place, payload, self._loop.create_future(), receiver)
        if self._watching is None and not place.waiting and not place.endpoint.closes and (kept := self._kept(place)):
            self._assign(kept, call)
        else:
            (place.fresh if place.endpoint.closes else place.waiting).append(call)
            self._serve(place)
        try:
            return await call.done
        except asyncio.CancelledError as error:
            error.reply = self._withdraw(call)  # type: ignore[attr-defined]
            raise

    @property
    def in_use(self) -> int:
        """How many requests are on a connection."""
        return sum(connection.call is not None for connection in self._open.values())

    async def close(self) -> None:
        """Close every connection; requests in flight fail with a TransportError."""
        if self._closed:
            return
        self._closed = True
        self._watching = None
        self._handover.close()
        self._opener.close()
        for connection in list(self._open.values()):
            call = connection.call
            self._drop(connection)
            if call is not None and not call.done.done():
                call.done.set_exception(TransportError("the transport was closed before an answer came"))
        for place in self._places.values():
            for call in (*place.fresh, *place.waiting):
                if not call.done.done():
                    call.done.set_exception(TransportError("the transport was closed before the request was sent"))
            place.fresh.clear()
            place.waiting.clear()
        self._loop.remove_reader(self._poller.fileno())
        self._poller.close()

    def _prepare(self, request: HttpRequest) -> None:
        """Check a request that differs from the last one in more than its body, and encode what they will share."""
        check_method(request)
        checked_url(request.url)
        if request.signing is not None or not is_plain(request.url, ""):
            raise RequestRefused(f"not a request over a plain connection: {origin(request.url)}")
        parts = urlsplit(request.url)
        host = parts.netloc.rpartition("@")[2]
        lines = [f"{request.method} {parts.path or '/'}{'?' if parts.query else ''}{parts.query} HTTP/1.1"]
        own = [("Host", host.removesuffix(":80"))]
        if parts.username is not None:
            user, password = (unquote_to_bytes(part or "") for part in (parts.username, parts.password))
            own.append(("Authorization", f"Basic {base64.b64encode(user + b':' + password).decode()}"))
        lines += [f"{name}: {value}" for name, value in plain_headers(request.headers, own)]
        head = "\r\n".join(lines).encode()
        self._head = head + (b"\r\n\r\n" if request.method == "GET" else b"\r\nContent-Length: ")
        self._place = self._places.setdefault(host.lower(), Place(f"http://{host}/"))
        self._url, self._headers, self._method = request.url, request.headers, request.method

    # Connections for calls

    def _kept(self, place: Place) -> Connection | None:
        """Return an idle connection; those that were idle for long are closed."""
        while place.idle:
            connection = place.idle.pop()
            if perf_counter() - connection.idle_since <= MAX_IDLE_SECONDS:
                return connection
            self._drop(connection)
        return None

    def _serve(self, place: Place) -> None:
        """Start calls that wait on idle connections, and open as many as the others need."""
        if self._watching is not None or self._closed:
            return
        if place.endpoint.closes:
            place.fresh.extend(place.waiting)
            place.waiting.clear()
        while place.waiting and (connection := self._kept(place)) is not None:
            self._assign(connection, place.waiting.popleft())
        while place.opening < len(place.fresh) + len(place.waiting) and self._has_room():
            place.opening += 1
            self._opening += 1
            self._opener.open(place.url, place)

    def _has_room(self) -> bool:
        """Whether one more connection may be opened; an idle one is closed for it."""
        if len(self._open) + self._opening < self._connections:
            return True
        for place in self._places.values():
            if place.idle:
                self._drop(place.idle.pop(0))
                return True
        return False

    def _on_opened(self, place: Place, opened: socket.socket | TargetError) -> None:
        """Use a new connection for a call that needs one; a failure is that of the call that waits longest."""
        place.opening -= 1
        self._opening -= 1
        waiting = place.fresh or place.waiting
        if isinstance(opened, TargetError):
            if waiting:
                self._handover.give(waiting.popleft().done, opened)
        else:
            connection = Connection(place, opened)
            try:
                self._poller.on_socket(READ, connection.descriptor, None, None)
            except OSError as error:
                opened.close()
                if waiting:
                    failure = TransportError(f"the connection to {origin(place.url)} cannot be polled: {error}")
                    self._handover.give(waiting.popleft().done, failure)
            else:
                self._open[connection.descriptor] = connection
                if waiting and self._watching is None:
                    self._assign(connection, waiting.popleft())
                else:
                    self._rest(connection)
        self._serve_all()

    def _serve_all(self) -> None:
        for place in self._places.values():
            if place.waiting or place.fresh:
                self._serve(place)

    def _rest(self, connection: Connection) -> None:
        connection.idle_since = perf_counter()
        connection.place.idle.append(connection)

    def _drop(self, connection: Connection) -> None:
        """Close a connection."""
        if connection.is_closed:
            return
        connection.is_closed = True
        connection.call = None
        del self._open[connection.descriptor]
        self._poller.on_socket(0, connection.descriptor, None, None)
        connection.socket.close()

    # A call on its connection

    def _assign(self, connection: Connection, call: _Call) -> None:
        """Have a call sent on this connection, together with the others of this turn of the event loop.

        A local server wakes up once for all of them then, which takes less CPU than once for each.
        """
        connection.call, call.connection = call, connection
        connection.reader = ReplyReader(self._max_bytes, call.receiver)
        payload = call.payload
        connection.unsent = payload if len(payload) <= _READ_BYTES else memoryview(payload)
        connection.sent = 0.0
        if not self._assigned:
            self._loop.call_soon(self._send_assigned)
        self._assigned.append(connection)

    def _send_assigned(self) -> None:
        connections, self._assigned = self._assigned, []
        for connection in connections:
            if connection.unsent is not None and not connection.is_closed:
                self._send(connection, connection.unsent)

    def _send(self, connection: Connection, data: bytes | memoryview) -> None:
        """Hand over as much of a request as the socket takes; the rest follows when it takes more."""
        connection.sent = perf_counter()  # before the call: a local server may answer before it returns
        try:
            count = connection.socket.send(data)
            waits = count < len(data)
        except (BlockingIOError, InterruptedError):
            count, waits = 0, True
        except OSError:  # what the server answers, or how it ended, is there to be read
            count, waits = 0, False
        connection.unsent = data[count:] if count < len(data) else None
        if waits != connection.waits:
            connection.waits = waits
            self._poller.on_socket(READ | WRITE if waits else READ, connection.descriptor, None, None)

    def _on_ready(self) -> None:
        """Read the sockets that are ready, and then what came: the last one's data is not timed after all the others'
        was looked at."""
        arrived = []
        for descriptor, events in self._poller.ready():
            connection = self._open[descriptor]
            if events & WRITE and connection.unsent is not None:
                self._send(connection, connection.unsent)
            if events & READ:
                try:
                    data: bytes | OSError = connection.socket.recv(_READ_BYTES)
                except (BlockingIOError, InterruptedError):
                    continue
                except OSError as error:
                    data = error
                arrived.append((connection, data, perf_counter()))
        for connection, data, at in arrived:
            if not connection.is_closed:
                self._take(connection, data, at)

    def _take(self, connection: Connection, data: bytes | OSError, at: float) -> None:
        """Take in what came on a connection: bytes, its end (no bytes), or how it broke."""
        call = connection.call
        if call is None or not connection.sent:  # closed by the server, or something that nobody asked for
            self._drop_unused(connection, call)
            return
        was_reset = isinstance(data, OSError)
        try:
            if isinstance(data, OSError):
                raise BadReply(_RECV_ERROR, f"Recv failure: {os.strerror(data.errno or 0)}")
            if data:
                if not connection.reader.feed(data, at):
                    return
            else:
                connection.reader.end()
                connection.reader.keeps_connection = False
        except BadReply as bad:
            self._fail(connection, call, bad, was_reset=was_reset)
            return
        self._finish(connection, call)

    def _drop_unused(self, connection: Connection, call: _Call | None) -> None:
        """Close a connection that has no call, or one that was not sent yet: that gets another."""
        self._drop(connection)
        if call is None:
            connection.place.idle.remove(connection)
        else:
            call.connection = None
            connection.place.waiting.appendleft(call)
            self._serve(connection.place)

    def _finish(self, connection: Connection, call: _Call) -> None:
        """Hand over a whole reply, and use the connection for the next call."""
        reader, place = connection.reader, connection.place
        reply = reader.reply(connection.sent, call.called, call.resent)
        assert reply is not None
        connection.replies += 1
        connection.call = call.connection = None
        endpoint = place.endpoint
        endpoint.requests += 1
        if not reader.keeps_connection or connection.unsent is not None or endpoint.closes:
            self._drop(connection)
            self._serve_all()
        elif not endpoint.watched and reply.headers.get("content-type", "").startswith("text/event-stream"):
            endpoint.watched = True
            self._watching = (endpoint, connection)
            self._rest(connection)
            self._loop.call_later(WATCH_SECONDS, self._end_watch)
        elif place.waiting and self._watching is None:
            self._assign(connection, place.waiting.popleft())
        else:
            self._rest(connection)
        self._handover.give(call.done, reply)

    def _end_watch(self) -> None:
        """Decide whether the endpoint keeps its connections alive, and send what waits."""
        if self._watching is None:
            return
        endpoint, watched = self._watching
        endpoint.closes = endpoint.closes or watched.is_closed
        self._watching = None
        self._serve_all()

    def _fail(self, connection: Connection, call: _Call, bad: BadReply, *, was_reset: bool) -> None:
        """End a call whose connection broke, or whose reply cannot be read; it may be sent again on another one."""
        place, was_kept = connection.place, connection.replies > 0
        lost = was_kept and not connection.reader.has_begun
        not_read = lost and (
            connection.unsent is not None
            or request_was_not_read(unacknowledged(connection.descriptor), was_reset=was_reset, is_plain=True)
        )
        reply = connection.reader.reply(connection.sent, call.called, call.resent)
        call.connection = None
        self._drop(connection)
        if lost:
            place.endpoint.note_loss()
        if not_read and not call.resent and not call.done.done():
            call.resent = 1
            place.fresh.append(call)
        else:
            code = _KEPT_CONNECTION_DIED if lost else bad.code
            self._handover.give(call.done, curl_error(code, bad.words, place.url, reply))
        self._serve_all()

    def _withdraw(self, call: _Call) -> HttpReply | None:
        """Cancel a request whose caller no longer waits; returns what has arrived of its reply."""
        connection = call.connection
        if connection is None:
            for queue in (call.place.fresh, call.place.waiting):
                if call in queue:
                    queue.remove(call)
            return self._handover.reply_to(call.done)
        call.connection = None
        if connection.sent or connection.is_closed:
            self._drop(connection)
        else:
            connection.call = connection.unsent = None
            self._rest(connection)
        self._serve_all()
        return connection.reader.reply(connection.sent, call.called, call.resent)


def _raise(error: Exception) -> None:
    raise error
