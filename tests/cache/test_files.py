"""The store of files: its layout, damage, disks that refuse, and folders that are not only its own."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.cache import LocalFileTaskResultStore, StoreError
from steelyard.cache.files import file_name
from tests.support.cache import AWKWARD, an_answer, key_of


@pytest.fixture
def store(tmp_path):
    return LocalFileTaskResultStore(tmp_path / "root")


def test_an_entry_stands_where_the_layout_says_and_names_its_ids(store):
    store.put("capitals", "fr", key_of(), an_answer())
    path = store.root / "capitals" / "fr" / f"{key_of()}.json"
    entry = json.loads(path.read_text())
    assert (entry["eval_set_id"], entry["case_id"], entry["key"]) == ("capitals", "fr", key_of())
    assert entry["response"]["response_text"] == "Paris"
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_nothing_is_made_before_there_is_something_to_keep(store):
    assert store.get("capitals", "fr", key_of()) is None
    assert store.info() == type(store.info())(0, 0)
    assert not store.root.exists()


def test_a_relative_root_stays_where_it_was_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = LocalFileTaskResultStore("cache")
    monkeypatch.chdir("/")
    store.put("s", "c", key_of(), an_answer())
    assert (tmp_path / "cache" / "s" / "c").is_dir()


@pytest.mark.parametrize("identifier", ["..", "../../up", "/abs", ".", "", "a/../../.."])
def test_no_id_leads_out_of_the_root(store, tmp_path, identifier):
    store.put(identifier, identifier, key_of(), an_answer())
    assert [one.name for one in tmp_path.iterdir()] == ["root"]
    (path,) = store.root.glob("*/*/*")
    assert re.fullmatch(r"[0-9a-f]{64}\.json", path.name)
    assert store.get(identifier, identifier, key_of()) == an_answer()


def damaged(data):
    """Ways in which a disk, a crash or a hand may change an entry."""
    text = data.decode()
    yield b""
    yield data[: len(data) // 2]
    yield data[:-1]
    yield b"\0" * len(data)
    yield b"\xff" + data
    yield text.replace("Paris", "Paros").encode()
    yield text.replace('"v":1', '"v":2').encode()
    yield text.replace("capitals", "capitols").encode()
    yield text.replace('"fr"', '"de"').encode()
    yield text.replace(key_of(), key_of(1)).encode()
    yield b"[" * 100_000
    yield b"null"


def test_a_damaged_entry_is_a_miss_with_a_warning_and_is_overwritten(store, caplog):
    store.put("capitals", "fr", key_of(), an_answer())
    path = store.path_of("capitals", "fr", key_of())
    good = path.read_bytes()
    for number, bad in enumerate(damaged(good), 1):
        assert bad != good
        path.write_bytes(bad)
        assert store.get("capitals", "fr", key_of()) is None
        assert len(caplog.records) == number
        assert "is ignored and will be overwritten" in caplog.records[-1].getMessage()
        store.put("capitals", "fr", key_of(), an_answer())
        assert store.get("capitals", "fr", key_of()) == an_answer()


def test_a_flipped_bit_anywhere_is_either_harmless_or_a_miss(store):
    store.put("s", "c", key_of(), an_answer())
    path = store.path_of("s", "c", key_of())
    good = path.read_bytes()
    for bit in range(0, len(good) * 8, 3):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        assert store.get("s", "c", key_of()) in (None, an_answer())


def test_an_entry_copied_to_another_set_is_not_served_there(store):
    store.put("one", "c", key_of(), an_answer())
    shutil.copytree(store.root / "one", store.root / "two")
    assert store.get("two", "c", key_of()) is None


def test_a_root_that_is_a_file_is_a_store_error(tmp_path):
    (tmp_path / "root").write_text("in the way")
    store = LocalFileTaskResultStore(tmp_path / "root")
    with pytest.raises(StoreError, match=r"cannot write .*root"):
        store.put("s", "c", key_of(), an_answer())
    with pytest.raises(StoreError, match=r"cannot read .*root"):
        store.get("s", "c", key_of())


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_refuses_is_a_store_error_and_leaves_no_draft(store, monkeypatch, call):
    store.put("s", "c", key_of(), an_answer("old"))

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, call, refuse)
        with pytest.raises(StoreError, match="No space left on device"):
            store.put("s", "c", key_of(), an_answer("new"))
    assert len(list((store.root / "s" / "c").iterdir())) == 1
    assert store.get("s", "c", key_of()) == an_answer("old")


def test_a_folder_cleared_away_under_a_writer_is_made_again(store, monkeypatch):
    """Another process may clear the cache between our making the folder and our writing to it."""
    replace = os.replace
    cleared = []

    def replace_after_clearing(draft, path):
        if not cleared:
            cleared.append(True)
            shutil.rmtree(store.root)
        replace(draft, path)

    monkeypatch.setattr(os, "replace", replace_after_clearing)
    store.put("s", "c", key_of(), an_answer())
    assert cleared
    assert store.get("s", "c", key_of()) == an_answer()


def test_clear_removes_entries_and_abandoned_drafts_and_leaves_other_files_alone(store, tmp_path):
    store.put("s", "c", key_of(), an_answer())
    store.put("s", "d", key_of(), an_answer())
    (store.root / "s" / "c" / f"{key_of()}.json.{'0' * 16}.tmp").write_text("half")
    (store.root / "s" / "c" / "mine.json").write_text("{}")
    (store.root / "notes.txt").write_text("mine")
    outside = LocalFileTaskResultStore(tmp_path / "outside")
    outside.put("s", "c", key_of(), an_answer())
    (store.root / "link").symlink_to(outside.root / "s")
    (store.root / "s" / "link").symlink_to(outside.root / "s" / "c")
    assert store.info().entries == 2
    assert store.clear() == 2
    left = sorted(str(one.relative_to(store.root)) for one in store.root.rglob("*"))
    assert left == ["link", "notes.txt", "s", "s/c", "s/c/mine.json", "s/link"]
    assert store.clear("link") == 0
    assert outside.get("s", "c", key_of()) == an_answer()


# File names ----------------------------------------------------------------------------------------------------------


PLAIN = ["a", "case-1", "gsm8k_0042", "0", "_", "x.y.z", "v1.2-rc", "console", "com10", "x" * 100]


def folded(name: str) -> str:
    """What the most forgetful of file systems would keep of a name."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def is_portable(name: str) -> bool:
    stem = name.partition(".")[0]
    return (
        re.fullmatch(r"[a-z0-9_.~-]{1,120}", name) is not None
        and name[0] not in ".-"
        and name[-1] != "."
        and stem not in ("con", "prn", "aux", "nul", *(f"{kind}{n}" for kind in ("com", "lpt") for n in range(10)))
    )


