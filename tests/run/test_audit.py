"""Audits: a random draw from each stratum, and the pass rate that labels of it correct."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from steelyard import Result
from steelyard.errors import ConfigurationError
from steelyard.run.audit import draw, labelled_strata
from steelyard.stats.correction import corrected_rate
from tests.support.cli import run_cli
from tests.support.judged import Agent, Assessor, run, suite_of

CASES = 160


def right(case_id: str) -> bool:
    """What people would say: all that the scorer passed, and a third of what it failed."""
    number = int(case_id[1:])
    return number % 2 == 0 or number % 3 == 0


def audited_run(folder: Path) -> Path:
    """Half is passed by the scorer; of the other half the judge passes everything but each fifth."""
    agent = Agent(lambda case, context: "yes" if int(case.id[1:]) % 2 == 0 else "=maybe")
    lenient = Assessor(lambda case_id, *_: 0.0 if int(case_id[1:]) % 5 == 0 else 1.0)
    scorers = ["exact", lenient.judge(when="failed")]
    run(agent, suite_of(CASES, expected="yes"), scorers, output_path=folder / "RUN")
    return folder / "RUN"


def drawn_file(folder: Path, count: int = 30) -> list[dict[str, str]]:
    ended = run_cli(folder, "calibrate", "RUN", "--audit", str(count), "-o", "labels.csv")
    assert ended.code == 0, ended.err
    return list(csv.DictReader(io.StringIO((folder / "labels.csv").read_text())))


def label(folder: Path, rows: list[dict[str, str]], skip: str | None = None) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        said = "pass" if right(row["id"]) else "fail"
        writer.writerow({**row, "label": "" if row["stratum"] == skip else said})
    (folder / "labels.csv").write_text(text.getvalue())


def test_each_stratum_is_drawn_from_at_random_and_its_size_is_recorded(tmp_path: Path) -> None:
    audited_run(tmp_path)
    rows = drawn_file(tmp_path)
    assert Counter(row["stratum"] for row in rows) == {"passed": 30, "judge overruled": 30, "judge confirmed": 16}
    assert {row["stratum"]: row["stratum_size"] for row in rows} == {
        "passed": "80",
        "judge overruled": "64",
        "judge confirmed": "16",
    }
    assert not any(row["answer"].startswith("=") for row in rows), "a spreadsheet would run it"
    assert [row["stratum"] for row in rows] != sorted(row["stratum"] for row in rows)


def test_a_draw_depends_on_the_seed_and_not_on_the_order_of_records(tmp_path: Path) -> None:
    records = list(Result.load(audited_run(tmp_path)).iter_responses())
    assert draw(records, 20, 1) == draw(records[::-1], 20, 1)
    assert draw(records, 20, 1)[0] != draw(records, 20, 2)[0]
    with pytest.raises(ConfigurationError, match="at least 20 answers from each stratum, got 19"):
        draw(records, 19, 0)


def test_the_corrected_pass_rate_stands_beside_the_raw_one(tmp_path: Path) -> None:
    audited_run(tmp_path)
    label(tmp_path, drawn_file(tmp_path))
    ended = run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv")
    assert ended.code == 1
    assert "judge: not trusted" in ended.out
    assert "raw                90.0%" in ended.out
    assert "corrected" in ended.out
    found: dict[str, Any] = json.loads(run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv", "--json").out)
    truth = sum(right(f"c{number:02}") for number in range(CASES)) / CASES
    low, high = found["corrected"]["ci95"]
    assert low < truth < high < found["corrected"]["raw"] == 0.9
    (judge,) = found["judges"]
    strata = {one["name"]: one for one in found["strata"]}
    overruled, confirmed = strata["judge overruled"], strata["judge confirmed"]
    passed = overruled["size"] * overruled["right"] / overruled["labelled"]
    lost = confirmed["size"] * confirmed["right"] / confirmed["labelled"]
    assert judge["pass_fail"]["sensitivity"]["rate"] == pytest.approx(passed / (passed + lost))


def test_without_labels_in_a_stratum_there_is_no_corrected_rate(tmp_path: Path) -> None:
    audited_run(tmp_path)
    label(tmp_path, drawn_file(tmp_path), skip="judge confirmed")
    out = run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv").out
    assert "no corrected rate  no label in: judge confirmed" in out
    assert corrected_rate(labelled_strata({"passed": 5, "failed": 5}, [("passed", True)])) is None


def test_an_audit_of_a_run_that_has_changed_is_refused(tmp_path: Path) -> None:
    audited_run(tmp_path)
    rows = drawn_file(tmp_path)
    label(tmp_path, [{**row, "stratum_size": "81"} if row["stratum"] == "passed" else row for row in rows])
    ended = run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv")
    assert ended.code == 2
    assert "stratum 'passed' had 81 answers when it was drawn from, and has 80 now: draw again" in ended.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--audit", "30"], "--audit needs --out FILE"),
        (["--audit", "19", "-o", "l.csv"], "19 is not in the range x>=20"),
        (["--audit", "30", "--labels", "l.csv"], "give --labels FILE, or --audit N"),
        (["--audit", "30", "-o", "RUN/run.json"], "it is not overwritten"),
    ],
)
def test_a_mistake_in_an_audit_is_named(tmp_path: Path, words: list[str], expected: str) -> None:
    audited_run(tmp_path)
    ended = run_cli(tmp_path, "calibrate", "RUN", *words)
    assert ended.code == 2
    assert expected in ended.err
