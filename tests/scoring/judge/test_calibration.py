"""Calibration: judges set against people's labels, the verdict, the labels' file, the command and what it writes."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, Runner
from steelyard.cli.calibrate import read_labels
from steelyard.errors import ConfigurationError, SuiteError
from steelyard.records import Score
from steelyard.scoring.judge.calibration import (
    Agreement,
    Calibration,
    Judged,
    agreement,
    calibration,
    calibration_of,
    is_trusted,
)
from steelyard.stats.agreement import MIN_GRADED
from tests.support.cli import Ended, run_cli
from tests.support.journal import a_record, write_journal

BY = "m/correctness_v1@1"
STEPS = [0.0, 0.25, 0.5, 0.75, 1.0]


def agreement_of(labels: Sequence[float], scores: Sequence[float], **more: Any) -> Agreement:
    judged = [Judged(label, score, score >= 0.5) for label, score in zip(labels, scores, strict=True)]
    return agreement("judge", BY, judged, **more)


def noisy(n: int, noise: float, seed: int = 1) -> tuple[list[float], list[float]]:
    """Labels, and scores that follow them more or less."""
    rng = np.random.default_rng(seed)
    labels = rng.random(n)
    return labels.tolist(), np.clip(labels + rng.normal(0, noise, n), 0, 1).tolist()


# The verdict


def pass_fail(right: int, right_passed: int, wrong: int, wrong_failed: int, **more: Any) -> Agreement:
    """A judge that passed so many of the right answers and failed so many of the wrong ones."""
    labels = [1.0] * right + [0.0] * wrong
    scores = [1.0] * right_passed + [0.0] * (right - right_passed) + [0.0] * wrong_failed
    return agreement_of(labels, scores + [1.0] * (wrong - wrong_failed), **more)


def test_a_judge_that_passes_everything_is_not_trusted_however_many_answers_are_right() -> None:
    found = pass_fail(95, 95, 20, 0)
    assert (found.trusted, found.labels, found.pass_fail.sensitivity.rate) == (False, "pass/fail", 1.0)
    assert found.reason == "specificity 0.00 is below 0.80"
    assert (found.scarce, found.labels_needed) == (None, None)


def test_a_flawless_judge_is_trusted_from_nine_labels_of_each_kind_on() -> None:
    assert pass_fail(9, 9, 9, 9).trusted
    found = pass_fail(30, 30, 8, 8)
    assert (found.trusted, found.scarce, found.labels_needed) == (False, "failed", 1)
    assert "about 1 more label of answers that failed" in found.reason


def test_a_kind_without_labels_is_named_with_how_many_it_takes() -> None:
    assert (pass_fail(20, 20, 0, 0).scarce, pass_fail(20, 20, 0, 0).labels_needed) == ("failed", 9)
    assert (pass_fail(0, 0, 20, 20).scarce, pass_fail(0, 0, 20, 20).labels_needed) == ("passed", 9)


def test_a_good_judge_on_rare_failures_is_trusted_though_rho_could_not_reach_the_bar() -> None:
    """With 10 % failures Spearman's rho of 0.95/0.95 verdicts is near 0.7."""
    assert pass_fail(180, 171, 20, 19).trusted


def test_trials_of_one_case_are_not_new_evidence() -> None:
    judged = [Judged(float(right), float(right), bool(right), f"c{right}") for right in (0, 1) for _ in range(50)]
    found = agreement("judge", BY, judged)
    assert (found.n, found.cases, found.trusted) == (100, 2, False)
    assert found.labels_needed == 8


def test_kappa_and_balanced_accuracy_are_reported_and_do_not_decide() -> None:
    found = pass_fail(380, 342, 20, 18)
    assert found.pass_fail.kappa is not None
    assert found.pass_fail.kappa < 0.5
    assert found.pass_fail.balanced_accuracy == pytest.approx(0.9)
    assert found.trusted


def test_grades_in_perfect_order_are_trusted() -> None:
    found = agreement_of(STEPS * 4, STEPS * 4)
    assert found.graded is not None
    assert (found.trusted, found.labels, found.graded.rho) == (True, "graded", 1.0)
    assert found.labels_needed is None


def test_a_judge_that_says_the_opposite_is_not_trusted_and_no_labels_would_help() -> None:
    found = agreement_of(STEPS * 4, STEPS[::-1] * 4)
    assert (found.trusted, found.labels_needed) == (False, None)
    assert found.reason == "rho -1.00 is below 0.80"


