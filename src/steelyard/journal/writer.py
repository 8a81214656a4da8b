"""Appending records: in the kernel's hands when `append` returns, on the disk at most 100 ms later."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from steelyard.errors import JournalError
from steelyard.journal.files import INDEX, OUTPUTS

MakeRows: TypeAlias = Callable[[npt.NDArray[np.int64]], bytes]
"""Turns noted columns (offset, length, slot, verdict) into rows of the index."""

_PAUSE = 0.05
"""Seconds between group commits: with the sync itself this keeps the disk within 100 ms of the kernel."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)

_sync = getattr(os, "fdatasync", os.fsync)


class AppendOnlyFile:
    """Appends whole lines to a file; a thread of its own commits them in groups."""

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
        """Hand one whole line to the kernel; returns where it begins. On failure the file ends where it did before."""
        if self._failure is not None:
            raise self._error(self._failure)
        offset = self.size
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
                os.ftruncate(self._descriptor, offset)
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
            self._clean = True  # before the commit: whoever finds it set writes what this commit may miss
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
        """Remember where a record lies: offset, length, slot and verdict, of which a row of the index is made and
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
        data = self._make_rows(np.array(notes, dtype=np.int64).reshape(-1, 4))
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
