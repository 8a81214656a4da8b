"""Templates of workspaces: folders, inline files, git; their digests; nothing that leads out."""

import os
import subprocess

import pytest

from steelyard import ConfigurationError, EvalCase, Workspace

CASE = EvalCase(id="fix-1", prompt="Fix it", metadata={"repo": "acme/app", "files": {"a/b.txt": "inline"}})


@pytest.fixture
def template(tmp_path):
    folder = tmp_path / "fixtures" / "fix-1"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "app.py").write_text("print('hi')\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("src/app.py")
    return folder


def made(workspace, tmp_path, case=CASE):
    target = tmp_path / "made"
    workspace.template_of(case, tmp_path / "cache").make(target)
    return target


def digest(workspace, tmp_path, case=CASE):
    return workspace.template_of(case, tmp_path / "cache").digest


def git(folder, *arguments):
    who = ["-c", "user.name=T", "-c", "user.email=t@example.com"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode("utf-8", "replace").strip()


def test_a_folder_is_copied_with_modes_and_links(template, tmp_path):
    copy = made(Workspace("fixtures/{{ id }}", folder=tmp_path), tmp_path)
    assert (copy / "src" / "app.py").read_text() == "print('hi')\n"
    assert os.access(copy / "run.sh", os.X_OK)
    assert os.readlink(copy / "link") == "src/app.py"


def test_a_write_in_place_does_not_edit_the_template(template, tmp_path):
    copy = made(Workspace(template), tmp_path)
    with open(copy / "src" / "app.py", "r+") as file:
        file.write("EDITED")
    assert (template / "src" / "app.py").read_text() == "print('hi')\n"
    assert (template / "src" / "app.py").stat().st_nlink == 1


@pytest.mark.parametrize("edit", ["content", "mode", "name", "link"])
def test_each_edit_of_a_template_changes_its_digest(template, tmp_path, edit):
    before = digest(Workspace(template), tmp_path)
    if edit == "content":
        (template / "src" / "app.py").write_text("print('ho')\n")
    elif edit == "mode":
        (template / "run.sh").chmod(0o644)
    elif edit == "name":
        (template / "run.sh").rename(template / "go.sh")
    else:
        (template / "link").unlink()
        (template / "link").symlink_to("run.sh")
    assert digest(Workspace(template), tmp_path) != before


def test_a_template_that_is_edited_while_it_is_used_is_refused(template, tmp_path):
    workspace = Workspace(template)
    digest(workspace, tmp_path)
    (template / "src" / "app.py").write_text("edited meanwhile\n")
    with pytest.raises(ConfigurationError, match="was edited while the run used it"):
        made(workspace, tmp_path)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../secret", "src/../../other"])
def test_a_link_that_leads_out_of_the_template_is_refused(template, tmp_path, target):
    (template / "out").symlink_to(target)
    with pytest.raises(ConfigurationError, match="the link out leads out of"):
        digest(Workspace(template), tmp_path)


def test_a_link_that_leads_out_through_another_link_is_refused(template, tmp_path):
    (tmp_path / "secret").write_text("s")
    (template / "up").symlink_to("src/..")
    (template / "src" / "out").symlink_to("../up/../../../secret")
    with pytest.raises(ConfigurationError, match="leads out of"):
        digest(Workspace(template), tmp_path)


def test_git_of_a_template_folder_is_left_out(template, tmp_path):
    git(template, "init", "-q")
    assert not (made(Workspace(template), tmp_path) / ".git").exists()


@pytest.mark.parametrize("case_id", ["../fix-1", "..", ".", "/etc", "a/../../etc", "x/./y", "x//y"])
def test_an_id_cannot_lead_out_of_the_folder_that_the_template_names(template, tmp_path, case_id):
    case = EvalCase(id=case_id, prompt="?")
    with pytest.raises(ConfigurationError, match=r"could lead elsewhere|leads elsewhere"):
        digest(Workspace("fixtures/{{ id }}", folder=tmp_path), tmp_path, case)


def test_parts_that_make_dots_together_are_refused(template, tmp_path):
    workspace = Workspace("fixtures/{{ metadata.a }}{{ metadata.b }}", folder=tmp_path)
    case = EvalCase(id="x", prompt="?", metadata={"a": "a/.", "b": "./."})
    with pytest.raises(ConfigurationError, match="elsewhere"):
        digest(workspace, tmp_path, case)


def test_a_template_may_itself_name_a_folder_above(template, tmp_path):
    (tmp_path / "suites").mkdir()
    workspace = Workspace("../fixtures/{{ id }}", folder=tmp_path / "suites")
    assert (made(workspace, tmp_path) / "run.sh").exists()


def test_inline_files_are_written_and_their_paths_are_templates(tmp_path):
    copy = made(Workspace({"files": {"src/{{ id }}.py": "x = '{{ not a template }}'\n"}}), tmp_path)
    assert (copy / "src" / "fix-1.py").read_text() == "x = '{{ not a template }}'\n"


def test_inline_files_may_come_from_the_case(tmp_path):
    assert (made(Workspace({"files": "{{ metadata.files }}"}), tmp_path) / "a" / "b.txt").read_text() == "inline"


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../b", "", "a//b", "./a"])
def test_inline_files_stay_in_the_workspace(tmp_path, path):
    case = EvalCase(id="x", prompt="?", metadata={"files": {path: "text"}})
    with pytest.raises(ConfigurationError, match="must be a path within the workspace"):
        digest(Workspace({"files": "{{ metadata.files }}"}), tmp_path, case)


def test_nothing_gives_an_empty_folder(tmp_path):
    assert os.listdir(made(Workspace(), tmp_path)) == []


@pytest.fixture
def repository(tmp_path):
    """A repository with a fix on another branch, a tag, a dropped commit and a remote."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "app.py").write_text("bug = True\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "First")
    (folder / "app.py").write_text("bug = True  # still\n")
    git(folder, "commit", "-q", "-am", "Second")
    base = git(folder, "rev-parse", "HEAD")
    (folder / "app.py").write_text("SECRET_FIX = 1\n")
    git(folder, "commit", "-q", "-am", "Fix it SECRET_FIX")
    git(folder, "tag", "fixed")
    git(folder, "branch", "fix")
    (folder / "app.py").write_text("SECRET_FIX = 'dropped'\n")
    git(folder, "commit", "-q", "-am", "Dropped SECRET_FIX")
    git(folder, "reset", "-q", "--hard", "HEAD~1")
    git(folder, "remote", "add", "origin", "https://example.com/SECRET_FIX.git")
    return folder, base


def _all_objects(folder):
    """The content of every object in a repository, reachable or not."""
    listed = git(folder, "cat-file", "--batch-check", "--batch-all-objects").splitlines()
    return "\n".join(git(folder, "cat-file", line.split()[1], line.split()[0]) for line in listed)


def test_a_commit_is_exported_with_one_fresh_commit(repository, tmp_path):
    folder, base = repository
    copy = made(Workspace({"git": str(folder), "ref": base}), tmp_path)
    assert (copy / "app.py").read_text() == "bug = True  # still\n"
    assert git(copy, "log", "--all", "--format=%s") == "Task"
    assert git(copy, "status", "--porcelain") == ""
    assert "SECRET_FIX" not in _all_objects(copy)


def test_history_has_nothing_but_the_commits_up_to_the_ref(repository, tmp_path):
    folder, base = repository
    copy = made(Workspace({"git": str(folder), "ref": base, "history": True}), tmp_path)
    assert git(copy, "log", "--all", "--format=%s").splitlines() == ["Second", "First"]
    assert git(copy, "rev-parse", "HEAD") == base
    assert git(copy, "tag") == git(copy, "remote") == git(copy, "reflog") == ""
    assert git(copy, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert "SECRET_FIX" not in _all_objects(copy)
    files = [file for file in (copy / ".git").rglob("*") if file.is_file()]
    assert not [file for file in files if b"SECRET_FIX" in file.read_bytes()]


def test_a_missing_ref_is_named(repository, tmp_path):
    with pytest.raises(ConfigurationError, match="has no commit 'nope'"):
        digest(Workspace({"git": str(repository[0]), "ref": "nope"}), tmp_path)


def test_a_ref_from_a_case_cannot_be_an_option(repository, tmp_path):
    case = EvalCase(id="x", prompt="?", metadata={"ref": "--output=/tmp/x"})
    with pytest.raises(ConfigurationError, match="is not the name of a commit"):
        digest(Workspace({"git": str(repository[0]), "ref": "{{ metadata.ref }}"}), tmp_path, case)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"keep": "some"}, "keep must be one of failed, all, none"),
        ({"setup": "git init"}, "setup must be a list of commands"),
        ({"setup": [["git", "{{ nope }}"]]}, "unknown name 'nope'"),
        ({"artifacts": ["../x"]}, "relative to the workspace"),
        ({"setup_timeout": "soon"}, "setup_timeout must be a length of time"),
        ({"template": {"folder": "x"}}, "workspace.from must be a folder"),
        ({"template": {"git": ".", "branch": "x"}}, "unknown key workspace.from.branch"),
    ],
)
def test_a_bad_argument_is_named(arguments, problem):
    with pytest.raises(ConfigurationError, match=problem):
        Workspace(**arguments)
