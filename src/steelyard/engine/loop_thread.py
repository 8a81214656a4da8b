"""Running a coroutine to its end from code that is not async, inside a running event loop or not."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


class LoopThread(Generic[T]):
    """A coroutine running on an event loop in its own daemon thread.

    The caller's thread stays free to take signals, even while a callback blocks the loop, and a task
    that refuses to end cannot block the exit.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop_factory: LoopFactory | None = None) -> None:
        try:
            self._loop = (loop_factory or asyncio.new_event_loop)()
        except BaseException:
            coroutine.close()
            raise
        self._task = self._loop.create_task(coroutine)
        self._done = threading.Event()
        self._value: T
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="steelyard-loop", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended, waiting at most `timeout` seconds."""
        return self._done.wait(timeout)

    def cancel(self) -> None:
        """Cancel the coroutine, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
            self._loop.call_soon_threadsafe(self._task.cancel)

    def result(self) -> T:
        """What the coroutine returned, or raise what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._value = self._loop.run_until_complete(self._task)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._error = error
        finally:
            self._done.set()
        self._clean_up(self._loop)

    def _clean_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel tasks that the coroutine left; the caller already has its result and does not wait for this."""
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        if all(task.done() for task in tasks):
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
