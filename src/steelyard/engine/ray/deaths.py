"""How a worker's process ended: its signal or exit code, which Ray does not report.

Ray's raylet is the parent of a worker and throws its exit status away. So each worker starts a small process that waits
for its end, asks the kernel how it was (Linux 6.15 and later), and leaves a note on the node. The next worker on that
node brings the notes to the driver. A SIGKILL while the kernel killed processes for lack of memory is said to be that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from steelyard.subprocesses import ending_of

_MAX_NOTES = 100
_WATCH = """
import fcntl, os, select, struct, sys
pid, note = int(sys.argv[1]), sys.argv[2]
def oom_kills():
    with open("/proc/vmstat") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
before = oom_kills()
watched = os.pidfd_open(pid)
waiting = select.poll()
waiting.register(watched, select.POLLIN | select.POLLHUP)
print("ready", flush=True)
size, wanted = 64, 1 << 3
request = (3 << 30) | (size << 16) | (0xFF << 8) | 11
for _ in range(100):
    waiting.poll()
    answer = bytearray(struct.pack("<Q", wanted).ljust(size, b"\\0"))
    fcntl.ioctl(watched, request, answer)
    if struct.unpack_from("<Q", answer)[0] & wanted:
        status = struct.unpack_from("<i", answer, 60)[0]
        with open(note + ".new", "w") as file:
            file.write("%d %d" % (status, oom_kills() - before))
        os.rename(note + ".new", note)
        break
    select.select([], [], [], 0.05)
"""
"""Waits for a process: the status is known once its parent has let go of it."""


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"steelyard-deaths-{os.getuid()}"


def watch_own_end() -> subprocess.Popen[bytes] | None:
    """Have the end of this process noted; None where the system cannot tell."""
    if not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError):
        _folder().mkdir(mode=0o700, exist_ok=True)
        return start_watching(os.getpid(), _folder() / str(os.getpid()))
    return None


def start_watching(pid: int, note: Path) -> subprocess.Popen[bytes]:
    """Start the process that writes the note; it prints a line when it watches, and ends with the one it watches."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _WATCH, str(pid), str(note)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def take_notes() -> dict[int, str]:
    """Return how processes of this node ended, by their number, and remove the notes."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for path in sorted(_folder().iterdir())[:_MAX_NOTES]:
            with contextlib.suppress(OSError, ValueError):
                status, oom_kills = map(int, path.read_text().split())
                path.unlink()
                found[int(path.name)] = describe_end(status, oom_kills)
    return found


def describe_end(status: int, oom_kills: int) -> str:
    """Say how a process ended, by its wait status and how many processes were killed for memory meanwhile."""
    code = os.waitstatus_to_exitcode(status)
    is_out_of_memory = code == -signal.SIGKILL and oom_kills > 0
    return ending_of(code) + (": its node ran out of memory" if is_out_of_memory else "")
