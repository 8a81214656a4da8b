"""How often, as people write it: `10/s`, `600/min`, `5000/h`."""

from __future__ import annotations

import re

import msgspec

from steelyard.errors import ConfigurationError

_SECONDS = {
    **dict.fromkeys(("s", "sec", "second"), 1.0),
    **dict.fromkeys(("m", "min", "minute"), 60.0),
    **dict.fromkeys(("h", "hour"), 3600.0),
    **dict.fromkeys(("d", "day"), 86_400.0),
}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*/\s*([a-z]+)\s*", re.IGNORECASE)


class RateLimit(msgspec.Struct, frozen=True):
    """So many in so many seconds."""

    count: float
    per_seconds: float

    @property
    def per_second(self) -> float:
        return self.count / self.per_seconds


def parse_rate(value: object, name: str = "rate") -> RateLimit:
    """The rate that is written; anything but a number above 0 and a unit of time is an error that says so."""
    found = _WRITTEN.fullmatch(value) if isinstance(value, str) else None
    seconds = None if found is None else _SECONDS.get(found[2].lower())
    if found is None or seconds is None or float(found[1]) == 0:
        raise ConfigurationError(
            f"{name} must be a number above 0 and a unit, like 10/s, 600/min or 5000/h, got {value!r}"
        )
    return RateLimit(float(found[1]), seconds)
