"""Whatever a target puts into its answer, the line can be read back: as it was, or with a note of what was changed."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import json
import math
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, InvocationResponse, Result, Runner, Score
from steelyard.journal.answers import AnswerLog
from steelyard.journal.reader import Entry, decode_entry
from steelyard.journal.writer import encode_record, encode_unsealed, seal_encoded, seal_record
from steelyard.records import FailedAttempt, Record, Sample, StoredSample
from tests.support.journal import CountedModel, a_record, cases, run_in, without_syncs


def read_back(record: Record) -> Record:
    """The record as the next reader finds it, having checked that the line is sound in every way."""
    line = encode_record(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    json.loads(line)
    entry = decode_entry(line[:-1])
    assert entry is not None
    decoded = msgspec.json.decode(line, type=Record)
    assert (entry.id, entry.status, entry.error, entry.scores) == (
        decoded.id,
        decoded.status,
        decoded.error,
        decoded.scores,
    )
    assert read_equal(decoded, record), "the record in memory says what the one on disk says"
    return decoded


def read_equal(one: object, other: object) -> bool:
    return msgspec.json.encode(one) == msgspec.json.encode(other)


@given(
    id=st.text(),
    text=st.none() | st.text(),
    metadata=st.dictionaries(st.text(), st.none() | st.text() | st.floats()),
    run_time=st.floats(0, 1e9),
)
def test_a_record_that_was_encoded_elsewhere_becomes_the_same_line(id, text, metadata, run_time) -> None:
    """A worker encodes it; the driver, which alone knows the time, fills that in and seals it."""
    changes = {"id": id, "response_text": text, "metadata": {**metadata, "run_time": 0.0}}
    there = encode_unsealed(a_record(**changes, run_time=0.0))
    assert seal_encoded(there, run_time) == seal_record(a_record(**changes, run_time=run_time))


@pytest.mark.parametrize("text", [',"run_time":0.0,', '{"run_time":0.0,"x":1}'])
def test_a_text_that_looks_like_the_time_to_fill_in_is_left_alone(text) -> None:
    record = a_record(id=text, case_fp=text, run_time=0.0)
    line, _ = seal_encoded(encode_unsealed(record), 7.5)
    read = msgspec.json.decode(line, type=Record)
    assert (read.id, read.case_fp, read.run_time) == (text, text, 7.5)


class Unreadable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Colour(enum.Enum):
    RED = "red"


class Label(str):
    __slots__ = ()


def nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


SURVIVES = {
    "NUL": "a\0b",
    "line separators": "a\u2028b\u2029c\x85d\r\n\x0b\x0c",
    "controls": "".join(map(chr, range(32))) + "\x7f",
    "emoji": "👩‍👩‍👧 \U0010ffff",
    "a byte order mark": "\ufeffa",
    "escapes": '\\ud800 \\u0000 " \\',
    "empty": "",
}


@pytest.mark.parametrize("text", SURVIVES.values(), ids=SURVIVES)
def test_odd_text_survives_everywhere(text: str) -> None:
    record = a_record(
        id=text or "x",
        response_text=text,
        stop_reason=text,
        input_prompt=text,
        input_payload={text: [text]},
        messages=[{"content": text}],
        scores=[Score("exact", 1.0, True, text)],
    )
    decoded = read_back(record)
    assert decoded.response_text == decoded.stop_reason == decoded.input_prompt == text
    assert decoded.messages == [{"content": text}]
    assert decoded.input_payload == {text: [text]}
    assert decoded.scores[0].reason == text
    assert decoded.notes == []


PLAIN = {
    "integers beyond 64 bits": {"n": 2**70, "m": -(2**200)},
    "floats": [0.1, 1e308, -0.0, 5e-324],
    "null": {"a": None, "b": [None]},
    "nested": nested(60),
}


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
def test_plain_json_survives_without_a_note(value: Any) -> None:
    decoded = read_back(a_record(input_payload=value))
    assert decoded.input_payload == value
    assert decoded.notes == []


NOTED: dict[str, tuple[Any, Any]] = {
    "a lone surrogate": ("a\ud800b", "a\ufffdb"),
    "a lone surrogate in a key": ({"\udfff": 1}, {"\ufffd": 1}),
    "NaN": ({"x": math.nan}, {"x": None}),
    "infinity": ([math.inf, -math.inf, 1.0], [None, None, 1.0]),
    "numpy's numbers": ([np.float64(0.5), np.int32(3), np.bool_(True)], [0.5, 3, True]),
    "a set": ({"s": {1}}, {"s": [1]}),
    "bytes": (b"ab\xff", "YWL/"),
    "keys that are numbers": ({1: "a", 2.5: "b"}, {"1": "a", "2.5": "b"}),
    "keys that are anything": ({None: 1, (1, 2): 2}, {"None": 1, "(1, 2)": 2}),
    "a complex number": (1j, "1j"),
    "a decimal": (decimal.Decimal("1.50"), "1.50"),
    "an enum": (Colour.RED, "red"),
    "a date": (dt.date(2024, 2, 29), "2024-02-29"),
    "an object without a repr": (Unreadable(), "(Unreadable)"),
}


@pytest.mark.parametrize(("value", "written"), NOTED.values(), ids=NOTED)
def test_what_json_cannot_hold_is_replaced_and_noted(value: Any, written: Any) -> None:
    decoded = read_back(a_record(input_payload=value, messages=[{"content": value}]))
    assert decoded.input_payload == written
    assert decoded.messages == [{"content": written}]
    assert [note.split(":")[0] for note in decoded.notes] == ["messages", "input_payload"]
    assert decoded.response_text == "hello"


@pytest.mark.parametrize("depth", [101, 500, 900, 5_000, 100_000])
def test_a_value_too_deep_for_the_next_reader_is_cut_and_noted(depth: int) -> None:
    """A deep value may be written from a shallow stack and then not be readable from a deeper one."""
    decoded = read_back(a_record(input_payload=nested(depth)))
    assert decoded.notes
    assert "nested deeper" in json.dumps(decoded.input_payload)


def test_a_value_that_contains_itself_is_cut_and_noted() -> None:
    payload: dict[str, Any] = {}
    payload["self"] = payload
    assert read_back(a_record(input_payload=payload)).notes


def test_a_subclass_of_text_is_written_as_text() -> None:
    decoded = read_back(a_record(messages=[{Label("role"): Label("user")}]))
    assert decoded.messages == [{"role": "user"}]


def test_a_note_counts_what_was_replaced() -> None:
    decoded = read_back(a_record(input_payload=["\ud800", "\ud801", math.nan]))
    assert decoded.notes == [
        "input_payload: texts with lone surrogates replaced: 2, values that JSON cannot hold replaced: 1"
    ]


def test_a_long_repr_is_shortened() -> None:
    class Long:
        def __repr__(self) -> str:
            return "x" * 10**6

    assert len(encode_record(a_record(input_payload=Long()))) < 5_000


def test_lone_surrogates_are_replaced_in_every_text_field_and_score() -> None:
    bad = "\ud800"
    record = a_record(
        response_text=bad,
        stop_reason=bad,
        error=bad,
        error_type=bad,
        input_prompt=bad,
        notes=[bad],
        scores=[Score(bad, None, None, bad, errors=[bad]), Score("exact", 1.0, True)],
    )
    decoded = read_back(record)
    assert decoded.response_text == decoded.stop_reason == decoded.error == decoded.error_type == "\ufffd"
    assert decoded.scores[0] == Score("\ufffd", None, None, "\ufffd", errors=["\ufffd"])
    assert decoded.scores[1] == Score("exact", 1.0, True)
    assert {note.split(":")[0] for note in decoded.notes} >= {"response_text", "stop_reason", "error", "input_prompt"}


def test_surrogate_pairs_become_the_character_they_mean() -> None:
    decoded = read_back(a_record(response_text="\ud83d\ude00"))
    assert decoded.response_text == "😀"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_no_number_is_written_as_none(value: float) -> None:
    decoded = read_back(a_record(time_to_first_token=value, time_to_last_token=value, time_per_output_token=value))
    assert decoded.time_to_first_token is decoded.time_to_last_token is decoded.time_per_output_token is None


def test_a_token_count_that_cannot_be_written_is_left_out_and_noted() -> None:
    decoded = read_back(a_record(num_tokens_output=10**5_000))
    assert decoded.num_tokens_output is None
    assert decoded.notes == ["num_tokens_output: a number that JSON cannot hold was left out"]


@pytest.mark.parametrize("value", [2**63, 2**64, 10**400])
def test_token_counts_beyond_64_bits_can_be_read_back(value: int) -> None:
    record = a_record(num_tokens_input=value, num_tokens_output=value, num_tokens_input_cached=value)
    assert read_back(record).num_tokens_input == value


def test_twenty_megabytes_survive(tmp_path: Path) -> None:
    text = "é\0x\u2028" * 5_000_000
    assert len(text) == 20_000_000
    assert read_back(a_record(response_text=text)).response_text == text


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary(max_size=8)
    | st.sampled_from([np.float32(1.5), np.int8(1), 1j, object(), decimal.Decimal("NaN"), Colour.RED]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(), max_size=4) | st.integers() | st.none(), inner, max_size=4)
        | st.tuples(inner)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=12,
)
any_text = st.text(st.characters())


def plain(value: Any) -> bool:
    """Whether JSON can hold the value so that it reads back the same."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
        return bool(json.loads(text) == value)  # unequal when a key or a tuple became something else
    except (TypeError, ValueError):
        return False


