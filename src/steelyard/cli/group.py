"""All commands under one name: finds the one that was asked for, and gives every failure an exit code."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from steelyard._version import __version__
from steelyard.cli.main import ABOUT, BROKEN, COMMANDS, EXIT_CODES, INTERRUPTED, REFUSED, WIDEST
from steelyard.cli.output import say, with_topic
from steelyard.errors import SpeakFlags


class CommandGroup(click.Group):
    """A command with commands of its own, which refuses any other name with the nearest."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in names:
            from steelyard.errors import suggestion

            ctx.fail(f"no command is named {args[0]!r}; {suggestion(args[0], names)}")
        return super().resolve_command(ctx, args)


class _LazyGroup(CommandGroup):
    """Knows its commands by name and one line of help, and imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"steelyard.cli.{cmd_name}").command
        return command

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
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return REFUSED
    except click.UsageError as error:
        say(_usage_error(error, sys.argv[1:] if args is None else args))
        return REFUSED
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last stop: each kind of failure has its own exit code
        return _exit_code(error)


def _usage_error(error: click.UsageError, args: list[str]) -> str:
    """What is wrong with a command line, and where its rules are, in the form of all our messages."""
    from steelyard.errors import topic_of

    topic = topic_of(error)
    if topic is not None:
        return with_topic(str(error), topic)
    if error.ctx is not None:
        command = error.ctx.command_path
    else:  # an option without its value
        command = " ".join(["steelyard", *(word for word in args[:1] if word in COMMANDS)])
    return f"{_said(error)}\nMore: {command} --help"


def _said(error: click.UsageError) -> str:
    message = error.message.rstrip(".")
    if isinstance(error, click.MissingParameter) and error.param is not None:
        usage = "" if error.ctx is None else f"; usage: {error.ctx.get_usage().removeprefix('Usage: ')}"
        return f"{named(error.param)} is missing{usage}"
    if isinstance(error, click.BadParameter) and error.param is not None:
        message = message.replace("a valid float", "a number").replace("a valid integer", "an integer")
        return f"{named(error.param)}: {message}"
    if isinstance(error, click.NoSuchOption):
        near = f"; did you mean {error.possibilities[0]!r}?" if error.possibilities else ""
        return f"no option is named {error.option_name!r}{near}"
    return message[:1].lower() + message[1:]  # click's own begin with a capital


def named(param: click.Parameter) -> str:
    """A flag as messages call it, `-j/--parallelism`, or an argument, `SUITE`."""
    return "/".join(param.opts) if isinstance(param, click.Option) else param.human_readable_name


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
