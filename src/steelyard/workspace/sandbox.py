"""Sandboxes: what a program may see, reach and use. Bubblewrap is built in; a plugin may add others.

Inside are the system's folders, read-only, and those of the attempt; never `/`, the run directory, other workspaces or
the home folder. Programs have a pid namespace of their own and die with the process that started them, `kill -9`
included. Memory and CPUs are bounded by a cgroup.

A network namespace cannot reach this machine's 127.0.0.1. With `network: gateway` the sandbox's first program opens the
gateway's port inside and hands the listening socket out, over a Unix socket: the gateway then serves it like its own,
and nothing is copied in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from steelyard.errors import ConfigurationError
from steelyard.protocols import Sandbox, SandboxPlace
from steelyard.units import parse_size

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "steelyard-"
_PERIOD = 100_000
_MAX_PROCESSES = 4096
_END_SECONDS = 2.0
_MAX_LABEL = 200
_OWN_GROUP = "steelyard"
"""The cgroup that this process moves to where the one that it is in must not have processes."""
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]+")
Network = Literal["none", "gateway", "host"]

_PROGRAM = "bwrap"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "alternatives", "ca-certificates", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias",
    "localtime", "mime.types", "nsswitch.conf", "passwd", "pki", "protocols", "services", "ssl", "timezone",
)  # fmt: skip
_SOCKET_INSIDE = "/run/steelyard/gateway.sock"
_TMPFS_BYTES = 512 << 20
_CHECK_SECONDS = 20
_JOIN = 'trap "" TERM; while [ "$1" != -- ]; do echo 0 > "$1" || exit 126; shift; done; shift; exec "$@"'
"""Joins the cgroups that are named before `--`. Bubblewrap ignores SIGTERM: else the program inside has no grace."""
_FIRST = """
import os, resource, signal, socket, sys
port, path, size = sys.argv[1:4]
signal.signal(signal.SIGTERM, signal.SIG_DFL)
if size != "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
if port != "0":
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", int(port)))
    listening.listen(256)
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(path)
        socket.send_fds(door, [b"x"], [listening.fileno()])
        if not door.recv(1):
            sys.exit("the gateway did not take the sandbox's port")
    listening.close()
try:
    os.execvpe(sys.argv[4], sys.argv[4:], os.environ)
except OSError as error:
    print(f"{sys.argv[4]}: {error.strerror}: is its folder among the sandbox's read_only?", file=sys.stderr)
    sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
"""
"""The first program inside: opens the gateway's port, then becomes the agent."""


