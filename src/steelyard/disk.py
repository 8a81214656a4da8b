"""Files on disk: renames that survive a power cut, and digests of what files contain."""

from __future__ import annotations

import hashlib
import os
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
