"""Options of the mock: `MockOptions` for the server, `RequestOptions` for one request, from an `x-mock` header."""

from __future__ import annotations

import os
import re
from typing import Any, Literal, get_args
from urllib.parse import unquote

import msgspec

from steelyard.errors import ConfigurationError, suggestion
from steelyard.mock.randomness import Distribution, parse_distribution
from steelyard.units import parse_duration, parse_rate

RATES = ("error_rate", "drop_rate", "torn_rate", "slow_first_rate", "tool_call_rate", "refusal_rate", "right_rate")
DURATIONS = ("latency", "chunk_interval", "slow_first")
NUMBERS = ("tokens_per_second", "output_tokens", "reasoning_tokens")
Tear = Literal["cut", "end", "error"]
"""How an answer breaks off: the connection is cut, it ends in good order but too early, or with an error in it."""
_SEPARATOR = re.compile(r",(?=\s*[a-z_-]+=)")
_HEADER_OPTIONS = (*DURATIONS, *NUMBERS, *RATES, "retry_after", "usage", "fail", "answer", "tear")
_ZERO = Distribution("constant", 0.0)


class MockOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of the mock. Times are seconds, or text such as `200ms` or `normal:200ms,50ms`."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    seed: int = 0
    latency: float | str = 0.0
    """From the request's last byte to the first token."""
    tokens_per_second: float | str | None = None
    """Speed of the tokens after the first, drawn once for each request; without it all come at once."""
    chunk_interval: float | str | None = None
    """The same as the time between two tokens."""
    output_tokens: int | str = 16
    """Tokens in an answer to a prompt that is not in the answer file. One token is one chunk of a stream."""
    reasoning_tokens: int | str = 0
    """Tokens of reasoning before the answer."""
    max_concurrency: int | None = None
    """Requests at once; those above get 429."""
    slots: int | None = None
    """Requests that are answered at once; those above wait their turn, as in a server that queues."""
    rate: str | None = None
    """Such as `600/min`; requests above it get 429."""
    retry_after: float | str | None = None
    """The wait that a 429 asks for; None: until the rate has room again, or one second."""
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
    """The share answered with a tool call, among requests that offer tools and contain no tool result yet."""
    refusal_rate: float = 0.0
    usage: bool = True
    """Whether answers report their token counts."""
    key: str | None = None
    """The API key that requests must have."""
    models: tuple[str, ...] = ()
    """The names of the models; when empty, every name is accepted."""
    answers: str | os.PathLike[str] | None = None
    """A JSONL file of prompts and answers; a suite's file of cases works too."""
    right_rate: float = 1.0
    """The share of prompts in that file that get the right answer; the others get a wrong one."""

    def __post_init__(self) -> None:
        for name in RATES:
            _check_share(name, getattr(self, name))
        for name in DURATIONS + NUMBERS:
            if (value := getattr(self, name)) is not None:
                parse_distribution(name, value, "seconds" if name in DURATIONS else "number")
        if self.tokens_per_second is not None and self.chunk_interval is not None:
            raise ConfigurationError("tokens_per_second and chunk_interval set the same thing: give one of them")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigurationError(f"max_concurrency must be >= 1, got {self.max_concurrency}")
        if self.slots is not None and self.slots < 1:
            raise ConfigurationError(f"slots must be >= 1, got {self.slots}")
        if not 0 <= self.port <= 65_535:
            raise ConfigurationError(f"port must be from 0 to 65535, got {self.port}")
        if self.retry_after is not None:
            parse_duration(self.retry_after, "retry_after")
        if self.rate is not None:
            parse_rate(self.rate)

    def replace(self, **changes: Any) -> MockOptions:
        """Return a copy with some fields changed, checked again."""
        return msgspec.structs.replace(self, **changes)


class RequestOptions(msgspec.Struct, frozen=True):
    """The options of one request, parsed; `fail`, `answer` and `tear` can only be set for single requests."""

    latency: Distribution
    tokens_per_second: Distribution | None
    chunk_interval: Distribution
    output_tokens: Distribution
    reasoning_tokens: Distribution
    retry_after: float | None
    error_rate: float
    drop_rate: float
    torn_rate: float
    slow_first_rate: float
    slow_first: Distribution
    tool_call_rate: float
    refusal_rate: float
    right_rate: float
    usage: bool
    fail: int | None = None
    """A status to always answer with."""
    answer: str | None = None
    """The text to answer with."""
    tear: Tear | None = None
    """Always break off in this way."""

    def interval(self, number: int) -> float:
        """Draw the seconds between two tokens of one request."""
        if self.tokens_per_second is None:
            return self.chunk_interval.draw(number)
        speed = self.tokens_per_second.draw(number)
        return 1.0 / speed if speed > 0 else 0.0


def default_request_options(options: MockOptions) -> RequestOptions:
    """Parse the options of requests without an `x-mock` header."""
    speed = options.tokens_per_second
    fields: dict[str, Any] = {name: getattr(options, name) for name in RATES}
    for name in ("latency", "slow_first"):
        fields[name] = parse_distribution(name, getattr(options, name), "seconds")
    for name in ("output_tokens", "reasoning_tokens"):
        fields[name] = parse_distribution(name, getattr(options, name), "number")
    interval = options.chunk_interval
    return RequestOptions(
        tokens_per_second=None if speed is None else parse_distribution("tokens_per_second", speed, "number"),
        chunk_interval=_ZERO if interval is None else parse_distribution("chunk_interval", interval, "seconds"),
        retry_after=None if options.retry_after is None else parse_duration(options.retry_after, "retry_after"),
        usage=options.usage,
        **fields,
    )


def request_options(options: MockOptions, header: str) -> RequestOptions:
    """Parse the options of a request with an `x-mock` header, such as `latency=100ms,fail=500`."""
    changes: dict[str, Any] = {}
    for part in _SEPARATOR.split(header):
        name, _, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in _HEADER_OPTIONS:
            raise ConfigurationError(f"x-mock: no option is named {name!r}; {suggestion(name, _HEADER_OPTIONS)}")
        changes[name] = _value(name, unquote(value.strip()))
    own = {name: changes.pop(name) for name in ("fail", "answer", "tear") if name in changes}
    if "tokens_per_second" in changes or "chunk_interval" in changes:
        changes = {"tokens_per_second": None, "chunk_interval": None, **changes}
    return msgspec.structs.replace(default_request_options(options.replace(**changes)), **own)


def _check_share(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigurationError(f"{name} must be a number from 0 to 1, got {value!r}")


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