@settings(deadline=None, max_examples=300)
@given(payload=anything, message=anything, text=any_text, stop=any_text | st.none(), reason=any_text)
def test_any_answer_survives_or_is_noted(payload: Any, message: Any, text: str, stop: str | None, reason: str) -> None:
    record = a_record(
        response_text=text,
        stop_reason=stop,
        input_payload=payload,
        messages=[{"content": message}],
        scores=[Score("s", 0.5, True, reason)],
    )
    decoded = read_back(record)
    noted = {note.split(":")[0] for note in decoded.notes}
    assert (decoded.response_text == text) or "response_text" in noted
    assert (decoded.stop_reason == stop) or "stop_reason" in noted
    assert (decoded.scores[0].reason == reason) or "scores.s" in noted
    if plain(payload):
        assert decoded.input_payload == payload
        assert "input_payload" not in noted
    else:
        assert "input_payload" in noted
    assert ("messages" in noted) == (not plain(message))


def test_a_record_holds_every_field_of_a_response() -> None:
    assert set(InvocationResponse.__struct_fields__) <= set(Record.__struct_fields__)


def test_recovery_reads_every_field_of_a_record() -> None:
    assert set(Entry.__struct_fields__) == set(Record.__struct_fields__)


def test_a_record_gives_its_response_back() -> None:
    when = dt.datetime(2024, 1, 2, 3, 4, 5, 678, tzinfo=dt.UTC)
    record = a_record(request_time=when, retries=2, messages=[{"a": 1}], num_tokens_output_reasoning=5)
    response = read_back(record).response
    assert (response.request_time, response.retries, response.messages) == (when, 2, [{"a": 1}])
    assert response.num_tokens_output_reasoning == 5


