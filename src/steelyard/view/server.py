"""Serving the view on one address until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import uvicorn

from steelyard.errors import ConfigurationError
from steelyard.view.app import View
from steelyard.view.overview import Suites
from steelyard.view.runs import Runs
from steelyard.view.security import Guard, is_loopback

_BACKLOG = 128
_PATIENCE = 1
"""Seconds that open connections get when the server stops."""


class _Server(uvicorn.Server):
    """A server that leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ViewServer:
    """A page over the runs in a folder: `async with ViewServer(folder) as server: ... server.url`.

    On an address that others can reach it asks for a token, which is part of `url`.
    """

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        if not 0 <= port <= 65_535:
            raise ConfigurationError(f"port must be between 0 and 65535, got {port}")
        self._runs = Runs(folder)
        self._host, self._asked_port = host, port
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)

    async def __aenter__(self) -> ViewServer:
        listening = self._listen()
        self.port = listening.getsockname()[1]
        self._view = View(self._runs, Suites(self._runs.root, Path.cwd()))
        guard = Guard(self._view.app, host=self._host, port=self.port, token=self.token)
        self._server = _Server(
            uvicorn.Config(
                guard,
                lifespan="off",
                ws="none",
                http="h11",
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
                log_level="critical",
                timeout_graceful_shutdown=_PATIENCE,
            )
        )
        self._serving = asyncio.create_task(self._server.serve([listening]))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.watches.stop()
        self._server.should_exit = True
        await self._serving

    @property
    def url(self) -> str:
        """The address to open."""
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, self._asked_port))
            listening.listen(_BACKLOG)  # from here on nobody is refused, however soon the address is opened
        except OSError as error:
            listening.close()
            raise ConfigurationError(
                f"cannot listen on {self._host} port {self._asked_port}: {error.strerror or error}"
            ) from error
        listening.setblocking(False)
        return listening
