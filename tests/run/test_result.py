"""What a reader without the suite makes of a journal in which a case was edited."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard import CancellationToken, EvalCase, EvalSet, Result, Runner


def run_edited(folder: Path) -> None:
    """A first launch that answers `a` and is stopped, then one in which the edited `a` fails and `b` is left."""
    token = CancellationToken()

    def first(case: EvalCase) -> str:
        token.cancel("enough")
        return f"old answer to {case.id}"

    def second(case: EvalCase) -> str:
        if case.id == "b":
            raise KeyError("not reached")
        raise ValueError("cannot answer the edited case")

    for prompt, function in (("before", first), ("after", second)):
        answer = function
        answer.__name__ = answer.__qualname__ = "answer"
        suite = EvalSet("edited", [EvalCase(id="a", prompt=prompt), EvalCase(id="b", prompt="the same")])
        limit = 1 if function is second else None
        runner = Runner(answer, suite, output_path=folder, progress="off", limit=limit, retries=0)
        runner.token = token if function is first else None
        runner.run_sync()
    (folder / "metrics.json").unlink()


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_an_old_answer_to_a_case_that_was_edited_since_does_not_come_back(tmp_path: Path, index: str) -> None:
    run_edited(tmp_path)
    if index == "lost":
        (tmp_path / "outputs.idx").unlink()
    result = Result.load(tmp_path)
    assert [(record.id, record.status) for record in result.iter_responses()] == [("a", "error")]
    assert result.metrics["counts"]["ok"] == 0
    assert result.metrics["counts"]["error"] == 1
