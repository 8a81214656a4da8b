"""Randomness of the mock: random numbers for each request, and the distributions that turn them into values.

A request's numbers depend on the seed, its body and how often that body came before, never on the order of arrival.
"""

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

_LAYOUT = struct.Struct("<14I8x")
_RANGE = 2**32
Shape = Literal["constant", "uniform", "normal", "lognormal", "exponential"]
Unit = Literal["seconds", "number"]
_STANDARD = NormalDist()
_ARGUMENTS: dict[str, int] = {"constant": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}
_SYNTAX = "constant:X, uniform:LOW,HIGH, normal:MEAN,SD, lognormal:MEDIAN,SIGMA or exponential:MEAN"


class RandomNumbers(msgspec.Struct, gc=False):
    """A 32-bit number for each random decision, so that none changes the outcome of another."""

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


class RequestRandomness(msgspec.Struct, frozen=True, gc=False):
    """The randomness of one request."""

    id: str
    nth: int
    """How often the same body came before."""
    digest: bytes
    """Of the body alone."""
    raw: bytes

    def numbers(self) -> RandomNumbers:
        return RandomNumbers(*_LAYOUT.unpack(self.raw))


class RandomSource:
    """Derives randomness from (seed, body, how often this body came before)."""

    def __init__(self, seed: int) -> None:
        self._key = seed.to_bytes(16, signed=True) if -(2**127) <= seed < 2**127 else str(seed).encode()[:64]
        self._seen: dict[bytes, int] = {}

    def for_request(self, body: bytes) -> RequestRandomness:
        digest = blake2b(body, digest_size=8).digest()
        nth = self._seen.get(digest, 0)
        self._seen[digest] = nth + 1
        raw = blake2b(b"%b%d" % (digest, nth), digest_size=64, key=self._key).digest()
        return RequestRandomness(raw[-8:].hex(), nth, digest, raw)

    def reset(self) -> None:
        """Forget which bodies came before."""
        self._seen.clear()


def hits(number: int, rate: float) -> bool:
    """Whether something that happens at this rate happens, for a random number."""
    return number < rate * _RANGE


def pick(number: int, count: int) -> int:
    """Turn a random number into one below `count`, each equally likely."""
    return number * count // _RANGE


def fraction(number: int) -> float:
    """Turn a random number into one between 0 and 1, both excluded."""
    return (number + 0.5) / _RANGE


class Distribution(msgspec.Struct, frozen=True):
    """A distribution of values that are never below 0."""

    shape: Shape
    first: float
    second: float = 0.0

    def draw(self, number: int) -> float:
        """Turn a random number into a value of this distribution."""
        if self.shape == "constant":
            return self.first
        at = fraction(number)
        if self.shape == "uniform":
            return self.first + (self.second - self.first) * at
        if self.shape == "exponential":
            return -self.first * math.log1p(-at)
        score = _STANDARD.inv_cdf(at)
        if self.shape == "normal":
            return max(0.0, self.first + self.second * score)
        return self.first * math.exp(self.second * score)

    def draw_count(self, number: int) -> int:
        """Draw a whole number."""
        return round(self.draw(number))


def parse_distribution(name: str, value: float | str, unit: Unit) -> Distribution:
    """Parse a number or the text of a distribution; an error names the option and what can be written."""
    read = parse_duration if unit == "seconds" else _parse_number
    if not isinstance(value, str) or ":" not in value:
        return Distribution("constant", read(value, name))
    shape, _, rest = value.partition(":")
    shape = shape.strip().lower()
    if shape not in _ARGUMENTS:
        raise ConfigurationError(f"{name}: no distribution is named {shape!r}; {suggestion(shape, _ARGUMENTS)}")
    parts = rest.split(",")
    if len(parts) != _ARGUMENTS[shape]:
        raise ConfigurationError(f"{name} is written as {_SYNTAX}, got {value!r}")
    return _checked(name, value, shape, parts, read)


def _checked(name: str, value: str, shape: str, parts: list[str], read: Callable[[object, str], float]) -> Distribution:
    # Sigma is the spread of a logarithm and has no unit, whatever unit the median has.
    numbers = [
        _parse_number(part, name) if shape == "lognormal" and at else read(part, name) for at, part in enumerate(parts)
    ]
    if shape == "uniform" and numbers[0] > numbers[1]:
        raise ConfigurationError(f"{name}: the low end is above the high end in {value!r}")
    return msgspec.convert(
        {"shape": shape, "first": numbers[0], "second": numbers[1] if len(numbers) > 1 else 0.0}, Distribution
    )


def _parse_number(value: object, name: str) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise ConfigurationError(f"{name} must be a number >= 0, got {value!r}")
    return number
