"""A gateway in front of a mock or of a scripted server, for one attempt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from steelyard.stats.prices import read_prices
from steelyard.workspace.gateway import Gateway, GatewaySession

REAL_KEY = "sk-real-0123456789abcdef"
PRICES = {"input": 1.0, "output": 2.0, "cached_input": 0.5}


@asynccontextmanager
async def gateway_to(
    openai: str | None = None, anthropic: str | None = None, *, limited: Any = None, prices: Any = PRICES, **more: Any
) -> AsyncIterator[Gateway]:
    """A gateway whose providers are at these base URLs."""
    places = {"openai": openai, "anthropic": anthropic}
    apis = {name: {"base_url": url, "api_key": REAL_KEY, **more} for name, url in places.items() if url is not None}
    gateway = Gateway(apis)
    gateway.bind(limited or (lambda upstream: upstream), read_prices(prices, None))
    for upstream in gateway.upstreams.values():
        await upstream.open(8)
    try:
        yield gateway
    finally:
        await gateway.close()
        for upstream in gateway.upstreams.values():
            await upstream.close()


@asynccontextmanager
async def session_of(gateway: Gateway, path: Path | None = None, **options: Any) -> AsyncIterator[GatewaySession]:
    session = await gateway.session("case-1", path=path, **options)
    try:
        yield session
    finally:
        await session.end()


class Signal:
    """Notes what the gateway says of limits and waits."""

    def __init__(self) -> None:
        self.reached: str | None = None
        self.said: list[str] = []

    def reach(self, stop_reason: str) -> None:
        self.reached = self.reached or stop_reason
        self.said.append(stop_reason)

    def pause(self) -> None:
        self.said.append("pause")

    def resume(self) -> None:
        self.said.append("resume")

    async def wait(self) -> str:
        raise NotImplementedError
