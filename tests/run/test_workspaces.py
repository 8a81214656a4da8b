"""Runs whose cases have workspaces: fresh for each attempt, copied for scorers, gone at the end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from steelyard import (
    CancellationToken,
    CaseLimits,
    ConfigurationError,
    EvalSet,
    LocalEngine,
    ProcessEngine,
    Runner,
    SuiteError,
    TransientError,
    Workspace,
)
from steelyard.journal.reader import iter_records
from steelyard.report.headline import notices
from steelyard.run.config import build_suite
from steelyard.run.rescore import StoredAnswers
from steelyard.targets import CallableTarget
from steelyard.workspace.attempts import Workspaces
from steelyard.workspace.places import running_cases, safe_name

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


def writes(case, context):
    (context.workspace / "a.txt").write_text(f"by {case.id}")
    (context.workspace / "logs").mkdir()
    (context.workspace / "logs" / "x.log").write_text("log")
    (context.workspace / "logs" / "secret.log").symlink_to("/etc/passwd")
    return "x"


def passes_one(case, response, context):
    return (context.workspace / "a.txt").read_text() == "by one"


def artifacts(tmp_path, case_id="one", run="run"):
    folder = tmp_path / run / "artifacts" / safe_name(case_id) / "0"
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(("keep", "kept"), [("all", {"one", "Two/../x"}), ("failed", {"Two/../x"}), ("none", set())])
def test_whole_workspaces_are_kept_by_rule_and_the_patch_always(tmp_path, keep, kept):
    workspace = Workspace({"files": {"a.txt": "start"}}, keep=keep, artifacts=["logs/**"])
    run(writes, [passes_one], workspace=workspace, tmp_path=tmp_path)
    for case_id in ("one", "Two/../x"):
        found = artifacts(tmp_path, case_id)
        assert {"workspace.patch", "workspace.json", "files/logs/x.log"} <= found
        assert ("workspace/a.txt" in found) == (case_id in kept)
        # What a link leads to is not copied into the run.
        assert "files/logs/secret.log" not in found


@pytest.mark.parametrize("engine", [LocalEngine(), ProcessEngine(2)], ids=["here", "on workers"])
def test_disk_use_is_bounded_and_the_record_says_what_was_not_kept(tmp_path, engine):
    def large(case, context):
        (context.workspace / "large").write_bytes(b"x" * 200_000)
        return "x"

    workspace = Workspace(keep="all", max_disk="1050k")
    suite = EvalSet("s", [{"prompt": str(i)} for i in range(5)])
    with engine:
        result = run(large, workspace=workspace, tmp_path=tmp_path, suite=suite, engine=engine, parallelism=2)
    notes = [record.notes for record in result.responses]
    assert sum(bool(one) for one in notes) >= 3
    assert "max_disk (1,050,000 bytes) is used up" in str(notes)
    dropped = [record for record in result.responses if record.files_not_kept]
    not_kept = result.typed_metrics.not_kept
    assert (not_kept.cases, not_kept.files, not_kept.bytes) == (len(dropped), len(dropped), 200_000 * len(dropped))
    line = f"not kept of {len(dropped)} cases: {len(dropped)} files, {200 * len(dropped)} kB (max_disk is used up)"
    assert line in result.summary()
    (notice,) = [one for one in notices(result.typed_metrics) if one["title"] == "Not everything was kept"]
    assert f"{len(dropped)} files of {len(dropped)} cases, {200 * len(dropped)} kB" in notice["text"]


def test_files_that_a_pattern_names_are_counted_when_they_are_not_kept(tmp_path):
    def logs(case, context):
        for name in ("a.log", "b.log", "other"):
            (context.workspace / name).write_bytes(b"x" * 1000)
        return "x"

    workspace = Workspace(keep="none", artifacts=["*.log"], max_disk="1k")
    result = run(logs, workspace=workspace, tmp_path=tmp_path)
    assert [(record.files_not_kept, record.bytes_not_kept) for record in result.responses] == [(2, 2000), (2, 2000)]
    assert (
        Runner(logs, CASES, workspace=workspace, output_path=tmp_path / "run", progress="off")
        .run_sync(if_complete="load")
        .typed_metrics.not_kept.bytes
        == 4000
    )


def test_stored_answers_are_graded_again_from_the_patch(tmp_path):
    run(writes, workspace=FILES, tmp_path=tmp_path)
    again = Runner(
        StoredAnswers(tmp_path / "run"),
        CASES,
        [passes_one],
        workspace=FILES,
        output_path=tmp_path / "again",
        progress="off",
    )
    again.scored_from = str(tmp_path / "run")
    result = again.run_sync()
    assert [record.scores[0].passed for record in result.responses] == [True, False]
    assert "workspace.patch" in artifacts(tmp_path, run="again")


def test_what_cannot_be_rebuilt_is_refused_by_id(tmp_path):
    run(writes, workspace=FILES, tmp_path=tmp_path)
    (tmp_path / "run" / "artifacts" / "one" / "0" / "workspace.patch").unlink()
    again = Runner(
        StoredAnswers(tmp_path / "run"),
        CASES,
        [passes_one],
        workspace=FILES,
        output_path=tmp_path / "again",
        progress="off",
    )
    again.scored_from = str(tmp_path / "run")
    first, second = again.run_sync().responses
    assert first.scores[0].passed is None
    assert "the workspace of case 'one' cannot be rebuilt" in first.scores[0].errors[0]
    assert second.scores[0].passed is False


def test_a_cached_answer_is_graded_from_its_patch_and_an_edited_fixture_misses(tmp_path):
    fixture = tmp_path / "fixture"
    fixture.mkdir()
    (fixture / "a.txt").write_text("1")
    asked = []

    def agent(case, context):
        asked.append(case.id)
        (context.workspace / "a.txt").write_text(f"by {case.id}")
        return "x"

    target = CallableTarget(agent, model_id="m")

    def once(name):
        runner = Runner(
            target, CASES, [passes_one], workspace=Workspace(fixture), cache=tmp_path / "cache",
            output_path=tmp_path / name, progress="off",
        )  # fmt: skip
        return runner.run_sync().responses

    assert [record.scores[0].passed for record in once("first")] == [True, False]
    hits = once("second")
    assert [record.cached for record in hits] == [True, True]
    assert [record.scores[0].passed for record in hits] == [True, False]
    assert "workspace.patch" in artifacts(tmp_path, run="second")
    assert len(asked) == 2
    (fixture / "a.txt").write_text("2")
    assert not any(record.cached for record in once("third"))
    assert len(asked) == 4


def test_trials_each_have_their_own_workspace(tmp_path):
    result = run(writes, [passes_one], tmp_path=tmp_path, trials=3, parallelism=3)
    assert [record.scores[0].passed for record in result.responses] == [True] * 3 + [False] * 3
    assert {"0", "1", "2"} == set(os.listdir(tmp_path / "run" / "artifacts" / "one"))


KILLED = """
import os, signal, sys, time
from pathlib import Path
from steelyard import EvalSet, Runner, Workspace