def test_the_scale_of_graded_scores_does_not_matter_only_their_order() -> None:
    found = agreement_of(STEPS * 4, [step**3 / 7 + 0.6 for step in STEPS * 4])
    assert found.trusted
    assert found.pass_fail.kappa == 0.0  # it lets everything pass


def test_where_every_score_is_the_same_rho_is_undefined_and_that_is_the_reason() -> None:
    found = agreement_of(STEPS * 4, [0.5] * 20)
    assert not found.trusted
    assert "undefined" in found.reason


@pytest.mark.parametrize("n", range(1, MIN_GRADED))
def test_a_few_grades_are_not_enough_however_well_they_agree(n: int) -> None:
    scores = [(step + 1) / 20 for step in range(n)]
    found = agreement_of(scores, scores)
    assert (found.trusted, found.scarce, found.labels_needed) == (False, "graded", MIN_GRADED - n)


def test_a_high_rho_with_a_low_lower_end_is_open_and_so_many_more_labels_would_settle_it() -> None:
    labels, scores = noisy(20, 0.2, seed=2)
    found = agreement_of(labels, scores)
    assert found.graded is not None
    assert found.graded.rho is not None
    assert found.graded.lower is not None
    assert found.graded.rho >= 0.80
    assert found.graded.lower <= 0.70
    assert (found.trusted, found.scarce) == (False, "graded")
    assert found.labels_needed is not None
    assert f"about {found.labels_needed:,} more label" in found.reason
    times = math.ceil((found.n + found.labels_needed) / found.n)
    assert agreement_of(labels * times, scores * times).trusted


@pytest.mark.parametrize(("minimum", "trusted"), [(0.80, True), (0.99, False), (0.0, True), (1.0, False)])
def test_the_minimum_may_be_set(minimum: float, trusted: bool) -> None:
    assert agreement_of(*noisy(200, 0.1), min_agreement=minimum).trusted is trusted
    assert pass_fail(100, 95, 100, 95, min_agreement=minimum).trusted is trusted


def test_a_low_minimum_does_not_lower_what_is_asked_of_the_lower_end() -> None:
    assert not agreement_of(*noisy(400, 0.35), min_agreement=0.1).trusted
    assert not pass_fail(400, 260, 400, 260, min_agreement=0.1).trusted


@pytest.mark.parametrize("minimum", [-0.1, 1.1, float("nan")])
def test_a_minimum_that_is_no_share_is_refused(minimum: float) -> None:
    with pytest.raises(ConfigurationError, match=r"min_agreement must be within 0\.\.1, got"):
        agreement_of(STEPS, STEPS, min_agreement=minimum)


pairs = st.lists(
    st.tuples(st.sampled_from(STEPS) | st.floats(0, 1), st.sampled_from(STEPS) | st.floats(0, 1)), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(pairs)
def test_any_labels_and_scores_give_a_verdict_that_keeps_to_its_rule(drawn: list[tuple[float, float]]) -> None:
    found = agreement_of([label for label, _ in drawn], [score for _, score in drawn])
    assert found.reason
    assert found.n == len(drawn) == found.confusion.n
    assert not (found.trusted and found.labels_needed)
    if found.trusted and found.graded is None:
        rates = (found.pass_fail.sensitivity, found.pass_fail.specificity)
        assert all(kind.rate is not None and kind.rate >= 0.8 and kind.lower > 0.7 for kind in rates)
    if found.trusted and found.graded is not None:
        assert found.graded.rho is not None
        assert found.graded.rho >= 0.80
        assert found.graded.lower is not None
        assert found.graded.lower > 0.70


# Labels


def labels_in(folder: Path, text: str | bytes, name: str = "labels.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def values(path: Path) -> dict[tuple[str, int], float]:
    return {place: label.value for place, label in read_labels(path).items()}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1", 1), ("0", 0), ("0.25", 0.25), (" .5 ", 0.5), ("1e-1", 0.1), ("true", 1), ("FALSE", 0), ("Pass", 1),
        ("fail", 0), ("YES", 1), (" no ", 0), ("-0", 0),
    ],
)  # fmt: skip
def test_a_label_in_csv_is_a_number_or_a_word(tmp_path: Path, written: str, value: float) -> None:
    assert values(labels_in(tmp_path, f"id,label\na,{written}\n")) == {("a", 0): value}


