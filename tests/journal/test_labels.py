"""labels.jsonl: several people at once, kills at any byte, and what is taken back."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from steelyard.errors import ConfigurationError
from steelyard.journal.checksum import sealed
from steelyard.journal.files import LABELS
from steelyard.journal.labels import DEFAULT_COUNT, PASS_FAIL, LabelLog, given, parse_scale, show_scale
from tests.support.cli import heard


def begun(run: Path) -> LabelLog:
    log = LabelLog(run)
    log.begin(count=None, seed=None, grades=None)
    return log


def said(log: LabelLog, labeller: str) -> list[tuple[str, str | None]]:
    return [(place[0], one.grade) for place, one in log.current.get(labeller, {}).items()]


def test_the_latest_label_of_an_answer_counts_and_can_be_taken_back(tmp_path: Path) -> None:
    log = begun(tmp_path)
    for name, action, grade in [("a", "label", 1), ("b", "skip", None), ("a", "label", 0), ("b", "undo", None)]:
        log.append(given((name, 0), "anna", action, "text", grade=grade))  # type: ignore[arg-type]
    assert said(log, "anna") == [("a", "fail")]
    assert said(LabelLog(tmp_path), "anna") == [("a", "fail")]
    assert LabelLog(tmp_path).settings == log.settings
    first, *others = [json.loads(line) for line in (tmp_path / LABELS).read_text().splitlines()]
    assert (first["count"], first["seed"], first["grades"]) == (DEFAULT_COUNT, 0, list(PASS_FAIL))
    assert [one["action"] for one in others] == ["label", "skip", "label", "undo"]


def _label_many(run: Path, labeller: str, count: int) -> None:
    log = LabelLog(run)
    log.begin(count=None, seed=None, grades=None)
    for number in range(count):
        log.append(given((f"c{number}", 0), labeller, "label", "an answer", grade=number % 2, comment="é" * number))


def test_labellers_write_at_once_and_lose_nothing(tmp_path: Path) -> None:
    names = ["anna", "bob", "cem"]
    fork = multiprocessing.get_context("spawn")
    people = [fork.Process(target=_label_many, args=(tmp_path, name, 40)) for name in names]
    for person in people:
        person.start()
    for person in people:
        person.join(60)
    log = LabelLog(tmp_path)
    assert [len(log.current[name]) for name in names] == [40, 40, 40]
    lines = (tmp_path / LABELS).read_bytes().splitlines()
    assert sum(b'"count"' in line for line in lines) == 1, "they agreed on one sample"


def test_a_line_that_a_kill_cut_off_is_skipped_wherever_it_was_cut(tmp_path: Path) -> None:
    log = begun(tmp_path)
    log.append(given(("a", 0), "anna", "label", "text", grade=1))
    whole = (tmp_path / LABELS).read_bytes()
    line = sealed(msgspec.json.encode(given(("b", 0), "anna", "label", "text", grade=1)))
    for end in range(1, len(line) - 1, 7):
        (tmp_path / LABELS).write_bytes(whole + line[:end])
        with heard() as warned:
            again = LabelLog(tmp_path)
            again.append(given(("c", 0), "anna", "label", "text", grade=0))
            assert said(again, "anna") == [("a", "pass"), ("c", "fail")]
        assert "skipped 1 line not as written, the first is line 3" in warned.getvalue()


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    log = begun(tmp_path)
    log.append(given(("a", 0), "anna", "label", "text", grade=1))
    data = (tmp_path / LABELS).read_bytes()
    (tmp_path / LABELS).write_bytes(data.replace(b'"label":1.0', b'"label":0.0'))
    assert said(LabelLog(tmp_path), "anna") == []


def test_a_later_labeller_may_ask_for_more_and_for_nothing_else(tmp_path: Path) -> None:
    log = begun(tmp_path)
    assert log.begin(count=50, seed=None, grades=None).count == 50
    assert LabelLog(tmp_path).begin(count=40, seed=0, grades=PASS_FAIL).count == 50
    with pytest.raises(ConfigurationError, match="has labels on the scale pass/fail, not 1,2,3: leave out --scale"):
        log.begin(count=None, seed=None, grades=("1", "2", "3"))
    with pytest.raises(ConfigurationError, match="drawn with --seed 0, not 1"):
        log.begin(count=None, seed=1, grades=None)


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / LABELS).write_bytes(sealed(b'{"v":9,"count":30,"seed":0,"grades":["a","b"]}'))
    with pytest.raises(ConfigurationError, match="newer Steelyard: version 9"):
        begun(tmp_path)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / LABELS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"cannot open .*labels\.jsonl"):
        begun(tmp_path)
    assert (tmp_path / "elsewhere").read_bytes() == b""


@pytest.mark.parametrize(
    ("text", "grades"),
    [
        ("pass/fail", PASS_FAIL),
        ("1-5", ("1", "2", "3", "4", "5")),
        ("0-3", ("0", "1", "2", "3")),
        ("bad, fair,good", ("bad", "fair", "good")),
    ],
)
def test_a_scale_is_read(text: str, grades: tuple[str, ...]) -> None:
    assert parse_scale(text) == grades
    assert parse_scale(show_scale(grades)) == grades


@pytest.mark.parametrize("text", ["", "good", "1-10", "5-1", "a,a", "a,,b", "1-99999999"])
def test_a_scale_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="a scale is pass/fail, numbers such as 1-5"):
        parse_scale(text)


@for_all(st.text(), st.text(), st.text(min_size=1))
def test_any_text_is_written_and_read_back(
    tmp_path_factory: pytest.TempPathFactory, comment: str, case_id: str, who: str
) -> None:
    run = tmp_path_factory.mktemp("run")
    log = begun(run)
    log.append(given((case_id, 1), who, "label", "x", grade=1, comment=comment))
    (read,) = LabelLog(run).current[who].values()
    assert (read.id, read.trial, read.comment) == (case_id, 1, comment or None)
