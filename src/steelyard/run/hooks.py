"""Hooks: a user's code that is called when a run starts, for each record, for each error and at the end.

Each hook has a thread and a bounded queue, so that a slow or broken one cannot slow a run down or end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.masking import masked_description, user_traceback
from steelyard.records import Job, Record
from steelyard.shutdown import HOOK_SECONDS
from steelyard.stats.formatting import counted, safe_text

if TYPE_CHECKING:
    from steelyard.run.result import Result

log = logging.getLogger("steelyard")

EVENTS = ("on_start", "on_record", "on_error", "on_end", "on_failure")
MAX_WAITING = 1_000
"""Records that may wait for one hook. Of a hook that is slower, more are dropped, or the run waits: `sees_all`."""
_MAX_MESSAGE = 500


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run when it starts."""

    suite: str
    path: Path | None
    """The run directory; None for a run that is kept in memory alone."""
    model_id: str | None
    planned: int
    """Cases times trials; 0 where the number is not known, as in a load run of some minutes."""
    done_before: int
    """How many of them earlier launches finished."""


class Hook:
    """Base class of hooks; override what you need. Any object with one of these methods will do as well.

    The methods run in a thread of the hook, one at a time, in order; they may be `async def`. Records are shared with
    the run: read them, do not change them. What a hook raises is logged and changes nothing.
    """

    sees_all = False
    """Whether the run waits for this hook when it falls behind, instead of dropping records."""
    end_seconds = 60.0
    """How long the end of a run waits for the hook to finish; after Ctrl-C only a moment."""

    def on_start(self, run: RunInfo) -> None:
        """A launch starts."""

    def on_record(self, record: Record) -> None:
        """A case is finished, ok or error, and its record written."""

    def on_error(self, record: Record) -> None:
        """A case ended in an error; called after `on_record`."""

    def on_end(self, result: Result) -> None:
        """The run ended, complete or not, and its metrics are written."""

    def on_failure(self, error: BaseException) -> None:
        """The run itself failed, such as on a full disk: there is no result."""


class Hooks:
    """The hooks of one launch."""

    def __init__(self, hooks: Iterable[object]) -> None:
        self._threads = [_HookThread(hook) for hook in hooks]
        self._of_records = [thread for thread in self._threads if thread.handles("on_record")]
        self._of_errors = [thread for thread in self._threads if thread.handles("on_error")]
        self._awaited = [thread for thread in self._threads if thread.sees_all]

    def start(self, run: RunInfo) -> None:
        """Start the hooks' threads and tell them of the run."""
        for thread in self._threads:
            thread.launch()
            thread.send("on_start", run)

    @property
    def takes_records(self) -> bool:
        """Whether a hook is to see records."""
        return bool(self._of_records or self._of_errors)

    def take(self, record: Record) -> None:
        """Hand a record to the hooks; returns at once."""
        for thread in self._of_records:
            thread.send("on_record", record)
        if record.status == "error":
            for thread in self._of_errors:
                thread.send("on_error", record)

    def paced(self, jobs: Iterator[Job | None]) -> Iterator[Job | None]:
        """The jobs; none while a hook that is to see all records is behind."""
        return jobs if not self._awaited else self._waiting(jobs)

    def _waiting(self, jobs: Iterator[Job | None]) -> Iterator[Job | None]:
        """Yield the jobs, or None for: not yet, ask again."""
        for job in jobs:
            while any(thread.is_behind for thread in self._awaited):
                yield None
            yield job

    async def close(self, result: Result | None, error: BaseException | None, *, interrupted: bool) -> None:
        """Tell the hooks how the run ended, and wait for them a bounded time."""
        for thread in self._threads:
            if not thread.was_started:  # the run failed before its first case
                continue
            if result is not None:
                thread.send("on_end", result, always=True)
            elif error is not None:
                thread.send("on_failure", error, always=True)
            thread.end()
        began = time.monotonic()
        for thread in self._threads:
            if not thread.was_started:
                continue
            allowed = HOOK_SECONDS if interrupted else thread.end_seconds
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(thread.ended.wait(), max(began + allowed - time.monotonic(), 0))
            thread.report(allowed)


