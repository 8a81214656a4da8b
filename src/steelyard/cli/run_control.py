"""Runs a command so that signals end it in time: the first one cancels the calls, the second one exits at once.

Also here: the exit of the process, its limit of open files, its log, and the exit code of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import click
import msgspec

from steelyard.cli.main import FAILED_GATE, INTERRUPTED, TOO_MANY_ERRORS
from steelyard.cli.output import limit_writes, say, with_topic
from steelyard.daemon_threads import LoopThread
from steelyard.engine.base import CancellationToken
from steelyard.errors import ConfigurationError, RunCancelled, SteelyardError
from steelyard.journal.files import PARTIAL, read_json_object, write_json
from steelyard.report.gate import check_caveats, check_rule, parse_rule, parse_waivers
from steelyard.run.config import Gate, build_gate
from steelyard.run.result import Result
from steelyard.shutdown import (
    CALLS_SECONDS,
    CLOSE_SECONDS,
    EXIT_MESSAGE_SECONDS,
    EXIT_SECONDS,
    JOURNAL_SECONDS,
    POLL_SECONDS,
    SAME_SIGNAL_SECONDS,
)
from steelyard.stats.errors import error_rows
from steelyard.stats.formatting import safe_text, without_commands
from steelyard.stats.metrics import Metrics, figures
from steelyard.subprocesses import REAPER, kill_all


class Outcome(Protocol):
    """What a run or a sweep returns."""

    @property
    def complete(self) -> bool: ...


T = TypeVar("T", bound=Outcome)


class Ending(msgspec.Struct, Generic[T], frozen=True):
    """How a run ended: its result if it has one, and the exit code for the signal that stopped it, 0 if none did."""

    result: T | None
    signal_code: int


class _Signals:
    """Cancels a token at the first signal, exits at the second.

    A handler may interrupt any line of the main thread, another handler included. So it takes no lock, starts no
    thread and writes nothing that could block; what there is to say, the main thread says in `report`.
    """

    def __init__(self, token: CancellationToken, resume_with: str) -> None:
        self._token = token
        self._quit_message = (
            f"steelyard: Quit immediately; resume with: {without_commands(safe_text(resume_with))}\n".encode(
                "utf-8", "replace"
            )
        )
        self._taken: list[tuple[float, int]] = []
        """When each signal came, and its number. Appending is one step: two handlers agree on which one was first."""
        self._reported = False
        self.run_is_complete = False
        """Whether the run was complete, whatever signal came: the process goes on."""

    def __call__(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's signature
        now = time.monotonic()
        self._taken.append((now, number))
        since, first = self._taken[0]
        self._token.cancel(signal.Signals(first).name)
        limit_writes()
        if now - since > SAME_SIGNAL_SECONDS:
            _write_if_read(self._quit_message)
            exit_now(self.code)

    @property
    def code(self) -> int:
        """The exit code for the first signal; 0 when none has come."""
        return 128 + self._taken[0][1] if self._taken else 0

    @property
    def is_late(self) -> bool:
        """Whether an interrupted run should have ended by now."""
        return bool(self._taken) and time.monotonic() > self._taken[0][0] + CALLS_SECONDS + CLOSE_SECONDS

    def report(self) -> None:
        """Say once that a signal has come."""
        if self._reported or not self._taken:
            return
        self._reported = True
        first = signal.Signals(self._taken[0][1])
        if self.run_is_complete:
            say(f"{first.name} came when the run was already complete; nothing was cancelled", over_bar=True)
            return
        cause, again = ("", "Press Ctrl-C again") if first == signal.SIGINT else (f" ({first.name})", "Send it again")
        say(f"Interrupted{cause}: cancelling calls in flight. {again} to quit immediately.", over_bar=True)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals, and have the reaper kill this process if it does not end in time after one.

        The reaper reads of a signal in its pipe, written by C code that needs no GIL. After a run that a signal ended,
        all of it stays until the process has ended; otherwise the handlers from before are restored.
        """
        before = {number: signal.signal(number, self) for number in _stop_signals()}
        pipe, wakeup = REAPER.start(), -1
        if pipe is not None:
            wakeup = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        _handled_here[:] = before
        _reset_signals_in_forks()
        try:
            yield
        finally:
            if self.run_is_complete or not self._taken:
                _handled_here.clear()
                if pipe is not None:
                    signal.set_wakeup_fd(wakeup)
                    REAPER.calm()
                for number, handler in before.items():
                    signal.signal(number, handler)


_handled_here: list[signal.Signals] = []
"""The signals that have handlers of ours."""


@cache
def _reset_signals_in_forks() -> None:
    """Have forked processes, such as a pool's workers, end by signals: their handlers would be copies of ours.

    Their signals would also reach the reaper, which would take them for the runner's.
    """
    os.register_at_fork(after_in_child=_reset_signals)


def _reset_signals() -> None:
    if _handled_here:
        signal.set_wakeup_fd(-1)
        for number in _handled_here:
            signal.signal(number, signal.SIG_DFL)


