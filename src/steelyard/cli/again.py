"""The command line that goes on with a run, as it can be typed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

_STARTS_OVER = ("force", "new")


def command_again(place: Path, *more: str, begun: bool = True) -> str:
    """The command that was given, in this directory; once the run has begun, without what would start it over."""
    context = click.get_current_context()
    left_out = ("out", *_STARTS_OVER) if begun else ("out",)
    words: list[str] = []
    flags: list[str] = []
    for parameter in context.command.params:
        name, flag = str(parameter.name), parameter.opts[-1]
        value = context.params.get(name)
        if isinstance(parameter, click.Argument):
            # A leading dash would make it a flag.
            words.append(f"./{value}" if str(value).startswith("-") else str(value))
        elif _was_given(context, name) and name not in left_out and flag not in more:
            flags += [flag] if value is True else [flag, str(value)]
    return shlex.join([_program(), str(context.info_name), *words, "--out", str(place), *flags, *more])


def _was_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _program() -> str:
    """`steelyard` where the shell finds this very program by that name, else the path it was started by."""
    given, found = sys.argv[0], shutil.which("steelyard")
    if os.path.basename(given) != "steelyard" or not os.path.exists(given):
        return "steelyard"
    return "steelyard" if found is not None and os.path.samefile(found, given) else given


def does_again(metrics: Mapping[str, Any]) -> str:
    """What `--retry-errors` does about the errors of a run: those of scorers need no call."""
    if not metrics["scoring_errors"]:
        return "asks them again"
    return "asks or scores them again" if metrics["counts"]["error"] else "scores them again"
