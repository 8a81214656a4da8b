"""Agents that call their models through the gateway, in whole runs: records, limits, shared rates, kill and resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from steelyard import CaseLimits, EvalCase, EvalSet, InvocationContext, Runner
from steelyard.targets import CallableTarget
from steelyard.workspace.recording import read_calls
from tests.support.gateway import REAL_KEY
from tests.support.mock import Mock, running_mock

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

PRICES = {"input": 1.0, "output": 2.0, "cached_input": 0.5}


@pytest.fixture(autouse=True)
def _work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_WORK", str(tmp_path / "work"))


async def agent(case: EvalCase, context: InvocationContext) -> str:
    """Asks twice in one conversation, with a question of a sub-agent in between."""
    assert context.gateway is not None
    async with openai.AsyncOpenAI(
        base_url=context.gateway.openai, api_key=context.gateway.key, max_retries=0
    ) as client:
        turns: Any = [{"role": "user", "content": case.prompt}]
        for number in range(2):
            reply = await client.chat.completions.create(model="m", messages=turns)
            turns += [{"role": "assistant", "content": reply.choices[0].message.content}]
            turns += [{"role": "user", "content": f"go on {number}"}]
            if number == 0:
                aside: Any = [{"role": "user", "content": f"a sub-agent's question on {case.id}"}]
                await client.chat.completions.create(model="small", messages=aside)
    return "done"


async def claude(case: EvalCase, context: InvocationContext) -> str:
    """The same with Anthropic's client, streamed, with a tool."""
    assert context.gateway is not None
    tools: Any = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
    async with anthropic.AsyncAnthropic(
        base_url=context.gateway.anthropic, api_key=context.gateway.key, max_retries=0
    ) as client:
        turns: Any = [{"role": "user", "content": case.prompt}]
        for number in range(2):
            async with client.messages.stream(model="m", max_tokens=99, messages=turns, tools=tools) as stream:
                reply = await stream.get_final_message()
            turns += [{"role": "assistant", "content": reply.content}]
            turns += [{"role": "user", "content": f"go on {number}"}]
            if number == 0:
                aside: Any = [{"role": "user", "content": f"a sub-agent's question on {case.id}"}]
                await client.messages.create(model="small", max_tokens=99, messages=aside)
    return "done"


def runner_of(mock: Mock, function: Any = agent, count: int = 3, **options: Any) -> Runner:
    places = {"openai": mock.base_url, "anthropic": mock.url}
    gateway = {name: {"base_url": url, "api_key": REAL_KEY} for name, url in places.items()}
    cases = [EvalCase(id=f"c{number}", prompt=f"solve {number}") for number in range(count)]
    target = CallableTarget(function, gateway=gateway, parallelism=2)
    return Runner(target, EvalSet("s", cases), progress="off", prices=PRICES, **options)


def test_a_record_has_what_the_gateway_measured_and_the_mock_counted(tmp_path: Path) -> None:
    with running_mock(key=REAL_KEY) as mock:
        result = runner_of(mock, output_path=tmp_path / "run").run_sync()
        received = mock.stats()
    records = list(result.iter_responses())
    assert [record.num_turns for record in records] == [3, 3, 3]
    assert sum(record.num_tokens_input for record in records) == received["tokens_input"]
    assert sum(record.num_tokens_output for record in records) == received["tokens_output"]
    assert received["requests"] == 9
    calls = [read_calls(tmp_path / "run" / "calls" / record.id / "0.jsonl") for record in records]
    for record, sessions in zip(records, calls, strict=True):
        (session,) = sessions
        assert record.cost == pytest.approx(session.cost)
        assert [call.line.thread for call in session.calls] == [1, 2, 1]
        assert [message["role"] for message in record.messages] == ["assistant", "assistant", "user", "assistant"]
        assert record.time_in_model is not None
        assert record.time_in_tools is not None
        assert record.notes == []
    assert result.metrics["cost"] == pytest.approx(sum(record.cost for record in records))
    everything = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert REAL_KEY.encode() not in everything


def test_an_agent_that_is_refused_for_a_limit_is_an_outcome_even_if_it_fails(tmp_path: Path) -> None:
    with running_mock() as mock:
        limits = CaseLimits(turns=2)
        result = runner_of(mock, output_path=tmp_path / "run", case_limits=limits).run_sync()
        assert mock.stats()["requests"] == 6
    records = list(result.iter_responses())
    assert [record.stop_reason for record in records] == ["turn_limit"] * 3
    assert [record.error for record in records] == [None] * 3
    assert [record.num_turns for record in records] == [2] * 3
    assert [record.attempts for record in records] == [1] * 3


def test_an_agent_without_a_call_has_a_note(tmp_path: Path) -> None:
    with running_mock() as mock:
        result = runner_of(mock, lambda case: "done", output_path=tmp_path / "run").run_sync()
    assert all("0 model calls" in record.notes[0] for record in result.iter_responses())
    assert not (tmp_path / "run" / "calls").exists()


def test_what_a_failed_agent_spent_is_in_its_record(tmp_path: Path) -> None:
    async def fails(case: EvalCase, context: InvocationContext) -> str:
        await agent(case, context)
        raise ValueError("after all that")

    with running_mock() as mock:
        result = runner_of(mock, fails, count=1, output_path=tmp_path / "run", retries=0).run_sync()
    (record,) = result.iter_responses()
    assert "after all that" in record.error
    assert record.num_turns == 3
    assert record.cost > 0


def test_agents_share_the_runs_rate_limit(tmp_path: Path) -> None:
    with running_mock() as mock:
        result = runner_of(mock, count=2, output_path=tmp_path / "run", rate="10/s").run_sync()
        times = mock.stats(times=True)["times"]
    moments = sorted(one["received_ns"] for one in times)
    assert len(moments) == 6
    assert (moments[-1] - moments[0]) / 1e9 > 0.4
    assert all(record.time_waiting for record in result.iter_responses())


KILLED = """
import sys
from tests.run import test_gateway
from tests.support.mock import Mock

if __name__ == "__main__":
    function = getattr(test_gateway, sys.argv[3])
    test_gateway.runner_of(Mock(sys.argv[1]), function, count=1, output_path=sys.argv[2]).run_sync()
"""


@pytest.mark.parametrize("sdk", ["agent", "claude"], ids=["openai", "anthropic"])
def test_calls_of_a_killed_run_are_counted_and_paid_once_in_all(tmp_path: Path, sdk: str) -> None:
    """Killed while a call is under way: what the mock had answered is in the files, and in the final costs."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with running_mock(key=REAL_KEY, latency="600ms") as mock:
        command = [sys.executable, str(script), mock.base_url, str(tmp_path / "run"), sdk]
        with subprocess.Popen(command, env=env) as process:
            while (seen := mock.stats())["requests"] < 2 or not seen["current_concurrency"]:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        while mock.stats()["current_concurrency"]:
            time.sleep(0.01)
        subprocess.run(command, env=env, check=True, timeout=60)
        received = mock.stats()
    sessions = [one for path in (tmp_path / "run" / "calls").rglob("*.jsonl") for one in read_calls(path)]
    calls = [call.line.response for session in sessions for call in session.calls]
    assert any(session.end is None for session in sessions)
    assert len(calls) == received["by_status"]["200"]
    assert sum(call.num_tokens_input for call in calls) == received["tokens_input"]
    assert sum(call.num_tokens_output for call in calls) == received["tokens_output"]
    records = [json.loads(line) for line in (tmp_path / "run" / "outputs.jsonl").read_text().splitlines()]
    assert sum(record["cost"] for record in records) == pytest.approx(sum(call.cost for call in calls))
