"""Metrics of a whole run: functions over all records, built in and the user's own; none of them hurts a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from steelyard import EvalCase, EvalSet, MetricValue, Record, Result, Runner, Score
from steelyard.engine.base import CancellationToken
from steelyard.errors import ConfigurationError, SuiteError
from steelyard.run.config import build_suite
from steelyard.run.run_metrics import Accuracy, Classification, CorpusBleu, Majority, as_run_metrics
from tests.support.cli import run_cli

LABELS = ["spam", "ham", "news"]


def answer(case: EvalCase) -> str:
    number = int(case.id[1:])
    if number == 5:
        raise ValueError("no")
    return f"I say: {LABELS[(number + (number % 4 == 0)) % 3]}"


def suite(count: int = 60) -> EvalSet:
    return EvalSet("mail", [EvalCase(id=f"c{n}", prompt="?", expected=LABELS[n % 3]) for n in range(count)])


def run_of(*metrics: Any, folder: Path | None = None, **options: Any) -> Result:
    runner = Runner(
        answer, suite(), ["contains"], run_metrics=metrics, progress="off", output_path=folder, retries=0, **options
    )
    return runner.run_sync()


SAYS = {"pattern": "I say: (.*)"}


def test_label_metrics_of_a_run_are_those_of_scikit_learn(tmp_path: Path) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    result = run_of(Classification(extract=SAYS), Accuracy(extract=SAYS), folder=tmp_path / "run")
    found = result.typed_metrics.run_metrics
    records = [record for record in result.responses if record.status == "ok"]
    truths = [record.expected for record in records]
    predicted = [record.response_text.removeprefix("I say: ") for record in records]
    assert found["accuracy"].value == pytest.approx(sklearn.accuracy_score(truths, predicted))
    assert found["accuracy"].n == 59
    for average in ("macro", "micro", "weighted"):
        expected = sklearn.f1_score(truths, predicted, average=average)
        assert found[f"classification.f1.{average}"].value == pytest.approx(expected)
    report = sklearn.classification_report(truths, predicted, output_dict=True)
    for label in LABELS:
        assert found[f"classification.label.{label}.recall"].value == pytest.approx(report[label]["recall"])
    assert Result.load(tmp_path / "run").typed_metrics.run_metrics == found


def test_what_is_predicted_may_be_a_score_and_what_is_true_in_the_metadata() -> None:
    def kind(case: EvalCase, response: Any) -> Score:
        return Score("kind", label=response.response_text.removeprefix("I say: ").upper())

    cases = [EvalCase(id=f"c{n}", prompt="?", metadata={"is": {"kind": LABELS[n % 3]}}) for n in range(20)]
    metric = Accuracy(score="kind", truth="is.kind", ignore_case=True)
    result = Runner(answer, EvalSet("s", cases), [kind], run_metrics=[metric], progress="off", retries=0).run_sync()
    assert result.typed_metrics.run_metrics["accuracy"].value == pytest.approx(14 / 19)


def test_what_is_too_large_for_a_record_is_no_truth() -> None:
    pytest.importorskip("sacrebleu")
    cases = [EvalCase(id="a", prompt="?", expected="x"), EvalCase(id="b", prompt="?", expected=["x", "y" * 20_000])]
    metrics = [Accuracy(), CorpusBleu()]
    runner = Runner(lambda case: "x", EvalSet("s", cases), ["exact"], run_metrics=metrics, progress="off")
    found = runner.run_sync().typed_metrics.run_metrics
    assert (found["accuracy"].value, found["accuracy"].n) == (1.0, 1)
    assert found["corpus_bleu"].n == 1


def steps(records: Iterator[Record]) -> dict[str, Any]:
    frame = pd.DataFrame({"id": record.id, "chars": len(record.response_text or "")} for record in records)
    return {
        "chars": MetricValue(frame["chars"].mean(), ci95=(1.0, 20.0), unit="chars", better="lower", n=len(frame)),
        "cases": np.int64(len(frame)),
    }


def test_a_function_gets_all_records_one_at_a_time_in_case_order(tmp_path: Path) -> None:
    kinds: list[str] = []

    def ids(records: Iterator[Record]) -> int:
        kinds.append(type(records).__name__)
        return len([record.id for record in records] == [f"c{n}" for n in range(60)] and [1] * 60)

    found = run_of(steps, ids, folder=tmp_path / "run", low_memory=True).typed_metrics.run_metrics
    assert kinds == ["generator"]
    assert found["ids"].value == found["steps.cases"].value == 60
    assert (found["steps.chars"].unit, found["steps.chars"].better, found["steps.chars"].n) == ("chars", "lower", 60)


def broken(records: Iterator[Record]) -> float:
    raise ZeroDivisionError("a mistake")


def not_finite(records: Iterator[Record]) -> float:
    return float("nan")


def texts(records: Iterator[Record]) -> str:
    return "good"


async def later(records: Iterator[Record]) -> float:
    return 1.0


def ends(records: Iterator[Record]) -> float:
    raise SystemExit(3)


def test_one_that_fails_is_reported_and_hurts_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = run_of(broken, not_finite, texts, later, ends, steps, folder=tmp_path / "run")
    found = result.typed_metrics.run_metrics
    assert result.complete
    assert found["steps.cases"].value == 60
    assert "a mistake" in (found["broken"].error or "")
    assert "not a finite number" in (found["not_finite"].error or "")
    assert "gives str" in (found["texts"].error or "")
    assert "async" in (found["later"].error or "")
    assert found["ends"].error
    assert "the run metric broken failed" in caplog.text
    assert "failed: ZeroDivisionError: a mistake" in result.summary()
    gated = result.gate("metric.broken>=0.5")
    assert not gated
    assert "the metric failed" in gated.broken[0].reason


def test_they_are_figures_for_rules_and_reports(tmp_path: Path) -> None:
    result = run_of(Classification(extract=SAYS), steps, folder=tmp_path / "run")
    assert result.gate("metric.classification.f1.macro>=50%", "metric.steps.chars<=12", "metric.steps.chars.ci_high<21")
    assert not result.gate("metric.classification.label.spam.recall.ci_low>=0.99")
    with pytest.raises(ConfigurationError, match="did you mean 'metric"):
        result.gate("metric.clasification.f1.macro>=0.5")
    text = run_cli(tmp_path, "report", "run").out
    assert "classification.f1.macro" in text
    assert "<code>steps&#46;chars</code>" in run_cli(tmp_path, "report", "run", "-f", "md").out


def test_resume_and_update_compute_them_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = run_of(Classification(extract=SAYS), folder=run).metrics["run_metrics"]
    lines = (run / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.json").unlink()
    (run / "outputs.jsonl").write_bytes(b"".join(lines[:25]))
    assert run_of(Classification(extract=SAYS), folder=run).metrics["run_metrics"] == whole
    runner = Runner(
        answer, suite(), ["contains"], run_metrics=[Accuracy(extract=SAYS)], progress="off", output_path=run, retries=0
    )
    updated = runner.run_sync(if_complete="update")
    assert list(updated.typed_metrics.run_metrics) == ["accuracy"]


def test_one_that_never_ends_does_not_hold_up_a_cancelled_run(tmp_path: Path) -> None:
    token, begun = CancellationToken(), threading.Event()

    def endless(records: Iterator[Record]) -> float:
        begun.set()
        token.cancel("enough")
        threading.Event().wait()
        return 1.0

    runner = Runner(
        answer, suite(), ["contains"], run_metrics=[endless], progress="off", output_path=tmp_path / "run", token=token,
        retries=0,
    )  # fmt: skip
    result = runner.run_sync()
    assert begun.is_set()
    assert not result.complete
    assert (result.typed_metrics.n, result.typed_metrics.stopped) == (60, "enough")
    assert run_of(steps, folder=tmp_path / "run").complete


def test_majority_is_over_trials() -> None:
    answers = {"c0": ["a", "a", "b"], "c1": ["b", "c", "b"], "c2": ["a", "b", "c"]}
    asked: dict[str, int] = {}

    def target(case: EvalCase) -> str:
        asked[case.id] = asked.get(case.id, -1) + 1
        return answers[case.id][asked[case.id]]

    cases = EvalSet("s", [EvalCase(id=name, prompt="?", expected="a") for name in answers])
    result = Runner(
        target,
        cases,
        ["exact"],
        trials=3,
        run_metrics=[Majority(k=[1, 3]), Majority(name="all"), Majority(name="ten", k=10)],
        progress="off",
        parallelism=1,
    ).run_sync()
    found = result.typed_metrics.run_metrics
    assert found["majority.1"].value == pytest.approx(result.pass_rate) == pytest.approx((2 / 3 + 0 + 1 / 3) / 3)
    assert found["majority.3"].value == found["all.3"].value == pytest.approx((1 + 0 + 1 / 3) / 3)
    assert "no case has as many verdicts" in (found["ten"].error or "")


def test_corpus_bleu_is_sacrebleus() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    rng = np.random.default_rng(2)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "some", "more", "of", "it"]
    wanted = [" ".join(rng.choice(words, 12)) for _ in range(40)]
    given = [" ".join(word if rng.random() < 0.8 else "dog" for word in text.split()) for text in wanted]
    cases = [EvalCase(id=f"c{n}", prompt="?", expected=text) for n, text in enumerate(wanted)]
    result = Runner(
        lambda case: given[int(case.id[1:])], EvalSet("s", cases), run_metrics=[CorpusBleu()], progress="off"
    ).run_sync()
    found = result.typed_metrics.run_metrics["corpus_bleu"]
    assert found.value == pytest.approx(sacrebleu.corpus_bleu(given, [wanted]).score)
    low, high = found.ci95
    assert low < found.value < high
    boot = sacrebleu.metrics.BLEU().corpus_score(given, [wanted], n_bootstrap=1000)
    assert (high - low) / 2 == pytest.approx(boot._ci, rel=0.35)


SUITE = """
target: {{simulated: {{}}}}
cases: [{{prompt: "2+2", expected: "4"}}]
run_metrics:
  - {metric}
