"""Samples of lm-eval: files that version 0.4.13 wrote (see toys/lm_eval_capitals.py), and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard import Record, Result
from steelyard.integrations.lm_eval_log import LmEvalLog
from steelyard.run.imports import import_log
from tests.support.cli import run_cli

HERE = Path(__file__).parent
(GENERATED,) = (HERE / "logs").glob("samples_capitals_gen_*.jsonl")
(CHOSEN,) = (HERE / "logs").glob("samples_capitals_mc_*.jsonl")


def by_id(run: Path) -> dict[str, Record]:
    return {one.id: one for one in Result.load(run).iter_responses()}


def test_generated_answers_with_two_filters(tmp_path: Path) -> None:
    made = import_log(LmEvalLog(GENERATED), tmp_path / "RUN")
    assert {check.score: check.theirs for check in made.checks} == {
        "exact_match,strict-match": 0.4,
        "exact_match,flexible-extract": 0.8,
    }, "as lm-eval printed them"
    assert all(check.same for check in made.checks)
    assert (made.about.model, made.about.task, made.about.tool_version) == ("toy", "capitals_gen", "0.4.13")
    result = Result.load(tmp_path / "RUN")
    assert result.pass_rate == 0.4
    assert result.typed_metrics.scores["exact_match,flexible-extract"].mean == 0.8
    norway = by_id(tmp_path / "RUN")["1"]
    assert norway.response_text == "The capital is Oslo."
    assert (norway.expected, norway.metadata["country"]) == ("Oslo", "Norway")
    assert norway.scores["exact_match,flexible-extract"].extracted == "Oslo"
    assert "Capital of Norway?" in run_cli(tmp_path, "report", "RUN", "--case", "1").out
    assert result.typed_metrics.active_seconds > 1


def test_choices_by_likelihood(tmp_path: Path) -> None:
    made = import_log(LmEvalLog(CHOSEN), tmp_path / "RUN", decides="acc")
    assert {check.score: check.theirs for check in made.checks} == {"acc": 0.4, "acc_norm": 0.4}
    assert all(check.same for check in made.checks)
    for record in by_id(tmp_path / "RUN").values():
        right = record.metadata["choices"][record.metadata["gold"]]
        assert record.expected == right
        assert record.scores["acc"].passed == (record.response_text == right), "the likeliest is the answer"


def test_without_the_results_beside_them_the_samples_still_count(tmp_path: Path) -> None:
    shutil.copy(CHOSEN, tmp_path / "mine.jsonl")
    ended = run_cli(tmp_path, "import", "mine.jsonl", "-o", "RUN", "--decides", "acc_norm")
    assert ended.code == 0, ended.err
    assert "imported 5 answers of mine from mine.jsonl (lm_eval)" in ended.err
    assert Result.load(tmp_path / "RUN").pass_rate == 0.4


def test_repeats_are_one_record_as_they_are_scored_together(tmp_path: Path) -> None:
    line = {"doc_id": 0, "doc": {"q": "x"}, "target": "a", "arguments": [["Q?", {"until": []}]], "filter": "none",
            "resps": [["a", "b", "a"]], "filtered_resps": ["a"], "exact_match": 1.0}  # fmt: skip
    (tmp_path / "s.jsonl").write_text(json.dumps(line) + "\n")
    (sample,) = LmEvalLog(tmp_path / "s.jsonl").samples()
    assert sample.case.metadata["resps"] == ["a", "b", "a"]
    assert (sample.response.response_text, sample.case.prompt, sample.scores["exact_match"].value) == ("a", "Q?", 1.0)


def test_without_arguments_the_document_stands_for_the_question(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text('{"doc_id": 1, "doc": {"q": "x"}, "resps": [["a"]], "acc": 1.0}\n')
    ended = run_cli(tmp_path, "import", "s.jsonl", "-o", "RUN")
    assert ended.code == 0, ended.err
    assert by_id(tmp_path / "RUN")["1"].input_prompt == '{"q":"x"}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "s.jsonl:1: is no sample of lm-eval"),
        ('{"id": 1}', "missing required field `doc_id`"),
        ('{"doc_id": 1}\n\n{"doc_id": 1}', "s.jsonl:3: doc_id 1 is duplicated for filter 'none'"),
        ("", "the log has no samples"),
    ],
)
def test_what_is_no_sample_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "s.jsonl").write_text(content)
    ended = run_cli(tmp_path, "import", "s.jsonl", "-o", "RUN")
    assert ended.code == 2
    assert message in ended.err
    assert not (tmp_path / "RUN").exists()


def test_files_of_another_kind_are_refused_by_what_they_are(tmp_path: Path) -> None:
    (results,) = (HERE / "logs").glob("results_*" + GENERATED.stem.rpartition("_")[2] + ".json")
    for words, message in (
        ([results], "has figures and no answers: name samples_TASK_TIME.jsonl beside it"),
        ([HERE], "is a folder: name a file in it"),
        (["none.eval"], "none.eval is not there"),
        ([HERE / "test_lm_eval_log.py"], "is neither a log of inspect_ai"),
    ):
        ended = run_cli(tmp_path, "import", *words, "-o", "RUN")
        assert ended.code == 2
        assert message in ended.err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_samples_made_just_now_give_the_figures_that_lm_eval_prints(tmp_path: Path) -> None:
    """With a Python that has lm_eval[api]: this one, or the one that LM_EVAL_PYTHON names."""
    python = os.environ.get("LM_EVAL_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import lm_eval"], capture_output=True, check=False).returncode:
        pytest.skip("lm_eval is not installed; LM_EVAL_PYTHON may name a Python that has it")
    script = shutil.copy(HERE / "toys" / "lm_eval_capitals.py", tmp_path)
    ended = subprocess.run([python, script, "out"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for number, path in enumerate(json.loads(ended.stdout.splitlines()[-1])):
        made = import_log(LmEvalLog(tmp_path / path), tmp_path / f"RUN{number}")
        assert len(made.checks) == 2
        assert all(check.same for check in made.checks)
