"""Cgroups, versions 1 and 2: bounds on the memory and CPUs of all programs of an attempt together."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from steelyard.errors import ConfigurationError

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "steelyard-"
_PERIOD = 100_000
_MAX_PROCESSES = 4096
_END_SECONDS = 2.0
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]+")


def _own_places() -> dict[str, Path]:
    """Where this process's cgroup is, by controller; of version 2 the one under the empty name."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, place = line.split(":", 2)
        for name in names.split(","):
            mount = _ROOT / name if name else (_ROOT / "unified" if (_ROOT / "unified").is_dir() else _ROOT)
            folder = mount / place.lstrip("/")
            found[name] = folder if folder.is_dir() else mount
    return found


class Cgroup:
    """A cgroup with bounds. ConfigurationError where this user may not make one."""

    def __init__(self, label: str, *, memory: int | None = None, cpus: float | None = None) -> None:
        self._folders: list[Path] = []
        name = f"{_PREFIX}{os.getpid()}-{_NOT_PLAIN.sub('-', label)[-80:]}"
        try:
            places = _own_places()
            if (_ROOT / "cgroup.controllers").exists():
                self._make_unified(places[""] / name, memory, cpus)
            else:
                self._make_split(places, name, memory, cpus)
        except (OSError, KeyError) as error:
            self.close()
            why = getattr(error, "strerror", None) or f"there is no controller {error}"
            raise ConfigurationError(
                f"memory and cpus of a sandbox need a cgroup that this user may write, and there is none: {why}; "
                "run in a delegated scope (systemd-run --user --scope -p Delegate=yes …), as root, or without them"
            ) from error

    def __enter__(self) -> Cgroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def joining(self) -> list[str]:
        """The files to which a process writes 0 to join."""
        return [str(folder / "cgroup.procs") for folder in self._folders]

    def _make_unified(self, folder: Path, memory: int | None, cpus: float | None) -> None:
        wanted = [name for name, value in (("memory", memory), ("cpu", cpus)) if value is not None]
        with suppress(OSError):  # they may be on already; if they cannot be, the bounds below do not exist
            (folder.parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
        folder.mkdir()
        self._folders.append(folder)
        if memory is not None:
            (folder / "memory.max").write_text(str(memory))
            with suppress(OSError):
                (folder / "memory.swap.max").write_text("0")
        if cpus is not None:
            (folder / "cpu.max").write_text(f"{int(cpus * _PERIOD)} {_PERIOD}")
        with suppress(OSError):
            (folder / "pids.max").write_text(str(_MAX_PROCESSES))

    def _make_split(self, places: dict[str, Path], name: str, memory: int | None, cpus: float | None) -> None:
        if memory is not None:
            folder = self._make(places["memory"] / name)
            (folder / "memory.limit_in_bytes").write_text(str(memory))
            with suppress(OSError):
                (folder / "memory.memsw.limit_in_bytes").write_text(str(memory))
        if cpus is not None:
            folder = self._make(places["cpu"] / name)
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (folder / "cpu.cfs_quota_us").write_text(str(max(1000, int(cpus * _PERIOD))))
        with suppress(OSError, KeyError):
            (self._make(places["pids"] / name) / "pids.max").write_text(str(_MAX_PROCESSES))

    def _make(self, folder: Path) -> Path:
        folder.mkdir()
        self._folders.append(folder)
        return folder

    def close(self) -> None:
        """Kill what is left in it, and remove it. Blocks for a moment: not for the event loop."""
        for folder in self._folders:
            _end(folder)
        self._folders.clear()


def _end(folder: Path) -> None:
    """Kill the processes of a cgroup until there is none, and remove it."""
    deadline = time.monotonic() + _END_SECONDS
    while folder.is_dir():
        with suppress(OSError):
            (folder / "cgroup.kill").write_text("1")
        with suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
        with suppress(OSError):
            folder.rmdir()
            return
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def reap_cgroups(label: str) -> None:
    """End cgroups whose label begins so and whose maker is gone."""
    with suppress(OSError):
        for place in set(_own_places().values()):
            for folder in place.glob(f"{_PREFIX}*-{_NOT_PLAIN.sub('-', label)}*"):
                maker = folder.name.removeprefix(_PREFIX).partition("-")[0]
                if maker.isdigit() and not Path(f"/proc/{maker}").exists():
                    _end(folder)