def _write_if_read(message: bytes) -> None:
    """Write to stderr from a signal handler, unless that could block: a full pipe, a terminal that was stopped."""
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, message)


def _stop_signals() -> Iterator[signal.Signals]:
    """Yield the signals that stop a run; SIGHUP only where it is not ignored, as under nohup."""
    yield signal.SIGINT
    yield signal.SIGTERM
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        yield signal.SIGHUP


def run_interruptibly(
    start: Callable[[], Coroutine[Any, Any, T]],
    resume_with: str,
    *,
    token: CancellationToken,
    read_partial: Callable[[str | None], T | None],
) -> Ending[T]:
    """Run to the end or to the first signal; nothing that a target does keeps the process alive after that.

    A signal cancels the `token`; `read_partial` returns the partial result, given the reason, of a run whose event loop
    is stuck.
    """
    signals = _Signals(token, resume_with)
    # What was imported stays: a garbage collection that visits all of it would stop the event loop for 20 ms.
    gc.freeze()
    with signals.installed():
        running = LoopThread(start(), loop_factory())
        while not running.wait(POLL_SECONDS):
            signals.report()
            if signals.is_late:
                say("a call does not end when it is cancelled; exiting without it", over_bar=True)
                return Ending(_read_in_time(read_partial, token.reason), signals.code)
        try:
            result = running.result()
            signals.run_is_complete = result.complete
            signals.report()
            return Ending(result, signals.code)
        except KeyboardInterrupt as error:  # the suite's own code raised it; what finished is in partial.json
            reason = str(error) or "KeyboardInterrupt"
            say(f"interrupted: {reason}")
            return Ending(_read_in_time(read_partial, reason), signals.code or INTERRUPTED)
        except RunCancelled as error:
            say(str(error))
            return Ending(None, signals.code)


def _read_in_time(read_partial: Callable[[str | None], T | None], reason: str | None) -> T | None:
    """Return the partial result; None if reading it takes longer than there is time."""
    found: list[T | None] = []

    def read() -> None:
        with suppress(SteelyardError):  # no record yet, or none that can be read
            found.append(read_partial(reason))

    reader = threading.Thread(target=read, name="steelyard-partial-result", daemon=True)
    reader.start()
    reader.join(JOURNAL_SECONDS)
    return found[0] if found else None


def partial_result(path: Path, reason: str | None) -> Result:
    """Read the result of a run that could not write it itself from its journal; also writes partial.json."""
    result = Result.load(path)
    result.typed_metrics.stopped = reason
    if (read_json_object(path / PARTIAL) or {}).get("stopped") != reason:  # the run itself could tell more
        write_json(path / PARTIAL, result.typed_metrics)
    return result


def exit_now(code: int) -> NoReturn:
    """End the process and the programs it started; does not wait for threads or for unread output."""
    _end_children()
    os._exit(code)


def exit_in_time(code: int) -> NoReturn:
    """Exit as Python does, so that exit hooks run and pools close; what does not end within seconds is abandoned."""
    late, reported = threading.Event(), threading.Event()
    # Both are started here: from Python 3.12 on no thread can be started once the exit has begun.
    threading.Thread(target=_report_late, args=(late, reported), name="steelyard-late", daemon=True).start()
    threading.Thread(target=_exit_late, args=(code, late, reported), name="steelyard-exit", daemon=True).start()
    sys.exit(code)


def _report_late(late: threading.Event, reported: threading.Event) -> None:
    late.wait()
    say("threads started by the suite are still running; exiting without them")
    reported.set()


def _exit_late(code: int, late: threading.Event, reported: threading.Event) -> None:
    time.sleep(EXIT_SECONDS)
    late.set()
    reported.wait(EXIT_MESSAGE_SECONDS)  # the pipe may be full, and nobody reading it
    exit_now(code)


def _end_children() -> None:
    """End what would outlive this process: programs have their own session, and workers of a pool wait forever."""
    kill_all()
    if "multiprocessing.process" in sys.modules:
        # Not imported here: a signal handler must not wait for the lock of an import.
        for child in sys.modules["multiprocessing.process"].active_children():
            child.kill()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory where it is installed: a choice of the command line, never made at import."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


log = logging.getLogger("steelyard")

_SPARE = 64
"""Files that a run has open besides its calls: the journal, the suite, the event loop, libraries."""
_PIPES = 4
"""Files that a call of a program may need; a connection needs one."""
SERVER = 65_536
"""Files that a server asks for, which cannot know how many clients will connect."""
_MACOS_LIMIT = 10_240
"""What macOS always grants; it refuses more even where it reports no limit."""


def allow_calls(calls: int) -> None:
    """Raise the limit of open files for this many calls at once; warn when the system's hard limit is too low."""
    limit = raise_limit(calls * _PIPES + _SPARE)
    if limit is not None and limit < calls + _SPARE:
        log.warning(
            "%s calls at once need about %s open files, and this process may have %s (ulimit -n):"
            " calls beyond that will fail",
            *(f"{number:,}" for number in (calls, calls + _SPARE, limit)),
        )


