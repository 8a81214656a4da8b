"""Ctrl-C, SIGTERM and SIGHUP: the first stops the run politely, the second at once. Neither loses what finished."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from steelyard.cli.leaving import leave
from steelyard.cli.loops import loop_factory
from steelyard.cli.output import hurry, say
from steelyard.contracts import Engine
from steelyard.engine.cancellation import CancellationToken
from steelyard.engine.local import LocalEngine
from steelyard.engine.threaded import LoopThread
from steelyard.errors import RunCancelled, SteelyardError
from steelyard.journal.files import PARTIAL, write_json
from steelyard.result import Result

# From the first signal the process lives five seconds at most: calls that were cancelled have the first part to
# end, the run the second to close its books, and what is left is for reading them from disk if it could not.
GRACE = 2.5
_PATIENCE = 3.8
_LAST_WORDS = 0.7


T = TypeVar("T")


class Ending(msgspec.Struct, Generic[T], frozen=True):
    """How a run ended: its result if it has one, and the exit code of the signal that stopped it, 0 if none did."""

    result: T | None
    signal_code: int


class Interruptible(Protocol):
    """What is run, by an engine that is told how long it may take to stop."""

    engine: Engine | None


class _Signals:
    """Cancels a token at the first signal, ends the process at the second."""

    def __init__(self, token: CancellationToken, resume_with: str) -> None:
        self._token = token
        self._resume_with = resume_with
        self.code = 0
        self.deadline = float("inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's signature
        # Stop first, speak second: nobody may be reading, and words then go no further than a full pipe.
        hurry()
        if self.code:
            say(f"killed; resume with: {self._resume_with}", over_bar=True)
            leave(self.code)
        self.code = 128 + number
        self.deadline = time.monotonic() + _PATIENCE
        self._token.cancel(signal.Signals(number).name)
        say(f"{signal.Signals(number).name}: cancelling the calls in flight; once more to kill", over_bar=True)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the signals, and give them back."""
        before = {number: signal.signal(number, self) for number in _taken()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _taken() -> Iterator[signal.Signals]:
    """The signals that stop a run; a hang-up only where nobody (nohup) has asked that it be ignored."""
    yield signal.SIGINT
    yield signal.SIGTERM
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        yield signal.SIGHUP


def run_interruptibly(
    runner: Interruptible,
    start: Callable[[], Coroutine[Any, Any, T]],
    resume_with: str,
    *,
    token: CancellationToken,
    last_words: Callable[[str | None], T | None],
) -> Ending[T]:
    """Run to the end or to the first signal; nothing that a target does keeps the process alive after that.

    A signal cancels the `token`; `last_words` is what can still be said, given the reason, of a run whose event loop
    is stuck.
    """
    runner.engine = runner.engine or LocalEngine(grace=GRACE)
    signals = _Signals(token, resume_with)
    # What was imported stays: a collector that looks at all of it again stops the clocks for 20 ms each time.
    gc.freeze()
    with signals.installed():
        running = LoopThread(start(), loop_factory())
        while not running.wait(0.1):
            if time.monotonic() > signals.deadline:
                say("something does not end when it is cancelled; leaving it behind")
                return Ending(_in_time(last_words, token.reason), signals.code)
        try:
            return Ending(running.result(), signals.code)
        except RunCancelled as error:
            say(str(error))
            return Ending(None, signals.code)


def _in_time(last_words: Callable[[str | None], T | None], reason: str | None) -> T | None:
    """What is said within the time that is left; None if it takes longer."""
    found: list[T | None] = []

    def read() -> None:
        with suppress(SteelyardError):  # no record yet, or none that can be read: nothing to tell
            found.append(last_words(reason))

    reader = threading.Thread(target=read, name="steelyard-last-words", daemon=True)
    reader.start()
    reader.join(_LAST_WORDS)
    return found[0] if found else None


def partial_result(path: Path, reason: str | None) -> Result:
    """The result of a run that could not close its own books, from its journal; left in partial.json too."""
    result = Result.load(path)
    result.metrics["stopped"] = reason
    write_json(path / PARTIAL, result.metrics)
    return result
