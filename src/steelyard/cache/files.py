"""The file store: one file per response, easy to inspect, copy and delete; and ids as safe file names."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from steelyard.cache.store import (
    BadEntry,
    CacheKey,
    StoreError,
    StoreInfo,
    UnwritableResponse,
    check_cacheable,
    decode_entry,
    encode_entry,
)
from steelyard.records import InvocationResponse

log = logging.getLogger("steelyard")

_is_entry = re.compile(r"[0-9a-f]{64}\.json").fullmatch
_is_draft = re.compile(r"[0-9a-f]{64}\.json\.[0-9a-f]{16}\.tmp").fullmatch
_MAX_TRIES = 5

_MAX_LENGTH = 100
_MAX_READABLE = 60

# Lower-case ASCII only: some file systems ignore case, or normalise accents.
_is_plain = re.compile(rf"[a-z0-9_](?:[a-z0-9_.-]{{0,{_MAX_LENGTH - 2}}}[a-z0-9_-])?").fullmatch
_is_device = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?").fullmatch
_others = re.compile(r"[^a-z0-9_-]+")  # dots too: `nul.txt~…` would still be a Windows device


class LocalFileTaskResultStore:
    """A store of one file per response: `<root>/<eval_set_id>/<case_id>/<key>.json`.

    Any number of processes may share the folder: an entry appears whole or not at all.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()

    def __repr__(self) -> str:
        return f"LocalFileTaskResultStore({str(self.root)!r})"

    def path_of(self, eval_set_id: str, case_id: str, key: str) -> Path:
        """Return the path of an entry, whether it exists or not."""
        return self.root / file_name(eval_set_id) / file_name(case_id) / f"{CacheKey(key)}.json"

    def get(self, eval_set_id: str, case_id: str, key: str) -> InvocationResponse | None:
        """Return the stored response; None when there is none, or it is damaged."""
        path = self.path_of(eval_set_id, case_id, key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
        try:
            return decode_entry(data, eval_set_id, case_id, key)
        except BadEntry as error:
            log.warning("cache: %s is ignored and will be overwritten: %s", path, error)
            return None

    def put(self, eval_set_id: str, case_id: str, key: str, response: InvocationResponse) -> None:
        """Store a response, replacing any with this key; one that JSON cannot hold is skipped with a warning."""
        check_cacheable(response)
        path = self.path_of(eval_set_id, case_id, key)
        try:
            data = encode_entry(eval_set_id, case_id, key, response)
        except UnwritableResponse as error:
            log.warning("cache: the response to case %r is not stored: %s", case_id, error)
            return
        try:
            _write_whole(path, data)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error

    def info(self) -> StoreInfo:
        """Return the number of entries and their bytes."""
        entries = size = 0
        for path in self._files(None):
            if _is_entry(path.name):
                with contextlib.suppress(OSError):  # gone since it was listed
                    size += path.stat().st_size
                    entries += 1
        return StoreInfo(entries, size)

    def clear(self, eval_set_id: str | None = None) -> int:
        """Remove the entries of one eval set, or all; returns how many. Other files are left alone."""
        removed = 0
        try:
            for path in self._files(eval_set_id):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    removed += _is_entry(path.name) is not None
        except OSError as error:
            raise StoreError(f"cannot clear {self.root}: {error.strerror or error}") from error
        for set_folder in self._set_folders(eval_set_id):
            for folder in (*_folders(set_folder), set_folder):
                with contextlib.suppress(OSError):  # it holds other files, or another process writes to it
                    folder.rmdir()
        return removed

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def _files(self, eval_set_id: str | None) -> Iterator[Path]:
        """Yield entries, and drafts left by killed processes; no other files."""
        for set_folder in self._set_folders(eval_set_id):
            for case_folder in _folders(set_folder):
                for item in _listed(case_folder):
                    if _is_entry(item.name) or _is_draft(item.name):
                        yield Path(item.path)

    def _set_folders(self, eval_set_id: str | None) -> list[Path]:
        if eval_set_id is None:
            return list(_folders(self.root))
        folder = self.root / file_name(eval_set_id)
        return [] if folder.is_symlink() else [folder]


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: readers, other writers and crashes see all of it or none."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    for attempt in range(1, _MAX_TRIES + 1):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(draft, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except FileNotFoundError:  # another process cleared the folder
            if attempt == _MAX_TRIES:
                raise
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        else:
            return


def _folders(folder: Path) -> Iterator[Path]:
    """Return the real folders in a folder; symlinks are not followed, so that nothing outside the root is touched."""
    return (Path(item.path) for item in _listed(folder) if item.is_dir(follow_symlinks=False))


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return list(items)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"cannot list {folder}: {error.strerror or error}") from error


def file_name(identifier: str) -> str:
    """Return the id itself where it is safe as a file name everywhere; else its readable part, `~` and a digest."""
    if _is_plain(identifier) and not _is_device(identifier):
        return identifier
    # A long id is cut first; plain names contain no `~`, so the two kinds never collide.
    readable = _others.sub("_", identifier[:_MAX_READABLE].lower()).strip("_-")
    digest = blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{readable[:_MAX_READABLE]}~{digest}"