@pytest.mark.parametrize(
    ("written", "value"), [("1", 1), ("0.25", 0.25), ("true", 1), ("false", 0), ('"pass"', 1), ('"0.75"', 0.75)]
)
def test_a_label_in_jsonl_is_a_number_a_boolean_or_a_word(tmp_path: Path, written: str, value: float) -> None:
    path = labels_in(tmp_path, f'{{"id": "a", "label": {written}}}\n', "labels.jsonl")
    assert values(path) == {("a", 0): value}


def test_labels_may_name_a_trial_and_have_other_columns(tmp_path: Path) -> None:
    csv = labels_in(tmp_path, '\ufeffid,who,trial,label\r\na,"x\ny",0,1\r\na,me,1,0\r\nb,,,0.5\r\n')
    assert values(csv) == {("a", 0): 1, ("a", 1): 0, ("b", 0): 0.5}
    jsonl = labels_in(tmp_path, '{"id": 7, "label": 1, "trial": 2}\n\n{"id": 7, "label": 0, "trial": null}', "l.jsonl")
    assert values(jsonl) == {("7", 2): 1, ("7", 0): 0}


def test_each_of_several_labellers_has_a_column_and_may_leave_answers_out(tmp_path: Path) -> None:
    path = labels_in(tmp_path, "id,label_anna,label_ben\na,pass,fail\nb,pass,\nc,,0\n")
    assert values(path) == {("a", 0): 0.5, ("b", 0): 1, ("c", 0): 0}
    assert read_labels(path)["a", 0].votes == {"label_anna": 1, "label_ben": 0}


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("id,label\na,1\nb,\n", 3, "label must be a number within 0..1 or one of true/pass/yes/false/fail/no"),
        ("id,label\na,maybe\n", 2, "'maybe'"),
        ("id,label\na,1.01\n", 2, "'1.01'"),
        ("id,label\na,-1\n", 2, "'-1'"),
        ("id,label\na,nan\n", 2, "'nan'"),
        ("id,label\na,inf\n", 2, "'inf'"),
        ("id,label\n,1\n", 2, "id must be text or a number"),
        ("id,label,trial\na,1,-1\n", 2, "trial must be a whole number from 0 on"),
        ("id,label,trial\na,1,1.5\n", 2, "trial must be a whole number"),
        ('id,label\n"a\nb",1\nc,2\n', 4, "label must be"),
        ("id,label\na,1\nb,1\na,0\n", 4, "case 'a' has a label already, in line 2"),
        ("id,label,trial\na,1,\na,0,0\n", 3, "has a label already, in line 2"),
        ("id,label,trial\na,1,3\na,0,3\n", 3, "case 'a', trial 3, has a label already"),
        ("case,label\na,1\n", 2, "has no 'id'; columns: case, label"),
        ("id,lable\na,1\n", 2, "has no 'label'; columns: id, lable"),
        ("id,label\na\n", 2, "has 1 cells, the header has 2"),
        ("id,label_a,label_b\na,1,\nb,,\n", 3, "has no label: label_a, label_b are empty"),
        ("id,label_a,label_b\na,1,maybe\n", 2, "'maybe'"),
        ("id,label\n", None, "holds no labels"),
        ("", None, "has no header row"),
        (b"id,label\n\xff,1\n", 2, "is not UTF-8"),
    ],
)
def test_a_bad_line_in_csv_is_named(tmp_path: Path, text: str | bytes, line: int | None, expected: str) -> None:
    with pytest.raises(SuiteError) as caught:
        read_labels(labels_in(tmp_path, text))
    assert caught.value.line == line
    assert expected in str(caught.value)
    assert "labels.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ('{"id": "a", "label": 1}\n{"id": "b", "label": null}\n', 2, "got null"),
        ('{"id": "a", "label": 2}\n', 1, "got a number (2)"),
        ('{"id": "a", "label": 1' + "0" * 400 + "}\n", 1, "label must be"),
        ('{"id": "a", "label": [1]}\n', 1, "got a list"),
        ('{"id": true, "label": 1}\n', 1, "id must be text or a number, got a boolean"),
        ('{"id": null, "label": 1}\n', 1, "id must be"),
        ('{"id": "a", "label": 1, "trial": true}\n', 1, "trial must be"),
        ('{"id": "a", "label": 1, "trial": "' + "9" * 5000 + '"}\n', 1, "labels.jsonl:1"),
        ("{}\n", 1, "has no 'id'; columns: none"),
        ("[1]\n", 1, "must be an object"),
        ("\nnot json\n", 2, "not valid JSON"),
        ("\n", None, "holds no labels"),
    ],
)
def test_a_bad_line_in_jsonl_is_named(tmp_path: Path, text: str, line: int | None, expected: str) -> None:
    with pytest.raises(SuiteError) as caught:
        read_labels(labels_in(tmp_path, text, "labels.jsonl"))
    assert caught.value.line == line
    assert expected in str(caught.value)


