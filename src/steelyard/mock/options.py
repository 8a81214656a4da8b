"""How the pretend model behaves: one frozen struct, checked when it is made."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from steelyard.durations import parse_duration
from steelyard.errors import ConfigurationError
from steelyard.mock.spread import parse_spread
from steelyard.rates import parse_rate

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
