"""Every flipped bit in a journal or its index is found and named; an edited line is told from a damaged one."""

from __future__ import annotations

import json
import logging
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import Result, RunDamaged, RunEdited
from steelyard.journal.checksum import Line, is_sound, judge, repaired, seal, sealed, stored_crc
from steelyard.journal.reader import decode_entry
from tests.support.journal import CountedModel, a_record, cases, reopen, run_in, without_syncs, write_journal

COUNT = 12
SOME, ALL = 60, 1_000


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_syncs(monkeypatch)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A complete run, one of whose cases failed first."""
    run_in(tmp_path / "run", CountedModel(fails_once), cases(COUNT))
    run_in(tmp_path / "run", CountedModel(), cases(COUNT), entry={"retry_errors": True})
    return tmp_path / "run"


def fails_once(case, context):  # type: ignore[no-untyped-def]
    if case.id == "c3":
        raise ValueError("not yet")
    return CountedModel()._answer(case, context)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(st.binary(max_size=300))
def test_a_sealed_line_is_sound_and_says_its_checksum(text: bytes) -> None:
    line, crc = seal(b"{" + text + b"}")
    assert line.endswith(b"\n")
    assert is_sound(line[:-1])
    assert stored_crc(line[:-1]) == crc


def test_each_bit_of_a_line_is_found_when_it_is_flipped_and_can_be_flipped_back() -> None:
    line = sealed(b'{"v":2,"id":"caf\xc3\xa9","response_text":"' + b"x" * 200 + b'"}')[:-1]
    for bit in range(8 * len(line)):
        bad = flipped(line, bit)
        assert not is_sound(bad)
        assert repaired(bad) == line
        assert judge(bad, 2) is Line.DAMAGED


@given(st.binary(min_size=2, max_size=60), st.binary(min_size=2, max_size=60))
def test_a_line_of_another_text_is_edited(one: bytes, two: bytes) -> None:
    line = sealed(b'{"a":"' + one + b'"}')[:-1]
    other = b'{"a":"' + two + line[6 + len(one) :]
    if len(one) == len(two) and (int.from_bytes(one) ^ int.from_bytes(two)).bit_count() < 2:
        return
    assert judge(other, 2) is Line.EDITED


def check_flips(run: Path, count: int, seed: int) -> None:
    """Flip one bit of the journal at a time: each is found by whoever reads the run, and named by its line."""
    outputs = run / "outputs.jsonl"
    data = outputs.read_bytes()
    rng = random.Random(seed)
    for bit in rng.sample(range(8 * len(data)), count):
        outputs.write_bytes(flipped(data, bit))
        with pytest.raises(RunDamaged, match="is damaged at line") as caught:
            Result.load(run).load_responses()
        lines = data[: bit // 8].count(b"\n") + 1
        assert caught.value.line in (lines, lines + 1), bit
    outputs.write_bytes(data)


def check_index_flips(run: Path, count: int, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Flip one bit of the index at a time: each is found, and what is read is the same."""
    index, expected = run / "outputs.idx", Result.load(run).load_responses()
    data = index.read_bytes()
    rng = random.Random(seed)
    for bit in rng.sample(range(8 * len(data)), count):
        index.write_bytes(flipped(data, bit))
        caplog.clear()
        assert Result.load(run).load_responses() == expected, bit
        assert "outputs.idx is damaged" in caplog.text, bit
    index.write_bytes(data)


def test_flipped_bits_of_a_journal_are_found(finished: Path) -> None:
    check_flips(finished, SOME, seed=1)


def test_flipped_bits_of_an_index_are_found(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "steelyard")
    check_index_flips(finished, SOME, 2, caplog)


@pytest.mark.slow
def test_a_thousand_flipped_bits_are_all_found(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "steelyard")
    check_flips(finished, ALL, seed=3)
    check_index_flips(finished, ALL, 4, caplog)


def test_flipped_bits_are_found_without_an_index_and_by_a_resume(finished: Path) -> None:
    (finished / "outputs.idx").unlink()
    data = (finished / "outputs.jsonl").read_bytes()
    last_newline = 8 * (len(data) - 1)
    for bit in random.Random(5).sample(range(last_newline), 25):
        reopen(finished, flipped(data, bit))
        with pytest.raises(RunDamaged):
            Result.load(finished)
        with pytest.raises(RunDamaged):
            run_in(finished, CountedModel(), cases(COUNT))


