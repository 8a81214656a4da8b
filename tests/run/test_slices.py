"""Slices, conditions and samples of whole runs: the same figures by run, resume, update, scoring and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Result, Runner
from steelyard.errors import ConfigurationError
from tests.support.cli import run_cli

CATEGORIES = ["math", "law", "safety"]


ASKED: list[str] = []


def answer(case: EvalCase) -> str:
    ASKED.append(case.id)
    if case.id == "c7":
        raise ValueError("no")
    return "yes" if int(case.id[1:]) % 4 else "no"


def suite(count: int = 30) -> EvalSet:
    cases = [
        EvalCase(id=f"c{n}", prompt="?", expected="yes", metadata={"category": CATEGORIES[n % 3], "level": n % 2})
        for n in range(count)
    ]
    return EvalSet("sliced", cases)


def run_of(folder: Path | None, **options: Any) -> Result:
    return Runner(answer, suite(), ["exact"], progress="off", output_path=folder, **options).run_sync()


def plain(result: Result, *leave: str) -> list[dict[str, Any]]:
    """The slices without times, which differ from run to run."""
    return [{name: value for name, value in one.items() if name != "latency"} for one in result.metrics["slices"]]


def test_a_slice_of_all_has_the_figures_of_the_run(tmp_path: Path) -> None:
    cases = [EvalCase(id=f"c{n}", prompt="?", expected="yes", metadata={"all": 1}) for n in range(30)]
    result = Runner(answer, EvalSet("s", cases), ["exact"], progress="off", by=("all",), trials=2).run_sync()
    metrics, (one,) = result.typed_metrics, result.typed_metrics.slices
    for name in (
        "n",
        "passed",
        "scored",
        "pass_rate",
        "pass_rate_ci95",
        "pass_rate_all",
        "pass_rate_all_ci95",
        "error_rate",
    ):
        assert getattr(one, name) == getattr(metrics, name), name
    assert one.scores == metrics.scores
    assert one.latency["time_to_last_token"] == metrics.latency["time_to_last_token"]


def test_resume_report_and_memory_have_the_same_slices(tmp_path: Path) -> None:
    whole = plain(run_of(tmp_path / "a", by=("category", "level")))
    assert [one["value"] for one in whole] == ["law", "math", "safety", "0", "1"]
    assert plain(run_of(None, by=("category", "level"))) == whole
    assert plain(run_of(tmp_path / "low", by=("category", "level"), low_memory=True)) == whole
    run_of(tmp_path / "b")
    assert plain(Result.load(tmp_path / "b", by=["category", "level"])) == whole
    run = tmp_path / "a"
    lines = (run / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.json").unlink()
    (run / "outputs.jsonl").write_bytes(b"".join(lines[:17]))
    assert sum(one.n for one in Result.load(run).typed_metrics.slices if one.key == "category") == 17
    assert plain(run_of(run, by=("category", "level"))) == whole


def test_an_update_adds_slices_that_are_asked_for_later_and_asks_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_of(run, retries=0)
    ASKED.clear()
    runner = Runner(answer, suite(), ["exact"], progress="off", output_path=run, by=("category",), retries=0)
    updated = runner.run_sync(if_complete="update")
    assert ASKED == ["c7"]
    assert plain(updated) == plain(run_of(tmp_path / "new", by=("category",), retries=0))


def test_scoring_again_keeps_selection_and_slices(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def answer(case):\n    return 'yes' if int(case.id[1:]) % 4 else 'no'\n")
    cases = "\n".join(
        json.dumps({"id": f"c{n}", "prompt": "?", "expected": "yes", "metadata": {"category": CATEGORIES[n % 3]}})
        for n in range(30)
    )
    (tmp_path / "c.jsonl").write_text(cases)
    (tmp_path / "s.yaml").write_text(
        "target: {python: a.py:answer}\ncases: c.jsonl\nscorers: [exact]\nby: [category]\n"
        "gate: {rules: ['pass_rate[category=law]>=0.1']}\n"
    )
    ended = run_cli(
        tmp_path, "run", "s.yaml", "-o", "run", "--sample", "12", "--seed", "7", "--where", "category!=math"
    )
    assert ended.code == 0, ended.err
    before = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert before["n"] == 12
    assert {one["value"] for one in before["slices"]} == {"law", "safety"}
    ended = run_cli(tmp_path, "score", "run", "-o", "again")
    assert ended.code == 0, ended.err
    after = json.loads((tmp_path / "again" / "metrics.json").read_text())
    assert after["slices"] == before["slices"]


def test_other_slices_on_the_command_line_leave_those_of_the_gate(tmp_path: Path) -> None:
    metadata = [{"category": CATEGORIES[n % 3], "level": n % 2} for n in range(12)]
    cases = [{"id": str(n), "prompt": "?", "expected": "yes", "metadata": one} for n, one in enumerate(metadata)]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, cases)))
    (tmp_path / "s.yaml").write_text(
        "target: {simulated: {accuracy: 1, latency: 0, tokens_per_second: 0}}\ncases: c.jsonl\nscorers: [exact]\n"
        "gate: {rules: ['pass_rate[category=law]>=0.1']}\n"
    )
    for more in ("level", "level,category"):
        ended = run_cli(tmp_path, "run", "s.yaml", "-o", more, "--by", more)
        assert ended.code == 0, ended.err
        slices = json.loads((tmp_path / more / "metrics.json").read_text())["slices"]
        assert [(one["key"], one["n"]) for one in slices] == [("level", 6)] * 2 + [("category", 4)] * 3
    ended = run_cli(tmp_path, "score", "level", "-o", "again", "--by", "level")
    assert ended.code == 0, ended.err


def test_a_resumed_sample_has_the_same_cases_and_a_change_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    ids = [record.id for record in run_of(run, sample=8, seed=3).responses]
    assert len(ids) == 8
    (run / "metrics.json").unlink()
    lines = (run / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    (run / "outputs.jsonl").write_bytes(b"".join(lines[:3]))
    assert [record.id for record in run_of(run, sample=8, seed=3).responses] == ids
    assert "changed since" not in caplog.text
    (run / "metrics.json").unlink()
    larger = run_of(run, sample=12, seed=3)
    assert "changed since the run began: sample: 8 there, 12 now" in caplog.text
    assert set(ids) < {record.id for record in larger.responses}


def test_groups_count_together_in_a_slice(tmp_path: Path) -> None:
    cases = [
        EvalCase(id=f"c{n}", prompt="?", expected="yes", group=str(n // 5), metadata={"half": n % 2}) for n in range(40)
    ]
    runner = Runner(answer, EvalSet("s", cases), ["exact"], progress="off", output_path=tmp_path / "run", by=("half",))
    one, other = runner.run_sync().typed_metrics.slices
    assert (one.groups, other.groups, one.cases) == (8, 8, 20)
    assert [one, other] == Result.load(tmp_path / "run").typed_metrics.slices


@pytest.mark.parametrize(
    ("rule", "ok"),
    [
        ("pass_rate[category=law]>=0.5", True),
        ("pass_rate[category=safety] >= 99%", False),
        ("pass_rate[category=law].ci_low>=0.1", None),
        ("pass_rate.ci_low[category=law]>=0.1", True),
        ("error_rate[category=law]==0.1", True),
        ("score.exact.mean[level=1]>0.9", True),
        ("latency_p50[category=law]<10s", True),
        ("n[category=law]==10", True),
        ("passed[level=0]==8", False),
    ],
)
def test_rules_on_slices_need_no_by(tmp_path: Path, rule: str, ok: bool | None) -> None:
    result = run_of(tmp_path / "run")
    if ok is None:
        with pytest.raises(ConfigurationError):
            result.gate(rule, allow=["scoring-errors"])
    else:
        assert result.gate(rule).passed is ok


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("pass_rate[category=lw]>=0.5", "no case has category=lw; did you mean 'law'?"),
        ("pass_rate[categry=law]>=0.5", "has the metadata 'categry'; did you mean 'category'?"),
        ("cost_judges[category=law]<1", "a slice has no 'cost_judges'"),
        ("pass_rate[category=law]>=50", "a share above 1; did you mean 50%?"),
    ],
)
def test_a_rule_on_a_slice_that_is_not_there_is_refused(tmp_path: Path, rule: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("?", r"\?")):
        run_of(tmp_path / "run").gate(rule)


def test_every_report_shows_slices_and_that_they_are_small(tmp_path: Path) -> None:
    run_of(tmp_path / "run", by=("category",))
    text = run_cli(tmp_path, "report", "run", "--by", "level").out
    lines = [line for line in text.splitlines() if line.startswith("  safety ")]
    assert "small" in lines[0]
    assert "  level" in text
    assert "fewer than 30" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "| <code>safety</code> |" in run_cli(tmp_path, "report", "run", "-f", "md").out
    assert len(json.loads(run_cli(tmp_path, "report", "run", "-f", "json", "--by", "level").out)["slices"]) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": ("categry",)}, "by: no case of suite 'sliced' has the metadata 'categry'; did you mean 'category'?"),
        ({"where": ("lvl=1",)}, "where: no case of suite 'sliced' has the metadata 'lvl'"),
        ({"where": ("level=5",)}, "no case of suite 'sliced' has level=5: none of its 30"),
        ({"sample": 3, "limit": 4}, "sample and limit both say how many cases"),
        ({"by": ("category",), "keep_expected": False}, "by cannot be used with keep_expected off"),
        ({"by": "category"}, "by must be a tuple"),
        ({"where": ("level",)}, "a condition is key=value"),
    ],
)
def test_what_cannot_be_selected_or_sliced_is_refused_before_a_call(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as problem:
        run_of(None, **options)
    assert message in str(problem.value)


def test_a_report_without_metadata_says_so(tmp_path: Path) -> None:
    run_of(tmp_path / "run", keep_expected=False)
    with pytest.raises(ConfigurationError, match="no metadata in its records"):
        Result.load(tmp_path / "run", by=["category"])


def test_slices_by_name_in_python(tmp_path: Path) -> None:
    result = run_of(tmp_path / "run")
    assert result.slices("category")["law"].n == 10
    with pytest.raises(ConfigurationError, match="a run without a directory needs"):
        run_of(None).slices("category")


def test_another_selection_is_another_run_unless_a_directory_is_named(tmp_path: Path) -> None:
    cases = [{"prompt": str(n), "expected": str(n), "metadata": {"level": n % 2}} for n in range(6)]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, cases)))
    (tmp_path / "s.yaml").write_text("target: {simulated: {latency: 0}}\ncases: c.jsonl\nscorers: [exact]\n")
    for words in ([], ["--where", "level=1"], ["--sample", "2"], ["--sample", "3"]):
        assert run_cli(tmp_path, "run", "s.yaml", "--no-progress", *words).code == 0
    runs = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/metrics.json")]
    assert sorted(one["n"] for one in runs) == [2, 3, 3, 6]


@pytest.mark.slow
def test_worker_processes_give_the_same_slices_scores_and_metrics(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "from steelyard import Score\n"
        "def answer(case):\n    return f'I say\\n{int(case.id) % 4}'\n"
        "def shape(case, response):\n"
        "    return [Score('steps', int(case.id) % 7, unit='steps'), Score('tone', label='t' + case.id[-1])]\n"
    )
    cases = [{"id": str(n), "prompt": "?", "expected": str(n % 3), "metadata": {"level": n % 2}} for n in range(40)]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, cases)))
    (tmp_path / "s.yaml").write_text(
        "target: {python: a.py:answer}\ncases: c.jsonl\nby: [level]\n"
        "run_metrics: [{classification: {extract: last_line}}]\n"
        "scorers:\n  - exact: {extract: {pattern: '(.*)$'}}\n  - python: a.py:shape\n"
        "  - combined: {weights: {exact: 1}}\n"
    )
    found = []
    for name, words in {"here": [], "workers": ["--workers", "2"]}.items():
        ended = run_cli(tmp_path, "run", "s.yaml", "--no-progress", "-o", name, *words)
        assert ended.code == 0, ended.err
        metrics = json.loads((tmp_path / name / "metrics.json").read_text())
        for one in metrics["slices"]:
            del one["latency"]
        found.append({part: metrics[part] for part in ("slices", "scores", "run_metrics", "pass_rate_ci95")})
    assert found[0] == found[1]
    assert found[0]["scores"]["combined"]["n"] == 40
