"""Where the time went, as far as a run can tell: figures that only some targets and ways of sending have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from steelyard.stats.blocks import LIMIT, Blocks

DETAILS = (
    "time_to_first_content_token",
    "time_to_first_reasoning_token",
    "time_queued",
    "time_waiting",
    "time_in_backoff",
    "time_from_planned",
)


class Detailed(Protocol):
    """What a response or a record may tell beside the figures that all have."""

    @property
    def time_queued(self) -> float | None: ...
    @property
    def time_waiting(self) -> float | None: ...
    @property
    def time_in_backoff(self) -> float | None: ...
    @property
    def time_from_planned(self) -> float | None: ...


class Details:
    """The values of each detail that was ever told; one that never was costs nothing and is not reported."""

    def __init__(self) -> None:
        self._values: dict[str, Blocks] = {}

    @staticmethod
    def told_by(response: Detailed) -> bool:
        """Whether there is anything to tell: an endpoint was asked, more than once, after a wait, or by a plan."""
        return not (
            response.time_queued is None
            and response.time_waiting is None
            and response.time_in_backoff is None
            and response.time_from_planned is None
        )

    def update(self, response: Detailed) -> None:
        """Take in what the response tells."""
        for name in DETAILS:
            value = getattr(response, name)
            if value is not None and -LIMIT < value < LIMIT:
                if name not in self._values:
                    self._values[name] = Blocks()
                self._values[name].append(value)

    def seal(self) -> None:
        """Put recent values away; to be called every thousand or so."""
        for values in self._values.values():
            values.seal()

    def update_all(self, responses: Iterable[Detailed]) -> None:
        """The same for many."""
        for response in responses:
            if self.told_by(response):
                self.update(response)

    def merge(self, other: Details) -> None:
        """Take in another's values."""
        for name, values in other._values.items():
            self._values.setdefault(name, Blocks()).extend(values.joined())

    def columns(self) -> dict[str, npt.NDArray[np.float64]]:
        """The values of each detail, in the order in which details are reported."""
        return {name: self._values[name].joined() for name in DETAILS if name in self._values}
