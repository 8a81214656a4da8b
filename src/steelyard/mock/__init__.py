"""A local server with a simulated model: the OpenAI and Anthropic APIs, with realistic times and faults on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard._lazy import lazy_exports

if TYPE_CHECKING:
    from steelyard.mock.options import MockOptions
    from steelyard.mock.server import MockServer

_HOMES = {
    "MockOptions": "steelyard.mock.options",
    "MockServer": "steelyard.mock.server",
}

__all__ = ["MockOptions", "MockServer"]

__getattr__ = lazy_exports(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
