"""Suites under pytest: a test per case, called once, limited by -k, shared by the workers of pytest-xdist."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TARGET = """
import os
from pathlib import Path

def answer(case):
    with open("calls.txt", "a") as file:
        file.write(case.id + "\\n")
    if case.id == "crash":
        raise KeyError("missing")
    return "Paris" if case.id != "no" else "Paris\\x1b[31m"
"""
SUITE = """
id: capitals
target: {python: target.py:answer}
cases:
  - {id: fr, prompt: "Capital of France?", expected: Paris}
  - {id: no, prompt: "Capital of Norway?", expected: Oslo}
  - {id: crash, prompt: "Capital of nowhere?", expected: None}
  - {id: two, prompt: "Capital again?", expected: Paris}
scorers: [exact]
run: {retries: 0}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "target.py").write_text(TARGET)
    (tmp_path / "suite.yaml").write_text(SUITE)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\n[tool.steelyard]\nsuites = ["s*.yaml"]\n')
    (tmp_path / "test_plain.py").write_text("def test_plain():\n    pass\n")
    return tmp_path


def run_pytest(project: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and output of pytest there, with the plugin from this checkout and nothing else."""
    plugin = ["-p", "no:steelyard", "-p", "steelyard.integrations.pytest"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "CI"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "-q", "-p", "no:cacheprovider", *arguments],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


def calls(project: Path) -> list[str]:
    path = project / "calls.txt"
    return sorted(path.read_text().split()) if path.exists() else []


def test_a_bare_pytest_calls_nothing(project: Path) -> None:
    code, output = run_pytest(project)
    assert code == 0
    assert "1 passed" in output
    assert calls(project) == []


def test_a_suite_named_as_an_argument_has_a_test_per_case(project: Path) -> None:
    code, output = run_pytest(project, "--steelyard", "suite.yaml")
    assert code == 1
    assert "2 failed, 2 passed" in output
    assert calls(project) == ["crash", "fr", "no", "two"]
    assert "question: Capital of Norway?" in output
    assert "expected: Oslo" in output
    assert "score exact: failed 0.000: expected 'Oslo'" in output
    assert "KeyError: 'missing'" in output
    assert "target.py" in output  # of the traceback
    assert "\x1b[31m" not in output
    assert (project / "runs/pytest/suite/metrics.json").exists()


def test_configured_suites_are_added_to_the_other_tests(project: Path) -> None:
    code, output = run_pytest(project, "--steelyard")
    assert code == 1
    assert "2 failed, 3 passed" in output


def test_only_selected_cases_are_called(project: Path) -> None:
    code, output = run_pytest(project, "--steelyard", "suite.yaml", "-k", "fr or two")
    assert code == 0
    assert "2 passed, 2 deselected" in output
    assert calls(project) == ["fr", "two"]
    code, output = run_pytest(project, "--steelyard", "suite.yaml::no")
    assert code == 1
    assert calls(project) == ["fr", "no", "two"]


def test_a_second_run_calls_again_and_keeps_the_first_aside(project: Path) -> None:
    for _ in range(2):
        run_pytest(project, "--steelyard", "suite.yaml", "-k", "fr")
    assert calls(project) == ["fr", "fr"]
    assert (project / "runs/pytest/suite/previous").is_dir()


def test_workers_of_xdist_share_one_run(project: Path) -> None:
    pytest.importorskip("xdist")
    code, output = run_pytest(project, "--steelyard", "suite.yaml", "-n", "2")
    assert code == 1
    assert "2 failed, 2 passed" in output
    assert calls(project) == ["crash", "fr", "no", "two"]
    run_pytest(project, "--steelyard", "suite.yaml", "-n", "2")
    assert len(calls(project)) == 8


def test_a_broken_suite_and_no_suite_are_named(project: Path) -> None:
    (project / "suite.yaml").write_text("id: x\ncases: nothing.jsonl\ntarget: {python: target.py:answer}\n")
    code, output = run_pytest(project, "--steelyard", "suite.yaml")
    assert code == 2
    assert "nothing.jsonl" in output
    (project / "pyproject.toml").write_text("")
    code, output = run_pytest(project, "--steelyard")
    assert code == 4
    assert "no suite is named" in output


def test_a_target_that_cannot_be_made_fails_each_case_with_its_message(project: Path) -> None:
    (project / "suite.yaml").write_text(SUITE.replace("target.py:answer", "target.py:gone"))
    code, output = run_pytest(project, "--steelyard", "suite.yaml", "-k", "fr or two")
    assert code == 1
    assert "2 failed" in output
    assert "gone" in output


FIXTURE = """
import pytest
from steelyard import EvalCase
from steelyard.integrations.pytest import assert_passes

CASES = [EvalCase(id="fr", prompt="?", expected="Paris"), EvalCase(id="no", prompt="?", expected="Oslo")]

async def answer(case):
    return "Paris"

@pytest.mark.steelyard(scorers=["exact"], parallelism=2)
def test_half(steelyard_run):
    result = steelyard_run(answer, CASES)
    assert result.typed_metrics.parallelism == 2
    assert_passes(result, "pass_rate>=0.5")

def test_all(steelyard_run):
    assert_passes(steelyard_run(answer, CASES, ["exact"]), "pass_rate>=0.8")
"""


def test_the_fixture_runs_suites_in_python_and_a_broken_rule_tells_why(project: Path) -> None:
    (project / "test_plain.py").write_text(FIXTURE)
    for _ in range(2):  # a complete run is replaced
        code, output = run_pytest(project)
        assert code == 1
        assert "1 failed, 1 passed" in output
        assert "pass_rate>=0.8: is 0.5" in output
        assert "passed 50.0%, 1 of 2, 95 % CI" in output
        assert "no: expected 'Oslo', got 'Paris'" in output


def test_the_package_declares_the_plugin_and_loading_it_imports_little() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        declared = tomllib.load(file)["project"]["entry-points"]["pytest11"]
    assert declared == {"steelyard": "steelyard.integrations.pytest"}
    script = (
        "import sys, pytest; before = set(sys.modules); import steelyard.integrations.pytest; "
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) <= {
        "steelyard",
        "steelyard._version",
        "steelyard.integrations",
        "steelyard.integrations.pytest",
    }


MARKED = """
import pytest
from steelyard import EvalCase

CASES = [EvalCase(id=name, prompt=name, expected=name) for name in ("a", "b", "c")]

@pytest.mark.steelyard(cases=CASES, scorers=["exact"], parallelism=3, retries=0)
async def test_letters(case):
    with open("calls.txt", "a") as file:
        file.write(case.id + "\\n")
    if case.id == "c":
        raise KeyError("missing")
    return "a"

@pytest.mark.steelyard(cases="more.jsonl", scorers=["exact"])
def test_more(case):
    return case.prompt
"""


def test_a_marked_function_is_a_test_per_case_that_it_answers(tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED)
    (tmp_path / "more.jsonl").write_text('{"id": "x", "prompt": "1", "expected": "1"}\n')
    code, shown = run_pytest(tmp_path, "-vv")
    assert code == 1
    for line in ("test_letters::a PASSED", "test_letters::b FAILED", "test_letters::c FAILED", "test_more::x PASSED"):
        assert f"test_marked.py::{line}" in shown, shown
    assert "expected: b" in shown
    assert "KeyError" in shown
    assert sorted((tmp_path / "calls.txt").read_text().split()) == ["a", "b", "c"]


def test_k_limits_what_a_marked_function_is_called_with(tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED)
    (tmp_path / "more.jsonl").write_text('{"id": "x", "prompt": "1", "expected": "1"}\n')
    code, _ = run_pytest(tmp_path, "test_marked.py::test_letters::a")
    assert code == 0
    assert (tmp_path / "calls.txt").read_text() == "a\n"


def test_a_marked_functions_missing_file_is_an_error_of_collection(tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED)
    code, shown = run_pytest(tmp_path)
    assert code != 0
    assert "more.jsonl" in shown
