"""Where words go: results to stdout, everything else to stderr. A reader that went away is no error."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO

import click

from steelyard.errors import JournalError


def accept_any_text() -> None:
    """Let a stream that cannot write a character show a stand-in: a result is not lost over a dash."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def show(text: str) -> None:
    """Print a result. Whoever read it may have gone (`| head`): what remains to be done is done all the same."""
    try:
        click.echo(text)
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        discard(sys.stdout)
        raise JournalError(error.errno, f"cannot write the result to stdout: {error.strerror}") from error


def show_json(value: Any) -> None:
    """Print a result as JSON, for another program to read."""
    import msgspec

    show(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def say(text: str) -> None:
    """Say something to the person at the terminal, in words that cannot steer it."""
    from steelyard.stats.wording import safe_text

    lines = "\n".join(safe_text(line) for line in text.split("\n"))
    with contextlib.suppress(OSError, ValueError):  # nobody listens: that must not end a run
        click.echo(f"steelyard: {lines}", err=True)


def clear_bar() -> None:
    """Take a live bar, and the terminal's own `^C`, off the screen, so that what is said next stands alone."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            sys.stderr.write("\r\x1b[J")
            sys.stderr.flush()


def discard(stream: TextIO) -> None:
    """Send what is still in a stream's buffer nowhere, so that the interpreter does not complain at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
