"""What answers a case: your own callable, a program, a pretend model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard._lazy import lazy_exports

if TYPE_CHECKING:
    from steelyard.targets.command import Command
    from steelyard.targets.function import CallableTarget, as_target
    from steelyard.targets.simulated import Simulated

_HOMES = {
    "CallableTarget": "steelyard.targets.function",
    "Command": "steelyard.targets.command",
    "Simulated": "steelyard.targets.simulated",
    "as_target": "steelyard.targets.function",
}

__all__ = ["CallableTarget", "Command", "Simulated", "as_target"]

# A run pays only for the target it uses.
__getattr__ = lazy_exports(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
