"""Names checked against the names that are known, with the nearest one offered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from steelyard.errors import SuiteError


def nearest(name: object, known: Collection[str]) -> str | None:
    """The known name that is most like this one, if any is."""
    matches = get_close_matches(str(name).lower(), list(known), n=1)
    return matches[0] if matches else None


def suggestion(name: object, known: Collection[str]) -> str:
    """How an error about an unknown name ends: the nearest known one, else all of them."""
    match = nearest(name, known)
    return f"did you mean {match!r}?" if match else f"known here: {', '.join(known)}"


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
