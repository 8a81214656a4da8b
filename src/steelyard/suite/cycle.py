"""The plan of a load run: the same cases round and round, until enough were sent or the time is up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.records import Job
from steelyard.suite.plan import Plan

_MOST_KEPT = 10_000
"""Cases kept in memory between rounds; of a larger suite they are read again each time."""


class CyclingPlan(Plan, kw_only=True, dict=True, eq=False):
    """Slots in the order of sending, `round * cases + position`; a record's trial is the round it was sent in.

    Without a number of `requests` there are as many slots as jobs were handed out.
    """

    requests: int | None
    duration: float | None
    clock: Callable[[], float] = time.monotonic
    handed_out: int = 0

    @property
    def slots(self) -> int:
        """How many requests are planned; of a run without a number, those handed out so far."""
        return self.requests if self.requests is not None and not self.is_open_ended else self.handed_out

    @property
    def is_open_ended(self) -> bool:
        """Whether a time ends it, or its schedule, and not a number of requests."""
        return self.requests is None or self.duration is not None

    def slot_at(self, index: int, trial: int) -> int:
        """The slot of a case in one of the rounds."""
        return trial * self.cases + super().slot_at(index, 0)

    def index(self, slot: int) -> int:
        """The place in the suite of a slot's case."""
        return super().index(slot % self.cases)

    def places(self, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The position and the round of each slot."""
        rounds, positions = np.divmod(slots, self.cases)
        return positions, rounds

    def slot_of(self, id_digests: npt.NDArray[np.uint64], trials: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The slot of each (id digest, round); -1 where the case is not planned."""
        positions = super().slot_of(id_digests, np.zeros_like(trials))
        return np.where(positions < 0, -1, trials.astype(np.int64) * self.cases + positions)

    def jobs(self, done: bytearray | None = None) -> Iterator[Job | None]:  # noqa: ARG002 - nothing is done before
        """Jobs without end, or until all requests were handed out or the time since the first is up."""
        ends = None if self.duration is None else self.clock() + self.duration
        for number in itertools.count():
            for job in self._round():
                if self.handed_out == self.requests or (ends is not None and self.clock() >= ends):
                    return
                if job is None:
                    yield None
                    continue
                self.handed_out += 1
                yield msgspec.structs.replace(job, trial=number)

    def _round(self) -> Iterable[Job | None]:
        if self.cases > _MOST_KEPT:
            return super().jobs()
        kept: list[Job | None] | None = self.__dict__.get("_kept")
        if kept is None:
            kept = self.__dict__["_kept"] = [job for job in super().jobs() if job is not None]
        return kept


def cycling(plan: Plan, *, requests: int | None, duration: float | None) -> CyclingPlan:
    """The same cases as in this plan, sent round and round."""
    facts = {name: getattr(plan, name) for name in Plan.__struct_fields__}
    return CyclingPlan(**{**facts, "trials": 1}, requests=requests, duration=duration)
