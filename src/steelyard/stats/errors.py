"""Errors by kind: HTTP status, or what happened to the connection, in the words of load tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from msgspec import UNSET

from steelyard.stats.metrics import ErrorExample, Metrics

_STATUSES = {
    400: "bad request",
    401: "not authorised",
    402: "payment required",
    403: "forbidden",
    404: "not found",
    408: "request timeout",
    409: "conflict",
    413: "too large",
    422: "not processable",
    425: "too early",
    429: "rate limited",
    500: "server error",
    501: "not implemented",
    502: "bad gateway",
    503: "unavailable",
    504: "gateway timeout",
    529: "overloaded",
}
_TYPES = {
    "TimeoutError": "timeout",
    "TimedOut": "connect timeout",
    "CannotConnect": "cannot connect",
    "ConnectionRefusedError": "connection refused",
    "CannotResolve": "cannot resolve host",
    "ConnectionLost": "connection lost",
    "ConnectionResetError": "connection lost",
    "ConnectionAbortedError": "connection lost",
    "BrokenPipeError": "connection lost",
    "TlsFailed": "TLS failed",
    "CertificateRefused": "certificate refused",
    "ProxyFailed": "proxy failed",
    "ProxyRefused": "proxy refused",
    "MalformedReply": "malformed reply",
    "ResponseTooLarge": "response too large",
}
TIMEOUTS = frozenset({"TimeoutError", "TimedOut"})
"""Types of errors that say no more than that an answer would have taken longer."""
_OUR_OWN = ("TargetError", "TransientError", "TransportError")
"""Types that do not name a cause: with a 2xx status, the answer was incomplete."""


class Failed(Protocol):
    """What decides the kind of an error, in a record or a journal entry."""

    @property
    def error_type(self) -> str | None: ...
    @property
    def http_status(self) -> int | None: ...


class ErrorName(NamedTuple):
    """What an error counts as: the type of its exception, and its kind in words."""

    type: str
    kind: str


def error_name(failed: Failed) -> ErrorName:
    """Return the type and the kind of a failed call."""
    name = failed.error_type or "error"
    return ErrorName(name, _kind(name, failed.http_status))


def _kind(name: str, status: int | None) -> str:
    """Return `429 rate limited`, `timeout`, `connection lost`; the type where there is no name for it."""
    if status is not None and status >= 300:
        words = _STATUSES.get(status)
        return f"{status} {words}" if words else str(status)
    if name in _TYPES:
        return _TYPES[name]
    return f"{status} without a whole answer" if status is not None and name in _OUR_OWN else name


def ranked(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the sums by name, the most frequent first."""
    sums: Counter[str] = Counter()
    for name, count in counts:
        sums[name] += count
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def by_type(counts: Mapping[ErrorName, int]) -> dict[str, int]:
    """Count errors by exception type, the most frequent first."""
    return ranked((name.type, count) for name, count in counts.items())


def by_kind(counts: Mapping[ErrorName, int]) -> dict[str, int]:
    """Count errors by kind, the most frequent first."""
    return ranked((name.kind, count) for name, count in counts.items())


class ErrorRow(NamedTuple):
    """A kind of error, its number, and the case and message of one, if still known."""

    kind: str
    number: int
    example: ErrorExample | None


def error_rows(metrics: Metrics) -> list[ErrorRow]:
    """Return the kinds of errors of a run; exception types where an older run has no kinds."""
    counts, examples = metrics.error_kinds, metrics.error_kind_examples or {}
    if counts is UNSET:
        counts, examples = metrics.errors, metrics.error_examples
    return [ErrorRow(kind, count, examples.get(kind)) for kind, count in counts.items()]
