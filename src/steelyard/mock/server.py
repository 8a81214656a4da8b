"""The mock server: its public class, its connections, and the scheduler that sends replies piece by piece."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import islice
from time import monotonic, monotonic_ns
from types import TracebackType
from typing import Any, TypeAlias

from steelyard.errors import ConfigurationError
from steelyard.mock.options import MockOptions
from steelyard.mock.service import Reply, Service, Times
from steelyard.transport.http_server import BadRequest, Request, ServerConnection

_BACKLOG = 4096
"""A sweep opens a thousand connections at once; those beyond the queue would wait a second to try again."""
Action: TypeAlias = Callable[[float], float | None]
"""Takes the time at which it was due, and returns the next time, or None."""


class MockServer:
    """A simulated model behind the OpenAI and Anthropic APIs, for as long as its `async with` block lasts.

    It runs on the event loop that opens it; to measure a client, run it in a separate process.
    """

    def __init__(self, options: MockOptions | None = None) -> None:
        self.options = options or MockOptions()
        self._service = Service(self.options)
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._scheduler: Scheduler | None = None

    async def __aenter__(self) -> MockServer:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def port(self) -> int:
        """The port it listens on."""
        if self._server is None:
            raise RuntimeError("the mock is not open")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Scheme, host and port; an Anthropic client takes this as its base URL."""
        host = self.options.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its base URL."""
        return f"{self.url}/v1"

    async def open(self) -> None:
        """Listen; raises ConfigurationError where that is not possible."""
        loop = asyncio.get_running_loop()
        self._scheduler = scheduler = Scheduler(loop)
        try:
            self._server = await loop.create_server(
                lambda: ClientConnection(self._service, scheduler, self._connections),
                self.options.host,
                self.options.port,
                backlog=_BACKLOG,
            )
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise ConfigurationError(f"cannot listen on {self.options.host}:{self.options.port}: {why}") from error

    async def close(self) -> None:
        """Stop listening and close every connection, even while replies are being sent."""
        if self._server is None or self._scheduler is None:
            return
        self._server.close()
        self._scheduler.close()
        for connection in list(self._connections):
            connection.abort()
        await self._server.wait_closed()
        self._server = None

    def stats(self, *, times: bool = False) -> dict[str, Any]:
        """What it received so far, as `/stats` reports it."""
        return self._service.stats_report(with_times=times)

    def reset(self) -> None:
        """Set all counters to zero, and forget which requests came before."""
        self._service.reset()


class ClientConnection(ServerConnection):
    """The HTTP/1.1 connection of one client."""

    def __init__(self, service: Service, scheduler: Scheduler, open_connections: set[ClientConnection]) -> None:
        super().__init__()
        self._service = service
        self._scheduler = scheduler
        self._open = open_connections
        self._playback: ReplyPlayback | None = None
        self.is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._open.add(self)
        self._service.stats.opened()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._open.discard(self)
        self._service.stats.connections -= 1
        if self._playback is not None:
            self._playback.abandon()
            self._playback, self.is_answering = None, False

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._playback is not None and self._playback.is_stalled:
            self._scheduler.add(monotonic(), self._playback.play)

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self._service.stats.bytes_sent += len(data)
            self.transport.write(data)

    def ended(self, *, closes: bool) -> None:
        """End the current reply: continue with the next request, or close."""
        self._playback, self.is_answering = None, False
        if closes:
            self.close()
        else:
            self.serve()

    def refuse(self, error: BadRequest) -> None:
        """Answer a malformed request."""
        self._playback = ReplyPlayback(self, self._service, self._service.bad_request(error), monotonic_ns())
        self.is_answering = True
        self._playback.play(monotonic())

    def take(self, request: Request) -> None:
        """Begin the reply, when its time has come."""
        received_ns = monotonic_ns()
        reply = self._service.reply(request)
        self._playback = playback = ReplyPlayback(self, self._service, reply, received_ns)
        self.is_answering = True
        due = received_ns / 1e9 + reply.delay
        if reply.delay > 0:
            self._scheduler.add(due, playback.play)
        elif (again := playback.play(due)) is not None:
            self._scheduler.add(again, playback.play)


class ReplyPlayback:
    """Writes one reply, piece by piece. Ends once: when its last byte is written, or when the client has gone."""

    __slots__ = ("_connection", "_first_ns", "_received_ns", "_reply", "_service", "_step", "is_over", "is_stalled")

    def __init__(self, connection: ClientConnection, service: Service, reply: Reply, received_ns: int) -> None:
        self._connection = connection
        self._service = service
        self._reply = reply
        self._received_ns = received_ns
        self._first_ns = 0
        self._step = 0
        self.is_over = False
        self.is_stalled = False
        """Whether a piece was due while the client had too much to read: written when the client has caught up."""

    def play(self, due: float) -> float | None:
        """Write what is due; returns the time of the next piece, or None when that was the last."""
        self.is_stalled = self._connection.is_paused
        if self.is_over or self.is_stalled:
            return None
        reply = self._reply
        if reply.frames is None:
            self._first_ns = monotonic_ns()
            if not reply.is_dropped:
                self._connection.write(reply.start)
            self._end()
            return None
        step = self._step
        if step + 1 < reply.steps and reply.interval > 0:
            self._write(next(reply.frames), due, is_first=step == 0)
            self._step = step + 1
            return due + reply.interval
        self._play_rest(due)
        self._end()
        return None

    def abandon(self) -> None:
        """Write nothing more: the client has gone."""
        if not self.is_over:
            self._service.stats.abandoned += 1
            self._release()

    def _write(self, data: bytes, due: float, *, is_first: bool) -> None:
        reply = self._reply
        now = monotonic_ns()
        if reply.includes_times:
            data = b": sent_ns=%d due_ns=%d\n%b" % (now, due * 1e9, data)
        if reply.chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if is_first:
            self._first_ns = now
            data = reply.start + data
        self._service.stats.chunks += 1
        self._connection.write(data)

    def _play_rest(self, due: float) -> None:
        """Write the rest in one piece: the last token with the ending, or a stream whose tokens come all at once."""
        reply = self._reply
        assert reply.frames is not None
        left = max(0, reply.steps - self._step)
        data = b"".join(islice(reply.frames, left))
        data += b"".join(reply.frames) if reply.torn_ending is None else reply.torn_ending
        self._service.stats.chunks += max(0, left - 1)
        if data:
            self._write(data, due, is_first=self._step == 0)
        if reply.chunked and reply.is_terminated:
            self._connection.write(b"0\r\n\r\n")

    def _end(self) -> None:
        self._release()
        reply, stats = self._reply, self._service.stats
        if reply.is_dropped:
            stats.dropped += 1
        elif reply.path:
            stats.torn += reply.is_torn
            stats.answers[reply.path, reply.status] += 1
            if not reply.is_torn:
                stats.tokens_input += reply.tokens[0]
                stats.tokens_output += reply.tokens[1]
        if reply.request_id:
            times = Times(reply.request_id, reply.id, self._received_ns, self._first_ns, monotonic_ns())
            stats.times.append(times)
        self._connection.ended(closes=reply.closes)

    def _release(self) -> None:
        """Make room for the next request."""
        self.is_over = True
        if self._reply.is_admitted:
            self._service.limits.release()


class Scheduler:
    """Calls actions when they are due: never early, and late by the timer's millisecond or by the time others took.

    A timer of the event loop for every chunk of every stream would cost more than the chunks do.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[tuple[float, int, Action]] = []
        self._count = 0
        self._timer: asyncio.Handle | None = None
        self._armed_for = math.inf

    def add(self, due: float, action: Action) -> None:
        """Call an action at this reading of the monotonic clock."""
        self._count += 1
        heappush(self._due, (due, self._count, action))
        if due < self._armed_for:
            self._arm()

    def close(self) -> None:
        """Call nothing more."""
        self._due.clear()
        self._disarm()

    def _tick(self) -> None:
        self._armed_for = -math.inf  # actions added meanwhile need not set the timer
        due = self._due
        now = monotonic()
        try:
            # At most one round: a backlog must not keep the loop from reading requests.
            for _ in range(len(due)):
                if not due or due[0][0] > now:
                    break
                when, _, action = heappop(due)
                again = action(when)
                if again is not None:
                    self._count += 1
                    heappush(due, (again, self._count, action))
        finally:
            self._timer = None
            self._arm()

    def _arm(self) -> None:
        self._disarm()
        if not self._due:
            return
        self._armed_for = self._due[0][0]
        # Up to the next millisecond: event loops round, and one that rounds down would wake us for nothing.
        delay = math.ceil((self._armed_for - monotonic()) * 1000) / 1000
        self._timer = self._loop.call_later(delay, self._tick) if delay > 0 else self._loop.call_soon(self._tick)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_for = math.inf
