"""Limits of a case as they are written: `{time: 30m, turns: 50, tokens: 200k, cost: 2.0, output: 10M}`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from steelyard.errors import ConfigurationError, suggestion
from steelyard.records import CaseLimits
from steelyard.units import parse_duration, parse_size


def read_case_limits(given: Any, where: str = "case_limits") -> CaseLimits | None:
    """The limits that a suite, a case or Python code gives, checked; None where there are none."""
    if given is None:
        return None
    if isinstance(given, CaseLimits):
        given = {name: getattr(given, name) for name in CaseLimits.__struct_fields__}
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where} must be a mapping such as {{time: 30m, turns: 50}}, got {given!r}")
    for key in given:
        if key not in CaseLimits.__struct_fields__:
            raise ConfigurationError(f"unknown key {where}.{key}; {suggestion(key, CaseLimits.__struct_fields__)}")
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
