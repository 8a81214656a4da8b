"""Answers from elsewhere: a file of answers, a run's journal, a provider's batch output."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Runner
from steelyard.errors import ConfigurationError
from steelyard.scoring import Exact
from steelyard.targets import Answers
from tests.support.cli import run_cli
from tests.support.scripted_transport import chat_whole

CASES = [EvalCase(id="fr", prompt="France?", expected="Paris"), EvalCase(id="it", prompt="Italy?", expected="Rome")]


def records(folder: Path, *lines: Any, name: str = "a.jsonl", **options: Any) -> list[Any]:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    suite = EvalSet("s", CASES)
    run = folder / f"run-{len(list(folder.iterdir()))}"
    return Runner(Answers(str(folder / name)), suite, [Exact()], output_path=run, **options).run_sync().load_responses()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_answers_are_found_by_id_and_scored(tmp_path: Path, name: str) -> None:
    first, second = records(tmp_path, {"id": "it", "answer": "Milan"}, {"id": "fr", "output": "Paris"}, name=name)
    assert [(one.id, one.response_text, one.scores[0].passed) for one in (first, second)] == [
        ("fr", "Paris", True),
        ("it", "Milan", False),
    ]


def test_a_case_without_an_answer_is_an_error(tmp_path: Path) -> None:
    _, missing = records(tmp_path, {"id": "fr", "answer": "Paris"})
    assert (missing.status, missing.error_type) == ("error", "TargetError")
    assert "has no answer for the case 'it', trial 0" in missing.error


def test_a_runs_journal_is_a_file_of_answers_with_trials_times_and_errors(tmp_path: Path) -> None:
    def answer(case: EvalCase) -> str:
        if case.id == "it":
            raise ValueError("no idea")
        return "Paris"

    Runner(answer, EvalSet("s", CASES), output_path=tmp_path / "old", trials=2).run_sync()
    lines = [json.loads(line) for line in (tmp_path / "old" / "outputs.jsonl").read_text().splitlines()]
    again = records(tmp_path, *lines, trials=2)
    assert [(one.id, one.trial, one.response_text, one.status) for one in again] == [
        ("fr", 0, "Paris", "ok"), ("fr", 1, "Paris", "ok"), ("it", 0, None, "error"), ("it", 1, None, "error"),
    ]  # fmt: skip
    assert "no idea" in again[-1].error


def test_batch_outputs_of_providers_are_read(tmp_path: Path) -> None:
    chat = {
        "custom_id": "fr",
        "response": {"status_code": 200, "body": chat_whole({"content": "Paris"})},
        "error": None,
    }
    message = {"role": "assistant", "content": [{"type": "text", "text": "Rome"}], "stop_reason": "end_turn",
               "usage": {"input_tokens": 5, "output_tokens": 1}}  # fmt: skip
    anthropic = {"custom_id": "it", "result": {"type": "succeeded", "message": message}}
    first, second = records(tmp_path, chat, anthropic)
    assert (first.response_text, first.num_tokens_input, first.stop_reason) == ("Paris", 9, "stop")
    assert (second.response_text, second.num_tokens_output, second.stop_reason) == ("Rome", 1, "end_turn")
    bad = {"custom_id": "fr", "response": {"status_code": 400, "body": {"error": {"message": "too long"}}}}
    expired = {"custom_id": "it", "result": {"type": "expired"}}
    for record, words in zip(records(tmp_path, bad, expired, name="b.jsonl"), ("too long", "expired"), strict=True):
        assert record.status == "error"
        assert words in record.error


def test_lines_as_the_providers_document_them_have_their_own_ids_besides(tmp_path: Path) -> None:
    """OpenAI's lines also have an `id`, of the request in the batch."""
    chat = {
        "id": "batch_req_123",
        "custom_id": "fr",
        "error": None,
        "response": {"status_code": 200, "request_id": "req_c", "body": chat_whole({"content": "Paris"})},
    }
    answer = {
        "id": "resp_1",
        "object": "response",
        "status": "completed",
        "usage": {"input_tokens": 3, "output_tokens": 1},
        "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Rome"}]}],
    }
    responses = {
        "id": "batch_req_124",
        "custom_id": "it",
        "error": None,
        "response": {"status_code": 200, "body": answer},
    }
    first, second = records(tmp_path, responses, chat)
    assert (first.id, first.response_text, first.request_id) == ("fr", "Paris", "req_c")
    assert (second.response_text, second.num_tokens_input) == ("Rome", 3)
    expired = {
        "id": "batch_req_125",
        "custom_id": "fr",
        "response": None,
        "error": {"code": "batch_expired", "message": "late"},
    }
    errored = {
        "custom_id": "it",
        "result": {"type": "errored", "error": {"type": "error", "error": {"message": "too big"}}},
    }
    for record, words in zip(
        records(tmp_path, expired, errored, name="b.jsonl"), ("batch_expired", "too big"), strict=True
    ):
        assert record.status == "error"
        assert words in record.error


def test_batches_of_gemini_and_bedrock(tmp_path: Path) -> None:
    gemini = {
        "key": "fr",
        "response": {
            "candidates": [{"content": {"role": "model", "parts": [{"text": "Paris"}]}, "finishReason": "STOP"}],
            "usageMetadata": {"promptTokenCount": 4, "candidatesTokenCount": 1},
        },
    }
    message = {"role": "assistant", "content": [{"type": "text", "text": "Rome"}], "stop_reason": "end_turn"}
    claude = {"recordId": "it", "modelInput": {"messages": []}, "modelOutput": message}
    first, second = records(tmp_path, gemini, claude)
    assert (first.response_text, first.num_tokens_input, second.response_text) == ("Paris", 4, "Rome")
    output = {
        "output": {"message": {"role": "assistant", "content": [{"text": "Rome"}]}},
        "stopReason": "end_turn",
        "usage": {"inputTokens": 6, "outputTokens": 1},
    }
    nova = {"recordId": "it", "modelInput": {}, "modelOutput": output}
    bad = {"key": "fr", "error": {"code": 3, "message": "no quota"}}
    failed, second = records(tmp_path, nova, bad, name="b.jsonl")
    assert "no quota" in failed.error
    assert (second.response_text, second.num_tokens_input) == ("Rome", 6)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ([1], "a line must be an object"),
        ({"answer": "x"}, "it has no id"),
        ({"id": "a"}, "it has no answer"),
        ({"custom_id": "a"}, "no answer of a batch"),
        ({"id": "a", "response_text": 3}, "response_text"),
    ],
)
def test_a_line_that_is_no_answer_is_named(tmp_path: Path, line: Any, problem: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "x", "answer": ""}\n' + json.dumps(line))
    with pytest.raises(ConfigurationError, match=rf"a\.jsonl:2: is no answer: .*{problem}"):
        Answers(str(tmp_path / "a.jsonl"))


def test_two_answers_for_one_case_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "x", "answer": "a"}\n{"id": "x", "answer": "b"}\n')
    with pytest.raises(ConfigurationError, match="the id x is duplicated"):
        Answers(str(tmp_path / "a.jsonl"))
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        Answers(str(tmp_path / "none.jsonl"))


def test_a_suite_file_names_the_answers_relative_to_itself(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"id": "a", "answer": "4"}\n')
    (tmp_path / "s.yaml").write_text(
        "target: {answers: answers.jsonl}\ncases: [{id: a, prompt: 2+2?, expected: '4'}]\nscorers: [exact]"
    )
    ended = run_cli(tmp_path, "run", "s.yaml", "--out", "run", "--no-progress")
    assert ended.code == 0, ended.err
    assert "passed" in ended.out
