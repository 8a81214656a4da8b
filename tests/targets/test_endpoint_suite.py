"""Endpoints in suite files: their arguments, their functions, the judges beside them, and no secret on disk."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.errors import SuiteError
from steelyard.run.config import build_suite
from steelyard.scoring.judge.judge import Judge
from steelyard.targets import AnthropicMessages, OpenAIChat, OpenAIResponses
from tests.support.cli import alone, run_cli
from tests.support.mock import running_mock
from tests.support.paths import DOCS

SECRET = "sk-literal-secret-4711"
TOOLS = '''
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"
'''


def write(folder: Path, target: Any, **keys: Any) -> Path:
    document = {"id": "s", "target": target, "cases": [{"id": "a", "prompt": "hello"}], **keys}
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(document))
    (folder / "tools.py").write_text(TOOLS)
    return path


def judge_of(path: Path) -> Any:
    (judge,) = build_suite(path).scorers
    assert isinstance(judge, Judge)
    return judge._target


@pytest.mark.parametrize(
    ("kind", "made"),
    [("openai-chat", OpenAIChat), ("openai-responses", OpenAIResponses), ("anthropic-messages", AnthropicMessages)],
)
def test_each_kind_can_be_named(tmp_path: Path, kind: str, made: type) -> None:
    arguments = {"model": "m", "base_url": "http://localhost:1/v1", "params": {"temperature": 0}, "stream": False}
    target = build_suite(write(tmp_path, {kind: arguments})).target
    assert type(target) is made
    assert target.identity()["params"] == {"temperature": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base_url": "http://x"}, "needs a model"),
        (None, "needs a model"),
        ({"modle": "m"}, "target.openai-chat.modle; did you mean 'model'?"),
        ({"model": "m", "base_ulr": "http://x"}, "target.openai-chat.base_ulr; did you mean 'base_url'?"),
        ({"model": "m", "transport": 1}, "unknown key target.openai-chat.transport"),
        ({"model": "m", "base_url": "x"}, "base_url must begin with http"),
        ({"model": "m", "functions": {"weather": "tools.py:wether"}}, "did you mean 'weather'?"),
        ({"model": "m", "functions": {"weather": 5}}, "target.openai-chat.functions.weather must be file.py:name"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(tmp_path: Path, arguments: Any, message: str) -> None:
    with alone(tmp_path), pytest.raises(SuiteError) as caught:
        build_suite(write(tmp_path, {"openai-chat": arguments}))
    assert message in str(caught.value)


def test_functions_and_the_ca_bundle_are_seen_from_the_suites_folder(tmp_path: Path) -> None:
    arguments = {"model": "m", "functions": {"weather": "tools.py:weather"}, "ca_bundle": "ca.pem"}
    with alone(tmp_path):
        target: Any = build_suite(write(tmp_path, {"openai-chat": arguments})).target
    assert target.identity()["functions"] == {"weather": "tools:weather"}
    assert target._connection_options["ca_bundle"] == str(tmp_path / "ca.pem")


def test_certificates_that_are_not_there_are_told_before_a_run_directory_is_made(tmp_path: Path) -> None:
    write(tmp_path, {"openai-chat": {"model": "m", "base_url": "http://127.0.0.1:9/v1", "ca_bundle": "ca.pem"}})
    ended = run_cli(tmp_path, "run", "suite.yaml", "--out", "RUN")
    assert ended.code == 2
    assert "ca_bundle is neither a file nor a folder: ca.pem" in ended.err
    assert not (tmp_path / "RUN").exists()


CONNECTION = {
    "base_url": "http://localhost:1/v1",
    "api_key_env": "MY_KEY",
    "headers": {"x-team": "evals"},
    "api_version": "7",
    "parallelism": 9,
}


def test_a_judge_without_a_target_asks_its_model_in_the_suites_place(tmp_path: Path) -> None:
    own = {"model": "m", "params": {"max_tokens": 5}, "tools": [{"name": "f"}], "store_payload": True, **CONNECTION}
    scorers = [{"judge": {"model": "j", "params": {"temperature": 0}}}]
    judge = judge_of(write(tmp_path, {"openai-chat": own}, scorers=scorers))
    assert (type(judge), judge.model_id, judge.base_url) == (OpenAIChat, "j", "http://localhost:1/v1")
    assert judge.identity()["headers"] == ["x-team"]
    assert (judge.api_version, judge._auth._key_variable, judge.default_parallelism) == ("7", "MY_KEY", 9)
    # What is about the suite's answers is not about the judge's.
    assert judge.params == {"temperature": 0}
    assert "tools" not in judge.identity()
    assert not judge.store_payload


def test_a_judge_with_an_endpoint_of_its_own_sends_its_model_and_parameters_there(tmp_path: Path) -> None:
    other = {"anthropic-messages": {"base_url": "http://localhost:2", "params": {"max_tokens": 99}}}
    scorers = [{"judge": {"model": "j", "params": {"temperature": 0}, "target": other}}]
    judge = judge_of(write(tmp_path, {"openai-chat": {"model": "m", **CONNECTION}}, scorers=scorers))
    assert (type(judge), judge.model_id, judge.base_url) == (AnthropicMessages, "j", "http://localhost:2")
    assert judge.params == {"max_tokens": 99, "temperature": 0}


def test_a_literal_key_works_and_reaches_neither_disk_nor_log(tmp_path: Path) -> None:
    with running_mock(key=SECRET) as mock:
        write(tmp_path, {"openai-chat": {"model": "m", "base_url": mock.base_url, "api_key": SECRET}})
        ended = run_cli(tmp_path, "run", "suite.yaml", "--out", "RUN", "--no-progress", "-v")
    assert ended.code == 0, ended.err
    assert SECRET not in ended.out + ended.err
    written = [path for path in (tmp_path / "RUN").rglob("*") if path.is_file()]
    assert all(SECRET.encode() not in path.read_bytes() for path in written)
    record = json.loads((tmp_path / "RUN" / "outputs.jsonl").read_text())
    assert record["http_status"] == 200
    assert record["num_tokens_output"] > 0


def test_a_key_that_is_refused_stands_in_no_record(tmp_path: Path) -> None:
    with running_mock(key="another-key") as mock:
        write(tmp_path, {"openai-chat": {"model": "m", "base_url": mock.base_url, "api_key": SECRET}})
        ended = run_cli(tmp_path, "run", "suite.yaml", "--out", "RUN", "--no-progress", "-v")
    assert ended.code == 4
    assert "401" in (tmp_path / "RUN" / "outputs.jsonl").read_text()
    assert SECRET not in ended.out + ended.err + (tmp_path / "RUN" / "outputs.jsonl").read_text()


def test_no_key_for_a_public_host_is_exit_2_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    write(tmp_path, {"openai-chat": {"model": "m", "base_url": "https://api.example.invalid/v1"}})
    ended = run_cli(tmp_path, "run", "suite.yaml", "--no-progress")
    assert ended.code == 2, ended.err
    assert "OPENAI_API_KEY" in ended.err
    assert "Traceback" not in ended.err


def test_the_docs_tell_of_every_argument() -> None:
    page = (DOCS / "targets.md").read_text(encoding="utf-8")
    section = page.partition("## Model endpoints")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", section, flags=re.M)
    assert set(inspect.signature(OpenAIChat).parameters) <= set(documented)
