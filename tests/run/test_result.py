"""What a reader without the suite makes of a journal in which a case was edited."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard import CancellationToken, ConfigurationError, EvalCase, EvalSet, Result, Runner


def run_edited(folder: Path) -> None:
    """A first launch that answers `a` and is stopped, then one in which the edited `a` fails and `b` is left."""
    token = CancellationToken()

    def first(case: EvalCase) -> str:
        token.cancel("enough")
        return f"old answer to {case.id}"

    def second(case: EvalCase) -> str:
        if case.id == "b":
            raise KeyError("not reached")
        raise ValueError("cannot answer the edited case")

    for prompt, function in (("before", first), ("after", second)):
        answer = function
        answer.__name__ = answer.__qualname__ = "answer"
        suite = EvalSet("edited", [EvalCase(id="a", prompt=prompt), EvalCase(id="b", prompt="the same")])
        limit = 1 if function is second else None
        runner = Runner(answer, suite, output_path=folder, progress="off", limit=limit, retries=0)
        runner.token = token if function is first else None
        runner.run_sync()
    (folder / "metrics.json").unlink()


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_an_old_answer_to_a_case_that_was_edited_since_does_not_come_back(tmp_path: Path, index: str) -> None:
    run_edited(tmp_path)
    if index == "lost":
        (tmp_path / "outputs.idx").unlink()
    result = Result.load(tmp_path)
    assert [(record.id, record.status) for record in result.iter_responses()] == [("a", "error")]
    assert result.metrics["counts"]["ok"] == 0
    assert result.metrics["counts"]["error"] == 1


def _judged(place: Path | None) -> Result:
    cases = [EvalCase(id="a", prompt="1", expected="1"), EvalCase(id="b", prompt="2", expected="x")]

    async def answer(case: EvalCase) -> str:
        return case.prompt or ""

    return Runner(answer, EvalSet("s", cases), ["exact"], output_path=place, progress="off").run_sync()


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_result_tells_its_pass_rate_failures_and_scores_by_name(tmp_path: Path, on_disk: bool) -> None:
    result = _judged(tmp_path / "run" if on_disk else None)
    assert result.pass_rate == 0.5
    assert "pass_rate=50.0%" in repr(result)
    (failure,) = result.failures()
    assert failure.id == "b"
    assert failure.passed is False
    assert failure.scores["exact"].value == 0.0
    assert "exact" in failure.scores
    assert "other" not in failure.scores
    with pytest.raises(KeyError, match="there are: exact"):
        failure.scores["other"]
    assert "50.0%" in result.summary()


def test_a_loaded_result_has_scores_by_name_too(tmp_path: Path) -> None:
    _judged(tmp_path / "run")
    records = Result.load(tmp_path / "run").load_responses()
    assert [record.scores["exact"].passed for record in records] == [True, False]


@pytest.mark.parametrize(("form", "suffix"), [("html", "html"), ("md", "md"), ("junit", "xml"), ("csv", "csv")])
def test_a_result_writes_its_reports(tmp_path: Path, form: str, suffix: str) -> None:
    result = _judged(tmp_path / "run")
    place = result.report(form)
    assert place == tmp_path / "run" / f"report.{suffix}"
    assert place.stat().st_size > 100
    assert result.report(form, tmp_path / "elsewhere").read_bytes()[:20] == place.read_bytes()[:20]


def test_a_report_needs_a_directory_and_a_format_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="output_path"):
        _judged(None).report("html")
    with pytest.raises(ConfigurationError, match="htm"):
        _judged(tmp_path / "run").report("htm")


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_result_is_checked_against_rules(tmp_path: Path, on_disk: bool) -> None:
    result = _judged(tmp_path / "run" if on_disk else None)
    assert result.gate("pass_rate>=0.5")
    broken = result.gate("pass_rate>=0.8", "error_rate<1%")
    assert not broken
    assert "broken  pass_rate>=0.8" in str(broken)
    assert "ok      error_rate<1%" in str(broken)
    with pytest.raises(ConfigurationError, match="nothing to check"):
        result.gate()


def test_a_baseline_may_be_a_result_or_a_place(tmp_path: Path) -> None:
    result, other = _judged(tmp_path / "run"), _judged(tmp_path / "other")
    assert result.gate(baseline=other)
    assert result.gate(baseline=tmp_path / "other")
    with pytest.raises(ConfigurationError, match="directories"):
        _judged(None).gate(baseline=other)
