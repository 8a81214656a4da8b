"""Lengths of time as people write them: `500ms`, `60s`, `2m`, `1.5h`, or a bare number of seconds."""

from __future__ import annotations

import math
import re

from steelyard.errors import ConfigurationError

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_duration(value: object, name: str = "duration") -> float:
    """Seconds, 0 or more; anything else is an error that says what can be written."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    found = _WRITTEN.fullmatch(value) if isinstance(value, str) else None
    unit = None if found is None else _UNITS.get(found[2].lower())
    if found is None or unit is None:
        raise ConfigurationError(f"{name} must be a length of time like 500ms, 60s or 2m, got {value!r}")
    return float(found[1]) * unit
