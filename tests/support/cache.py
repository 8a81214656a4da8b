"""Keys, answers and stores for the tests of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard import EvalCase, InvocationContext, InvocationResponse
from steelyard.cache import CacheKey, CaseFingerprint, LocalFileTaskResultStore, ManagedStore, SqliteTaskResultStore

STORES = ("local", "sqlite")
AWKWARD = [
    "a/b", "a\\b", "a:b", "..", ".", "", "...", "../../etc/passwd", "/etc/passwd", "C:\\x", "\\\\host\\share",
    "CON", "con", "nul.txt", "COM1", "lpt9.log", "aux", "a.", "a ", " a", "a..", ".hidden", "-rf", "--", "~", "~root",
    "a\0b", "\0", "a\nb", "x" * 300, "x" * 299 + "y", "X" * 300, "Case", "case", "CASE", "é", "e\u0301", "ﬁ", "fi",
    "İ", "\u0131", "ß", "SS", "😀", "שלום", "\u202eabc", "\ud800", "\udfff", "a*b?", 'a"b', "a|b", "<a>",
    "%2e%2e", "a%00",
]  # fmt: skip
"""Case ids that a file system, a shell or a terminal may stumble over."""


def open_store(kind: str, folder: Path) -> ManagedStore:
    """The store of that kind in a folder, the same one each time."""
    return LocalFileTaskResultStore(folder / "files") if kind == "local" else SqliteTaskResultStore(folder / "cache.db")


def key_of(number: int = 0) -> CacheKey:
    return CaseFingerprint(case_id=f"c{number}", agent_model="m").key


def an_answer(text: str = "Paris", **more: Any) -> InvocationResponse:
    return InvocationResponse(response_text=text, **{"stop_reason": "stop", **more})


def context_of(case: EvalCase, **more: Any) -> InvocationContext:
    return InvocationContext(case_id=case.id, **more)
