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
from steelyard.report.headline import read_headline
from steelyard.run.audit import draw, labelled_strata
from steelyard.stats.correction import corrected_rate
from tests.support.audited import CASES, audited_run, right
from tests.support.cli import run_cli
from tests.support.judged import Agent, run, suite_of


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
    assert "no corrected rate  no labels yet: judge confirmed" in out
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


def corrected_run(folder: Path) -> tuple[Path, float]:
    """A run with its labels, and the rate that they correct."""
    path = audited_run(folder)
    label(folder, drawn_file(folder))
    ended = run_cli(folder, "calibrate", "RUN", "--labels", "labels.csv")
    assert "the corrected pass rate is in RUN/correction.json: report, view and gate show it" in ended.err
    rate = Result.load(path).typed_metrics.pass_rate_corrected
    assert rate is not None
    return path, rate


def test_the_corrected_rate_is_shown_wherever_the_raw_one_is(tmp_path: Path) -> None:
    path, rate = corrected_run(tmp_path)
    shown, labels = f"{rate:.1%}", "by 76 labels"
    for form in ("text", "md", "html", "junit"):
        out = run_cli(tmp_path, "report", "RUN", "-f", form).out
        out = (path / "report.html").read_text() if form == "html" else out
        assert shown in out or str(rate) in out, form
        assert labels in out or '"labels":76' in out, form
    found = json.loads(run_cli(tmp_path, "report", "RUN", "-f", "json").out)
    assert found["pass_rate_corrected"] == rate == found["correction"]["rate"]
    headline = read_headline(path)
    assert (headline.pass_rate_corrected, headline.correction) == (rate, labels)
    assert shown in Result.load(path)._repr_html_()


def test_a_gate_reads_the_corrected_rate(tmp_path: Path) -> None:
    audited_run(tmp_path)
    before = run_cli(tmp_path, "gate", "RUN", "--rule", "pass_rate_corrected>=50%")
    assert before.code == 1
    assert "pass_rate_corrected>=50%: is not known: no labels correct it; steelyard calibrate RUN" in before.out
    label(tmp_path, drawn_file(tmp_path))
    run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv")
    assert run_cli(tmp_path, "gate", "RUN", "--rule", "pass_rate_corrected>=50%").code == 0
    assert run_cli(tmp_path, "gate", "RUN", "--rule", "pass_rate_corrected>=80%").code == 1
    assert run_cli(tmp_path, "gate", "RUN", "--rule", "pass_rate_corrected.ci_low>=50%").code == 0
    raw = run_cli(tmp_path, "gate", "RUN", "--rule", "pass_rate>=80%")
    assert "uncalibrated judge" in raw.out, "only the corrected rate has the judge's errors taken out"


def test_a_correction_of_another_state_of_the_run_says_so(tmp_path: Path) -> None:
    path, _ = corrected_run(tmp_path)
    written = json.loads((path / "correction.json").read_text())
    (path / "correction.json").write_text(json.dumps({**written, "lines": written["lines"] - 1}))
    assert Result.load(path).typed_metrics.pass_rate_corrected is None
    out = run_cli(tmp_path, "report", "RUN").out
    assert "the run has changed since its labels corrected it" in out
    (path / "correction.json").write_text('{"method": 5}')
    assert "correction.json cannot be read" in run_cli(tmp_path, "report", "RUN").out


def test_a_run_without_judges_is_corrected_too(tmp_path: Path) -> None:
    agent = Agent(lambda case, context: "yes" if int(case.id[1:]) % 2 == 0 else "Yes!")
    run(agent, suite_of(CASES, expected="yes"), ["exact"], output_path=tmp_path / "RUN")
    label(tmp_path, drawn_file(tmp_path))
    ended = run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv")
    assert ended.code == 0, ended.err
    assert "raw                50.0%" in ended.out
    assert "judge" not in ended.out


@pytest.mark.parametrize("drawn", [True, False])
def test_labels_of_another_run_correct_by_its_error_rates(tmp_path: Path, drawn: bool) -> None:
    audited_run(tmp_path)
    rows = drawn_file(tmp_path)
    if drawn:
        label(tmp_path, rows)
    else:
        lines = [f"c{number:02},{'pass' if right(f'c{number:02}') else 'fail'}" for number in range(0, CASES, 3)]
        lines += [f"c{number:02},{'pass' if right(f'c{number:02}') else 'fail'}" for number in range(1, CASES, 3)]
        (tmp_path / "labels.csv").write_text("\n".join(["id,label", *lines]))
    (tmp_path / "RUN").rename(tmp_path / "OLD")
    audited_run(tmp_path)
    ended = run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv", "--labels-of", "OLD")
    assert ended.code == 1, ended.err
    assert "pass rate corrected by labels of another run" in ended.out
    assert "assumes the same error rates" in ended.out
    metrics = Result.load(tmp_path / "RUN").typed_metrics
    assert metrics.correction
    assert (metrics.correction.labels_of, metrics.correction.assumes_same_errors) == ("OLD", True)
    truth = sum(right(f"c{number:02}") for number in range(CASES)) / CASES
    assert metrics.pass_rate_corrected_ci95 is not None
    assert metrics.pass_rate_corrected_ci95[0] < truth < metrics.pass_rate_corrected_ci95[1]
    assert "of another run, assumes the same error rates" in run_cli(tmp_path, "report", "RUN").out


def test_labels_of_a_run_that_others_judged_are_refused(tmp_path: Path) -> None:
    audited_run(tmp_path)
    label(tmp_path, drawn_file(tmp_path))
    run(Agent(lambda *_: "yes"), suite_of(30, expected="yes"), ["exact"], output_path=tmp_path / "PLAIN")
    ended = run_cli(tmp_path, "calibrate", "PLAIN", "--labels", "labels.csv", "--labels-of", "RUN")
    assert ended.code == 2
    assert "error rates measured there are not those of this run" in ended.err
    assert run_cli(tmp_path, "calibrate", "RUN", "--audit", "20", "--labels-of", "RUN", "-o", "x.csv").code == 2
