"""`failed_in`: another run of the cases that failed, or ended in an error, in an earlier one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Result, Runner
from steelyard.errors import ConfigurationError, SuiteError
from tests.support.cli import run_cli

ASKED: list[str] = []


async def answer(case: EvalCase) -> str:
    """Right for even numbers, wrong for odd ones, an error for every fifth."""
    ASKED.append(case.id)
    number = int(case.id[1:])
    if number % 5 == 0:
        raise ValueError("no answer")
    return "no" if number % 2 else "yes"


FAILED = [f"c{n}" for n in range(20) if n % 2 or n % 5 == 0]


def run_of(folder: Path | None, cases: range = range(20), **options: Any) -> Result:
    ASKED.clear()
    suite = EvalSet("s", [EvalCase(id=f"c{n}", prompt="?", expected="yes", metadata={"third": n % 3}) for n in cases])
    return Runner(answer, suite, ["exact"], progress="off", output_path=folder, **options).run_sync()


def test_only_cases_that_failed_or_had_an_error_are_run(tmp_path: Path) -> None:
    run_of(tmp_path / "first")
    again = run_of(tmp_path / "again", failed_in=tmp_path / "first")
    assert ASKED == FAILED
    assert [record.id for record in again.responses] == FAILED
    assert again.metrics["n"] == len(FAILED)
    assert json.loads((tmp_path / "again" / "run.json").read_text())["options"]["failed_in"] == str(tmp_path / "first")


def test_a_case_that_failed_in_one_trial_is_run_again(tmp_path: Path) -> None:
    async def fails_once(case: EvalCase, context: Any) -> str:
        ASKED.append(case.id)
        return "no" if case.id == "b" and context.trial == 1 else "yes"

    def run(folder: str, **options: Any) -> None:
        ASKED.clear()
        suite = EvalSet("s", [EvalCase(id=one, prompt="?", expected="yes") for one in "abc"])
        Runner(fails_once, suite, ["exact"], progress="off", output_path=tmp_path / folder, **options).run_sync()

    run("first", trials=3)
    run("again", failed_in=tmp_path / "first")
    assert ASKED == ["b"]


def test_it_goes_with_the_other_selections(tmp_path: Path) -> None:
    run_of(tmp_path / "first")
    run_of(None, failed_in=tmp_path / "first", where=("third=0",), match="c1*")
    assert ASKED == ["c15"]
    run_of(None, failed_in=str(tmp_path / "first"), sample=4)
    assert len(ASKED) == 4
    assert set(ASKED) < set(FAILED)


def test_an_unfinished_run_can_be_named_and_a_killed_rerun_is_resumed(tmp_path: Path) -> None:
    run_of(tmp_path / "first")
    (tmp_path / "first" / "metrics.json").unlink()
    again = tmp_path / "again"
    run_of(again, failed_in=tmp_path / "first")
    (again / "metrics.json").unlink()
    lines = (again / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    (again / "outputs.jsonl").write_bytes(b"".join(lines[:3]))
    result = run_of(again, failed_in=tmp_path / "first", retries=0)
    assert [FAILED[0], *FAILED[3:]] == ASKED  # the first ended in an error, which a resumed run retries
    assert [record.id for record in result.responses] == FAILED


def test_what_cannot_be_run_again_is_said(tmp_path: Path) -> None:
    run_of(tmp_path / "first")
    with pytest.raises(ConfigurationError, match=r"nowhere is not a run directory: there is no such folder"):
        run_of(None, failed_in=tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="failed_in names the run's own directory"):
        run_of(tmp_path / "first", failed_in=tmp_path / "first" / ".." / "first")
    run_of(tmp_path / "good", range(2, 20, 20))
    with pytest.raises(ConfigurationError, match=r"no case of .*good failed or ended in an error"):
        run_of(None, failed_in=tmp_path / "good")
    with pytest.raises(SuiteError, match=r"no case of suite 's' failed in .*first: none of its 2"):
        run_of(None, range(2, 6, 2), failed_in=tmp_path / "first")
    with pytest.raises(
        SuiteError,
        match=r"no case of suite 's' has third=1 and has an id that matches 'c8' and failed in .*first: none of its 20",
    ):
        run_of(None, failed_in=tmp_path / "first", where=("third=1",), match="c8")


def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "target: {simulated: {accuracy: 0.5, latency: 0, tokens_per_second: 0}}\nscorers: [exact]\n"
        "cases: [" + ", ".join(f"{{id: c{n}, prompt: '?', expected: 'yes'}}" for n in range(20)) + "]\n"
    )
    ended = run_cli(tmp_path, "run", "s.yaml", "-o", "first")
    assert ended.code == 0, ended.err
    failed = json.loads((tmp_path / "first" / "metrics.json").read_text())
    wrong = failed["n"] - failed["passed"]
    assert 0 < wrong < 20
    ended = run_cli(tmp_path, "run", "s.yaml", "--failed-in", "first", "-o", "again", "--dry-run")
    assert ended.code == 0, ended.err
    assert f"{wrong} " in ended.out + ended.err
    ended = run_cli(tmp_path, "run", "s.yaml", "--failed-in", "first", "-o", "again")
    assert ended.code == 0, ended.err
    assert json.loads((tmp_path / "again" / "metrics.json").read_text())["n"] == wrong
    ended = run_cli(tmp_path, "score", "again", "-o", "scored")
    assert ended.code == 0, ended.err
    assert json.loads((tmp_path / "scored" / "metrics.json").read_text())["n"] == wrong