class _HookThread(threading.Thread):
    """Calls the methods of one hook, one after another. A daemon: a hook that hangs cannot hold up the exit."""

    def __init__(self, hook: object) -> None:
        self._hook = hook
        self._label = hook_name(hook)
        super().__init__(name=f"steelyard-hook-{self._label}", daemon=True)
        self.sees_all = bool(getattr(hook, "sees_all", False))
        self.end_seconds = float(getattr(hook, "end_seconds", Hook.end_seconds))
        self._methods = {event: method for event in EVENTS if (method := _method(hook, event)) is not None}
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runs_loop: asyncio.AbstractEventLoop | None = None
        self.ended = asyncio.Event()
        self._dropped = 0
        self._failed = 0

    @property
    def was_started(self) -> bool:
        return self._runs_loop is not None

    def handles(self, event: str) -> bool:
        return event in self._methods

    @property
    def is_behind(self) -> bool:
        return self._queue.qsize() >= MAX_WAITING and self.is_alive()

    def send(self, event: str, argument: Any, *, always: bool = False) -> None:
        if event not in self._methods:
            return
        if not (always or self.sees_all) and self._queue.qsize() >= MAX_WAITING:
            self._dropped += 1
            if self._dropped == 1:
                log.warning(
                    "hook %s is slower than the run: it misses records from now on (a hook with sees_all = True makes "
                    "the run wait)",
                    self._label,
                )
            return
        self._queue.put((event, argument))

    def end(self) -> None:
        self._queue.put(None)

    def launch(self) -> None:
        """Start the thread; `ended` is set on the event loop that this is called from."""
        self._runs_loop = asyncio.get_running_loop()
        self.start()

    def run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._call(*item)
        finally:
            if self._loop is not None:
                self._loop.close()
            if self._runs_loop is not None:
                with contextlib.suppress(RuntimeError):  # the run's loop is closed: nobody waits
                    self._runs_loop.call_soon_threadsafe(self.ended.set)

    def _call(self, event: str, argument: Any) -> None:
        try:
            outcome = self._methods[event](argument)
            if inspect.isawaitable(outcome):
                self._loop = self._loop or asyncio.new_event_loop()
                self._loop.run_until_complete(_awaited(outcome))
        except BaseException as error:  # noqa: BLE001 - whatever a hook raises, SystemExit included, is its own affair
            self._failed += 1
            if self._failed == 1:
                log.warning(
                    "hook %s failed in %s: %s", self._label, event, safe_text(masked_description(error, _MAX_MESSAGE))
                )
                log.debug("%s", "\n".join(map(safe_text, (user_traceback(error) or "").splitlines())))

    def report(self, waited: float) -> None:
        """Say what the hook missed, when the run is over."""
        if not self.ended.is_set():
            log.warning("hook %s had not finished %g s after the run: it is abandoned", self._label, waited)
        if self._failed > 1:
            log.warning("hook %s failed %s in all", self._label, counted(self._failed, "time"))
        if self._dropped:
            log.warning("hook %s missed %s: it was slower than the run", self._label, counted(self._dropped, "record"))


async def _awaited(outcome: Any) -> None:
    await outcome


def hook_name(hook: object) -> str:
    """What messages call a hook."""
    return safe_text(str(getattr(hook, "name", None) or type(hook).__name__))


def _method(hook: object, event: str) -> Callable[[Any], object] | None:
    """The hook's method for an event; None where it has none, or only inherits that of `Hook`, which does nothing."""
    method = getattr(hook, event, None)
    if method is None or getattr(method, "__func__", None) is getattr(Hook, event):
        return None
    found: Callable[[Any], object] = method
    return found


def as_hooks(hooks: Iterable[object]) -> list[object]:
    """The hooks, checked: each has at least one method of `Hook`."""
    found = list(hooks)
    for hook in found:
        if inspect.isclass(hook):
            raise ConfigurationError(f"hook {hook.__name__} is a class: give an instance, {hook.__name__}(…)")
        if not any(callable(getattr(hook, event, None)) for event in EVENTS):
            raise ConfigurationError(f"hook {hook_name(hook)} has none of the methods {', '.join(EVENTS)}")
    return found
