"""Load tests: the same cases at several parallelisms, and which of them an endpoint sustains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard._lazy import lazy_exports

if TYPE_CHECKING:
    from steelyard.load.sweep import Sweep, SweepResult

_HOMES = {"Sweep": "steelyard.load.sweep", "SweepResult": "steelyard.load.sweep"}

__all__ = ["Sweep", "SweepResult"]

# A run that measures no load does not pay for it.
__getattr__ = lazy_exports(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
