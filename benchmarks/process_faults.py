"""Faults of worker processes, one after the other, with the calls counted by the server that answers them.

    python -m benchmarks.process_faults                   # all of them, some 8 minutes; `disk_full` needs root on Linux
    python -m benchmarks.process_faults stopped_30 ctrl_c

Each fault is a run by the command line, with two worker processes on this machine and 40 calls of one second in flight.
What is started here is ended at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import steelyard
from benchmarks.machines import Trial, children, command, descendants, do, end, steady


class Here:
    """This machine: two worker processes, and a provider on 127.0.0.1."""

    options: tuple[str, ...] = ("--workers", "2")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        self._root = f"http://127.0.0.1:{port}/"
        self._provider = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.machines", "serve", str(port), "127.0.0.1"]
        )
        self._started: list[subprocess.Popen[str]] = []
        while not self._is_up():
            time.sleep(0.1)

    def _is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.counts())
        return False

    def counts(self) -> dict[str, Any]:
        """Ask the provider what it was asked."""
        with urllib.request.urlopen(self._root, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def launch(self, words: list[str], *, environment: dict[str, str] | None = None, **options: Any) -> Any:
        known = {**os.environ, "FAULTS_KEY": "sk-not-a-key", "PROVIDER": self.url, **(environment or {})}
        started = subprocess.Popen(words, env=known, text=True, start_new_session=True, **options)
        self._started.append(started)
        return started

    def remove(self) -> None:
        for started in self._started:
            for pid in [*descendants(started.pid), started.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            started.wait()
        self._provider.kill()
        self._provider.wait()


def _workers(running: subprocess.Popen[str]) -> list[int]:
    return [pid for pid in children(running.pid) if "steelyard.engine.workers.process" in command(pid)]


def _killed(place: Here, number: signal.Signals, name: str) -> dict[str, Any]:
    trial, running = steady(place, 20)
    os.kill(_workers(running)[0], number)
    return trial.report(name, end(running, 90))


def worker_sigkill(place: Here) -> dict[str, Any]:
    return _killed(place, signal.SIGKILL, "worker_sigkill")


def worker_sigsegv(place: Here) -> dict[str, Any]:
    return _killed(place, signal.SIGSEGV, "worker_sigsegv")


_ASK = """
import json, os, threading, time, urllib.request
from pathlib import Path

def ask(case):
    body = {"messages": [{"role": "user", "content": case.prompt}]}
    request = urllib.request.Request(os.environ["PROVIDER"], json.dumps(body).encode())
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
"""


def _agent(place: Here, cases: int, source: str) -> Trial:
    """A trial whose target is `answer` of this source."""
    trial = Trial(place, cases, target="{python: agent.py:answer}")
    (trial.place / "agent.py").write_text(_ASK + source)
    return trial


_EXITS_ONCE = """
def answer(case):
    text, marker = ask(case), Path("died")
    if case.id == "c300" and not marker.exists():
        marker.touch()
        os._exit(3)
    return text
"""


def worker_exits(place: Here) -> dict[str, Any]:
    """The target calls `os._exit(3)`, once."""
    trial = _agent(place, 800, _EXITS_ONCE)
    return trial.report("worker_exits", end(trial.start(), 90))


_DEADLY = """
def answer(case):
    text = ask(case)
    if case.id == "c300":
        os.kill(os.getpid(), 9)
    return text
