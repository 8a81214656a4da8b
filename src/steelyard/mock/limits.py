"""What the mock lets through: so many requests at once, so many in a second or a minute."""

from __future__ import annotations

import msgspec

from steelyard.rates import parse_rate


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is not let through, and when to come back."""

    message: str
    retry_after: float


class Limits:
    """Counts the requests that are being answered, and turns away those above a limit.

    The rate is a bucket that holds one unit's worth (600 for `600/min`, 10 for `10/s`) and fills evenly.
    """

    def __init__(self, max_concurrency: int | None = None, rate: str | None = None) -> None:
        self._max = max_concurrency
        limit = parse_rate(rate) if rate else None
        self._capacity = max(1.0, limit.count) if limit else 0.0
        self._per_second = limit.per_second if limit else 0.0
        self._left = self._capacity
        self._filled_at = 0.0
        self.current = 0
        self.peak = 0

    def admit(self, now: float) -> Refusal | None:
        """Let a request in, which `release` must end; or say why not."""
        if self._max is not None and self.current >= self._max:
            return Refusal(f"Rate limit reached: {self._max} requests at once are allowed", 1.0)
        if self._capacity and (refusal := self._spend(now)):
            return refusal
        self.current += 1
        if self.current > self.peak:
            self.peak = self.current
        return None

    def release(self) -> None:
        self.current -= 1

    def reset(self) -> None:
        """Forget the peak. Who is inside stays inside, and the bucket is as full as it is."""
        self.peak = self.current

    def _spend(self, now: float) -> Refusal | None:
        self._left = min(self._capacity, self._left + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        if self._left < 1:
            return Refusal("Rate limit reached: too many requests", (1 - self._left) / self._per_second)
        self._left -= 1
        return None
