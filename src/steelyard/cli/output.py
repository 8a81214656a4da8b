"""Where words go: results to stdout, everything else to stderr. A reader that went away is no error."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

import click

from steelyard.errors import ConfigurationError, JournalError

# What steers a terminal and stands raw in JSON: DEL and C1, bidi marks, the two separators that break lines.
_STEERING = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_CLEAR_BAR = "\r\x1b[J"
_PATIENCE = 0.3
"""Seconds that a reader gets, once in a hurry."""
_STUCK_AFTER = 0.05
"""Seconds more, before what is said next goes unsaid."""

_in_a_hurry = threading.Event()
_writing: dict[str, _Writing] = {}
"""What was last written to a stream, once in a hurry."""


def open_missing_streams() -> None:
    """Let streams that were closed lead nowhere: the next file to be opened would otherwise become stdout."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def accept_any_text() -> None:
    """Let a stream that cannot write a character show a stand-in: a result is not lost over a dash."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def hurry() -> None:
    """From here on wait for no reader: a full pipe that nobody empties must not hold up the exit after a signal."""
    _in_a_hurry.set()


def take_your_time() -> None:
    """Wait for readers again: for the next command in the same process."""
    _in_a_hurry.clear()


def show(text: str) -> None:
    """Print a result. Whoever read it may have gone (`| head`): what remains to be done is done all the same."""
    if _in_a_hurry.is_set():
        _in_time("stdout", lambda: click.echo(text))
        return
    try:
        click.echo(text)
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        discard(sys.stdout)
        raise JournalError(error.errno, f"cannot write the result to stdout: {error.strerror}") from error


def show_json(value: Any) -> None:
    """Print a result as JSON, for another program to read; what could steer a terminal is escaped."""
    show(_STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", json_text(value)))


def json_text(value: Any) -> str:
    """The value as JSON, indented."""
    import msgspec

    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    except UnicodeEncodeError:  # a path that is no text: escaped, so that Python reads it back as it was
        import json

        return json.dumps(msgspec.to_builtins(value), indent=2)


def say(text: str, *, over_bar: bool = False) -> None:
    """Say something to the person at the terminal, in words that cannot steer it; if need be in place of a live bar."""
    from steelyard.stats.formatting import safe_text

    lines = "\n".join(safe_text(line) for line in text.split("\n"))

    def speak() -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody listens: that must not end a run
            # The terminal's own `^C` goes with the bar, so that what is said stands alone.
            clear = _CLEAR_BAR if over_bar and sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else ""
            click.echo(f"{clear}steelyard: {lines}", err=True)

    _in_time("stderr", speak) if _in_a_hurry.is_set() else speak()


def flush_in_time() -> None:
    """Write what is still in the streams' buffers, as far as somebody reads it."""
    _in_time("stdout", lambda: sys.stdout.flush())
    _in_time("stderr", lambda: sys.stderr.flush())


class _Writing:
    """Something being written from a thread.

    Looked at without a lock: a signal may come in the middle of a look, and its handler looks as well.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._ended = False
        threading.Thread(target=self._run, name="steelyard-writing", daemon=True).start()

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):
                self._write()
        finally:
            self._ended = True

    def ended(self, within: float) -> bool:
        """Whether it is written, waiting for that at most so long."""
        deadline = time.monotonic() + within
        while not self._ended and time.monotonic() < deadline:
            time.sleep(0.002)
        return self._ended


def _in_time(stream: str, write: Callable[[], None]) -> None:
    """Write, and wait for that a moment only; do not write where something written before is stuck."""
    before = _writing.get(stream)
    if before is None or before.ended(_STUCK_AFTER):
        _writing[stream] = _Writing(write)
        _writing[stream].ended(_PATIENCE)


def discard(stream: TextIO) -> None:
    """Send what is still in a stream's buffer nowhere, so that the interpreter does not complain at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


_NOT_A_DISK_FAILURE = (errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EROFS, errno.EPERM)


def write_text(path: Path, text: str) -> None:
    """Write a file in one step."""
    write_pieces(path, [text])


def write_pieces(path: Path, pieces: Iterable[str | bytes]) -> None:
    """Write a file that takes its place once it is whole.

    A place that cannot be written is the user's mistake, a full disk is not.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with draft.open("wb") as file:
                for piece in pieces:
                    file.write(piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace"))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        if error.errno in _NOT_A_DISK_FAILURE:
            raise ConfigurationError(message) from error
        raise JournalError(error.errno, message) from error
