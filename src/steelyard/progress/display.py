"""Live progress of a run, with a notice when nothing comes back."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TextIO

import msgspec
from tqdm import tqdm

from steelyard.errors import ConfigurationError
from steelyard.protocols import InFlight
from steelyard.stats.figures import ProgressSpec, parse_progress_bar_stats
from steelyard.stats.formatting import (
    format_rate,
    join,
    safe_text,
    segments,
    silence_notice,
    trim,
    without_commands,
)
from steelyard.stats.running import RunningStats

log = logging.getLogger("steelyard")


class LiveDisplay:
    """Draws how far a run is; to be refreshed by a ticker a few times a second, never per response.

    `initial` is what earlier launches did: it counts as done but not in the rate. When nothing was finished for
    `silence_after` seconds, the display says what is being waited for. Of a run that goes on for a `duration` the total
    is not known, and is put at what it will be if the pace stays as it is.
    """

    def __init__(
        self,
        *,
        description: str,
        total: int,
        initial: int,
        duration: float | None = None,
        spec: Mapping[str, Any] | ProgressSpec | None = None,
        mode: Mode = "auto",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        silence_after: float = 60.0,
    ) -> None:
        if mode not in MODES:
            raise ConfigurationError(f"progress mode must be one of {', '.join(MODES)}, got {mode!r}")
        self._description = without_commands(safe_text(description))
        self._total = total
        self._duration = duration
        self._initial = initial
        self._spec = parse_progress_bar_stats(spec)
        self._clock = clock
        self._silence_after = silence_after
        self._started = clock()
        self._done = initial
        self._grew_at = self._started
        self._stream = sys.stderr if stream is None else stream
        self._output = choose_output(mode, self._stream)
        self._log_above = _LogAbove(self._output) if isinstance(self._output, TerminalBar) else None
        if self._log_above is not None:
            log.handlers.insert(0, self._log_above)  # before those that write

    def refresh(
        self,
        done: int,
        stats: RunningStats,
        in_flight: InFlight,
        parallelism: int,
        outcomes: Mapping[str, str] | None = None,
    ) -> None:
        """Show the state of this moment; `outcomes` are the pass rate and the cost so far, as they are to be shown."""
        if self._output is None:
            return
        now = self._clock()
        if done > self._done:
            self._done, self._grew_at = done, now
        quiet = now - self._grew_at
        silence = silence_notice(quiet, in_flight) if quiet >= self._silence_after else None
        waiting = _in_flight(in_flight.count, parallelism)
        self._output.draw(self._frame(done, stats, now, outcomes, in_flight=waiting, silence=silence))

    def close(self, done: int, stats: RunningStats, outcomes: Mapping[str, str] | None = None) -> None:
        """Show the final state and give the screen back; later calls do nothing."""
        if self._output is not None:
            self._output.close(self._frame(done, stats, self._clock(), outcomes))
            self._output = None
        if self._log_above is not None:
            log.removeHandler(self._log_above)
            self._log_above = None

    def _frame(
        self,
        done: int,
        stats: RunningStats,
        now: float,
        outcomes: Mapping[str, str] | None,
        *,
        in_flight: str = "",
        silence: str | None = None,
    ) -> Frame:
        return Frame(
            description=self._description,
            done=done,
            total=self._total if self._duration is None else _outlook(done, now - self._started, self._duration),
            initial=self._initial,
            elapsed=now - self._started,
            segments=segments(self._spec, stats.snapshot(self._spec), outcomes),
            in_flight=in_flight,
            silence=silence,
        )


def _outlook(done: int, elapsed: float, duration: float) -> int:
    """How many there will be when the time is up, at the pace so far."""
    return done if elapsed >= duration else round(done * duration / max(elapsed, 1e-3))


def _in_flight(count: int, parallelism: int) -> str:
    """How many are being waited for, and of how many where that is fewer."""
    return f"{count:,} in flight" if count >= parallelism else f"{count:,} of {parallelism:,} in flight"


Mode = Literal["auto", "bar", "lines", "off"]
MODES: tuple[Mode, ...] = ("auto", "bar", "lines", "off")

_LINE_EVERY = 5.0
_SILENCE_EVERY = 60.0
_DEFAULT_COLUMNS = 80
_CLEAR_LINE = "\x1b[K"
# Delete every line from here down. "Erase below" (J) would do the same, but at the top of the screen tmux keeps
# what J erases in its history.
_CLEAR_BELOW = "\r\x1b[999M"
_UP = "\x1b[A"
_PLAIN = str.maketrans({"·": "|", "\N{EN DASH}": "-", "…": "~", "µ": "u", "�": "?"})


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be seen at one moment."""

    description: str
    done: int
    total: int
    initial: int
    elapsed: float
    segments: list[str]
    in_flight: str = ""
    silence: str | None = None

    @property
    def rate(self) -> str:
        """How fast this launch goes: what an earlier one did is not its merit."""
        return format_rate(self.done - self.initial, self.elapsed)


