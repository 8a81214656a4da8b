"""Names checked against the names that are known, with the nearest one offered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from steelyard.errors import SuiteError, suggestion


def reject_unknown(
    mapping: Mapping[Any, Any],
    known: Collection[str],
    path: str = "",
    *,
    file: str | Path | None = None,
    line: int | None = None,
) -> None:
    """Refuse a mapping with a key that is not known, naming the key's path (`cases[3].expcted`)."""
    for key in mapping:
        if key not in known:
            where = f"{path}.{key}" if path else str(key)
            raise SuiteError(f"unknown key {where}; {suggestion(key, known)}", path=file, line=line)
