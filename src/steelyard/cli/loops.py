"""Which event loop a command runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: a choice of the command line, never made at import."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
