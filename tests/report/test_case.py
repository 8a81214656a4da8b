"""A conversation as it is shown: the question stands in it, whether the target told it or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase
from steelyard.records import Score
from steelyard.report.case import (
    MAX_FILES,
    CaseFile,
    _score,
    _times,
    beginning,
    case_files,
    ending,
    has_files,
    patch_summary,
    turns,
)
from tests.support.journal import a_record
from tests.support.report import worked_run

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


def test_the_files_of_a_case_are_found(tmp_path: Path) -> None:
    run = worked_run(tmp_path / "run")
    for name in ("0.1.out", "1.out", "10.out"):
        (run / "logs" / "fixer" / name).write_text("x")
    found = case_files(run, "fixer", 0)
    assert [file.path for file in found.logs] == [
        "calls/fixer/0.jsonl", "logs/fixer/0.err", "logs/fixer/0.out", "logs/fixer/0.1.out",
    ]  # fmt: skip
    assert found.patch is not None
    summary = patch_summary(run, found.patch)
    assert summary is not None
    assert (summary.files, summary.added, summary.removed) == (1, 1, 1)
    assert [file.path for file in found.artifacts] == [
        "artifacts/fixer/0/files/notes.txt", "artifacts/fixer/0/files/page.html",
    ]  # fmt: skip
    assert found.more == 0
    assert not case_files(run, "nobody", 0)
    assert has_files(run)
    assert not has_files(tmp_path)


def test_many_files_are_counted_and_a_whole_workspace_comes_last(tmp_path: Path) -> None:
    kept = tmp_path / "artifacts" / "c" / "0"
    for number in range(MAX_FILES + 30):
        (kept / "workspace" / str(number % 7)).mkdir(parents=True, exist_ok=True)
        (kept / "workspace" / str(number % 7) / f"{number}.txt").write_text("x")
    (kept / "z.log").write_text("log")
    (kept / "workspace.patch").write_text("")
    (kept / "workspace.json").write_text("{}")
    found = case_files(tmp_path, "c", 0)
    assert len(found.artifacts) == MAX_FILES
    assert found.artifacts[0].path == "artifacts/c/0/z.log"
    assert found.more == 31


def test_links_are_neither_listed_nor_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "0.out").write_text("secret")
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "a").symlink_to(secret)
    (run / "logs" / "b").mkdir()
    (run / "logs" / "b" / "0.out").symlink_to(secret / "0.out")
    (run / "artifacts" / "b" / "0").mkdir(parents=True)
    (run / "artifacts" / "b" / "0" / "folder").symlink_to(secret)
    assert not case_files(run, "a", 0)
    assert not case_files(run, "b", 0)
    for reads in (beginning, ending):
        assert reads(run, CaseFile("logs/b/0.out", 6), 100) == ""
        assert reads(run, CaseFile("../secret/0.out", 6), 100) == ""


def test_beginnings_and_endings_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x").write_text("é" * 10 + "z" * 1000 + "end\n")
    file = CaseFile("logs/x", 0)
    assert beginning(tmp_path, file, 12) == "é" * 10 + "zz"
    assert ending(tmp_path, file, 5) == "zend\n"


def test_times_and_tokens_of_an_attempt_fit_80_columns() -> None:
    times = {"elapsed": 0.277, "time_to_first_token": 0.088, "time_to_last_token": 0.276}
    record = a_record(num_tokens_input=21, num_tokens_output=16, cost=0.0001234, **times)
    assert _times(record).splitlines() == [
        "  attempts 1, in all 277ms, first token 88ms, last token 276ms, tokens in 21,",
        "    out 16, cost 0.0001234",
    ]
