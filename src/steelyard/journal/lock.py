"""One writer at a time: a lock that dies with its holder and says who that is."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import filelock
import msgspec

from steelyard.disk import open_regular, read_regular
from steelyard.errors import JournalError, RunLocked
from steelyard.journal.files import LOCK

_ACQUIRE_SECONDS = 0.1
"""Seconds before a lock counts as held by another process: one that only checks it holds it for an instant."""
_CHECK_SECONDS = 0.02
"""The same for a process that only checks."""

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
"""A lock that is a link would have its target overwritten."""

_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


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
            descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW)
        except OSError as error:
            if self._path.is_symlink():
                raise JournalError(
                    error.errno, f"{self._path} is a symbolic link, which is not followed: remove it"
                ) from error
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
        _keep_from_forks(self)
        me = Holder(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))
        with contextlib.suppress(OSError):  # on a full disk the name finds no room, but the lock is held
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(me) + b"\n", 0)

    def _locked(self, descriptor: int) -> bool:
        """Whether the lock could be taken; a file system without locks is an error, not a refusal."""
        try:
            return _take(descriptor, _ACQUIRE_SECONDS)
        except OSError as error:
            os.close(descriptor)
            raise JournalError(error.errno, f"cannot lock {self._path}: {error.strerror}") from error

    def holder(self) -> Holder:
        """Who wrote its name into the lock file last."""
        try:
            return msgspec.json.decode(read_regular(self._path), type=Holder)
        except (OSError, msgspec.DecodeError):
            return Holder()

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            filelock.unlock_descriptor(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def forget(self) -> None:
        """In a forked child: let go of the copy of the descriptor, which would keep the lock when the parent dies.

        To unlock it here would unlock it for the parent too.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _take(descriptor: int, seconds: float) -> bool:
    """Whether the lock could be taken, trying for this long."""
    deadline = time.monotonic() + seconds
    while not filelock.lock_descriptor(descriptor, blocking=False):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _keep_from_forks(lock: RunLock) -> None:
    _held.add(lock)
    if hasattr(os, "register_at_fork"):
        _register_at_fork()


@functools.cache
def _register_at_fork() -> None:
    """See to it, once in a process, that children forked without an exec hold no run directory."""
    os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


def is_locked(run: Path) -> Holder | None:
    """The live holder of a run directory, or None; does not wait for the lock."""
    lock = RunLock(run)
    try:
        descriptor = open_regular(run / LOCK, os.O_RDWR | _NO_FOLLOW)
    except OSError:
        if not (run / LOCK).is_file() or (run / LOCK).is_symlink():
            return None  # none, or one that no run has made
        raise
    try:
        if _take(descriptor, _CHECK_SECONDS):
            filelock.unlock_descriptor(descriptor)
            return None
        return lock.holder()
    finally:
        os.close(descriptor)
