"""Labelling a run: blind, in random order, resumable; and what `calibrate` makes of the labels."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from steelyard import EvalCase, EvalSet, Runner
from steelyard.errors import ConfigurationError
from steelyard.journal.lock import RunLock
from steelyard.report.labels import LabelSession
from steelyard.run.audit import draw
from steelyard.run.labels import own_labels, read_labels
from steelyard.run.result import Result
from tests.support.audited import audited_run, label_all, right, write_labels
from tests.support.cli import run_cli
from tests.support.journal import write_journal
from tests.support.judged import Agent, Assessor, run, suite_of


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audited_run(tmp_path_factory.mktemp("audited"))


@pytest.fixture
def place(audited: Path, tmp_path: Path) -> Path:
    """A fresh copy of the run."""
    return Path(shutil.copytree(audited, tmp_path / "RUN"))


def test_an_item_says_nothing_of_scores_judges_and_strata(place: Path) -> None:
    seen = label_all(LabelSession(place, "anna"))
    assert len(seen) == 76
    assert set(msgspec.structs.asdict(seen[0])) == {"id", "trial", "question", "answer", "expected", "conversation"}
    assert {one.expected for one in seen} == {"yes"}


def test_the_order_does_not_tell_the_strata_apart(place: Path) -> None:
    drawn, sizes = draw(Result.load(place).iter_responses(), 30, 0)
    order = [one.stratum for one in drawn]
    half = Counter(order[: len(order) // 2])
    assert all(half[name] > 3 for name in sizes), half


def test_a_larger_draw_holds_the_smaller_one(place: Path) -> None:
    records = list(Result.load(place).iter_responses())
    smaller, larger = ({(one.id, one.trial) for one in draw(records, count, 7)[0]} for count in (20, 40))
    assert smaller < larger


def test_a_session_continues_where_it_ended_and_with_more_answers_if_asked(place: Path) -> None:
    first = label_all(LabelSession(place, "anna", count=20), 10)
    again = LabelSession(place, "anna")
    assert again.progress.labelled == 10
    rest = label_all(again)
    assert {one.id for one in first}.isdisjoint(one.id for one in rest)
    assert len(first) + len(rest) == again.progress.total == 56
    more = label_all(LabelSession(place, "anna", count=30))
    assert len(more) == 76 - 56


def test_undo_goes_back_through_sessions_and_skipped_answers_come_again_when_asked(place: Path) -> None:
    session = LabelSession(place, "anna", count=20)
    first, second = label_all(session, 2)
    third = session.current
    assert third is not None
    session.skip((third.id, third.trial), "no idea")
    assert (session.progress.labelled, session.progress.skipped) == (2, 1)
    again = LabelSession(place, "anna")
    assert again.undo()
    assert again.current == third
    assert again.undo()
    assert again.current == second
    assert again.undo()
    assert again.current == first
    assert not again.undo()
    again.skip((first.id, first.trial))
    label_all(again)
    assert again.current is None
    shown = LabelSession(place, "anna", skipped=True)
    assert shown.current == first
    shown.skip((first.id, first.trial))
    assert shown.current is None, "once more, not for ever"


def test_labels_give_what_labels_written_by_hand_give(place: Path, tmp_path: Path) -> None:
    label_all(LabelSession(place, "anna"))
    (tmp_path / "exported.csv").write_text(LabelSession(place, "anna").to_csv())
    drawn, sizes = draw(Result.load(place).iter_responses(), 30, 0)
    with (tmp_path / "hand.csv").open("w") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "trial", "label", "stratum", "stratum_size", "answer"])
        for one in drawn:
            verdict = "pass" if right(one.id) else "fail"
            rows.writerow([one.id, one.trial, verdict, one.stratum, sizes[one.stratum], one.answer])
    found = []
    for words in (["--labels", "exported.csv"], ["--labels", "hand.csv"], []):
        ended = run_cli(tmp_path, "calibrate", "RUN", "--json", *words)
        assert ended.code == 1, ended.err
        figures = json.loads(ended.out)
        for name in ("labels_digest", "created"):
            figures["corrected"].pop(name)
        found.append(figures)
    assert found[0] == found[1] == found[2]
    assert found[0]["corrected"]["raw"] == 0.9
    assert found[0]["corrected"]["labels"] == 76


def test_several_labellers_have_a_column_each_and_the_ceiling_is_theirs(place: Path, tmp_path: Path) -> None:
    label_all(LabelSession(place, "anna"))
    bob = LabelSession(place, "bob")
    for number in range(30):
        item = bob.current
        assert item is not None
        bob.label((item.id, item.trial), int(right(item.id) != (number % 10 == 0)), "=cmd()")
    text = bob.to_csv()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [name for name in rows[0] if name.startswith(("label", "comment"))] == [
        "label_anna", "label_bob", "comment_anna", "comment_bob",
    ]  # fmt: skip
    assert (len(rows), sum(row["label_bob"] != "" for row in rows)) == (76, 30)
    assert {row["comment_bob"] for row in rows} == {"", "'=cmd()"}, "a spreadsheet would run it"
    (tmp_path / "labels.csv").write_text(text)
    read, own = read_labels(tmp_path / "labels.csv"), own_labels(place)
    assert {key: (one.votes, one.stratum, one.stratum_size) for key, one in read.items()} == {
        key: (one.votes, one.stratum, one.stratum_size) for key, one in own.items()
    }
    found = json.loads(run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv", "--json").out)
    assert found["judges"][0]["ceiling"]["cases"] == 30
    assert found["judges"][0]["ceiling"]["kappa"] < 1


def test_agreement_says_how_many_more_labels_would_settle_it(place: Path) -> None:
    session = LabelSession(place, "anna")
    assert session.agreement() == ["no labels yet"]
    label_all(session, 12)
    early = " ".join(session.agreement())
    assert "not trusted yet" in early
    assert "more labels of answers that" in early
    assert "would settle it" in early
    label_all(session)
    done = session.agreement()
    assert done[0] == "judge: not trusted; sensitivity 0.77, specificity 0.19 on 46 labels"
    assert done[-1].startswith("pass rate: 90.0% raw, ")


def test_grades_become_numbers_from_0_to_1(place: Path, tmp_path: Path) -> None:
    session = LabelSession(place, "anna", grades=("bad", "fair", "good"))
    assert session.keys == {"1": 0, "2": 1, "3": 2}
    for grade in (0, 1, 2):
        item = session.current
        assert item is not None
        session.label((item.id, item.trial), grade)
    rows = list(csv.DictReader(io.StringIO(session.to_csv())))
    assert sorted(row["label"] for row in rows) == ["0.0", "0.5", "1.0"]
    (tmp_path / "labels.csv").write_text(session.to_csv())
    assert (
        json.loads(run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv", "--json").out)[0]["labels"]
        == "graded"
    )


def test_a_label_of_an_answer_that_was_replaced_counts_no_more(place: Path) -> None:
    session = LabelSession(place, "anna")
    (item,) = label_all(session, 1)
    records = list(Result.load(place).iter_responses())
    for record in records:
        record.response_text = "another" if record.id == item.id else record.response_text
    write_journal(place, records)
    again = LabelSession(place, "anna")
    assert again.progress.labelled == 0
    with pytest.raises(ConfigurationError, match="holds no labels of answers as they are now"):
        own_labels(place)


def test_a_judge_that_only_advises_is_met_in_its_passes_and_its_fails(tmp_path: Path) -> None:
    lenient = Assessor(lambda case_id, *_: 0.0 if int(case_id[1:]) % 5 == 0 else 1.0)
    judge = lenient.judge(calibration=str(tmp_path / "none.json"))
    run(Agent(), suite_of(100), [judge], output_path=tmp_path / "RUN")
    session = LabelSession(tmp_path / "RUN", "anna", count=20)
    label_all(session)
    labels = own_labels(tmp_path / "RUN")
    assert Counter(one.stratum for one in labels.values()) == {"advised pass": 20, "advised fail": 20}
    ended = run_cli(tmp_path, "calibrate", "RUN", "--json")
    (found,) = json.loads(ended.out)
    passed, failed = (
        [one for one in labels.values() if one.stratum == name] for name in ("advised pass", "advised fail")
    )
    good = 80 * sum(one.value for one in passed) / 20
    lost = 20 * sum(one.value for one in failed) / 20
    assert found["pass_fail"]["sensitivity"]["rate"] == pytest.approx(good / (good + lost))
    assert not (tmp_path / "RUN" / "correction.json").exists(), "there is no pass rate to correct"


def test_answers_that_nothing_scored_are_labelled_as_one_stratum(tmp_path: Path) -> None:
    cases = [EvalCase(id=f"c{n:02}", prompt=f"Question {n}?") for n in range(40)]
    Runner(lambda case: "an answer", EvalSet("s", cases), output_path=tmp_path / "RUN", progress="off").run_sync()
    session = LabelSession(tmp_path / "RUN", "anna", count=20)
    seen = label_all(session)
    assert len(seen) == 20
    assert seen[0].question.startswith("Question ")
    assert session.agreement() == ["no judge has scored these answers"]
    assert {row["stratum"] for row in csv.DictReader(io.StringIO(session.to_csv()))} == {""}


def test_what_cannot_be_labelled_is_refused(tmp_path: Path, place: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="has no answers to label"):
        LabelSession(tmp_path / "empty", "anna")
    assert not (tmp_path / "empty" / "labels.jsonl").exists()
    for name in ("", "  ", "x" * 41, "a\nb", "\x1b[31m"):
        with pytest.raises(ConfigurationError, match="a labeller's name has 1 to 40"):
            LabelSession(place, name)
    session = LabelSession(place, "anna")
    with pytest.raises(ConfigurationError, match="not in the sample"):
        session.label(("nobody", 0), 1)
    with pytest.raises(ConfigurationError, match="a position from 0 to 1, got 2"):
        session.label(("c00", 0), 2)
    ended = run_cli(tmp_path, "calibrate", "RUN/../empty")
    assert ended.code == 2
    assert "has no labels: `steelyard label" in ended.err


def test_a_run_that_is_being_written_is_not_labelled_yet(place: Path) -> None:
    with RunLock(place), pytest.raises(ConfigurationError, match="is being written by process"):
        LabelSession(place, "anna")
    assert LabelSession(place, "anna").current is not None


def test_plain_labels_by_hand_still_work(place: Path, tmp_path: Path) -> None:
    write_labels(tmp_path / "labels.csv", [f"c{n:02}" for n in range(60)])
    assert "sensitivity" in run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv").out
