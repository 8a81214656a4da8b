"""A time limit on many calls at once, for the price of one timer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

Task = asyncio.Task[Any]


class Deadlines:
    """Gives every call the same number of seconds.

    All limits are equal, so calls expire in the order in which they began, and one timer, set to the
    oldest, serves them all. `asyncio.timeout` would cost each call a timer of its own.

    Usage: `begin(task)`, await the call, and in any case `end(task)`: it says whether the time was up, and
    a CancelledError that this object asked for is then to be read as a timeout.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._running: dict[Task, float] = {}
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
        return not task.uncancel()

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
