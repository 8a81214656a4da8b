"""An answer is on disk before a scorer that can wait, block or crash sees it: no finished agent call is repeated."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from steelyard import CancellationToken, EvalCase, InvocationResponse, Score
from steelyard.scoring import Exact, Trajectory
from tests.support.judged import Agent, lines_of, run, runner_of, suite_of
from tests.support.paths import ROOT
from tests.support.scored import CASES, KINDS, run_in


def calls(log: Path, word: str) -> list[str]:
    """The cases for which this was called, since the log was begun."""
    return [line.split()[1] for line in log.read_text().splitlines() if line.split()[0] == word]


def kill_while_scoring(folder: Path, kind: str, nth: int) -> None:
    command = [sys.executable, "-m", "tests.support.scored", str(folder / "run"), str(folder / "log"), kind, str(nth)]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode == -9


@pytest.mark.parametrize(
    ("kind", "nth"),
    [(kind, random.Random(f"{kind} {seed}").randrange(1, CASES + 1)) for kind in KINDS for seed in range(2)],
)
def test_a_kill_while_a_scorer_runs_costs_no_finished_answer(tmp_path: Path, kind: str, nth: int) -> None:
    kill_while_scoring(tmp_path, kind, nth)
    log = tmp_path / "log"
    begun = set(calls(log, "scoring"))
    assert len(begun) >= nth
    asked_before = Counter(calls(log, "agent"))
    result = run_in(tmp_path / "run", log, kind).run_sync()
    asked_again = {case_id for case_id, times in Counter(calls(log, "agent")).items() if times > 1}
    assert not asked_again & begun
    assert set(asked_before.values()) == {1}
    assert result.complete
    assert result.metrics["counts"]["ok"] == CASES
    verdicts = {score.name: score.passed for record in result.responses for score in record.scores}
    assert verdicts, "the answers that were kept are the ones that are scored"
    assert all(verdicts.values())


@pytest.mark.parametrize("kind", ["thread", "async"])
def test_an_interruption_while_a_scorer_runs_costs_no_finished_answer(tmp_path: Path, kind: str) -> None:
    token, release = CancellationToken(), threading.Event()
    agent = Agent()

    def in_thread(case: EvalCase, response: InvocationResponse) -> float:
        token.cancel("enough")
        release.wait()
        return 1.0

    async def in_loop(case: EvalCase, response: InvocationResponse) -> float:
        token.cancel("enough")
        await asyncio.Event().wait()
        return 1.0

    function: Any = in_thread if kind == "thread" else in_loop
    runner = runner_of(agent, suite_of(4), [function], output_path=tmp_path)
    runner.token = token
    assert runner.run_sync().cancelled
    release.set()
    assert lines_of(tmp_path, "outputs.jsonl") == []
    answered = len(agent.answered)

    def grade(case: EvalCase, response: InvocationResponse) -> float:
        return float(response.response_text == f"answer to {case.id}")

    grade.__name__ = function.__name__
    again = Agent()
    result = run(again, suite_of(4), [grade], output_path=tmp_path)
    assert result.complete
    assert result.metrics["pass_rate"] == 1.0
    assert answered >= 1
    assert len(again.calls) == 4 - answered


class Sleepy:
    """A class of the user's own."""

    def score(self, case: EvalCase, response: InvocationResponse) -> Score:
        return Score("sleepy", 1.0, True)


class Quick(Sleepy):
    """One that says that it returns at once."""

    immediate = True


class Derived(Exact):
    """A built-in one that a user has derived from may do anything."""


def any_arguments(wanted: object, got: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("scorers", "kept"),
    [
        (["exact", "contains"], False),
        ([Trajectory(forbidden=["rm"])], False),
        ([], False),
        (["exact", lambda case, response: True], True),
        ([Sleepy()], True),
        ([Quick()], False),
        ([Derived()], True),
        ([Trajectory(forbidden=["rm"], arguments=any_arguments)], True),
    ],
    ids=["built-in", "trajectory", "none", "function", "class", "quick class", "derived", "trajectory with a function"],
)
def test_only_scorers_that_can_wait_need_the_answer_on_disk_first(
    tmp_path: Path, scorers: list[Any], kept: bool
) -> None:
    run(Agent(), suite_of(3, expected="answer"), scorers, output_path=tmp_path)
    assert len(lines_of(tmp_path, "answers.jsonl")) == (3 if kept else 0)
    assert (tmp_path / "answers.jsonl").exists() is kept
