"""The files of an agent's case: found by case and trial, bounded, without following links."""

from __future__ import annotations

from pathlib import Path

from steelyard.report.case_files import MAX_FILES, CaseFile, beginning, case_files, ending, has_files, patch_summary
from tests.support.report import worked_run


def test_the_files_of_a_case_are_found(tmp_path: Path) -> None:
    run = worked_run(tmp_path / "run")
    for name in ("0.1.out", "1.out", "10.out"):
        (run / "logs" / "fixer" / name).write_text("x")
    found = case_files(run, "fixer", 0)
    assert [file.path for file in found.logs] == [
        "calls/fixer/0.jsonl", "logs/fixer/0.err", "logs/fixer/0.out", "logs/fixer/0.1.out",
    ]  # fmt: skip
    assert found.patch is not None
    summary = patch_summary(run, found.patch)
    assert summary is not None
    assert (summary.files, summary.added, summary.removed) == (1, 1, 1)
    assert [file.path for file in found.artifacts] == [
        "artifacts/fixer/0/files/notes.txt", "artifacts/fixer/0/files/page.html",
    ]  # fmt: skip
    assert found.more == 0
    assert not case_files(run, "nobody", 0)
    assert has_files(run)
    assert not has_files(tmp_path)


def test_many_files_are_counted_and_a_whole_workspace_comes_last(tmp_path: Path) -> None:
    kept = tmp_path / "artifacts" / "c" / "0"
    for number in range(MAX_FILES + 30):
        (kept / "workspace" / str(number % 7)).mkdir(parents=True, exist_ok=True)
        (kept / "workspace" / str(number % 7) / f"{number}.txt").write_text("x")
    (kept / "z.log").write_text("log")
    (kept / "workspace.patch").write_text("")
    (kept / "workspace.json").write_text("{}")
    found = case_files(tmp_path, "c", 0)
    assert len(found.artifacts) == MAX_FILES
    assert found.artifacts[0].path == "artifacts/c/0/z.log"
    assert found.more == 31


def test_links_are_neither_listed_nor_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "0.out").write_text("secret")
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "a").symlink_to(secret)
    (run / "logs" / "b").mkdir()
    (run / "logs" / "b" / "0.out").symlink_to(secret / "0.out")
    (run / "artifacts" / "b" / "0").mkdir(parents=True)
    (run / "artifacts" / "b" / "0" / "folder").symlink_to(secret)
    assert not case_files(run, "a", 0)
    assert not case_files(run, "b", 0)
    for reads in (beginning, ending):
        assert reads(run, CaseFile("logs/b/0.out", 6), 100) == ""
        assert reads(run, CaseFile("../secret/0.out", 6), 100) == ""


def test_beginnings_and_endings_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x").write_text("é" * 10 + "z" * 1000 + "end\n")
    file = CaseFile("logs/x", 0)
    assert beginning(tmp_path, file, 12) == "é" * 10 + "zz"
    assert ending(tmp_path, file, 5) == "zend\n"