# The command


def a_run(folder: Path, scores: Mapping[str, Score | list[Score] | None], *, failing: Iterable[str] = ()) -> Path:
    """A complete run in which a judge gave each case this score."""

    def answer(case: EvalCase) -> str:
        if case.id in failing:
            raise ValueError("told to fail")
        return "answer"

    suite = EvalSet("s", [EvalCase(id=case_id, prompt="p") for case_id in scores])
    scorers = [lambda case, response: scores[case.id]]
    Runner(answer, suite, scorers, output_path=folder / "RUN", progress="off").run_sync()
    return folder / "RUN"


def judged(value: float | None, *, name: str = "judge", by: str | None = BY, **more: Any) -> Score:
    errors = ["no verdict"] if value is None else []
    return Score(name, value, None if value is None else value >= 0.5, by=by, errors=errors, **more)


def calibrate(folder: Path, labels: Mapping[str, object], *words: str) -> Ended:
    rows = [json.dumps({"id": case_id, "label": label}) for case_id, label in labels.items()]
    labels_in(folder, "\n".join(rows), "labels.jsonl")
    return run_cli(folder, "calibrate", "RUN", "--labels", "labels.jsonl", *words)


LABELS = {f"c{number}": step for number, step in enumerate(STEPS * 4)}
AGREEING = {case_id: judged(label) for case_id, label in LABELS.items()}
OPPOSING = {case_id: judged(1 - label) for case_id, label in LABELS.items()}


