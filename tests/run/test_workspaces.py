"""Runs whose cases have workspaces: fresh for each attempt, copied for scorers, gone at the end."""

import os
from pathlib import Path

import pytest

from steelyard import CaseLimits, ConfigurationError, EvalSet, Runner, SuiteError, TransientError, Workspace
from steelyard.run.config import build_suite

CASES = EvalSet("s", [{"id": "one", "prompt": "p"}, {"id": "Two/../x", "prompt": "q"}])
FILES = Workspace({"files": {"a.txt": "start"}}, setup=[["sh", "-c", "echo $HOME > home.txt"]])


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.setenv("STEELYARD_WORK", str(tmp_path / "work"))
    return tmp_path / "work"


def run(target, scorers=(), *, workspace=FILES, tmp_path=None, suite=CASES, **options):
    output = None if tmp_path is None else tmp_path / "run"
    options = {"progress": "off", "output_path": output, **options}
    return Runner(target, suite, scorers, workspace=workspace, **options).run_sync()


def test_each_case_works_in_its_own_fresh_folder_and_scorers_get_a_copy(tmp_path, work):
    seen = []

    def agent(case, context):
        seen.append(context.workspace)
        assert (context.workspace / "a.txt").read_text() == "start"
        (context.workspace / "a.txt").write_text(case.id)
        return "done"

    def spoils(case, response, context):
        found = (context.workspace / "a.txt").read_text()
        (context.workspace / "a.txt").write_text("spoilt")
        return found == case.id

    def untouched(case, response, context):
        assert context.workspace not in seen
        return (context.workspace / "a.txt").read_text() == case.id

    result = run(agent, [spoils, untouched], tmp_path=tmp_path)
    assert [score.passed for record in result.responses for score in record.scores] == [True] * 4
    assert len({str(path) for path in seen}) == 2
    assert all(path.is_relative_to(work) and not path.exists() for path in seen)
    assert not work.exists() or not os.listdir(work)


def test_a_retry_starts_in_a_fresh_folder(tmp_path):
    def agent(case, context):
        text = (context.workspace / "a.txt").read_text()
        (context.workspace / "a.txt").write_text("half done")
        if context.attempt == 1:
            raise TransientError("once more")
        return text

    result = run(agent, tmp_path=tmp_path)
    assert {record.response_text for record in result.responses} == {"start"}


def test_home_and_temporary_files_are_fresh_for_each_attempt(tmp_path):
    homes = []

    def agent(case, context):
        homes.append(context.environment["HOME"])
        assert (context.workspace / "home.txt").read_text().strip() == context.environment["HOME"]
        assert context.environment["GIT_CEILING_DIRECTORIES"] == str(context.workspace.parent)
        return "x"

    run(agent, tmp_path=tmp_path)
    assert len(set(homes)) == 2
    assert os.environ.get("HOME") not in homes


def test_a_failing_setup_is_an_error_of_its_own_kind(tmp_path):
    workspace = Workspace(setup=[["sh", "-c", "echo broken >&2; exit 3"]])
    result = run(lambda case: "x", workspace=workspace, tmp_path=tmp_path)
    assert {record.error_type for record in result.responses} == {"SetupError"}
    assert "exited with code 3: broken" in result.responses[0].error


def test_a_failing_setup_is_retried_if_asked(tmp_path):
    counter = tmp_path / "counter"
    script = f"echo x >> {counter}; test $(wc -l < {counter}) -ge 3"
    workspace = Workspace(setup=[["sh", "-c", script]], setup_retries=2)
    result = run(lambda case: "x", workspace=workspace, tmp_path=tmp_path, limit=1)
    assert result.metrics["counts"]["ok"] == 1


def test_an_edited_fixture_asks_again(tmp_path):
    fixture = tmp_path / "fixture"
    fixture.mkdir()
    (fixture / "a.txt").write_text("1")
    asked = []

    def agent(case, context):
        asked.append((context.workspace / "a.txt").read_text())
        if len(asked) == 2:
            raise ValueError
        return "x"

    run(agent, workspace=Workspace(fixture), tmp_path=tmp_path)
    (fixture / "a.txt").write_text("2")
    Runner(agent, CASES, workspace=Workspace(fixture), output_path=tmp_path / "run", progress="off").run_sync(
        retry_errors=True
    )
    assert asked == ["1", "1", "2", "2"]


def test_workspaces_inside_the_run_directory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("STEELYARD_WORK", str(tmp_path / "run" / "work"))
    with pytest.raises(ConfigurationError, match="outside the run directory"):
        run(lambda case: "x", tmp_path=tmp_path)


def test_a_suite_file_has_workspace_and_case_limits(tmp_path):
    (tmp_path / "fixtures" / "c1").mkdir(parents=True)
    (tmp_path / "fixtures" / "c1" / "f").write_text("x")
    path = tmp_path / "suite.yaml"
    path.write_text(
        "target: simulated\n"
        "workspace: {from: 'fixtures/{{ id }}', keep: all, setup: [[git, init, -q]]}\n"
        "case_limits: {time: 30m, turns: 50, tokens: 200k, cost: 2.0, output: 1M}\n"
        "cases: [{id: c1, prompt: p, limits: {time: 5s}}]\n"
    )
    built = build_suite(path)
    assert built.case_limits == CaseLimits(time=1800, turns=50, tokens=200_000, cost=2.0, output=1_000_000)
    (case,) = built.suite
    assert case.limits == CaseLimits(time=5.0)
    assert (built.workspace.template_of(case, tmp_path).folder / "f").exists()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("workspace: {form: x}", "unknown key workspace.form"),
        ("case_limits: {tme: 5s}", "unknown key case_limits.tme"),
        ("case_limits: {turns: 0}", "case_limits.turns must be above 0"),
    ],
)
def test_a_bad_key_is_named(tmp_path, line, problem):
    path = tmp_path / "suite.yaml"
    path.write_text(f"target: simulated\n{line}\ncases: [{{prompt: p}}]\n")
    with pytest.raises(SuiteError, match=problem):
        build_suite(path)


def test_a_missing_fixture_is_named_before_anything_is_asked(tmp_path):
    with pytest.raises(SuiteError, match=r"there is no folder .*missing"):
        run(lambda case: "x", workspace=Workspace(Path("missing"), folder=tmp_path), tmp_path=tmp_path)
