"""The `steelyard` command: says at once what needs no command, runs all others, and ends in an exit code."""

from __future__ import annotations

import os
import sys

from steelyard._version import __version__
from steelyard.cli.front_page import front_page, terminal_columns

TYPE_CHECKING = False  # `typing` and click would be most of what `steelyard --help` waits for
if TYPE_CHECKING:
    from typing import NoReturn

FAILED_GATE, REFUSED, BROKEN, TOO_MANY_ERRORS = 1, 2, 3, 4
INTERRUPTED = 130
_BY_A_SIGNAL = 128
"""Exit codes above it are a signal's number more."""


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. With arguments it is part of another program, and only raises SystemExit."""
    if _is_said(sys.argv[1:] if args is None else args):
        sys.exit(0)
    from steelyard.cli.group import run
    from steelyard.cli.output import accept_any_text, flush_in_time, hurry, open_missing_streams, take_your_time

    open_missing_streams()
    accept_any_text()
    take_your_time()
    try:
        code = _flushed(run(args))
    except KeyboardInterrupt:  # while the result went to a pipe that nobody reads
        code = INTERRUPTED
    from steelyard.cli.leaving import leave, leave_in_time

    if code > _BY_A_SIGNAL:
        # A thread pool of the user's own is joined at exit; whoever pressed Ctrl-C does not wait for that.
        hurry()
        flush_in_time()
        leave(code)
    if args is None:
        leave_in_time(code)
    sys.exit(code)


def _is_said(args: list[str]) -> bool:
    """Show the front page or the version if that is all that is wanted; whether it is done."""
    if args in (["--help"], ["-h"]):
        text = front_page(terminal_columns())
    elif args == ["--version"]:
        text = f"steelyard, version {__version__}\n"
    else:
        return False
    if "_STEELYARD_COMPLETE" in os.environ:  # a shell asks how the words go on
        return False
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (AttributeError, OSError, ValueError):
        return False  # closed, full or gone: the long way knows what to do about that
    return True


def _flushed(code: int) -> int:
    """Write what is still buffered, unless a signal has come: the exit code, which a full disk changes."""
    if code > _BY_A_SIGNAL:
        return code
    try:
        sys.stdout.flush()
    except OSError:
        from steelyard.cli.output import discard

        discard(sys.stdout)
        return code or BROKEN
    return code
