"""The patch of a workspace: git can read it, and it rebuilds exactly what the agent left."""

import os
import random
import subprocess

import pytest

from steelyard import ConfigurationError, EvalCase, Workspace
from steelyard.workspace.patch import apply_patch, make_patch, scan

FILES = {
    "a.txt": "one\ntwo\nthree\n",
    "src/b.py": "x = 1\n" * 50,
    "no_end": "last line",
    "empty": "",
    "gone.txt": "x\n",
}


def template_of(files=FILES, tmp_path=None):
    return Workspace({"files": files}).template_of(EvalCase(id="x", prompt="?"), tmp_path)


def files_in(folder):
    """Everything in a folder that a patch speaks of: content, links, and whether it can be executed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_file():
            found[name] = (os.access(path, os.X_OK), path.read_bytes())
    return found


def rebuilt(tmp_path, edit, files=FILES):
    template = template_of(files)
    work, again = tmp_path / "work", tmp_path / "again"
    template.make(work)
    before = scan(work)
    edit(work)
    patch, summary = make_patch(template, before, scan(work), work, 1)
    template.make(again)
    apply_patch(patch, summary, template, again)
    assert files_in(again) == files_in(work)
    return patch, summary, work


def all_kinds(work):
    (work / "a.txt").write_text("one\nTWO\nthree\nfour")
    (work / "src" / "b.py").write_text("y = 0\n" + "x = 1\n" * 20 + "mid\n" + "x = 1\n" * 30)
    (work / "no_end").write_text("last line\nand more")
    (work / "gone.txt").unlink()
    (work / "new dir").mkdir()
    (work / "new dir" / 'quo"te é\n.txt').write_text("named\n")
    (work / "image.bin").write_bytes(bytes(range(256)) * 40)
    (work / "run.sh").write_text("#!/bin/sh\n")
    (work / "run.sh").chmod(0o755)
    (work / "link").symlink_to("/etc/passwd")
    (work / "empty").chmod(0o755)
    (work / "just_empty").touch()
    (work / "crlf").write_bytes(b"a\r\nb\rc\x0bd\x0c\x85\r\n")
    (work / "not_utf8").write_bytes(b"\xff\xfe\n")
    (work / "signs").write_text("+plus\n-minus\n diff\ndiff --git a/x b/x\n@@ -1 +1 @@\n\\ No newline at end of file\n")


def test_every_kind_of_change_is_rebuilt(tmp_path):
    _, summary, _ = rebuilt(tmp_path, all_kinds)
    assert summary.files == 13
    assert not summary.left_out


def test_git_applies_the_patch_to_the_template(tmp_path):
    patch, _, work = rebuilt(tmp_path, all_kinds)
    by_git = tmp_path / "git"
    template_of().make(by_git)
    subprocess.run(["git", "init", "-q"], cwd=by_git, check=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=by_git, input=patch, check=True)
    found = {name: value for name, value in files_in(by_git).items() if not name.startswith(".git/")}
    assert found == files_in(work)


@pytest.mark.parametrize("seed", range(30))
def test_random_edits_are_rebuilt(tmp_path, seed):
    rng = random.Random(seed)
    words = [b"a\n", b"b\n", b"\n", b"a b c\n", b"\\ No newline at end of file\n", b"-x\n", b"tail"]
    text = b"".join(rng.choices(words[:6], k=rng.randrange(60))) + rng.choice([b"", b"tail"])
    lines = text.splitlines(keepends=True)
    for _ in range(rng.randrange(8)):
        place = rng.randrange(len(lines) + 1)
        lines[place : place + rng.randrange(3)] = rng.choices(words, k=rng.randrange(3))
    rebuilt(tmp_path, lambda work: (work / "f").write_bytes(b"".join(lines)), {"f": text.decode()})


def test_a_file_that_becomes_a_link_or_a_folder_is_rebuilt(tmp_path):
    def edit(work):
        (work / "a.txt").unlink()
        (work / "a.txt").symlink_to("no_end")
        (work / "gone.txt").unlink()
        (work / "gone.txt").mkdir()
        (work / "gone.txt" / "inner").write_text("x")

    rebuilt(tmp_path, edit)


def test_nothing_changed_gives_an_empty_patch(tmp_path):
    patch, summary, _ = rebuilt(tmp_path, lambda work: None)
    assert patch == b""
    assert summary.files == 0


def test_a_change_that_keeps_size_and_time_is_seen(tmp_path):
    def edit(work):
        seen = (work / "a.txt").stat()
        (work / "a.txt").write_text("one\nTWO\nthree\n")
        os.utime(work / "a.txt", ns=(seen.st_atime_ns, seen.st_mtime_ns))

    assert rebuilt(tmp_path, edit)[1].files == 1


def test_caches_and_git_are_left_out(tmp_path):
    template, work = template_of(), tmp_path / "work"
    template.make(work)
    before = scan(work)
    for name in (".git", "__pycache__", ".pytest_cache"):
        (work / name).mkdir()
        (work / name / "x").write_text("x")
    assert make_patch(template, before, scan(work), work, 1)[0] == b""


def test_what_a_patch_cannot_hold_is_named_and_not_rebuilt(tmp_path):
    template, work = template_of(), tmp_path / "work"
    template.make(work)
    before = scan(work)
    os.mkfifo(work / "pipe")
    patch, summary = make_patch(template, before, scan(work), work, 1)
    assert summary.left_out == ["pipe"]
    with pytest.raises(ConfigurationError, match="does not hold pipe"):
        apply_patch(patch, summary, template, work)


def test_a_patch_against_another_template_is_refused(tmp_path):
    patch, summary, _ = rebuilt(tmp_path, all_kinds)
    with pytest.raises(ConfigurationError, match="edited since"):
        apply_patch(patch, summary, template_of({"a.txt": "other"}), tmp_path)


def test_what_setup_had_changed_is_rebuilt_too(tmp_path):
    """The setup edits one file, makes another and a third; the agent undoes the first and deletes the second."""
    template, work, again = template_of(), tmp_path / "work", tmp_path / "again"

    def setup(folder):
        (folder / "a.txt").write_text("changed by setup\n")
        (folder / "made").write_text("by setup\n")
        (folder / "kept").write_text("by setup\n")

    template.make(work)
    setup(work)
    before = scan(work)
    (work / "a.txt").write_text(FILES["a.txt"])
    (work / "made").unlink()
    patch, summary = make_patch(template, before, scan(work), work, 1)
    template.make(again)
    setup(again)
    apply_patch(patch, summary, template, again)
    assert files_in(again) == files_in(work)


@pytest.mark.parametrize("path", ["../out", "a/../../out", "/etc/x"])
def test_a_patch_that_was_tampered_with_does_not_write_elsewhere(tmp_path, path):
    patch = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,1 @@\n+x\n"
    template, work = template_of(), tmp_path / "work"
    template.make(work)
    summary = make_patch(template, scan(work), scan(work), work, 1)[1]
    with pytest.raises(ConfigurationError, match="not within a workspace"):
        apply_patch(patch.encode(), summary, template, work)
    assert not (tmp_path / "out").exists()


def test_a_patch_does_not_write_through_a_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    template, work = template_of(), tmp_path / "work"
    template.make(work)
    summary = make_patch(template, scan(work), scan(work), work, 1)[1]
    (work / "d").symlink_to(outside)
    patch = b"diff --git a/d/x b/d/x\nnew file mode 100644\n--- /dev/null\n+++ b/d/x\n@@ -0,0 +1,1 @@\n+x\n"
    apply_patch(patch, summary, template, work)
    assert os.listdir(outside) == []
    assert (work / "d" / "x").read_text() == "x\n"


def test_a_large_rewrite_is_diffed_at_once(tmp_path):
    old = "".join(f"line {number % 7}\n" for number in range(20_000))
    new = "".join(f"line {number % 5}\n" for number in range(20_000))
    rebuilt(tmp_path, lambda work: (work / "f").write_text(new), {"f": old})
