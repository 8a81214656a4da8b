"""A conversation as it is shown: the question stands in it, whether the target told it or not."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard import EvalCase
from steelyard.records import Score
from steelyard.report.case import _score, turns
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
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


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
