"""The token that cancels a run: from any thread or signal handler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class CancellationToken:
    """Cooperative cancellation: `cancel(reason)` once, then `cancelled` is true and every `wait()` returns.

    Safe to use from other threads, other event loops and signal handlers: there is no lock that a handler could wait
    for while the code that it interrupted holds it. Each step is one operation on a list, which nothing can divide.
    """

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._callbacks: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return bool(self._reasons)

    @property
    def reason(self) -> str | None:
        """The reason given by the first caller of `cancel`."""
        return self._reasons[0] if self._reasons else None

    def cancel(self, reason: str = "cancelled") -> None:
        """Stop what observes this token. The first reason stays; later calls change nothing."""
        self._reasons.append(reason)
        while True:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return
            callback()

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when cancelled (at once if it already is); returns a function that unregisters it."""

        def forget() -> None:
            self._forget(callback)

        self._callbacks.append(callback)
        # Checked only now: a cancellation in between either finds this callback or leaves it to us.
        if self._reasons and self._forget(callback):
            callback()
        return forget

    def _forget(self, callback: Callable[[], None]) -> bool:
        """Unregister a callback; False when it was called or unregistered before."""
        try:
            self._callbacks.remove(callback)
        except ValueError:
            return False
        return True

    async def wait(self) -> str:
        """Return the reason as soon as there is one."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def wake_from_anywhere() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody is left to wake
                loop.call_soon_threadsafe(wake)

        forget = self.on_cancel(wake_from_anywhere)
        try:
            await woken
        finally:
            forget()
        return self._reasons[0]
