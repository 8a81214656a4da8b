"""One writer at a time, and a lock that dies with its holder."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steelyard import RunLocked
from steelyard.journal.lock import RunLock, is_locked
from tests.support.journal import CountedModel, cases, run_in

HOLDER = """
import sys, time
from pathlib import Path
from steelyard.journal.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of tmp_path / "run"."""
    (tmp_path / "run").mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("entry", [{}, {"force": True}, {"retry_errors": True}, {"salvage": True}])
def test_a_directory_that_another_process_writes_is_refused_by_its_pid_and_host(
    tmp_path: Path, holder: subprocess.Popen[str], entry: dict[str, bool]
) -> None:
    before = sorted((path.name, path.read_bytes()) for path in (tmp_path / "run").iterdir())
    model = CountedModel()
    with pytest.raises(RunLocked) as caught:
        run_in(tmp_path / "run", model, cases(3), entry=entry)
    assert (caught.value.pid, caught.value.host) == (holder.pid, socket.gethostname())
    assert str(holder.pid) in str(caught.value)
    assert socket.gethostname() in str(caught.value)
    assert model.called == []
    assert sorted((path.name, path.read_bytes()) for path in (tmp_path / "run").iterdir()) == before


def test_the_command_is_refused_with_exit_2(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text("id: s\ntarget: {simulated: {latency: 0}}\ncases: [{id: a, prompt: a}]\n")
    program = [sys.executable, "-c", "from steelyard.cli import main; main()"]
    command = [*program, "run", str(suite), "--out", str(tmp_path / "run"), "--force"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 2
    assert str(holder.pid) in refused.stderr


def test_a_lock_left_by_a_killed_process_is_no_obstacle(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / ".lock").exists()
    assert is_locked(tmp_path / "run") is None
    assert run_in(tmp_path / "run", CountedModel(), cases(3)).complete


def test_another_run_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        for _ in range(2):
            with pytest.raises(RunLocked) as caught:
                run_in(tmp_path, CountedModel(), cases(3))
            assert caught.value.pid == os.getpid()
    assert run_in(tmp_path, CountedModel(), cases(3)).complete


def test_looking_at_a_lock_names_its_live_holder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    found = is_locked(tmp_path / "run")
    assert found is not None
    assert (found.pid, found.host) == (holder.pid, socket.gethostname())


def test_looking_at_a_directory_without_a_lock_makes_none(tmp_path: Path) -> None:
    assert is_locked(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_lets_go_of_its_directory_however_it_ends(tmp_path: Path) -> None:
    run_in(tmp_path, CountedModel(), cases(3))
    assert is_locked(tmp_path) is None
    with pytest.raises(Exception, match="complete"):
        run_in(tmp_path, CountedModel(), cases(3))
    assert is_locked(tmp_path) is None


def test_a_lock_file_of_garbage_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_bytes(b"\0\xff" * 100)
    assert run_in(tmp_path, CountedModel(), cases(3)).complete


def test_a_holder_that_cannot_write_its_name_down_holds_the_lock_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the name has no room; the lock itself needs none."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with RunLock(tmp_path), pytest.raises(RunLocked):
            RunLock(tmp_path).acquire()
    with RunLock(tmp_path):
        pass


def test_a_live_lock_is_not_inherited_by_the_programs_a_run_starts(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        assert is_locked(tmp_path) is None
    finally:
        child.communicate(b"\n")


def forked(action: Callable[[], None]) -> int:
    """A child of this process that does this and then stays until it is killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os.write(writer, b"x")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    return pid


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside other threads
def test_a_forked_child_neither_keeps_the_lock_nor_gives_it_away(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    child = forked(lock.release)
    try:
        found = is_locked(tmp_path)
        assert found is not None
        assert found.pid == os.getpid()
        lock.release()
        assert is_locked(tmp_path) is None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lock_that_is_taken_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    """Whoever looks whether a directory is locked holds the lock for that instant: a run that starts is not refused."""
    looking = RunLock(tmp_path)
    looking.acquire()
    threading.Timer(0.03, looking.release).start()
    with RunLock(tmp_path):
        pass


def test_a_run_can_start_while_others_look_whether_it_is_locked(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    over = threading.Event()
    seen: list[object] = []

    def look() -> None:
        while not over.is_set():
            seen.append(is_locked(tmp_path))

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(100):
            with RunLock(tmp_path):
                pass
    finally:
        over.set()
        for looker in lookers:
            looker.join()
    assert seen
