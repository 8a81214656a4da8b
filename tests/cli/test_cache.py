"""`steelyard cache`: says what a cache holds, empties it when told to, and never makes or harms anything else."""

from __future__ import annotations

import io
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import click
import pytest

from steelyard.cache import LocalFileTaskResultStore, ManagedStore, SqliteTaskResultStore
from steelyard.cli import cache
from tests.support.cache import an_answer, key_of
from tests.support.cli import run_cli

PLACES = ["folder", "answers.db", "answers.sqlite", "ANSWERS.SQLITE", "folder.db"]


def filled(folder: Path, name: str, *, suites: tuple[str, ...] = ("capitals", "capitals", "Rivers/é")) -> ManagedStore:
    """A store with one answer for each suite named, at that place; `folder...` is one of files."""
    store: ManagedStore
    store = LocalFileTaskResultStore(folder / name) if "folder" in name else SqliteTaskResultStore(folder / name)
    for number, suite in enumerate(suites):
        store.put(suite, f"c{number}", key_of(number), an_answer())
    return store


def answering(monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))


@pytest.mark.parametrize("name", PLACES)
def test_info_says_how_many_answers_there_are_and_their_size(tmp_path: Path, name: str) -> None:
    filled(tmp_path, name).close()
    ended = run_cli(tmp_path, "cache", "info", name)
    assert ended.code == 0
    assert ended.out.startswith(f"{name}: 3 answers, ")
    assert len(ended.out.splitlines()) == 1


@pytest.mark.parametrize("name", PLACES)
def test_info_as_json_is_what_the_store_says(tmp_path: Path, name: str) -> None:
    store = filled(tmp_path, name)
    held = store.info()
    ended = run_cli(tmp_path, "cache", "info", name, "--json")
    store.close()
    assert ended.code == 0
    assert json.loads(ended.out) == {"path": name, "entries": 3, "bytes": held.bytes}


def test_without_a_place_it_is_the_default_one(tmp_path: Path) -> None:
    filled(tmp_path, "folder")
    (tmp_path / ".steelyard").mkdir()
    (tmp_path / "folder").rename(tmp_path / ".steelyard" / "cache")
    assert run_cli(tmp_path, "cache", "info").out.startswith(".steelyard/cache: 3 answers")
    assert run_cli(tmp_path, "cache", "clear", "--yes").out == ".steelyard/cache: 3 answers removed\n"
    assert run_cli(tmp_path, "cache", "info").out == ".steelyard/cache: 0 answers, 0 B\n"


@pytest.mark.parametrize("words", [["info"], ["info", "--json"], ["clear", "--yes"], ["clear"]])
@pytest.mark.parametrize("name", [None, "nowhere", "nowhere.db", "no/where.sqlite"])
def test_a_place_that_is_not_there_is_exit_2_and_is_not_made(
    tmp_path: Path, words: list[str], name: str | None
) -> None:
    ended = run_cli(tmp_path, "cache", *words, *([name] if name else []))
    assert ended.code == 2
    assert f"there is no cache at {name or '.steelyard/cache'}" in ended.err
    assert ended.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_cache_is_exit_2_and_stays_as_it_was(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    false = tmp_path / "false.db"
    false.write_text("not a database, whatever its name" * 50)
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection, connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = {path: path.read_bytes() for path in (notes, false, other)}
    for path in before:
        for words in (["info"], ["clear", "--yes"]):
            ended = run_cli(tmp_path, "cache", *words, path.name)
            assert ended.code == 2, ended
            assert path.name in ended.err
            assert "Traceback" not in ended.err
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("name", PLACES)
def test_clear_removes_every_answer(tmp_path: Path, name: str) -> None:
    store = filled(tmp_path, name)
    ended = run_cli(tmp_path, "cache", "clear", name, "--yes")
    assert (ended.code, ended.out) == (0, f"{name}: 3 answers removed\n")
    assert store.info().entries == 0
    store.close()


@pytest.mark.parametrize(("suite", "removed"), [("capitals", 2), ("Rivers/é", 1), ("rivers/é", 0), ("..", 0)])
@pytest.mark.parametrize("name", ["folder", "answers.db"])
def test_clear_with_a_suite_removes_that_suites_answers_alone(
    tmp_path: Path, name: str, suite: str, removed: int
) -> None:
    store = filled(tmp_path, name)
    ended = run_cli(tmp_path, "cache", "clear", name, "--suite", suite, "--yes")
    assert ended.code == 0
    assert ended.out == f"{name}: {removed} {'answer' if removed == 1 else 'answers'} removed\n"
    assert store.info().entries == 3 - removed
    store.close()


def test_clear_leaves_files_of_any_other_kind(tmp_path: Path) -> None:
    filled(tmp_path, "folder")
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "folder" / "capitals" / "notes.txt").write_text("mine too")
    assert run_cli(tmp_path, "cache", "clear", "folder", "--yes").code == 0
    left = sorted(path.name for path in (tmp_path / "folder").rglob("*") if path.is_file())
    assert left == ["notes.txt", "notes.txt"]


