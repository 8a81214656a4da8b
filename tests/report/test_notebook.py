"""What a notebook shows of a result, and a notebook that is executed."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from steelyard import ConfigurationError, EvalCase, EvalSet, InvocationResponse, Result, Runner, Sweep
from steelyard.report import compare_runs
from steelyard.report.notebook import table_columns, to_pandas

CASES = [EvalCase(id=f"c{number}", prompt=f"<b>{number}</b>", expected="1") for number in range(9)]
TABLE_CASES = [
    EvalCase(id="0123", prompt="1", expected="1"),
    EvalCase(id="no", prompt="2", expected="1"),
    EvalCase(id="bad", prompt="3", expected="1"),
]
TIME = datetime(2026, 1, 2, tzinfo=UTC)


async def answer(case: EvalCase) -> str:
    if case.id == "c8":
        raise RuntimeError("<img src=x onerror=alert(1)>")
    return "1" if case.id in ("c0", "c1") else "<script>alert(1)</script>"


def run(place: Path | None) -> Result:
    return Runner(answer, EvalSet("<i>suite</i>", CASES), ["exact"], output_path=place, progress="off").run_sync()


def test_the_fragment_has_rate_bar_and_first_failures_and_nothing_of_the_model_runs(tmp_path: Path) -> None:
    page = run(tmp_path / "run")._repr_html_()
    assert "25.0%" in page
    assert "2 passed, 6 failed, 1 error" in page
    assert page.count("<tr style") == 5
    assert "2 more did not pass" in page
    assert "<script" not in page
    assert "<img" not in page
    assert "<i>" not in page
    assert "&lt;script&gt;" in page


def test_a_result_without_a_directory_is_shown_too() -> None:
    assert "25.0%" in run(None)._repr_html_()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_notebook_runs_twice_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    _kernel(tmp_path / "jupyter")
    cell = (
        "from steelyard import EvalCase, EvalSet, Runner\n"
        "async def answer(case):\n    return 'Paris'\n"
        "answers = {'fr': 'Paris', 'no': 'Oslo'}\n"
        "cases = [EvalCase(id=name, prompt=name, expected=answers[name]) for name in answers]\n"
        "result = Runner(answer, EvalSet('capitals', cases), scorers=['exact'], output_path='runs/capitals')"
        ".run_sync(force=True)\n"
        "result"
    )
    for _ in range(2):
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for _ in range(2)])
        done = nbclient.NotebookClient(
            book, timeout=100, kernel_name="here", resources={"metadata": {"path": tmp_path}}
        )
        done.execute()
        shown = [one for one in book.cells[-1].outputs if one.output_type == "execute_result"]
        assert "50.0%" in shown[0].data["text/html"]


def _kernel(data: Path) -> None:
    """A kernel that is this Python."""
    folder = data / "kernels" / "here"
    folder.mkdir(parents=True)
    argv = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (folder / "kernel.json").write_text(f'{{"argv": {argv}, "display_name": "here", "language": "python"}}')


async def answer_for_table(case: EvalCase) -> InvocationResponse:
    if case.id == "bad":
        raise KeyError("missing")
    calls = [{"role": "assistant", "content": ["mixed", 1]}] if case.id == "no" else None
    return InvocationResponse(
        response_text="1" if case.id == "0123" else "007", num_tokens_output=3, messages=calls, request_time=TIME
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    place = tmp_path_factory.mktemp("frames") / "run"
    return Runner(
        answer_for_table, EvalSet("s", TABLE_CASES), ["exact", "contains"], output_path=place, progress="off"
    ).run_sync()


def test_pandas_keeps_ids_and_answers_as_text(result: Result) -> None:
    pytest.importorskip("pandas")
    table = result.to_pandas()
    assert table["id"].tolist() == ["0123", "no", "bad"]
    assert table["response_text"].tolist() == ["1", "007", None]
    assert table["score.exact"].tolist()[:2] == [1.0, 0.0]
    assert table["passed"].tolist()[:2] == [True, False]
    assert table["passed"].isna().tolist() == [False, False, True]
    assert str(table["num_tokens_output"].dtype) == "Int64"
    assert table["request_time"][0] == TIME
    assert table["messages"][1] == [{"role": "assistant", "content": ["mixed", 1]}]


@pytest.mark.parametrize("library", ["polars", "pyarrow"])
def test_polars_and_arrow_have_the_same_rows(result: Result, library: str) -> None:
    pytest.importorskip(library)
    rows = result.to_polars().to_dicts() if library == "polars" else result.to_arrow().to_pylist()
    assert [row["id"] for row in rows] == ["0123", "no", "bad"]
    assert [row["passed"] for row in rows] == [True, False, None]
    assert [row["score.contains.passed"] for row in rows] == [True, False, None]
    assert rows[1]["messages"] == '[{"role":"assistant","content":["mixed",1]}]'
    assert rows[2]["error"] == "KeyError: 'missing'"
    assert rows[0]["request_time"] == TIME


def test_the_first_columns_tell_which_case_and_how_it_went(result: Result) -> None:
    names = list(table_columns(result.iter_responses()))
    assert names[:6] == ["id", "trial", "status", "passed", "score.exact", "score.exact.passed"]
    assert len(names) == len(set(names))


def test_no_records_make_an_empty_table() -> None:
    pytest.importorskip("pandas")
    assert len(to_pandas([])) == 0
    assert "id" in to_pandas([]).columns


def test_a_library_that_is_absent_is_named(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigurationError, match="pip install polars"):
        result.to_polars()


def test_a_sweep_shows_its_advice_its_plot_and_its_levels(tmp_path: Path) -> None:
    runner = Runner(answer, EvalSet("<i>suite</i>", CASES[:2]), ["exact"], progress="off")
    swept = Sweep(runner, levels=[1, 2], requests=20, output_path=tmp_path / "sweep").run_sync()
    page = swept._repr_html_()
    assert 'src="data:image/svg+xml;base64,' in page
    assert swept.recommendation.describe()[:20] in page
    assert page.count("<tr>") == 3
    assert "<i>" not in page
    assert swept.summary().splitlines()[0] in (swept.report("text").read_text())


def test_a_comparison_shows_verdict_and_figures(tmp_path: Path) -> None:
    run(tmp_path / "a<b>")
    run(tmp_path / "b")
    page = compare_runs([tmp_path / "a<b>", tmp_path / "b"])._repr_html_()
    assert "no difference" in page
    assert "passed" in page
    assert "<b>" not in page
