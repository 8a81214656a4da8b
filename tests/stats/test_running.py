"""RunningStats: what counts, exact final figures in any order, live ones in bounded time."""

from __future__ import annotations

import json
import math
import pickle
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.records import InvocationResponse
from steelyard.stats.figures import METRICS
from steelyard.stats.running import RunningStats

KEYS = {
    *("total_requests", "failed_requests", "failed_requests_rate", "total_input_tokens"),
    *("total_output_tokens", "requests_per_minute", "output_tps"),
    *(f"{metric}-{name}" for metric in METRICS for name in ("average", "p50", "p90", "p95", "p99", "min", "max")),
}

seconds = st.none() | st.floats(min_value=0, max_value=1e6)
tokens = st.none() | st.integers(min_value=0, max_value=1_000_000)
responses = st.builds(
    InvocationResponse,
    time_to_first_token=seconds,
    time_to_last_token=seconds,
    time_per_output_token=seconds,
    num_tokens_input=tokens,
    num_tokens_output=tokens,
    error=st.none() | st.none() | st.just("timed out"),
)


def stats_of(items: list[InvocationResponse]) -> RunningStats:
    stats = RunningStats()
    for item in items:
        stats.update(item)
    return stats


def sample(count: int, seed: int = 1) -> list[InvocationResponse]:
    rng = random.Random(seed)
    return [
        InvocationResponse(
            time_to_first_token=rng.lognormvariate(-1.5, 0.4),
            time_to_last_token=rng.lognormvariate(0.5, 0.4),
            time_per_output_token=rng.lognormvariate(-4.5, 0.3),
            num_tokens_input=rng.randrange(4000),
            num_tokens_output=rng.randrange(900),
        )
        for _ in range(count)
    ]


def test_a_fresh_one_has_every_key_and_no_figures():
    stats = RunningStats().to_stats()
    assert set(stats) == KEYS
    counts = {"total_requests", "failed_requests", "total_input_tokens", "total_output_tokens"}
    assert {key: value for key, value in stats.items() if value is not None} == dict.fromkeys(counts, 0)


def test_final_percentiles_are_numpys():
    items = sample(1500)
    stats = stats_of(items).to_stats()
    for metric in METRICS:
        values = [getattr(item, metric) for item in items]
        for percent in (50, 90, 99):
            assert stats[f"{metric}-p{percent}"] == float(np.percentile(values, percent))
        assert stats[f"{metric}-average"] == math.fsum(values) / len(values)
        assert (stats[f"{metric}-min"], stats[f"{metric}-max"]) == (min(values), max(values))


@given(st.lists(responses, max_size=40), st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_no_bit(items, rng):
    shuffled = list(items)
    rng.shuffle(shuffled)
    assert json.dumps(stats_of(items).to_stats()) == json.dumps(stats_of(shuffled).to_stats())


def test_negative_zero_cannot_tell_which_came_first():
    positive, negative = (InvocationResponse(time_to_first_token=value) for value in (0.0, -0.0))
    one, other = stats_of([positive, negative]).to_stats(), stats_of([negative, positive]).to_stats()
    assert json.dumps(one) == json.dumps(other)


@given(st.lists(responses, max_size=40), st.integers(min_value=0, max_value=40))
def test_merged_parts_equal_the_whole(items, cut):
    left, right = stats_of(items[:cut]), stats_of(items[cut:])
    left.merge(pickle.loads(pickle.dumps(right)))
    assert left.to_stats() == stats_of(items).to_stats()
    assert left.snapshot() == pytest.approx(stats_of(items).snapshot())


def test_merging_takes_the_longer_active_time_as_workers_run_side_by_side():
    left, right = RunningStats(), RunningStats()
    left.active_seconds, right.active_seconds = 3.0, 5.0
    left.merge(right)
    assert left.active_seconds == 5.0


def test_merging_with_itself_doubles_every_count():
    stats = stats_of(sample(3))
    stats.merge(stats)
    assert stats.to_stats()["total_requests"] == 6
    assert stats.snapshot({"n": ("time_to_first_token", "sum")})["n"] == pytest.approx(
        2 * stats_of(sample(3)).snapshot({"n": ("time_to_first_token", "sum")})["n"]
    )


def test_a_failed_response_counts_as_failed_and_nothing_else():
    stats = stats_of([InvocationResponse(time_to_first_token=9.0, num_tokens_output=9, error="boom")])
    stats.update_failed(3)
    result = stats.to_stats()
    assert (result["total_requests"], result["failed_requests"], result["failed_requests_rate"]) == (4, 4, 1.0)
    assert result["time_to_first_token-max"] is None
    assert result["total_output_tokens"] == 0


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, 10**400])
def test_what_is_missing_or_not_finite_is_skipped(value):
    stats = stats_of([InvocationResponse(num_tokens_output=value), InvocationResponse(num_tokens_output=4)])
    result = stats.to_stats()
    assert (result["total_requests"], result["total_output_tokens"]) == (2, 4)
    assert result["num_tokens_output-max"] == 4.0


