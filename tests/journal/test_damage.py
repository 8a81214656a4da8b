"""A journal that was cut off or damaged: what is whole is kept, what is not is asked again, nothing is guessed."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard import Result, RunDamaged, RunEdited
from steelyard.journal.reader import (
    BadLine,
    blocks_backward,
    decode_entry,
    entries_backward,
    lines_forward,
    repair_tail,
    rewrite,
)
from tests.support.crash import without_clocks
from tests.support.journal import CountedModel, cases, ok_ids, reopen, run_in, without_syncs

COUNT = 8

anywhere = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)


class Finished(NamedTuple):
    directory: Path
    data: bytes
    metrics: dict[str, Any]
    texts: list[str | None]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that went to its end."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    run_in(directory, CountedModel(), cases(COUNT))
    result = Result.load(directory)
    texts = [record.response_text for record in result.load_responses()]
    return Finished(directory, (directory / "outputs.jsonl").read_bytes(), without_clocks(result.metrics), texts)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_syncs(monkeypatch)


_numbers = itertools.count()


def copied(finished: Finished, tmp_path: Path, data: bytes) -> Path:
    """The finished run, somewhere else, unfinished, with this journal."""
    directory = tmp_path / f"run-{next(_numbers)}"
    shutil.copytree(finished.directory, directory)
    reopen(directory, data)
    return directory


def check_resume(finished: Finished, tmp_path: Path, data: bytes, **entry: bool) -> Path:
    """Resuming from these bytes asks exactly the cases that have no whole record and ends as the run did."""
    directory, model = copied(finished, tmp_path, data), CountedModel()
    run_in(directory, model, cases(COUNT), entry=entry)
    assert sorted(model.called) == sorted({case.id for case in cases(COUNT)} - ok_ids(data))
    result = Result.load(directory)
    assert result.complete
    assert without_clocks(result.metrics) == finished.metrics
    assert [record.response_text for record in result.load_responses()] == finished.texts
    return directory


@pytest.mark.slow
def test_a_cut_at_every_byte_of_the_last_two_records_costs_those_cases_alone(
    finished: Finished, tmp_path: Path
) -> None:
    data = finished.data
    start = data.rstrip(b"\n").rfind(b"\n", 0, data.rstrip(b"\n").rfind(b"\n")) + 1
    assert data[start:].count(b"\n") == 2
    for cut in range(start, len(data) + 1):
        check_resume(finished, tmp_path, data[:cut])


@anywhere
@given(share=st.floats(0, 1))
def test_a_cut_anywhere_costs_the_cut_cases_alone(share: float, finished: Finished, tmp_path: Path) -> None:
    check_resume(finished, tmp_path, finished.data[: round(share * len(finished.data))])


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: data + b"\0" * 5000, id="a tail of NUL bytes"),
        pytest.param(lambda data: data[:-30] + b"\0" * 30, id="a last record that ends in NUL bytes"),
        pytest.param(lambda data: data[:-1], id="a whole last line without its newline"),
        pytest.param(lambda data: b"\n", id="only a newline"),
        pytest.param(lambda data: b"", id="an empty file"),
        pytest.param(lambda data: b"\0" * 4096, id="only NUL bytes"),
        pytest.param(lambda data: b"\n\n" + data.replace(b"\n", b"\n\n\n"), id="blank lines everywhere"),
        pytest.param(lambda data: data.replace(b"\n", b"\r\n"), id="lines that end in CRLF"),
        pytest.param(lambda data: data + data[: data.index(b"\n") // 2], id="half a record after the last one"),
        pytest.param(lambda data: data + b"\xff\xfe{", id="bytes that are not UTF-8 after the last one"),
    ],
)
def test_what_a_power_cut_leaves_is_mended(spoil: Any, finished: Finished, tmp_path: Path) -> None:
    check_resume(finished, tmp_path, spoil(finished.data))


def test_an_absent_journal_beside_a_manifest_is_a_run_that_had_not_begun(finished: Finished, tmp_path: Path) -> None:
    directory, model = copied(finished, tmp_path, b""), CountedModel()
    (directory / "outputs.jsonl").unlink()
    run_in(directory, model, cases(COUNT))
    assert len(model.called) == COUNT
    assert Result.load(directory).complete


DAMAGES = [
    pytest.param(lambda line: b"\0" * len(line), id="NUL bytes"),
    pytest.param(lambda line: bytes([line[0] ^ 0x08]) + line[1:], id="a bit flipped in the brace"),
    pytest.param(lambda line: line.replace(b'"status"', b'"statum"'), id="a bit flipped in a key"),
    pytest.param(
        lambda line: line.replace(b'"attempts"', b'"attempt3"'), id="a bit flipped in a key that recovery skips"
    ),
    pytest.param(
        lambda line: line.replace(b'"response_text":"', b'"response_text":"\xff'), id="text that is not UTF-8"
    ),
    pytest.param(lambda line: line[: len(line) // 2], id="half a line"),
    pytest.param(lambda line: b"garbage\xff\0" + line, id="garbage before it"),
    pytest.param(lambda line: b"[1, 2]", id="JSON that is no record"),
    pytest.param(lambda line: b"  \t", id="white space"),
    pytest.param(lambda line: b"[" * 100_000, id="nested beyond reading"),
]


@pytest.mark.parametrize("spoil", DAMAGES)
@pytest.mark.parametrize("number", [0, 3, COUNT - 1])
def test_damage_in_the_middle_is_refused_by_line_and_byte_and_salvaged_on_request(
    spoil: Any, number: int, finished: Finished, tmp_path: Path
) -> None:
    lines = finished.data.split(b"\n")
    lines[number] = spoil(lines[number])
    data = b"\n".join(lines)
    directory, model = copied(finished, tmp_path, data), CountedModel()
    with pytest.raises(RunDamaged) as caught:
        run_in(directory, model, cases(COUNT))
    assert (caught.value.line, caught.value.byte) == (number + 1, sum(len(line) + 1 for line in lines[:number]))
    assert f"line {number + 1}" in str(caught.value)
    assert "salvage=True" in str(caught.value)
    assert model.called == []
    assert (directory / "outputs.jsonl").read_bytes() == data, "a refusal changes nothing"

    salvaged = check_salvage(finished, directory, number, lines)
    original = finished.data.split(b"\n")[number]
    is_flip = len(original) == len(lines[number]) and flipped_bits(original, lines[number]) == 1
    assert salvaged == ([] if is_flip else [json.loads(original)["id"]])


def flipped_bits(one: bytes, two: bytes) -> int:
    return (int.from_bytes(one) ^ int.from_bytes(two)).bit_count()


def check_salvage(finished: Finished, directory: Path, number: int, lines: list[bytes]) -> list[str]:
    """Salvage the run in the directory; who was asked again."""
    model = CountedModel()
    run_in(directory, model, cases(COUNT), entry={"salvage": True})
    assert (directory / "damaged.jsonl").read_bytes() == lines[number] + b"\n"
    result = Result.load(directory)
    assert without_clocks(result.metrics) == finished.metrics
    assert [record.response_text for record in result.load_responses()] == finished.texts
    return model.called


def test_salvage_of_a_sound_journal_changes_nothing(finished: Finished, tmp_path: Path) -> None:
    directory = check_resume(finished, tmp_path, finished.data, salvage=True)
    assert (directory / "outputs.jsonl").read_bytes() == finished.data
    assert not (directory / "damaged.jsonl").exists()
    assert sorted(path.name for path in directory.iterdir() if path.suffix == ".tmp") == []


def test_several_damaged_lines_are_all_moved_aside(
    finished: Finished, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = finished.data.split(b"\n")
    lines[1], lines[4], lines[5] = b"\0" * 10, lines[4][:-1], b"x"
    directory = check_resume(finished, tmp_path, b"\n".join(lines), salvage=True)
    assert (directory / "damaged.jsonl").read_bytes() == b"\n".join([lines[1], lines[4], lines[5], b""])
    assert "moved 3 lines to damaged.jsonl" in caplog.text


@anywhere
@given(place=st.floats(0, 1), byte=st.integers(0, 255))
def test_one_wrong_byte_is_refused_or_harmless_and_can_always_be_salvaged(
    place: float, byte: int, finished: Finished, tmp_path: Path
) -> None:
    """Whatever recovery lets through can be read back; what it refuses, salvage gets past."""
    data = bytearray(finished.data)
    data[min(round(place * len(data)), len(data) - 1)] = byte
    directory, model = copied(finished, tmp_path, bytes(data)), CountedModel()
    try:
        run_in(directory, model, cases(COUNT))
    except (RunDamaged, RunEdited):
        run_in(directory, model, cases(COUNT), entry={"salvage": True})
    records = Result.load(directory).load_responses()
    assert [record.id for record in records] == [case.id for case in cases(COUNT)]
    assert len(model.called) <= 2, "one byte touches two lines at most"


@anywhere
@given(
    lines=st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=12),
    tail=st.sampled_from([b"", b"\n"]),
    block=st.integers(1, 64),
)
def test_reading_backwards_meets_the_same_lines_as_splitting(
    lines: list[bytes], tail: bytes, block: int, tmp_path: Path
) -> None:
    data = b"\n".join(lines) + tail
    path = tmp_path / "lines"
    path.write_bytes(data)
    offsets = [0, *itertools.accumulate(len(line) + 1 for line in data.split(b"\n"))]
    expected = [(offset, line) for offset, line in zip(offsets, data.split(b"\n"), strict=False) if line]
    with path.open("rb") as file:
        found = [
            (begins + offset, line)
            for begins, text in blocks_backward(file.fileno(), len(data), block)
            for offset, line in reversed(_placed(bytes(text)))
        ]
        assert found[::-1] == expected
        whole = [(offset, line) for offset, line in expected if offset + len(line) < len(data)]
        assert [pair for pair in lines_forward(file.fileno(), 0, len(data)) if pair in whole] == whole


def _placed(text: bytes) -> list[tuple[int, bytes]]:
    lines = text.split(b"\n")
    offsets = [0, *itertools.accumulate(len(line) + 1 for line in lines)]
    return [(offset, line) for offset, line in zip(offsets, lines, strict=False) if line]


@pytest.mark.parametrize(
    ("damaged", "bad_line"),
    [
        (lambda one, two: one + two, "one"),  # its newline is gone: two records in a line
        (lambda one, two: one + b" " + two, "one"),
        (lambda one, two: one.replace(b',"case_fp"', b',\n"case_fp"') + b"\n" + two, "second half of one"),
        # As many values as lines, but not one in each.
        (lambda one, two: one.replace(b',"case_fp"', b',\n"case_fp"') + b"\n" + two + two, "two"),
        (lambda one, two: b"[" + one + b"]\n" + two, "one"),
        (lambda one, two: one.replace(b'"ok"', b'"\xff"') + b"\n" + two, "one"),
        (lambda one, two: one.replace(b'"v":2', b'"v":2,"messages":[{"a":"\xff"}]') + b"\n" + two, "one"),
    ],
)
def test_decoding_many_lines_at_once_finds_what_decoding_each_would(
    damaged: Callable[[bytes, bytes], bytes], bad_line: str, finished: Finished, tmp_path: Path
) -> None:
    before, one, two, after = finished.data.split(b"\n")[:4]
    middle = damaged(one, two)
    data = b"\n".join([before, middle, after]) + b"\n"
    path = tmp_path / "outputs.jsonl"
    path.write_bytes(data)
    starts = {
        "one": len(before) + 1,
        "second half of one": len(before) + 2 + middle.find(b"\n"),
        "two": len(before) + 2 + middle.rfind(b"\n"),
    }
    with path.open("rb") as file, pytest.raises(BadLine) as caught:
        list(entries_backward(file.fileno(), len(data)))
    assert caught.value.offset == starts[bad_line]


def test_entries_come_newest_first_with_their_places(finished: Finished, tmp_path: Path) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_bytes(b"\n\n" + finished.data.replace(b"\n", b"\n\n", 1) + b"\n")
    with path.open("rb") as file:
        blocks = list(entries_backward(file.fileno(), path.stat().st_size))
    found = [(offset, length, entry.id) for block in blocks for offset, length, _, entry in zip(*block, strict=True)]
    data = path.read_bytes()
    lines = [data[offset : offset + length] for offset, length, _ in found]
    assert lines == finished.data.splitlines()[::-1]
    assert [json.loads(line)["id"] for line in lines] == [case_id for _, _, case_id in found]


def test_mending_twice_changes_nothing_more(finished: Finished, tmp_path: Path) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_bytes(finished.data[:-7])
    assert repair_tail(path) > 0
    mended = path.read_bytes()
    assert repair_tail(path) == 0
    assert path.read_bytes() == mended
    assert all(decode_entry(line) is not None for line in mended.splitlines())


def test_salvaging_takes_the_old_index_away_with_the_old_journal(finished: Finished, tmp_path: Path) -> None:
    """Its offsets are wrong from the first dropped line on: a reader must not find it beside the new journal."""
    lines = finished.data.split(b"\n")
    lines[2] = b"x"
    directory = copied(finished, tmp_path, finished.data)
    (directory / "outputs.jsonl").write_bytes(b"\n".join(lines) + finished.data)
    assert rewrite(directory, salvage=True, accept_edits=False).moved == 1
    ids = [record.id for record in Result.load(directory).load_responses()]
    assert ids == [case.id for case in cases(COUNT)]
