"""A time limit on many calls at once, for the price of one timer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

Task = asyncio.Task[Any]


class Deadlines:
    """Gives every call the same number of seconds.

    All limits are equal, so calls expire in the order in which they began, and one timer, set to the
    oldest, serves them all. `asyncio.timeout` would cost a timer for each call.

    Usage: `begin(task)`, await the call, and in any case `end(task)`: it says whether the time was up, and
    a CancelledError that this object asked for is then to be read as a timeout. Between the two, the clock that
    `begin` returns can be stopped and restarted: such a call leaves the order, and gets its own timer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._running: dict[Task, CallClock] = {}
        self._apart: dict[Task, CallClock] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __reduce__(self) -> tuple[type[Deadlines], tuple[float]]:
        """Timers do not travel: a copy starts with none."""
        return (Deadlines, (self.seconds,))

    def begin(self, task: Task) -> CallClock:
        """Start the clock on what this task does next, and return it; of no effect once that call has ended."""
        deadline = time.monotonic() + self.seconds
        self._running[task] = clock = CallClock(task, deadline, self._running, self._apart)
        if self._timer is None:
            self._set_timer(deadline)
        return clock

    def end(self, task: Task) -> bool:
        """Stop the clock; True when the call was cancelled for its time and nobody else wants the task to end."""
        if self._running.pop(task, None) is not None:
            return False
        if (clock := self._apart.pop(task, None)) is not None:
            clock.close()
            return False
        return not task.uncancel()

    def _set_timer(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._expire)

    def _expire(self) -> None:
        """Cancel the calls whose time is up, and set the timer to the oldest of the rest."""
        self._timer = None
        now = time.monotonic()
        late = []
        for task, clock in self._running.items():
            if clock.deadline > now:
                self._set_timer(clock.deadline)
                break
            late.append(task)
        for task in late:
            del self._running[task]
            task.cancel()


class CallClock(msgspec.Struct, eq=False):
    """The time limit of one call, which can be stopped while it waits for something else than the target.

    Parts of a call that wait at the same time may each stop it: it runs again when all of them have started it.
    """

    task: Task
    deadline: float
    running: dict[Task, CallClock]
    apart: dict[Task, CallClock]
    """The calls whose clock was stopped: they are not in the order of the rest."""
    left: float = 0.0
    stops: int = 0
    timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Stop the clock."""
        self.stops += 1
        if self.stops > 1:
            return
        # The same task runs one call after the other: a clock that outlived its call must not stop the next one's.
        if self.running.get(self.task) is self:
            del self.running[self.task]
            self.apart[self.task] = self
        elif self.apart.get(self.task) is not self:
            return
        self.left = self.deadline - time.monotonic()
        self._cancel_timer()

    def start(self) -> None:
        """Restart the clock with the time that is left."""
        if self.stops == 0:
            return
        self.stops -= 1
        if self.stops or self.apart.get(self.task) is not self:
            return
        self.deadline = time.monotonic() + self.left
        self.timer = asyncio.get_running_loop().call_later(max(0.0, self.left), self._expire)

    def close(self) -> None:
        """The call has ended."""
        self._cancel_timer()

    def _expire(self) -> None:
        if (early := self.deadline - time.monotonic()) > 0:  # timers of some loops count in whole milliseconds
            self.timer = asyncio.get_running_loop().call_later(early, self._expire)
            return
        self._cancel_timer()
        del self.apart[self.task]
        self.task.cancel()

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
