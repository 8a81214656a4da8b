"""When a run should end before its time: nothing that it asks is answered, or too much of it fails."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from steelyard.protocols import InFlight
from steelyard.records import Record
from steelyard.run.options import RunOptions
from steelyard.stats.running import RunningStats
from steelyard.transport import errors

_LASTING_STATUSES = frozenset({401, 402, 403, 404, 405})
"""A key that is wrong, a bill that is not paid, a model or a path that is not there."""
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
_PATIENCE = 10
_ENOUGH_TO_STOP = 50


class StopRules:
    """Looks at the records of a run as they come, and cancels it when it should go no further.

    `done` is called when there is nothing left to look for.
    """

    def __init__(
        self,
        options: RunOptions,
        stats: RunningStats,
        in_flight: Callable[[], InFlight],
        cancel: Callable[[str], None],
        done: Callable[[], None],
    ) -> None:
        self._first = FirstErrors(options.stop_first_errors)
        self._most = options.stop_error_rate
        self._stats = stats
        self._in_flight = in_flight
        self._cancel = cancel
        self._done = done

    def look(self, record: Record) -> None:
        """Take one more record into account."""
        if not self._first.is_over:
            reason = self._first.take(record, self._in_flight().oldest_seconds)
            if reason is not None:
                self._cancel(reason)
        if self._most is not None:
            self._stop_above(self._most)
        elif self._first.is_over:
            self._done()

    def _stop_above(self, limit: float) -> None:
        if self._stats.total_requests >= _ENOUGH_TO_STOP:
            rate = self._stats.failed_requests / self._stats.total_requests
            if rate > limit:
                self._cancel(f"error rate {rate:.1%} is above stop_error_rate {limit:.1%}")


class FirstErrors:
    """Says when the first so many calls of a launch have all failed for one lasting reason; 0 is never.

    The tries of a case that nobody listened to count one by one. The first answer, or an error of another kind, is
    proof that the endpoint can be asked: from there on a case that fails fails alone. A refusal comes sooner than an
    answer: while a call is under way that was sent before the first of them failed, it is waited for, until ten times
    as many have failed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls = 0
        self._reason = ""
        self._since = math.inf
        """When the first of them had failed."""
        self.is_over = most == 0
        """Whether no record need be looked at any more."""

    def take(self, record: Record, oldest: float = 0.0) -> str | None:
        """Why the run should end, if with this record it should; `oldest` seconds is a call under way at most."""
        if self.is_over or record.cached:  # an answer out of the cache says nothing of the endpoint
            return None
        reason = _lasting_reason(record)
        if reason is None:
            self.is_over = True
            return None
        now = time.monotonic()
        if reason != self._reason:
            self._calls, self._reason, self._since = 0, reason, now
        self._calls += record.attempts
        if self._calls < self._most or (now - oldest < self._since and self._calls < _PATIENCE * self._most):
            return None
        self.is_over = True
        found = "nothing answers there" if reason == _UNREACHED else "every call is refused"
        return f"{found}: the first {self._calls:,} all failed, the last with {record.error} (stop_first_errors)"


def _lasting_reason(record: Record) -> str | None:
    """What the next call would fail of as well; None for an answer, and for a fault that may be this case's alone."""
    if record.status == "ok":
        return None
    if record.error_type in _NO_CONNECTION:
        return _UNREACHED
    return f"HTTP {record.http_status}" if record.http_status in _LASTING_STATUSES else None
