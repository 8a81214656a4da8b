"""A time limit on many calls at once, for the price of one timer."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Deadlines:
    """Gives every call the same number of seconds: `with deadlines.call() as call: await ...`.

    All limits are equal, so calls expire in the order in which they began, and one timer, set to the
    oldest, serves them all. `asyncio.timeout` would cost each call a timer of its own.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._calls: dict[LimitedCall, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def call(self) -> LimitedCall:
        """A context in which the running task is cancelled when its time is up; that becomes a TimeoutError."""
        return LimitedCall(self)

    def __reduce__(self) -> tuple[type[Deadlines], tuple[float]]:
        """Timers do not travel: a copy starts with none."""
        return (Deadlines, (self.seconds,))

    def begin(self, call: LimitedCall) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.seconds
        self._calls[call] = deadline
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._expire, loop)

    def end(self, call: LimitedCall) -> None:
        self._calls.pop(call, None)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the calls whose time is up, and set the timer to the oldest of the rest."""
        now = loop.time()
        self._timer = None
        for call, deadline in list(self._calls.items()):
            if deadline > now:
                self._timer = loop.call_at(deadline, self._expire, loop)
                return
            del self._calls[call]
            call.expire()


class LimitedCall:
    """One call under a limit."""

    __slots__ = ("_deadlines", "_task", "expired")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self.expired = False

    def expire(self) -> None:
        """Cancel the task that runs this call."""
        self.expired = True
        self._task.cancel()

    def __enter__(self) -> LimitedCall:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._deadlines.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.end(self)
        # Still being cancelled after our own request is taken back: somebody else wants this task to end too.
        if self.expired and not self._task.uncancel() and kind is asyncio.CancelledError:
            raise TimeoutError(f"no answer within {self._deadlines.seconds:g} s") from error
