"""What a case in a workspace of 1,000 files costs beside a bare copy and a process start; whether many stay flat.

Both are measured in turns, in memory (`/dev/shm`) where there is such a folder: a disk's own cost of making files
differs by a factor of ten from one minute to the next (ext4 without a journal passes over each file that was removed
in the last minute, one by one, whenever it makes one), and is not ours.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.memory import peak_bytes
from benchmarks.rows import Row
from steelyard import EvalCase, EvalSet, Runner, Workspace
from steelyard.targets import Agent

FOLDERS, FILES_EACH = 20, 50
CASES, ROUNDS = 20, 3
FEW, MANY = 1_000, 10_000
PARALLELISM = 8
RATIO_LIMIT = 1.5
GROWTH_LIMIT = 2000.0
"""Bytes a case; the case itself is held in memory here, too."""
HANDLE_LIMIT = 8.0
"""For each case at a time: three pipes, logs, and a share of what the run itself has open."""


def make_template(folder: Path) -> None:
    for outer in range(FOLDERS):
        (folder / f"package{outer}").mkdir(parents=True)
        for inner in range(FILES_EACH):
            (folder / f"package{outer}" / f"module{inner}.py").write_text(f"VALUE = {outer * inner}\n" * 20)


def _runner(place: Path, count: int, workspace: Workspace, scorers: list[object], parallelism: int) -> Runner:
    suite = EvalSet("workspaces", [EvalCase(id=f"case-{number}", prompt="?") for number in range(count)])
    out = Path(tempfile.mkdtemp(dir=place)) / "run"
    return Runner(
        Agent(["/bin/true"]),
        suite,
        scorers,
        workspace=workspace,
        parallelism=parallelism,
        output_path=out,
        progress="off",
        low_memory=True,
    )


def seconds_of_run(place: Path, count: int) -> float:
    """Seconds of a whole run of an agent that does nothing, one case at a time."""
    runner = _runner(place, count, Workspace(str(place / "template")), [], 1)
    started = time.perf_counter()
    result = runner.run_sync()
    took = time.perf_counter() - started
    if not result.complete or result.typed_metrics.counts.ok != count:
        raise AssertionError("the run did not go as it should")
    return took


def seconds_of_bare_copies(place: Path, count: int) -> float:
    """Seconds of copying the template and starting the same program; removing the copy is not counted."""
    took = 0.0
    for _ in range(count):
        started = time.perf_counter()
        shutil.copytree(place / "template", place / "copy")
        subprocess.run(["/bin/true"], check=True, stdin=subprocess.DEVNULL, capture_output=True)
        took += time.perf_counter() - started
        shutil.rmtree(place / "copy")
    return took


def child(folder: str, count: int) -> None:
    """Run many small cases; print the peak of this process's memory and of its open files."""
    most = 0

    def count_handles(case: EvalCase, response: object) -> bool:  # noqa: ARG001 - a scorer's shape
        nonlocal most
        most = max(most, len(os.listdir("/dev/fd")))
        return True

    workspace = Workspace({"files": {"a.txt": "a\n"}}, keep="none")
    result = _runner(Path(folder), count, workspace, [count_handles], PARALLELISM).run_sync()
    if not result.complete or result.typed_metrics.counts.ok != count:
        raise AssertionError("the run did not go as it should")
    print(json.dumps([peak_bytes(), most]))


def in_child(place: Path, count: int) -> tuple[int, int]:
    command = [sys.executable, "-c", f"from benchmarks.workspaces import child; child({str(place)!r}, {count})"]
    peak, handles = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return peak, handles


def measure() -> list[Row]:
    """The cost of a case as a ratio; growth of memory a case; open files for each case at a time."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    before = os.environ.get("STEELYARD_WORK")
    with tempfile.TemporaryDirectory(dir=memory) as name:
        place = Path(name)
        os.environ["STEELYARD_WORK"] = str(place / "work")
        try:
            make_template(place / "template")
            rounds = []
            for _ in range(ROUNDS):
                bare = seconds_of_bare_copies(place, CASES) / CASES
                one, many = seconds_of_run(place, 1), seconds_of_run(place, CASES + 1)
                rounds.append(((many - one) / CASES, bare))
            (few_peak, _), (many_peak, handles) = in_child(place, FEW), in_child(place, MANY)
        finally:
            del os.environ["STEELYARD_WORK"]
            if before is not None:
                os.environ["STEELYARD_WORK"] = before
    ratio, case, bare = min((case / bare, case, bare) for case, bare in rounds)  # the best: a busy moment is not ours
    files = FOLDERS * FILES_EACH
    return [
        Row(
            f"a no-op agent in a workspace of {files:,} files",
            ratio,
            RATIO_LIMIT,
            f"{case * 1e3:.0f} ms a case, removal included; a bare copy and a process start {bare * 1e3:.0f} ms",
        ),
        Row(
            f"growth from {FEW:,} to {MANY:,} cases in workspaces",
            (many_peak - few_peak) / (MANY - FEW),
            GROWTH_LIMIT,
            f"peak {few_peak / 2**20:.0f} MiB and {many_peak / 2**20:.0f} MiB",
            unit="bytes a case",
        ),
        Row(
            f"open files in a run of {MANY:,} cases, {PARALLELISM} at a time",
            handles / PARALLELISM,
            HANDLE_LIMIT,
            f"{handles} at most",
            unit="for each",
        ),
    ]
