"""A conversation as it is shown: the question stands in it, whether the target told it or not."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Result, Runner
from steelyard.records import InvocationResponse, Score
from steelyard.report.case import OneCase, _score, time_line, turns
from steelyard.workspace.places import CALLS, safe_name
from steelyard.workspace.recording import CALLS_VERSION, Body, CallFile, CallLine, EndLine, SessionLine
from tests.support.journal import a_record

CASE = EvalCase(id="fr", prompt="Capital of France?", system_prompt="Be brief.")
ANSWER = {"role": "assistant", "content": "Paris"}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "search", "input": {}}]}
FOUND = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "found"}]}


def spoken(messages: list[dict[str, Any]] | None, case: EvalCase | None = CASE) -> list[tuple[str, str]]:
    record = a_record(id="fr", input_prompt=None if case is None else case.prompt, response_text="Paris")
    record.messages = messages
    return [(turn.role, turn.text) for turn in turns(record, case)]


@pytest.mark.parametrize(
    "messages",
    [None, [ANSWER], [{"role": "user", "content": "Capital of France?"}, ANSWER]],
    ids=["no log", "an endpoint's log of the answer alone", "the whole log"],
)
def test_the_question_stands_before_the_answer_once(messages: list[dict[str, Any]] | None) -> None:
    expected = [("system", "Be brief."), ("user", "Capital of France?"), ("assistant", "Paris")]
    assert spoken(messages) == expected


def test_the_result_of_a_tool_is_not_taken_for_the_question() -> None:
    roles = [role for role, _ in spoken([CALL, FOUND, ANSWER])]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_a_question_that_the_target_put_in_other_words_is_not_told_twice() -> None:
    asked = {"role": "user", "content": "Answer shortly: Capital of France?"}
    assert spoken([asked, ANSWER])[1:] == [("user", "Answer shortly: Capital of France?"), ("assistant", "Paris")]


def test_a_log_that_begins_with_a_greeting_is_told_as_it_is() -> None:
    case = EvalCase(id="fr", messages=[{"role": "assistant", "content": "Hello!"}], prompt="Capital of France?")
    log = [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Capital of France?"}, ANSWER]
    assert [role for role, _ in spoken(log, case)] == ["assistant", "user", "assistant"]


def test_a_log_without_a_known_question_is_told_as_it_is() -> None:
    assert spoken([ANSWER], None) == [("assistant", "Paris")]


def test_a_sample_that_failed_says_why_in_its_own_line() -> None:
    score = Score("judge", 0.5, True, samples=[0.5, None], reasons=["so-so", None], errors=["no JSON in the reply"])
    assert list(_score(score))[1:] == ["    0.50  so-so", "    –  no JSON in the reply"]


def test_an_error_without_samples_is_told() -> None:
    assert list(_score(Score("number", errors=["ValueError: no number"])))[1:] == ["    ValueError: no number"]


def call(number: int, at: float, elapsed: float, **fields: object) -> CallLine:
    response = InvocationResponse(num_tokens_input=10, num_tokens_output=5, cost=0.5, **fields)  # type: ignore[arg-type]
    return CallLine(
        session="s", call=number, api="openai", path="/chat/completions", model="m", at=at, elapsed=elapsed,
        thread=number, request=Body(b'{"model":"m"}').whole(), response=response,
    )  # fmt: skip


def test_a_time_line_tells_models_waits_and_tools_apart() -> None:
    line = time_line([call(1, 10.0, 20.0, time_waiting=5.0), call(2, 25.0, 15.0)], 60.0)
    assert line == "░" * 10 + "·" * 5 + "█" * 25 + "░" * 20


def test_a_case_with_calls_shows_them(tmp_path: Path) -> None:
    def agent(case: EvalCase) -> InvocationResponse:
        return InvocationResponse(response_text="x", time_in_model=2.0, time_in_tools=1.0)

    suite = EvalSet("s", [EvalCase(id="Case A", prompt="?"), EvalCase(id="b", prompt="?")])
    result = Runner(agent, suite, progress="off", output_path=tmp_path).run_sync()
    now = datetime.now(UTC)
    begin = SessionLine(v=CALLS_VERSION, id="Case A", trial=0, attempt=1, session="s", time=now)
    file = CallFile(tmp_path / CALLS / safe_name("Case A") / "0.jsonl", begin)
    for line in (call(1, 0.5, 1.0), call(2, 1.5, 1.0, error="it broke"), EndLine(session="s", calls=2)):
        file.append(line)
    file.close()
    text = OneCase(tmp_path, "Case A").to_text()
    assert "model calls: 2 in 3.00s; █ model 2.00s, ░ tools 1.00s" in text
    assert "1.50s  m  (conversation 2)  took 1.00s  tokens 10 + 5  cost 0.5  it broke" in text
    assert "model calls" not in OneCase(tmp_path, "b").to_text()
    (session,) = Result.load(tmp_path).calls("Case A")
    assert [one.body for one in session.calls] == [{"model": "m"}] * 2
    assert result.calls("b") == []
