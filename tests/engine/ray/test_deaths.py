"""How a process ended, found out by one that is not its parent."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.engine.ray import engine

KERNEL = tuple(int(part) for part in platform.release().split(".")[:2]) if sys.platform == "linux" else (0, 0)


@pytest.mark.skipif(KERNEL < (6, 15), reason="older kernels do not tell")
@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os._exit(3)", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
    ],
)
def test_the_signal_or_the_exit_code_is_noted(monkeypatch, tmp_path, code, how) -> None:
    monkeypatch.setattr(engine, "_notes_folder", lambda: tmp_path)
    dying = subprocess.Popen(
        [sys.executable, "-c", f"input(); {code}"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    watching = engine.start_watching(dying.pid, tmp_path / str(dying.pid))
    assert watching.stdout is not None
    assert watching.stdin is None
    with watching.stdout:
        assert watching.stdout.readline() == b"ready\n"
        dying.communicate(b"\n")
        assert watching.wait(30) == 0
    assert engine.take_notes() == {dying.pid: how}
    assert engine.take_notes() == {}


def test_a_kill_while_memory_ran_out_is_said_to_be_one() -> None:
    assert engine.describe_end(signal.SIGKILL, 1) == "was killed by SIGKILL: its node ran out of memory"
    assert engine.describe_end(signal.SIGKILL, 0) == "was killed by SIGKILL"
    assert engine.describe_end(signal.SIGSEGV, 1) == "was killed by SIGSEGV"
    assert engine.describe_end(256 * 7, 0) == "exited with code 7"


def test_notes_that_cannot_be_read_are_left(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(engine, "_notes_folder", lambda: tmp_path)
    (tmp_path / "12.new").write_text("9")
    assert engine.take_notes() == {}
    monkeypatch.setattr(engine, "_notes_folder", lambda: Path(tmp_path) / "none")
    assert engine.take_notes() == {}
