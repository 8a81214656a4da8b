"""How the process ends: in order where it can, in time in any case."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NoReturn

from steelyard.cli.output import say
from steelyard.targets.process import kill_all

_LAST_WORD_SECONDS = 0.5
_EXIT_SECONDS = 5.0
"""How long Python may take over an ordinary exit: it waits for the suite's own threads and exit hooks."""


def leave(code: int) -> NoReturn:
    """End the process now, with the programs it started; threads and unread output are not waited for."""
    _end_children()
    os._exit(code)


def leave_in_time(code: int) -> NoReturn:
    """Exit as Python does, so that exit hooks run and pools close; without what does not end within a few seconds."""
    late, told = threading.Event(), threading.Event()
    # Both are started here: from Python 3.12 on no thread can be once the exit has begun.
    threading.Thread(target=_tell, args=(late, told), name="steelyard-last-word", daemon=True).start()
    threading.Thread(target=_cut_short, args=(code, late, told), name="steelyard-exit", daemon=True).start()
    sys.exit(code)


def _tell(late: threading.Event, told: threading.Event) -> None:
    late.wait()
    say("threads of the suite's own still run; leaving them behind")
    told.set()


def _cut_short(code: int, late: threading.Event, told: threading.Event) -> None:
    time.sleep(_EXIT_SECONDS)
    late.set()
    told.wait(_LAST_WORD_SECONDS)  # nobody may be reading it
    leave(code)


def _end_children() -> None:
    """End what would outlive this process: commands have a session of their own, workers of a pool wait for ever."""
    kill_all()
    if "multiprocessing.process" in sys.modules:
        from multiprocessing import active_children

        for child in active_children():
            child.kill()
