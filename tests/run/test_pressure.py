"""Whole runs against endpoints that are slow, strict, closed or not there."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Result, Runner
from steelyard.errors import ConfigurationError
from steelyard.protocols import InvocationContext
from steelyard.run.options import RunOptions
from steelyard.scoring import Judge
from steelyard.targets import OpenAIChat
from tests.support.cli import run_cli
from tests.support.judged import Agent, Assessor, Gauge, runner_of
from tests.support.mock import mock_process

pytestmark = pytest.mark.slow


def suite(cases: int, **case: Any) -> EvalSet:
    return EvalSet(id="asked", cases=[EvalCase(id=f"c{n}", prompt=f"question {n}", **case) for n in range(cases)])


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a port that is taken, and that nobody listens at."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}/v1"


def run(target: OpenAIChat, cases: int, **options: Any) -> Result:
    return Runner(target, suite(cases), progress="off").run_sync(**options)


def test_a_slow_judge_on_another_endpoint_does_not_decide_how_much_the_target_is_asked() -> None:
    """`auto`: what a case waits for after its answer says nothing of the endpoint that gave it."""
    with (
        mock_process("--latency", "5ms", "--output-tokens", "1") as (quick, _),
        mock_process("--latency", "300ms", "--output-tokens", "1") as (slow, _),
    ):
        judge = Judge(model="j", prompt="correctness_v1", target=OpenAIChat("j", base_url=slow.base_url, stream=False))
        target = OpenAIChat("m", base_url=quick.base_url, stream=False)
        runner = Runner(target, suite(120, expected="x"), [judge], progress="off", parallelism="auto")
        result = runner.run_sync(max_parallelism=64)
        assert result.metrics["counts"]["ok"] == 120
        assert result.metrics["peak_in_flight"] > 30
        assert 16 < slow.stats()["peak_concurrency"] <= 64
        assert quick.stats()["peak_concurrency"] <= 64


def test_a_judge_on_the_same_endpoint_counts_towards_what_it_bears() -> None:
    with mock_process("--latency", "20ms", "--output-tokens", "1", "--max-concurrency", "8") as (mock, _):
        judge = Judge(model="j", prompt="correctness_v1", target=OpenAIChat("j", base_url=mock.base_url, stream=False))
        target = OpenAIChat("m", base_url=mock.base_url, stream=False)
        runner = Runner(target, suite(60, expected="x"), [judge], progress="off")
        result = runner.run_sync(parallelism="auto", max_parallelism=6)
        assert result.metrics["counts"]["ok"] == 60
        assert mock.stats()["peak_concurrency"] <= 6
        assert set(mock.stats()["by_status"]) == {"200"}


def test_a_judge_that_is_a_function_is_asked_no_more_at_once_than_it_has_been_found_to_bear() -> None:
    """`auto` begins with four calls at once, whoever answers them, however many cases wait for a verdict."""
    gauge = Gauge()
    peaks: list[int] = []

    def reply(*_: Any) -> float:
        peaks.append(gauge.peak)
        return 1.0

    judge = Assessor(reply, seconds=0.1, gauge=gauge).judge()
    result = runner_of(Agent(), suite(40), [judge], parallelism="auto").run_sync()
    assert result.metrics["counts"]["ok"] == 40
    assert peaks[0] == 4


def test_a_rate_counts_every_call_of_a_tool_loop() -> None:
    async def look_up(**_: Any) -> str:
        return "nothing"

    tool = {"name": "look_up", "parameters": {"type": "object", "properties": {}}}
    with mock_process("--latency", "1ms", "--tool-call-rate", "1", "--output-tokens", "1") as (mock, _):
        target = OpenAIChat("m", base_url=mock.base_url, functions={"look_up": look_up}, tools=[tool])
        result = run(target, 5, rate="20/s", parallelism=5)
        assert result.metrics["counts"]["ok"] == 5
        assert mock.stats()["requests"] == 10
    assert result.metrics["active_seconds"] >= 9 / 20 * 0.95


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"parallelism": 50, "retries": 0}, id="a run"),
        pytest.param({"duration": 30.0, "parallelism": 10}, id="closed loop"),
        pytest.param({"duration": 30.0, "arrivals": "constant:200/s"}, id="open loop"),
    ],
)
def test_a_run_that_finds_nobody_there_ends_soon_and_says_so(nobody: str, options: Any, tmp_path: Path) -> None:
    result = run(OpenAIChat("m", base_url=nobody), 5_000, output_path=tmp_path / "run", **options)
    assert result.cancelled
    assert not result.complete
    found = re.match(
        r"nothing answers there: the first (\d+) calls(?:, retries included,)? all failed", result.metrics["stopped"]
    )
    assert found is not None
    assert 20 <= int(found[1]) <= 100  # those sent before the first failed are waited for
    assert nobody.removesuffix("/v1") in result.metrics["stopped"]
    assert result.metrics["counts"]["error"] < 300


class Counted(OpenAIChat):
    """Calls somebody when it is asked for the 200th time."""

    asked = 0
    then: Any = None

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        self.asked += 1
        if self.asked == 200:
            self.then()
        return await super().invoke(case, context)


def test_an_endpoint_that_goes_away_in_the_middle_of_a_load_run_is_not_hammered() -> None:
    with mock_process("--latency", "1ms", "--output-tokens", "1") as (mock, process):
        target = Counted("m", base_url=mock.base_url, stream=False)
        target.then = process.kill
        result = run(target, 10, duration=2.0, parallelism=10)
    assert result.metrics["counts"]["ok"] > 100
    assert result.metrics["counts"]["error"] < 300


def test_a_wrong_key_ends_a_run_and_the_right_one_resumes_it(tmp_path: Path) -> None:
    with mock_process("--key", "right", "--output-tokens", "1") as (mock, _):
        wrong = run(OpenAIChat("m", base_url=mock.base_url, api_key="wrong"), 400, output_path=tmp_path / "run")
        assert "every call is refused" in wrong.metrics["stopped"]
        assert "HTTP 401" in wrong.metrics["stopped"]
        assert 20 <= wrong.metrics["counts"]["error"] < 400
        right = run(OpenAIChat("m", base_url=mock.base_url, api_key="right"), 400, output_path=tmp_path / "run")
    assert right.complete
    assert right.metrics["counts"]["ok"] == 400
    assert right.metrics["counts"]["error"] == 0


def test_whoever_wants_every_case_on_record_gets_them(tmp_path: Path) -> None:
    with mock_process("--key", "right") as (mock, _):
        result = run(OpenAIChat("m", base_url=mock.base_url, api_key="wrong"), 60, stop_first_errors=0)
    assert result.complete
    assert result.metrics["counts"]["error"] == 60


@pytest.mark.parametrize("given", [-1, 1.5, "20", True])
def test_a_number_of_first_errors_that_makes_no_sense_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="stop_first_errors must be"):
        RunOptions(stop_first_errors=given)


def test_on_the_command_line_a_model_that_is_not_there_ends_in_exit_4_and_the_command_that_resumes(
    tmp_path: Path,
) -> None:
    (tmp_path / "cases.jsonl").write_text("".join(f'{{"id": "c{n}", "prompt": "q{n}"}}\n' for n in range(300)))
    with mock_process("--model", "there", "--output-tokens", "1") as (mock, _):
        (tmp_path / "suite.yaml").write_text(
            f"id: s\ntarget: {{openai-chat: {{model: other, base_url: '{mock.base_url}'}}}}\ncases: cases.jsonl\n"
        )
        ended = run_cli(tmp_path, "run", "suite.yaml", "--out", "RUN", "--stop-first-errors", "30")
    assert ended.code == 4
    found = re.search(r"every call is refused: the first (\d+) calls(?:, retries included,)? all failed", ended.out)
    assert found is not None
    assert 30 <= int(found[1]) <= 100
    assert "HTTP 404" in ended.out
    assert "resume with: steelyard run suite.yaml --out RUN --stop-first-errors 30" in ended.err
