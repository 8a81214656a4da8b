"""Short names for the times of a run, as people write them in rules and objectives: `ttft_p99`, `latency_p50`."""

from __future__ import annotations

import re
from decimal import Decimal

from steelyard.errors import ConfigurationError, suggestion

TIMES = {
    "ttft": "time_to_first_token",
    "ttlt": "time_to_last_token",
    "latency": "time_to_last_token",
    "tpot": "time_per_output_token",
    "time_to_first_token": "time_to_first_token",
    "time_to_last_token": "time_to_last_token",
    "time_per_output_token": "time_per_output_token",
}
AGGREGATES = {"average": "average", "avg": "average", "mean": "average"} | {
    name: name for name in ("p50", "p90", "p95", "p99", "min", "max")
}
SHORT_NAMES = tuple(f"{time}_{aggregate}" for time in TIMES for aggregate in ("p50", "p90", "p95", "p99", "average"))
"""Those that are worth suggesting."""

SECONDS = {
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
}
"""The units that a time may be given in. Decimal, as 70 % by floats is a little more than 0.7."""
PERCENT = Decimal("0.01")

_WRITTEN = re.compile(r"(\w+)[-_](\w+)")


def full_name(written: str) -> str | None:
    """The name of that time in the metrics, `time_to_first_token-p99` for `ttft_p99`; None where it is no time's.

    A time without an aggregate, or with one that is not there, is refused.
    """
    name = written.lower()
    if name in TIMES:
        raise ConfigurationError(f"{written} needs an aggregate, such as {written}_p99")
    found = _WRITTEN.fullmatch(name)
    if found is None or found[1] not in TIMES:
        return None
    time, aggregate = found.groups()
    if aggregate not in AGGREGATES:
        raise ConfigurationError(f"{written}: no aggregate {aggregate!r}; {suggestion(aggregate, AGGREGATES)}")
    return f"{TIMES[time]}-{AGGREGATES[aggregate]}"
