"""A record as one line of JSON, whatever a target put into it."""

from __future__ import annotations

from typing import Any

import msgspec

from steelyard.records import Record, Score

_DEEPEST = 100
_LONGEST_STAND_IN = 1_000

_encoder = msgspec.json.Encoder()
_FREE_FIELDS = (
    "response_text",
    "input_prompt",
    "input_payload",
    "messages",
    "stop_reason",
    "error",
    "error_type",
    "notes",
)


def encode_record(record: Record) -> bytes:
    """One line, newline included. Values that JSON cannot hold are replaced in the record itself and noted there."""
    try:
        line = _encoder.encode(record)
    except (UnicodeError, TypeError, ValueError, OverflowError, RecursionError):
        _clean_record(record)
        line = _encoder.encode(record)
    return line + b"\n"


def _clean_record(record: Record) -> None:
    """Replace what cannot be written, field by field, and say so in the record's notes."""
    notes = list(record.notes)
    for name in _FREE_FIELDS:
        value = getattr(record, name)
        if not _encodable(value):
            cleaner = _Cleaner()
            setattr(record, name, cleaner.clean(value))
            notes.append(f"{name}: {cleaner.summary()}")
    for score in record.scores:
        _clean_score(score, notes)
    record.notes = [_text(note) for note in notes]


def _clean_score(score: Score, notes: list[str]) -> None:
    if not _encodable(score):
        score.name = _text(score.name)
        score.reason = None if score.reason is None else _text(score.reason)
        score.errors = [_text(error) for error in score.errors]
        notes.append(f"scores.{score.name}: text that is not Unicode was replaced")


def _encodable(value: object) -> bool:
    try:
        _encoder.encode(value)
    except (UnicodeError, TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def _text(text: str) -> str:
    """The same text with each lone surrogate replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Cleaner:
    """Makes a value writable and counts what it had to replace."""

    def __init__(self) -> None:
        self.texts = 0
        self.others = 0

    def clean(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, str):
            cleaned = _text(value)
            self.texts += cleaned != value
            return cleaned
        if depth > _DEEPEST:
            return self._stand_in(f"(nested deeper than {_DEEPEST})")
        if isinstance(value, dict):
            return {self._key(key): self.clean(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.clean(item, depth + 1) for item in value]
        if _encodable(value):
            return value
        return self._number_or_stand_in(value)

    def summary(self) -> str:
        parts = []
        if self.texts:
            parts.append(f"lone surrogates replaced in {self.texts} text(s)")
        if self.others:
            parts.append(f"{self.others} value(s) that JSON cannot hold replaced by text")
        return ", ".join(parts) or "rewritten as plain JSON"

    def _key(self, key: Any) -> str:
        return str(self.clean(key if isinstance(key, str) else str(key)))

    def _number_or_stand_in(self, value: Any) -> Any:
        """numpy's scalars as Python's; anything else as a short text."""
        item = getattr(value, "item", None)
        if callable(item):
            try:
                plain = item()
            except (TypeError, ValueError):
                plain = None
            if isinstance(plain, (bool, int, float)) and _encodable(plain):
                return plain
        try:
            return self._stand_in(repr(value))
        except Exception:  # noqa: BLE001 - a broken __repr__ in a target's payload must not lose its answer
            return self._stand_in(f"({type(value).__name__})")

    def _stand_in(self, text: str) -> str:
        self.others += 1
        return _text(text[:_LONGEST_STAND_IN])
