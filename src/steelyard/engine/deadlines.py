"""A time limit on many calls at once, for the price of one timer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

Task = asyncio.Task[Any]


class Deadlines:
    """Gives every call the same number of seconds.

    All limits are equal, so calls expire in the order in which they began, and one timer, set to the
    oldest, serves them all. `asyncio.timeout` would cost a timer for each call.

    Usage: `begin(task)`, await the call, and in any case `end(task)`: it says whether the time was up, and
    a CancelledError that this object asked for is then to be read as a timeout. Between the two, `clock(task)`
    returns a clock that can be stopped and restarted: such a call leaves the order, and gets its own timer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._running: dict[Task, float] = {}
        self._apart: dict[Task, CallClock] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __reduce__(self) -> tuple[type[Deadlines], tuple[float]]:
        """Timers do not travel: a copy starts with none."""
        return (Deadlines, (self.seconds,))

    def begin(self, task: Task) -> None:
        """Start the clock on what this task does next."""
        deadline = time.monotonic() + self.seconds
        self._running[task] = deadline
        if self._timer is None:
            self._set_timer(deadline)

    def end(self, task: Task) -> bool:
        """Stop the clock; True when the call was cancelled for its time and nobody else wants the task to end."""
        if self._running.pop(task, None) is not None:
            return False
        if (clock := self._apart.pop(task, None)) is not None:
            clock.close()
            return False
        return not task.uncancel()

    def clock(self, task: Task) -> CallClock:
        """The clock of the call that this task has begun; of no effect once that call has ended."""
        return CallClock(self._running, self._apart, task)

    def _set_timer(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._expire)

    def _expire(self) -> None:
        """Cancel the calls whose time is up, and set the timer to the oldest of the rest."""
        self._timer = None
        now = time.monotonic()
        late = []
        for task, deadline in self._running.items():
            if deadline > now:
                self._set_timer(deadline)
                break
            late.append(task)
        for task in late:
            del self._running[task]
            task.cancel()


class CallClock:
    """The time limit of one call, which can be stopped while it waits for something else than the target.

    Parts of a call that wait at the same time may each stop it: it runs again when all of them have started it.
    """

    __slots__ = ("_apart", "_deadline", "_left", "_running", "_stops", "_task", "_timer")

    def __init__(self, running: dict[Task, float], apart: dict[Task, CallClock], task: Task) -> None:
        self._running = running
        self._apart = apart
        self._task = task
        self._deadline = running.get(task)
        self._left = 0.0
        self._stops = 0
        self._timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Stop the clock."""
        self._stops += 1
        if self._stops > 1 or self._deadline is None:
            return
        # The same task runs one call after the other: a clock that outlived its call must not stop the next one's.
        if self._running.get(self._task) == self._deadline:
            del self._running[self._task]
            self._apart[self._task] = self
        elif self._apart.get(self._task) is not self:
            return
        self._left = self._deadline - time.monotonic()
        self._cancel_timer()

    def start(self) -> None:
        """Restart the clock with the time that is left."""
        if self._stops == 0:
            return
        self._stops -= 1
        if self._stops or self._apart.get(self._task) is not self:
            return
        self._deadline = time.monotonic() + self._left
        self._timer = asyncio.get_running_loop().call_later(max(0.0, self._left), self._expire)

    def close(self) -> None:
        """The call has ended."""
        self._deadline = None
        self._cancel_timer()

    def _expire(self) -> None:
        assert self._deadline is not None
        if (early := self._deadline - time.monotonic()) > 0:  # timers of some loops count in whole milliseconds
            self._timer = asyncio.get_running_loop().call_later(early, self._expire)
            return
        self.close()
        del self._apart[self._task]
        self._task.cancel()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
