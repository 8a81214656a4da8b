"""Values of flags that are more than a number: a length of time, a parallelism that may be `auto`."""

from __future__ import annotations

import click

from steelyard.errors import ConfigurationError
from steelyard.units import parse_duration


class Duration(click.ParamType[float]):
    """`500ms`, `60s`, `2m`, or seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return parse_duration(value, "it" if param is None or param.name is None else param.name)
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)


class Parallelism(click.ParamType[int | str]):
    """A whole number, or `auto`."""

    name = "parallelism"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto" or isinstance(value, int):
            return value
        try:
            return int(str(value))
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor auto", param, ctx)
