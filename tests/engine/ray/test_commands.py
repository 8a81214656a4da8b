"""The command line with a cluster that it starts itself: clean output, keys that stay where they are, and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cli import Ended, finish, run_cli, wait_until
from tests.support.mock import STEELYARD
from tests.support.ray import clean_place, patiently

pytestmark = [pytest.mark.ray, patiently]

KEY = "sk-not-for-any-eyes-4711"
AGENT = """
import asyncio, os
from pathlib import Path
from shared import LOG

async def answer(case):
    with open(LOG, "a") as log:
        log.write(case.id + chr(10))
    await asyncio.sleep(0.02)
    if case.id == "c7":
        os._exit(1)
    return "has its key" if os.environ["STEELYARD_TEST_KEY"].endswith("4711") else "has none"
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for Ray's files, instead of the one that all processes share."""
    with clean_place() as made:
        yield Path(made)


def write_suite(folder: Path, count: int, agent: str = AGENT) -> None:
    """Write a suite in Python whose module is in a folder that is on no path."""
    (folder / "agent.py").write_text(agent)
    (folder / "shared.py").write_text(f"LOG = {str(folder / 'asked.log')!r}\n")
    (folder / "cases.jsonl").write_text("".join(f'{{"id": "c{n}", "prompt": "{n}"}}\n' for n in range(count)))
    (folder / "suite.yaml").write_text("id: far\ntarget: {python: agent.py:answer}\ncases: cases.jsonl\n")


def start(folder: Path, place: Path, *words: str) -> subprocess.Popen[str]:
    """Start the real program in its own process group, as a terminal does."""
    return subprocess.Popen(
        [STEELYARD, *words, "--engine", "ray", "--workers", "2"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "RAY_TMPDIR": str(place), "STEELYARD_TEST_KEY": KEY},
    )


def mentions(folder: Path, words: str) -> list[Path]:
    """Find the files that contain these words."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a process of Ray's that is just ending tidies up
            if path.is_file() and words.encode() in path.read_bytes():
                found.append(path)
    return found


def test_a_key_reaches_the_workers_and_nothing_else_and_a_dead_worker_leaves_stdout_alone(tmp_path, place) -> None:
    write_suite(tmp_path, 40)
    words = ("run", "suite.yaml", "--out", "run", "-j", "8", "--json", "--no-progress")
    ended: Ended = finish(start(tmp_path, place, *words), timeout=110)
    assert ended.code == 4, ended.err
    metrics: dict[str, Any] = json.loads(ended.out)
    assert metrics["errors"] == {"WorkerLost": 1}
    texts = [
        json.loads(line)["response_text"] for line in (tmp_path / "run" / "outputs.jsonl").read_text().split("\n")[:-1]
    ]
    assert texts.count("has its key") == 39
    logs = list(place.rglob("worker-*"))
    assert logs
    assert not [*mentions(tmp_path, KEY), *mentions(place, KEY)]
    assert KEY not in ended.out + ended.err


def test_ctrl_c_stops_the_workers_and_their_cluster_and_the_run_is_resumed(tmp_path, place, monkeypatch) -> None:
    """The signal goes to the whole process group: Ray's processes must not die of it before the run ends them."""
    write_suite(tmp_path, 3000, AGENT.replace("c7", "none such"))
    outputs = tmp_path / "run" / "outputs.jsonl"
    process = start(tmp_path, place, "run", "suite.yaml", "--out", "run", "-j", "20", "--no-progress")
    wait_until(lambda: process.poll() is not None or (outputs.exists() and outputs.stat().st_size > 50_000), seconds=90)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130, ended.err
    assert "--engine ray" in ended.err
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    before = [json.loads(line)["id"] for line in outputs.read_text().splitlines()]
    asked = (tmp_path / "asked.log").read_text().split()
    assert set(before) <= set(asked)
    assert len(asked) <= len(before) + 20
    monkeypatch.setenv("STEELYARD_TEST_KEY", KEY)
    resumed = run_cli(tmp_path, "run", "suite.yaml", "--out", "run", "-j", "200", "--no-progress")
    assert resumed.code == 0, resumed.err
    again = (tmp_path / "asked.log").read_text().split()[len(asked) :]
    assert sorted(again) == sorted({f"c{n}" for n in range(3000)} - set(before))
