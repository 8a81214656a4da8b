"""Whole runs against the mock in a process of its own: what was asked, what was recorded, what the limits did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Result, Runner
from steelyard.errors import ConfigurationError
from steelyard.scoring import Judge
from steelyard.targets import AnthropicMessages, OpenAIChat, OpenAIResponses
from tests.support.cli import run_cli
from tests.support.mock import Mock, mock_process


@pytest.fixture(scope="module")
def quick() -> Iterator[Mock]:
    with mock_process("--latency", "20ms", "--output-tokens", "4", "--chunk-interval", "1ms") as (mock, _):
        yield mock


def suite(cases: int) -> EvalSet:
    return EvalSet(id="asked", cases=[EvalCase(id=f"c{n}", prompt=f"question {n}") for n in range(cases)])


def run(target: Any, cases: int, **options: Any) -> Result:
    return Runner(target, suite(cases), progress="off").run_sync(**options)


@pytest.mark.parametrize("kind", [OpenAIChat, OpenAIResponses, AnthropicMessages])
@pytest.mark.parametrize("stream", [True, False])
def test_every_case_is_asked_once_and_recorded_once(quick: Mock, kind: Any, stream: bool, tmp_path: Path) -> None:
    before = quick.stats()["requests"]
    result = run(kind("m", base_url=quick.base_url, stream=stream), 60, output_path=tmp_path / "run", parallelism=15)
    assert result.metrics["counts"]["ok"] == 60
    assert quick.stats()["requests"] - before == 60
    records = result.load_responses()
    assert {record.id for record in records} == {f"c{n}" for n in range(60)}
    for record in records:
        assert record.http_status == 200
        assert record.request_id
        assert record.num_tokens_output == 4
        assert record.time_queued is not None
        assert (record.time_between_tokens_max is not None) == stream
    assert ("time_between_tokens_p99-p99" in result.metrics["stats"]) == stream
    gated = run_cli(tmp_path, "gate", "run", "--rule", "itl_p50<10s", "--rule", "stalls<=1000")
    assert (gated.code == 0) == stream, gated  # a figure that was not measured keeps no rule


def test_no_first_token_is_reported_sooner_than_the_server_sent_it(quick: Mock) -> None:
    """A stamp that is taken after sending comes late on a busy machine, and the answer then looks too fast."""
    result = run(OpenAIChat("m", base_url=quick.base_url), 300, parallelism=30)
    assert min(record.time_to_first_token or 0 for record in result.responses) >= 0.02


@pytest.mark.slow
def test_a_provider_that_refuses_beyond_a_number_at_once_is_asked_just_that_many_with_auto() -> None:
    with mock_process(
        "--latency", "30ms", "--output-tokens", "1", "--max-concurrency", "10", "--retry-after", "0.05"
    ) as (
        mock,
        _,
    ):
        target = OpenAIChat("m", base_url=mock.base_url, stream=False)
        result = run(target, 1200, parallelism="auto", max_parallelism=64)
    assert result.metrics["counts"]["ok"] == 1200
    assert 7 <= result.metrics["parallelism_history"][-1][1] <= 10


def test_a_rate_holds_at_the_server(quick: Mock) -> None:
    result = run(OpenAIChat("m", base_url=quick.base_url), 20, rate="100/s", parallelism=20)
    assert result.metrics["active_seconds"] >= 0.19
    assert any(record.time_waiting for record in result.responses)


def test_a_torn_stream_keeps_its_text_in_the_record() -> None:
    with mock_process("--output-tokens", "20", "--torn-rate", "1", "--chunk-interval", "1ms") as (mock, _):
        result = run(OpenAIChat("m", base_url=mock.base_url), 5, retries=1)
    for record in result.responses:
        assert record.status == "error"
        assert record.retries == 1
        assert record.error_type
    assert any(record.response_text for record in result.responses)


def test_the_key_is_asked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY"):
        run(OpenAIChat("m", base_url="https://models.example.com/v1"), 1, output_path=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_key_reaches_neither_disk_nor_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-0123456789")
    with mock_process("--key", "sk-very-secret-0123456789") as (mock, _):
        text = f"""
id: asked
target: {{openai-chat: {{model: m, base_url: "{mock.base_url}", headers: {{x-team: "quite-secret-team"}}}}}}
cases: [{{id: a, prompt: hello}}, {{id: b, prompt: again}}]
"""
        (tmp_path / "suite.yaml").write_text(text)
        ended = run_cli(tmp_path, "run", "suite.yaml", "--out", "run", "-v")
    assert ended.code == 0, ended.err
    everything = ended.out + ended.err + "".join(path.read_text() for path in (tmp_path / "run").glob("*.json*"))
    assert "very-secret" not in everything
    assert "quite-secret" not in everything


def test_model_and_address_can_be_given_on_the_command_line(quick: Mock, tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(
        "id: asked\ntarget: {openai-chat: {model: m, base_url: 'http://127.0.0.1:1/v1'}}\n"
        "cases: [{id: a, prompt: hi}]\n"
    )
    ended = run_cli(tmp_path, "run", "suite.yaml", "--out", "run", "--base-url", quick.base_url, "-m", "another")
    assert ended.code == 0, ended.err
    assert "asked on another: 1 of 1 done" in ended.out


def test_when_one_endpoint_cannot_be_opened_none_is_left_open() -> None:
    class Opened(OpenAIChat):
        now = 0

        async def open(self, parallelism: int) -> None:
            await super().open(parallelism)
            self.now += 1

        async def close(self) -> None:
            await super().close()
            self.now -= 1

    class Shut(OpenAIChat):
        async def open(self, parallelism: int) -> None:
            raise ConfigurationError("not today")

    target = Opened("m", base_url="http://127.0.0.1:9/v1")
    other = Shut("j", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(ConfigurationError, match="not today"):
        Runner(target, suite(1), [Judge(model="j", target=other)], progress="off").run_sync()
    assert target.now == 0