def test_salvage_restores_a_line_with_a_flipped_bit_and_asks_nothing(
    finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = Result.load(finished).load_responses()
    data = (finished / "outputs.jsonl").read_bytes()
    place = data.index(b'"c5"') + 2
    reopen(finished, flipped(data, 8 * place))
    with pytest.raises(RunDamaged, match=f"a bit of byte {place} is flipped. salvage=True restores it"):
        run_in(finished, CountedModel(), cases(COUNT))
    model = CountedModel()
    run_in(finished, model, cases(COUNT), entry={"salvage": True})
    assert model.called == []
    assert (finished / "outputs.jsonl").read_bytes() == data
    assert Result.load(finished).load_responses() == expected
    assert "restored 1 line with a flipped bit" in caplog.text


@pytest.mark.parametrize("where", ["in the middle", "at the end"])
def test_a_damaged_newline_costs_no_more_than_its_lines(finished: Path, where: str) -> None:
    data = (finished / "outputs.jsonl").read_bytes()
    place = data.index(b"\n") if where == "in the middle" else len(data) - 1
    (finished / "outputs.jsonl").write_bytes(flipped(data, 8 * place))
    with pytest.raises(RunDamaged):
        Result.load(finished).load_responses()
    model = CountedModel()
    result = run_in(finished, model, cases(COUNT), entry={"if_complete": "update", "salvage": True})
    assert result.complete
    assert len(model.called) == (2 if where == "in the middle" else 0)


def by_jq(program: str) -> Callable[[bytes], bytes]:
    def rewrite(data: bytes) -> bytes:
        if shutil.which("jq") is None:
            pytest.skip("jq is not installed")
        return subprocess.run(["jq", "-c", program], input=data, capture_output=True, check=True).stdout

    return rewrite


def moved_key(data: bytes) -> bytes:
    lines = [json.loads(line) for line in data.splitlines()]
    lines[4] = {"crc32": lines[4].pop("crc32"), **lines[4]}
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "an answer changed by jq": by_jq('if .id == "c4" then .response_text = "redacted" else . end'),
    "the checksum removed by jq": by_jq("del(.crc32)"),
    "a key added by jq": by_jq('. + {"reviewed": true}'),
    "every line spelled otherwise": moved_key,
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_line_is_named_as_such_and_accepted_when_that_is_asked_for(
    edit: str, finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = finished / "outputs.jsonl"
    edited = EDITS[edit](outputs.read_bytes())
    outputs.write_bytes(edited)
    with pytest.raises(RunEdited, match=r"was edited at line \d+ .*accept_edits=True takes such lines as they are"):
        Result.load(finished).load_responses()
    model = CountedModel()
    with pytest.raises(RunEdited):
        run_in(finished, model, cases(COUNT), entry={"if_complete": "update"})
    assert outputs.read_bytes() == edited, "a refusal changes nothing"
    assert (finished / "metrics.json").exists()
    result = run_in(finished, model, cases(COUNT), entry={"if_complete": "update", "accept_edits": True})
    assert model.called == []
    texts = {record.id: record.response_text for record in result.load_responses()}
    assert texts == {value["id"]: value["response_text"] for value in map(json.loads, edited.splitlines())}
    assert "edited line" in caplog.text
    assert all(is_sound(line) for line in outputs.read_bytes().splitlines())


def test_salvage_moves_edited_lines_out_and_asks_their_cases_again(finished: Path) -> None:
    outputs = finished / "outputs.jsonl"
    lines = outputs.read_bytes().splitlines()
    lines[5] = lines[5].replace(b'"v":2', b'"v":2,"note":"mine"')
    reopen(finished, b"\n".join(lines) + b"\n")
    model = CountedModel()
    run_in(finished, model, cases(COUNT), entry={"salvage": True})
    assert model.called == [json.loads(lines[5])["id"]]
    assert (finished / "damaged.jsonl").read_bytes() == lines[5] + b"\n"


def test_lines_of_before_there_were_checksums_are_read(tmp_path: Path) -> None:
    data = write_journal(tmp_path, [a_record(v=1, id="a"), a_record(id="b", index=1)])
    old, new = data.splitlines()
    old = old[: old.index(b',"crc32"')] + b"}"
    (tmp_path / "outputs.jsonl").write_bytes(old + b"\n" + new + b"\n")
    assert [record.id for record in Result.load(tmp_path).load_responses()] == ["a", "b"]
    assert decode_entry(old.replace(b'"v":1', b'"v":2')) is None


def test_the_lines_are_json_that_others_read(finished: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.read_json(finished / "outputs.jsonl", lines=True)
    assert len(table) == COUNT + 1
    assert table["crc32"].notna().all()
    lines = (finished / "outputs.jsonl").read_bytes().splitlines()
    assert all(list(json.loads(line))[-1] == "crc32" for line in lines)
