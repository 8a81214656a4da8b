"""When a run should end at once: nothing that it asks can be answered, whatever it asks next."""

from __future__ import annotations

from steelyard.records import Record
from steelyard.transport import faults

_LASTING_STATUSES = frozenset({401, 402, 403, 404, 405})
"""A key that is wrong, a bill that is not paid, a model or a path that is not there."""
_NO_CONNECTION = frozenset(
    kind.__name__
    for kind in (
        faults.CannotConnect,
        faults.CannotResolve,
        faults.CertificateRefused,
        faults.ProxyFailed,
        faults.ProxyRefused,
        faults.TimedOut,
        faults.TlsFailed,
        ConnectionRefusedError,
    )
)
_UNREACHED = "no connection"


class FirstErrors:
    """Says when the first so many calls of a sitting have all failed for one lasting reason; 0 is never.

    The tries of a case that nobody listened to count one by one. The first answer, or an error of another kind, is
    proof that the endpoint can be asked: from there on a case that fails fails alone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls = 0
        self._reason = ""
        self.is_over = most == 0
        """Whether no record need be looked at any more."""

    def take(self, record: Record) -> str | None:
        """Why the run should end, if with this record it should."""
        if self.is_over or record.cached:  # an answer out of the cache says nothing of the endpoint
            return None
        reason = _lasting_reason(record)
        if reason is None:
            self.is_over = True
            return None
        self._calls = record.attempts + (self._calls if reason == self._reason else 0)
        self._reason = reason
        if self._calls < self._most:
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
