"""`steelyard mock` as a command: what it prints where, and how it ends."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.cli import run_cli
from tests.support.mock import STEELYARD, mock_process, running_mock


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_its_address_and_ends_in_order(number: signal.Signals) -> None:
    flags = ("--model", "small", "--output-tokens", "3", "--no-usage", "--seed", "5")
    with mock_process(*flags) as (mock, process):
        assert mock.base_url.startswith("http://127.0.0.1:")
        assert mock.chat("hi")[0] == 404
        assert mock.chat("hi", model="small")[0] == 200
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "")
    assert "2 requests, at most 1 at once" in err
    snippets = [yaml.safe_load(line) for line in err.splitlines() if line.strip().startswith("target:")]
    kinds = {kind: arguments for snippet in snippets for kind, arguments in snippet["target"].items()}
    openai = {"openai-chat", "openai-responses", "openai-completions"}
    assert set(kinds) == openai | {"anthropic-messages", "gemini", "bedrock"}
    assert kinds["openai-chat"] == {"model": "small", "base_url": mock.base_url}


def test_it_ends_while_answers_are_still_to_come() -> None:
    with mock_process("--latency", "60s") as (mock, process), mock.line() as line:
        line.sendall(b"POST /v1/responses HTTP/1.1\r\ncontent-length: 26\r\n\r\n" + b'{"model":"m","input":"hi"} ')
        while not mock.stats()["current_concurrency"]:
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_busy_port_is_exit_2() -> None:
    with running_mock() as mock:
        ended = subprocess.run(
            [STEELYARD, "mock", "--port", str(mock.address[1])], capture_output=True, text=True, timeout=30, check=False
        )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "in use" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--latency", "soon"], "latency must be a length of time"),
        (["--error-rate", "2"], "--error-rate must be within 0..1, or 0%..100%, got '2'"),
        (["--answers", "nowhere.jsonl"], "nowhere.jsonl: cannot read the answers"),
        (["--tokens-per-second", "5", "--chunk-interval", "1ms"], "give one of them"),
    ],
    ids=str,
)
def test_a_mistake_is_exit_2_and_named(tmp_path: Path, flags: list[str], named: str) -> None:
    ended = run_cli(tmp_path, "mock", *flags)
    assert ended.code == 2
    assert named in ended.err
