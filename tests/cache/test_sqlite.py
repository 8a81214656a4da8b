"""The store in one file: what it refuses to open, what it does with damage, and that it is small and waits."""

from __future__ import annotations

import gc
import os
import random
import re
import sqlite3
import string
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from steelyard.cache import SqliteTaskResultStore, StoreError
from steelyard.cache import sqlite as module
from tests.support.cache import an_answer, key_of


@pytest.fixture
def store(tmp_path):
    opened = SqliteTaskResultStore(tmp_path / "folder" / "cache.db")
    yield opened
    opened.close()


def change(store, statement, *values):
    connection = sqlite3.connect(store.path)
    with connection:
        connection.execute(statement, values)
    connection.close()


def test_the_file_is_in_write_ahead_mode_and_says_what_it_is(store):
    connection = sqlite3.connect(store.path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    connection.close()


def test_entries_outlive_the_store(store):
    store.put("s", "c", key_of(), an_answer())
    store.close()
    assert store.get("s", "c", key_of()) == an_answer()
    again = SqliteTaskResultStore(store.path)
    assert again.get("s", "c", key_of()) == an_answer()
    again.close()


@pytest.mark.parametrize("content", [b"this is no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "cache.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"cache\.db: .*(not a database|malformed)"):
        SqliteTaskResultStore(path)
    assert path.read_bytes() == content


def test_somebody_elses_database_is_refused(tmp_path):
    connection = sqlite3.connect(tmp_path / "cache.db")
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(StoreError, match="a database, but not a Steelyard cache"):
        SqliteTaskResultStore(tmp_path / "cache.db")


def test_a_newer_schema_is_refused(store):
    store.close()
    change(store, "PRAGMA user_version = 2")
    with pytest.raises(StoreError, match="a newer Steelyard wrote this: schema 2, known here: 1"):
        SqliteTaskResultStore(store.path)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path):
    with pytest.raises(StoreError, match="unable to open"):
        SqliteTaskResultStore(tmp_path)


def test_many_may_open_a_new_file_at_the_same_moment(tmp_path):
    for turn in range(10):
        start = threading.Barrier(8, timeout=10)

        def open_and_use(number, start=start, path=tmp_path / f"{turn}.db"):
            start.wait()
            opened = SqliteTaskResultStore(path)
            opened.put("s", f"c{number}", key_of(), an_answer())
            opened.close()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(open_and_use, range(8)))
        store = SqliteTaskResultStore(tmp_path / f"{turn}.db")
        assert store.info().entries == 8
        store.close()


def test_a_store_that_is_forgotten_is_closed(tmp_path):
    store = SqliteTaskResultStore(tmp_path / "cache.db")
    handles = store._handles
    del store
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        handles.read("SELECT 1", ())


@pytest.mark.parametrize(
    ("compressed", "body"), [(0, b"junk"), (1, b"junk"), (0, None), (0, "text"), (1, "text"), (0, 7), (0, b"")]
)
def test_a_damaged_row_is_a_miss_with_a_warning_and_is_overwritten(store, caplog, compressed, body):
    store.put("s", "c", key_of(), an_answer())
    change(store, "UPDATE entries SET compressed = ?, body = ?", compressed, b"" if body is None else body)
    assert store.get("s", "c", key_of()) is None
    assert "is ignored" in caplog.text
    store.put("s", "c", key_of(), an_answer())
    assert store.get("s", "c", key_of()) == an_answer()


def test_a_row_moved_to_another_case_is_not_served_there(store):
    store.put("s", "c", key_of(), an_answer())
    change(store, "UPDATE entries SET case_id = 'd'")
    assert store.get("s", "d", key_of()) is None


def test_damaged_pages_are_a_store_error_not_a_wrong_answer(store):
    for number in range(300):
        store.put("s", f"c{number}", key_of(number), an_answer("".join(random.Random(number).choices("abcdef", k=900))))
    store.clear("nothing")  # everything into the main file
    store.close()
    with open(store.path, "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(store.path.stat().st_size - 4096))
    for number in range(300):
        with pytest.raises(StoreError, match=re.escape(str(store.path))):
            store.get("s", f"c{number}", key_of(number))


def test_long_answers_are_compressed_where_that_pays_and_short_ones_are_not(store):
    noise = "".join(random.Random(1).choices(string.printable, k=6000))
    store.put("s", "short", key_of(), an_answer("x" * 100))
    store.put("s", "long", key_of(), an_answer("the answer is simple. " * 2000))
    connection = sqlite3.connect(store.path)
    rows = dict(connection.execute("SELECT case_id, compressed FROM entries").fetchall())
    (size,) = connection.execute("SELECT length(body) FROM entries WHERE case_id = 'long'").fetchone()
    connection.close()
    assert rows == {"short": 0, "long": 1}
    assert size < 2000
    store.put("s", "noise", key_of(), an_answer(noise))
    assert store.get("s", "noise", key_of()) == an_answer(noise)


def test_clear_gives_the_space_back(store):
    for number in range(200):
        store.put("s", f"c{number}", key_of(number), an_answer(os.urandom(2000).hex()))
    before = store.info().bytes
    assert store.clear() == 200
    assert store.info().bytes < before / 5


def test_a_write_waits_for_another_writer_and_gives_up_with_a_store_error(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BUSY_SECONDS", 0.05)
    store = SqliteTaskResultStore(tmp_path / "cache.db")
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        store.put("s", "c", key_of(), an_answer())
    assert store.get("s", "c", key_of()) is None  # a reader does not wait
    other.execute("ROLLBACK")
    other.close()
    store.put("s", "c", key_of(), an_answer())
    assert store.get("s", "c", key_of()) == an_answer()
    store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks only where there is a fork")
def test_a_forked_process_opens_the_file_for_itself(store):
    store.put("s", "c", key_of(), an_answer())
    child = os.fork()
    if child == 0:
        try:
            store.put("s", "d", key_of(), an_answer("child"))
            found = store.get("s", "c", key_of()) == an_answer()
            os._exit(0 if found and store._handles.pid == os.getpid() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("s", "d", key_of()) == an_answer("child")
    store.put("s", "e", key_of(), an_answer("parent"))
    assert store.info().entries == 3