"""


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("accuracy", "accuracy"),
        ("classification: {labels: [spam, 3], ignore_case: true}", "classification"),
        ("majority: {k: [1, 3]}", "majority"),
        ("corpus_bleu: {name: bleu}", "bleu"),
        ("python: mine.py:f1", "f1"),
        ("python: {function: mine.py:f1, name: mine}", "mine"),
        ("python: {class: mine.py:Cut, at: 3}", "Cut"),
    ],
)
def test_a_suite_names_them(tmp_path: Path, metric: str, name: str) -> None:
    (tmp_path / "s.yaml").write_text(SUITE.format(metric=metric))
    code = "def f1(records):\n    return 0.5\n\nclass Cut:\n    def __init__(self, at):\n        self.at = at\n"
    (tmp_path / "mine.py").write_text(code + "    def __call__(self, records):\n        return self.at\n")
    (found,) = build_suite(tmp_path / "s.yaml").run_metrics
    assert found.name == name
    assert json.dumps(found.identity())


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("acuracy", "no run metric is named 'acuracy'; did you mean 'accuracy'?"),
        ("majority: {k: 0}", "k must be a number >= 1"),
        ("classification: {score: a, extract: last_line}", "give score or extract"),
        ("corpus_bleu: {tokens: words}", "tokens must be one of"),
        ("classification: {labels: spam}", "labels must be a list"),
        ("accuracy: {lables: [a]}", "did you mean 'labels'?"),
    ],
)
def test_a_mistake_names_its_place(tmp_path: Path, metric: str, message: str) -> None:
    (tmp_path / "s.yaml").write_text(SUITE.format(metric=metric))
    with pytest.raises(SuiteError) as problem:
        build_suite(tmp_path / "s.yaml")
    assert message in str(problem.value)
    assert "run_metrics[0]" in str(problem.value)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two run metrics are named 'accuracy'"):
        as_run_metrics(["accuracy", Accuracy()])