def _own_places() -> dict[str, Path]:
    """Where this process's cgroup is, by controller; of version 2 the one under the empty name."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, place = line.split(":", 2)
        for name in names.split(","):
            mount = _ROOT / name if name else (_ROOT / "unified" if (_ROOT / "unified").is_dir() else _ROOT)
            folder = mount / place.lstrip("/")
            found[name] = folder if folder.is_dir() else mount
            if not name and found[name].name == _OWN_GROUP:
                found[name] = found[name].parent
    return found


def _enable(folder: Path, controllers: Sequence[str]) -> None:
    """Let the groups in a cgroup of version 2 have these controllers.

    A group that has processes may not pass controllers on. This process is often in one: the scope that was
    delegated to it. Then it moves, with all that is there, into a new group below.
    """
    words = " ".join(f"+{name}" for name in controllers)
    try:
        _write(folder / "cgroup.subtree_control", words)
    except OSError as error:
        if error.errno != errno.EBUSY:
            return  # they may be on already; if they cannot be, the bounds do not exist, and the group is refused
        own = folder / _OWN_GROUP
        own.mkdir(exist_ok=True)
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                _write(own / "cgroup.procs", pid)
        _write(folder / "cgroup.subtree_control", words)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


class Cgroup:
    """A cgroup with bounds. ConfigurationError where this user may not make one."""

    def __init__(self, label: str, *, memory: int | None = None, cpus: float | None = None) -> None:
        self._folders: list[Path] = []
        name = f"{_PREFIX}{os.getpid()}-{_NOT_PLAIN.sub('-', label)[:_MAX_LABEL]}"
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
                "run in a delegated scope (systemd-run --user --scope -p Delegate=yes …), as root, or without them",
                topic="sandbox",
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
        _enable(folder.parent, wanted)
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


class Bubblewrap:
    """Confines programs with `bwrap`, Debian's bubblewrap.

    `network` is none, gateway (nothing but the gateway's port) or host; `memory` and `cpus` bound all programs of an
    attempt together, `disk` what they write; `read_only` and `writable` are more folders that they see.
    """

    def __init__(
        self,
        *,
        network: Network = "none",
        memory: str | int | None = None,
        cpus: float | None = None,
        disk: str | int | None = None,
        read_only: Sequence[str] = (),
        writable: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        if network not in get_args(Network):
            raise ConfigurationError(f"network must be one of {', '.join(get_args(Network))}, got {network!r}")
        if cpus is not None and (
            isinstance(cpus, bool) or not isinstance(cpus, (int, float)) or not 0.01 <= cpus < 1e4
        ):
            raise ConfigurationError(f"cpus must be a number of at least 0.01, got {cpus!r}")
        self.network = network
        self.memory = None if memory is None else parse_size(memory, "memory")
        self.cpus = cpus
        self.disk = None if disk is None else parse_size(disk, "disk")
        self.read_only = _folders(read_only, "read_only", folder)
        self.writable = _folders(writable, "writable", folder)

    @property
    def wants_gateway(self) -> bool:
        return self.network == "gateway"

    def identity(self) -> dict[str, Any]:
        """What decides how a program behaves inside."""
        return {
            "kind": "bubblewrap",
            "network": self.network,
            "memory": self.memory,
            "cpus": self.cpus,
            "disk": self.disk,
            "read_only": [str(path) for path in self.read_only],
            "writable": [str(path) for path in self.writable],
        }

    def check(self, hidden: Sequence[Path] = ()) -> None:
        """Raise ConfigurationError where bwrap is missing or has no rights here, or a folder would show `hidden`."""
        program = shutil.which(_PROGRAM)
        if program is None:
            raise ConfigurationError(
                "the sandbox needs bwrap, which is not installed: install the package bubblewrap "
                "(apt-get install bubblewrap), or leave `sandbox` out",
                topic="sandbox",
            )
        for path in (*self.read_only, *self.writable):
            _check_folder(path, hidden)
        argv = [program, *self._walls(), "--", "/usr/bin/env", "true"]
        try:
            tried = subprocess.run(argv, capture_output=True, timeout=_CHECK_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigurationError(f"bwrap cannot be started: {error}") from error
        if tried.returncode:
            why = tried.stderr.decode("utf-8", "replace").strip()[-500:]
            raise ConfigurationError(
                f"bwrap has no right to make a sandbox here: {why}; allow user namespaces "
                "(sysctl kernel.unprivileged_userns_clone=1), or leave `sandbox` out",
                topic="sandbox",
            )
        if self.memory is not None or self.cpus is not None:
            with Cgroup("check", memory=self.memory, cpus=self.cpus):
                pass

    async def start(self, place: SandboxPlace) -> Sandbox:
        """A sandbox for the programs of one attempt."""
        if self.wants_gateway and place.gateway_socket is None:
            raise ConfigurationError("network: gateway needs a `gateway` beside the sandbox")
        cgroup = None
        if self.memory is not None or self.cpus is not None:
            cgroup = Cgroup(place.label, memory=self.memory, cpus=self.cpus)
        return BubblewrapSandbox(self, place, cgroup)

    async def reap(self, label: str) -> None:
        """End what an earlier launch left running under labels that begin so."""
        await asyncio.to_thread(reap_cgroups, label)

    def command(self, place: SandboxPlace, argv: Sequence[str], cwd: Path) -> list[str]:
        """The program and its walls, without its cgroup."""
        binds: list[str] = []
        for path in (*place.writable, *self.writable):
            binds += ["--bind", str(path), str(path)]
        port = "0"
        if self.wants_gateway and place.gateway_socket is not None:
            binds += ["--ro-bind", str(place.gateway_socket), _SOCKET_INSIDE]
            port = str(place.gateway_port)
        first = [_interpreter(), "-I", "-S", "-c", _FIRST, port, _SOCKET_INSIDE, str(self.disk or 0)]
        program = shutil.which(_PROGRAM) or _PROGRAM
        return [program, *self._walls(), *binds, "--remount-ro", "/", "--chdir", str(cwd), "--", *first, *argv]

    def _walls(self) -> list[str]:
        words = ["--die-with-parent", "--unshare-user-try", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        words += ["--unshare-cgroup-try", "--hostname", "sandbox", "--cap-drop", "ALL"]
        if self.network != "host":
            words.append("--unshare-net")
        for name in _SYSTEM:
            if os.path.islink(name):
                words += ["--symlink", os.readlink(name), name]
            elif os.path.isdir(name):
                words += ["--ro-bind", name, name]
        for name in (*_ETC, *(("resolv.conf",) if self.network == "host" else ())):
            words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        words += ["--proc", "/proc", "--dev", "/dev"]
        for name in ("/tmp", "/run", "/dev/shm"):
            words += ["--size", str(min(self.disk or _TMPFS_BYTES, _TMPFS_BYTES)), "--tmpfs", name]
        for path in dict.fromkeys((Path(sys.base_prefix), *self.read_only)):
            if not path.is_relative_to("/usr"):
                words += ["--ro-bind", str(path), str(path)]
        return words


class BubblewrapSandbox:
    """The walls around the programs of one attempt."""

    def __init__(self, options: Bubblewrap, place: SandboxPlace, cgroup: Cgroup | None) -> None:
        self._options = options
        self._place = place
        self._cgroup = cgroup

    @property
    def disk(self) -> int | None:
        """Bytes that the attempt may write."""
        return self._options.disk

    def wrap(self, argv: Sequence[str], env: Mapping[str, str], *, cwd: Path) -> tuple[list[str], dict[str, str]]:
        """What to start in place of a program, and with which environment."""
        joined = [] if self._cgroup is None else self._cgroup.joining
        command = self._options.command(self._place, argv, cwd)
        return ["/bin/sh", "-c", _JOIN, "sh", *joined, "--", *command], dict(env)

    async def copy_in(self, source: Path, destination: Path) -> None:
        """Copy a file or folder into the sandbox: the workspace is the same folder inside and outside."""
        await asyncio.to_thread(_copy, source, self._inside(destination))

    async def copy_out(self, source: Path, destination: Path) -> None:
        """Copy a file or folder out of the sandbox."""
        await asyncio.to_thread(_copy, self._inside(source), destination)

    async def destroy(self) -> None:
        """End everything that still runs inside."""
        if self._cgroup is not None:
            await asyncio.to_thread(self._cgroup.close)

    def _inside(self, path: Path) -> Path:
        found = self._place.workspace / path
        if not any(found.resolve().is_relative_to(root.resolve()) for root in self._place.writable):
            raise ConfigurationError(f"{path} is not in the sandbox")
        return found


def _copy(source: Path, destination: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, destination, symlinks=True, dirs_exist_ok=True)
    else:
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, destination, follow_symlinks=False)


def _interpreter() -> str:
    """A Python that is there inside: not that of a virtual environment, whose folder is not."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _folders(given: object, name: str, folder: Path | None) -> tuple[Path, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise ConfigurationError(f"{name} must be a list of folders, got {given!r}")
    paths = tuple(Path(os.path.abspath((folder or Path.cwd()) / Path(one).expanduser())) for one in given)
    for path in paths:
        if not path.exists():
            raise ConfigurationError(f"{name} names {path}, which does not exist")
    return paths


def _check_folder(path: Path, hidden: Sequence[Path]) -> None:
    """Refuse a folder that holds, or is, what must stay out of the sandbox."""
    real = path.resolve()
    if real == Path("/"):
        raise ConfigurationError("a sandbox never has / in it: name the folders that are needed")
    for secret in (*hidden, Path.home()):
        if secret.resolve().is_relative_to(real):
            raise ConfigurationError(
                f"the sandbox's {path} would show {secret}: name the folders in it that are needed"
            )


async def folder_size(folders: Sequence[Path], most: int) -> int:
    """Bytes below these folders, counted up to a bit more than `most`; links are not followed."""

    def count() -> int:
        total, left = 0, [str(path) for path in folders]
        while left and total <= most:
            with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            left.append(entry.path)
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        return total

    return await asyncio.to_thread(count)
