"""The task-result cache: what an answer depends on, and the stores that keep answers for later runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard._lazy import lazy_exports

if TYPE_CHECKING:
    from steelyard.cache.cached import Cached, SingleFlight
    from steelyard.cache.files import LocalFileTaskResultStore
    from steelyard.cache.sqlite import SqliteTaskResultStore
    from steelyard.cache.store import (
        CacheKey,
        CaseFingerprint,
        EvaluationDataStore,
        ManagedStore,
        StoreError,
        StoreInfo,
        fingerprint_of,
        is_cacheable,
        tool_set_hash,
    )

_HOMES = {
    "CacheKey": "steelyard.cache.store",
    "Cached": "steelyard.cache.cached",
    "CaseFingerprint": "steelyard.cache.store",
    "EvaluationDataStore": "steelyard.cache.store",
    "LocalFileTaskResultStore": "steelyard.cache.files",
    "ManagedStore": "steelyard.cache.store",
    "SingleFlight": "steelyard.cache.cached",
    "SqliteTaskResultStore": "steelyard.cache.sqlite",
    "StoreError": "steelyard.cache.store",
    "StoreInfo": "steelyard.cache.store",
    "fingerprint_of": "steelyard.cache.store",
    "is_cacheable": "steelyard.cache.store",
    "tool_set_hash": "steelyard.cache.store",
}

__all__ = [
    "CacheKey",
    "Cached",
    "CaseFingerprint",
    "EvaluationDataStore",
    "LocalFileTaskResultStore",
    "ManagedStore",
    "SingleFlight",
    "SqliteTaskResultStore",
    "StoreError",
    "StoreInfo",
    "fingerprint_of",
    "is_cacheable",
    "tool_set_hash",
]

# Files need no sqlite3, and the other way round.
__getattr__ = lazy_exports(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
