"""A sweep over HTTP against a mock that queues: random service times, a few slots, nothing about wall-clock time."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard import EvalCase, EvalSet, Runner
from steelyard.load.sweep import Sweep
from steelyard.report.sweep.page import sweep_page
from steelyard.stats import client_load
from steelyard.targets import OpenAIChat
from tests.support.mock import running_mock

SUITE = EvalSet(id="s", cases=[EvalCase(id=f"c{n}", prompt=f"p{n}", expected="x") for n in range(20)])


@pytest.fixture(autouse=True)
def a_client_with_time_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_load, "MIN_SECONDS", float("inf"))


def test_a_search_over_http_ends_with_levels_intervals_and_a_reason(tmp_path: Path) -> None:
    with running_mock(slots=3, latency="lognormal:8ms,0.5", seed=4) as mock:
        target = OpenAIChat(model="m", base_url=mock.base_url, api_key="x")
        runner = Runner(target, SUITE, progress="off", max_parallelism=8)
        sweep = Sweep(runner, levels="auto", slo="ttft_p90<30s", output_path=tmp_path)
        result = sweep.run_sync()
    assert result.complete
    assert [level.level for level in result.levels][:2] == [1, 2]
    assert result.recommendation.reason
    for level in result.levels:
        assert level.requests >= 60
        assert level.error_rate == 0.0
        assert level.requests_per_second_ci95 is not None
        assert level.goodput == pytest.approx(level.requests_per_second)
        assert level.latency["time_to_last_token"].p50.ci95 is not None
        assert [one.outcome for one in level.objectives] == ["kept", "kept"]
    assert "Throughput and goodput" in sweep_page(result.to_metrics(), "x")
