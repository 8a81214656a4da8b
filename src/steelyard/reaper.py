"""The reaper: a small process that ends what a run started, however the run itself ends.

It runs as a separate program (`python -I -S reaper.py RUNNER_PID MARKER`) with the read end of a pipe as its stdin,
and imports nothing but the standard library. The runner writes lines into the pipe; when the runner is gone, `kill -9`
included, the kernel closes the pipe and the reaper ends

1. the process groups that were reported and not yet taken back,
2. every process whose environment carries the run's marker: grandchildren that started a session of their own, too.

A program that clears its environment *and* leaves its process group is out of reach here; a pid namespace (the
sandbox) holds that one.

The same pipe takes the bytes of `signal.set_wakeup_fd`: once a signal has come, the runner has `BUDGET` seconds to
leave. Code that holds the GIL keeps Python's own handlers from running; the kernel's SIGKILL does not ask.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

MARKER_PREFIX = "STEELYARD_RUN_"
"""Names of marker variables begin with it. A run's own marker is part of the name, so that nested runs keep both."""
BUDGET_SECONDS = 4.8
"""From the first signal that the runner takes until it is killed."""
_STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_ROUNDS = 20
_PAUSE_SECONDS = 0.01
_CHUNK_BYTES = 65536


def main(runner: int, marker: str) -> None:
    """Read what the runner reports until its end of the pipe is closed, then end what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    runner_fd = _open_pid(runner)
    groups: dict[int, int] = {}
    deadline: float | None = None
    rest = b""
    # A process that was forked from the runner may hold the pipe open after the runner's end: both are watched.
    watched = [0] if runner_fd is None else [0, runner_fd]
    while True:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = select.select(watched, [], [], wait)[0]
        if not ready:
            _kill_pid(runner_fd)
            deadline = None
        if 0 in ready:
            chunk = os.read(0, _CHUNK_BYTES)
            if not chunk:
                break
            lines, rest, signalled = split_report(rest + chunk)
            if signalled and deadline is None:
                deadline = time.monotonic() + BUDGET_SECONDS
            for line in lines:
                if line == b"calm":
                    deadline = None
                else:
                    take_line(line, groups)
        elif ready:  # the runner has ended, and all that it had written is read
            break
    end_all(groups, marker)


def split_report(data: bytes) -> tuple[list[bytes], bytes, bool]:
    """The whole lines, what is left of the last one, and whether the byte of a stop signal was among them."""
    *lines, rest = bytes(byte for byte in data if byte >= 32 or byte == 10).split(b"\n")
    return lines, rest, any(byte in data for byte in _STOP_SIGNALS)


def take_line(line: bytes, groups: dict[int, int]) -> None:
    """Note a started group (`+ PID START`) or forget one that has ended (`- PID`)."""
    words = line.split()
    try:
        if len(words) == 3 and words[0] == b"+":
            groups[int(words[1])] = int(words[2])
        elif len(words) == 2 and words[0] == b"-":
            groups.pop(int(words[1]), None)
    except ValueError:
        return  # a line cut short by the end of the runner: its processes carry the marker


def end_all(groups: dict[int, int], marker: str) -> None:
    """Kill the groups, then whatever carries the marker, until nothing of it is left."""
    for leader, started in groups.items():
        kill_group(leader, started)
    for _ in range(_ROUNDS):
        if not kill_marked(marker):
            return
        time.sleep(_PAUSE_SECONDS)


def kill_group(leader: int, started: int) -> None:
    """Kill a process group whose leader is still the process that was started then; never a reused number."""
    descriptor = _open_pid(leader)
    if descriptor is None:
        return
    try:
        if start_time(leader) == started:
            _kill_group_of(leader)
            _kill_pid(descriptor)
    finally:
        os.close(descriptor)


def kill_marked(marker: str) -> int:
    """Kill every process whose environment has the marker; how many there were."""
    wanted = f"{MARKER_PREFIX}{marker}=1".encode()
    found = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and int(name) != os.getpid() and _carries(int(name), wanted):
            descriptor = _open_pid(int(name))
            if descriptor is None:
                continue
            if _carries(int(name), wanted):  # looked at again with the process held: its number is not another's
                _kill_pid(descriptor)
                found += 1
            os.close(descriptor)
    return found


def start_time(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None when there is none, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if not after_name or after_name[0] == b"Z" else int(after_name[19])


def _carries(pid: int, wanted: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return wanted in file.read().split(b"\0")
    except OSError:
        return False


def _open_pid(pid: int) -> int | None:
    """A descriptor that stays this process, even after its number is given to another."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _kill_pid(descriptor: int | None) -> None:
    if descriptor is not None:
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except OSError:
            return


def _kill_group_of(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except OSError:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
