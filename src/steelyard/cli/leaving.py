"""How the process ends: in order where it can, in time in any case."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NoReturn

from steelyard.cli.output import hurry, say

_EXIT_SECONDS = 5.0
"""How long Python may take over an ordinary exit: it waits for the suite's own threads and exit hooks."""


def leave(code: int) -> NoReturn:
    """End the process now, with the programs it started; threads and unread output are not waited for."""
    _end_children()
    os._exit(code)


def leave_in_time(code: int) -> NoReturn:
    """Exit as Python does, so that exit hooks run and pools close; without what does not end within a few seconds."""
    threading.Thread(target=_cut_short, args=(code,), name="steelyard-exit", daemon=True).start()
    sys.exit(code)


def _cut_short(code: int) -> None:
    time.sleep(_EXIT_SECONDS)
    hurry()
    say("threads of the suite's own still run; leaving them behind")
    leave(code)


def _end_children() -> None:
    """End what would outlive this process: commands have a session of their own, workers of a pool wait for ever."""
    if "steelyard.targets.process" in sys.modules:
        from steelyard.targets.process import kill_all

        kill_all()
    if "multiprocessing.process" in sys.modules:
        from multiprocessing import active_children

        for child in active_children():
            child.kill()
