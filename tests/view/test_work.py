"""Files of agents' cases through the view, and cases that are running: nothing but those, and nothing that runs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support.journal import a_record, write_journal
from tests.support.report import a_call, worked_run, write_calls
from tests.support.view import Served, served


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
