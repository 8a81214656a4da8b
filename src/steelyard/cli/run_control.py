"""Ctrl-C, SIGTERM and SIGHUP: the first stops the run politely, the second at once. Neither loses what finished."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import msgspec

from steelyard.cli.main import FAILED_GATE, TOO_MANY_ERRORS
from steelyard.cli.output import hurry, say
from steelyard.engine.base import Engine
from steelyard.engine.cancellation import CancellationToken
from steelyard.engine.local import LocalEngine
from steelyard.engine.loop_thread import LoopThread
from steelyard.errors import ConfigurationError, RunCancelled, SteelyardError
from steelyard.journal.files import PARTIAL, write_json
from steelyard.report.rules import Leave, check_rule, parse_rule, refuse_misspelt
from steelyard.run.config import Gate, build_gate
from steelyard.run.result import Result
from steelyard.stats.formatting import safe_text
from steelyard.stats.metrics import Metrics, figures
from steelyard.subprocesses import kill_all

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
    result.typed_metrics.stopped = reason
    write_json(path / PARTIAL, result.typed_metrics)
    return result


_LAST_WORD_SECONDS = 0.5
_EXIT_SECONDS = 5.0
"""How long Python may take over an ordinary exit: it waits for the suite's own threads and exit hooks."""


def leave(code: int) -> NoReturn:
    """End the process now, with the programs it started; threads and unread output are not waited for."""
    _end_children()
    os._exit(code)


def leave_in_time(code: int) -> NoReturn:
    """Exit as Python does, so that exit hooks run and pools close; without what does not end within a few seconds."""
    late, told = threading.Event(), threading.Event()
    # Both are started here: from Python 3.12 on no thread can be once the exit has begun.
    threading.Thread(target=_tell, args=(late, told), name="steelyard-last-word", daemon=True).start()
    threading.Thread(target=_cut_short, args=(code, late, told), name="steelyard-exit", daemon=True).start()
    sys.exit(code)


def _tell(late: threading.Event, told: threading.Event) -> None:
    late.wait()
    say("threads of the suite's own still run; leaving them behind")
    told.set()


def _cut_short(code: int, late: threading.Event, told: threading.Event) -> None:
    time.sleep(_EXIT_SECONDS)
    late.set()
    told.wait(_LAST_WORD_SECONDS)  # nobody may be reading it
    leave(code)


def _end_children() -> None:
    """End what would outlive this process: commands have a session of their own, workers of a pool wait for ever."""
    kill_all()
    if "multiprocessing.process" in sys.modules:
        from multiprocessing import active_children

        for child in active_children():
            child.kill()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: a choice of the command line, never made at import."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


log = logging.getLogger("steelyard")

_SPARE = 64
"""What a run has open beside its calls: the journal, the suite, the event loop, libraries."""
_PIPES = 4
"""What a call may take when it is a program's; a connection takes one."""
SERVER = 65_536
"""What a server asks for, which cannot know who will come."""
_EVERYWHERE = 10_240
"""What macOS grants to anyone, where it refuses more though it names no limit."""


def allow_calls(calls: int) -> None:
    """Make room for so many calls at once; say so when the system's hard limit leaves too little."""
    limit = raise_limit(calls * _PIPES + _SPARE)
    if limit is not None and limit < calls + _SPARE:
        log.warning(
            "%s calls at once need about %s open files, and this process may have %s (ulimit -n):"
            " calls beyond that will fail",
            *(f"{number:,}" for number in (calls, calls + _SPARE, limit)),
        )


def raise_limit(wanted: int) -> int | None:
    """The number of files that may be open, raised to what is wanted as far as it may be; None when unlimited."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    for aim in (wanted, min(wanted, _EVERYWHERE)):
        new = aim if hard == resource.RLIM_INFINITY else min(aim, hard)
        if new > soft:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
                return new
    return soft


class _Handler(logging.Handler):
    """Says each message."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        say(f"{level}{self.format(record)}")


def log_to_stderr(*, quiet: bool, verbose: bool) -> None:
    """Show the library's log: notices by default, only errors when quiet, everything when verbose."""
    log = logging.getLogger("steelyard")
    log.handlers[:] = [_Handler()]
    log.propagate = False
    log.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)


def with_flags(gate: Gate, **flags: float | None) -> Gate:
    """The suite's gate with what was given on the command line put over it."""
    for rule in gate.rules:
        refuse_misspelt(parse_rule(rule))  # a mistake to tell of before anything is asked
    given = {name: value for name, value in flags.items() if value is not None}
    return build_gate({**msgspec.structs.asdict(gate), **given})


def verdict_code(metrics: Metrics, gate: Gate, *, remedy: str) -> int:
    """The exit code of a complete run; too many errors outrank a missed gate. `remedy` says what helps against them."""
    # An answer that could not be scored is no better for a gate than one that did not come.
    rate = metrics.failure_rate or 0.0
    if rate > gate.max_error_rate:
        kind = "error rate, scoring errors included," if metrics.scoring_errors else "error rate"
        say(f"{kind} {rate:.1%} is above {gate.max_error_rate:.1%} (--max-error-rate); {remedy}")
        return TOO_MANY_ERRORS
    if gate.min_pass_rate is not None:
        passed = metrics.pass_rate
        if passed is None or passed < gate.min_pass_rate:
            shown = "unknown: nothing was scored" if passed is None else f"{passed:.1%}"
            say(f"pass rate {shown}, below {gate.min_pass_rate:.1%} (--min-pass-rate)")
            return FAILED_GATE
    return _kept(metrics, gate.rules)


def _kept(metrics: Metrics, rules: Iterable[str]) -> int:
    """What the suite's own rules say of the figures; every broken one is named."""
    known = figures(metrics)
    broken = []
    for rule in rules:
        try:
            checked = check_rule(parse_rule(rule), metrics, known, Leave())
        except ConfigurationError as error:  # a figure that this run does not have: too late to refuse the run
            broken.append(f"{rule}: {error}")
        else:
            broken += [] if checked.ok else [f"{rule}: {checked.reason}"]
    for line in broken:
        say(f"gate: {safe_text(line)}")
    return FAILED_GATE if broken else 0
