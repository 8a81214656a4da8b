"""Load runs on a real cluster: all of the parallelism from the first second on, counted by the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steelyard import Runner
from steelyard.targets import OpenAIChat
from tests.support.engine import make_suite
from tests.support.mock import mock_process
from tests.support.ray import local_cluster, patiently

pytestmark = [pytest.mark.ray, patiently, pytest.mark.slow]

PARALLELISM, LATENCY = 50, 1.0


def in_flight(times: list[dict[str, Any]], moments: Any) -> Any:
    """How many requests the server had at each of these moments."""
    begun = np.sort([one["received_ns"] for one in times]) / 1e9
    ended = np.sort([one["last_ns"] for one in times]) / 1e9
    return np.searchsorted(begun, moments) - np.searchsorted(ended, moments)


@pytest.mark.parametrize("workers", [2, 5])
def test_a_load_run_has_all_its_calls_in_flight_from_its_first_second(workers) -> None:
    """None of the workers is started before the run: without waiting for all, it would begin with some of them."""
    from steelyard.engine.ray.engine import RayEngine

    with (
        mock_process("--latency", f"{LATENCY}s", "--output-tokens", "1") as (mock, _),
        local_cluster(cpus=6),
        RayEngine(workers=workers) as engine,
    ):
        target = OpenAIChat("m", base_url=mock.base_url, stream=False)
        runner = Runner(target, make_suite(10), engine=engine, progress="off")
        result = runner.run_sync(parallelism=PARALLELISM, requests=PARALLELISM * 5)
        times = mock.stats(times=True)["times"]
    assert result.metrics["counts"]["ok"] == PARALLELISM * 5
    begun = [one["received_ns"] / 1e9 for one in times]
    first, last_begun = min(begun), max(begun)
    seen = in_flight(times, np.arange(first + LATENCY * 0.5, last_begun, 0.01))
    assert seen.mean() >= 0.85 * PARALLELISM  # a busy machine is late with some; the share of a missing worker is more
    assert seen.max() <= PARALLELISM
    # The clock starts with the first call, not with the first worker.
    assert result.metrics["active_seconds"] <= last_begun - first + LATENCY + 2