@pytest.mark.parametrize(("typed", "left"), [("y\n", 0), ("YES\n", 0), ("n\n", 3), ("\n", 3), ("what?\nn\n", 3)])
def test_clear_asks_first_and_does_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, left: int
) -> None:
    store = filled(tmp_path, "folder")
    answering(monkeypatch, typed)
    ended = run_cli(tmp_path, "cache", "clear", "folder")
    assert ended.code == 0
    assert store.info().entries == left
    assert ("3 answers removed" in ended.out) == (left == 0)
    assert ("nothing was removed" in ended.err) == (left == 3)


def test_the_question_names_the_place_the_suite_and_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def confirm(text: str, **_: object) -> bool:
        asked.append(text)
        return False

    filled(tmp_path, "folder")
    monkeypatch.setattr(click, "confirm", confirm)
    run_cli(tmp_path, "cache", "clear", "folder")
    run_cli(tmp_path, "cache", "clear", "folder", "--suite", "evil\x1b[2J")
    assert asked[0] == "Remove 3 answers in folder?"
    assert asked[1].startswith("Remove those of suite 'evil")
    assert "\x1b" not in asked[1]


def test_with_nobody_to_ask_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, "folder")
    answering(monkeypatch, "")
    ended = run_cli(tmp_path, "cache", "clear", "folder")
    assert ended.code == 2
    assert "--yes" in ended.err
    assert store.info().entries == 3


@pytest.mark.parametrize("words", [["info"], ["clear", "--yes"]])
def test_a_folder_that_cannot_be_listed_is_exit_3_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    filled(tmp_path, "folder")
    monkeypatch.setattr("steelyard.cache.files.os.scandir", refuse)
    ended = run_cli(tmp_path, "cache", *words, "folder")
    assert ended.code == 3
    assert "cannot list" in ended.err
    assert "Permission denied" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("words", [[], ["inof"]])
def test_without_a_known_part_it_is_exit_2_and_said(tmp_path: Path, words: list[str]) -> None:
    ended = run_cli(tmp_path, "cache", *words)
    assert ended.code == 2
    assert "info" in ended.err or "inof" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("part", sorted(cache.command.commands))
def test_every_part_and_its_options_have_help(tmp_path: Path, part: str) -> None:
    ended = run_cli(tmp_path, "cache", part, "--help")
    assert ended.code == 0
    assert ended.out.startswith(f"Usage: steelyard cache {part}")
    for option in cache.command.commands[part].params:
        assert not isinstance(option, click.Option) or option.help


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (9_949, "9.9 kB"), (9_960, "10 kB"), (999_499, "999 kB"),
        (999_500, "1.0 MB"), (123_456_789, "123 MB"), (1_234_567_890, "1.2 GB"), (5 * 10**12, "5,000.0 GB"),
    ],
)  # fmt: skip
def test_a_size_is_written_to_two_or_three_digits(count: int, said: str) -> None:
    assert cache._size(count) == said