def test_a_judge_that_agrees_is_trusted_and_exit_0(tmp_path: Path) -> None:
    a_run(tmp_path, AGREEING)
    ended = calibrate(tmp_path, LABELS)
    assert ended.code == 0
    assert ended.out.splitlines() == [
        "judge: trusted",
        "  m/correctness_v1@1",
        "  rho 1.00, its lower end 1.00 above 0.70",
        "",
        "  labels             20",
        "  Spearman’s rho     1.000   lower end 0.998",
        "  sensitivity        1.000   lower end 0.779   12 labels pass",
        "  specificity        1.000   lower end 0.688   8 labels fail",
        "  balanced accuracy  1.000   does not decide",
        "  Cohen’s kappa      1.000   does not decide",
        "",
        "                   judge: pass  judge: fail",
        "  label: pass               12            0",
        "  label: fail                0            8",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["RUN", "labels.jsonl"]


def test_pass_and_fail_labels_are_decided_by_sensitivity_and_specificity(tmp_path: Path) -> None:
    labels = {f"c{number}": "pass" if number % 2 else "fail" for number in range(40)}
    a_run(tmp_path, {case_id: judged(float(label == "pass")) for case_id, label in labels.items()})
    ended = calibrate(tmp_path, labels)
    assert ended.code == 0
    assert "sensitivity 1.00 and specificity 1.00, lower ends above 0.70" in ended.out
    assert "Spearman" not in ended.out
    ended = calibrate(tmp_path, {case_id: label for case_id, label in labels.items() if int(case_id[1:]) > 35})
    assert ended.code == 1
    assert "about 7 more labels of answers that" in " ".join(ended.out.split())


def test_several_labellers_give_the_human_ceiling_and_ties_are_left_out(tmp_path: Path) -> None:
    a_run(tmp_path, {f"c{number}": judged(float(number % 2)) for number in range(40)})
    rows = [f"c{number},{number % 2},{1 - number % 2 if number < 2 else number % 2}" for number in range(40)]
    labels_in(tmp_path, "\n".join(["id,label_anna,label_ben", *rows]))
    ended = run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv")
    assert ended.code == 0
    assert "labels             38" in ended.out
    assert "left out           2 answers on which people are evenly split" in ended.out
    assert "people             sensitivity 0.95, specificity 0.95, kappa 0.90" in ended.out
    assert "2 labellers, 40 answers with two labels or more" in ended.out
    (found,) = json.loads(run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv", "--json").out)
    assert found["ceiling"]["labellers"] == 2


def test_a_judge_that_disagrees_is_not_trusted_and_exit_1(tmp_path: Path) -> None:
    a_run(tmp_path, OPPOSING)
    ended = calibrate(tmp_path, LABELS)
    assert ended.code == 1
    assert ended.out.startswith("judge: not trusted\n")
    assert "rho -1.00 is below 0.80" in ended.out
    assert "label: pass                4            8" in ended.out


def test_a_judge_that_always_says_the_same_is_not_trusted_and_that_is_said(tmp_path: Path) -> None:
    a_run(tmp_path, {case_id: judged(1.0) for case_id in LABELS})
    ended = calibrate(tmp_path, LABELS)
    assert ended.code == 1
    assert "every score, is the same" in " ".join(ended.out.split())
    assert "Spearman" not in ended.out


def test_the_mean_of_several_samples_counts_before_the_value(tmp_path: Path) -> None:
    a_run(tmp_path, {case_id: judged(0.5, mean=label) for case_id, label in LABELS.items()})
    (found,) = json.loads(calibrate(tmp_path, LABELS, "--json").out)
    assert (found["graded"]["rho"], found["trusted"]) == (1.0, True)


def test_kappa_and_the_table_are_of_what_the_judge_said_passed(tmp_path: Path) -> None:
    """Not of its score: a judge may have another threshold."""
    scores = {case_id: Score("judge", label, label == 1.0, by=BY) for case_id, label in LABELS.items()}
    a_run(tmp_path, scores)
    (found,) = json.loads(calibrate(tmp_path, LABELS, "--json").out)
    assert found["confusion"] == {"labels": [False, True], "counts": [[8, 0], [8, 4]]}
    assert found["pass_fail"]["kappa"] < 1


def test_answers_without_a_score_are_left_out_and_counted(tmp_path: Path) -> None:
    scores: dict[str, Score | list[Score] | None] = {
        **AGREEING,
        "broken": judged(None),
        "silent": None,
        "failed": None,
    }
    a_run(tmp_path, scores, failing=["failed"])
    ended = calibrate(tmp_path, {**LABELS, "broken": 1, "silent": 1, "failed": 1})
    assert ended.code == 0
    assert "labels             20, and 3 without a score of this judge" in ended.out


def test_cases_without_a_label_do_not_count(tmp_path: Path) -> None:
    a_run(tmp_path, {**AGREEING, **{f"more{number}": judged(0.3) for number in range(30)}})
    (found,) = json.loads(calibrate(tmp_path, LABELS, "--json").out)
    assert (found["n"], found["unscored"], found["graded"]["rho"]) == (20, 0, 1.0)


def test_a_judge_that_scored_no_labelled_answer_is_not_trusted(tmp_path: Path) -> None:
    a_run(tmp_path, {**AGREEING, "alone": judged(1.0, name="other", by="m2/p@1")})
    ended = calibrate(tmp_path, LABELS)
    assert ended.code == 1
    assert "other: not trusted\n  m2/p@1\n  it has no score for any labelled answer" in ended.out
    assert "judge: trusted" in ended.out


def two_judges(folder: Path) -> Path:
    return a_run(
        folder,
        {
            case_id: [
                judged(label, name="good"),
                judged(1 - label, name="bad", by="m2/p@3"),
                judged(0.0, name="exact", by=None),
            ]
            for case_id, label in LABELS.items()
        },
    )


def test_each_judge_gets_its_own_verdict_and_deterministic_scorers_none(tmp_path: Path) -> None:
    two_judges(tmp_path)
    ended = calibrate(tmp_path, LABELS, "--json")
    assert ended.code == 1
    found = json.loads(ended.out)
    assert [(one["judge"], one["by"], one["trusted"]) for one in found] == [
        ("bad", "m2/p@3", False),
        ("good", BY, True),
    ]
    assert [line for line in calibrate(tmp_path, LABELS).out.splitlines() if "trusted" in line] == [
        "bad: not trusted",
        "good: trusted",
    ]


def test_one_score_name_given_by_two_judges_is_two_judges(tmp_path: Path) -> None:
    by = ["m/p@1", "m/p@2"]
    a_run(tmp_path, {case_id: judged(label, by=by[n % 2]) for n, (case_id, label) in enumerate(LABELS.items())})
    found = json.loads(calibrate(tmp_path, LABELS, "--json").out)
    assert [(one["by"], one["n"], one["unscored"]) for one in found] == [("m/p@1", 10, 10), ("m/p@2", 10, 10)]


def test_one_judge_may_be_looked_at_alone(tmp_path: Path) -> None:
    two_judges(tmp_path)
    assert calibrate(tmp_path, LABELS, "--judge", "good").code == 0
    assert calibrate(tmp_path, LABELS, "--judge", "bad").code == 1
    ended = calibrate(tmp_path, LABELS, "--judge", "god")
    assert ended.code == 2
    assert "did you mean 'good'?" in ended.err


def test_the_minimum_is_a_flag(tmp_path: Path) -> None:
    rng = random.Random(5)
    a_run(tmp_path, {key: judged(min(max(label + rng.uniform(-0.2, 0.2), 0), 1)) for key, label in LABELS.items()})
    assert calibrate(tmp_path, LABELS).code == 0
    ended = calibrate(tmp_path, LABELS, "--min-agreement", "0.99")
    assert ended.code == 1
    assert "is below 0.99" in " ".join(ended.out.split())


@pytest.mark.parametrize("value", ["1.5", "-0.1", "high", "nan"])
def test_a_minimum_that_is_none_is_exit_2(tmp_path: Path, value: str) -> None:
    a_run(tmp_path, AGREEING)
    ended = calibrate(tmp_path, LABELS, "--min-agreement", value)
    assert ended.code == 2
    assert "Traceback" not in ended.err


def test_a_label_of_no_case_in_the_run_is_exit_2_with_its_line(tmp_path: Path) -> None:
    a_run(tmp_path, AGREEING)
    ended = calibrate(tmp_path, {**LABELS, "c99": 1, "c98": 0})
    assert ended.code == 2
    assert "labels.jsonl:21: case 'c99' is not in the run RUN (nor are 1 others)" in ended.err
    assert ended.out == ""


def test_a_label_of_a_case_that_an_unfinished_run_has_not_asked_says_so(tmp_path: Path) -> None:
    (a_run(tmp_path, AGREEING) / "metrics.json").unlink()
    assert calibrate(tmp_path, LABELS).code == 0
    ended = calibrate(tmp_path, {**LABELS, "c99": 1})
    assert ended.code == 2
    assert "the run is not complete" in ended.err


def test_a_run_without_a_judge_is_exit_2(tmp_path: Path) -> None:
    a_run(tmp_path, {case_id: judged(label, by=None) for case_id, label in LABELS.items()})
    ended = calibrate(tmp_path, LABELS)
    assert ended.code == 2
    assert "RUN has no scores of a judge" in ended.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["calibrate"], "RUN"),
        (["calibrate", "RUN"], "--labels"),
        (["calibrate", "nowhere", "--labels", "labels.jsonl"], "nowhere is not a run directory"),
        (["calibrate", "RUN", "--labels", "nowhere.csv"], "nowhere.csv: no such file"),
        (["calibrate", "RUN", "--labels", "."], "directory"),
        (["calibrate", "RUN", "--labels", "labels.jsonl", "-o", "."], "it is a folder"),
        (["calibrate", "RUN", "--labels", "labels.jsonl", "-o", "no/where.json"], "no such folder"),
    ],
)
def test_a_mistake_is_exit_2_and_named(tmp_path: Path, words: list[str], expected: str) -> None:
    a_run(tmp_path, AGREEING)
    labels_in(tmp_path, '{"id": "c0", "label": 1}', "labels.jsonl")
    ended = run_cli(tmp_path, *words)
    assert ended.code == 2
    assert expected in ended.err
    assert "Traceback" not in ended.err