class ProgressOutput(Protocol):
    """Something that shows frames: a terminal bar, lines, a notebook widget."""

    def draw(self, frame: Frame) -> None: ...
    def close(self, frame: Frame) -> None: ...


def choose_output(mode: Mode, stream: TextIO) -> ProgressOutput | None:
    """Return the progress output for a mode; `auto` takes the best one that the stream can show."""
    if mode == "off":
        return None
    if mode in ("auto", "bar") and in_notebook():
        return NotebookBar()
    if mode == "bar" or (mode == "auto" and stream.isatty() and os.environ.get("TERM") != "dumb"):
        return TerminalBar(stream)
    return PlainLines(stream)


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel that can show widgets. Imports nothing where IPython is not loaded."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    if shell is None or "IPKernelApp" not in shell.config:
        return False
    try:
        import ipywidgets  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        return False
    return True


class _Stream:
    """A stream that may refuse characters, or go away: neither may end a run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self.unicode = self._encodes("█·\N{EN DASH}…")

    def _encodes(self, text: str) -> bool:
        try:
            text.encode(self._encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def write(self, text: str) -> None:
        if self._stream is None:
            return
        if not self._encodes(text):
            text = text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone, or the stream was closed
            self._stream = None

    def columns(self) -> int:
        """How wide the terminal is now."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns if self._stream else 0
        except (OSError, ValueError):  # not a terminal, or no file at all
            columns = 0
        return columns or _DEFAULT_COLUMNS


