"""Turns on disk: one attempt a file, the beginning first, and what of it can be read after a crash."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from steelyard.records import CaseLimits
from steelyard.workspace.keeping import TurnRecorder, read_turns
from steelyard.workspace.limits import AttemptLimits


def recorded(path: Path, attempt: int, *contents: str) -> None:
    async def main() -> None:
        turns = TurnRecorder(path, AttemptLimits(CaseLimits()), attempt=attempt)
        for content in contents:
            turns({"role": "assistant", "content": content}, input_tokens=3, cost=0.5)

    asyncio.run(main())


def test_each_attempt_has_its_own_file_that_begins_with_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "case" / "0.turns.jsonl"
    recorded(path, 1, "a", "b")
    recorded(path, 2, "c")
    with open(path, "rb") as file:
        begin, turn = read_turns(file)
    assert (begin.attempt, begin.message) == (2, None)
    assert begin.time <= turn.time
    assert turn.message == {"role": "assistant", "content": "c"}
    assert (turn.input_tokens, turn.output_tokens, turn.cost) == (3, None, 0.5)
    with open(path.with_name("0.turns.1.jsonl"), "rb") as file:
        assert [line.message["content"] for line in read_turns(file) if line.message] == ["a", "b"]


def test_an_attempt_without_turns_leaves_no_file(tmp_path: Path) -> None:
    recorded(tmp_path / "case" / "0.turns.jsonl", 1)
    assert not (tmp_path / "case").exists()


def test_a_torn_line_is_left_out() -> None:
    lines = b'{"time":1,"attempt":1}\n{"time":2,"message":{"role":"tool"}}\nnonsense\n{"time":3,"mess'
    assert [line.time for line in read_turns(io.BytesIO(lines))] == [1, 2]
