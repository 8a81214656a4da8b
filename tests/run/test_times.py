"""Where the time of a case goes: its parts add up, and the summary says what was retried, cut off or estimated."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Record, Result, Runner, Score
from steelyard.errors import TransientError

PARTS = (
    "time_waiting",
    "time_in_failed_tries",
    "time_in_backoff",
    "time_queued",
    "time_to_last_token",
    "time_scoring",
)


def suite_of(count: int) -> EvalSet:
    return EvalSet("questions", [EvalCase(id=f"q{n}", prompt="?") for n in range(count)])


def unaccounted(record: Record) -> float:
    return record.elapsed - sum(getattr(record, part) or 0.0 for part in PARTS)


@pytest.mark.parametrize("failures", [0, 1, 2])
@pytest.mark.parametrize("rate", [None, "5/s"])
def test_the_parts_of_a_cases_time_add_up_to_it(failures: int, rate: str | None) -> None:
    """What is left is our own work and the machine's load, which is far less than any part."""
    calls: Counter[str] = Counter()

    async def flaky(case: EvalCase) -> str:
        calls[case.id] += 1
        await asyncio.sleep(0.6)
        if calls[case.id] <= failures:
            raise ConnectionResetError("reset")
        return "an answer"

    async def scorer(case: EvalCase, response: InvocationResponse) -> Score:
        await asyncio.sleep(0.6)
        return Score("late", 1.0, True)

    result = Runner(flaky, suite_of(2), [scorer], rate=rate, retries=3, progress="off").run_sync()
    for record in result.responses:
        assert -0.01 <= unaccounted(record) < 0.5
        assert (record.time_in_failed_tries or 0.0) >= 0.59 * failures
        assert (record.time_in_failed_tries is None) == (failures == 0)
        assert record.time_scoring is not None
        assert record.time_scoring >= 0.59


def test_immediate_scorers_are_not_timed() -> None:
    result = Runner(lambda case: "an answer", suite_of(3), ["contains"], progress="off").run_sync()
    assert [record.time_scoring for record in result.responses] == [None] * 3


def test_the_summary_says_how_many_answers_were_retried_and_why(tmp_path: Path) -> None:
    tried: Counter[str] = Counter()

    def flaky(case: EvalCase) -> str:
        tried[case.id] += 1
        if case.id != "q0" and tried[case.id] == 1:
            raise ConnectionResetError("reset")
        if case.id == "q1" and tried[case.id] == 2:
            raise TransientError("slow down", partial=InvocationResponse(http_status=503))
        return "an answer"

    path = tmp_path / "RUN"
    result = Runner(flaky, suite_of(5), [], output_path=path, progress="off").run_sync()
    (path / "metrics.json").unlink()
    for found in (result, Result.load(path)):
        assert found.typed_metrics.retried == 4
        assert found.typed_metrics.retry_causes == {"connection lost": 4, "503 unavailable": 1}
        assert "4 of 5  connection lost, 503 unavailable" in found.summary()
        assert found.stats["time_in_failed_tries-max"] >= 0


def test_estimated_tokens_are_marked_as_estimates() -> None:
    def answer(case: EvalCase) -> InvocationResponse:
        return InvocationResponse(
            response_text="a",
            num_tokens_output=75,
            num_tokens_input=12,
            time_to_first_token=0.1,
            time_to_last_token=0.2,
            time_per_output_token=0.01,
            time_queued=0.001,
            tokens_estimated=case.id == "q0",
        )

    result = Runner(answer, suite_of(2), [], progress="off").run_sync()
    assert result.metrics["tokens_estimated"] == 1
    lines = {line.strip().split("  ")[0]: line for line in result.summary().splitlines()}
    assert "~75" in lines["output tokens"]
    assert "~12" in lines["input tokens"]
    assert "~10ms" in lines["time per output token"]
    assert "~" not in lines["time to last token"]
    assert ", ~" in result.summary()
    assert "~ is an estimate: the server reported no tokens for 1 of 2 answers" in result.summary()
