"""The transports that a test of their contract runs with: libcurl's, and the plain one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from steelyard.transport import CurlTransport
from steelyard.transport.plain import PlainTransport

Kind = type[CurlTransport] | type[PlainTransport]
KINDS: dict[str, Kind] = {"libcurl": CurlTransport, "plain": PlainTransport}


class Current:
    """The kind that the running test is for."""

    kind: Kind = CurlTransport


@asynccontextmanager
async def transport(connections: int = 10, **options: object) -> AsyncIterator[CurlTransport | PlainTransport]:
    made = Current.kind(connections, **options)
    try:
        yield made
    finally:
        await made.close()
