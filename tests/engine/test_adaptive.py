"""`parallelism: auto` against providers of every kind: the real engine, retries and limits, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.engine.adaptive import AdaptivePermits, LatencySample, throughput_gain
from steelyard.errors import ConfigurationError
from tests.support.provider import Outcome, Provider, Queueing, noisy, run_against


def limited_to(limit: int, retry_after: float | None = None) -> Callable[[], Provider]:
    def make() -> Provider:
        latency = noisy(0.2, 0.3)
        return Provider(lambda busy: latency(), limit=lambda now: limit, retry_after=retry_after)

    return make


def levels_after(outcome: Outcome, seconds: float) -> list[int]:
    return [allowed for at, allowed, _ in outcome.history if at >= seconds] or [outcome.allowed]


@pytest.mark.parametrize("retry_after", [None, 1.0])
def test_a_provider_that_allows_40_ends_within_30_and_40_near_the_best_fixed_throughput(retry_after) -> None:
    make = limited_to(40, retry_after)
    auto = run_against(make, calls=4000)
    best = run_against(make, calls=4000, fixed=40)
    assert 30 <= auto.allowed <= 40
    assert auto.per_second >= 0.85 * best.per_second
    assert auto.errors == 0
    # Once the limit was found, it is gone above by one at most, to see whether it still holds.
    assert all(30 <= level <= 41 for level in levels_after(auto, 3.0))


@pytest.mark.parametrize(("limit", "calls", "share"), [(1, 400, 0.9), (5, 1000, 0.9), (300, 20_000, 0.8)])
def test_small_and_large_limits_are_found_too(limit, calls, share) -> None:
    auto = run_against(limited_to(limit), calls=calls)
    best = run_against(limited_to(limit), calls=calls, fixed=limit)
    assert 0.75 * limit <= auto.allowed <= limit
    assert auto.per_second >= share * best.per_second
    assert auto.refused < 0.03 * calls
    assert auto.errors == 0


@pytest.mark.parametrize("sigma", [0.1, 0.5])
@pytest.mark.parametrize("knee", [2, 8, 50])
def test_where_more_calls_only_wait_longer_it_stays_near_the_knee_and_loses_no_throughput(knee, sigma) -> None:
    auto = run_against(lambda: Queueing(noisy(0.2, sigma), knee), calls=5000)
    best = run_against(lambda: Queueing(noisy(0.2, sigma), knee), calls=5000, fixed=4 * knee)
    assert 0.7 * knee <= auto.allowed <= 2 * knee
    assert auto.per_second >= 0.85 * best.per_second


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_noise_alone_does_not_keep_it_from_the_most_that_is_allowed(sigma) -> None:
    """Latencies that differ by a factor of ten between calls, and do not depend on how many there are."""

    def make() -> Provider:
        latency = noisy(0.5, sigma)
        return Provider(lambda busy: latency())

    auto = run_against(make, calls=8000, most=200)
    assert auto.allowed == 200
    assert auto.refused == 0


def test_answers_that_grow_longer_during_the_run_are_not_mistaken_for_a_queue() -> None:
    """A suite sorted by length: latency rises tenfold, and parallelism has no part in it."""

    def make() -> Provider:
        asked = 0
        noise = noisy(1.0, 0.3)

        def latency(busy: int) -> float:
            nonlocal asked
            asked += 1
            return noise() * (0.1 + 0.9 * asked / 12_000)

        return Provider(latency)

    auto = run_against(make, calls=12_000, most=200)
    assert auto.allowed >= 140
    assert max(level for _, level, _ in auto.history) == 200


def test_a_server_that_batches_gets_more_calls_though_each_becomes_slower() -> None:
    """Latency doubles from 1 to 51 calls; throughput still grows: that is what is wanted."""
    auto = run_against(lambda: Provider(lambda busy: 0.2 + 0.2 * busy / 50), calls=15_000)
    assert auto.allowed > 80
    assert auto.per_second > 0.75 * 50 / 0.2 * (512 / 562)


def test_after_a_brown_out_it_comes_back() -> None:
    def make() -> Provider:
        latency = noisy(0.2, 0.3)
        return Provider(lambda busy: latency(), limit=lambda now: 5 if 10 < now < 30 else 100)

    auto = run_against(make, calls=20_000)
    during = [allowed for at, allowed, _ in auto.history if 15 < at < 30]
    assert all(allowed <= 6 for allowed in during)
    assert 75 <= auto.allowed <= 100
    assert auto.errors == 0


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def make_permits(**options: Any) -> tuple[AdaptivePermits, Clock]:
    clock = Clock()
    return AdaptivePermits(**{"maximum": 100, "clock": clock, **options}), clock


def one_round(permits: AdaptivePermits, clock: Clock, latency: float = 1.0, in_use: int | None = None) -> None:
    """As many answers as there are permits, all sent since the last change."""
    clock.now += latency
    for _ in range(permits.allowed):
        permits.observe("ok", latency, in_use)


def test_the_number_doubles_with_each_round_trip_until_the_most() -> None:
    permits, clock = make_permits(maximum=50)
    seen = [permits.allowed]
    for _ in range(6):
        one_round(permits, clock)
        seen.append(permits.current)
    assert seen == [4, 8, 16, 32, 50, 50, 50]
    assert permits.history[:2] == [(0.0, 4, "start"), (1.0, 8, "doubled")]


def test_permits_that_nobody_uses_are_not_added_to() -> None:
    permits, clock = make_permits()
    for _ in range(20):
        one_round(permits, clock, in_use=2)
    assert permits.allowed == 4


def test_many_refusals_of_one_burst_are_one_cut() -> None:
    permits, clock = make_permits(start=64)
    clock.now += 1.0
    for _ in range(30):
        permits.observe("overloaded", 0.01, 64)
    assert permits.allowed == 63


def test_refusals_that_go_on_cut_deeper_and_deeper() -> None:
    permits, clock = make_permits(start=64)
    for _ in range(30):
        clock.now += 1.0
        permits.observe("overloaded", 0.01, permits.allowed)
    levels = [allowed for _, allowed, _ in permits.history]
    assert levels[:4] == [64, 63, 62, 61]
    assert levels[-1] == 1
    assert all(later <= 0.86 * earlier for earlier, later in pairwise(levels[8:]))


def test_a_refusal_a_round_where_a_whole_round_went_well_is_forgiven_and_a_second_is_not() -> None:
    permits, clock = make_permits(maximum=16, start=16)
    one_round(permits, clock)
    clock.now += 1.0
    permits.observe("overloaded", 0.1, 16)
    assert permits.allowed == 16
    permits.observe("overloaded", 0.1, 16)
    assert permits.allowed == 15


def test_an_endpoint_that_refuses_one_in_a_thousand_whatever_one_does_is_not_throttled_to_nothing() -> None:
    def make() -> Provider:
        chance, latency = random.Random(1), noisy(0.2, 0.3)
        return Provider(lambda busy: latency(), limit=lambda now: 0 if chance.random() < 0.001 else 1000)

    auto = run_against(make, calls=10_000, most=200)
    assert auto.refused > 5
    assert auto.allowed > 60


def test_a_refusal_with_fewer_calls_on_the_wire_says_where_the_limit_is() -> None:
    """Of one burst of 64 those from the 41st on were refused, and the last of them is heard of first."""
    permits, clock = make_permits(start=64)
    clock.now += 1.0
    for in_use in (64, 50, 41):
        permits.observe("overloaded", 0.01, in_use)
    assert permits.allowed == 40


def test_of_a_burst_that_arrived_in_another_order_as_many_are_allowed_as_were_not_refused() -> None:
    """64 calls, 24 refused, and among those one of the first that were sent."""
    permits, clock = make_permits(start=64)
    for _ in range(64):
        permits.began()
    clock.now += 1.0
    for in_use in (50, 33, *range(42, 64)):
        permits.observe("overloaded", 0.01, in_use)
    assert permits.allowed == 32
    one_round(permits, clock)
    assert permits.allowed == 40


def test_one_burst_never_cuts_to_less_than_half() -> None:
    permits, clock = make_permits(start=64)
    clock.now += 1.0
    for in_use in (64, 20, 5, 1):
        permits.observe("overloaded", 0.01, in_use)
    assert permits.allowed == 32


def test_a_refusal_while_more_are_on_the_wire_than_allowed_now_is_no_news() -> None:
    permits, clock = make_permits(start=64)
    clock.now += 1.0
    permits.observe("overloaded", 0.01, 41)
    clock.now += 5.0
    permits.observe("overloaded", 0.01, 41)
    assert permits.allowed == 40


def test_other_errors_change_nothing() -> None:
    permits, clock = make_permits()
    for _ in range(50):
        clock.now += 1.0
        permits.observe("error", 0.5, 4)
    assert len(permits.history) == 1


def test_whoever_asked_is_told_of_each_change_and_of_nothing_else() -> None:
    permits, clock = make_permits()
    told: list[int] = []
    permits.on_change(lambda: told.append(permits.allowed))
    one_round(permits, clock)
    one_round(permits, clock, in_use=1)
    clock.now += 1
    permits.observe("overloaded", 0.1, 8)
    assert told == [8, 7]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(0, 60),
    st.lists(st.tuples(st.sampled_from(["ok", "ok", "ok", "overloaded", "error"]), st.floats(0, 100)), max_size=300),
)
def test_the_number_never_leaves_its_bounds_and_the_history_tells_every_change(least, more, calls) -> None:
    permits, clock = make_permits(maximum=least + more, minimum=least)
    for outcome, latency in calls:
        clock.now += latency / 2
        before = permits.allowed
        permits.observe(outcome, latency)
        assert least <= permits.allowed <= least + more
        assert permits.history[-1][1] == permits.allowed
        if outcome != "ok":
            assert permits.allowed <= before
    assert all(earlier[0] <= later[0] for earlier, later in pairwise(permits.history))


def test_the_history_of_a_long_run_is_thinned_out_and_keeps_both_ends() -> None:
    permits, clock = make_permits(start=50)
    for _ in range(5000):
        clock.now += 10.0
        permits.observe("overloaded", 0.1, permits.allowed)
        one_round(permits, clock)
    assert len(permits.history) <= 512
    assert permits.history[0] == (0.0, 50, "start")
    assert permits.history[-1][1] == permits.allowed
    seconds = [at for at, _, _ in permits.history]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(("least", "most"), [(0, 5), (6, 5), (1, 0)])
def test_bounds_that_cannot_be_are_refused(least, most) -> None:
    with pytest.raises(ConfigurationError, match=f"at most {most}, got a minimum of {least}"):
        AdaptivePermits(most, least)


@pytest.mark.parametrize(("start", "allowed"), [(None, 4), (1, 2), (7, 7), (99, 10)])
def test_the_start_lies_within_the_bounds(start, allowed) -> None:
    assert AdaptivePermits(10, 2, start).allowed == allowed


@pytest.mark.parametrize(("power", "latency_ratio"), [(1.0, 1.0), (0.5, 2**0.5), (0.0, 2.0), (-1.0, 4.0)])
def test_throughput_gain_is_the_power_with_which_throughput_grew(power, latency_ratio) -> None:
    lower, higher = LatencySample(), LatencySample()
    for _ in range(10):
        lower.add(0.3, 10)
        higher.add(0.3 * latency_ratio, 20)
    gain, error = throughput_gain(lower, higher)
    assert gain == pytest.approx(power)
    assert error == pytest.approx(0.0, abs=1e-6)


def test_the_error_of_the_gain_is_what_repetition_shows() -> None:
    source = random.Random(3)
    gains, errors = [], []
    for _ in range(300):
        lower, higher = LatencySample(), LatencySample()
        for _ in range(40):
            lower.add(source.lognormvariate(0, 0.5), 20)
        for _ in range(60):
            higher.add(source.lognormvariate(0, 0.5), 40)
        gain, error = throughput_gain(lower, higher)
        gains.append(gain)
        errors.append(error)
    mean = sum(gains) / 300
    spread = (sum((gain - mean) ** 2 for gain in gains) / 299) ** 0.5
    assert mean == pytest.approx(1.0, abs=0.05)
    assert sum(errors) / 300 == pytest.approx(spread, rel=0.15)
