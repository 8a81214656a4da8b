"""How many files and connections this process may have open: the system's soft limit, raised where a run needs more."""

from __future__ import annotations

import contextlib
import logging

log = logging.getLogger("steelyard")

_SPARE = 64
"""What a run has open beside its calls: the journal, the suite, the event loop, libraries."""
_PIPES = 4
"""What a call may take when it is a program's; a connection takes one."""
SERVER = 65_536
"""What a server asks for, which cannot know who will come."""
_EVERYWHERE = 10_240
"""What macOS grants to anyone, where it refuses more though it names no limit."""


def allow_calls(calls: int) -> None:
    """Make room for so many calls at once; say so when the system's hard limit leaves too little."""
    limit = raise_limit(calls * _PIPES + _SPARE)
    if limit is not None and limit < calls + _SPARE:
        log.warning(
            "%s calls at once need about %s open files, and this process may have %s (ulimit -n):"
            " calls beyond that will fail",
            *(f"{number:,}" for number in (calls, calls + _SPARE, limit)),
        )


def raise_limit(wanted: int) -> int | None:
    """The number of files that may be open, raised to what is wanted as far as it may be; None when unlimited."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    for aim in (wanted, min(wanted, _EVERYWHERE)):
        new = aim if hard == resource.RLIM_INFINITY else min(aim, hard)
        if new > soft:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
                return new
    return soft
