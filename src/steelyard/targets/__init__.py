"""What answers a case: your own callable, a program, a pretend model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """Import a target's home when it is first asked for: a run pays only for the target it uses."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