place = Path(sys.argv[1])
die_in = sys.argv[2]

def note(what):
    with open(place / "notes", "a") as file:
        file.write(what + "\\n")

def agent(case, context):
    note(f"agent {case.id}")
    (context.workspace / "a.txt").write_text("done " + case.id)
    if die_in == "agent" and case.id == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    return "x"

def grade(case, response, context):
    note(f"grade {case.id}")
    assert context.workspace.is_dir()  # its own copy, which a killed launch leaves behind
    if die_in == "grade" and case.id == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    return (context.workspace / "a.txt").read_text() == "done " + case.id

cases = EvalSet("s", [{"id": str(number), "prompt": "p"} for number in range(6)])
Runner(
    agent, cases, [grade], workspace=Workspace({"files": {"a.txt": "start"}}), output_path=place / "run", progress="off"
).run_sync()
"""


@pytest.mark.parametrize(("moment", "asked"), [("agent", 2), ("grade", 1)])
@pytest.mark.parametrize("work_is_lost", [False, True])
def test_after_a_kill_only_what_is_missing_is_done_again(tmp_path, work, moment, asked, work_is_lost):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    killed = subprocess.run([sys.executable, script, tmp_path, moment], check=False)
    assert killed.returncode == -signal.SIGKILL
    if work_is_lost:
        shutil.rmtree(work)
    subprocess.run([sys.executable, script, tmp_path, "never"], check=True)
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes.count("agent 3") == asked
    assert all(notes.count(f"agent {number}") == 1 for number in "01245")
    records = list(iter_records(tmp_path / "run"))
    assert [record.scores[0].passed for record in records] == [True] * 6
    assert not work.exists() or not os.listdir(work)


def test_the_run_directory_says_which_attempts_are_under_way(tmp_path):
    seen = []

    def agent(case, context):
        seen.append([(one.id, one.trial, one.attempt) for one in running_cases(tmp_path / "run", 9)])
        return "done"

    run(agent, tmp_path=tmp_path, parallelism=1)
    assert seen == [[("one", 0, 1)], [("Two/../x", 0, 1)]]
    assert running_cases(tmp_path / "run", 9) == []
    assert not (tmp_path / "run" / "running").exists()


def test_marks_of_a_killed_launch_are_removed_and_links_are_not_read(tmp_path):
    (tmp_path / "run" / "running").mkdir(parents=True)
    mark = {"id": "gone", "trial": 0, "attempt": 1, "since": 1.0}
    (tmp_path / "run" / "running" / "gone.0.json").write_text(json.dumps(mark))
    (tmp_path / "elsewhere.json").write_text(json.dumps({**mark, "id": "elsewhere"}))
    (tmp_path / "run" / "running" / "link.0.json").symlink_to(tmp_path / "elsewhere.json")
    assert [one.id for one in running_cases(tmp_path / "run", 9)] == ["gone"]
    seen = []

    def agent(case):
        seen.extend(one.id for one in running_cases(tmp_path / "run", 9))
        return "done"

    run(agent, tmp_path=tmp_path, parallelism=1)
    assert seen == ["one", "Two/../x"]


def test_retry_errors_starts_the_errored_case_afresh_and_no_other(tmp_path):
    asked = []

    def agent(case, context):
        asked.append((case.id, sorted(path.name for path in context.workspace.iterdir())))
        (context.workspace / "made").write_text("x")
        if len(asked) == 1:
            raise ValueError("not today")
        return "done"

    def has_made(case, response, context):
        return (context.workspace / "made").exists()

    again = run(agent, [has_made], tmp_path=tmp_path, parallelism=1, retries=0)
    assert [record.error is None for record in again.responses] == [False, True]
    options = {"progress": "off", "output_path": tmp_path / "run", "parallelism": 1, "retries": 0}
    again = Runner(agent, CASES, [has_made], workspace=FILES, **options).run_sync(retry_errors=True)
    assert [record.passed for record in again.responses] == [True, True]
    assert asked == [(name, ["a.txt", "home.txt"]) for name in ("one", "Two/../x", "one")]


def test_update_asks_for_new_cases_and_grades_the_others_from_their_patches(tmp_path):
    asked = []

    def agent(case, context):
        asked.append(case.id)
        (context.workspace / "made").write_text(case.id)
        return "done"

    def lenient(case, response, context):
        return (context.workspace / "made").exists()

    def strict(case, response, context):
        return (context.workspace / "made").read_text() == "one"

    run(agent, [lenient], tmp_path=tmp_path)
    more = EvalSet("s", [*CASES, {"id": "three", "prompt": "r"}])
    options = {"progress": "off", "output_path": tmp_path / "run"}
    result = Runner(agent, more, [strict], workspace=FILES, **options).run_sync(if_complete="update")
    assert sorted(asked) == ["Two/../x", "one", "three"]
    assert {record.id: record.passed for record in result.responses} == {"one": True, "Two/../x": False, "three": False}


def test_a_suite_with_workspaces_is_refused_on_ray_before_anything_starts(tmp_path):
    pytest.importorskip("ray")
    from steelyard import RayEngine

    with pytest.raises(ConfigurationError, match="workspace"):
        run(lambda case: "x", tmp_path=tmp_path, engine=RayEngine())
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_run_that_is_interrupted_while_a_workspace_is_removed_keeps_its_counts(tmp_path, monkeypatch):
    token, clear, released = CancellationToken(), Workspaces._clear, threading.Event()

    def slow_clear(workspaces, case_id, trial):
        token.cancel("stop")
        released.wait(10)
        clear(workspaces, case_id, trial)

    monkeypatch.setattr(Workspaces, "_clear", slow_clear)
    try:
        result = run(lambda case: "x", tmp_path=tmp_path, parallelism=1, token=token)
    finally:
        released.set()
    counts = result.metrics["counts"]
    assert (counts["ok"], counts["cancelled"], counts["not_started"]) == (1, 0, 1)
