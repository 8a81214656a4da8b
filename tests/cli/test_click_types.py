"""`-p NAME=VALUE`: parameters of a target from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.cli.run import load_suite
from steelyard.errors import SuiteError
from tests.support.cli import run_cli
from tests.support.mock import running_mock


def write(folder: Path, target: Any) -> None:
    (folder / "cases.jsonl").write_text('{"prompt": "What is 2 + 2?"}\n')
    suite = {"target": target, "cases": "cases.jsonl", "scorers": [{"latency": {"max_seconds": 60}}]}
    (folder / "suite.yaml").write_text(json.dumps(suite))


def sent(folder: Path, *flags: str) -> dict[str, Any]:
    """What a run with these flags asks."""
    with running_mock() as mock:
        arguments = {
            "model": "m",
            "base_url": mock.base_url,
            "store_payload": True,
            "params": {"temperature": 1, "n": 1},
        }
        write(folder, {"openai-chat": arguments})
        ended = run_cli(folder, "run", "suite.yaml", "--out", "RUN", "--no-progress", *flags)
    assert ended.code == 0, ended.err
    payload: dict[str, Any] = json.loads((folder / "RUN" / "outputs.jsonl").read_text())["input_payload"]
    return payload


def test_a_parameter_overrides_the_suites_and_leaves_the_others(tmp_path: Path) -> None:
    payload = sent(tmp_path, "-p", "temperature=0.2", "--param", 'stop=["a=b"]', "-p", "user=me", "-p", "seed= 7 ")
    assert (payload["temperature"], payload["n"]) == (0.2, 1)
    assert (payload["stop"], payload["user"], payload["seed"]) == (["a=b"], "me", 7)


def test_another_parameter_is_another_target(tmp_path: Path) -> None:
    write(tmp_path, {"openai-chat": {"model": "m", "base_url": "http://localhost:1"}})
    suite = str(tmp_path / "suite.yaml")
    first, second = (load_suite(suite, {"params": {"temperature": t}})[0].target.identity() for t in (0, 1))
    assert first != second


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("-p", "temperature"), "write NAME=VALUE"),
        (("-p", "=1"), "write NAME=VALUE"),
        (("-p", "a=1", "-p", "a=2"), "a is given twice"),
        (("-p", "messages=[]"), "params cannot set 'messages'"),
    ],
)
def test_what_cannot_be_a_parameter_is_refused(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    write(tmp_path, {"openai-chat": {"model": "m", "base_url": "http://localhost:1"}})
    ended = run_cli(tmp_path, "run", "suite.yaml", "--no-progress", *flags)
    assert ended.code == 2
    assert message in ended.err


def test_a_sweep_takes_parameters_too(tmp_path: Path) -> None:
    write(tmp_path, {"openai-chat": {"model": "m", "base_url": "http://localhost:1"}})
    ended = run_cli(tmp_path, "sweep", "suite.yaml", "-j", "1", "-p", "messages=[]", "--no-progress")
    assert ended.code == 2
    assert "params cannot set 'messages'" in ended.err


def test_a_target_without_parameters_says_so(tmp_path: Path) -> None:
    write(tmp_path, {"command": ["cat"]})
    with pytest.raises(SuiteError, match="command does not take params: --param cannot change it"):
        load_suite(str(tmp_path / "suite.yaml"), {"params": {"temperature": 0}})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-n", "0"], "-n/--limit must be >= 1, got 0"),
        (["--stop-first-errors", "-1"], "--stop-first-errors must be >= 0, got -1"),
        (["--max-cost", "0"], "--max-cost must be a number above 0, got 0.0"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_the_name_of_its_flag(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    write(tmp_path, "simulated")
    ended = run_cli(tmp_path, "run", "suite.yaml", *flags)
    assert ended.code == 2
    assert f"steelyard: {message}\n" in ended.err
