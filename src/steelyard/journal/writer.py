"""Appending records: in the kernel's hands when `append` returns, on the disk at most 100 ms later."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.errors import JournalError
from steelyard.journal.checksum import seal
from steelyard.journal.files import INDEX, OUTPUTS
from steelyard.records import TOKEN_FIELDS, Record

MakeRows: TypeAlias = Callable[[npt.NDArray[np.int64]], bytes]
"""Turns noted columns (offset, length, slot, verdict, crc) into rows of the index."""

_PAUSE = 0.05
"""Seconds between group commits: with the sync itself this keeps the disk within 100 ms of the kernel."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)

_sync = getattr(os, "fdatasync", os.fsync)


class AppendOnlyFile:
    """Appends whole lines to a file; a background thread commits them in groups."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, _FLAGS, 0o644)
        self.size = os.fstat(self._descriptor).st_size
        self._failure: OSError | None = None
        self._clean = True
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._committer = threading.Thread(target=self._commit_in_groups, name="steelyard-commit", daemon=True)
        self._committer.start()

    def append(self, line: bytes) -> int:
        """Hand one whole line, or several, to the kernel; returns where the first begins.

        On failure the file ends after the last line that is whole.
        """
        if self._failure is not None:
            raise self._error(self._failure)
        offset, written = self.size, 0
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):
                more = os.write(self._descriptor, memoryview(line)[written:])
                if more == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += more
        except OSError as error:
            self._failure = error
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, offset + line.rfind(b"\n", 0, written) + 1)
            raise self._error(error) from error
        self.size = offset + len(line)
        if self._clean:
            self._clean = False
            self._dirty.set()
        return offset

    def close(self) -> None:
        """Commit what is left; raises JournalError if any commit failed."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._dirty.set()
        self._committer.join()
        self._commit()
        os.close(self._descriptor)
        if self._failure is not None:
            raise self._error(self._failure)

    def _commit_in_groups(self) -> None:
        while not self._closing.is_set():
            self._dirty.wait()
            self._dirty.clear()
            self._clean = True  # before the commit: a writer that finds it set writes what this commit may miss
            self._commit()
            self._closing.wait(_PAUSE)

    def _commit(self) -> None:
        try:
            _sync(self._descriptor)
        except OSError as error:
            self._failure = self._failure or error

    def _error(self, error: OSError) -> JournalError:
        return JournalError(error.errno, f"cannot write {self._path}: {error.strerror or error}")


class JournalWriter(AppendOnlyFile):
    """Appends lines to `outputs.jsonl`, and with each group commit their rows to `outputs.idx`."""

    def __init__(self, run: Path, make_rows: MakeRows, *, indexing: bool = True) -> None:
        self._make_rows = make_rows
        self._notes: list[int] = []
        self.note = self._notes.extend
        """Remember where a record lies: offset, length, slot, verdict and crc, of which a row of the index is made and
        written with the next group commit. The list's own method, as this is called for every record."""
        self._index: int | None = None
        if indexing:
            with contextlib.suppress(OSError):
                self._index = os.open(run / INDEX, _FLAGS, 0o644)
        try:
            super().__init__(run / OUTPUTS)
        except OSError:
            self._stop_indexing()
            raise

    def close(self) -> None:
        """Commit what is left, rows included; raises JournalError if any commit failed."""
        try:
            super().close()
        finally:
            self._stop_indexing()

    def _commit(self) -> None:
        super()._commit()
        self._write_rows()

    def _write_rows(self) -> None:
        # Two steps, each atomic: what is noted between them stays for the next time.
        notes = self._notes[:]
        del self._notes[: len(notes)]
        if not notes or self._index is None:
            return
        data = self._make_rows(np.array(notes, dtype=np.int64).reshape(-1, 5))
        try:
            whole = os.write(self._index, data) == len(data)
        except OSError:
            whole = False
        if not whole:
            # Rows after a gap would claim to cover it. Without them a reader looks at the journal's end itself.
            self._stop_indexing()

    def _stop_indexing(self) -> None:
        if self._index is not None:
            os.close(self._index)
            self._index = None


_MAX_DEPTH = 100
"""Levels of nesting: more can be written, but not read back wherever the stack is already deep."""

_MAX_STAND_IN = 1_000

_encode = msgspec.json.Encoder().encode


def _holds_text(hint: Any) -> bool:
    return hint is str or hint is Any or any(map(_holds_text, get_args(hint)))


