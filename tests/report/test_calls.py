"""The time line of an agent's model calls, and its lines in the text of a case."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from steelyard import EvalCase, EvalSet, Result, Runner
from steelyard.records import InvocationResponse
from steelyard.report.calls import time_line
from steelyard.report.case import OneCase
from steelyard.workspace.places import CALLS, safe_name
from steelyard.workspace.recording import CALLS_VERSION, Body, CallFile, CallLine, EndLine, SessionLine


def call(number: int, at: float, elapsed: float, **fields: object) -> CallLine:
    response = InvocationResponse(num_tokens_input=10, num_tokens_output=5, cost=0.5, **fields)  # type: ignore[arg-type]
    return CallLine(
        session="s", call=number, api="openai", path="/chat/completions", model="m", at=at, elapsed=elapsed,
        thread=number, request=Body(b'{"model":"m"}').whole(), response=response,
    )  # fmt: skip


def test_a_time_line_tells_models_waits_and_tools_apart() -> None:
    line = time_line([call(1, 10.0, 20.0, time_waiting=5.0), call(2, 25.0, 15.0)], 60.0)
    assert line == "░" * 10 + "·" * 5 + "█" * 25 + "░" * 20


def test_a_case_with_calls_shows_them(tmp_path: Path) -> None:
    def agent(case: EvalCase) -> InvocationResponse:
        return InvocationResponse(response_text="x", time_in_model=2.0, time_in_tools=1.0)

    suite = EvalSet("s", [EvalCase(id="Case A", prompt="?"), EvalCase(id="b", prompt="?")])
    result = Runner(agent, suite, progress="off", output_path=tmp_path).run_sync()
    now = datetime.now(UTC)
    begin = SessionLine(v=CALLS_VERSION, id="Case A", trial=0, attempt=1, session="s", time=now)
    file = CallFile(tmp_path / CALLS / safe_name("Case A") / "0.jsonl", begin)
    for line in (call(1, 0.5, 1.0), call(2, 1.5, 1.0, error="it broke"), EndLine(session="s", calls=2)):
        file.append(line)
    file.close()
    text = OneCase(tmp_path, "Case A").to_text()
    assert "model calls: 2 in 3.00s; █ model 2.00s, ░ tools 1.00s" in text
    assert "1.50s  m  (conversation 2)  took 1.00s  tokens 10 + 5  cost 0.5  it broke" in text
    assert "model calls" not in OneCase(tmp_path, "b").to_text()
    (session,) = Result.load(tmp_path).calls("Case A")
    assert [one.body for one in session.calls] == [{"model": "m"}] * 2
    assert result.calls("b") == []
