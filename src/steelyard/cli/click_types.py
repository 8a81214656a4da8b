"""Flags that are made from the options of a run, and the type of those whose value is read by a parser of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click
import msgspec

from steelyard.cli.group import named
from steelyard.errors import ConfigurationError
from steelyard.run.options import OptionField, Parse, options_of
from steelyard.units import parse_percentage

F = TypeVar("F", bound=Callable[..., Any])
CommandName = Literal["run", "sweep", "score"]


if TYPE_CHECKING:  # generic only in newer versions of click
    _ParamType = click.ParamType[Any]
    _Choice = click.Choice[str]
else:
    _ParamType = click.ParamType
    _Choice = click.Choice


class Parsed(_ParamType):
    """What a parser makes of the text: durations, rates, sizes, `-j auto`."""

    def __init__(self, parse: Parse, name: str = "value") -> None:
        self._parse = parse
        self.name = name

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value, self.name if param is None else named(param))
        except ConfigurationError as error:
            raise click.UsageError(str(error), ctx) from error


SHARE = Parsed(parse_percentage, "share")


class Format(_Choice):
    """A format of a report; `markdown` is another word for `md`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert("md" if value == "markdown" else value, param, ctx)


def flags_of(kind: type[msgspec.Struct], command: CommandName) -> Callable[[F], F]:
    """The flags that a command has for the options of a struct. Each is None when it is not given."""

    def add(function: F) -> F:
        for field, help_text in reversed(list(_fields(kind, command))):
            function = click.option(*_declared(field), help=help_text, **_attributes(field))(function)
        return function

    return add


def given_options(kind: type[msgspec.Struct], command: CommandName, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a struct that were given to a command; they are taken out of its parameters.

    They are checked here too, where a message can name the flag.
    """
    values = {}
    for field, _ in _fields(kind, command):
        value, option = given.pop(field.name), field.option
        if value is not None and value != ():
            try:
                if option.parse is not None and _is_several(field):
                    value = option.parse(",".join(value), option.flags[0])
                if option.check is not None:
                    option.check("/".join(option.flags), value)
            except ConfigurationError as error:
                raise click.UsageError(str(error)) from error
            values[field.name] = value
    return values


def _is_several(field: OptionField) -> bool:
    """Whether a flag may be given several times."""
    return get_origin(field.type) is tuple


def _fields(kind: type[msgspec.Struct], command: CommandName) -> Iterator[tuple[OptionField, str]]:
    """The options that are flags of a command, with what its help says of them."""
    for field in options_of(kind).values():
        help_text = field.option.help if command == "run" else getattr(field.option, command)
        if field.option.flags and help_text is not None:
            yield field, help_text


def _declared(field: OptionField) -> tuple[str, ...]:
    """The flags, and the option's name where click would not find it in them."""
    named_by_flag = f"--{field.name.replace('_', '-')}" in field.option.flags
    return field.option.flags if named_by_flag else (*field.option.flags, field.name)


def _attributes(field: OptionField) -> dict[str, Any]:
    option = field.option
    if _is_several(field):
        return {"multiple": True, "metavar": option.metavar}
    if option.parse is not None:
        return {"type": Parsed(option.parse), "metavar": option.metavar}
    kinds = [kind for kind in get_args(field.type) or (field.type,) if kind is not NoneType]
    if get_origin(field.type) is Literal:
        return {"type": click.Choice(kinds), "metavar": option.metavar}
    if kinds == [bool]:
        return {"is_flag": True, "flag_value": not field.default, "default": None}
    if Path in kinds:
        return {"type": click.Path(path_type=Path), "metavar": option.metavar}
    return {"type": kinds[0], "metavar": option.metavar}


def target_flags(*, several_models: bool) -> Callable[[F], F]:
    """`-m`, `--base-url` and `-p`: who is asked, where, and with which parameters."""
    param = click.option(
        "-p",
        "--param",
        "params",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_read_params,
        help="Send this parameter instead of the suite's: temperature=0.2. Repeatable.",
    )
    address = click.option("--base-url", metavar="URL", help="Use this address instead of the suite's.")
    if several_models:
        words = "Use this model instead of the suite's. Given several times, each is a variant of a matrix."
        model = click.option("-m", "--model", "models", multiple=True, help=words)
    else:
        words = "Use this model instead of the suite's."
        model = click.option("-m", "--model", multiple=True, callback=_one_model, help=words)
    setting = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY.PATH=VALUE",
        help="Set a value of the suite file: run.seed=7, scorers.0.judge.threshold=0.8. Repeatable.",
    )
    return lambda function: model(address(param(setting(function))))


def target_changes(flags: Any) -> dict[str, Any]:
    """The arguments of the target that these flags change."""
    names = ("model", "base_url", "params")
    return {name: value for name in names if (value := getattr(flags, name)) is not None}


def _read_params(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, Any] | None:
    """Names and values; a value is JSON where it can be read as that, else text."""
    params: dict[str, Any] = {}
    for given in value:
        name, equals, text = given.partition("=")
        name = name.strip()
        if not equals or not name:
            raise click.BadParameter(f"write NAME=VALUE, such as temperature=0.2, got {given!r}", ctx, param)
        if name in params:
            raise click.BadParameter(f"{name} is given twice", ctx, param)
        try:
            params[name] = json.loads(text, parse_constant=_no_number)
        except ValueError:
            params[name] = text
    return params or None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _one_model(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> str | None:
    """One model a sweep: a second -m would otherwise take the place of the first without a word."""
    if len(value) > 1:
        named = ", ".join(value)
        raise click.BadParameter(f"a sweep asks one model, got {named}: sweep once for each", ctx, param)
    return value[0] if value else None
