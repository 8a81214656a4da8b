"""Tasks are checked before an agent is paid for them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard import ConfigurationError, EvalCase, EvalSet, Runner
from steelyard.run.check import CheckedTask, Solution, check_suite
from steelyard.scoring import Tests
from steelyard.workspace.template import Workspace

RIGHT, WRONG = "print('right')\n", "print('wrong')\n"


def never(case: EvalCase) -> str:
    raise AssertionError("a check calls no target")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEELYARD_WORK", str(tmp_path / "work"))
    for name, text in {"good": WRONG, "passes": RIGHT, "unsolved": WRONG, "patched": WRONG, "none": WRONG}.items():
        (tmp_path / "fixtures" / name).mkdir(parents=True)
        (tmp_path / "fixtures" / name / "task.py").write_text(text)
    for name, text in {"good": RIGHT, "passes": RIGHT, "unsolved": WRONG}.items():
        (tmp_path / "solutions" / name).mkdir(parents=True)
        (tmp_path / "solutions" / name / "task.py").write_text(text)
    return tmp_path


def check(folder: Path, ids: list[str], *, solution: str = "solutions/{{ id }}", grade: str = "", repeat: int = 1):
    script = grade or "import sys; sys.exit('right' not in open('task.py').read())"
    runner = Runner(
        never,
        EvalSet("tasks", [EvalCase(id=name, prompt="fix") for name in ids]),
        [Tests(argv=[sys.executable, "-c", script], retries=0)],
        workspace=Workspace("fixtures/{{ id }}", folder=folder),
        progress="off",
    )
    found = asyncio.run(check_suite(runner, Solution(solution, folder), repeat=repeat))
    return {task.id: task for task in found}


def findings(found: dict[str, CheckedTask]) -> dict[str, str]:
    return {name: task.finding for name, task in found.items()}


def test_a_sound_task_is_told_from_those_that_are_not(folder: Path) -> None:
    found = check(folder, ["good", "passes", "unsolved", "none"])
    assert findings(found) == {
        "good": "good",
        "passes": "already passes",
        "unsolved": "unsolved",
        "none": "no solution",
    }
    assert (found["good"].solved, found["good"].untouched) == (1, 0)
    assert "the reference solution fails" in found["unsolved"].why


def test_a_solution_may_be_a_patch_and_one_that_does_not_apply_is_named(folder: Path) -> None:
    before, after = folder / "a", folder / "b"
    before.write_text(WRONG)
    after.write_text(RIGHT)
    made = subprocess.run(["diff", "-u", "a", "b"], cwd=folder, capture_output=True, text=True).stdout
    patch = made.replace("--- a\t", "--- a/task.py\t").replace("+++ b\t", "+++ b/task.py\t")
    (folder / "fixes").mkdir()
    (folder / "fixes/patched.patch").write_text(patch)
    (folder / "fixes/passes.patch").write_text(patch)
    found = check(folder, ["patched", "passes"], solution="fixes/{{ id }}.patch")
    assert findings(found) == {"patched": "good", "passes": "ungradable"}
    assert "does not apply" in found["passes"].why


def test_a_grader_that_breaks_and_a_flaky_one_are_found(folder: Path) -> None:
    assert findings(check(folder, ["good"], grade="raise SystemExit(5)")) == {"good": "ungradable"}
    flaky = (
        "import pathlib, sys; right = 'right' in open('task.py').read(); "
        f"mark = pathlib.Path({str(folder / 'mark')!r}); first = right and not mark.exists(); "
        "right and mark.touch(); sys.exit(0 if right and not first else 1)"
    )
    found = check(folder, ["good"], grade=flaky, repeat=3)
    assert findings(found) == {"good": "flaky"}
    assert found["good"].why == "solution passed 2 of 3 times, untouched 0 of 3"


def test_a_check_needs_a_workspace_and_a_grader(folder: Path) -> None:
    suite = EvalSet("tasks", [EvalCase(id="good", prompt="fix")])
    solution = Solution("solutions/{{ id }}", folder)
    with pytest.raises(ConfigurationError, match="has none: give it `workspace:`"):
        asyncio.run(check_suite(Runner(never, suite, ["exact"]), solution))
    with pytest.raises(ConfigurationError, match="not a judge"):
        asyncio.run(check_suite(Runner(never, suite, workspace=Workspace()), solution))


SUITE = """
id: tasks
target: {python: never.py:never}
workspace: {from: "fixtures/{{ id }}"}
solution: "solutions/{{ id }}"
cases: [{id: good, prompt: fix}, {id: passes, prompt: fix}]
scorers: [{tests: {argv: [python3, -c, "import sys; sys.exit('right' not in open('task.py').read())"]}}]
"""


def test_the_command_lists_what_is_not_sound_and_exits_with_1(folder: Path) -> None:
    (folder / "never.py").write_text("def never(case):\n    raise AssertionError\n")
    (folder / "suite.yaml").write_text(SUITE)
    command = [sys.executable, "-m", "steelyard", "check", "suite.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "already passes: passes" in done.stdout
    assert "1 of 2 tasks sound; 1 already passes" in done.stdout
    alone = subprocess.run([*command, "-k", "good", "--repeat", "2"], cwd=folder, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    assert "1 of 1 task sound" in alone.stdout
    (folder / "suite.yaml").write_text(SUITE.replace('solution: "solutions/{{ id }}"\n', ""))
    refused = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "no `solution:`" in refused.stderr
