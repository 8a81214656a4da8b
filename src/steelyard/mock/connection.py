"""One client's connection: requests in, replies out, one after the other."""

from __future__ import annotations

import asyncio
from time import monotonic, monotonic_ns
from typing import cast

from steelyard.mock.exchange import Exchange
from steelyard.mock.http import BadRequest, Request, RequestReader
from steelyard.mock.service import Service
from steelyard.mock.wheel import Wheel

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MOST_AHEAD = 1024 * 1024
"""Bytes of pipelined requests that are read before the reply to the first has ended."""


class Connection(asyncio.Protocol):
    """Speaks HTTP/1.1 with one client."""

    def __init__(self, service: Service, wheel: Wheel, open_connections: set[Connection]) -> None:
        self._service = service
        self._wheel = wheel
        self._open = open_connections
        self._reader = RequestReader()
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._is_serving = False
        self._is_full = False
        self.is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own has another base
        self._open.add(self)
        self._service.stats.opened()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._transport = None
        self._open.discard(self)
        self._service.stats.connections -= 1
        if self._exchange is not None:
            self._exchange.abandon()
            self._exchange = None

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._exchange is None:
            self._serve()
        elif self._reader.held > _MOST_AHEAD and self._transport is not None:
            self._is_full = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._exchange is not None and self._exchange.is_stalled:
            self._wheel.add(monotonic(), self._exchange.play)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._service.stats.bytes_sent += len(data)
            self._transport.write(data)

    def ended(self, *, closes: bool) -> None:
        """The reply is out: take up the next request, or close."""
        self._exchange = None
        if closes:
            self.close()
        elif not self._is_serving:
            self._serve()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close without waiting for the client to read what was written."""
        if self._transport is not None:
            self._transport.abort()

    def _serve(self) -> None:
        """Answer the requests that are there, until one must wait for its moment."""
        self._is_serving = True
        try:
            while self._exchange is None and self._transport is not None and not self._transport.is_closing():
                request = self._reader.next()
                if request is None:
                    self._read_on(self._transport)
                    return
                self._begin(request)
        except BadRequest as error:
            self._exchange = Exchange(self, self._service, self._service.bad_request(error), monotonic_ns())
            self._exchange.play(monotonic())
        finally:
            self._is_serving = False

    def _read_on(self, transport: asyncio.Transport) -> None:
        """Wait for the rest of a request, or for the next one."""
        if self._reader.wants_continue():
            transport.write(_CONTINUE)
        if self._is_full:
            self._is_full = False
            transport.resume_reading()

    def _begin(self, request: Request) -> None:
        received_ns = monotonic_ns()
        reply = self._service.reply(request)
        self._exchange = exchange = Exchange(self, self._service, reply, received_ns)
        due = received_ns / 1e9 + reply.delay
        if reply.delay > 0:
            self._wheel.add(due, exchange.play)
        elif (again := exchange.play(due)) is not None:
            self._wheel.add(again, exchange.play)
