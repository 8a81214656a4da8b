"""Writes docs/cli.md: the help of every command and the options of a run. `--check`: is the page up to date?"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from steelyard.cli.group import group
from steelyard.cli.main import WIDEST, front_page
from steelyard.run.config import EngineChoice
from steelyard.run.options import RunOptions, options_of

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
_OPENING = """\
# Command line

What `--help` says, command by command, and [the options of a run](#options-of-a-run). This page is made by `make docs`;
a test fails when it is out of date. [Completion](completion.md) tells how a shell completes commands and flags.
"""
_OPTIONS = """\
## Options of a run

One option has one name: as a key under `run` in a suite file, and as an argument of `Runner(...)` and `run(...)` in
Python. A flag overrides the suite. Paths in a suite file are relative to it, those of flags to the current folder.

| name | flag | in a suite | default | |
|---|---|---|---|---|
"""
_DEFAULT = re.compile(r" \[default: (.+?)\]")


def _option_rows() -> Iterator[str]:
    """A row for each option, from where it is declared."""
    for kind in (RunOptions, EngineChoice):
        for field in options_of(kind).values():
            option = field.option
            flags = ", ".join(f"`{flag}`" for flag in option.flags) or "none"
            said = _DEFAULT.search(option.help)
            default = said[1] if said else "none" if field.default in (None, ()) else str(field.default).lower()
            in_suite = "yes" if option.in_suite else "no"
            yield f"| `{field.name}` | {flags} | {in_suite} | {default} | {_DEFAULT.sub('', option.help)} |\n"


def reference() -> str:
    """The whole page."""
    # click leaves two columns free of what a terminal has.
    context = click.Context(group, info_name="steelyard", terminal_width=WIDEST - 2, **group.context_settings)
    sections = [_OPENING, _section("steelyard", front_page(WIDEST))]
    sections += [_section(context.command_path, context.get_help()) for context in _commands(context)]
    return "\n".join(sections) + "\n" + _OPTIONS + "".join(_option_rows())


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