def test_rates_are_over_active_time_and_successes():
    stats = stats_of(sample(6))
    stats.update_failed(2)
    stats.active_seconds = 30.0
    result = stats.to_stats()
    assert result["requests_per_minute"] == 12.0
    assert result["output_tps"] == result["total_output_tokens"] / 30.0
    assert stats.snapshot({"rpm": "requests_per_minute", "tps": "output_tps"}) == {
        "rpm": 12.0,
        "tps": result["output_tps"],
    }


@given(st.lists(responses, max_size=20))
def test_everything_reported_is_plain_json(items):
    stats = stats_of(items)
    plain = (int, float, type(None))
    figures = [*stats.to_stats().values(), *stats.snapshot().values()]
    assert all(type(value) in plain for value in figures)
    json.dumps(figures, allow_nan=False)


def test_equal_values_average_to_themselves():
    result = stats_of([InvocationResponse(time_to_first_token=0.1)] * 3).to_stats()
    assert result["time_to_first_token-average"] == 0.1


def test_live_figures_agree_with_final_ones():
    stats = stats_of(sample(5000))
    spec = {f"{m} {a}": (m, a) for m in METRICS for a in ("average", "min", "max", "p50", "p90", "p99")}
    final = stats.to_stats()
    for label, value in stats.snapshot(spec).items():
        assert value == pytest.approx(final[label.replace(" ", "-")], rel=0.005), label
    live = stats.snapshot({"in": "input_tokens", "out": "output_tokens", "n": "total", "bad": "failed"})
    assert live == {
        "in": final["total_input_tokens"],
        "out": final["total_output_tokens"],
        "n": 5000,
        "bad": 0,
    }


def test_a_snapshot_sees_the_newest_response():
    stats = stats_of(sample(10))
    stats.snapshot()
    stats.update(InvocationResponse(time_to_last_token=1234.0))
    assert stats.snapshot({"slowest": ("time_to_last_token", "max")}) == {"slowest": 1234.0}


def test_inverse_is_one_over_the_figure_and_missing_for_zero():
    spec = {"tok/s": ("time_per_output_token", "p50", "inv")}
    assert stats_of([InvocationResponse(time_per_output_token=0.02)]).snapshot(spec) == {"tok/s": 50.0}
    assert stats_of([InvocationResponse(time_per_output_token=0.0)]).snapshot(spec) == {"tok/s": None}
    assert RunningStats().snapshot(spec) == {"tok/s": None}


def test_between_snapshots_no_more_than_a_chunk_waits_to_be_folded():
    """So that the first snapshot after a million updates costs what the second does."""
    stats = stats_of(sample(3000))
    waiting = 3000 - stats._sketches["time_to_first_token"].count
    assert 0 <= waiting <= 1024


def test_pickled_it_takes_eight_bytes_a_value_and_a_little():
    stats = stats_of(sample(1000))
    stats.active_seconds = 2.0
    data = pickle.dumps(stats)
    assert len(data) < 1000 * len(METRICS) * 8 + 1000
    back = pickle.loads(data)
    back.update(sample(1)[0])
    assert back.to_stats()["total_requests"] == 1001
    assert back.snapshot()["tokens in"] == back.to_stats()["total_input_tokens"]


def test_merging_leaves_the_live_figures_of_the_other_one_right() -> None:
    """What was counted but not yet folded into the other's sketch must still reach it."""
    one, other = RunningStats(), RunningStats()
    for number in range(10):
        other.update(InvocationResponse(time_to_last_token=float(number)))
    one.merge(other)
    spec = {"last": ("time_to_last_token", "max")}
    assert one.snapshot(spec) == other.snapshot(spec) == {"last": 9.0}


def test_details_are_reported_where_they_were_told_and_only_there() -> None:
    plain, detailed = RunningStats(), RunningStats()
    for number in range(1, 5):
        plain.update(InvocationResponse(time_to_last_token=1.0))
        detailed.update(
            InvocationResponse(time_to_last_token=1.0, time_queued=number / 10, time_to_first_reasoning_token=0.2)
        )
    assert not any(name.startswith("time_queued") for name in plain.to_stats())
    stats = detailed.to_stats()
    assert (stats["time_queued-p50"], stats["time_queued-max"]) == (0.25, 0.4)
    assert stats["time_to_first_reasoning_token-average"] == pytest.approx(0.2)
    assert "time_from_planned-p50" not in stats


def test_details_merge_pickle_and_come_out_the_same_in_batches() -> None:
    responses = [
        InvocationResponse(time_from_planned=n / 7, time_waiting=None if n % 3 else n / 5) for n in range(3000)
    ]
    one, left, right, batched = RunningStats(), RunningStats(), RunningStats(), RunningStats()
    for number, response in enumerate(responses):
        one.update(response)
        (left if number % 2 else right).update(response)
    batched.update_all(responses)
    left.merge(pickle.loads(pickle.dumps(right)))
    assert one.to_stats() == left.to_stats() == batched.to_stats()