class TerminalBar:
    """Two lines, redrawn in place: tqdm's bar, and the figures below it.

    The cursor rests at the start of the first line. Terminals that reflow on a resize keep it there, so that
    clearing from the cursor down removes whatever the lines were wrapped into.
    """

    def __init__(self, stream: TextIO) -> None:
        self._output = _Stream(stream)
        self._columns = 0
        self._height = 0
        self.lock = threading.RLock()
        """Held while it is drawn, and by what writes a line above it."""

    def draw(self, frame: Frame) -> None:
        with self.lock:
            self._draw(frame)

    def clear(self) -> None:
        """Take the bar off the screen until it is drawn again."""
        with self.lock:
            if self._height:
                self._height = 0
                self._output.write(_CLEAR_BELOW)

    def _draw(self, frame: Frame) -> None:
        columns = self._output.columns()
        # The last column stays free: a character there makes some terminals wrap.
        lines = [self._bar(frame, columns - 1)]
        if frame.silence is not None:
            lines.append(trim(frame.silence, columns - 1))
        elif frame.segments:
            lines.append(join(frame.segments, columns - 1))
        clear = _CLEAR_BELOW if columns != self._columns or len(lines) != self._height else ""
        self._columns, self._height = columns, len(lines)
        drawn = f"{_CLEAR_LINE}\n".join(lines) + _CLEAR_LINE + "\r" + _UP * (len(lines) - 1)
        self._output.write(clear + drawn)

    def close(self, frame: Frame) -> None:
        """Leave the finished bar alone on its line, the cursor below."""
        bar = self._bar(frame, self._output.columns() - 1)
        with self.lock:
            self._output.write(_CLEAR_BELOW + bar + "\n")

    def _bar(self, frame: Frame, width: int) -> str:
        # The formatter alone: an instance would bring a lock, a monitor thread and the wall clock.
        waiting = f" {frame.in_flight}" if frame.in_flight else ""
        return tqdm.format_meter(
            n=frame.done,
            total=frame.total,
            elapsed=frame.elapsed,
            initial=frame.initial,
            ncols=width,
            prefix=trim(frame.description, max(width // 3, 8)),
            ascii=not self._output.unicode,
            bar_format="{desc} {percentage:3.0f}%|{bar}| "
            f"{frame.done:,}/{frame.total:,} [{{elapsed}}<{{remaining}}, {frame.rate}]{waiting}",
        )


class _LogAbove(logging.Handler):
    """While a bar is shown, clears it for each line of our log; the bar is drawn again below.

    The line is written by whatever handles the log; where nothing does, by Python's last resort, as without a bar.
    """

    def __init__(self, bar: TerminalBar) -> None:
        super().__init__()
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        last = logging.lastResort
        with self._bar.lock:
            self._bar.clear()
            if last is not None and record.levelno >= last.level and self._is_alone(record.name):
                last.handle(record)

    def _is_alone(self, name: str) -> bool:
        """Whether no other handler gets the records of this logger, and of several bars this is the last to clear."""
        if [handler for handler in log.handlers if isinstance(handler, _LogAbove)][-1:] != [self]:
            return False
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if not all(isinstance(handler, _LogAbove) for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


class PlainLines:
    """A line at most every five seconds, for logs: no control codes, nothing said twice."""

    def __init__(self, stream: TextIO) -> None:
        self._output = _Stream(stream)
        self._line_at: float | None = None
        self._line_done = -1
        self._silence_at: float | None = None

    def draw(self, frame: Frame) -> None:
        if frame.silence is None:
            self._silence_at = None
        elif self._silence_at is None or frame.elapsed - self._silence_at >= _SILENCE_EVERY:
            self._silence_at = frame.elapsed
            self._output.write(f"{frame.description} {frame.silence}\n")
        if self._line_at is None or frame.elapsed - self._line_at >= _LINE_EVERY:
            self._line(frame)

    def close(self, frame: Frame) -> None:
        self._line(frame)

    def _line(self, frame: Frame) -> None:
        if frame.done == self._line_done:
            return
        self._line_at, self._line_done = frame.elapsed, frame.done
        percent = f" {100 * frame.done // frame.total}%" if frame.total else ""
        start = f"{frame.description} {frame.done:,}/{frame.total:,}{percent} {frame.rate}"
        self._output.write(f"{start} {join(frame.segments)}".rstrip() + "\n")


class NotebookBar:
    """tqdm's widget, with the figures after the bar."""

    def __init__(self) -> None:
        self._bar: Any = None

    def draw(self, frame: Frame) -> None:
        if self._bar is None:
            self._bar = _notebook_bar(frame)
        self._bar.n = frame.done
        self._bar.set_postfix_str(frame.silence or join(frame.segments), refresh=False)
        self._bar.refresh()

    def close(self, frame: Frame) -> None:
        self.draw(frame)
        self._bar.close()


def _notebook_bar(frame: Frame) -> Any:
    from tqdm.notebook import tqdm_notebook

    class NotebookBar(tqdm_notebook):  # type: ignore[type-arg]  # generic in its stubs alone
        monitor_interval = 0  # no monitor thread: the bar is refreshed by a ticker

    bar = NotebookBar(total=frame.total, initial=frame.initial, unit="case", smoothing=0, file=sys.stdout)
    # Not given to the constructor, which shows it once without escaping HTML.
    bar.set_description_str(frame.description, refresh=False)
    return bar
