"""A judged run that is killed (-9) pays for no answer and for no judgement twice."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.judged import CASES, DOOMED, RUNS, journalled, killable_run, lines_of
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

MOMENTS = {
    "answer": [],
    "judge first 0": ["agent"],
    "sample first 0": ["agent", "first 0"],
    "judge first 1": ["agent", "first 0"],
    "judge first 2": ["agent", "first 0", "first 1"],
    "sample first 2": ["agent", "first 0", "first 1", "first 2"],
    "judge second 0": ["agent", "first 0", "first 1", "first 2"],
    "sample second 1": ["agent", "first 0", "first 1", "first 2", "second 0", "second 1"],
    "sample second 2": ["agent", "first 0", "first 1", "first 2", "second 0", "second 1", "second 2"],
}
"""When the process dies, and what was paid for by then of the case that was in flight."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each moment the folder of a run that died then; all of them are started at once."""
    folders = {moment: tmp_path_factory.mktemp("killed") for moment in MOMENTS}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.judged", folder / "run", folder / "log", moment], cwd=ROOT
        )
        for moment, folder in folders.items()
    ]
    assert {process.wait(60) for process in running} == {-9}
    return folders


def calls(folder: Path) -> list[str]:
    """What was asked since this was last looked at: `agent CASE` or `JUDGE CASE RUN`."""
    log = folder / "log"
    words = log.read_text().splitlines()
    log.write_text("")
    return words


def everything(case_id: str) -> set[str]:
    return {f"agent {case_id}"} | {f"{name} {case_id} {run}" for name in ("first", "second") for run in range(RUNS)}


def paid_for(moment: str) -> set[str]:
    """What was asked and kept of the doomed case."""
    return {" ".join([words.split()[0], DOOMED, *words.split()[1:]]) for words in MOMENTS[moment]}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_resume_after_a_kill_asks_only_what_was_not_kept(moment: str, killed: dict[str, Path]) -> None:
    folder = killed[moment]
    before = calls(folder)
    assert any(DOOMED in call for call in before)
    assert not any("c03" in call for call in before), "the kill came late"
    result = killable_run(folder / "run", folder / "log", "never").run_sync()
    left = everything(DOOMED) - paid_for(moment)
    later = set().union(*(everything(f"c{number:02}") for number in range(3, CASES)))
    assert Counter(calls(folder)) == Counter(left | later)
    assert result.complete
    assert result.metrics["counts"]["ok"] == CASES
    assert [len(score.samples or []) for record in result.responses for score in record.scores] == [RUNS] * 2 * CASES
    assert all(not score.errors for record in result.responses for score in record.scores)
    kept = [line for line in lines_of(folder / "run", "answers.jsonl") if "sample" in line]
    assert len(kept) == 2 * RUNS * CASES, "each sample is journalled once"


def run_to_the_kill(folder: Path, moment: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.judged", folder / "run", folder / "log", moment], cwd=ROOT, check=False
    )
    assert ended.returncode == -9


@pytest.mark.parametrize(
    ("moment", "cut", "again"),
    [
        ("judge first 2", 9, {f"first {DOOMED} 1"}),
        ("judge first 0", 30, {f"agent {DOOMED}"}),
        ("judge first 2", 1, set()),
    ],
    ids=["a sample", "an answer", "only the newline"],
)
def test_a_torn_last_line_of_the_answers_is_passed_over(tmp_path: Path, moment: str, cut: int, again: set[str]) -> None:
    run_to_the_kill(tmp_path, moment)
    torn = tmp_path / "run" / "answers.jsonl"
    torn.write_bytes(torn.read_bytes()[:-cut])
    calls(tmp_path)
    result = killable_run(tmp_path / "run", tmp_path / "log", "never").run_sync()
    assert result.complete
    asked = {call for call in calls(tmp_path) if DOOMED in call}
    assert asked == everything(DOOMED) - paid_for(moment) | again
    # What was appended after the torn line can be read: every case's samples are there.
    assert {(case_id, run) for case_id, _, run in journalled(tmp_path / "run")} == {
        (f"c{number:02}", run) for number in range(CASES) for run in range(RUNS)
    }


def test_garbage_in_the_middle_of_the_answers_costs_only_what_it_replaced(tmp_path: Path) -> None:
    run_to_the_kill(tmp_path, "judge first 2")
    path = tmp_path / "run" / "answers.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert b'"run":0' in lines[-2]
    lines[-2] = b"\0\xff" * 20 + b"\n"
    path.write_bytes(b"".join(lines))
    calls(tmp_path)
    assert killable_run(tmp_path / "run", tmp_path / "log", "never").run_sync().complete
    asked = {call for call in calls(tmp_path) if DOOMED in call}
    assert asked == everything(DOOMED) - paid_for("judge first 2") | {f"first {DOOMED} 0"}