def raise_limit(wanted: int) -> int | None:
    """Raise the limit of open files towards `wanted`, and return what it is now; None when unlimited."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    for aim in (wanted, min(wanted, _MACOS_LIMIT)):
        new = aim if hard == resource.RLIM_INFINITY else min(aim, hard)
        if new > soft:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
                return new
    return soft


class _Handler(logging.Handler):
    """Writes each message to stderr, where a progress bar may be."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        say(f"{level}{self.format(record)}", over_bar=True)


def log_to_stderr(*, quiet: bool, verbose: bool) -> None:
    """Show the library's log: notices by default, only errors when quiet, everything when verbose."""
    log = logging.getLogger("steelyard")
    log.handlers[:] = [_Handler()]
    log.propagate = False
    log.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)


def with_flags(gate: Gate, allow: Sequence[str] = (), **flags: float | None) -> Gate:
    """Return the suite's gate, overridden by the flags of the command line."""
    parse_waivers(allow)
    allowed = [*gate.allow, *allow]
    given = {name: value for name, value in flags.items() if value is not None}
    return build_gate({**msgspec.structs.asdict(gate), "allow": allowed, **given})


def verdict_code(metrics: Metrics, gate: Gate, *, remedy: str, of: str | None = None) -> int:
    """Return the exit code of a complete run, and print all that is broken; too many errors override a failed gate.

    `remedy` is printed with the errors. `of` is the variant of a matrix that the run is.
    """
    label = "" if of is None else f"{safe_text(of)}: "
    code = 0
    if gate.min_pass_rate is not None:
        passed = metrics.pass_rate
        if passed is None or passed < gate.min_pass_rate:
            shown = "unknown: nothing was scored" if passed is None else f"{passed:.1%}"
            say(f"{label}pass rate {shown}, below {gate.min_pass_rate:.1%} ({_set_by('min_pass_rate')})", bad=True)
            code = FAILED_GATE
    code = _check_rules(metrics, gate, label) or code
    # For a gate, an answer that could not be scored is no better than a missing one.
    rate = metrics.failure_rate or 0.0
    if rate > gate.max_error_rate:
        kind = "error rate, scoring errors included," if metrics.scoring_errors else "error rate"
        by = _set_by("max_error_rate") if gate.max_error_rate else "the default of --max-error-rate"
        message = f"{label}{kind} {rate:.1%} is above {gate.max_error_rate:.1%} ({by}); {remedy}"
        say(with_topic(message, errors_topic(metrics)), bad=True)
        code = TOO_MANY_ERRORS
    return code


_TOPICS = {
    "401 not authorised": "unauthorized",
    "403 forbidden": "unauthorized",
    "404 not found": "not-found",
    "429 rate limited": "rate-limited",
    "500 server error": "retries",
    "502 bad gateway": "retries",
    "503 unavailable": "retries",
    "504 gateway timeout": "retries",
    "timeout": "timeout",
    "cannot connect": "connection",
    "cannot resolve host": "connection",
    "connection refused": "connection",
    "connection lost": "connection",
    "certificate refused": "certificate",
}
"""The sections of docs/troubleshooting.md about kinds of errors."""


def errors_topic(metrics: Metrics) -> str:
    """The section about the kind that most errors of a run are of; the general one where there is none."""
    rows = error_rows(metrics)
    if not rows:
        return "could-not-score"
    most = rows[0]
    return _TOPICS.get(most.kind, "errors") if 2 * most.number > sum(row.number for row in rows) else "errors"


def _set_by(threshold: str) -> str:
    """What set a threshold of the gate: its flag where that was given, else the suite."""
    given = click.get_current_context().params.get(threshold) is not None
    return f"--{threshold.replace('_', '-')}" if given else f"gate.{threshold}"


def _check_rules(metrics: Metrics, gate: Gate, label: str) -> int:
    """Return the exit code of the rules of the suite, and print each one that fails."""
    known = figures(metrics)
    failed = []
    for rule in gate.rules:
        try:
            checked = check_rule(parse_rule(rule), metrics, known, gate.allow)
        except ConfigurationError as error:  # a figure that this run does not have: the run is already done
            failed.append(f"{rule}: {error}")
        else:
            failed += [] if checked.ok else [f"{rule}: {checked.reason}"]
    # How many answers may be without a score was already decided, by max_error_rate.
    rules, allowed = [parse_rule(rule) for rule in gate.rules], {*gate.allow, "scoring-errors"}
    caveats, _ = check_caveats(metrics, rules, allowed, of_quality=gate.min_pass_rate is not None)
    failed += [f"{caveat.rule}: {caveat.reason}" for caveat in caveats if not caveat.ok]
    for line in failed:
        say(f"{label}gate: {safe_text(line)}", bad=True)
    return FAILED_GATE if failed else 0
