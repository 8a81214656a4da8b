"""Cases of a group count together: from the suite through the record to the figures, whoever reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Result, Runner
from steelyard.errors import SuiteError
from steelyard.stats.intervals import BoundedMean, clopper_pearson
from steelyard.suite.identity import case_fingerprint
from tests.support.cli import run_cli


def answer(case: EvalCase) -> str:
    """Right for all questions to a document but those to the first two."""
    return "yes" if case.group is None or int(case.group) >= 2 else "no"


def cases(documents: int = 8, questions: int = 5) -> list[EvalCase]:
    return [
        EvalCase(id=f"{document}-{number}", prompt="?", expected="yes", group=str(document))
        for document in range(documents)
        for number in range(questions)
    ]


def run_of(folder: Path | None = None, **more: Any) -> Result:
    suite = EvalSet("documents", cases())
    return Runner(answer, suite, ["exact"], progress="off", output_path=folder, **more).run_sync()


def test_intervals_are_over_groups_and_say_over_how_many(tmp_path: Path) -> None:
    metrics = run_of(tmp_path / "run").typed_metrics
    assert (metrics.pass_rate, metrics.groups) == (0.75, 8)
    expected = clopper_pearson(6, 8)
    assert metrics.pass_rate_ci95 == pytest.approx(expected)
    assert metrics.scores["exact"].mean_ci95 == metrics.scores["exact"].pass_rate_ci95 == pytest.approx(expected)
    assert not metrics.trials
    summary = run_cli(tmp_path, "report", "run", "-f", "text").out
    assert "over 8 groups" in summary


def test_a_record_has_its_group_and_an_unfinished_run_is_read_with_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = run_of(run).typed_metrics
    assert {record.group for record in Result.load(run).iter_responses()} == {str(number) for number in range(8)}
    (run / "metrics.json").unlink()
    replayed = Result.load(run).typed_metrics
    assert (replayed.groups, replayed.pass_rate_ci95) == (8, pytest.approx(whole.pass_rate_ci95))


def test_trials_of_grouped_cases_count_once_more_together(tmp_path: Path) -> None:
    once, thrice = run_of().typed_metrics, run_of(tmp_path / "run", trials=3).typed_metrics
    assert thrice.pass_rate_ci95 == pytest.approx(once.pass_rate_ci95)
    assert thrice.trials
    assert thrice.trials.groups == 8
    (tmp_path / "run" / "metrics.json").unlink()
    replayed = Result.load(tmp_path / "run").typed_metrics
    assert replayed.trials
    assert replayed.trials.pass_hat_k_ci95 == thrice.trials.pass_hat_k_ci95
    assert replayed.pass_rate_ci95 == thrice.pass_rate_ci95


def test_an_unfinished_run_of_several_trials_has_the_rates_of_the_finished_one(tmp_path: Path) -> None:
    """Read back from its journal it counted trials of one case as so many cases."""
    rng = {f"{number}": number % 3 for number in range(9)}

    def flaky(case: EvalCase, context: Any) -> str:
        if rng[case.id] == 0:
            raise ValueError("no")
        return "yes" if context.trial <= rng[case.id] - 1 else "no"

    suite = EvalSet("s", [EvalCase(id=str(number), prompt="?", expected="yes") for number in range(9)])
    options: dict[str, Any] = {"trials": 3, "retries": 0, "progress": "off", "output_path": tmp_path / "run"}
    whole = Runner(flaky, suite, ["exact"], **options).run_sync().typed_metrics
    (tmp_path / "run" / "metrics.json").unlink()
    replayed = Result.load(tmp_path / "run").typed_metrics
    assert whole.pass_rate_all == pytest.approx((3 * 1 / 3 + 3 * 2 / 3) / 9)
    for name in ("pass_rate", "pass_rate_ci95", "pass_rate_all", "pass_rate_all_ci95"):
        assert getattr(replayed, name) == pytest.approx(getattr(whole, name)), name
    expected = BoundedMean([1 / 3] * 3 + [2 / 3] * 3).interval()
    assert whole.pass_rate_ci95 == pytest.approx(expected)


def test_a_run_of_some_of_the_cases_has_their_groups(tmp_path: Path) -> None:
    metrics = run_of(tmp_path / "run", limit=12).typed_metrics
    assert (metrics.groups, metrics.n) == (3, 12)


def test_a_group_is_not_part_of_what_is_asked() -> None:
    one, other = EvalCase(id="a", prompt="?", group="x"), EvalCase(id="a", prompt="?")
    assert case_fingerprint(one) == case_fingerprint(other)


def suite_file(folder: Path, rows: list[dict[str, Any]], **more: Any) -> Path:
    (folder / "cases.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "suite.yaml"
    path.write_text(json.dumps({"id": "s", "cases": "cases.jsonl", **more}))
    return path


def test_a_column_named_in_the_suite_is_the_group_and_stays_metadata(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "?", "document": 7}, {"id": "b", "prompt": "?", "document": None}]
    found = list(EvalSet.from_yaml(suite_file(tmp_path, rows, group="document")))
    assert [case.group for case in found] == ["7", None]
    assert found[0].metadata == {"document": 7}
    fields = {"prompt": "{{ prompt }}!", "id": "{{ id }}"}
    templated = list(EvalSet.from_yaml(suite_file(tmp_path, rows, group="document", fields=fields)))
    assert [(case.group, case.prompt) for case in templated] == [("7", "?!"), (None, "?!")]
    inside = [{"id": "a", "prompt": "?", "metadata": {"document": "x"}}]
    assert [case.group for case in EvalSet.from_yaml(suite_file(tmp_path, inside, group="document"))] == ["x"]


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ({"id": "a", "prompt": "?"}, {"group": "document"}, "has no 'document', by which the suite groups its cases"),
        ({"id": "a", "prompt": "?", "group": ["x"]}, {}, "group must be text or a number, got a list"),
        ({"id": "a", "prompt": "?"}, {"group": ["x"]}, "group must be the name of a column, got a list"),
    ],
)
def test_a_bad_group_is_named(tmp_path: Path, row: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(SuiteError, match=message):
        list(EvalSet.from_yaml(suite_file(tmp_path, [row], **more)))
