"""Runs made by hand to be compared: a letter a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard import EvalCase, EvalSet, InvocationResponse, Result, Runner
from steelyard.protocols import InvocationContext
from steelyard.records import Record, Score
from tests.support.journal import CountedModel, a_record, write_journal


def outcome(letter: str, number: int, *, trial: int = 0, **changes: Any) -> Record:
    """`p` passed, `f` failed, `u` unscored, `e` an error."""
    usual: dict[str, Any] = {"id": f"c{number}", "index": number, "trial": trial, "scored_by": "a" * 16}
    if letter == "e":
        usual |= {"status": "error", "error": "TargetError: no", "error_type": "TargetError", "response_text": None}
    elif letter in "pf":
        usual["scores"] = [Score("exact", float(letter == "p"), letter == "p")]
    return a_record(**{**usual, **changes})


def journal(run: Path, letters: str, **changes: Any) -> Path:
    """A run directory whose journal has one record a letter, and nothing else."""
    write_journal(run, [outcome(letter, number, **changes) for number, letter in enumerate(letters)])
    return run


def finished(run: Path, letters: str, *, scorers: Any = ("exact",), **more: Any) -> Result:
    """A complete run: each case's answer is right or wrong, or it fails, as the letters say."""

    def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        letter = letters[int(case.id[1:])]
        if letter == "e":
            raise ValueError("told to fail")
        said = "yes" if letter == "p" else "no"
        return InvocationResponse(response_text=said, time_to_first_token=0.1, time_to_last_token=0.2)

    cases = [EvalCase(id=f"c{number}", prompt=f"{number}?", expected="yes") for number in range(len(letters))]
    options = {"output_path": run, "progress": "off", "retries": 0, **more}
    return Runner(CountedModel(answer), EvalSet("letters", cases), list(scorers), **options).run_sync()
