"""The chance in a request: drawn from its body and how often that came before, never from the order of arrival."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from hashlib import blake2b
from statistics import NormalDist
from typing import Literal

import msgspec

from steelyard.errors import ConfigurationError, suggestion
from steelyard.units import parse_duration

_LOTS = struct.Struct("<14I8x")
_ALL = 2**32


class Lots(msgspec.Struct, gc=False):
    """One lot, of 32 bits, for each thing that is left to chance, so that none changes what another decides."""

    error: int
    drop: int
    torn: int
    tear: int
    slow_first: int
    latency: int
    pace: int
    output_tokens: int
    reasoning_tokens: int
    right: int
    tool_call: int
    tool: int
    refusal: int
    words: int


def hits(lot: int, rate: float) -> bool:
    """Whether a lot falls on something that happens at this rate."""
    return lot < rate * _ALL


def pick(lot: int, count: int) -> int:
    """A number below `count`, each as likely as the others."""
    return lot * count // _ALL


def share(lot: int) -> float:
    """The lot as a number between 0 and 1, both excluded."""
    return (lot + 0.5) / _ALL


class Draw(msgspec.Struct, frozen=True, gc=False):
    """What chance has to say about one request."""

    id: str
    nth: int
    """How often the same body came before."""
    digest: bytes
    """Of the body alone."""
    raw: bytes

    def lots(self) -> Lots:
        return Lots(*_LOTS.unpack(self.raw))


class Dice:
    """Draws from (seed, body, how often this body came before)."""

    def __init__(self, seed: int) -> None:
        self._key = seed.to_bytes(16, signed=True) if -(2**127) <= seed < 2**127 else str(seed).encode()[:64]
        self._seen: dict[bytes, int] = {}

    def draw(self, body: bytes) -> Draw:
        digest = blake2b(body, digest_size=8).digest()
        nth = self._seen.get(digest, 0)
        self._seen[digest] = nth + 1
        raw = blake2b(b"%b%d" % (digest, nth), digest_size=64, key=self._key).digest()
        return Draw(raw[-8:].hex(), nth, digest, raw)

    def reset(self) -> None:
        """Forget which bodies came before."""
        self._seen.clear()


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
