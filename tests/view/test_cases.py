"""The table of cases: what is selected, in which order, and that only what is shown is read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.journal.reader import index_rows
from steelyard.records import Record, Score
from steelyard.view import cases as cases_module
from steelyard.view.cases import CaseTable, search, terms_of
from steelyard.view.live import Follower
from steelyard.view.pages import in_case_order
from tests.support.journal import a_record, write_journal
from tests.support.report import a_call, large_run, worked_run, write_calls
from tests.support.view import Served, read_all, served

KINDS = ("passed", "failed", "unscored", "error")


def a_table(run: Path, outcomes: list[list[str]]) -> CaseTable:
    """A case for each list, a trial for each word in it, and times that differ."""
    records, number = [], 0
    for index, trials in enumerate(outcomes):
        for trial, kind in enumerate(trials):
            number += 1
            records.append(one_record(index, trial, kind, 1 + (number * 7919 % 101) / 10))
    write_journal(run, records)
    return CaseTable(run, in_case_order(read_all(Follower(run)).rows))


def one_record(index: int, trial: int, kind: str, took: float) -> Record:
    scores = {"passed": [Score("exact", 1.0, True)], "failed": [Score("exact", 0.0, False)]}.get(kind, [])
    failed = kind == "error"
    more: dict[str, Any] = {"error": "broke", "error_type": "Broken", "response_text": None} if failed else {}
    status = "error" if failed else "ok"
    return a_record(
        id=f"c{index}",
        index=index,
        trial=trial,
        status=status,
        time_to_last_token=took,
        elapsed=took,
        scores=scores,
        **more,
    )


TRIALS = st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), max_size=10)


@given(outcomes=TRIALS, chip=st.sampled_from(["failed", "errored", "flaky", "unscored", "passed"]))
@settings(max_examples=80, deadline=None)
def test_a_filter_lets_through_the_cases_whose_trials_are_like_that(
    tmp_path_factory: pytest.TempPathFactory, outcomes: list[list[str]], chip: str
) -> None:
    table = a_table(tmp_path_factory.mktemp("run"), outcomes)
    meaning = {
        "failed": lambda kinds: "failed" in kinds,
        "errored": lambda kinds: "error" in kinds,
        "flaky": lambda kinds: {"failed", "passed"} <= {*kinds},
        "unscored": lambda kinds: "unscored" in kinds,
        "passed": lambda kinds: {*kinds} == {"passed"},
    }[chip]
    expected = [index for index, kinds in enumerate(outcomes) if meaning(kinds)]
    assert table.select([chip], None, False, None).tolist() == expected
    assert table.counts[chip] == len(expected)


@given(outcomes=TRIALS, down=st.booleans())
@settings(max_examples=60, deadline=None)
def test_sorting_by_time_orders_by_the_record_that_stands_for_the_case(
    tmp_path_factory: pytest.TempPathFactory, outcomes: list[list[str]], down: bool
) -> None:
    table = a_table(tmp_path_factory.mktemp("run"), outcomes)
    chosen = table.select([], "last", down, None)
    times = table.records["last"][table.leads[chosen]].tolist()
    assert times == sorted(times, reverse=down)
    assert sorted(chosen.tolist()) == list(range(len(outcomes)))
    marks = table.marks[table.select([], "state", False, None)].tolist()
    assert marks == sorted(marks, key=[0, 3, 2, 1].index)


def test_a_block_tells_of_its_cases_and_of_all_their_trials(tmp_path: Path) -> None:
    table = a_table(tmp_path, [["passed", "failed", "passed"], ["error"], ["passed"]])
    block = table.block(table.select([], None, False, None)[:2])
    assert [one["state"] for one in block["cases"]] == [[1, 0, 1], [3]]
    assert block["cases"][0]["chips"] == ["failed", "flaky"]
    assert block["cases"][0]["lead"] == 1
    assert b'"c0","c1"' in bytes(block["leads"])


def test_long_records_come_in_smaller_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = a_table(tmp_path, [["passed"]] * 10)
    length = int(table.records["length"][0])
    monkeypatch.setattr(cases_module, "_MAX_PAGE_BYTES", 3 * length + 1)
    assert len(table.block(np.arange(10))["cases"]) == 3
    monkeypatch.setattr(cases_module, "_MAX_PAGE_BYTES", 1)
    assert len(table.block(np.arange(10))["cases"]) == 1


def test_a_search_finds_all_words_in_ids_questions_answers_and_errors(tmp_path: Path) -> None:
    write_journal(
        tmp_path,
        [
            a_record(id="Alpha", input_prompt="What is it?", response_text="A straße\nby the SEA"),
            a_record(id="beta", index=1, status="error", error="Timeout: no answer"),
        ],
    )
    rows = in_case_order(index_rows(tmp_path))
    for words, expected in {
        "alpha sea": [True, False],
        "STRASSE": [False, False],
        "Straße": [True, False],
        "timeout": [False, True],
        "a": [True, True],
        "response_text": [False, False],
        "no such": [False, False],
    }.items():
        assert search(tmp_path, rows, terms_of(words)).records.tolist() == expected, words


def test_a_search_stops_when_its_time_is_up_and_says_how_far_it_came(tmp_path: Path) -> None:
    large_run(tmp_path, 1_000)
    rows = in_case_order(index_rows(tmp_path))
    clock = iter([0.0, 0.0, 1.0, 9.0])
    found = search(tmp_path, rows, ("words",), clock=lambda: next(clock))
    assert found.searched == 512
    assert int(found.records.sum()) == int((rows["ok"][:512] == 1).sum())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    large_run(folder / "large", 1_000)
    return folder


def test_pages_of_one_version_are_the_whole_table_without_gaps(runs: Path) -> None:
    with served(runs) as server:
        place = f"/api/runs/{server.ids()['large']}/cases"
        first = server.get(f"{place}?count=200&filters=failed").json
        assert (first["total"], first["found"]) == (1_000, 100)
        ids = []
        for start in range(0, 1_000, 200):
            block = server.get(f"{place}?start={start}&count=200&version={first['version']}").json
            ids += block["leads"]["id"]
        assert ids == [f"case-{number:06}" for number in range(1_000)]
        assert server.get(f"{place}?start=5000").json["cases"] == []
        assert len(server.get(f"{place}?count=999999").json["cases"]) == 200


def test_filters_that_the_index_does_not_know_are_answered_from_the_journal(runs: Path) -> None:
    with served(runs) as server:
        place = f"/api/runs/{server.ids()['large']}/cases"
        assert "slow" not in server.get(place).json["counts"]
        slow = server.get(f"{place}?filters=slow&sort=last&order=down").json
        assert 0 < slow["found"] < 60
        assert slow["leads"]["last"] == sorted(slow["leads"]["last"], reverse=True)
        assert slow["version"] == server.get(place).json["version"]


def test_a_case_is_found_by_its_byte_and_by_its_number_and_nowhere_else(runs: Path) -> None:
    with served(runs) as server:
        place = f"/api/runs/{server.ids()['large']}"
        block = server.get(f"{place}/cases?start=3&count=1").json
        offset = block["cases"][0]["offset"][0]
        one = server.get(f"{place}/case?at={offset}").json
        assert one["leads"]["id"] == ["case-000003"]
        assert one["body"]["offset"] == offset
        assert server.get(f"{place}/case?record=3").json["body"] == one["body"]
        for wrong in ("at=1", "at=-1", "at=x", "at=", "record=1000", "at=99999999999999999999", "at=%00", ""):
            assert server.get(f"{place}/case?{wrong}").status in (400, 404), wrong


def test_an_index_that_is_absent_stale_or_of_another_run_is_rebuilt_in_memory(tmp_path: Path) -> None:
    large_run(tmp_path / "run", 50)
    for index in (None, b"", b"SYIDX\x02\0\0 nonsense", b"\0" * 500):
        if index is not None:
            (tmp_path / "run" / "outputs.idx").write_bytes(index)
        with served(tmp_path) as server:
            assert server.get(f"/api/runs/{server.ids()['run']}/cases").json["total"] == 50
        assert not index or (tmp_path / "run" / "outputs.idx").read_bytes() == index
    names = {"outputs.jsonl", "outputs.idx"}
    assert {place.name for place in (tmp_path / "run").iterdir()} == names


def test_a_search_finds_metadata_by_key_and_whole_value(tmp_path: Path) -> None:
    metadata = [{"topic": "tax law", "level": 1}, {"topic": "tax", "level": 1}, {"more": {"topic": ["tax law", "x"]}}]
    write_journal(tmp_path, [a_record(id=f"c{n}", index=n, metadata=one) for n, one in enumerate(metadata)])
    rows = index_rows(tmp_path)
    for words, expected in {
        "topic=tax": [False, True, False],
        'topic="Tax Law"': [True, False, False],
        "level=1": [True, True, False],
        'level=1 topic="tax law"': [True, False, False],
        "more.topic=x": [False, False, True],
        "topic=ta": [False, False, False],
    }.items():
        assert search(tmp_path, rows, terms_of(words)).records.tolist() == expected, words


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    worked_run(tmp_path / "runs" / "one")
    write_journal(tmp_path / "runs" / "two", [a_record(id="c")])
    (tmp_path / "secret.txt").write_text("secret")
    with served(tmp_path / "runs") as started:
        yield started


def file_of(server: Served, path: str, run: str = "one") -> str:
    return f"/api/runs/{server.ids()[run]}/file?path={quote(path, safe='')}"


def test_a_log_is_shown_as_text_and_other_files_are_saved(server: Served) -> None:
    shown = server.get(file_of(server, "logs/fixer/0.out"))
    assert (shown.status, shown.body) == (200, b"printed plain\n")
    assert shown.headers["content-type"] == "text/plain; charset=utf-8"
    assert shown.headers["content-disposition"] == "inline; filename*=UTF-8''0.out"
    saved = server.get(file_of(server, "artifacts/fixer/0/files/page.html"))
    assert saved.body == b"<script>window.ran = 9</script>"
    assert saved.headers["content-type"] == "application/octet-stream"
    assert saved.headers["content-disposition"].startswith("attachment;")
    for reply in (shown, saved):
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["content-security-policy"].startswith("default-src 'none'; sandbox")
    assert server.get(file_of(server, "logs/fixer/0.out"), "HEAD").status == 200
    assert server.get(file_of(server, "logs/fixer/0.out"), "POST").status == 405
    assert server.get(file_of(server, "logs/fixer/0.out"), host="evil.test").status == 421


@pytest.mark.parametrize(
    "path",
    [
        "", "logs", "logs/", "logs/fixer", "run.json", "outputs.jsonl", "logs/../outputs.jsonl",
        "logs/../../secret.txt", "/etc/passwd",
        "logs//etc/passwd", "logs/fixer/../../outputs.jsonl", "artifacts/./fixer/0/workspace.patch",
        "logs/fixer/0.out/", "logs/fixer/0.out\0", "logs\\fixer\\0.out", "logs/" + "x" * 5000, "LOGS/fixer/0.out",
    ],
)  # fmt: skip
def test_nothing_but_a_file_of_a_case_is_given_out(server: Served, path: str) -> None:
    assert server.get(file_of(server, path)).status == 404


def test_links_lead_nowhere_and_pipes_do_not_hang(server: Served, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    (run / "artifacts" / "fixer" / "0" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (run / "artifacts" / "fixer" / "0" / "folder").symlink_to(tmp_path)
    os.mkfifo(run / "artifacts" / "fixer" / "0" / "pipe.txt")
    (tmp_path / "runs" / "two" / "logs").symlink_to(tmp_path)
    for path in ("link.txt", "folder/secret.txt", "pipe.txt"):
        assert server.get(file_of(server, f"artifacts/fixer/0/{path}")).status == 404
    assert server.get(file_of(server, "logs/secret.txt", "two")).status == 404


def test_a_case_has_its_time_line_turns_patch_logs_and_files(server: Served) -> None:
    run = server.ids()["one"]
    body = server.get(f"/api/runs/{run}/case?record=0").json["body"]
    assert body["time_line"]["parts"] == {"model": 2.0, "waiting": 0.5, "tools": 1.5}
    assert [name for _, name in body["time_line"]["drawing"]["rows"]] == ["model", "model 2", "tools", "waiting"]
    assert [turn["role"] for turn in body["turns"]] == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert body["turns"][4]["tool"] == "run plain"
    assert body["turns"][1]["figures"]["took"] == 1.0
    assert body["patch"]["text"].endswith("+new plain\n")
    assert {log["path"]: log.get("end") for log in body["logs"]}["logs/fixer/0.err"] == "warned plain\n"
    assert ["artifacts/fixer/0/files/page.html", 31] in body["artifacts"]
    plain = server.get(f"/api/runs/{server.ids()['two']}/case?record=0").json["body"]
    assert not {"time_line", "patch", "logs", "artifacts"} & plain.keys()


def mark(run: Path, case_id: str, trial: int = 0) -> Path:
    (run / "running").mkdir(exist_ok=True)
    path = run / "running" / f"{case_id}.{trial}.json"
    path.write_text(json.dumps({"id": case_id, "trial": trial, "attempt": 2, "since": time.time() - 30}))
    return path


def test_a_running_case_is_followed_until_it_is_done(server: Served, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "two"
    address = f"/api/runs/{server.ids()['two']}/running?id=busy&trial=0"
    assert server.get(address).status == 404
    marked = mark(run, "busy")
    (run / "logs" / "busy").mkdir(parents=True)
    found = server.get(address).json
    assert (found["attempt"], found["turns"]) == (2, [])
    assert found["seconds"] >= 30
    (run / "logs" / "busy" / "0.out").write_text("first line\n")
    write_calls(
        run, "busy", [a_call(1, 1.0, 2.0, [], messages=[{"role": "assistant", "content": "Hm."}])], is_ended=False
    )
    found = server.get(address).json
    assert [log.get("end") for log in found["logs"]] == [None, "first line\n"]
    assert [turn["text"] for turn in found["turns"]] == ["Hm."]
    assert found["time_line"]["parts"]["model"] == 2.0
    assert found["time_line"]["parts"]["tools"] >= 28
    marked.unlink()
    assert server.get(address).status == 404
