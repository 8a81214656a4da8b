"""Scorers: they give a response a value from 0 to 1, pass or fail, and a reason.

The scorers that suites use by name are listed once, in `steelyard.plugins`; their classes are public here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard._lazy import lazy_exports
from steelyard.plugins import BUILT_IN

if TYPE_CHECKING:  # whole modules, so that a new scorer in one of them is known without another line
    from steelyard.records import Sample as Sample
    from steelyard.scoring.base import *  # noqa: F403
    from steelyard.scoring.choice import *  # noqa: F403
    from steelyard.scoring.extract import extracting as extracting
    from steelyard.scoring.judge.calibration import calibration_of as calibration_of
    from steelyard.scoring.judge.calibration import is_trusted as is_trusted
    from steelyard.scoring.judge.judge import Judge as Judge
    from steelyard.scoring.judge.judge import Jury as Jury
    from steelyard.scoring.judge.prompts import Prompt as Prompt
    from steelyard.scoring.latency import *  # noqa: F403
    from steelyard.scoring.number import *  # noqa: F403
    from steelyard.scoring.pipeline import Combined as Combined
    from steelyard.scoring.similarity import *  # noqa: F403
    from steelyard.scoring.structured import *  # noqa: F403
    from steelyard.scoring.tests import *  # noqa: F403
    from steelyard.scoring.text import *  # noqa: F403
    from steelyard.scoring.trajectory import *  # noqa: F403

_HOMES = {
    **{name: module for module, _, name in (place.partition(":") for place in BUILT_IN["scorers"].values())},
    "Jury": "steelyard.scoring.judge.judge",
    "Prompt": "steelyard.scoring.judge.prompts",
    "Sample": "steelyard.records",
    "ToolCall": "steelyard.scoring.trajectory",
    "calibration_of": "steelyard.scoring.judge.calibration",
    "extracting": "steelyard.scoring.extract",
    "is_trusted": "steelyard.scoring.judge.calibration",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605

# A run imports only the scorers that it uses.
__getattr__ = lazy_exports(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return list(__all__)
