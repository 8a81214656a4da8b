"""Measurements and labels beside verdicts: from a scorer through the journal to every report, gate and comparison."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Result, Runner, Score
from steelyard.errors import ConfigurationError
from steelyard.report.compare.compare import compare_runs
from tests.support.cli import run_cli

TONES = ["formal", "formal", "casual", "rude"]


def answer(case: EvalCase) -> str:
    return str(case.metadata["tone"])


def suite(count: int = 12) -> EvalSet:
    cases = [
        EvalCase(id=f"c{number}", prompt="?", expected=TONES[number % 4], metadata={"tone": TONES[number % 4]})
        for number in range(count)
    ]
    return EvalSet("tones", cases)


class Measured:
    """How many steps it took, and what kind of answer it is."""

    name = "measured"
    calls = 0

    def __init__(self, more: float = 0.0) -> None:
        self.more = more

    def score(self, case: EvalCase, response: InvocationResponse) -> list[Score]:
        type(self).calls += 1
        steps = 3.0 + int(case.id[1:]) % 5 + self.more * (1 + int(case.id[1:]) % 2)
        return [
            Score("steps", steps, unit="steps", better="lower"),
            Score("tone", label=response.response_text),
        ]


def run_of(folder: Path, more: float = 0.0, **options: Any) -> Result:
    return Runner(answer, suite(), ["exact", Measured(more)], progress="off", output_path=folder, **options).run_sync()


def test_they_are_in_the_figures_and_make_no_case_unscored(tmp_path: Path) -> None:
    result = run_of(tmp_path / "run")
    metrics = result.typed_metrics
    assert (metrics.scored, metrics.passed, metrics.unscored, metrics.scoring_errors) == (12, 12, 0, 0)
    steps, tone = metrics.scores["steps"], metrics.scores["tone"]
    assert (steps.unit, steps.better, steps.min, steps.max) == ("steps", "lower", 3.0, 7.0)
    assert steps.mean == pytest.approx(4.75)
    assert tone.labels == {"formal": 6, "casual": 3, "rude": 3}
    assert Result.load(tmp_path / "run").typed_metrics == metrics
    written = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert written["scores"]["tone"]["shares"]["formal"] == 0.5
    assert "unit" not in written["scores"]["exact"]


def test_a_resumed_run_keeps_them_and_scores_nothing_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = run_of(run).metrics["scores"]
    lines = (run / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.json").unlink()
    (run / "outputs.jsonl").write_bytes(b"".join(lines[:7]))
    Measured.calls = 0
    assert Result.load(run).typed_metrics.scores["tone"].n == 7
    assert run_of(run).metrics["scores"] == whole
    assert Measured.calls == 5


@pytest.mark.parametrize("trials", [1, 3])
def test_every_report_shows_them(tmp_path: Path, trials: int) -> None:
    run_of(tmp_path / "run", trials=trials)
    text = run_cli(tmp_path, "report", "run", "-f", "text").out
    assert "score steps" in text
    assert "3 to 7 steps" in text
    assert "score tone formal   50.0%" in text
    assert all(len(line) <= 80 for line in text.splitlines() if "score" in line)
    markdown = run_cli(tmp_path, "report", "run", "-f", "md").out
    assert "<code>tone</code> <code>rude</code>" in markdown
    rows = list(csv.DictReader(io.StringIO(run_cli(tmp_path, "report", "run", "-f", "csv").out)))
    assert (rows[0]["steps.value"], rows[0]["tone.value"], rows[0]["tone.passed"]) == ("3.0", "formal", "")
    case = run_cli(tmp_path, "report", "run", "--case", "c3").out
    assert "score steps: 6 steps" in case
    assert "score tone: rude" in case


def test_a_table_has_labels_as_text(tmp_path: Path) -> None:
    frame = run_of(tmp_path / "run").to_pandas()
    assert frame["score.tone.label"].tolist()[:3] == ["formal", "formal", "casual"]
    assert frame["score.steps"].tolist()[:3] == [3.0, 4.0, 5.0]
    assert "score.tone" not in frame


@pytest.mark.parametrize(
    ("rule", "ok"),
    [
        ("score.steps.mean<=5", True),
        ("score.steps.mean<=4", False),
        ("score.steps.max<8", True),
        ("score.steps.ci_high<7", True),
        ("score.tone.share.formal>=50%", True),
        ("score.tone.share.rude<=0.1", False),
        ("score.tone.share.formal.ci_low>0.1", True),
        ("score.tone.labels.rude==3", True),
    ],
)
def test_rules_can_name_them(tmp_path: Path, rule: str, ok: bool) -> None:
    assert run_of(tmp_path / "run").gate(rule).passed is ok


def test_a_label_that_no_run_of_this_suite_gave_is_a_share_of_nothing(tmp_path: Path) -> None:
    result = run_of(tmp_path / "run")
    assert result.gate("score.tone.share.angry<=0.05")
    with pytest.raises(ConfigurationError, match=r"no metric of this run is named 'score.tune.share.rude'"):
        result.gate("score.tune.share.rude<=0.05")


def test_a_comparison_pairs_them_by_case(tmp_path: Path) -> None:
    run_of(tmp_path / "a")
    run_of(tmp_path / "b", more=1.0)
    found = compare_runs([tmp_path / "a", tmp_path / "b"]).against[0].scores["steps"]
    assert (found.unit, found.better, found.outcome) == ("steps", "lower", "worse")
    assert found.difference == pytest.approx(1.5)
    shown = run_cli(tmp_path, "compare", "a", "b").out
    assert "steps" in shown
    assert "+1.50" in shown
    back = compare_runs([tmp_path / "b", tmp_path / "a"]).against[0].scores["steps"]
    assert back.outcome == "better"


def test_a_measurements_drop_is_no_share_that_a_baseline_could_allow(tmp_path: Path) -> None:
    run_of(tmp_path / "a")
    run_of(tmp_path / "b", more=1.0)
    ended = run_cli(tmp_path, "gate", "b", "--baseline", "a", "--max-regression", "score.steps=0.5")
    assert "score.steps is a measurement" in ended.err
