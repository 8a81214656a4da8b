"""How the pretend model behaves: one frozen struct, checked when it is made."""

from __future__ import annotations

import os
import re
from typing import Any, Literal, get_args
from urllib.parse import unquote

import msgspec

from steelyard.errors import ConfigurationError, suggestion
from steelyard.mock.randomness import Spread, parse_spread
from steelyard.units import parse_duration, parse_rate

RATES = ("error_rate", "drop_rate", "torn_rate", "slow_first_rate", "tool_call_rate", "refusal_rate", "right_rate")
DURATIONS = ("latency", "chunk_interval", "slow_first")
NUMBERS = ("tokens_per_second", "output_tokens", "reasoning_tokens")


class MockOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the mock may be told. Times are seconds, or text such as `200ms` or `normal:200ms,50ms`."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    seed: int = 0
    latency: float | str = 0.0
    """From the request's last byte to the first token."""
    tokens_per_second: float | str | None = None
    """How fast the tokens after the first one come, one request's drawn at a time; without it all come at once."""
    chunk_interval: float | str | None = None
    """The same told as the time between two tokens."""
    output_tokens: int | str = 16
    """Tokens in an answer that the answer book does not know. One token is one chunk of a stream."""
    reasoning_tokens: int | str = 0
    """Tokens of reasoning before the answer."""
    max_concurrency: int | None = None
    """Requests at once; those above get 429."""
    rate: str | None = None
    """Such as `600/min`; requests above it get 429."""
    retry_after: float | str | None = None
    """What a 429 tells the client to wait; None: until the rate has room again, or one second."""
    error_rate: float = 0.0
    """The share answered with 500."""
    drop_rate: float = 0.0
    """The share whose connection is closed before the first byte."""
    torn_rate: float = 0.0
    """The share whose answer breaks off in the middle."""
    slow_first_rate: float = 0.0
    """The share whose first token takes `slow_first` longer."""
    slow_first: float | str = 5.0
    tool_call_rate: float = 0.0
    """The share answered with a tool call, among requests that offer tools and do not bring a tool's result."""
    refusal_rate: float = 0.0
    usage: bool = True
    """Whether answers tell how many tokens they took."""
    key: str | None = None
    """The API key that requests must bring."""
    models: tuple[str, ...] = ()
    """The models there are; without any, every name is one."""
    answers: str | os.PathLike[str] | None = None
    """A JSONL file of prompts and answers; a suite's own file of cases will do."""
    right_rate: float = 1.0
    """The share of prompts in that file that are answered as it says; the others get a wrong answer."""

    def __post_init__(self) -> None:
        for name in RATES:
            _check_share(name, getattr(self, name))
        for name in DURATIONS + NUMBERS:
            if (value := getattr(self, name)) is not None:
                parse_spread(name, value, "seconds" if name in DURATIONS else "number")
        if self.tokens_per_second is not None and self.chunk_interval is not None:
            raise ConfigurationError("tokens_per_second and chunk_interval say the same thing: give one of them")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigurationError(f"max_concurrency must be >= 1, got {self.max_concurrency}")
        if not 0 <= self.port <= 65_535:
            raise ConfigurationError(f"port must be from 0 to 65535, got {self.port}")
        if self.retry_after is not None:
            parse_duration(self.retry_after, "retry_after")
        if self.rate is not None:
            parse_rate(self.rate)

    def replace(self, **changes: Any) -> MockOptions:
        """The same with some fields changed, checked again."""
        return msgspec.structs.replace(self, **changes)


def _check_share(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigurationError(f"{name} must be a number from 0 to 1, got {value!r}")


Tear = Literal["cut", "end", "error"]
"""How an answer breaks off: the connection is cut, it ends in good order but too early, or an error stands in it."""

_NOTHING = Spread("constant", 0.0)
_SEPARATOR = re.compile(r",(?=\s*[a-z_-]+=)")
_CHANGEABLE = (*DURATIONS, *NUMBERS, *RATES, "retry_after")
_KNOWN = (*_CHANGEABLE, "usage", "fail", "answer", "tear")


class RequestOptions(msgspec.Struct, frozen=True):
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


def manner_of(options: MockOptions) -> RequestOptions:
    """The manner in which every request is treated that does not ask for another."""
    speed = options.tokens_per_second
    fields: dict[str, Any] = {name: getattr(options, name) for name in RATES}
    for name in ("latency", "slow_first"):
        fields[name] = parse_spread(name, getattr(options, name), "seconds")
    for name in ("output_tokens", "reasoning_tokens"):
        fields[name] = parse_spread(name, getattr(options, name), "number")
    interval = options.chunk_interval
    return RequestOptions(
        tokens_per_second=None if speed is None else parse_spread("tokens_per_second", speed, "number"),
        chunk_interval=_NOTHING if interval is None else parse_spread("chunk_interval", interval, "seconds"),
        retry_after=None if options.retry_after is None else parse_duration(options.retry_after, "retry_after"),
        usage=options.usage,
        **fields,
    )


def changed_manner(options: MockOptions, header: str) -> RequestOptions:
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
