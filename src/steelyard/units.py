"""Units: durations (`500ms`, `2m`), rates (`600/min`), sizes (`200k`, `2G`), percentages (`5%`).

Also the limits of a case, which are written in them: `{time: 30m, turns: 50, tokens: 200k, cost: 2.0, output: 10M}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

from steelyard.errors import ConfigurationError, reject_unknown
from steelyard.records import CaseLimits

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_duration(value: object, name: str = "duration") -> float:
    """Seconds, 0 or more: `500ms`, `60s`, `2m`, `1.5h`, or a number; anything else is an error that says so."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    unit = None if found is None else _UNITS.get(found[2].lower())
    if found is None or unit is None:
        raise ConfigurationError(f"{name} must be a length of time like 500ms, 60s or 2m, got {value!r}")
    return float(found[1]) * unit


_SECONDS = {
    **dict.fromkeys(("s", "sec", "second"), 1.0),
    **dict.fromkeys(("m", "min", "minute"), 60.0),
    **dict.fromkeys(("h", "hour"), 3600.0),
    **dict.fromkeys(("d", "day"), 86_400.0),
}
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*/\s*([a-z]+)\s*", re.IGNORECASE)


class RateLimit(msgspec.Struct, frozen=True):
    """A rate limit: `count` per `per_seconds` seconds."""

    count: float
    per_seconds: float

    @property
    def per_second(self) -> float:
        return self.count / self.per_seconds


def parse_rate(value: object, name: str = "rate") -> RateLimit:
    """The rate that is written; anything but a number above 0 and a unit of time is an error that says so."""
    found = _RATE.fullmatch(value) if isinstance(value, str) else None
    seconds = None if found is None else _SECONDS.get(found[2].lower())
    if found is None or seconds is None or float(found[1]) == 0:
        raise ConfigurationError(
            f"{name} must be a number above 0 and a unit, like 10/s, 600/min or 5000/h, got {value!r}"
        )
    return RateLimit(float(found[1]), seconds)


_MULTIPLES = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)


def parse_size(value: object, name: str = "size") -> int:
    """A count or a number of bytes, 0 or more: `200k`, `2G`, `512MiB`. k, M, G, T are powers of 1000, Ki … of 1024."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    size = None if found is None else Decimal(found[1]) * _MULTIPLES[found[2].lower()]
    if size is None or size != int(size):
        raise ConfigurationError(f"{name} must be a whole number or a size like 200k, 2G or 512Mi, got {value!r}")
    return int(size)


_PERCENTAGE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*")


def parse_percentage(value: object, name: str = "share") -> float:
    """A share within 0..1, written as `5%` or as `0.05`."""
    share = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        share = float(value)
    elif isinstance(value, str) and (found := _PERCENTAGE.fullmatch(value)) is not None:
        share = float(Decimal(found[1]) / (100 if found[2] else 1))
    if share is None or not 0.0 <= share <= 1.0:
        raise ConfigurationError(f"{name} must be within 0..1, or 0%..100%, got {value!r}")
    return share


def read_case_limits(given: Any, where: str = "case_limits") -> CaseLimits | None:
    """The limits that a suite, a case or Python code gives, checked; None where there are none."""
    if given is None:
        return None
    if isinstance(given, CaseLimits):
        given = {name: getattr(given, name) for name in CaseLimits.__struct_fields__}
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where} must be a mapping such as {{time: 30m, turns: 50}}, got {given!r}")
    reject_unknown(given, CaseLimits.__struct_fields__, where)
    read = {name: _read(name, value, f"{where}.{name}") for name, value in given.items() if value is not None}
    return CaseLimits(**read) if read else None


def _read(name: str, value: Any, where: str) -> Any:
    if name == "time":
        number: float = parse_duration(value, where)
    elif name == "cost":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigurationError(f"{where} must be a number above 0, got {value!r}")
        number = float(value)
    else:
        number = parse_size(value, where)
    if number <= 0:
        raise ConfigurationError(f"{where} must be above 0, got {value!r}")
    return number
