"""Writes docs/cli.md: the help of every command, as the program prints it. `--check`: is the page up to date?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from steelyard.cli.group import group
from steelyard.cli.main import WIDEST, front_page

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
_OPENING = """\
# Command line

What `--help` says, command by command. This page is made by `make docs`; a test fails when it is out of date.
[Completion](completion.md) tells how a shell completes commands and flags.
"""


def reference() -> str:
    """The whole page."""
    # click leaves two columns free of what a terminal has.
    context = click.Context(group, info_name="steelyard", terminal_width=WIDEST - 2, **group.context_settings)
    sections = [_OPENING, _section("steelyard", front_page(WIDEST))]
    sections += [_section(context.command_path, context.get_help()) for context in _commands(context)]
    return "\n".join(sections)


def _commands(context: click.Context) -> Iterator[click.Context]:
    """Every command below this one, each before those inside it."""
    parent = context.command
    if not isinstance(parent, click.Group):
        return
    for name in parent.list_commands(context):
        command = parent.get_command(context, name)
        if command is not None:
            inner = click.Context(command, parent=context, info_name=name, **command.context_settings)
            yield inner
            yield from _commands(inner)


def _section(name: str, text: str) -> str:
    return f"## {name}\n\n```text\n{text.rstrip()}\n```\n"


def main(words: list[str]) -> int:
    """Write the page, or with `--check` compare it; an exit code."""
    page = reference()
    if words == ["--check"]:
        return 0 if PAGE.read_text(encoding="utf-8") == page else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
