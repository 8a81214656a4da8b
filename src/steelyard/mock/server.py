"""The server itself: opened, asked where it is and what it saw, closed."""

from __future__ import annotations

import asyncio
import os
from types import TracebackType
from typing import Any

from steelyard.errors import ConfigurationError
from steelyard.mock.connection import Connection
from steelyard.mock.options import MockOptions
from steelyard.mock.service import Service
from steelyard.mock.wheel import Wheel

_BACKLOG = 4096
"""A sweep opens a thousand connections at once; those beyond the queue would wait a second to try again."""


class MockServer:
    """A pretend model behind the OpenAI and Anthropic APIs, for as long as its `async with` lasts.

    It runs on the event loop of whoever opens it; to measure a client, run it in a process of its own.
    """

    def __init__(self, options: MockOptions | None = None) -> None:
        self.options = options or MockOptions()
        self._service = Service(self.options)
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._wheel: Wheel | None = None

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
        self._wheel = wheel = Wheel(loop)
        try:
            self._server = await loop.create_server(
                lambda: Connection(self._service, wheel, self._connections),
                self.options.host,
                self.options.port,
                backlog=_BACKLOG,
            )
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise ConfigurationError(f"cannot listen on {self.options.host}:{self.options.port}: {why}") from error

    async def close(self) -> None:
        """Stop listening and close every connection, whatever is on its way."""
        if self._server is None or self._wheel is None:
            return
        self._server.close()
        self._wheel.close()
        for connection in list(self._connections):
            connection.abort()
        await self._server.wait_closed()
        self._server = None

    def stats(self, *, times: bool = False) -> dict[str, Any]:
        """What it received so far, as `/stats` tells it."""
        return self._service.told(with_times=times)

    def reset(self) -> None:
        """Count from nothing again, and forget which requests came before."""
        self._service.reset()
