"""What the mock really received: counts for the tests and benchmarks that must not take a client's word for it."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

import msgspec

_TIMES_KEPT = 100_000


class Times(msgspec.Struct, gc=False):
    """When one request was there and its answer left, in nanoseconds of the system's monotonic clock."""

    request_id: str
    id: str | None
    """Its `x-mock-id`, if it had one."""
    received_ns: int
    first_ns: int
    """The moment before the first token, or the whole answer, was written."""
    last_ns: int

    def told(self) -> dict[str, Any]:
        delay = (self.first_ns - self.received_ns) / 1e9
        return {**msgspec.structs.asdict(self), "first_token_delay_s": delay}


class Stats:
    """Counters of one server, since it started or was reset."""

    def __init__(self) -> None:
        self.connections = 0
        self.reset()

    def reset(self) -> None:
        """Count from nothing again; connections that are open stay counted."""
        self.connections_opened = self.connections
        self.peak_connections = self.connections
        self.requests = 0
        self.answers: Counter[tuple[str, int]] = Counter()
        self.dropped = 0
        self.torn = 0
        self.abandoned = 0
        self.chunks = 0
        self.bytes_received = 0
        self.bytes_sent = 0
        self.first_request_at: float | None = None
        self.last_request_at: float | None = None
        self.ids: Counter[str | bytes] = Counter()
        self.times: deque[Times] = deque(maxlen=_TIMES_KEPT)

    def opened(self) -> None:
        self.connections += 1
        self.connections_opened += 1
        self.peak_connections = max(self.peak_connections, self.connections)

    def received(self, size: int, identity: str | bytes) -> None:
        """A request to one of the APIs has come in whole."""
        self.requests += 1
        self.bytes_received += size
        self.last_request_at = now = time.time()
        if self.first_request_at is None:
            self.first_request_at = now
        self.ids[identity] += 1

    def told(self, current: int, peak: int, *, with_times: bool) -> dict[str, Any]:
        """All of it, for JSON."""
        by_path: dict[str, Counter[str]] = {}
        by_status: Counter[str] = Counter()
        for (path, status), count in self.answers.items():
            by_path.setdefault(path, Counter())[str(status)] += count
            by_status[str(status)] += count
        told = {
            "requests": self.requests,
            "by_status": by_status,
            "by_path": by_path,
            "unique_ids": len(self.ids),
            "repeated_ids": sum(count > 1 for count in self.ids.values()),
            "peak_concurrency": peak,
            "current_concurrency": current,
            **{name: getattr(self, name) for name in _PLAIN},
        }
        if with_times:
            told["times"] = [times.told() for times in self.times]
        return told


_PLAIN = (
    "dropped",
    "torn",
    "abandoned",
    "chunks",
    "connections",
    "connections_opened",
    "peak_connections",
    "bytes_received",
    "bytes_sent",
    "first_request_at",
    "last_request_at",
)
