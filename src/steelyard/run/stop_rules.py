"""When to stop a run early: every first call fails for one lasting reason, or too many calls fail."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from steelyard.protocols import InFlight
from steelyard.records import Record
from steelyard.run.options import RunOptions
from steelyard.stats.running import RunningStats
from steelyard.transport import errors

_LASTING_STATUSES = frozenset({401, 402, 403, 404, 405})
"""A wrong key, an unpaid bill, a model or a path that does not exist."""
_BAD_REQUEST_STATUSES = frozenset({400, 422})
"""Often the fault of one case; of all cases where the endpoint words it the same each time: a wrong model, a wrong
option."""
_VARYING = re.compile(r"[0-9a-f-]{8,}|\d+", re.IGNORECASE)
"""What differs between two messages of one fault: request ids, numbers."""
_NO_CONNECTION = frozenset(
    kind.__name__
    for kind in (
        errors.CannotConnect,
        errors.CannotResolve,
        errors.CertificateRefused,
        errors.ProxyFailed,
        errors.ProxyRefused,
        errors.TimedOut,
        errors.TlsFailed,
        ConnectionRefusedError,
    )
)
_UNREACHED = "no connection"
_BAD_REQUEST = "bad request"
_WAIT_FACTOR = 10
"""How many times the limit may fail while an older call could still be answered."""
_MIN_REQUESTS = 50
"""Before this many, an error rate says too little to stop a run."""


class StopRules:
    """Checks each record of a run as it comes, and cancels the run when a rule says so."""

    def __init__(self, options: RunOptions, in_flight: Callable[[], InFlight], cancel: Callable[[str], None]) -> None:
        self._first = FirstErrors(options.stop_first_errors)
        self._max_error_rate = options.stop_error_rate
        self._in_flight = in_flight
        self._cancel = cancel

    def check(self, record: Record, stats: RunningStats) -> bool:
        """Take one more record into account; False when no later record could stop the run."""
        if not self._first.is_over:
            reason = self._first.take(record, self._in_flight().oldest_seconds)
            if reason is not None:
                self._cancel(reason)
        if self._max_error_rate is None:
            return not self._first.is_over
        self._stop_above(self._max_error_rate, stats)
        return True

    def _stop_above(self, limit: float, stats: RunningStats) -> None:
        if stats.total_requests >= _MIN_REQUESTS:
            rate = stats.failed_requests / stats.total_requests
            if rate > limit:
                self._cancel(f"error rate {rate:.1%} is above stop_error_rate {limit:.1%}")


class FirstErrors:
    """Detects that the first `limit` calls of a launch all failed for one lasting reason; 0 switches it off.

    Each attempt of a case counts. The first answer, or an error of another kind, shows that the endpoint works: from
    then on a case that fails fails alone. Bad requests (400, 422) count only while their messages are the same, too.
    A refusal comes sooner than an answer: while a call is in flight that was
    sent before the first of them failed, it is waited for, until ten times as many have failed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls = 0
        self._reason = ""
        self._since = math.inf
        """When the first of them failed."""
        self.is_over = limit == 0
        """Whether no later record can change the outcome."""

    def take(self, record: Record, oldest: float = 0.0) -> str | None:
        """Return why the run should stop, if it should; the oldest call in flight was sent `oldest` seconds ago."""
        if self.is_over or record.cached:  # an answer from the cache says nothing about the endpoint
            return None
        reason = _lasting_reason(record)
        if reason is None:
            self.is_over = True
            return None
        now = time.monotonic()
        if reason != self._reason:
            if self._reason and _BAD_REQUEST in (reason[: len(_BAD_REQUEST)], self._reason[: len(_BAD_REQUEST)]):
                self.is_over = True  # refused in another way than the calls before: each request is looked at
                return None
            self._calls, self._reason, self._since = 0, reason, now
        self._calls += record.attempts
        if self._calls < self._limit or (now - oldest < self._since and self._calls < _WAIT_FACTOR * self._limit):
            return None
        self.is_over = True
        found = "nothing answers there" if reason == _UNREACHED else "every call is refused"
        return f"{found}: the first {self._calls:,} all failed, the last with {record.error} (stop_first_errors)"


def _lasting_reason(record: Record) -> str | None:
    """Name the fault that the next call would meet as well; None for an answer or a fault of this case alone."""
    if record.status == "ok":
        return None
    if record.error_type in _NO_CONNECTION:
        return _UNREACHED
    if record.http_status in _BAD_REQUEST_STATUSES:
        return f"{_BAD_REQUEST} {record.http_status}: {_VARYING.sub('#', record.error or '')}"
    return f"HTTP {record.http_status}" if record.http_status in _LASTING_STATUSES else None
