"""Keys, answers and stores for the tests of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard import EvalCase, InvocationContext, InvocationResponse
from steelyard.cache import CacheKey, CaseFingerprint, LocalFileTaskResultStore, ManagedStore, SqliteTaskResultStore

STORES = ("local", "sqlite")


def open_store(kind: str, folder: Path) -> ManagedStore:
    """The store of that kind in a folder, the same one each time."""
    return LocalFileTaskResultStore(folder / "files") if kind == "local" else SqliteTaskResultStore(folder / "cache.db")


def key_of(number: int = 0) -> CacheKey:
    return CaseFingerprint(case_id=f"c{number}", agent_model="m").key


def an_answer(text: str = "Paris", **more: Any) -> InvocationResponse:
    return InvocationResponse(response_text=text, **{"stop_reason": "stop", **more})


def context_of(case: EvalCase, **more: Any) -> InvocationContext:
    return InvocationContext(case_id=case.id, **more)
