"""Files that a command is asked to write: there as a whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from steelyard.errors import ConfigurationError, JournalError

_NOT_A_DISK_FAILURE = (errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EROFS, errno.EPERM)


def write_text(path: Path, text: str) -> None:
    """Write a file in one step."""
    write_pieces(path, [text])


def write_pieces(path: Path, pieces: Iterable[str]) -> None:
    """Write a file that takes its place once it is whole.

    A place that cannot be written is the user's mistake, a full disk is not.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with draft.open("w", encoding="utf-8", errors="replace", newline="") as file:
                file.writelines(pieces)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        if error.errno in _NOT_A_DISK_FAILURE:
            raise ConfigurationError(message) from error
        raise JournalError(error.errno, message) from error
