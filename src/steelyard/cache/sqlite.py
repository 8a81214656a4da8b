"""The SQLite store: responses in one file, for hundreds of thousands of entries, shared by threads and processes."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x53544C59  # "STLY": tells our files from other programs' databases
_BUSY_SECONDS = 4.0  # less than the 5 s within which an interrupted run must be gone
_COMPRESS_FROM = 4096  # bytes; below, zlib saves less than a page and costs more than the write

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    eval_set_id TEXT NOT NULL,
    case_id     TEXT NOT NULL,
    key         TEXT NOT NULL,
    compressed  INTEGER NOT NULL,
    body        BLOB NOT NULL,
    PRIMARY KEY (eval_set_id, case_id, key)
)
"""
_GET = "SELECT compressed, body FROM entries WHERE eval_set_id = ? AND case_id = ? AND key = ?"
_PUT = "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)"


class SqliteTaskResultStore:
    """A store in one file, in write-ahead mode: readers never wait for a writer. Safe from any thread and process."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._handles: _Handles | None = None
        self._opening = threading.Lock()
        with self._open():
            pass  # a file that is not a store is refused now, not at the first case

    def __repr__(self) -> str:
        return f"SqliteTaskResultStore({str(self.path)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return SqliteTaskResultStore, (self.path,)

    def get(self, eval_set_id: str, case_id: str, key: str) -> InvocationResponse | None:
        """Return the stored response; None when there is none, or it is damaged."""
        place = (eval_set_id, case_id, CacheKey(key))
        with self._open() as handles:
            row = handles.read(_GET, place)
        if row is None:
            return None
        try:
            return decode_entry(_unpacked(*row), *place)
        except (BadEntry, zlib.error, TypeError) as error:
            log.warning("cache: the entry of case %r in %s is ignored: %s", case_id, self.path, error)
            return None

    def put(self, eval_set_id: str, case_id: str, key: str, response: InvocationResponse) -> None:
        """Store a response, replacing any with this key; one that JSON cannot hold is skipped with a warning."""
        check_cacheable(response)
        place = (eval_set_id, case_id, CacheKey(key))
        try:
            data = encode_entry(*place, response)
        except UnwritableResponse as error:
            log.warning("cache: the response to case %r is not stored: %s", case_id, error)
            return
        with self._open() as handles:
            handles.write(_PUT, (*place, *_packed(data)))

    def info(self) -> StoreInfo:
        """Return the number of entries, and the bytes of the file with its write-ahead log."""
        with self._open() as handles:
            (entries,) = handles.read("SELECT count(*) FROM entries", ())
        size = 0
        for suffix in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(f"{self.path}{suffix}").st_size
        return StoreInfo(entries, size)

    def clear(self, eval_set_id: str | None = None) -> int:
        """Remove the entries of one eval set, or all, and free the space; returns how many."""
        with self._open() as handles:
            if eval_set_id is None:
                removed = handles.write("DELETE FROM entries", ())
            else:
                removed = handles.write("DELETE FROM entries WHERE eval_set_id = ?", (eval_set_id,))
            for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
                with contextlib.suppress(
                    sqlite3.OperationalError
                ):  # another process reads it; later entries reuse the space
                    handles.write(statement, ())
        return removed

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._opening:
            if self._handles is not None:
                self._handles.close()
                self._handles = None

    @contextlib.contextmanager
    def _open(self) -> Iterator[_Handles]:
        """Yield this process's handles; SQLite's errors become a StoreError that names the file."""
        try:
            handles = self._handles
            if handles is None or handles.pid != os.getpid():
                handles = self._opened()
            yield handles
        except (sqlite3.Error, OSError, UnicodeEncodeError) as error:
            raise StoreError(f"{self.path}: {error}") from error

    def _opened(self) -> _Handles:
        """Open new handles, once per process: a connection must not be used after a fork."""
        with self._opening:
            if self._handles is None or self._handles.pid != os.getpid():
                self._handles = _Handles(self.path)
                weakref.finalize(self, self._handles.close)
            return self._handles


class _Handles:
    """One connection to read and one to write, so that a look-up never waits for a write."""

    def __init__(self, path: Path) -> None:
        self.pid = os.getpid()
        self._locks = (threading.Lock(), threading.Lock())
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = _connected(path)
        try:
            _prepare(self._writer)
            self._reader = _connected(path)
        except BaseException:
            self._writer.close()
            raise

    def read(self, statement: str, values: tuple[Any, ...]) -> Any:
        """The first row, or None."""
        with self._locks[0]:
            return self._reader.execute(statement, values).fetchone()

    def write(self, statement: str, values: tuple[Any, ...]) -> int:
        """How many rows were changed."""
        with self._locks[1]:
            return self._writer.execute(statement, values).rowcount

    def close(self) -> None:
        if self.pid != os.getpid():
            return  # it is the parent process's
        with self._locks[0], self._locks[1]:
            self._reader.close()
            self._writer.close()


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    # In write-ahead mode NORMAL keeps every commit through a crash of the process; a power cut may undo the last ones.
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the file a store, or check that it is one."""
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            if not _is_ready(connection):
                connection.execute("PRAGMA journal_mode = WAL")
                _make_ready(connection)
            return
        except sqlite3.OperationalError as error:
            # SQLite's busy timeout does not cover another process switching a new file to write-ahead mode.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _is_ready(connection: sqlite3.Connection) -> bool:
    """Whether the file is a store; False when it is new, an error when it is anything else."""
    with connection:  # in one transaction: another process may be making it ready
        connection.execute("BEGIN")
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and application != _APPLICATION_ID:
        raise sqlite3.DatabaseError("this is a database, but not a Steelyard cache")
    if version > SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f"a newer Steelyard wrote this: schema {version}, known here: {SCHEMA_VERSION}")
    return bool(version == SCHEMA_VERSION)


def _make_ready(connection: sqlite3.Connection) -> None:
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(_SCHEMA)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _packed(data: bytes) -> tuple[bool, bytes]:
    if len(data) >= _COMPRESS_FROM:
        smaller = zlib.compress(data, 1)
        if len(smaller) < len(data):
            return True, smaller
    return False, data


def _unpacked(compressed: int, body: bytes) -> bytes:
    return zlib.decompress(body) if compressed else body
