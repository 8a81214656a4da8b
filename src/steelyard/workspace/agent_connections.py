"""How an agent reaches its gateway: HTTP connections, and the door over which a sandbox hands out its port."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.transport.http_server import BadRequest, Head, Request, ServerConnection
from steelyard.workspace.upstream import failure

if TYPE_CHECKING:
    from steelyard.workspace.gateway import GatewaySession

JSON = {"content-type": "application/json"}
_MAX_DOOR_CALLS = 256
"""Programs of an attempt that may open the gateway's port in a sandbox, one after another."""
_DOOR_SECONDS = 5.0


class SandboxDoor:
    """Takes listening sockets from inside an agent's sandbox; what is inside can offer nothing but its own."""

    def __init__(self, session: GatewaySession) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._folder = tempfile.mkdtemp(prefix="steelyard-")
        self.path = Path(self._folder) / "gateway.sock"
        self._left = _MAX_DOOR_CALLS
        self._callers: set[asyncio.Task[None]] = set()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.path))
        self._socket.listen()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._on_caller)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for caller in self._callers:
            caller.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _on_caller(self) -> None:
        with contextlib.suppress(OSError):
            caller, _ = self._socket.accept()
            self._left -= 1
            if self._left < 0:
                caller.close()
                return
            task = self._loop.create_task(self._take(caller))
            self._callers.add(task)
            task.add_done_callback(self._callers.discard)

    async def _take(self, caller: socket.socket) -> None:
        with caller:
            caller.setblocking(False)
            readable = asyncio.Event()
            self._loop.add_reader(caller.fileno(), readable.set)
            try:
                await asyncio.wait_for(readable.wait(), _DOOR_SECONDS)
                _, descriptors, _, _ = socket.recv_fds(caller, 1, 1)
            except (OSError, TimeoutError):
                return
            finally:
                self._loop.remove_reader(caller.fileno())
            for descriptor in descriptors:
                offered = socket.socket(fileno=descriptor)
                if offered.family == socket.AF_INET and offered.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    await self._session.adopt(offered)
                    caller.send(b"x")
                else:
                    offered.close()


class AgentConnection(ServerConnection):
    """One HTTP/1.1 connection of an agent: a request at a time, its reply written as it comes."""

    def __init__(self, session: GatewaySession) -> None:
        super().__init__()
        self._session = session
        self._head: Head | None = None
        """Of the request that is being answered."""
        self._task: asyncio.Task[None] | None = None
        self._is_chunked = False
        self._is_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._session.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._session.disconnected(self)
        if self._task is not None:
            self._task.cancel()

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Write a reply's head; without a length its body is chunked, or ends with the connection."""
        head = self._head
        self._is_begun = True
        self._is_chunked = "content-length" not in headers and head is not None and not head.is_http_1_0
        lines = [f"HTTP/1.1 {status} {_phrase(status)}", *(f"{name}: {value}" for name, value in headers.items())]
        if self._is_chunked:
            lines.append("transfer-encoding: chunked")
        if head is None or not head.keep_alive:
            lines.append("connection: close")
        self._write("\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        """Write a piece of the body."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Write a whole reply."""
        self.begin(status, {**headers, "content-length": str(len(body))})
        if body and not (self._head is not None and self._head.method == "HEAD"):
            self._write(body)

    def finish(self) -> None:
        """End the reply, and turn to the next request."""
        head, self._head, self._task, self.is_answering = self._head, None, None, False
        if self._is_begun and self._is_chunked:
            self._write(b"0\r\n\r\n")
        if head is None or not head.keep_alive or not self._is_begun:
            self.close()
        self._is_begun = self._is_chunked = False
        self.serve()

    def take(self, request: Request) -> None:
        """Have a request passed on, unless it is refused at once."""
        self._head = request.head
        self._task = self._session.take(request, self)
        self.is_answering = self._task is not None
        if self._task is None:
            self._head = None
            self._is_begun = self._is_chunked = False
            if not request.head.keep_alive:
                self.close()

    def refuse(self, error: BadRequest) -> None:
        """Answer a malformed request, and close."""
        self.whole(error.status, JSON, failure("openai", error.status, str(error)))
        self.close()

    def _write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Overloaded" if status == 529 else "Error"
