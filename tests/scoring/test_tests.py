"""Graders that run programs in a copy of the workspace: tests, and any program."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard import ConfigurationError, EvalCase, InvocationResponse, Score
from steelyard.protocols import ScoringContext
from steelyard.scoring import Program, Tests
from steelyard.scoring.base import limits_of
from steelyard.scoring.pipeline import LimitedScorer, is_immediate
from steelyard.scoring.tests import GraderError, read_junit

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:steelyard", "--junitxml=r.xml"]
CASE = EvalCase(id="c1", prompt="fix it")


class Grading:
    """A finished workspace, its template, and contexts for graders."""

    def __init__(self, folder: Path) -> None:
        self.finished = folder / "finished"
        self.finished.mkdir()
        self.artifacts = folder / "artifacts"
        self.artifacts.mkdir()
        self.template: dict[str, bytes] = {}
        self._folder = folder
        self.scratches = 0

    def _scratch(self) -> Path:
        self.scratches += 1
        place = self._folder / f"scratch{self.scratches}"
        place.mkdir()
        return place

    def _copy(self, scratch: Path) -> Path:
        import shutil

        return Path(shutil.copytree(self.finished, scratch / "workspace", symlinks=True))

    def context(self) -> ScoringContext:
        return ScoringContext(
            "c1",
            0,
            1,
            make_scratch=self._scratch,
            make_workspace=self._copy,
            make_artifacts=lambda: self.artifacts,
            read_template=self.template.get,
        )

    def score(self, scorer: Any, case: EvalCase = CASE) -> Score:
        return asyncio.run(scorer.score(case, InvocationResponse(response_text="done"), self.context()))


@pytest.fixture
def grading(tmp_path: Path) -> Grading:
    made = Grading(tmp_path)
    (made.finished / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    (made.finished / "test_calc.py").write_text(
        "from calc import add\ndef test_add():\n    assert add(1, 2) == 3\n"
        "def test_neg():\n    assert add(-1, 1) == 0\n"
    )
    return made


def test_tests_that_pass_give_one_and_leave_the_workspace_as_it_was(grading: Grading) -> None:
    score = grading.score(Tests(argv=PYTEST, junit="r.xml"))
    assert (score.value, score.passed) == (1.0, True)
    assert sorted(path.name for path in grading.finished.iterdir()) == ["calc.py", "test_calc.py"]
    assert b"2 passed" in (grading.artifacts / "tests.log").read_bytes()
    assert (grading.artifacts / "tests.xml").exists()


def test_failed_tests_are_named_and_the_score_is_the_share_that_passed(grading: Grading) -> None:
    (grading.finished / "calc.py").write_text("def add(a, b):\n    return 3\n")
    score = grading.score(Tests(argv=PYTEST, junit="r.xml"))
    assert (score.value, score.passed) == (0.5, False)
    assert "1 of 2 tests did not pass: test_calc.test_neg" in (score.reason or "")
    assert grading.score(Tests(argv=PYTEST, junit="r.xml", threshold=0.5)).passed is True


def test_without_a_result_file_the_exit_code_decides(grading: Grading) -> None:
    assert grading.score(Tests(argv=[sys.executable, "-c", ""])).value == 1.0
    failed = grading.score(Tests(argv=[sys.executable, "-c", "raise SystemExit(1)"]))
    assert (failed.value, failed.passed) == (0.0, False)
    assert "exit code 1" in (failed.reason or "")


def test_hidden_files_replace_the_agents_own(grading: Grading, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "c1"
    hidden.mkdir(parents=True)
    (hidden / "test_calc.py").write_text("def test_hidden():\n    assert False\n")
    score = grading.score(Tests(argv=PYTEST, junit="r.xml", files="hidden/{{ id }}", folder=tmp_path))
    assert "test_hidden" in (score.reason or "")
    with pytest.raises(ConfigurationError, match="there is no"):
        grading.score(Tests(argv=PYTEST, files="hidden/{{ id }}", folder=tmp_path), EvalCase(id="c2"))


def test_changed_hidden_files_change_the_identity(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/a.py").write_text("1")
    scorer = Tests(argv=PYTEST, files="hidden/{{ id }}", folder=tmp_path)
    before = scorer.identity()
    assert "folder" not in before
    (tmp_path / "hidden/a.py").write_text("2")
    assert scorer.identity() != before
    assert pickle.loads(pickle.dumps(scorer)).identity() == scorer.identity()


def test_no_tests_is_an_error_of_the_grader(grading: Grading) -> None:
    (grading.finished / "test_calc.py").unlink()
    with pytest.raises(GraderError, match="no tests were collected"):
        grading.score(Tests(argv=PYTEST, junit="r.xml"))
    with pytest.raises(GraderError, match="cannot start"):
        grading.score(Tests(argv=["no-such-program"]))
    with pytest.raises(GraderError, match="usage error"):
        grading.score(Tests(argv=[sys.executable, "-m", "pytest", "--no-such-option"]))


def test_a_stale_or_forged_result_is_removed_first(grading: Grading) -> None:
    (grading.finished / "r.xml").write_text('<testsuite><testcase name="forged"/></testsuite>')
    with pytest.raises(GraderError, match="wrote no r"):
        grading.score(Tests(argv=[sys.executable, "-c", ""], junit="r.xml"))


def test_a_crash_of_the_agents_code_is_a_failure_not_an_error(grading: Grading) -> None:
    (grading.finished / "calc.py").write_text("import os\nos._exit(9)\n")
    score = grading.score(Tests(argv=PYTEST, junit="r.xml"))
    assert (score.value, score.passed) == (0.0, False)


def test_tests_that_hang_fail_within_their_time(grading: Grading) -> None:
    (grading.finished / "calc.py").write_text("import time\ntime.sleep(1000)\n")
    scorer = Tests(argv=PYTEST, junit="r.xml", timeout="1s")
    score = grading.score(scorer)
    assert score.passed is False
    assert "did not end within 1 s" in (score.reason or "")
    assert limits_of(scorer).timeout is None


def test_what_the_agent_added_to_steer_tests_is_reported(grading: Grading) -> None:
    (grading.finished / "conftest.py").write_text("# nothing yet\n")
    (grading.finished / "pyproject.toml").write_text("[tool.pytest.ini_options]\n# the agent's\n")
    (grading.finished / "tox.ini").write_text("[pytest]\n")
    grading.template = {"pyproject.toml": b"[tool.pytest.ini_options]\n", "tox.ini": b"[pytest]\n"}
    score = grading.score(Tests(argv=PYTEST, junit="r.xml"))
    assert score.passed is True
    assert "the agent added conftest.py" in (score.reason or "")
    assert "the agent changed pyproject.toml" in (score.reason or "")
    assert "tox.ini" not in (score.reason or "")


def test_an_agent_that_breaks_the_configuration_of_the_tests_fails(grading: Grading) -> None:
    (grading.finished / "tox.ini").write_text("not a section")
    score = grading.score(Tests(argv=PYTEST, junit="r.xml"))
    assert (score.value, score.passed) == (0.0, False)
    (grading.finished / "tox.ini").unlink()
    (grading.finished / "conftest.py").write_text("collect_ignore_glob = ['*']\n")
    assert grading.score(Tests(argv=PYTEST, junit="r.xml")).passed is False


def test_links_of_the_agent_lead_no_grader_out_of_the_workspace(grading: Grading, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "r.xml").write_text("precious")
    hidden = tmp_path / "hidden"
    (hidden / "tests").mkdir(parents=True)
    (hidden / "tests/test_x.py").write_text("def test_x():\n    pass\n")
    (hidden / "r.txt").write_text("new")
    os.symlink(outside, grading.finished / "tests")
    os.symlink(outside, grading.finished / "out")
    os.symlink(outside / "r.xml", grading.finished / "r.txt")
    grading.score(Tests(argv=PYTEST, junit="r.xml", files="hidden", folder=tmp_path))
    assert sorted(path.name for path in outside.iterdir()) == ["r.xml"]
    assert (outside / "r.xml").read_text() == "precious"
    with pytest.raises(GraderError, match="leads out of the workspace"):
        grading.score(Tests(argv=PYTEST, junit="out/r.xml"))
    assert (outside / "r.xml").read_text() == "precious"


def test_a_pipe_in_place_of_the_result_does_not_hang(grading: Grading) -> None:
    script = "import os; os.mkfifo('r.xml')"
    with pytest.raises(GraderError, match="not a regular file"):
        grading.score(Tests(argv=[sys.executable, "-c", script], junit="r.xml"))


@pytest.mark.parametrize(
    ("listed", "value"),
    [
        (["test_calc.py::test_add"], 1.0),
        (["test_calc.py::test_add", "test_calc.py::test_neg"], 0.5),
        (["test_add (test_calc)"], 1.0),
        (["test_add"], 1.0),
        (["test_calc.py::gone"], 0.0),
        ('{{ metadata["FAIL_TO_PASS"] }}', 0.5),
    ],
)
def test_listed_tests_count_alone(grading: Grading, listed: Any, value: float) -> None:
    (grading.finished / "calc.py").write_text("def add(a, b):\n    return 3\n")
    case = EvalCase(id="c1", metadata={"FAIL_TO_PASS": '["test_calc.py::test_add", "test_calc.py::test_neg"]'})
    score = grading.score(Tests(argv=PYTEST, junit="r.xml", fail_to_pass=listed), case)
    assert (score.value, score.passed) == (value, value == 1.0)


def test_a_retry_gets_a_fresh_copy_and_failed_tests_none(grading: Grading) -> None:
    flaky = (
        "import pathlib, sys; dirty = pathlib.Path('dirty'); assert not dirty.exists(), 'dirty'; dirty.touch(); "
        "mark = pathlib.Path(sys.argv[1]); first = not mark.exists(); mark.touch(); sys.exit(5 if first else 0)"
    )
    mark = str(grading.artifacts / "mark")
    limited = LimitedScorer(scorer := Tests(argv=[sys.executable, "-c", flaky, mark], retries=1), limits_of(scorer))
    score = grading.score(limited)
    assert (score.value, score.retries) == (1.0, 1)
    before = grading.scratches
    failing = Tests(argv=[sys.executable, "-c", "raise SystemExit(1)"], retries=3)
    assert grading.score(LimitedScorer(failing, limits_of(failing))).passed is False
    assert grading.scratches == before + 2  # one copy, one home


def test_graders_can_wait_so_answers_are_on_disk_first() -> None:
    assert not is_immediate(Tests(argv=["x"]))
    assert not is_immediate(Program(argv=["x"]))


def test_the_graders_environment_has_no_secrets(grading: Grading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    script = "import os, json; print(json.dumps({'value': 1.0, 'reason': ' '.join(sorted(os.environ))}))"
    score = grading.score(Program(argv=[sys.executable, "-c", script], env={"MINE": "{{ id }}"}))
    assert "OPENAI_API_KEY" not in (score.reason or "")
    assert "MINE" in (score.reason or "").split()


def test_a_program_reads_the_case_and_prints_scores(grading: Grading) -> None:
    script = (
        "import json, sys, os; asked = json.load(sys.stdin); "
        "print(json.dumps([{'name': 'len', 'value': 0.25, 'reason': asked['case']['prompt']}, "
        "{'passed': os.path.exists('calc.py'), 'reason': asked['response']['response_text']}]))"
    )
    scores: Any = grading.score(Program(argv=[sys.executable, "-c", script]))
    assert [(one.name, one.value, one.passed, one.reason) for one in scores] == [
        ("len", 0.25, False, "fix it"),
        ("program", 1.0, True, "done"),
    ]
    assert grading.score(Program(argv=[sys.executable, "-c", "print('null')"])) is None


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("raise SystemExit(75)", GraderError, "code 75"),
        ("import sys; sys.exit('no key')", RuntimeError, "code 1: no key"),
        ("print('good')", ValueError, "must print a score as JSON"),
        ("print('{\"score\": 1}')", ValueError, "'score'"),
    ],
)
def test_what_a_program_does_wrong_is_named(grading: Grading, script: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        grading.score(Program(argv=[sys.executable, "-c", script]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"argv": "pytest -q"}, "list of words"),
        ({"argv": []}, "list of words"),
        ({"argv": ["x"], "junit": "../r.xml"}, "in the workspace"),
        ({"argv": ["x"], "cwd": "/tmp"}, "in the workspace"),
        ({"argv": ["x"], "fail_to_pass": ["a"]}, "need junit"),
        ({"argv": ["{{ nothing }}"]}, "unknown name 'nothing'"),
        ({"argv": ["x"], "timeout": "soon"}, "timeout"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Tests(**arguments)


def test_a_junit_file_is_read_within_bounds() -> None:
    text = (
        b'<testsuites><testsuite><testcase classname="a" name="b"/><testcase classname="a" name="c">'
        b"<failure/></testcase>"
        b'<testcase name="d"><skipped/></testcase><testcase name="e"><error/></testcase>'
        b'<testcase classname="a" name="b"><failure/></testcase></testsuite></testsuites>'
    )
    assert read_junit(text) == {"a.b": "failed", "a.c": "failed", "d": "skipped", "e": "error"}
    with pytest.raises(GraderError, match="not XML"):
        read_junit(b"<testsuite>")
    bomb = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><testsuite><testcase name="&b;"/></testsuite>'
    with pytest.raises(GraderError, match="document type"):
        read_junit(bomb)
