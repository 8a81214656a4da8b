"""Keys are found and masked in whatever form a server or a program repeats them."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, InvocationResponse, Record, Result, Runner
from steelyard.errors import TransientError
from steelyard.masking import MASK, MAX_TRACEBACK, Masker, Secret, user_traceback
from steelyard.report.case import OneCase
from steelyard.report.page.data import body
from tests.support.judged import lines_of

KEY = "sk-live/a+b c=d~1234567890"
SUITE = EvalSet("s", [EvalCase(id="c", prompt="?", expected="x")])


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "written",
    [
        KEY,
        KEY.upper(),
        quote(KEY, safe=""),
        quote_plus(KEY),
        quote(KEY, safe="").lower(),
        json.dumps(KEY)[1:-1],
        b64(KEY),
        b64(f"user:{KEY}"),
        b64(f"u:{KEY}:more"),
        b64(f"us:{KEY}"),
        base64.urlsafe_b64encode(f"user:{KEY}".encode()).decode(),
    ],
)
def test_a_key_is_masked_however_it_is_written(written: str) -> None:
    masked = Masker([KEY]).text(f"before {written} after")
    assert MASK in masked
    assert written not in masked
    assert KEY not in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")


def test_the_same_object_comes_back_where_there_is_nothing_to_mask() -> None:
    value = {"a": ["text", 1, None], "b": {"c": "more"}}
    assert Masker([KEY]).value(value) is value
    assert Masker([]).value(value) is value


def test_lists_mappings_and_their_keys_are_masked() -> None:
    masked = Masker([KEY]).value({"a": [f"x {KEY}", {KEY: KEY}], "n": 3})
    assert masked == {"a": [f"x {MASK}", {MASK: MASK}], "n": 3}


def test_short_texts_are_no_secrets() -> None:
    assert Masker(["abc"]).text("abc") == "abc"


@given(st.text(min_size=8, max_size=40), st.binary(max_size=5), st.binary(max_size=5))
def test_base64_of_anything_around_a_key_does_not_give_it_away(key: str, before: bytes, after: bytes) -> None:
    assume(not any(0xD800 <= ord(letter) <= 0xDFFF for letter in key))
    masked = Masker([key]).text(base64.b64encode(before + key.encode() + after).decode())
    assert MASK in masked


def test_a_secret_shows_nowhere() -> None:
    assert KEY not in repr(Secret(KEY)) + str(Secret(KEY)) + f"{Secret(KEY)}"


def test_a_quick_look_finds_every_form_that_is_masked() -> None:
    masker = Masker([KEY])
    for written in (KEY, KEY.upper(), quote(KEY, safe=""), quote(KEY, safe="").lower(), b64(f"user:{KEY}")):
        assert masker.finds(f"before {written} after")
    assert not masker.finds("short")
    assert not masker.finds("a long text in which there is no secret of any kind, in no form")


@pytest.mark.parametrize("written", [KEY[:20], b64(KEY)[:22], f"{KEY[:18]} and more", quote(KEY, safe="")[:25]])
def test_the_beginning_of_a_key_that_was_cut_is_masked_where_texts_are_shortened(written: str) -> None:
    masked = Masker([KEY], cut=True).text(f"the server said: {written}")
    assert MASK in masked
    assert written[:16] not in masked


def look_up(table: dict[str, str]) -> str:
    return table["missing"]


def failing(case: EvalCase) -> str:
    return look_up({})


async def failing_async(case: EvalCase) -> str:
    return look_up({})


def failing_scorer(case: EvalCase, response: InvocationResponse) -> float:
    return float(look_up({}))


def run(target: Any, scorers: list[Any], path: Path, **options: Any) -> Result:
    return Runner(target, SUITE, scorers, progress="off", output_path=path, **options).run_sync()


def only_record(result: Result) -> Record:
    (record,) = result.responses
    return record


@pytest.mark.parametrize("target", [failing, failing_async])
def test_a_failing_target_leaves_the_frames_of_its_code_alone(tmp_path: Path, target: Any) -> None:
    text = only_record(run(target, [], tmp_path)).error_traceback
    assert text is not None
    assert text.endswith("KeyError: 'missing'")
    assert text.count("  File ") == 2
    assert f"in {target.__name__}" in text
    assert 'return table["missing"]' in text
    assert lines_of(tmp_path, "outputs.jsonl")[0]["error_traceback"] == text


def test_a_failing_scorer_leaves_its_traceback_in_the_score(tmp_path: Path) -> None:
    (score,) = only_record(run(lambda case: "x", [failing_scorer], tmp_path)).scores
    assert score.errors == ["KeyError: 'missing'"]
    assert score.error_traceback is not None
    assert "in failing_scorer" in score.error_traceback
    assert "/steelyard/scoring/" not in score.error_traceback


def test_a_timeout_says_where_the_target_was(tmp_path: Path) -> None:
    async def waiting(case: EvalCase) -> str:
        import asyncio

        await asyncio.Event().wait()
        return ""

    text = only_record(run(waiting, [], tmp_path, timeout=0.05)).error_traceback
    assert text is not None
    assert "await asyncio.Event().wait()" in text
    assert text.endswith("TimeoutError: no answer within 0.05 s")


def test_one_option_leaves_tracebacks_out(tmp_path: Path) -> None:
    assert only_record(run(failing, [], tmp_path / "a", tracebacks=False)).error_traceback is None
    record = only_record(run(lambda case: "x", [failing_scorer], tmp_path / "b", tracebacks=False))
    assert record.scores[0].error_traceback is None
    assert record.scores[0].errors == ["KeyError: 'missing'"]


def test_secrets_of_the_environment_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-verysecret-123")
    seen: list[int] = []

    def leaking(case: EvalCase) -> str:
        seen.append(1)
        raise TransientError("refused the key sk-verysecret-123")

    def leaking_scorer(case: EvalCase, response: InvocationResponse) -> bool:
        raise ValueError("refused the key sk-verysecret-123")

    run(leaking, [], tmp_path / "target", retries=1)
    run(lambda case: "x", [leaking_scorer], tmp_path / "scorer")
    (line,), (scored,) = (lines_of(tmp_path / name, "outputs.jsonl") for name in ("target", "scorer"))
    assert len(seen) == 2
    assert "***" in line["error_traceback"]
    assert line["error"] == "TransientError: refused the key ***"
    assert scored["scores"][0]["errors"] == ["ValueError: refused the key ***"]
    assert "verysecret" not in json.dumps([line, scored])


def test_a_traceback_is_bounded_and_keeps_its_end() -> None:
    try:
        try:
            raise ValueError("x" * 50_000)
        except ValueError as error:
            raise KeyError("the cause is here") from error
    except KeyError as error:
        text = user_traceback(error)
    assert text is not None
    assert len(text) == MAX_TRACEBACK
    assert text.endswith("KeyError: 'the cause is here'")


def test_an_error_without_frames_of_the_user_has_no_traceback() -> None:
    assert user_traceback(ValueError("made, not raised")) is None
    with pytest.raises(ValueError, match="Expecting") as raised:
        json.loads("{")
    library = raised.tb.tb_next
    assert library is not None
    assert user_traceback(raised.value.with_traceback(library)) is None


def test_an_exception_that_cannot_be_shown_still_has_its_record(tmp_path: Path) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    def target(case: EvalCase) -> str:
        raise Broken

    record = only_record(run(target, [], tmp_path))
    assert record.error_type == "Broken"
    assert record.error_traceback is not None


def flaky(errors: list[Exception]) -> Any:
    def target(case: EvalCase) -> str:
        if errors:
            raise errors.pop(0)
        return "x"

    return target


def test_retried_attempts_are_kept_with_type_message_and_time(tmp_path: Path) -> None:
    target = flaky([ConnectionError("reset"), TransientError("busy", retry_after=0.0)])
    record = only_record(run(target, ["exact"], tmp_path))
    assert record.status == "ok"
    assert record.attempts == 3
    assert [(one.error_type, one.error) for one in record.retry_errors] == [
        ("ConnectionError", "ConnectionError: reset"),
        ("TransientError", "TransientError: busy"),
    ]
    assert record.retry_errors[0].time <= record.retry_errors[1].time
    assert Result.load(tmp_path).iter_responses().__next__().retry_errors == record.retry_errors


def test_the_report_of_a_case_and_its_page_show_both(tmp_path: Path) -> None:
    target = flaky([ConnectionError("reset"), ValueError("wrong")])
    record = only_record(run(target, [], tmp_path))
    text = OneCase(tmp_path, "c").to_text()
    assert "raise errors.pop(0)" in text
    assert "ConnectionError: reset" in text
    shown = json.loads(body(record, 0, None, 100_000))
    assert shown["traceback"] == record.error_traceback
    assert "ConnectionError: reset" in shown["retried"][0]


def test_the_report_of_a_case_shows_where_a_scorer_failed(tmp_path: Path) -> None:
    record = only_record(run(lambda case: "x", [failing_scorer], tmp_path))
    assert "in failing_scorer" in OneCase(tmp_path, "c").to_text()
    assert "in failing_scorer" in json.loads(body(record, 0, None, 100_000))["scores"][0]["error_traceback"]


def test_a_verbose_log_has_the_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="steelyard"):
        run(failing, [], tmp_path)
    assert any("in look_up" in message for message in caplog.messages)
