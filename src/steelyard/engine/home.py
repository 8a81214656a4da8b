"""What stays with the process that owns a run, wherever the work is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class AtHome:
    """A callback that runs in the process that owns the run: work elsewhere only sends word. It returns nothing."""

    def __init__(self, callback: Callable[..., None]) -> None:
        self._callback = callback

    def __call__(self, *args: Any) -> None:
        self._callback(*args)
