"""Sweeps as CSV, one row a level, that a spreadsheet can open without running anything in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from steelyard.report.sweep_table import PERCENTILES
from steelyard.report.table_csv import csv_line

_FIGURES = ("requests", "active_seconds", "requests_per_second", "error_rate", "pass_rate", "output_tps")
_TIMES = tuple((metric, name) for metric in ("time_to_first_token", "time_to_last_token") for name in PERCENTILES)
_STATES = ("peak_in_flight", "reached", "few", "invalid", "worst_error")


def sweep_csv(sweeps: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """A header, then a row for each level of each sweep, which comes with the name of its folder."""
    times = (f"{metric}-{name}" for metric, name in _TIMES)
    yield csv_line(["sweep", "suite", "model_id", "level", "recommended", *_FIGURES, *times, *_STATES, "broken"])
    for place, sweep in sweeps:
        for level in sweep["levels"]:
            yield csv_line([place, sweep["suite"], sweep["model_id"], *_row(level, sweep["recommendation"]["level"])])


def _row(level: Mapping[str, Any], best: int | None) -> list[Any]:
    return [
        level["level"],
        level["level"] == best,
        *(level[name] for name in _FIGURES),
        *(level[metric][name] for metric, name in _TIMES),
        *(level.get(name) for name in _STATES),
        "; ".join(level["broken"]),
    ]
