"""The token that cancels a run: from any thread or signal handler."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable


class CancellationToken:
    """Cooperative cancellation: `cancel(reason)` once, then `cancelled` is true and every `wait()` returns.

    Safe to use from other threads, other event loops and signal handlers.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler may call cancel() while this very thread is inside on_cancel().
        self._lock = threading.RLock()
        self._reason: str | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """The reason given by the first caller of `cancel`."""
        return self._reason

    def cancel(self, reason: str = "cancelled") -> None:
        """Stop what observes this token. The first reason stays; later calls change nothing."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when cancelled (at once if it already is); returns a function that unregisters it."""

        def forget() -> None:
            self._forget(callback)

        with self._lock:
            self._callbacks.append(callback)
        # Checked only now: a signal handler may have cancelled in between, with or without this callback.
        if self._reason is not None and self._forget(callback):
            callback()
        return forget

    def _forget(self, callback: Callable[[], None]) -> bool:
        """Unregister a callback; False when it was called or unregistered before."""
        with self._lock:
            if callback not in self._callbacks:
                return False
            self._callbacks.remove(callback)
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
        assert self._reason is not None
        return self._reason