@pytest.mark.parametrize("identifier", PLAIN)
def test_a_plain_id_is_its_own_name(identifier):
    assert file_name(identifier) == identifier
    assert is_portable(identifier)


@pytest.mark.parametrize("identifier", AWKWARD)
def test_an_awkward_id_gets_a_portable_name(identifier):
    assert is_portable(file_name(identifier))


def test_awkward_ids_do_not_meet_even_where_case_and_unicode_forms_are_one():
    every = [*AWKWARD, *PLAIN, *(file_name(identifier) for identifier in AWKWARD)]
    names = {folded(file_name(identifier)): identifier for identifier in every}
    assert len(names) == len(set(every))


def test_the_readable_part_is_kept():
    assert re.fullmatch(r"gsm8k_test_0042~[0-9a-f]{32}", file_name("GSM8K/test 0042"))


@settings(max_examples=500)
@given(st.text(st.characters(), max_size=400))
def test_any_text_gets_a_portable_name(identifier):
    assert is_portable(file_name(identifier))


@pytest.mark.slow
def test_a_million_ids_have_a_million_names():
    """Each pair of a stem and a way to write it down, so that thousands look alike once folded or cleaned."""
    ways = [
        "{}", "{}/", "/{}", "{}\\", "{} ", " {}", "{}.", ".{}", "-{}", "{}-", "{}~", "~{}", "{}\0", "{}\u0301",
        "{}\u202e", "{}😀", "A{}", "a{}", "Á{}", "A\u0301{}", "{}_", "{}:", "../{}", "..\\{}", "{}/..",
    ]  # fmt: skip
    identifiers = (way.format(number) for way, number in itertools.product(ways, range(40_000)))
    names = {file_name(identifier) for identifier in identifiers}
    assert len(names) == len(ways) * 40_000 == 1_000_000
    assert all(map(re.compile(r"[a-z0-9_~][a-z0-9_.~-]*").fullmatch, names))  # so folding cannot join any two
