"""The coding example through the gateway, in front of the mock: trajectories, costs, limits, and in the sandbox."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard import CaseLimits, Engine, EvalCase, EvalSet, LocalEngine, ProcessEngine, Runner, Workspace
from steelyard.errors import ConfigurationError
from steelyard.run.config import build_suite
from steelyard.run.options import RunOptions
from steelyard.targets import Agent
from steelyard.workspace.recording import read_calls
from steelyard.workspace.sandbox import Bubblewrap
from tests.support.gateway import REAL_KEY
from tests.support.mock import running_mock
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "coding"
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
PRICES = {"large": {"input": 3, "output": 15}, "small": {"input": 0.25, "output": 1.25}}
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_WORK", str(tmp_path / "work"))
    monkeypatch.setenv("OPENAI_API_KEY", REAL_KEY)


def engine_of(workers: int) -> Engine:
    return ProcessEngine(workers) if workers else LocalEngine()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_example_of_twenty_tasks_is_recorded_call_by_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    with running_mock(key=REAL_KEY, tool_call_rate=1.0) as mock, engine_of(workers) as engine:
        monkeypatch.setenv("OPENAI_BASE_URL", mock.base_url)
        built = build_suite(EXAMPLE / "gateway.yaml")
        options = RunOptions().replace(**{**built.options, "progress": "off", "output_path": str(tmp_path / "run")})
        runner = Runner(
            built.target,
            built.suite,
            built.scorers,
            workspace=built.workspace,
            case_limits=built.case_limits,
            options=options,
            engine=engine,
        )
        result = runner.run_sync()
        received = mock.stats()
    records = list(result.iter_responses())
    assert len(records) == 20
    assert all(record.error is None for record in records)
    assert sum(record.scores[0].passed is True for record in records) >= 14
    assert sum(record.num_turns for record in records) == received["requests"]
    assert sum(record.num_tokens_input for record in records) == received["tokens_input"]
    assert sum(record.num_tokens_output for record in records) == received["tokens_output"]
    one = next(record for record in records if record.id == "add-signs")
    assert [message["role"] for message in one.messages] == ["assistant", "assistant", "tool", "assistant"]
    assert one.messages[0]["tool_calls"][0]["function"]["name"] == "read_file"
    assert one.messages[1]["thread"] == 2
    assert "def add" in one.messages[2]["content"]
    (session,) = read_calls(tmp_path / "run" / "calls" / "add-signs" / "0.jsonl")
    assert [call.line.model for call in session.calls] == ["large", "small", "large"]
    assert one.cost == pytest.approx(session.cost)
    assert REAL_KEY not in "".join(path.read_text() for path in (tmp_path / "run").rglob("*.jsonl"))


def an_agent(mock_url: str, more_steps: int, **options: Any) -> Agent:
    return Agent(
        [PYTHON, "{{ suite }}/model_agent.py", "{{ prompt }}"],
        env={
            "OPENAI_BASE_URL": "{{ gateway.openai }}",
            "OPENAI_API_KEY": "{{ gateway.key }}",
            "MORE_STEPS": str(more_steps),
        },
        gateway={"openai": {"base_url": mock_url}},
        folder=EXAMPLE,
        **options,
    )


def run_one(target: Agent, limits: CaseLimits, tmp_path: Path, engine: Engine | None = None) -> Any:
    suite = EvalSet("s", [EvalCase(id="add-signs", prompt="Fix the bug in task.py.")])
    workspace = Workspace(str(EXAMPLE / "fixtures" / "add-signs"))
    options: dict[str, Any] = {"progress": "off", "output_path": str(tmp_path / "run"), "retries": 0, "prices": PRICES}
    runner = Runner(target, suite, workspace=workspace, case_limits=limits, engine=engine, **options)
    (record,) = runner.run_sync().iter_responses()
    return record


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (CaseLimits(turns=6), "turn_limit"),
        (CaseLimits(tokens=500), "token_limit"),
        (CaseLimits(cost=0.002), "cost_limit"),
    ],
)
def test_an_agent_over_its_budget_ends_within_one_call_of_its_limit(
    limits: CaseLimits, reason: str, tmp_path: Path
) -> None:
    with running_mock(tool_call_rate=1.0) as mock:
        record = run_one(an_agent(mock.base_url, 1000), limits, tmp_path)
        received = mock.stats()
    assert (record.stop_reason, record.error) == (reason, None)
    assert record.num_turns == received["requests"]
    (session,) = read_calls(tmp_path / "run" / "calls" / "add-signs" / "0.jsonl")
    assert session.end is not None
    assert session.end.limit == reason
    before = session.calls[:-1]
    if limits.turns is not None:
        assert received["requests"] == limits.turns
    if limits.tokens is not None:
        spent = sum(c.line.response.num_tokens_input + c.line.response.num_tokens_output for c in before)
        assert spent < limits.tokens <= record.num_tokens_input + record.num_tokens_output
    if limits.cost is not None:
        assert sum(call.line.response.cost for call in before) < limits.cost <= record.cost


@pytest.mark.parametrize("workers", [0, 1])
def test_the_agent_works_in_a_sandbox_that_reaches_the_gateway_alone(tmp_path: Path, workers: int) -> None:
    try:
        Bubblewrap().check()
    except ConfigurationError as error:
        pytest.skip(str(error))
    walls = {"network": "gateway", "read_only": ["model_agent.py", "agent.py"], "disk": "100M"}
    with running_mock(key=REAL_KEY, tool_call_rate=1.0) as mock, engine_of(workers) as engine:
        target = an_agent(mock.base_url, 0, sandbox={"bubblewrap": walls})
        record = run_one(target, CaseLimits(turns=20), tmp_path, engine)
    assert (record.error, record.num_turns) == (None, 3)
    patch = (tmp_path / "run" / "artifacts" / "add-signs" / "0" / "workspace.patch").read_text()
    assert "+    return a + b" in patch
