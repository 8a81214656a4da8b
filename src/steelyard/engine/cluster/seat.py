"""A worker's place in a run: what it was handed, what it may have in flight, how fast it works."""

from __future__ import annotations

import math
import time
from typing import Any

from steelyard.engine.cluster.leaves import Calls
from steelyard.engine.cluster.letters import Batch, Letter
from steelyard.engine.cluster.shares import Share
from steelyard.engine.cluster.supply import Given

_AHEAD_SECONDS = 0.1
_AHEAD_SHARE = 1 / 4
"""A worker has jobs waiting for so long at its pace, or this part of its share if that is more: many calls that end at
once must not wait for the driver. At the end of a run what waits is taken back where others have nothing to do."""
_SMOOTHING = 0.3


class Seat:
    """One worker, seen from the driver. The worker may die and be replaced: the seat stays."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.actor: Any = None
        self.node = "?"
        self.share = Share()
        self.given: dict[int, Given] = {}
        """By ticket, the oldest first."""
        self.calls: Calls | None = None
        self.is_missed = False
        """Whether it was said that no worker came."""
        self.peak = 0
        """The most it had in flight between its last two batches."""
        self.on_probation: int | None = None
        """The ticket of the one job on probation that it has."""
        self.letter = Letter()
        """What is to be said with the next opportunity."""
        self._rate = 0.0
        self._heard_at = time.monotonic()

    @property
    def is_live(self) -> bool:
        return self.actor is not None

    def wants(self, *, ahead: bool) -> int:
        """How many more jobs it should have: to begin at once and, with `ahead`, when those in flight end."""
        share = self.share.told
        if not (ahead and share):
            return share - len(self.given)
        return share + max(math.ceil(self._rate * _AHEAD_SECONDS), int(share * _AHEAD_SHARE)) - len(self.given)

    @property
    def waiting(self) -> int:
        """How many of its jobs cannot have begun."""
        return len(self.given) - self.share.told

    def sit_down(self, actor: Any, node: str, calls: Calls) -> None:
        """A worker took the seat."""
        self.actor, self.node, self.calls = actor, node, calls
        self.letter, self.is_missed = Letter(), False
        self._rate, self._heard_at = 0.0, time.monotonic()

    def leave(self) -> list[Given]:
        """The worker is gone; what it had."""
        lost = list(self.given.values())
        if self.calls is not None:
            self.calls.close()
        self.share.clear()
        self.given.clear()
        self.actor, self.calls, self.peak, self.on_probation = None, None, 0, None
        return lost

    def hear(self, batch: Batch, ended: int) -> None:
        """Learn how it stands, and how fast it goes."""
        now = time.monotonic()
        rate = ended / max(now - self._heard_at, 1e-3)
        self._rate += _SMOOTHING * (rate - self._rate)
        self._heard_at = now
        self.share.heard(batch.share_number, batch.inside)

    def next_letter(self) -> Letter:
        """What has gathered to be said."""
        letter, self.letter = self.letter, Letter()
        return letter
