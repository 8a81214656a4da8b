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


def open_regular(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o644, *, folder: int | None = None) -> int:
    """Open a file and return its descriptor; OSError for what is no file, such as a pipe, which may never end.

    `folder` is the descriptor of the folder that a relative path begins in.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), mode, dir_fd=folder)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
        raise NotAFile(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def open_beneath(root: Path, path: str) -> int:
    """Open a file by its path below a folder, for reading; OSError where a part of the path is a link, `..` or no name.

    What is below the folder may have been written by anybody: a link in it could lead to any file of the user's.
    """
    *folders, name = parts = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise FileNotFoundError(errno.ENOENT, "is not the path of a file", path)
    if os.open not in os.supports_dir_fd:  # no POSIX: what is a link is found by looking
        for number in range(1, len(parts) + 1):
            if root.joinpath(*parts[:number]).is_symlink():
                raise FileNotFoundError(errno.ENOENT, "leads through a link", path)
        return open_regular(root.joinpath(*parts))
    flags = os.O_RDONLY | os.O_NOFOLLOW
    place = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            below = os.open(folder, flags | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
            os.close(place)
            place = below
        return open_regular(name, flags, folder=place)
    finally:
        os.close(place)


def read_regular(path: Path | str) -> bytes:
    """Read a whole file; OSError for what is no file."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_beneath(root: Path, path: str, most: int) -> bytes:
    """The first bytes of a file below a folder, as `open_beneath` opens it."""
    with os.fdopen(open_beneath(root, path), "rb") as file:
        return file.read(most)
