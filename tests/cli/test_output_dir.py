"""Where a run goes without --out: the newest unfinished run of the same suite and target, or a new folder."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path

import pytest

from steelyard.journal.lock import RunLock
from tests.support.cli import Ended, Workshop, finish, run_cli, start


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def go(shop: Workshop, *words: str) -> Ended:
    return run_cli(shop.folder, "run", "suite.yaml", "--no-progress", *words)


def runs(shop: Workshop) -> list[Path]:
    """The run folders, oldest first."""
    folder = shop.folder / "runs"
    found = [place for place in folder.iterdir() if (place / "run.json").exists()] if folder.exists() else []
    return sorted(found, key=lambda place: json.loads((place / "run.json").read_bytes())["created"])


def unfinish(place: Path, lines: int) -> None:
    """Make a finished run look like one that was killed."""
    outputs = place / "outputs.jsonl"
    outputs.write_bytes(b"".join(outputs.read_bytes().splitlines(keepends=True)[:lines]))
    (place / "metrics.json").unlink()


def test_the_first_run_gets_a_folder_named_after_the_suite_and_the_time(shop: Workshop) -> None:
    ended = go(shop)
    (place,) = runs(shop)
    assert ended.code == 0
    assert place.name.startswith("shouting-2")
    assert f"results in runs/{place.name}" in ended.out


def test_an_unfinished_run_is_resumed_and_that_is_said(shop: Workshop) -> None:
    go(shop)
    (place,) = runs(shop)
    unfinish(place, 4)
    shop.asked()
    ended = go(shop)
    assert ended.code == 0
    assert runs(shop) == [place]
    assert shop.asked() == ["c4", "c5"]
    assert f"resuming runs/{place.name}: 4 of 6 done" in ended.err
    assert "--new" in ended.err


def test_the_newest_of_several_unfinished_runs_is_resumed(shop: Workshop) -> None:
    for _ in range(3):
        go(shop, "--new")
    first, second, third = runs(shop)
    unfinish(first, 5)
    unfinish(second, 3)
    shop.asked()
    go(shop)
    assert shop.asked() == ["c3", "c4", "c5"]
    assert (second / "metrics.json").exists()
    assert not (first / "metrics.json").exists()
    assert len(runs(shop)) == 3
    assert third in runs(shop)


@pytest.mark.parametrize("difference", ["target", "seed", "suite"])
def test_an_unfinished_run_of_something_else_is_left_alone(shop: Workshop, difference: str) -> None:
    go(shop)
    (place,) = runs(shop)
    unfinish(place, 4)
    if difference == "target":
        shop.suite(target={"python": {"function": "agent.py:answer", "version": "2"}})
    if difference == "suite":
        shop.suite(id="whispering")
    shop.asked()
    ended = go(shop, *(["--seed", "5"] if difference == "seed" else []))
    assert ended.code == 0
    assert len(shop.asked()) == 6
    assert len(runs(shop)) == 2


def test_new_starts_another_run_beside_an_unfinished_one(shop: Workshop) -> None:
    go(shop)
    unfinish(runs(shop)[0], 4)
    shop.asked()
    assert go(shop, "--new").code == 0
    assert len(shop.asked()) == 6
    assert len(runs(shop)) == 2


def test_new_does_not_go_with_out(shop: Workshop) -> None:
    ended = go(shop, "--new", "--out", "x")
    assert ended.code == 2
    assert "--out" in ended.err
    assert shop.asked() == []


def test_after_a_finished_run_without_errors_a_new_one_begins(shop: Workshop) -> None:
    assert go(shop).code == go(shop).code == 0
    assert len(runs(shop)) == 2


def test_a_finished_run_with_errors_is_refused_with_the_command_that_retries_them(shop: Workshop) -> None:
    """The command printed is whole: typed as it stands, it asks the errors again and finishes."""
    shop.failing("c1")
    assert go(shop, "-n", "4").code == 4
    shop.failing("")
    shop.asked()
    ended = go(shop, "-n", "4")
    assert ended.code == 2
    assert shop.asked() == []
    (printed,) = [line.strip() for line in ended.err.splitlines() if line.strip().startswith(("steelyard run", "/"))]
    words = shlex.split(printed)
    assert "--retry-errors" in words
    assert "--new" in ended.err
    again = run_cli(shop.folder, *words[1:])
    assert again.code == 0
    assert shop.asked() == ["c1"]
    assert len(runs(shop)) == 1


def test_answers_that_could_not_be_scored_are_said_to_be_scored_again_not_asked(shop: Workshop) -> None:
    shop.suite(scorers=[{"python": "agent.py:shout"}])
    shop.unscorable("c1")
    first = go(shop)
    assert first.code == 4
    assert "--retry-errors scores them again" in first.err
    assert "is complete with 1 scoring error. This scores them again:" in go(shop).err


def test_the_printed_command_is_quoted_for_a_shell(shop: Workshop) -> None:
    name = "it's a suite é.yaml"
    (shop.folder / "suite.yaml").rename(shop.folder / name)
    shop.failing("c1")
    words = ("run", name, "-k", "c[0-2]", "--seed=-3", "-qj2", "--no-progress")
    assert run_cli(shop.folder, *words).code == 4
    shop.failing("")
    ended = run_cli(shop.folder, *words)
    (printed,) = [line.strip() for line in ended.err.splitlines() if line.strip().startswith("steelyard run")]
    assert "--seed -3" in printed
    assert "--parallelism 2" in printed
    shop.asked()
    assert run_cli(shop.folder, *shlex.split(printed)[1:]).code == 0
    assert shop.asked() == ["c1"]


def test_new_passes_over_a_finished_run_with_errors(shop: Workshop) -> None:
    shop.failing("c1")
    go(shop)
    shop.failing("")
    assert go(shop, "--new").code == 0
    assert len(runs(shop)) == 2


def test_retry_errors_without_out_takes_the_newest_run(shop: Workshop) -> None:
    shop.failing("c1")
    go(shop)
    shop.failing("")
    shop.asked()
    assert go(shop, "--retry-errors").code == 0
    assert shop.asked() == ["c1"]
    assert len(runs(shop)) == 1


def test_retry_errors_where_there_is_no_run_calls_nothing(shop: Workshop) -> None:
    ended = go(shop, "--retry-errors")
    assert ended.code == 2
    assert "no run" in ended.err
    assert shop.asked() == []
    assert runs(shop) == []


def test_force_without_out_starts_the_newest_run_over(shop: Workshop) -> None:
    go(shop)
    shop.asked()
    assert go(shop, "--force").code == 0
    (place,) = runs(shop)
    assert len(shop.asked()) == 6
    assert len(list((place / "previous").iterdir())) == 1


def test_a_run_that_another_process_is_writing_is_refused_naming_new(shop: Workshop) -> None:
    go(shop)
    (place,) = runs(shop)
    unfinish(place, 4)
    with RunLock(place):
        ended = go(shop)
    assert ended.code == 2
    assert str(os.getpid()) in ended.err
    assert "--new" in ended.err


def test_folders_that_are_not_runs_do_not_stand_in_the_way(shop: Workshop) -> None:
    folder = shop.folder / "runs"
    (folder / "foreign").mkdir(parents=True)
    (folder / "foreign" / "run.json").write_text('{"name": "something else"}')
    (folder / "torn").mkdir()
    (folder / "torn" / "run.json").write_text("{")
    (folder / "directory" / "run.json").mkdir(parents=True)
    (folder / "file").write_text("")
    (folder / "gone").symlink_to(folder / "nowhere")
    assert go(shop).code == 0


def test_runs_that_are_started_in_one_second_get_a_folder_each(shop: Workshop) -> None:
    started = [start(shop.folder, "run", "suite.yaml", "--new", "--no-progress") for _ in range(4)]
    ended = [finish(process) for process in started]
    assert [one.code for one in ended] == [0] * 4, [one.err for one in ended]
    assert len(runs(shop)) == 4
    assert len(shop.asked()) == 24


def test_a_folder_that_another_run_has_just_made_is_not_shared(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    others = shop.folder / "runs" / "shouting-20250101-000000"
    others.mkdir(parents=True)
    monkeypatch.setattr(time, "strftime", lambda _: "20250101-000000")
    assert go(shop).code == 0
    assert list(others.iterdir()) == []
    assert [place.name for place in runs(shop)] == ["shouting-20250101-000000-2"]


@pytest.mark.parametrize("words", [["--dry-run"], ["-k", "nothing-matches-this"], ["--parallelism", "0"]])
def test_what_calls_nothing_leaves_no_folder_behind(shop: Workshop, words: list[str]) -> None:
    go(shop, *words)
    assert shop.asked() == []
    assert not (shop.folder / "runs").exists()


HOSTILE = [
    "../../x",
    "/etc/x",
    "..",
    ".",
    "a/b",
    "\x1b[31mred",
    "\u202egnirts",
    "nul\0",
    "   ",
    "x" * 5000,
    "日本",
    "-rf",
]


@pytest.mark.parametrize("suite_id", HOSTILE)
def test_a_hostile_suite_id_neither_leaves_runs_nor_steers_the_terminal(shop: Workshop, suite_id: str) -> None:
    shop.suite(id=suite_id)
    before = {place.name for place in shop.folder.parent.iterdir()}
    ended = go(shop, "-v")
    assert ended.code == 0, ended.err
    (place,) = runs(shop)
    assert place.parent == shop.folder / "runs"
    assert {place.name for place in shop.folder.parent.iterdir()} == before
    unfinish(place, 3)
    again = go(shop, "-v")
    listed = run_cli(shop.folder, "ls")
    shown = run_cli(shop.folder, "report", place)
    for text in (ended.out, ended.err, again.out, again.err, listed.out, shown.out):
        assert not set(text) & {"\x1b", "\0", "\u202e", "\x9b", "\r"}
    assert again.code == listed.code == shown.code == 0


def test_an_unfinished_run_with_a_session_is_found_again_and_only_with_that_session(shop: Workshop) -> None:
    for name in ("one", "two"):
        (shop.folder / f"{name}.json").write_text(json.dumps({"data": {"name": name}}))
    go(shop, "--initial-session-file", "one.json")
    (place,) = runs(shop)
    unfinish(place, 4)
    shop.asked()
    assert go(shop, "--initial-session-file", "two.json").code == 0
    assert len(runs(shop)) == 2
    shop.asked()
    assert go(shop, "--initial-session-file", "one.json").code == 0
    assert shop.asked() == ["c4", "c5"]
    assert len(runs(shop)) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_folder_that_cannot_be_made_is_refused_and_nothing_is_said_to_be_there(shop: Workshop) -> None:
    ended = run_cli(shop.folder, "run", "suite.yaml", "--out", "/proc/x", "--no-progress")
    assert ended.code == 2
    assert ended.err.splitlines()[0] == "steelyard: cannot create /proc/x: No such file or directory"
    assert shop.asked() == []


def test_a_run_directory_in_the_folder_of_a_ray_job_is_warned_about(tmp_path: Path) -> None:
    folder = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    shop = Workshop(folder)
    kept = str(tmp_path / "kept")
    assert "which Ray deletes: give --out a path that stays" in go(shop, "--out", "mine").err
    assert "which Ray deletes" not in go(shop, "--out", kept).err
