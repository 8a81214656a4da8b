"""The `steelyard` command: finds the command that was asked for, and turns every ending into an exit code."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

import click

from steelyard._version import __version__
from steelyard.cli.output import (
    accept_any_text,
    discard,
    flush_in_time,
    hurry,
    open_missing_streams,
    say,
    take_your_time,
)

FAILED_GATE, REFUSED, BROKEN, TOO_MANY_ERRORS = 1, 2, 3, 4
INTERRUPTED = 130
_BY_A_SIGNAL = 128
"""Exit codes above it are a signal's number more."""

_COMMANDS = {
    "run": "Evaluate a suite; resumes by itself.",
    "score": "Weigh stored answers again; no calls to the target.",
    "report": "Show the result of a run.",
    "ls": "List the runs in a folder.",
    "calibrate": "Compare a run's judges with people's labels: may they be trusted?",
    "cache": "Look at a cache of answers, or empty it.",
}


class _LazyGroup(click.Group):
    """Knows its commands by name and one line of help, and imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"steelyard.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
            from steelyard.errors import suggestion

            ctx.fail(f"no command is named {args[0]!r}; {suggestion(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="steelyard")
def group() -> None:
    """Steelyard weighs models and agents: how good their answers are, and how fast they came.

    \b
    Exit codes:
      0            complete, errors within --max-error-rate, gates met
      1            complete, below a gate, or a judge is not trusted
      2            usage, configuration or a refusal; nothing was called
      3            internal error, or the disk failed
      4            more errors than allowed, or stopped early; resumable
      129/130/143  interrupted; resumable
    """


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. With arguments it is part of another program, and only raises SystemExit."""
    open_missing_streams()
    accept_any_text()
    take_your_time()
    try:
        code = _flushed(_run(args))
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


def _flushed(code: int) -> int:
    """Write what is still buffered, unless a signal has come: the exit code, which a full disk changes."""
    if code > _BY_A_SIGNAL:
        return code
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)
        return code or BROKEN
    return code


def _run(args: list[str] | None) -> int:
    try:
        code = group.main(args=args, prog_name="steelyard", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return REFUSED
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last stop: each kind of failure has its own exit code
        return _exit_code(error)


def _exit_code(error: Exception) -> int:
    from steelyard.errors import ConfigurationError, JournalError, RunCancelled, RunRefused

    if isinstance(error, (ConfigurationError, RunRefused)):
        say(str(error))
        return REFUSED
    if isinstance(error, RunCancelled):
        say(str(error))
        return INTERRUPTED
    if isinstance(error, JournalError):
        say(f"{error.strerror}; everything before it is intact and can be resumed")
        return BROKEN
    import traceback

    traceback.print_exception(error)
    say("internal error; what was recorded is intact and can be resumed")
    return BROKEN
