"""A tool at work: its processes, their CPU time and their memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LOOK_EVERY = 0.2
"""Seconds between looks at the processes. A look costs a few milliseconds, of a machine with two cores."""


@dataclass
class Usage:
    """What a tool's processes took, all together."""

    wall: float
    cpu: float
    peak_bytes: int
    processes: int


@dataclass
class Tree:
    """A started tool and what has been seen of the processes below it."""

    process: subprocess.Popen[bytes]
    started: float
    cpu: dict[int, float] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)

    def members(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def look(self) -> None:
        for one in self.members():
            with contextlib.suppress(psutil.Error, OSError, StopIteration):
                times = one.cpu_times()
                self.cpu[one.pid] = times.user + times.system
                self.peaks[one.pid] = high_water(one.pid)

    def kill(self) -> None:
        """`kill -9` for all of them, the top first so that nobody is left to tidy up."""
        self._strike()
        self.process.wait(30)

    def _strike(self) -> None:
        for one in self.members():
            with contextlib.suppress(psutil.Error):
                one.send_signal(signal.SIGKILL)

    def finish(self, seconds: float) -> Usage:
        """Wait for the end, looking on; kills what takes too long and raises TimeoutError."""
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(done,), daemon=True)
        watch.start()
        limit = threading.Timer(seconds, self._strike)
        limit.start()
        _, status, used = os.wait4(self.process.pid, 0)
        wall = time.perf_counter() - self.started
        over = not limit.is_alive()
        limit.cancel()
        done.set()
        watch.join()
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if over:
            raise TimeoutError(f"not done within {seconds:g} s")
        reaped = used.ru_utime + used.ru_stime
        return Usage(wall, max(reaped, sum(self.cpu.values())), sum(self.peaks.values()), len(self.peaks))

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(LOOK_EVERY):
            self.look()


def high_water(pid: int) -> int:
    """The most memory that a process ever had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def start(command: list[str | Path], folder: Path) -> Tree:
    """Start a tool with its own home in this folder, where all that it writes can be found."""
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "PYTHON"))}
    environment = kept | {"HOME": str(home), "OPENAI_API_KEY": "nobody"}
    started = time.perf_counter()
    with (folder / "output.txt").open("ab") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    return Tree(process, started)
