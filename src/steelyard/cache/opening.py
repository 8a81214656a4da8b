"""A store from what a user names: a folder, a database file, or a store of their own."""

from __future__ import annotations

import os
from pathlib import Path

from steelyard.cache.store import EvaluationDataStore
from steelyard.errors import ConfigurationError

DATABASE_ENDINGS = (".sqlite", ".sqlite3", ".db")


def open_store(cache: object) -> EvaluationDataStore | None:
    """The store at a path, by its ending a database or else a folder of files; a store as it is; None for None."""
    if cache is None:
        return None
    if isinstance(cache, str | os.PathLike):
        path = Path(cache)
        if path.suffix.lower() in DATABASE_ENDINGS:
            from steelyard.cache.sqlite import SqliteTaskResultStore

            return SqliteTaskResultStore(path)
        from steelyard.cache.local import LocalFileTaskResultStore

        return LocalFileTaskResultStore(path)
    if isinstance(cache, EvaluationDataStore):
        return cache
    raise ConfigurationError(f"cache must be a path or have get and put, got {type(cache).__name__}")
