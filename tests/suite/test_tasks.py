"""Tasks in the formats of others: SWE-bench's JSONL and harbor's folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard import SuiteError
from steelyard.suite.suite_file import read_suite_file
from steelyard.suite.tasks import harbor_cases, swebench_cases

INSTANCE = {
    "instance_id": "acme__calc-1",
    "repo": "acme/calc",
    "base_commit": "abc",
    "problem_statement": "add subtracts",
    "patch": "the fix",
    "test_patch": "the tests",
    "FAIL_TO_PASS": '["test_calc.py::test_add"]',
    "PASS_TO_PASS": "[]",
    "version": "1.0",
}


def git(repository: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout


def test_a_swe_bench_line_becomes_a_case_that_hides_patch_and_tests(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(INSTANCE) + "\n\n")
    (case,) = swebench_cases(path)
    assert case["id"] == "acme__calc-1"
    assert case["prompt"] == "add subtracts"
    assert case["metadata"] == {
        "repo": "acme/calc",
        "base_commit": "abc",
        "version": "1.0",
        "repository": "acme__calc",
    }
    assert case["expected"]["FAIL_TO_PASS"] == ["test_calc.py::test_add"]
    assert case["expected"]["PASS_TO_PASS"] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "not JSON"), ("[]", "must be an object"), (json.dumps({**INSTANCE, "repo": None}), "needs repo, got None")],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(INSTANCE) + "\n" + line + "\n")
    with pytest.raises(SuiteError, match=message) as error:
        list(swebench_cases(path))
    assert error.value.line == 2


@pytest.fixture
def swebench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite over a local clone with a bug, its fix as the reference patch and its test as the hidden one."""
    monkeypatch.setenv("STEELYARD_WORK", str(tmp_path / "work"))
    repository = tmp_path / "repos/acme__calc"
    repository.mkdir(parents=True)
    git(repository, "init", "-q", "-b", "main")
    (repository / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (repository / "test_calc.py").write_text("from calc import add\n\n\ndef test_zero():\n    assert add(1, 0) == 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "base")
    base = git(repository, "rev-parse", "HEAD").strip()
    (repository / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    fix = git(repository, "diff")
    git(repository, "checkout", "-q", ".")
    with open(repository / "test_calc.py", "a") as file:
        file.write("\n\ndef test_add():\n    assert add(1, 2) == 3\n")
    tests = git(repository, "diff")
    git(repository, "checkout", "-q", ".")
    instance = {**INSTANCE, "base_commit": base, "patch": fix, "test_patch": tests}
    instance["PASS_TO_PASS"] = '["test_calc.py::test_zero"]'
    (tmp_path / "tasks.jsonl").write_text(json.dumps(instance) + "\n")
    (tmp_path / "agent.py").write_text(
        "from pathlib import Path\nPath('test_calc.py').write_text('broken(')\n"
        "Path('calc.py').write_text('def add(a, b):\\n    return b + a\\n')\nprint('done')\n"
    )
    (tmp_path / "suite.yaml").write_text(
        """
id: swe
target: {agent: {argv: [python3, "{{ suite }}/agent.py"]}}
cases: {swebench: tasks.jsonl}
workspace: {from: {git: "repos/{{ metadata.repository }}", ref: "{{ metadata.base_commit }}"}}
solution: {patch: "{{ expected.patch }}"}
scorers:
  - tests:
      argv: [pytest, -q, -p, no:cacheprovider, --junitxml=r.xml]
      junit: r.xml
      patch: "{{ expected.test_patch }}"
      fail_to_pass: "{{ expected.FAIL_TO_PASS }}"
      pass_to_pass: "{{ expected.PASS_TO_PASS }}"
"""
    )
    return tmp_path


@pytest.mark.slow
def test_swe_bench_tasks_are_checked_and_run_onto_local_clones(swebench: Path) -> None:
    for words in (["check", "suite.yaml"], ["run", "suite.yaml", "--out", "run"]):
        command = [sys.executable, "-m", "steelyard", *words]
        done = subprocess.run(command, cwd=swebench, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("1 of 1 task sound" if words[0] == "check" else "100.0%") in done.stdout


def harbor_task(folder: Path, name: str, toml: str = "[agent]\ntimeout_sec = 90.0\n") -> Path:
    place = folder / name
    (place / "tests").mkdir(parents=True)
    (place / "task.toml").write_text(toml)
    (place / "instruction.md").write_text(f"Do {name}.\n")
    return place


def test_task_folders_become_cases_with_their_time_limit(tmp_path: Path) -> None:
    harbor_task(tmp_path / "tasks", "b", '[metadata]\ndifficulty = "hard"\n')
    harbor_task(tmp_path / "tasks", "a")
    (tmp_path / "suite.yaml").write_text("id: h\ncases: {harbor: tasks}\n")
    first, second = read_suite_file(tmp_path / "suite.yaml").cases
    assert (first.id, first.prompt) == ("a", "Do a.\n")
    assert first.limits is not None
    assert first.limits.time == 90.0
    assert second.metadata == {"difficulty": "hard", "task": "b"}


def test_tasks_that_need_a_container_are_refused_by_name(tmp_path: Path) -> None:
    harbor_task(tmp_path, "plain")
    (harbor_task(tmp_path, "boxed") / "environment").mkdir()
    (tmp_path / "boxed/environment/Dockerfile").write_text("FROM scratch\n")
    harbor_task(tmp_path, "image", '[environment]\ndocker_image = "x"\n')
    with pytest.raises(SuiteError, match=r"2 of 3 tasks need a container.*: boxed, image"):
        list(harbor_cases(tmp_path))
    assert [case["id"] for case in harbor_cases(tmp_path, skip_containers=True)] == ["plain"]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text("id: h\ncases: {harbour: tasks}\n")
    with pytest.raises(SuiteError, match="cases"):
        read_suite_file(tmp_path / "suite.yaml")