def trials(folder: Path) -> None:
    """A journal in which each of ten cases was asked twice, and judged right the second time alone."""
    write_journal(
        folder / "RUN",
        [
            a_record(id=f"c{index}", index=index, trial=trial, scores=[judged(index / 10 if trial else 0.5)])
            for index in range(10)
            for trial in (0, 1)
        ],
    )


def test_a_label_is_of_the_trial_that_it_names(tmp_path: Path) -> None:
    trials(tmp_path)
    rows = "".join(f"c{index},{index / 10},{{trial}}\n" for index in range(10))
    labels_in(tmp_path, "id,label,trial\n" + rows.format(trial=1))
    assert run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv").code == 0
    labels_in(tmp_path, "id,label,trial\n" + rows.format(trial=0))
    ended = run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv")
    assert ended.code == 1
    assert "undefined" in ended.out
    labels_in(tmp_path, "id,label,trial\n" + rows.format(trial=2))
    ended = run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv")
    assert ended.code == 2
    assert "labels.csv:2: case 'c0', trial 2, is not in the run" in ended.err


def test_where_a_case_was_asked_several_times_a_label_must_say_which_answer_it_is_of(tmp_path: Path) -> None:
    trials(tmp_path)
    labels_in(tmp_path, "id,label\nc4,1\n")
    ended = run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv")
    assert ended.code == 2
    assert "labels.csv:2: case 'c4' was asked several times: say in `trial` which" in ended.err


