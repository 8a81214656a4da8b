"""How a quantity is spread over requests: always the same, or drawn from a distribution such as `normal:200ms,50ms`."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Literal

import msgspec

from steelyard.durations import parse_duration
from steelyard.errors import ConfigurationError, suggestion
from steelyard.mock.draws import share

Shape = Literal["constant", "uniform", "normal", "lognormal", "exponential"]
Unit = Literal["seconds", "number"]

_STANDARD = NormalDist()
_ARGUMENTS: dict[str, int] = {"constant": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}
_WRITTEN = "constant:X, uniform:LOW,HIGH, normal:MEAN,SD, lognormal:MEDIAN,SIGMA or exponential:MEAN"


class Spread(msgspec.Struct, frozen=True):
    """A distribution of values that are never below 0."""

    shape: Shape
    first: float
    second: float = 0.0

    def draw(self, lot: int) -> float:
        """The value that a lot stands for."""
        if self.shape == "constant":
            return self.first
        at = share(lot)
        if self.shape == "uniform":
            return self.first + (self.second - self.first) * at
        if self.shape == "exponential":
            return -self.first * math.log1p(-at)
        score = _STANDARD.inv_cdf(at)
        if self.shape == "normal":
            return max(0.0, self.first + self.second * score)
        return self.first * math.exp(self.second * score)

    def count(self, lot: int) -> int:
        """The same as a whole number."""
        return round(self.draw(lot))


def parse_spread(name: str, value: float | str, unit: Unit) -> Spread:
    """The spread that a number or its text stands for; an error names the option and what can be written."""
    read = parse_duration if unit == "seconds" else _parse_number
    if not isinstance(value, str) or ":" not in value:
        return Spread("constant", read(value, name))
    shape, _, rest = value.partition(":")
    shape = shape.strip().lower()
    if shape not in _ARGUMENTS:
        raise ConfigurationError(f"{name}: no distribution is named {shape!r}; {suggestion(shape, _ARGUMENTS)}")
    parts = rest.split(",")
    if len(parts) != _ARGUMENTS[shape]:
        raise ConfigurationError(f"{name} is written as {_WRITTEN}, got {value!r}")
    return _checked(name, value, shape, parts, read)


def _checked(name: str, value: str, shape: str, parts: list[str], read: Callable[[object, str], float]) -> Spread:
    # The spread of a logarithm has no unit, whatever its median is measured in.
    numbers = [
        _parse_number(part, name) if shape == "lognormal" and at else read(part, name) for at, part in enumerate(parts)
    ]
    if shape == "uniform" and numbers[0] > numbers[1]:
        raise ConfigurationError(f"{name}: the low end is above the high end in {value!r}")
    return msgspec.convert(
        {"shape": shape, "first": numbers[0], "second": numbers[1] if len(numbers) > 1 else 0.0}, Spread
    )


def _parse_number(value: object, name: str) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise ConfigurationError(f"{name} must be a number >= 0, got {value!r}")
    return number
