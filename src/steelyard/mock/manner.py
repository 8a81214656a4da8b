"""How one request is treated: the server's options, with what its own `x-mock` header changes."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args
from urllib.parse import unquote

import msgspec

from steelyard.durations import parse_duration
from steelyard.errors import ConfigurationError, suggestion
from steelyard.mock.options import DURATIONS, NUMBERS, RATES, MockOptions
from steelyard.mock.spread import Spread, parse_spread

Tear = Literal["cut", "end", "error"]
"""How an answer breaks off: the connection is cut, it ends in good order but too early, or an error stands in it."""

_NOTHING = Spread("constant", 0.0)
_SEPARATOR = re.compile(r",(?=\s*[a-z_-]+=)")
_CHANGEABLE = (*DURATIONS, *NUMBERS, *RATES, "retry_after")
_KNOWN = (*_CHANGEABLE, "usage", "fail", "answer", "tear")


class Manner(msgspec.Struct, frozen=True):
    """The options ready for use, and what is asked of one request alone: `fail`, `answer` and `tear`."""

    latency: Spread
    tokens_per_second: Spread | None
    chunk_interval: Spread
    output_tokens: Spread
    reasoning_tokens: Spread
    retry_after: float | None
    error_rate: float
    drop_rate: float
    torn_rate: float
    slow_first_rate: float
    slow_first: Spread
    tool_call_rate: float
    refusal_rate: float
    right_rate: float
    usage: bool
    fail: int | None = None
    """A status to answer with, whatever chance says."""
    answer: str | None = None
    """What to answer."""
    tear: Tear | None = None
    """Break off in this way, whatever chance says."""

    def interval(self, lot: int) -> float:
        """Seconds between two tokens of one request."""
        if self.tokens_per_second is None:
            return self.chunk_interval.draw(lot)
        speed = self.tokens_per_second.draw(lot)
        return 1.0 / speed if speed > 0 else 0.0


def manner_of(options: MockOptions) -> Manner:
    """The manner in which every request is treated that does not ask for another."""
    speed = options.tokens_per_second
    fields: dict[str, Any] = {name: getattr(options, name) for name in RATES}
    for name in ("latency", "slow_first"):
        fields[name] = parse_spread(name, getattr(options, name), "seconds")
    for name in ("output_tokens", "reasoning_tokens"):
        fields[name] = parse_spread(name, getattr(options, name), "number")
    interval = options.chunk_interval
    return Manner(
        tokens_per_second=None if speed is None else parse_spread("tokens_per_second", speed, "number"),
        chunk_interval=_NOTHING if interval is None else parse_spread("chunk_interval", interval, "seconds"),
        retry_after=None if options.retry_after is None else parse_duration(options.retry_after, "retry_after"),
        usage=options.usage,
        **fields,
    )


def changed_manner(options: MockOptions, header: str) -> Manner:
    """The manner that an `x-mock` header asks for, such as `latency=100ms,fail=500`."""
    changes: dict[str, Any] = {}
    for part in _SEPARATOR.split(header):
        name, _, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in _KNOWN:
            raise ConfigurationError(f"x-mock: nothing is named {name!r}; {suggestion(name, _KNOWN)}")
        changes[name] = _value(name, unquote(value.strip()))
    own = {name: changes.pop(name) for name in ("fail", "answer", "tear") if name in changes}
    if "tokens_per_second" in changes or "chunk_interval" in changes:
        changes = {"tokens_per_second": None, "chunk_interval": None, **changes}
    return msgspec.structs.replace(manner_of(options.replace(**changes)), **own)


def _value(name: str, text: str) -> Any:
    if name == "answer":
        return text
    if name == "tear":
        if text not in get_args(Tear):
            raise ConfigurationError(f"x-mock: tear is one of {', '.join(get_args(Tear))}, got {text!r}")
        return text
    if name == "usage":
        return text not in ("0", "no", "false")
    if name in RATES:
        return _number(name, text)
    if name == "fail":
        status = _number(name, text)
        if not 400 <= status <= 599:
            raise ConfigurationError(f"x-mock: fail must be a status from 400 to 599, got {text!r}")
        return int(status)
    return text


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"x-mock: {name} must be a number, got {text!r}") from None
