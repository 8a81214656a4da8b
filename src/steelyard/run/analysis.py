"""What is found out from the records of a run once they are all there: its slices, and the metrics of a whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from steelyard.errors import ConfigurationError, RunCancelled
from steelyard.journal.manifest import Manifest
from steelyard.journal.reader import iter_records
from steelyard.records import Record
from steelyard.run.run_metrics import NamedMetric
from steelyard.stats.metrics import Metrics, RunMetric, SliceMetrics
from steelyard.stats.slices import Slices

Records: TypeAlias = Callable[[], Iterator[Record]]
"""Reads the records that count, in case order, from the beginning each time."""


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """What the records of a run say beyond the figures that are counted as they come."""

    slices: list[SliceMetrics] | None = None
    run_metrics: dict[str, RunMetric] | None = None


class Analysed(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be found out, and how the cases of the run were asked."""

    by: tuple[str, ...] = ()
    trials: int = 1
    by_case: bool = True
    """Whether trials of a case, and cases of a group, count together; not in a load run."""
    load: bool = False
    run_metrics: tuple[NamedMetric, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.by or self.run_metrics)

    def of(self, records: Records, check: Callable[[], None] = lambda: None) -> Analysis:
        """Read the records and find it out; `check` is called now and then and may raise to give up."""
        found: dict[str, RunMetric] = {}
        for metric in self.run_metrics:
            found |= metric.figures(_checked(records(), check))
        slices = self._slices(_checked(records(), check)) if self.by else None
        return Analysis(slices=slices, run_metrics=found if self.run_metrics else None)

    def _slices(self, records: Iterator[Record]) -> list[SliceMetrics]:
        slices = Slices(self.by, trials=self.trials, by_case=self.by_case, load=self.load)
        for record in records:
            slices.add(record)
        return slices.to_metrics()


def _checked(records: Iterator[Record], check: Callable[[], None]) -> Iterator[Record]:
    for number, record in enumerate(records):
        if number % 256 == 0:
            check()
        yield record


def asked_of(manifest: Manifest | None) -> Analysed:
    """What a run's manifest says was to be found out."""
    if manifest is None:
        return Analysed()
    by, trials, load = manifest.options.get("by"), manifest.options.get("trials"), manifest.load is not None
    return Analysed(
        by=tuple(by) if isinstance(by, list) else (),
        trials=trials if isinstance(trials, int) and trials > 0 and not load else 1,
        by_case=not load,
        load=load,
    )


def add_slices(metrics: Metrics, run: Path, manifest: Manifest | None, by: Sequence[str]) -> None:
    """Add the slices of a run by keys that it was not asked for; ConfigurationError for one that no case has."""
    there = {one.key for one in metrics.slices or ()}
    missing = tuple(key for key in by if key not in there)
    if not missing:
        return
    if manifest is not None and manifest.options.get("keep_expected") is False:
        raise ConfigurationError(f"{run} has no metadata in its records (keep_expected off): there are no slices")
    asked = msgspec.structs.replace(asked_of(manifest), by=missing)
    slices = Slices(asked.by, trials=asked.trials, by_case=asked.by_case, load=asked.load)
    for record in iter_records(run):
        slices.add(record)
    slices.refuse_missing(str(run))
    metrics.slices = [*(metrics.slices or ()), *slices.to_metrics()]


def stopping(is_cancelled: Callable[[], bool]) -> Callable[[], None]:
    """A check that gives up once the run is cancelled."""

    def check() -> None:
        if is_cancelled():
            raise RunCancelled("cancelled while the records were analysed")

    return check
