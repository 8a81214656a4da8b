"""A run that is being written, as server-sent events: from the journal alone, in time, and within bounds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.cli.view import command
from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import ConfigurationError
from steelyard.journal.index import winners
from steelyard.journal.reader import index_rows
from steelyard.journal.writer import encode_record
from steelyard.records import Record, Score
from steelyard.view import live
from steelyard.view.live import Follower, RunWatch
from steelyard.view.pages import charts, counting, in_case_order, live_figures
from tests.support.cli import alone, wait_until
from tests.support.journal import a_record, write_journal
from tests.support.report import large_run
from tests.support.view import Events, Served, SteppedRun, read_all, served

VIEW = "import sys; from steelyard.cli.view import command; sys.exit(command(standalone_mode=False))"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def begun(server: Served, name: str = "steps") -> str:
    """The id of a run, once its folder is there."""
    wait_until(lambda: name in server.ids())
    return server.ids()[name]


@pytest.mark.slow
def test_a_run_started_elsewhere_is_told_record_by_record_until_its_end(runs: Path) -> None:
    with served(runs) as server, SteppedRun(runs / "steps", 4) as run:
        events = server.events(begun(server))
        assert events.until(lambda event: "figures" in event)["state"] == "running"
        run.tell("right")
        event = events.until(lambda event: event["figures"]["n"] == 1)
        assert event["newest"][0]["id"] == "c0"
        assert event["newest"][0]["prompt"] == "What is 0?"
        assert event["planned"] == 4
        run.tell("wrong", "error")
        event = events.until(lambda event: event["figures"]["n"] == 3)
        assert event["figures"]["counts"] == {"passed": 1, "failed": 1, "error": 1, "unscored": 0}
        assert event["figures"]["errors"] == [["ValueError", 1]]
        assert [one["id"] for one in event["newest"]] == ["c2", "c1", "c0"]
        run.tell("right")
        event = events.until(lambda event: event["state"] == "complete")
        assert event["figures"]["n"] == 4


@pytest.mark.slow
def test_who_reconnects_with_the_last_id_is_told_only_what_changed_even_by_another_server(runs: Path) -> None:
    with SteppedRun(runs / "steps", 3) as run:
        run.tell("right")
        with served(runs) as first:
            name = begun(first)
            events = first.events(name)
            events.until(lambda event: "figures" in event and event["figures"]["n"] == 1)
            run.process.kill()
            events.until(lambda event: event["state"] == "interrupted")
            seen = events.last_id
        with served(runs) as second:
            again = second.events(name, seen)
            with pytest.raises(TimeoutError):
                again.next(timeout=1.0)
            assert second.events(name).next()["state"] == "interrupted"


@pytest.mark.slow
def test_a_run_that_starts_over_is_a_new_generation_without_the_old_cases(runs: Path) -> None:
    with SteppedRun(runs / "steps", 2) as run:
        run.tell("right", "right")
        run.process.wait(30)
    with served(runs) as server:
        events = server.events(begun(server))
        old = events.until(lambda event: "figures" in event)
        with SteppedRun(runs / "steps", 2, "force") as run:
            run.tell("wrong")
            new = events.until(lambda event: event["state"] == "running" and event["figures"]["n"] == 1)
        assert new["generation"] != old["generation"]
        assert new["figures"]["counts"]["passed"] == 0
        assert len(new["newest"]) == 1


def test_a_reader_that_does_not_read_holds_up_nobody_and_not_the_end(runs: Path) -> None:
    large_run(runs / "large", 2_000, text="word " * 200)
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with served(runs) as server:
        name = server.ids()["large"]
        stuck.connect(("127.0.0.1", server.port))
        # Requests one after the other whose answers nobody takes.
        request = f"GET /api/runs/{name}/cases?count=200 HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\n\r\n"
        stuck.sendall(request.encode() * 50)
        assert server.get(f"/api/runs/{name}/cases").json["total"] == 2_000
        assert "figures" in server.events(name).until(lambda event: "figures" in event)
        began = time.monotonic()
    assert time.monotonic() - began < 2.5
    stuck.close()


def test_more_streams_than_the_server_will_keep_are_turned_away(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.view.server._MAX_READERS", 2)
    large_run(runs / "large", 10)
    with served(runs) as server:
        name = server.ids()["large"]
        for _ in range(2):
            server.events(name).next()
        reply = server.get(f"/api/runs/{name}/events")
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        server.open.pop().close()
        wait_until(lambda: _is_let_in(server, name))


def _is_let_in(server: Served, name: str, streams: list[Events] | None = None) -> bool:
    try:
        stream = server.events(name)
    except AssertionError:
        return False
    if streams is not None:
        streams.append(stream)
    return True


def test_readers_that_leave_at_once_are_forgotten(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.view.server._MAX_READERS", 1)
    large_run(runs / "large", 10)
    with served(runs) as server:
        name = server.ids()["large"]
        request = f"GET /api/runs/{name}/events HTTP/1.0\r\nhost: 127.0.0.1:{server.port}\r\n\r\n"
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port)) as line:
                line.sendall(request.encode())
        wait_until(lambda: _is_let_in(server, name))


def test_a_page_that_comes_back_is_not_told_what_was_true_before(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.view.server._MAX_READERS", 1)  # whoever is let in is the only one
    with served(runs) as server, SteppedRun(runs / "steps", 2) as run:
        name = begun(server)
        events = server.events(name)
        events.until(lambda event: event.get("figures", {}).get("n") == 0)
        server.open.pop().close()
        run.tell("right", "right")
        run.process.wait(30)
        wait_until(lambda: server.get("/api/runs").json[0]["state"] == "complete")
        let_in: list[Events] = []
        wait_until(lambda: _is_let_in(server, name, let_in))
        assert let_in[0].next()["state"] == "complete"


def test_without_the_extra_the_command_says_what_to_install(runs: Path) -> None:
    blocked = f"import sys; sys.modules['uvicorn'] = None; {VIEW}"
    ended = subprocess.run([sys.executable, "-c", blocked, str(runs)], capture_output=True, text=True, check=False)
    assert "view needs uvicorn: pip install 'steelyard[view]'" in ended.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["--port", "70000", "."], "port must be between 0 and 65535, got 70000"),
        ([], "there is no folder runs here"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(tmp_path: Path, words: list[str], said: str) -> None:
    with alone(tmp_path), pytest.raises(ConfigurationError, match=said):
        command.main(args=words, standalone_mode=False)


def test_a_port_that_is_taken_is_refused(runs: Path) -> None:
    with served(runs) as server, alone(runs.parent), pytest.raises(ConfigurationError, match="cannot listen"):
        command.main(args=["--no-open", "--port", str(server.port)], standalone_mode=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_in_time_with_streams_open(runs: Path, number: signal.Signals) -> None:
    large_run(runs / "large", 10)
    words = [sys.executable, "-c", VIEW, str(runs), "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            server = Served(int(url.rstrip("/").rpartition(":")[2]), runs)
            name = server.ids()["large"]
            streams = [server.events(name) for _ in range(3)]
            assert all(stream.next() for stream in streams)
            began = time.monotonic()
            process.send_signal(number)
            _, said = process.communicate(timeout=10)
            assert process.returncode == 0
            assert time.monotonic() - began < 2
            assert "Traceback" not in said
        finally:
            process.kill()
            for line in server.open:
                line.close()


# Following a journal -------------------------------------------------------------------------------------------------


def record(number: int, **more: object) -> Record:
    passed = number % 3 != 0
    scores = [Score("exact", float(passed), passed)]
    return a_record(**{"id": f"c{number}", "index": number, "run_time": number / 10, "scores": scores, **more})


def test_a_torn_last_line_is_not_shown_until_it_is_whole(tmp_path: Path) -> None:
    data = write_journal(tmp_path, map(record, range(3)))
    follower = Follower(tmp_path)
    for cut in (len(data) - 1, len(data) - 40):
        (tmp_path / "outputs.jsonl").write_bytes(data[:cut])
        assert len(read_all(follower).rows) == 2
        assert [one["id"] for one in follower.newest] == ["c0", "c1"]
        assert follower.damaged == 0
    (tmp_path / "outputs.jsonl").write_bytes(data)
    assert len(read_all(follower).rows) == 3


def test_errors_are_counted_by_kind_as_in_the_report(tmp_path: Path) -> None:
    failed = {"status": "error", "error": "no", "error_type": "TransientError"}
    statuses = (429, 429, 503, None)
    write_journal(tmp_path, [record(number, **failed, http_status=one) for number, one in enumerate(statuses)])
    follower = read_all(Follower(tmp_path))
    found = live_figures(follower.rows, follower.kinds, quiet=0)["errors"]
    assert sorted(found) == [("429 rate limited", 2), ("503 unavailable", 1), ("TransientError", 1)]


@given(cuts=st.lists(st.integers(0, 4_000), max_size=8), stride=st.sampled_from([64, 700, 1 << 20]))
@settings(max_examples=40, deadline=None)
def test_in_whatever_pieces_a_journal_grows_its_rows_are_those_of_the_index(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], stride: int
) -> None:
    run = tmp_path_factory.mktemp("run")
    data = b"".join(encode_record(record(number)) for number in range(6))
    follower, place = Follower(run), run / "outputs.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "_STRIDE", stride)
        for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
            with open(place, "ab") as file:
                file.write(data[place.stat().st_size : cut])
            read_all(follower)
    rows = index_rows(run)
    for name in set(rows.dtype.names or ()) - {"crc", "check"}:
        assert follower.rows[name].tolist() == rows[name].tolist(), name
    assert follower.position == len(data)


def test_another_file_in_its_place_is_read_anew(tmp_path: Path) -> None:
    write_journal(tmp_path, map(record, range(5)))
    follower = read_all(Follower(tmp_path))
    before = follower.generation
    write_journal(tmp_path / "new", map(record, range(10, 12)))
    os.replace(tmp_path / "new" / "outputs.jsonl", tmp_path / "outputs.jsonl")
    read_all(follower)
    assert [one["id"] for one in follower.newest] == ["c10", "c11"]
    assert follower.generation != before


def test_a_file_rewritten_in_place_is_read_anew_though_it_is_longer(tmp_path: Path) -> None:
    lines = write_journal(tmp_path, map(record, (1, 2)))
    follower = read_all(Follower(tmp_path))
    others = write_journal(tmp_path, map(record, (4, 5, 7, 8)))
    assert others[len(lines) - 1 : len(lines)] == b"\n"  # so that not even the place of the line ends tells
    assert len(read_all(follower).rows) == 4
    assert follower.newest[0]["id"] == "c4"


def test_a_journal_that_goes_leaves_nothing(tmp_path: Path) -> None:
    write_journal(tmp_path, map(record, range(2)))
    follower = read_all(Follower(tmp_path))
    (tmp_path / "outputs.jsonl").unlink()
    assert len(read_all(follower).rows) == 0
    assert follower.generation == ""


def test_a_generation_is_the_same_for_every_reader_and_while_the_journal_grows(tmp_path: Path) -> None:
    data = write_journal(tmp_path, map(record, range(4)))
    (tmp_path / "outputs.jsonl").write_bytes(data[: data.find(b"\n") + 1])
    first = read_all(Follower(tmp_path)).generation
    (tmp_path / "outputs.jsonl").write_bytes(data)
    assert read_all(Follower(tmp_path)).generation == first != ""


def test_lines_that_are_no_records_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = [encode_record(record(number)) for number in range(3)]
    (tmp_path / "outputs.jsonl").write_bytes(lines[0] + b"{broken\n" + lines[1] + b"\n[]\n" + lines[2])
    follower = read_all(Follower(tmp_path))
    assert follower.damaged == 2
    assert [one["id"] for one in follower.newest] == ["c0", "c1", "c2"]
    assert follower.rows["offset"].tolist() == [0, len(lines[0]) + 8, len(lines[0]) + 8 + len(lines[1]) + 4]


def test_a_link_in_place_of_the_journal_is_not_followed(tmp_path: Path) -> None:
    write_journal(tmp_path / "elsewhere", map(record, range(2)))
    (tmp_path / "outputs.jsonl").symlink_to(tmp_path / "elsewhere" / "outputs.jsonl")
    with pytest.raises(OSError):
        Follower(tmp_path).advance()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=12))
@settings(max_examples=60, deadline=None)
def test_the_rows_that_count_are_those_that_count_for_a_report(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[int, int, bool]]
) -> None:
    run = tmp_path_factory.mktemp("run")
    write_journal(run, (record(n, trial=t, status="ok" if ok else "error") for n, t, ok in asked))
    rows = read_all(Follower(run)).rows
    expected = sorted(winners(index_rows(run))["offset"].tolist())
    assert sorted(counting(rows)["offset"].tolist()) == expected
    ordered = in_case_order(rows)
    assert sorted(ordered["offset"].tolist()) == expected
    assert [*zip(ordered["index"], ordered["trial"], strict=True)] == sorted(
        zip(ordered["index"], ordered["trial"], strict=True)
    )


def test_live_figures_are_numpys_and_superseded_records_leave_the_counts(tmp_path: Path) -> None:
    times = np.random.default_rng(3).gamma(2, 1, 200)
    records = [record(number, time_to_last_token=float(times[number])) for number in range(200)]
    failed = [record(number, status="error", error="x", error_type="Timeout") for number in range(5)]
    write_journal(tmp_path, [*failed, *records])
    follower = read_all(Follower(tmp_path))
    found = live_figures(follower.rows, follower.kinds, quiet=0)
    assert found["n"] == 200
    assert found["counts"] == {"passed": 133, "failed": 67, "unscored": 0, "error": 0}
    assert found["last"] == pytest.approx(np.percentile(times, [50, 90, 99]), rel=1e-4)
    assert found["rate"] == pytest.approx(10, rel=0.05)  # one every tenth of a second
    assert live_figures(follower.rows, follower.kinds, quiet=60)["rate"] == 0
    assert sum(found["over_time"]["finished"]) == 205
    assert sum(found["over_time"]["errors"]) == 5
    assert charts(in_case_order(follower.rows))["last"]["n"] == 200


def test_live_rates_are_marked_and_have_no_interval_where_records_count_together(tmp_path: Path) -> None:
    def judged(advisory: bool) -> list[Score]:
        return [Score("judge", 1.0, True, by="m", advisory=advisory), Score("exact", 1.0, True)]

    def figures(name: str, records: list[Record]) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        write_journal(tmp_path / name, records)
        watch = RunWatch(tmp_path / name, DaemonThreads())
        read_all(watch._follower)
        return watch._picture("interrupted")["figures"]

    failed = record(3, status="error", error="x", error_type="Timeout", scores=[])
    plain = figures("plain", [*map(record, range(3)), failed])
    assert (plain["uncalibrated"], plain["pass_rate_all"]) == ([], 0.5)
    assert plain["pass_rate_ci95"] is not None
    assert figures("judged", [record(0, scores=judged(False))])["uncalibrated"] == ["judge"]
    assert figures("advisory", [record(0, scores=judged(True))])["uncalibrated"] == []
    assert figures("trials", [record(0), record(0, trial=1)])["pass_rate_ci95"] is None
    assert figures("groups", [record(0, group="a"), record(1, group="a")])["pass_rate_ci95"] is None


def test_an_empty_journal_and_odd_numbers_have_figures_too(tmp_path: Path) -> None:
    nothing = live_figures(read_all(Follower(tmp_path)).rows, ["error"], quiet=0)
    assert (nothing["n"], nothing["pass_rate"], nothing["over_time"]) == (0, None, None)
    odd = {"time_to_last_token": 1e300, "num_tokens_output": 10**18, "run_time": -1.0, "cost": 1e-300}
    write_journal(tmp_path, [record(0, **odd), record(1, time_to_first_token=None, **odd)])
    follower = read_all(Follower(tmp_path))
    assert live_figures(follower.rows, follower.kinds, quiet=0)["last"] is None
    assert charts(in_case_order(follower.rows))["last"] is None
