"""The sweeps in the folder: what the runs of their levels add up to. Reads, never writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.journal.files import SWEEP, SWEEP_PARTIAL
from steelyard.report.sweep_page import markup, title
from steelyard.report.sweep_shape import checked_sweep
from steelyard.view.runs import Runs

_LEVEL = "level-"


class SweepHeadline(msgspec.Struct, kw_only=True):
    """One sweep, in a line."""

    id: str
    name: str
    suite: str
    model: str | None
    complete: bool
    levels: int
    recommended: int | None
    says: str


class Sweeps:
    """The sweeps below a folder, found by their levels, which are runs. Any thread may ask."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def headlines(self) -> list[SweepHeadline]:
        """All sweeps, in the order of their names."""
        found = [self._headline(place, sweep) for place in self._places() if (sweep := _read(place)) is not None]
        return sorted(found, key=lambda one: one.name)

    def page_of(self, sweep_id: str) -> tuple[str, str] | None:
        """The title and the markup of a sweep, all that is not ours escaped; None when the folder does not hold it."""
        for place, levels in self._places().items():
            if self._runs.id_of(place) == sweep_id and (sweep := _read(place)) is not None:
                links = {level.name: f"/run/{self._runs.id_of(level)}" for level in levels}
                return title(sweep), "\n".join(markup(sweep, self._runs.name_of(place), links))
        return None

    def _places(self) -> dict[Path, list[Path]]:
        """The folders that hold levels, and their levels."""
        found: dict[Path, list[Path]] = {}
        for headline in self._runs.headlines():
            place = self._runs.find(headline.id)
            if place is not None and place != self._runs.root and place.name.startswith(_LEVEL):
                found.setdefault(place.parent, []).append(place)
        return found

    def _headline(self, place: Path, sweep: Mapping[str, Any]) -> SweepHeadline:
        recommendation = sweep["recommendation"]
        return SweepHeadline(
            id=self._runs.id_of(place),
            name=self._runs.name_of(place),
            suite=sweep["suite"],
            model=sweep["model_id"],
            complete=sweep["complete"],
            levels=len(sweep["levels"]),
            recommended=recommendation["level"],
            says=recommendation["says"],
        )


def _read(place: Path) -> dict[str, Any] | None:
    """What a sweep found; None where there is none, or it is a link elsewhere or cannot be understood."""
    if any((place / name).is_symlink() for name in (SWEEP, SWEEP_PARTIAL)):
        return None
    try:
        return checked_sweep(place)
    except (ConfigurationError, OSError):
        return None
