"""The webhook, against a real HTTP server on this machine."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.client import BadStatusLine
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from steelyard import ConfigurationError, EvalCase, EvalSet, Runner
from steelyard.integrations import webhook as module
from steelyard.integrations.webhook import Webhook
from tests.support.judged import Assessor


class Receiver:
    """What was posted, and what to answer: each code once, then 200."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.codes: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.posts.append((self.path, dict(self.headers), body))
                self.send_response(receiver.codes.pop(0) if receiver.codes else 200)
                self.send_header("Location", f"{receiver.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, _, body in self.posts]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def receiver(monkeypatch) -> Iterator[Receiver]:
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    made = Receiver()
    yield made
    made.close()


def run(hook: Webhook, tmp_path, answer=lambda case: "p") -> None:
    cases = [EvalCase(id=name, prompt="p", expected="p") for name in "ab"]
    Runner(
        answer, EvalSet("s", cases), ["exact"], hooks=[hook], progress="off", retries=0, output_path=tmp_path / "run"
    ).run_sync()


def test_the_end_of_a_run_is_posted_with_its_figures(receiver, tmp_path) -> None:
    run(Webhook(f"{receiver.url}/t0ken-in-path", headers={"X-Key": "hunter22-secret"}), tmp_path)
    [(path, headers, body)] = receiver.posts
    assert path == "/t0ken-in-path"
    assert headers["X-Key"] == "hunter22-secret"
    assert headers["Content-Type"] == "application/json"
    assert body["event"] == "end"
    assert body["text"] == "s: passed 100.0%, 0 errors, complete"
    assert (body["suite"], body["planned"], body["ok"], body["errors"]) == ("s", 2, 2, 0)
    assert body["pass_rate"] == 1.0
    assert 0 < body["pass_rate.ci_low"] < 1
    assert body["run"] == str((tmp_path / "run").absolute())


def test_every_event_that_was_asked_for_is_posted(receiver, tmp_path) -> None:
    def answer(case: EvalCase) -> str:
        if case.id == "b":
            raise ValueError("no \ud800 answer")
        return "p"

    run(Webhook(receiver.url, events=["start", "record", "error", "end"]), tmp_path, answer)
    found = sorted((body["event"], body.get("id")) for body in receiver.bodies() if body["event"] != "end")
    assert found == [("error", "b"), ("record", "a"), ("record", "b"), ("start", None)]
    [error] = [body for body in receiver.bodies() if body["event"] == "error"]
    assert error["error"].startswith("ValueError: no ")


def test_a_passing_failure_is_tried_again(receiver, tmp_path) -> None:
    receiver.codes = [503, 429]
    run(Webhook(receiver.url), tmp_path)
    assert [body["event"] for body in receiver.bodies()] == ["end", "end", "end"]


@pytest.mark.parametrize(("code", "posts"), [(404, 1), (302, 1), (500, 3)])
def test_a_refusal_is_reported_without_the_address(receiver, tmp_path, caplog, code, posts) -> None:
    """A redirect counts as one: headers with secrets go to no other address."""
    receiver.codes = [code] * 3
    with caplog.at_level(logging.WARNING, "steelyard"):
        run(Webhook(f"{receiver.url}/services/s3cret-part"), tmp_path)
    assert len(receiver.posts) == posts
    [message] = [text for text in caplog.messages if "webhook" in text]
    assert f"127.0.0.1 answered {code} to the event end" in message
    assert "s3cret" not in message


def test_nobody_listening_is_reported_and_the_run_is_complete(receiver, tmp_path, caplog) -> None:
    hook = Webhook(f"{receiver.url}/services/s3cret-part")
    receiver.close()
    with caplog.at_level(logging.WARNING, "steelyard"):
        run(hook, tmp_path)
    [message] = [text for text in caplog.messages if "webhook" in text]
    assert "127.0.0.1 cannot be reached" in message
    assert "s3cret" not in message
    assert (tmp_path / "run" / "metrics.json").is_file()


def test_neither_address_nor_headers_reach_the_disk(receiver, tmp_path) -> None:
    run(Webhook(f"{receiver.url}/services/s3cret-part", headers={"X": "hunter22-secret"}), tmp_path)
    written = b"".join(file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert b"s3cret" not in written
    assert b"hunter22" not in written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "x"}, "must start with http"),
        ({"url": "http://x", "events": "end"}, "events are a list"),
        ({"url": "http://x", "timeout": 0}, "timeout must be seconds above 0"),
        ({"url": "http://x/s3cret part"}, "url has a space or a control character"),
        ({"url": "http://x", "headers": {"Authorization": "s3cret\n"}}, "header 'Authorization' has a line break"),
        ({"url": "http://x", "headers": {"X": 5}}, "header 'X' must be text"),
    ],
)
def test_bad_arguments_are_named_without_secrets(arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        Webhook(**arguments)
    assert "s3cret" not in str(refused.value)


def test_what_is_no_http_is_reported(receiver, tmp_path, caplog, monkeypatch) -> None:
    def no_http(*_: object, **__: object) -> None:
        raise BadStatusLine(f"{receiver.url}/s3cret-part")

    monkeypatch.setattr(module._opener, "open", no_http)
    with caplog.at_level(logging.WARNING, logger="steelyard"):
        run(Webhook(f"{receiver.url}/s3cret-part"), tmp_path)
    [message] = [text for text in caplog.messages if "webhook" in text]
    assert "127.0.0.1 cannot be reached: BadStatusLine" in message
    assert "s3cret" not in message


def test_a_rate_that_an_uncalibrated_judge_decided_is_marked(receiver, tmp_path) -> None:
    judge = Assessor().judge()
    cases = EvalSet("s", [EvalCase(id="a", prompt="p", expected="p")])
    Runner(lambda case: "p", cases, [judge], hooks=[Webhook(receiver.url)], progress="off").run_sync()
    [body] = receiver.bodies()
    assert body["uncalibrated"] == ["the judge is not calibrated; without it nothing decides"]
    assert body["text"] == "s: passed 100.0% (judge not calibrated), 0 errors, complete"
