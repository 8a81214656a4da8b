"""Journals made by hand, and a model that counts who asks it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Result, Runner
from steelyard.journal import writer
from steelyard.journal.writer import encode_record
from steelyard.protocols import Identity, InvocationContext, derived_rng
from steelyard.records import RECORD_VERSION, Record

Answer = Callable[[EvalCase, InvocationContext], InvocationResponse]


def drawn_answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
    """An answer whose every figure follows from the seed and the case."""
    rng = derived_rng(context.seed, case.id, context.trial)
    return InvocationResponse(
        response_text=str(case.expected) if rng.random() < 0.7 else "é\u2028",
        time_to_first_token=rng.random(),
        time_to_last_token=1 + rng.random(),
        num_tokens_input=rng.randrange(99),
        num_tokens_output=rng.randrange(1, 99),
        stop_reason="stop",
    )


class CountedModel:
    """Answers by a function, at once, and remembers whom it was asked about."""

    model_id = "counted"
    default_parallelism = 4

    def __init__(self, answer: Answer = drawn_answer) -> None:
        self.called: list[str] = []
        self._answer = answer

    def identity(self) -> Identity:
        return {"kind": "counted"}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        self.called.append(case.id)
        return self._answer(case, context)


def cases(count: int) -> list[EvalCase]:
    return [EvalCase(id=f"c{i}", prompt=f"{i}?", expected=str(i)) for i in range(count)]


def run_in(
    directory: Path,
    model: CountedModel,
    asked: Iterable[EvalCase],
    *,
    entry: dict[str, bool] | None = None,
    **more: Any,
) -> Result:
    """One launch of a run of these cases, scored by `exact`."""
    suite = EvalSet("journal", list(asked))
    runner = Runner(model, suite, ["exact"], **{"output_path": directory, "progress": "off", "retries": 0, **more})
    return runner.run_sync(**(entry or {}))


def reopen(directory: Path, data: bytes) -> None:
    """Make a finished run look as if it had been killed with this much in its journal."""
    (directory / "outputs.jsonl").write_bytes(data)
    (directory / "metrics.json").unlink(missing_ok=True)


def a_record(**changes: Any) -> Record:
    """A record with nothing odd about it, but for the changes."""
    usual: dict[str, Any] = {
        "v": RECORD_VERSION,
        "id": "c0",
        "trial": 0,
        "index": 0,
        "status": "ok",
        "attempts": 1,
        "elapsed": 0.5,
        "case_fp": "0" * 16,
        "scored_by": "",
        "run_time": 1.0,
        "response_text": "hello",
        "time_to_first_token": 0.1,
        "time_to_last_token": 0.2,
        "time_per_output_token": None,
        "num_tokens_input": 3,
        "num_tokens_output": 4,
        "request_time": None,
        "stop_reason": "stop",
        "error": None,
        "scores": [],
    }
    return Record(**{**usual, **changes})


def write_journal(directory: Path, records: Iterable[Record]) -> bytes:
    """An outputs.jsonl of these records; its bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    data = b"".join(encode_record(record) for record in records)
    (directory / "outputs.jsonl").write_bytes(data)
    return data


def ok_ids(data: bytes) -> set[str]:
    """The cases with a whole ok record in these bytes, read with nothing of the product's."""
    found = set()
    for line in data.split(b"\n"):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if value["status"] == "ok":
            found.add(value["id"])
    return found


def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the disk in peace, where a test makes hundreds of runs and power cuts are not its subject."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(writer, "_sync", lambda descriptor: None)
