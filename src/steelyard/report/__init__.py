"""Results as text, pages and data, and runs compared with one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard._lazy import lazy_exports

if TYPE_CHECKING:
    from steelyard.report.compare.compare import compare_runs
    from steelyard.report.matrix.leaderboard import Leaderboard, leaderboard

_HOMES = {
    "Leaderboard": "steelyard.report.matrix.leaderboard",
    "compare_runs": "steelyard.report.compare.compare",
    "leaderboard": "steelyard.report.matrix.leaderboard",
}

__all__ = ["Leaderboard", "compare_runs", "leaderboard"]

# A report pays only for its own format.
__getattr__ = lazy_exports(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
