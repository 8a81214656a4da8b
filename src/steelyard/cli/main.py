"""The `steelyard` command: says at once what needs no command, runs all others, and ends in an exit code."""

from __future__ import annotations

import os
import sys

from steelyard._version import __version__

TYPE_CHECKING = False  # `typing` and click would be most of what `steelyard --help` waits for
if TYPE_CHECKING:
    from typing import NoReturn, TextIO

FAILED_GATE, REFUSED, BROKEN, TOO_MANY_ERRORS = 1, 2, 3, 4
INTERRUPTED = 130
_BY_A_SIGNAL = 128
"""Exit codes above it are a signal's number more."""


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. With arguments it is part of another program, and only raises SystemExit."""
    if _shown_at_once(sys.argv[1:] if args is None else args):
        sys.exit(0)
    from steelyard.cli.group import run
    from steelyard.cli.output import (
        accept_any_text,
        allow_slow_writes,
        flush_in_time,
        limit_writes,
        open_missing_streams,
    )

    open_missing_streams()
    accept_any_text()
    allow_slow_writes()
    try:
        code = _flushed(run(args))
    except KeyboardInterrupt:  # while the result went to a pipe that nobody reads
        code = INTERRUPTED
    from steelyard.cli.run_control import exit_in_time, exit_now

    if code > _BY_A_SIGNAL:
        # A thread pool of the user's own is joined at exit; after Ctrl-C nobody waits for that.
        limit_writes()
        flush_in_time()
        exit_now(code)
    if args is None:
        exit_in_time(code)
    sys.exit(code)


def _shown_at_once(args: list[str]) -> bool:
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


ABOUT = "Steelyard evaluates models and agents: how good their answers are, and how fast they came."
EXIT_CODES = """\
Exit codes:
  0            complete, errors within --max-error-rate, gates met
  1            complete, below a gate, or a judge is not trusted
  2            usage, configuration or a refusal; nothing was called
  3            internal error, or the disk failed
  4            more errors than allowed, or stopped early; resumable
  129/130/143  interrupted; resumable"""
COMMANDS = {
    "run": "Evaluate a suite, or resume an unfinished run.",
    "score": "Score stored answers again; no calls to the target.",
    "report": "Show the result of a run.",
    "ls": "List the runs and sweeps in a folder.",
    "compare": "Compare runs with a baseline, case by case.",
    "view": "Show runs in a browser, live while they are running.",
    "gate": "Check whether a run is good enough, for CI.",
    "check": "Check the tasks of an agent's suite: solutions pass, untouched workspaces fail.",
    "label": "Label answers of a run by hand, without seeing the verdicts.",
    "calibrate": "Compare a run's judges with people's labels.",
    "import": "Import a log of inspect_ai or lm_eval as a run.",
    "cache": "Show or clear a cache of answers.",
    "sweep": "Load-test a suite at several loads, and recommend one.",
    "init": "Write a small suite, its cases and a CI workflow to start from.",
    "plugins": "List the names that suites and commands can use, and where they come from.",
    "explain": "Explain a message: what it means and what to do.",
    "schema": "Print the JSON Schema of a suite file, of metrics.json or of a record.",
    "mock": "Serve the APIs of OpenAI, Anthropic, Gemini and Bedrock with a simulated model.",
}
WIDEST = 100
_NARROWEST = 50
_OPTIONS = {"--version": "Show the version and exit.", "-h, --help": "Show this message and exit."}


def front_page(columns: int) -> str:
    """The help of the command as a whole, for a terminal of that many columns."""
    width = max(min(columns, WIDEST) - 2, _NARROWEST)
    lines = ["Usage: steelyard [OPTIONS] COMMAND [ARGS]...", ""]
    lines += [f"  {line}" for line in _wrapped(ABOUT, width - 2)]
    lines += ["", *(f"  {line}" for line in EXIT_CODES.split("\n"))]
    lines += ["", "Options:", *_listed(_OPTIONS, width), "", "Commands:", *_listed(COMMANDS, width)]
    return "\n".join(lines) + "\n"


def terminal_columns(stream: TextIO | None = None) -> int:
    """How wide the terminal is that a stream writes to, by default stdout; 80 where that cannot be known."""
    stream = stream or sys.__stdout__
    try:
        columns = int(os.environ.get("COLUMNS", "0"))
    except ValueError:
        columns = 0
    if columns <= 0:
        try:
            columns = os.get_terminal_size(stream.fileno()).columns if stream is not None else 0
        except (OSError, ValueError):
            columns = 0
    return columns if columns > 0 else 80


def _listed(items: dict[str, str], width: int) -> list[str]:
    """Each name with its text beside it."""
    column = max(map(len, items)) + 2
    lines = []
    for name, text in items.items():
        first, *more = _wrapped(text, width - column - 2)
        lines.append(f"  {name:<{column}}{first}")
        lines += [f"  {'':{column}}{line}" for line in more]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".lstrip()
        if len(joined) > width and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = joined
    return lines
