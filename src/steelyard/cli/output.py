"""Writes results to stdout and everything else to stderr. A reader that went away is no error."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import click

from steelyard.cli.main import terminal_columns
from steelyard.errors import JournalError
from steelyard.shutdown import BLOCKED_WRITE_SECONDS, WRITE_SECONDS

# What controls a terminal and is not escaped in JSON: DEL and C1, bidi marks, the two line separators.
_CONTROL = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_CLEAR_BAR = "\r\x1b[999M"  # as the bar itself is cleared: see progress/display.py

# What a summary and a gate print at the start of a line, or at its end, and its colour; nothing that a model wrote.
_PAINTED = (
    (re.compile(r"(?<=done, )complete$"), "green"),
    (re.compile(r"(?<=done, )not complete$"), "yellow"),
    (re.compile(r"^  passed +[\d.]+%"), "bold"),
    (re.compile(r"^  errors ++\S++ ++(?!0 of).*"), "red"),
    (re.compile(r"^  (?:scoring errors|cut off|stopped:|the client was the bottleneck).*"), "yellow"),
    (re.compile(r"^ok(?= {6}\S)"), "green"),
    (re.compile(r"^broken(?= {2}\S)"), "red"),
)

_limited = False
"""Whether writes may only take a moment: after a signal. A plain flag, as signal handlers set it."""
_last_writes: dict[str, _Write] = {}
"""The last limited write to each stream."""


def open_missing_streams() -> None:
    """Open closed standard streams on the null device: the next file to be opened would otherwise become stdout."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def accept_any_text() -> None:
    """Replace characters that a stream cannot encode, so that no result is lost over a dash."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def limit_writes() -> None:
    """Limit the time of each write from now on: a full pipe that nobody reads must not block the exit."""
    global _limited
    _limited = True


def allow_slow_writes() -> None:
    """Let writes take their time again: for the next command in the same process."""
    global _limited
    _limited = False


def show(text: str, *, in_colour: bool = False) -> None:
    """Print a result. A reader that has gone (`| head`) does not end the command; no CI system obeys what is in it.

    With `in_colour` the verdicts of a summary or a gate are coloured, where the terminal can and may show that.
    """
    from steelyard.stats.formatting import without_commands

    text = without_commands(text)
    coloured = in_colour and shows_colour(sys.stdout)
    if coloured:
        text = paint(text)
    if _limited:
        _write_in_time("stdout", lambda: click.echo(text, color=coloured or None))
        return
    try:
        click.echo(text, color=coloured or None)
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        discard(sys.stdout)
        raise JournalError(error.errno, f"cannot write the result to stdout: {error.strerror}") from error


def shows_colour(stream: TextIO) -> bool:
    """Whether text on a stream may be coloured: on a terminal, unless NO_COLOR is set; anywhere with FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str) -> str:
    """Colour the verdicts of a summary or a gate."""
    return "\n".join(map(_painted, text.split("\n")))


def _painted(line: str) -> str:
    for pattern, colour in _PAINTED:
        line = pattern.sub(lambda found, colour=colour: _style(found[0], colour), line)  # type: ignore[misc]
    return line


def _style(text: str, colour: str) -> str:
    return click.style(text, bold=True) if colour == "bold" else click.style(text, fg=colour)


def show_json(value: Any) -> None:
    """Print a result as JSON, for another program to read; control characters are escaped."""
    from steelyard.stats.formatting import json_without_commands

    show(json_without_commands(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json_text(value))))


def json_text(value: Any) -> str:
    """The value as JSON, indented."""
    import msgspec

    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    except UnicodeEncodeError:  # a path that is not valid text: escaped, so that Python reads it back unchanged
        import json

        return json.dumps(msgspec.to_builtins(value), indent=2)


def say(text: str, *, over_bar: bool = False, bad: bool = False, whole: bool = False) -> None:
    """Print a message to stderr, without control characters; with `over_bar` in place of a live progress bar.

    What is `bad`, such as a broken gate, is red where colour is shown. On a terminal, long lines are broken between
    words, unless the message is to stay `whole`, such as a command to copy.
    """
    from steelyard.stats.formatting import safe_text, without_commands

    lines = without_commands("\n".join(safe_text(line) for line in f"steelyard: {text}".split("\n")))

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it: that must not end a run
            # The terminal's own `^C` is cleared with the bar, so that the message has its line to itself.
            clear = _CLEAR_BAR if over_bar and sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else ""
            coloured = bad and shows_colour(sys.stderr)
            shown = lines if whole else fitted(lines, sys.stderr)
            click.echo(clear + (_style(shown, "red") if coloured else shown), err=True, color=coloured or None)

    _write_in_time("stderr", write) if _limited else write()


def fitted(text: str, stream: TextIO) -> str:
    """The text; where the stream is a terminal, with its long lines broken between words."""
    from steelyard.stats.formatting import wrap

    if not stream.isatty():
        return text
    columns = terminal_columns(stream)
    return "\n".join(wrap(line, columns) for line in text.split("\n"))


def with_topic(message: str, topic: str | None) -> str:
    """A message with a last line that names the section of docs/troubleshooting.md about it."""
    return message if topic is None else f"{message}\nMore: steelyard explain {topic}"


def flush_in_time() -> None:
    """Write what is still in the streams' buffers, as far as it is read in time."""
    _write_in_time("stdout", lambda: sys.stdout.flush())
    _write_in_time("stderr", lambda: sys.stderr.flush())


class _Write:
    """One write, made by a thread.

    Its state is read without a lock: a signal may come while it is read, and the handler reads it as well.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._ended = False
        threading.Thread(target=self._run, name="steelyard-write", daemon=True).start()

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):
                self._write()
        finally:
            self._ended = True

    def ended(self, within: float) -> bool:
        """Whether it has ended, waiting at most `within` seconds."""
        deadline = time.monotonic() + within
        while not self._ended and time.monotonic() < deadline:
            time.sleep(0.002)
        return self._ended


def _write_in_time(stream: str, write: Callable[[], None]) -> None:
    """Write, and wait only a moment for it; drop the write where an earlier one is still blocked."""
    before = _last_writes.get(stream)
    if before is None or before.ended(BLOCKED_WRITE_SECONDS):
        _last_writes[stream] = _Write(write)
        _last_writes[stream].ended(WRITE_SECONDS)


def discard(stream: TextIO) -> None:
    """Send what is still in a stream's buffer to the null device, so that the interpreter does not complain."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
