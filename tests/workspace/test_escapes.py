"""Hostile cases: no id, argument, template or output writes outside its workspace or reads another case's."""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from steelyard import EvalSet, Runner, SuiteError, Workspace
from steelyard.targets import Agent
from steelyard.workspace.places import safe_name

HOSTILE_IDS = [
    "../../../../etc/passwd", "/etc/passwd", "..", ".", "a/b/c", "a\\b", "-rf", "~", "$HOME", "`id`", "a\nb", "CON",
    "x" * 5000, "é\u202e", ".git", "{{ 7 * 7 }}", "a;b", "*", "A", "a", " ", "%2e%2e%2f", "name with space", "0",
]  # fmt: skip


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    monkeypatch.setenv("STEELYARD_WORK", str(folder))
    return folder


def everything(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_names_are_safe_and_never_the_same():
    names = [safe_name(case_id) for case_id in HOSTILE_IDS]
    assert len({name.lower() for name in names}) == len(names)
    for name in names:
        assert 0 < len(name) <= 80
        assert "/" not in name
        assert name not in (".", "..")
        assert not name.startswith((".", "-", "~"))
        assert name.isascii()
        assert name.isprintable()


def test_hostile_ids_stay_in_the_run_and_the_work_folder(tmp_path, work):
    (tmp_path / "cwd").mkdir()
    os.chdir(tmp_path / "cwd")

    def agent(case, context):
        assert context.workspace.parent.parent.parent == work
        (context.workspace / "f").write_text(case.id)
        context.log(case.id)
        return "x"

    def own(case, response, context):
        return (context.workspace / "f").read_text() == case.id

    suite = EvalSet("s", [{"id": case_id, "prompt": "p"} for case_id in HOSTILE_IDS])
    runner = Runner(agent, suite, [own], workspace=Workspace(keep="all"), output_path=tmp_path / "run", progress="off")
    result = runner.run_sync()
    assert [record.error for record in result.responses] == [None] * len(HOSTILE_IDS)
    assert all(record.scores[0].passed for record in result.responses)
    assert set(os.listdir(tmp_path)) <= {"cwd", "run", "work"}
    assert len(os.listdir(tmp_path / "run" / "artifacts")) == len(HOSTILE_IDS)
    assert os.listdir(tmp_path / "cwd") == []


@pytest.mark.parametrize("case_id", ["../other", "..", "/etc", "a/../../other"])
def test_an_id_cannot_name_the_fixture_of_another_case(tmp_path, case_id):
    (tmp_path / "fixtures" / "a").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    suite = EvalSet("s", [{"id": case_id, "prompt": "p"}])
    runner = Runner(lambda case: "x", suite, workspace=Workspace("fixtures/{{ id }}", folder=tmp_path), progress="off")
    with pytest.raises(SuiteError, match="elsewhere"):
        runner.run_sync()


def run_agent(tmp_path, script, **arguments):
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "agent.py").write_text(textwrap.dedent(script))
    agent = Agent([sys.executable, "{{ suite }}/agent.py"], folder=tmp_path / "suite")
    workspace = Workspace({"files": {"a": "1"}}, keep="all", artifacts=["**"], **arguments)
    suite = EvalSet("s", [{"id": "c", "prompt": "p"}])
    runner = Runner(agent, suite, workspace=workspace, output_path=tmp_path / "run", progress="off")
    (record,) = runner.run_sync().responses
    return record


@pytest.fixture
def secret(tmp_path):
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "key").write_text("TOP-SECRET-CONTENT")
    return folder


def leaked(tmp_path):
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if b"TOP-SECRET-CONTENT" in path.read_bytes()]


def test_links_of_an_agent_are_not_followed_when_its_work_is_kept(tmp_path, secret):
    record = run_agent(
        tmp_path,
        f"import os; os.symlink({str(secret)!r}, 'folder'); os.symlink({str(secret / 'key')!r}, 'file.log')",
    )
    assert record.error is None
    assert leaked(tmp_path) == []
    assert (secret / "key").read_text() == "TOP-SECRET-CONTENT"


def test_a_workspace_that_is_replaced_by_a_link_is_refused(tmp_path, secret):
    script = f"import os; os.rename(os.getcwd(), '../moved'); os.symlink({str(secret)!r}, '../workspace')"
    record = run_agent(tmp_path, script)
    assert "removed or replaced its workspace" in record.error
    assert leaked(tmp_path) == []
    assert os.listdir(secret) == ["key"]


def test_what_is_written_beside_a_workspace_does_not_go_through_links(tmp_path, secret):
    target = str(secret / "key")
    run_agent(tmp_path, f"import os; os.symlink({target!r}, '../attempt.json.tmp')")
    assert (secret / "key").read_text() == "TOP-SECRET-CONTENT"


def test_removing_a_workspace_leaves_what_its_links_lead_to(tmp_path, secret, work):
    script = f"""
        import os
        os.symlink({str(secret)!r}, 'folder')
        os.makedirs('locked/inner')
        open('locked/inner/f', 'w')
        os.chmod('locked/inner', 0)
    """
    run_agent(tmp_path, script)
    assert (secret / "key").exists()
    assert not work.exists() or os.listdir(work) == []


def test_git_finds_no_repository_above_the_workspace(tmp_path, work):
    import subprocess

    work.mkdir()
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    record = run_agent(
        tmp_path,
        "import subprocess; print(subprocess.run(['git', 'rev-parse'], capture_output=True).returncode)",
    )
    assert record.response_text == "128"


def test_an_agent_does_not_learn_where_the_run_is_from_its_environment(tmp_path):
    record = run_agent(tmp_path, "import os; print('\\n'.join(os.environ.values()))")
    assert str(tmp_path / "run") not in record.response_text
    assert str(Path.cwd()) not in record.response_text
