"""A target's connections: one transport for each event loop that asks it, for as long as anybody there uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from steelyard.contracts import Transport
from steelyard.targets.arguments import Headers


class Link(msgspec.Struct):
    """A transport with the headers that go with every request over it."""

    transport: Transport
    headers: Headers
    is_ours: bool
    """Whether it was made here, and so is to be closed here."""
    users: int = 0


class Links:
    """Makes a link where there is none and closes it after its last user. Runs on different loops share nothing."""

    def __init__(self, make: Callable[[int], Link]) -> None:
        self._make = make
        self._of_loop: dict[asyncio.AbstractEventLoop, Link] = {}

    def open(self, parallelism: int) -> None:
        """Make ready for so many calls at once on this event loop; each `open` wants its `close`."""
        self.here(parallelism).users += 1

    def here(self, parallelism: int) -> Link:
        """The link of this event loop; one for so many calls at once is made when nobody opened any."""
        loop = asyncio.get_running_loop()
        link = self._of_loop.get(loop)
        if link is None:
            self._forget_closed_loops()
            link = self._of_loop[loop] = self._make(parallelism)
        return link

    async def close(self) -> None:
        """One user less; with the last one of this event loop its connections are closed."""
        loop = asyncio.get_running_loop()
        link = self._of_loop.get(loop)
        if link is None:
            return
        link.users = max(0, link.users - 1)
        if not link.users:
            del self._of_loop[loop]
            if link.is_ours:
                await link.transport.close()

    def _forget_closed_loops(self) -> None:
        """Let go of what nobody closed while there was time: whoever asks without opening does not close either."""
        for loop in [loop for loop in tuple(self._of_loop) if loop.is_closed()]:
            self._of_loop.pop(loop, None)
