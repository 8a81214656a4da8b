"""What a run started does not outlive it: the reaper by itself, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from steelyard import reaper

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the reaper needs /proc")

RUNNER = """
import os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {source!r})
from steelyard import reaper
here = Path({here!r})
read, write = os.pipe()
os.set_inheritable(write, False)
helper = subprocess.Popen(
    [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), "abc"], stdin=read, start_new_session=True
)
os.close(read)
env = {{**os.environ, "STEELYARD_RUN_abc": "1"}}
nap = "import time, os, pathlib; pathlib.Path({here!r}, str(os.getpid())).touch(); time.sleep(600)"
{start}
(here / "ready").write_text(str(helper.pid))
{then}
"""


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def started(folder: Path, start: str, count: int, then: str = "time.sleep(600)") -> tuple[subprocess.Popen[bytes], int]:
    """A runner with a reaper and `count` napping programs; the runner and the reaper's pid."""
    source = str(Path(reaper.__file__).parents[1])
    code = RUNNER.format(source=source, here=str(folder), start=start, then=then)
    runner = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: (folder / "ready").exists() and len(naps(folder)) == count)
    return runner, int((folder / "ready").read_text())


def naps(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


GROUP = """
child = subprocess.Popen([sys.executable, "-c", nap], start_new_session=True)
os.write(write, f"+ {child.pid} {reaper.start_time(child.pid)}\\n".encode())
"""
DAEMON = """
subprocess.Popen([sys.executable, "-c", f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {nap!r}], "
                  "start_new_session=True)"], env=env, start_new_session=True).wait()
"""
ENDED = """
child = subprocess.Popen([sys.executable, "-c", nap], start_new_session=True)
os.write(write, f"+ {child.pid} {reaper.start_time(child.pid)}\\n- {child.pid}\\n".encode())
"""
FORK = """
if os.fork() == 0:
    (here / str(os.getpid())).touch()
    time.sleep(600)
    os._exit(0)
child = subprocess.Popen([sys.executable, "-c", nap], env=env, start_new_session=True)
"""


@pytest.mark.parametrize("start", [GROUP, DAEMON], ids=["a reported group", "a daemon that carries the marker"])
def test_nothing_is_left_two_seconds_after_a_killed_runner(tmp_path: Path, start: str) -> None:
    runner, helper = started(tmp_path, start, 1)
    runner.kill()
    runner.wait()
    wait_until(lambda: not any(map(alive, naps(tmp_path))), 2.0)
    wait_until(lambda: not alive(helper), 2.0)


def test_a_forked_copy_of_the_runner_does_not_keep_the_reaper_waiting(tmp_path: Path) -> None:
    runner, helper = started(tmp_path, FORK, 2)
    runner.kill()
    runner.wait()
    wait_until(lambda: not alive(helper), 2.0)
    left = [pid for pid in naps(tmp_path) if alive(pid)]
    assert len(left) == 1, "only the copy is left: it was not started as a program"
    os.kill(left[0], signal.SIGKILL)


def test_what_was_taken_back_is_not_killed(tmp_path: Path) -> None:
    runner, helper = started(tmp_path, ENDED, 1)
    runner.kill()
    runner.wait()
    wait_until(lambda: not alive(helper), 2.0)
    (pid,) = naps(tmp_path)
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


def test_a_number_that_is_another_process_by_now_is_left_alone() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    began = reaper.start_time(bystander.pid)
    assert began is not None
    reaper.kill_group(bystander.pid, began - 1)
    assert bystander.poll() is None
    reaper.kill_group(bystander.pid, began)
    assert bystander.wait(5) == -signal.SIGKILL


STUCK = """
import re, signal
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
signal.signal(signal.SIGINT, lambda *_: None)
re.match(r"(a|aa)+$", "a" * 60 + "b")
"""


def test_a_runner_that_holds_the_gil_is_killed_when_its_time_is_up(tmp_path: Path) -> None:
    runner, helper = started(tmp_path, GROUP, 1, STUCK)
    time.sleep(0.3)
    runner.send_signal(signal.SIGINT)
    assert runner.wait(reaper.BUDGET_SECONDS + 2) == -signal.SIGKILL
    wait_until(lambda: not any(map(alive, naps(tmp_path))), 2.0)
    wait_until(lambda: not alive(helper), 2.0)


def test_a_line_that_was_cut_short_is_no_group() -> None:
    groups: dict[int, int] = {}
    for line in (b"+ 12", b"+ 12 x", b"", b"- ", b"what"):
        reaper.take_line(line, groups)
    assert groups == {}


def test_signals_among_the_lines_are_seen_and_do_not_spoil_them() -> None:
    lines, rest, signalled = reaper.split_report(b"+ 12 34\n\x02- 12\n\x0f+ 5")
    assert (lines, rest, signalled) == ([b"+ 12 34", b"- 12"], b"+ 5", True)
