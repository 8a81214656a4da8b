"""An event loop whose clock jumps to the next timer instead of waiting for it: hours pass in milliseconds, exactly."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Sees what is ready and, when nothing is, lets the loop's clock jump over the time it would have waited."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at 1000 s; nothing but waiting takes time."""

    def __init__(self) -> None:
        selector = _Jumping()
        selector.loop = self
        self.now = 1000.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns, run on a loop with virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def virtual_clock() -> Any:
    """The running loop's clock, for what takes one."""
    return asyncio.get_running_loop().time


LOOP_TIME = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
"""To be put in place of a module's `time`, where what it measures runs on a virtual loop."""
