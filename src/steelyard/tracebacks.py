"""Tracebacks that a record keeps: the frames of the user's code, bounded in size, secrets masked."""

from __future__ import annotations

import os
import sysconfig
import traceback
from functools import lru_cache
from types import TracebackType

from steelyard.errors import describe
from steelyard.masking import environment_masker

MAX_TRACEBACK = 8_000
"""Characters that are kept of a traceback: its end, where the cause is."""

_MAX_FRAMES = 200
_MAX_CHAIN = 20
_CUT = "…\n"
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib")})


def user_traceback(error: BaseException) -> str | None:
    """The traceback of an exception and of its causes without Steelyard's own frames.

    None when there is no frame of anyone else's code: an endpoint's error is trace by its message.
    """
    try:
        if not _has_user_frame(error):
            return None
        trace = traceback.TracebackException.from_exception(error, limit=-_MAX_FRAMES, compact=True)
        _drop_own_frames(trace)
        text = environment_masker().text("".join(trace.format()).rstrip("\n"))
    except Exception:  # noqa: BLE001 - whatever an exception does when it is looked at, its record is written
        return None
    return text if len(text) <= MAX_TRACEBACK else _CUT + text[len(_CUT) - MAX_TRACEBACK :]


def masked_description(error: BaseException, max_length: int) -> str:
    """`Type: message` of an exception, secrets of the environment masked, cut."""
    return environment_masker().text(describe(error))[:max_length]


def _has_user_frame(error: BaseException) -> bool:
    """Whether code that is neither ours nor the standard library's was running, in it or in what caused it."""
    seen: list[BaseException] = [error]
    for one in seen:  # grows while it is read
        if _is_user_code(one.__traceback__):
            return True
        inner = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        for cause in (one.__cause__, one.__context__, *inner):
            if cause is not None and len(seen) < _MAX_CHAIN and not any(cause is known for known in seen):
                seen.append(cause)
    return False


def _is_user_code(frames: TracebackType | None) -> bool:
    while frames is not None:
        if _is_users(frames.tb_frame.f_code.co_filename):
            return True
        frames = frames.tb_next
    return False


@lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    """Whether a file is the user's, or of a package that was installed."""
    if file.startswith(("<frozen", _OURS)):
        return False
    return file.startswith(_INSTALLED) or not file.startswith(_STANDARD)


def _drop_own_frames(trace: traceback.TracebackException) -> None:
    left = [trace]
    while left:
        one = left.pop()
        one.stack = traceback.StackSummary.from_list(
            [frame for frame in one.stack if not frame.filename.startswith(_OURS)]
        )
        left += [part for part in (one.__cause__, one.__context__, *(one.exceptions or ())) if part is not None]
