"""Daemon threads, which never hold up the exit: sync functions awaited on an event loop, and an event loop in a thread.

A thread cannot be stopped. When the task that awaits it is cancelled, the task continues at once and the thread keeps
running as *excess*: counted, not reused, its late result dropped. `concurrent.futures` cannot be used: it joins its
threads at interpreter exit, so that one hung call would block the exit for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from steelyard.errors import TargetError
from steelyard.shutdown import INTERRUPT_SECONDS

Result = TypeVar("Result")

IDLE_SECONDS = 10.0
"""How long an idle thread is kept."""
T = TypeVar("T")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


class _Call:
    """One function call, handed to a thread."""

    __slots__ = ("abandoned", "args", "context", "ended", "function", "future", "loop")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[_Outcome] = self.loop.create_future()
        self.abandoned = False
        self.ended = False


class _Outcome:
    """The result or error of a call, passed as a plain result so that no future holds an unread exception."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value = value
        self.error = error

    def drop(self) -> None:
        """Discard it silently: a coroutine that is never awaited would warn."""
        if inspect.iscoroutine(self.value):
            self.value.close()


class DaemonThreads:
    """A pool of daemon threads: started when needed, reused when idle, ended after `IDLE_SECONDS` without work."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._excess = 0
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[DaemonThreads], tuple[()]]:
        """Pickle without threads: a copy starts empty."""
        return (DaemonThreads, ())

    @property
    def excess(self) -> int:
        """Number of abandoned calls that still run."""
        return self._excess

    async def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run the function in a thread with this task's context variables, and return its result.

        SystemExit, KeyboardInterrupt and the like become a TargetError: they do not end the event loop.
        """
        call = _Call(function, args)
        self._hand_over(call)
        try:
            outcome = await call.future
        except BaseException:
            self._abandon(call)
            raise
        if outcome.error is None:
            return outcome.value  # type: ignore[no-any-return]
        try:
            raise outcome.error
        finally:
            del outcome, call  # the error's traceback holds this frame: a cycle, if the frame held the error

    def _hand_over(self, call: _Call) -> None:
        if self._pid != os.getpid():
            self._renew()  # forked: the idle threads stayed with the parent
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self)
            worker.start()
        worker.inbox.put(call)

    def _abandon(self, call: _Call) -> None:
        if call.future.done() and not call.future.cancelled():
            call.future.result().drop()
        with self._lock:
            if not call.ended:
                call.abandoned = True
                self._excess += 1

    def _finish(self, worker: _Worker, call: _Call, outcome: _Outcome) -> None:
        """Free the worker, then deliver the outcome: a caller that calls again at once finds a free thread."""
        with self._lock:
            call.ended = True
            self._excess -= call.abandoned
            self._idle.append(worker)
        if call.abandoned:
            outcome.drop()
            return
        try:
            call.loop.call_soon_threadsafe(_settle, call.future, outcome)
        except RuntimeError:  # the loop was closed meanwhile: nobody waits
            outcome.drop()

    def _retire(self, worker: _Worker) -> bool:
        """Return True when the worker may end: it is idle, and no call was handed to it at the last moment."""
        with self._lock:
            if worker not in self._idle:
                return False
            self._idle.remove(worker)
            return True


class _Worker(threading.Thread):
    def __init__(self, pool: DaemonThreads) -> None:
        super().__init__(name="steelyard-call", daemon=True)
        self.inbox: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._pool = pool

    def run(self) -> None:
        while True:
            try:
                call = self.inbox.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                if self._pool._retire(self):
                    return
                continue
            self._pool._finish(self, call, _perform(call))
            del call  # an idle thread must not keep the last case alive


def _perform(call: _Call) -> _Outcome:
    if call.abandoned:
        return _Outcome()
    try:
        return _Outcome(call.context.run(call.function, *call.args))
    except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
        return _Outcome(error=error)
    except BaseException as error:  # noqa: BLE001 - SystemExit and its kin would end the caller's loop
        failure = TargetError(f"the function raised {type(error).__name__}: {error}".removesuffix(": "))
        failure.__cause__ = error
        return _Outcome(error=failure)


def _settle(future: asyncio.Future[_Outcome], outcome: _Outcome) -> None:
    if future.done():
        outcome.drop()
    else:
        future.set_result(outcome)


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


def run_blocking(coroutine: Coroutine[Any, Any, T], loop_factory: LoopFactory | None = None) -> T:
    """Run a coroutine to its end from code that is not async, inside a running event loop or not.

    Ctrl-C cancels it, waits for it as long as an interrupted process may take, and raises KeyboardInterrupt.
    """
    running = LoopThread(coroutine, loop_factory)
    try:
        return running.result()
    except KeyboardInterrupt:
        running.cancel()
        running.wait(INTERRUPT_SECONDS)
        raise
