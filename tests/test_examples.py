"""The examples of the repository run as their files say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard import Result

EXAMPLES = Path(__file__).parent.parent / "examples"


def steelyard(*arguments: str, cwd: Path, work: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "steelyard", *arguments]
    environment = {**os.environ, "STEELYARD_WORK": str(work)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=110)


@pytest.fixture
def coding(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES / "coding", tmp_path / "coding"))


def test_the_suite_of_coding_tasks_is_short_and_needs_no_python() -> None:
    lines = (EXAMPLES / "coding/suite.yaml").read_text().splitlines()
    assert len(lines) <= 25
    assert not any("python:" in line for line in lines)


@pytest.mark.slow
def test_twenty_coding_tasks_are_graded_whatever_their_agent_does(coding: Path, tmp_path: Path) -> None:
    done = steelyard("run", "suite.yaml", "--out", "run", "--max-error-rate", "0.1", cwd=coding, work=tmp_path / "work")
    assert done.returncode == 0, done.stderr
    records = {record.id: record for record in Result.load(coding / "run").iter_responses()}
    assert len(records) == 20
    passed = {name for name, record in records.items() if record.passed}
    assert passed == set(records) - {
        "median-even",  # fixed in the wrong place
        "dedupe-order",  # not known to it
        "roman",
        "crashes",
        "edits-tests",
        "adds-conftest",
    }
    crashed = records["crashes"]
    assert "out of ideas" in (crashed.error or "")
    assert records["hangs-after-fixing"].stop_reason == "time_limit"
    assert "the agent added conftest.py" in (records["adds-conftest"].scores["tests"].reason or "")
    assert records["add-signs"].num_turns == 2
    assert records["add-signs"].cost == pytest.approx(0.004)
    patch = coding / "run/artifacts/add-signs/0/workspace.patch"
    assert "+    return a + b" in patch.read_text()
    assert "I read task.py" in (coding / "run/logs/add-signs/0.out").read_text()
    assert not _left_behind(coding)
    assert not [path for path in (tmp_path / "work").rglob("task.py") if "templates" not in path.parts]


def _left_behind(place: Path) -> list[str]:
    """Programs of the agent that are still there: those whose command line names its script, and its daemon."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(place) in line or (line.startswith("sleep 600") and os.fsencode(place.parent) in environment):
            found.append(line)
    return found


@pytest.mark.slow
def test_the_coding_tasks_are_sound(coding: Path, tmp_path: Path) -> None:
    chosen = ("-k", "a*")
    done = steelyard("check", "suite.yaml", *chosen, cwd=coding, work=tmp_path / "work")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 tasks sound" in done.stdout
