"""A retry or a re-scoring that is stopped half-way is not called complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard import CancellationToken, EvalCase, EvalSet, InvocationResponse, RunFinished, Runner

CASES = [EvalCase(id=f"c{number}", prompt="?", expected="yes") for number in range(10)]


def runner(path: Path, answer: object, **more: object) -> Runner:
    return Runner(answer, EvalSet("s", CASES), output_path=path, progress="off", retries=0, **more)  # type: ignore[arg-type]


def test_errors_that_were_to_be_asked_again_keep_a_stopped_run_open(tmp_path: Path) -> None:
    token = CancellationToken()
    asked: list[str] = []

    def answer(case: EvalCase) -> str:
        asked.append(case.id)
        if len(asked) <= 10:
            raise ValueError("down")
        if len(asked) == 13:
            token.cancel("enough")
        return "yes"

    assert runner(tmp_path, answer).run_sync().complete
    stopped = runner(tmp_path, answer, token=token).run_sync(retry_errors=True)
    assert not stopped.complete
    assert stopped.cancelled
    assert not (tmp_path / "metrics.json").exists()
    assert stopped.metrics["to_redo"] > 0
    ended = runner(tmp_path, answer).run_sync()
    assert ended.complete
    assert ended.metrics["counts"]["ok"] == 10
    with pytest.raises(RunFinished):
        runner(tmp_path, answer).run_sync()


def test_answers_that_were_to_be_scored_again_keep_a_stopped_run_open(tmp_path: Path) -> None:
    token = CancellationToken()
    scored: list[str] = []

    def answer(case: EvalCase) -> str:
        assert not scored, "nothing is asked again"
        return "yes"

    def broken(case: EvalCase, response: InvocationResponse) -> bool:
        raise ValueError("not yet")

    async def mended(case: EvalCase, response: InvocationResponse) -> bool:
        scored.append(case.id)
        if len(scored) == 4:
            token.cancel("enough")
        return True

    assert runner(tmp_path, answer, scorers=[broken]).run_sync().metrics["scoring_errors"] == 10
    stopped = runner(tmp_path, answer, scorers=[mended], token=token).run_sync(retry_errors=True)
    assert not stopped.complete
    assert stopped.metrics["to_redo"] == 10 - len(scored)
    ended = runner(tmp_path, answer, scorers=[mended]).run_sync()
    assert ended.complete
    assert ended.metrics["passed"] == 10
    assert sorted(scored) == sorted(case.id for case in CASES)
