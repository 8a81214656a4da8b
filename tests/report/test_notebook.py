"""What a notebook shows of a result, and a notebook that is executed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from steelyard import EvalCase, EvalSet, Result, Runner

CASES = [EvalCase(id=f"c{number}", prompt=f"<b>{number}</b>", expected="1") for number in range(9)]


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