"""


def deadly_case(place: Here) -> dict[str, Any]:
    """A case whose target kills its process each time."""
    trial = _agent(place, 800, _DEADLY)
    report = trial.report("deadly_case", end(trial.start(), 120))
    lost = {line["id"]: line.get("error_type") for line in trial.lines() if line["status"] != "ok"}
    return {**report, "errors": lost, "the case was asked": place.counts()["asked"]["300"]}


def _stopped(place: Here, seconds: float) -> dict[str, Any]:
    trial, running = steady(place, seconds + 15)
    worker = _workers(running)[0]
    os.kill(worker, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(worker, signal.SIGCONT)
    return trial.report(f"stopped_{seconds:.0f}", end(running, 120))


def stopped_8(place: Here) -> dict[str, Any]:
    return _stopped(place, 8)


def stopped_30(place: Here) -> dict[str, Any]:
    return _stopped(place, 30)


def driver_killed(place: Here) -> dict[str, Any]:
    trial, running = steady(place, 20)
    workers = _workers(running)
    running.kill()
    end(running, 30)
    time.sleep(2)
    left = [pid for pid in workers if command(pid)]
    journalled = {line["id"] for line in trial.lines()}
    before = place.counts()["asked"]
    code = end(trial.start(), 90)
    after = place.counts()["asked"]
    again = sum(after[case[1:]] - before.get(case[1:], 0) for case in journalled)
    report = trial.report("driver_killed", code)
    return {**report, "journalled and asked again": again, "workers left after 2 s": len(left)}


def disk_full(place: Here) -> dict[str, Any]:
    """The run directory is on a disk of 300 KB, which is then made larger."""
    trial = Trial(place, 800)
    small = trial.outputs.parent
    small.mkdir()
    do("mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small))
    try:
        full = end(trial.start(), 90)
        do("mount", "-o", "remount,size=50m", str(small))
        return {**trial.report("disk_full", end(trial.start(), 90)), "exit when full": full}
    finally:
        do("umount", "-l", str(small))


def driver_starved(place: Here) -> dict[str, Any]:
    """A load run whose driver runs 40 ms of each 500."""
    trial, running = steady(place, 1, "--requests", "1000")
    until = time.monotonic() + 150
    while running.poll() is None and time.monotonic() < until:
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGSTOP)
            time.sleep(0.46)
            os.kill(running.pid, signal.SIGCONT)
            time.sleep(0.04)
    report = trial.report("driver_starved", end(running, 10))
    client = json.loads((trial.outputs.parent / "metrics.json").read_text())["client"]
    return {**report, "bottleneck": client["bottleneck"], "reason": client["reason"]}


def version_changed(place: Here) -> dict[str, Any]:
    """Steelyard is replaced by another version during the run, and a worker must be started after that."""
    package = place.folder / "other" / "steelyard"
    shutil.copytree(Path(steelyard.__file__).parent, package)
    trial = Trial(place, 800)
    environment = {"PYTHONPATH": str(package.parent)}
    running = trial.start(environment=environment)
    trial.until(240, running)
    version = package / "_version.py"
    version.write_text(re.sub(r'"[^"]+"', '"0.0.1"', version.read_text(), count=1))
    os.kill(_workers(running)[0], signal.SIGKILL)
    return trial.report("version_changed", end(running, 90))


_LOCKED = """
class Locked:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, case):
        return ask(case)

answer = Locked()
"""


def not_picklable(place: Here) -> dict[str, Any]:
    trial = _agent(place, 10, _LOCKED)
    return trial.report("not_picklable", end(trial.start(), 60))


_BLOCKING = """
async def answer(case):
    text = ask(case)
    time.sleep(600 if int(case.id[1:]) > 3 else 0)
    return text
"""


def ctrl_c(place: Here) -> dict[str, Any]:
    """Ctrl-C while the target blocks the event loops of all workers."""
    trial = _agent(place, 800, _BLOCKING)
    running = trial.start()
    trial.until(5, running)
    time.sleep(3)
    workers = _workers(running)
    os.kill(running.pid, signal.SIGINT)
    began = time.monotonic()
    code = end(running, 60)
    took = time.monotonic() - began
    left = [pid for pid in workers if command(pid)]
    report = trial.report("ctrl_c", code)
    return {**report, "seconds to the end": round(took, 1), "workers": len(workers), "workers left": len(left)}


def open_loop(place: Here) -> dict[str, Any]:
    """40 arrivals a second for 20 seconds, and a worker is killed."""
    trial = Trial(place, 100)
    running = trial.start("--arrivals", "constant:40/s", "--duration", "20s")
    trial.until(240, running)
    os.kill(_workers(running)[0], signal.SIGKILL)
    report = trial.report("open_loop", end(running, 90))
    metrics = json.loads((trial.outputs.parent / "metrics.json").read_text())
    sent = sum(place.counts()["asked"].values())
    return {**report, "calls at the server": sent, "errors": metrics["errors"], "load": metrics["load"]["sends"]}


FAULTS: list[Callable[[Here], dict[str, Any]]] = [
    worker_sigkill, worker_sigsegv, worker_exits, deadly_case, stopped_8, stopped_30, driver_killed, disk_full,
    driver_starved, version_changed, not_picklable, ctrl_c, open_loop,
]  # fmt: skip


@contextlib.contextmanager
def _here() -> Iterator[Here]:
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/var/tmp") as folder:
        place = Here(Path(folder))
        try:
            yield place
        finally:
            place.remove()


def main(names: list[str]) -> None:
    """Print a report of each fault, as JSON."""
    known = {fault.__name__: fault for fault in FAULTS}
    for name in names or known:
        began = time.monotonic()
        with _here() as place:
            try:
                report = known[name](place)
            except Exception as error:  # noqa: BLE001 - the next one has a place of its own
                log = place.folder / "driver.log"
                report = {"fault": name, "failed": repr(error), "messages": log.read_text() if log.exists() else ""}
        print(json.dumps({**report, "took": round(time.monotonic() - began)}, indent=1), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
