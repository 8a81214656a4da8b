"""All commands under one name: finds the one that was asked for, and gives every failure an exit code."""

from __future__ import annotations

import io
import sys
from importlib import import_module

import click

from steelyard._version import __version__
from steelyard.cli.main import ABOUT, BROKEN, COMMANDS, EXIT_CODES, INTERRUPTED, REFUSED, WIDEST
from steelyard.cli.output import fitted, say, with_topic
from steelyard.errors import SpeakFlags


class _LazyGroup(click.Group):
    """Knows its commands by name and one line of help, and imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"steelyard.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from steelyard.errors import suggestion

            ctx.fail(f"no command is named {args[0]!r}; {suggestion(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    help=f"{ABOUT}\n\n\b\n{EXIT_CODES}",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
)
@click.version_option(__version__, prog_name="steelyard")
def group() -> None:
    """The command as a whole; its help is the front page."""


def run(args: list[str] | None) -> int:
    """Run the command that these arguments name; its exit code."""
    with SpeakFlags():
        return _run(args)


def _run(args: list[str] | None) -> int:
    try:
        code = group.main(args=args, prog_name="steelyard", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        _show_usage_error(error)
        return REFUSED
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last stop: each kind of failure has its own exit code
        return _exit_code(error)


def _show_usage_error(error: click.ClickException) -> None:
    from steelyard.stats.formatting import without_commands

    if isinstance(error, click.NoSuchOption) and error.possibilities:
        error.possibilities[1:] = []  # click sorts them by name: the best match need not be the first
    shown = io.StringIO()
    error.show(shown)
    click.echo(fitted(without_commands(shown.getvalue()), sys.stderr), err=True, nl=False)


def _exit_code(error: Exception) -> int:
    from steelyard.errors import ConfigurationError, JournalError, RunCancelled, RunRefused, WorkersLost, topic_of

    if isinstance(error, (ConfigurationError, RunRefused)):
        say(with_topic(str(error), topic_of(error)))
        return REFUSED
    if isinstance(error, RunCancelled):
        say(str(error))
        return INTERRUPTED
    if isinstance(error, WorkersLost):
        resume = "what has finished is on disk, and the same command resumes the run"
        say(with_topic(f"{error}; {resume}", error.topic))
        return BROKEN
    if isinstance(error, JournalError):
        say(with_topic(f"{error.strerror}; everything before it is intact and can be resumed", error.topic))
        return BROKEN
    import traceback

    from steelyard.cache.store import StoreError
    from steelyard.disk import NotAFile

    if isinstance(error, NotAFile):
        say(f"{error.filename} {error.strerror}: remove it")
        return REFUSED

    if isinstance(error, StoreError):
        say(with_topic(f"the cache failed: {error}", error.topic))
        return REFUSED
    say("".join(traceback.format_exception(error)).rstrip())
    say(with_topic("internal error; what was recorded is intact and can be resumed", "internal-error"))
    return BROKEN