HOSTILE = [
    "\x1b[2Jgone", "../../etc/passwd", "=cmd|' /C calc'!A0", "a\nb", "{{7*7}}", "%s%n", "a,b\"c'", "\u202eevil",
    "日本" * 200, "<script>", "$(rm -rf .)", " spaced ",
]  # fmt: skip


def test_hostile_ids_are_matched_as_they_are(tmp_path: Path) -> None:
    labels = {case_id: number / 20 for number, case_id in enumerate(HOSTILE)}
    a_run(tmp_path, {case_id: judged(label) for case_id, label in labels.items()})
    (found,) = json.loads(calibrate(tmp_path, labels, "--json").out)
    assert (found["n"], found["graded"]["rho"]) == (len(HOSTILE), 1.0)


@pytest.mark.parametrize("case_id", [*HOSTILE, "\ud800"], ids=ascii)
def test_a_hostile_id_in_an_error_cannot_steer_the_terminal_or_fill_it(tmp_path: Path, case_id: str) -> None:
    a_run(tmp_path, AGREEING)
    ended = calibrate(tmp_path, {**LABELS, case_id: 1})
    assert ended.code == 2
    assert "labels.jsonl:21: case " in ended.err
    assert all(character.isprintable() or character == "\n" for character in ended.err.replace("�", "?"))
    assert len(ended.err) < 200


def test_the_text_fits_80_columns_and_cannot_steer_the_terminal_whatever_the_judge_is_called(tmp_path: Path) -> None:
    name, by = "judge\x1b[31m" * 30, "日本\u202e" * 90
    a_run(tmp_path, {key: judged(1 - label, name=name, by=by) for key, label in LABELS.items()})
    for words in ([], ["--min-agreement", "0.123456789"]):
        ended = calibrate(tmp_path, {**LABELS}, *words)
        assert ended.code == 1
        assert max(len(line) + sum(one in "日本" for one in line) for line in ended.out.splitlines()) <= 80
        assert "\x1b" not in ended.out
        assert "\u202e" not in ended.out


# The file


def test_the_file_holds_the_verdict_and_what_it_was_made_from(tmp_path: Path) -> None:
    a_run(tmp_path, AGREEING)
    ended = calibrate(tmp_path, LABELS, "-o", "calibration.json")
    assert ended.code == 0
    assert "calibration.json" in ended.err
    written = json.loads((tmp_path / "calibration.json").read_bytes())
    digest = hashlib.sha256((tmp_path / "labels.jsonl").read_bytes()).hexdigest()
    assert datetime.fromisoformat(written.pop("created")).tzinfo is not None
    assert (written["v"], written["judge"], written["by"], written["labels"]) == (2, "judge", BY, "graded")
    assert (written["n"], written["cases"], written["trusted"], written["min_agreement"]) == (20, 20, True, 0.8)
    assert written["graded"]["rho"] == 1.0
    assert written["pass_fail"]["sensitivity"]["rate"] == 1.0
    assert written["labels_digest"] == digest


def test_several_judges_are_a_list_and_each_is_found_by_its_by(tmp_path: Path) -> None:
    two_judges(tmp_path)
    assert calibrate(tmp_path, LABELS, "-o", "calibration.json").code == 1
    path = tmp_path / "calibration.json"
    assert isinstance(json.loads(path.read_bytes()), list)
    good, bad = calibration_of(path, BY), calibration_of(path, "m2/p@3")
    assert good is not None
    assert bad is not None
    assert (good.judge, good.trusted, bad.judge, bad.trusted) == ("good", True, "bad", False)
    assert calibration_of(path, "m3/p@1") is None
    assert is_trusted(path, BY)[0]
    assert not is_trusted(path, "m2/p@3")[0]


def test_a_failed_calibration_is_written_too_and_replaces_a_good_one(tmp_path: Path) -> None:
    a_run(tmp_path, AGREEING)
    calibrate(tmp_path, LABELS, "-o", "calibration.json")
    opposite = {case_id: 1 - label for case_id, label in LABELS.items()}
    assert calibrate(tmp_path, opposite, "-o", "calibration.json").code == 1
    trusted, reason = is_trusted(tmp_path / "calibration.json", BY)
    assert not trusted
    assert "is not trusted: rho -1.00 is below 0.80 (rho -1.00 on 20 labels" in reason


