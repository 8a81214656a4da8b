"""One writer at a time: a lock that dies with its holder and says who that is."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import filelock
import msgspec

from steelyard.errors import JournalError, RunLocked
from steelyard.journal.files import LOCK


class Holder(msgspec.Struct):
    """Who holds a run directory."""

    pid: int | None = None
    host: str | None = None
    since: str | None = None


class RunLock:
    """Held while a run writes to its directory. The system drops it when the process ends, however that happens.

    The file stays behind, with its last holder's name in it: removing a locked file would let two
    processes hold locks on two files of one name.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / LOCK
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise RunLocked naming its holder."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        except OSError as error:
            raise JournalError(error.errno, f"cannot open {self._path}: {error.strerror}") from error
        if not self._locked(descriptor):
            os.close(descriptor)
            holder = self.holder()
            raise RunLocked(
                f"{self._path.parent} is being written by process {holder.pid or '?'} on {holder.host or '?'}",
                path=self._path.parent,
                pid=holder.pid,
                host=holder.host,
            )
        self._descriptor = descriptor
        me = Holder(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))
        with contextlib.suppress(OSError):  # on a full disk the name finds no room, but the lock is held
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(me) + b"\n", 0)

    def _locked(self, descriptor: int) -> bool:
        """Whether the lock could be taken; a file system without locks is an error, not a refusal."""
        try:
            return filelock.lock_descriptor(descriptor, blocking=False)
        except OSError as error:
            os.close(descriptor)
            raise JournalError(error.errno, f"cannot lock {self._path}: {error.strerror}") from error

    def holder(self) -> Holder:
        """Who wrote its name into the lock file last."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Holder)
        except (OSError, msgspec.DecodeError):
            return Holder()

    def release(self) -> None:
        """Let the next one in."""
        if self._descriptor is not None:
            filelock.unlock_descriptor(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_locked(run: Path) -> Holder | None:
    """The live holder of a run directory, or None; looks without taking part."""
    lock = RunLock(run)
    if not (run / LOCK).exists():
        return None
    descriptor = os.open(run / LOCK, os.O_RDWR)
    try:
        if filelock.lock_descriptor(descriptor, blocking=False):
            filelock.unlock_descriptor(descriptor)
            return None
        return lock.holder()
    finally:
        os.close(descriptor)
