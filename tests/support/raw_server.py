"""A server on 127.0.0.1 that says exactly the bytes it is told to, when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import pytest
import trustme
import uvloop

Outcome = TypeVar("Outcome")
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
each_loop = pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def run(work: Coroutine[Any, Any, Outcome], new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> Outcome:
    """Run to the end on a fresh loop, within a time limit."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(asyncio.wait_for(work, 30))


def chunk(data: bytes) -> bytes:
    """Data as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass
class Asked:
    """A request as it came in."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes
    at: float

    def header(self, name: str) -> str | None:
        """The one header of this name, or None."""
        values = [value for known, value in self.headers if known.lower() == name.lower()]
        assert len(values) <= 1, values
        return values[0] if values else None


class Visit:
    """One connection to the server."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer

    async def request(self) -> Asked:
        """The next request; raises IncompleteReadError when the client goes away instead."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        line, *fields = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        pairs = [field.partition(":") for field in fields]
        headers = [(name, value.strip()) for name, _, value in pairs]
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        return Asked(line, headers, await self.reader.readexactly(length), perf_counter())

    async def send(self, data: bytes) -> float:
        """Send bytes; the moment just before they were sent."""
        at = perf_counter()
        self.writer.write(data)
        await self.writer.drain()
        return at

    async def gone(self) -> None:
        """Wait until the client has closed the connection."""
        with contextlib.suppress(ConnectionError):
            assert await self.reader.read(1) == b""

    def reset(self) -> None:
        """Drop the connection without a farewell."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Visit], Awaitable[None]]


class RawServer:
    """Follows a script with every connection that is made to it; counts them."""

    def __init__(self, script: Script, *, tls: ssl.SSLContext | None = None) -> None:
        self.script = script
        self.tls = tls
        self.connections = 0
        self.open = 0
        self._changed = asyncio.Event()
        self._visits: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._welcome, "127.0.0.1", 0, ssl=self.tls, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for visit in self._visits:
            visit.cancel()
        await asyncio.gather(*self._visits, return_exceptions=True)
        if self._failures:
            raise self._failures[0]

    async def until_open(self, number: int) -> None:
        """Wait until so many connections are open, no more and no fewer."""
        while self.open != number:
            self._changed.clear()
            await self._changed.wait()

    def url(self, path: str = "/v1/answer", *, credentials: str = "") -> str:
        return f"http{'s' if self.tls else ''}://{credentials}127.0.0.1:{self.port}{path}"

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._visits.add(task)
        self.connections += 1
        self.open += 1
        self._changed.set()
        try:
            await self.script(Visit(self.connections, reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        except BaseException as error:
            self._failures.append(error)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError, asyncio.CancelledError):
                await writer.wait_closed()
            self.open -= 1
            self._changed.set()
            self._visits.discard(task)


def always(answer: bytes, asked: list[Asked] | None = None) -> Script:
    """A script that gives one answer to every request, and keeps the connection."""

    async def script(visit: Visit) -> None:
        while True:
            request = await visit.request()
            if asked is not None:
                asked.append(request)
            await visit.send(answer)

    return script


def once(*pieces: bytes) -> Script:
    """A script that answers one request in pieces, then closes the connection."""

    async def script(visit: Visit) -> None:
        await visit.request()
        for piece in pieces:
            await visit.send(piece)

    return script


def certificate(folder: Path, *names: str) -> tuple[Path, ssl.SSLContext]:
    """The proof of an authority of our own, and the context of a server that it vouches for."""
    authority, proof = trustme.CA(), folder / "authority.pem"
    authority.cert_pem.write_to_path(str(proof))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*(names or ("127.0.0.1", "localhost"))).configure_cert(context)
    return proof, context