def test_answers_of_every_kind_go_through_a_run_and_its_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends as a record that the next launch counts as done, whatever was in it."""
    without_syncs(monkeypatch)
    values = [*SURVIVES.values(), *PLAIN.values(), *(value for value, _ in NOTED.values()), nested(5_000)]
    asked = cases(len(values))
    model = CountedModel(
        lambda case, context: InvocationResponse(response_text="x", input_payload=values[int(case.id[1:])])
    )
    result = run_in(tmp_path / "run", model, asked)
    assert result.metrics["counts"]["ok"] == len(values)
    (tmp_path / "run" / "metrics.json").unlink()
    again = CountedModel()
    assert run_in(tmp_path / "run", again, asked).complete
    assert again.called == []
    assert len(Result.load(tmp_path / "run").load_responses()) == len(values)


LONE = "half \ud83d of a pair"
TEXTS = (
    "response_text",
    "stop_reason",
    "error",
    "input_prompt",
    "error_type",
    "request_id",
    "node",
    "error_traceback",
    "stderr",
    "workspace_patch",
)


@pytest.mark.parametrize("name", TEXTS)
def test_a_lone_surrogate_in_any_text_field_is_replaced_and_noted(name: str) -> None:
    record = a_record()
    setattr(record, name, LONE)
    decoded = read_back(record)
    assert getattr(decoded, name) == "half \ufffd of a pair"
    assert any(note.startswith(name) for note in decoded.notes)


def test_every_text_field_of_a_response_is_tried() -> None:
    hints = get_type_hints(InvocationResponse)
    assert {name for name, hint in hints.items() if hint == (str | None)} == set(TEXTS)


def test_lone_surrogates_in_a_score_and_in_retried_errors_are_replaced() -> None:
    score = Score(LONE, 1.0, True, LONE, errors=[LONE], reasons=[LONE, None], by=LONE, error_traceback=LONE)
    failed = FailedAttempt(error_type=LONE, error=LONE, time=dt.datetime.now(dt.UTC))
    record = a_record()
    record.scores, record.retry_errors = [score], [failed]
    decoded = read_back(record)
    clean = "half \ufffd of a pair"
    assert decoded.scores == [
        Score(clean, 1.0, True, clean, errors=[clean], reasons=[clean, None], by=clean, error_traceback=clean)
    ]
    assert (decoded.retry_errors[0].error_type, decoded.retry_errors[0].error) == (clean, clean)


def test_lone_surrogates_in_a_judges_sample_are_replaced(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path)
    sample = Sample(score=1.0, reason=LONE)
    log.append(StoredSample(id="c", trial=0, answer_fp="f", by=LONE, run=0, sample=sample))
    log.close()
    (line,) = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["by"] == json.loads(line)["sample"]["reason"] == "half \ufffd of a pair"


def test_a_run_with_lone_surrogates_everywhere_ends_and_can_be_read(tmp_path: Path) -> None:
    def target(case: EvalCase) -> InvocationResponse:
        return InvocationResponse(response_text="x", request_id=LONE, node=LONE)

    def scorer(case: EvalCase, response: InvocationResponse) -> Score:
        return Score("graded", 1.0, True, by=LONE, reasons=[LONE], samples=[1.0])

    suite = EvalSet("s", [EvalCase(id="c", prompt="?")])
    assert Runner(target, suite, [scorer], progress="off", output_path=tmp_path).run_sync().complete
    (record,) = Result.load(tmp_path).iter_responses()
    assert record.request_id == record.node == record.scores[0].by == "half \ufffd of a pair"