@cache
def _text_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields of a struct in which there may be text."""
    return tuple(name for name, hint in get_type_hints(kind).items() if _holds_text(hint))


class _Loose(msgspec.Struct):
    """The fields of a record in which a target may have put anything."""

    input_payload: Any = None
    messages: Any = None


_read_loose = msgspec.json.Decoder(_Loose).decode


def encode_record(record: Record) -> bytes:
    """One line, checksum and newline included, as `seal_record` makes it."""
    return seal_record(record)[0]


def seal_record(record: Record) -> tuple[bytes, int]:
    """One line, newline included, and the checksum in it.

    Values that JSON cannot hold are replaced in the record itself and noted there.
    """
    return seal(encode_unsealed(record))


def seal_encoded(encoded: bytes, run_time: float) -> tuple[bytes, int]:
    """The same of a record that was encoded elsewhere, with the `run_time` that it gets here."""
    # Keys come in the order of the fields, and quotes inside texts are escaped: the first one found is the record's.
    head, key, tail = encoded.partition(_NO_RUN_TIME)
    if not key:
        raise ValueError("a record from a worker has no run_time to fill in")
    return seal(b'%b,"run_time":%b,%b' % (head, _encode(run_time), tail))


_NO_RUN_TIME = b',"run_time":0.0,'


def encode_unsealed(record: Record) -> bytes:
    """A record as JSON, without the checksum and newline of its line; changed like by `seal_record`."""
    try:
        line = _encode(record)
    except Exception:  # noqa: BLE001 - whatever a payload does when it is looked at, its answer is recorded
        line = b""
    if line and record.input_payload is None and (record.messages is None or _are_plain(record.messages)):
        return line
    if not line or not _reads_back(record, line):
        _clean_record(record)
        line = _encode(record)
    return line


def _are_plain(messages: list[dict[str, Any]]) -> bool:
    """Whether these are texts under texts and nothing else, as most answers are: they read back as they are."""
    for message in messages:
        for key, value in message.items():
            if type(value) is not str or type(key) is not str:
                return False
    return True


def _reads_back(record: Record, line: bytes) -> bool:
    """Whether the line reads back as the record: NaN, bytes and odd keys are written, but as something else."""
    loose = _read_loose(line)
    if not _same(loose.input_payload, record.input_payload) or not _same(loose.messages, record.messages):
        return False
    if line.count(b"[") + line.count(b"{") <= _MAX_DEPTH:
        return True
    return not _is_deep(record.input_payload) and not _is_deep(record.messages)


def _same(read: Any, written: Any) -> bool:
    try:
        return bool(read == written)
    except Exception:  # noqa: BLE001 - a broken __eq__, or too deep to compare
        return False


def _is_deep(value: Any) -> bool:
    """Whether plain JSON is nested deeper than `_MAX_DEPTH`."""
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if type(item) is dict:
                inner += item.values()
            elif type(item) is list:
                inner += item
        if not inner:
            return False
        level = inner
    return True


def _clean_record(record: Record) -> None:
    """Replace what cannot be written, field by field, and say so in the record's notes."""
    notes = [f"{name}: {what}" for name, what in clean_texts(record)]
    for failed in record.retry_errors:
        notes += [f"retry_errors.{name}: {what}" for name, what in clean_texts(failed)]
    for name in TOKEN_FIELDS:
        if not _encodable(getattr(record, name)):
            setattr(record, name, None)
            notes.append(f"{name}: a number that JSON cannot hold was left out")
    for score in record.scores:
        if not _encodable(score):
            clean_texts(score)
            notes.append(f"scores.{score.name}: text that is not Unicode was replaced")
    record.notes = [*record.notes, *(whole_text(note) for note in notes)]


def clean_texts(struct: msgspec.Struct) -> list[tuple[str, str]]:
    """Replace what cannot be written in each field that may hold text; returns their names and what was done."""
    changed = []
    for name in _text_fields(type(struct)):
        cleaner = _Cleaner()
        cleaned = cleaner.clean(getattr(struct, name))
        if cleaner.changed:
            setattr(struct, name, cleaned)
            changed.append((name, cleaner.summary()))
    return changed


def _encodable(value: object) -> bool:
    try:
        _encode(value)
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


def whole_text(text: str) -> str:
    """The same text with each lone surrogate replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Cleaner:
    """Makes a value writable as plain JSON and counts what it had to replace."""

    def __init__(self) -> None:
        self.texts = 0
        self.others = 0

    @property
    def changed(self) -> bool:
        return bool(self.texts or self.others)

    def clean(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, str):
            return self._clean_text(value)
        if value is None or type(value) in (bool, int, float):
            return self._clean_number(value)
        if depth >= _MAX_DEPTH:
            return self._stand_in(f"(nested deeper than {_MAX_DEPTH})")
        if isinstance(value, dict):
            self.others += type(value) is not dict
            return {self._key(key): self.clean(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            self.others += type(value) is not list
            return [self.clean(item, depth + 1) for item in value]
        return self._as_read(value)

    def summary(self) -> str:
        parts = []
        if self.texts:
            parts.append(f"texts with lone surrogates replaced: {self.texts}")
        if self.others:
            parts.append(f"values that JSON cannot hold replaced: {self.others}")
        return ", ".join(parts)

    def _clean_text(self, text: str) -> str:
        cleaned = whole_text(text)
        self.texts += cleaned != text
        self.others += type(text) is not str
        return cleaned

    def _clean_number(self, value: float | None) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            self.others += 1
            return None
        return value if _encodable(value) else self._stand_in(f"({type(value).__name__})")

    def _key(self, key: Any) -> str:
        return self._clean_text(key) if isinstance(key, str) else self._stand_in(_repr(key))

    def _as_read(self, value: Any) -> Any:
        """numpy's scalars as Python's, bytes, dates and the like as they are written, the rest as a short text."""
        self.others += 1
        try:
            plain = value.item() if hasattr(value, "item") else value
            return msgspec.json.decode(_encode(plain))
        except Exception:  # noqa: BLE001 - nothing a payload does may lose its answer
            return whole_text(_repr(value)[:_MAX_STAND_IN])

    def _stand_in(self, text: str) -> str:
        self.others += 1
        return whole_text(text[:_MAX_STAND_IN])


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - a broken __repr__
        return f"({type(value).__name__})"
