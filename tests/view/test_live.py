"""A run that is being written, as server-sent events: from the journal alone, in time, and within bounds."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steelyard.cli.view import command
from steelyard.errors import ConfigurationError
from tests.support.cli import alone, wait_until
from tests.support.report import large_run
from tests.support.view import Events, Served, SteppedRun, served

VIEW = "import sys; from steelyard.cli.view import command; sys.exit(command(standalone_mode=False))"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def begun(server: Served, name: str = "steps") -> str:
    """The id of a run, once its folder is there."""
    wait_until(lambda: name in server.ids())
    return server.ids()[name]


def test_a_run_started_elsewhere_is_told_record_by_record_until_its_end(runs: Path) -> None:
    with served(runs) as server, SteppedRun(runs / "steps", 4) as run:
        events = server.events(begun(server))
        assert events.until(lambda event: "figures" in event)["state"] == "running"
        run.tell("right")
        event = events.until(lambda event: event["figures"]["n"] == 1)
        assert event["newest"][0]["id"] == "c0"
        assert event["newest"][0]["ask"] == "What is 0?"
        assert event["planned"] == 4
        run.tell("wrong", "error")
        event = events.until(lambda event: event["figures"]["n"] == 3)
        assert event["figures"]["counts"] == {"passed": 1, "failed": 1, "error": 1, "unscored": 0}
        assert event["figures"]["errors"] == [["ValueError", 1]]
        assert [one["id"] for one in event["newest"]] == ["c2", "c1", "c0"]
        run.tell("right")
        event = events.until(lambda event: event["state"] == "complete")
        assert event["figures"]["n"] == 4


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
    monkeypatch.setattr("steelyard.view.server._MOST_READERS", 2)
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
    monkeypatch.setattr("steelyard.view.server._MOST_READERS", 1)
    large_run(runs / "large", 10)
    with served(runs) as server:
        name = server.ids()["large"]
        request = f"GET /api/runs/{name}/events HTTP/1.0\r\nhost: 127.0.0.1:{server.port}\r\n\r\n"
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port)) as line:
                line.sendall(request.encode())
        wait_until(lambda: _is_let_in(server, name))


def test_a_page_that_comes_back_is_not_told_what_was_true_before(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.view.server._MOST_READERS", 1)  # whoever is let in is the only one
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
