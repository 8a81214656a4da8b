"""Files on disk: renames that survive a power cut, digests of contents, and opening only what is a file."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable, where the system supports it."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_digest(paths: Iterable[Path], folder: Path) -> str | None:
    """A digest of files by their path in a folder and their content; None when none of them is a regular file."""
    digest, found = hashlib.sha256(), False
    for path in sorted(paths):
        try:
            if not path.is_file():  # an option, a folder, a pipe that would not end
                continue
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except (OSError, ValueError):
            continue
        digest.update(os.path.relpath(path, folder).encode("utf-8", "surrogateescape") + b"\0" + content)
        found = True
    return digest.hexdigest()[:16] if found else None


class NotAFile(OSError):
    """A pipe, a socket or a device in the place of a file."""


def open_regular(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a file and return its descriptor; OSError for what is no file, such as a pipe, which may never end."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), mode)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
        raise NotAFile(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def read_regular(path: Path | str) -> bytes:
    """Read a whole file; OSError for what is no file."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()
