"""What a sweep has spent, all of its levels together, and what is left of its budget."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from steelyard.errors import RunRefused
from steelyard.journal.files import MANIFEST, PREVIOUS
from steelyard.result import Result
from steelyard.stats.spending import format_money

log = logging.getLogger("steelyard")


class SweepBudget:
    """Adds up what every run in a sweep's folder has cost: finished, broken off, judged, or moved aside and repeated.

    What `--force` has moved aside belongs to another sweep.
    """

    def __init__(self, sweep: Path, limit: float | None, currency: str) -> None:
        self._sweep = sweep
        self._limit = limit
        self._currency = currency
        self._settled: dict[Path, float | None] = {}

    def spent(self) -> float | None:
        """Everything that is known to be spent; None when no cost of any run is known."""
        runs = sorted(manifest.parent for manifest in self._sweep.glob(f"level-*/**/{MANIFEST}"))
        costs = [cost for run in runs if (cost := self._cost(run)) is not None]
        return math.fsum(costs) if costs else None

    def left(self, again_in: Path | None = None) -> float | None:
        """What may still be spent, 0 when nothing; None when there is no limit.

        A run that goes on in `again_in` counts in what it has spent so far by itself.
        """
        if self._limit is None:
            return None
        own = self._cost(again_in) if again_in is not None and (again_in / MANIFEST).exists() else None
        return max(self._limit - (self.spent() or 0.0) + (own or 0.0), 0.0)

    def describe(self) -> str:
        """Why no more may be asked."""
        spent = format_money(self.spent() or 0.0, self._currency)
        return f"{spent} spent in the whole sweep: max_cost is {self._limit:g}"

    def _cost(self, run: Path) -> float | None:
        if PREVIOUS not in run.relative_to(self._sweep).parts:
            return _cost_of(run)
        if run not in self._settled:  # what was moved aside does not change any more
            self._settled[run] = _cost_of(run)
        return self._settled[run]


def _cost_of(run: Path) -> float | None:
    """What a run has cost; of one that only weighed a level's answers, what its judges have."""
    try:
        metrics = Result.load(run).metrics
    except RunRefused as error:
        log.warning("what %s has cost is not counted: %s", run, error)
        return None
    cost: float | None = metrics.get("cost_judges" if "scored_from" in metrics else "cost")
    return cost