def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    a_run(tmp_path, AGREEING)
    for name in ("labels.jsonl", "RUN/run.json"):
        calibrate(tmp_path, LABELS)
        before = (tmp_path / name).read_bytes()
        ended = calibrate(tmp_path, LABELS, "-o", name)
        assert ended.code == 2
        assert "it is not overwritten" in ended.err
        assert (tmp_path / name).read_bytes() == before


def test_nothing_is_written_when_the_labels_are_wrong(tmp_path: Path) -> None:
    a_run(tmp_path, AGREEING)
    assert calibrate(tmp_path, {"c99": 1}, "-o", "calibration.json").code == 2
    assert not (tmp_path / "calibration.json").exists()


def an_entry(**changes: Any) -> Calibration:
    entry = calibration(agreement_of(STEPS * 4, STEPS * 4), labels_digest="0" * 64, created="2025-03-01T10:00:00+00:00")
    return msgspec.structs.replace(entry, **changes)


def written(folder: Path, *entries: Calibration) -> Path:
    path = folder / "calibration.json"
    path.write_bytes(msgspec.json.encode(entries[0] if len(entries) == 1 else entries))
    return path


def test_a_calibrated_judge_is_trusted_with_its_figures(tmp_path: Path) -> None:
    path = written(tmp_path, an_entry())
    assert is_trusted(path, BY) == (True, f"{path}: {BY} is calibrated: rho 1.00 on 20 labels, 2025-03-01")
    assert is_trusted(str(path), BY)[0]
    assert calibration_of(path, BY) == an_entry()


def test_a_missing_file_is_not_trusted_and_said(tmp_path: Path) -> None:
    assert calibration_of(tmp_path / "nowhere.json", BY) is None
    trusted, reason = is_trusted(tmp_path / "nowhere.json", BY)
    assert not trusted
    assert "there is no calibration file" in reason


def test_the_calibration_of_another_judge_is_not_trusted_and_both_are_named(tmp_path: Path) -> None:
    trusted, reason = is_trusted(written(tmp_path, an_entry()), "m/correctness_v1@2")
    assert not trusted
    assert BY in reason
    assert "m/correctness_v1@2" in reason


def test_sensitivity_and_specificity_are_said_of_a_judge_of_passes_and_fails(tmp_path: Path) -> None:
    entry = calibration(pass_fail(20, 19, 20, 20), labels_digest="0" * 64, created="2025-03-01T10:00:00+00:00")
    assert "sensitivity 0.95, specificity 1.00 on 40 labels" in is_trusted(written(tmp_path, entry), BY)[1]


def test_of_two_entries_for_one_judge_the_failed_one_counts(tmp_path: Path) -> None:
    for order in ([True, False], [False, True]):
        path = written(tmp_path, *(an_entry(judge=str(trusted), trusted=trusted) for trusted in order))
        assert not is_trusted(path, BY)[0]


def test_a_file_from_a_newer_version_is_not_trusted_and_said(tmp_path: Path) -> None:
    trusted, reason = is_trusted(written(tmp_path, an_entry(v=3)), BY)
    assert not trusted
    assert "newer Steelyard" in reason


OLD = {"v": 1, "judge": "judge", "by": BY, "rho": 1.0, "interval": [1.0, 1.0], "kappa": 1.0, "n": 20, "trusted": True,
       "min_spearman": 0.8, "labels_digest": "0" * 64, "created": "2025-03-01T10:00:00+00:00"}  # fmt: skip


def test_a_file_of_the_first_version_is_refused_with_the_remedy_and_may_be_written_over(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(OLD))
    trusted, reason = is_trusted(path, BY)
    assert not trusted
    assert f"make it again with `steelyard calibrate RUN --labels FILE -o {path}`" in reason
    a_run(tmp_path, AGREEING)
    assert calibrate(tmp_path, LABELS, "-o", "calibration.json").code == 0
    assert is_trusted(path, BY)[0]


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b"[{}]", b"7", b"\xff", b"[" * 100_000, b'{"trusted": true}'])
def test_a_file_that_is_no_calibration_is_not_trusted_and_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(data)
    trusted, reason = is_trusted(path, BY)
    assert not trusted
    assert f"{path} is not a calibration file" in reason
    with pytest.raises(ConfigurationError, match="not a calibration file"):
        calibration_of(path, BY)


def test_an_empty_list_vouches_for_nobody(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(b"[]")
    assert is_trusted(path, BY)[0] is False
    assert calibration_of(path, BY) is None


def test_a_folder_in_the_files_place_is_not_trusted(tmp_path: Path) -> None:
    assert is_trusted(tmp_path, BY)[0] is False