def test_errors_and_hits_tell_no_details() -> None:
    stats = RunningStats()
    stats.update(InvocationResponse(error="x", time_queued=1.0))
    stats.update(InvocationResponse(cached=True, time_queued=1.0))
    assert "time_queued-p50" not in stats.to_stats()


class Timed(InvocationResponse, kw_only=True):
    """A response that says how long its case took, as a record does."""

    elapsed: float = 0.0


def answer(seconds: float) -> Timed:
    return Timed(time_to_first_token=seconds / 2, time_to_last_token=seconds, elapsed=seconds)


def timeout(seconds: float = 0.6) -> Timed:
    return Timed(error="no answer", error_type="TimeoutError", elapsed=seconds)


def test_calls_that_timed_out_are_longer_than_the_answers_not_absent() -> None:
    times = [0.3 + 0.0005 * n for n in range(520)]
    stats = stats_of([*map(answer, times), *(timeout() for _ in range(20))])
    p99 = stats.to_latency()["time_to_last_token"].p99
    assert (p99.value, p99.at_least) == (0.6, True)
    assert stats.to_stats()["time_to_last_token-p99"] == 0.6
    assert p99.ci95 is not None
    assert p99.ci95[1] is None
    p50 = stats.to_latency()["time_to_last_token"].p50
    assert not p50.at_least
    assert p50.ci95 is not None
    assert p50.ci95[0] < p50.value < p50.ci95[1]
    assert stats.to_latency()["time_to_last_token"].timeouts == 20


def test_other_errors_are_no_observations_of_a_time() -> None:
    stats = stats_of([*map(answer, [0.1] * 40), Timed(error="429", error_type="TransientError", elapsed=9.0)])
    assert (stats.to_latency()["time_to_last_token"].n, stats.failed_requests) == (40, 1)


def test_a_first_token_that_came_before_the_timeout_is_known() -> None:
    late = timeout()
    late.time_to_first_token = 0.2
    latency = stats_of([answer(0.1), late]).to_latency()
    assert (latency["time_to_first_token"].timeouts, latency["time_to_last_token"].timeouts) == (0, 1)


@pytest.mark.parametrize(("percent", "needed"), [("p50", 6), ("p90", 36), ("p95", 72), ("p99", 368)])
def test_a_percentile_has_an_interval_from_as_many_requests_as_it_needs(percent: str, needed: int) -> None:
    rng = random.Random(4)
    enough = stats_of([answer(rng.random()) for _ in range(needed)]).to_latency()["time_to_last_token"]
    fewer = stats_of([answer(rng.random()) for _ in range(needed - 1)]).to_latency()["time_to_last_token"]
    assert getattr(enough, percent).ci95 is not None
    assert getattr(fewer, percent).ci95 is None
    assert getattr(fewer, percent).needed == needed


def test_under_load_answers_that_are_alike_count_for_fewer() -> None:
    rng = random.Random(4)
    waves = [1.0 + math.sin(n / 60) + 0.1 * rng.random() for n in range(600)]
    quiet, loaded = (stats_of([answer(t) for t in waves]).to_latency(load=load) for load in (False, True))
    narrow, wide = (each["time_to_last_token"].p50.ci95 for each in (quiet, loaded))
    assert narrow is not None
    assert wide is None or (wide[0] < narrow[0] and wide[1] > narrow[1])
    assert loaded["time_to_last_token"].effective_n["p50"] < 300


def test_timeouts_survive_merging_pickling_and_many_at_once() -> None:
    one_by_one = stats_of([answer(0.1), timeout(), answer(0.2), timeout(0.7)])
    at_once = RunningStats()
    at_once.update_all([answer(0.1), timeout(), answer(0.2), timeout(0.7)])
    merged = stats_of([answer(0.1), timeout()])
    merged.merge(stats_of([answer(0.2), timeout(0.7)]))
    for stats in (at_once, merged, pickle.loads(pickle.dumps(one_by_one))):
        assert stats.to_latency() == one_by_one.to_latency()


@pytest.mark.parametrize("details", [False, True])
def test_the_final_figures_hold_one_column_twice_at_a_time(details):
    response = InvocationResponse(
        time_to_first_token=0.1,
        time_to_last_token=0.2,
        time_per_output_token=0.01,
        time_queued=0.1 if details else None,
        time_waiting=0.1 if details else None,
        time_from_planned=0.3 if details else None,
    )
    stats, count = RunningStats(), 200_000
    for _ in range(count // 1000):
        stats.update_all([response] * 1000)
    for figures in (stats.to_stats, stats.to_latency):
        tracemalloc.start()
        try:
            figures()
            assert tracemalloc.get_traced_memory()[1] < 12 * count
        finally:
            tracemalloc.stop()
