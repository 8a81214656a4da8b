"""The session that every case begins with, from a file: read once, checked before anything is called."""

from __future__ import annotations

from pathlib import Path

import msgspec

from steelyard.contracts import Session
from steelyard.errors import ConfigurationError


def read_session(path: str | Path) -> Session:
    """The session in a JSON file: an object with `data`, an object, and `messages`, a list of objects."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Session)
    except OSError as error:
        raise ConfigurationError(f"initial session {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"initial session {path}: {error}") from error
