"""The rules of a sweep on simulated servers: the level found, resuming, levels ruled out, and objectives."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from steelyard.load.search_rule import MAX_BLOCKS, Found, LevelSearch, Measure, block_of, decide_slo, steady_throughput

Floats = npt.NDArray[np.float64]
Service = Callable[[int], Floats]


def closed_loop(level: int, requests: int, service: Service, slots: int) -> Floats:
    """Latencies in order of completion of a server with so many slots and so many calls in flight."""
    free, ready, done = [0.0] * slots, [0.0] * level, []
    for seconds in service(requests).tolist():
        sent = heapq.heappop(ready)
        end = max(sent, heapq.heappop(free)) + seconds
        heapq.heappush(free, end)
        heapq.heappush(ready, end)
        done.append((end, end - sent))
    return np.array([latency for _, latency in sorted(done)])


def found_by(search: LevelSearch, service: Service, slots: int) -> Found:
    while isinstance(step := search.step, Measure):
        search.add(step.level, closed_loop(step.level, step.requests, service, slots))
    return step


def constant(n: int) -> Floats:
    return np.full(n, 0.1)


@pytest.mark.parametrize("slots", [1, 2, 5, 8, 13, 40])
def test_constant_service_is_found_within_a_quarter(slots: int) -> None:
    found = found_by(LevelSearch(), constant, slots)
    assert found.decided
    assert found.level is not None
    assert 0.75 * slots <= found.level <= 1.25 * slots


@pytest.mark.parametrize("kind", ["exponential", "lognormal", "pareto"])
def test_random_service_is_found_nine_times_in_ten(kind: str) -> None:
    rng = np.random.default_rng(5)
    services: dict[str, Service] = {
        "exponential": lambda n: rng.exponential(0.1, n),
        "lognormal": lambda n: 0.06 * rng.lognormal(0, 1, n),
        "pareto": lambda n: 0.1 * (rng.pareto(1.3, n) + 1) / 3,
    }
    constant_search = LevelSearch()
    found_by(constant_search, constant, 8)
    right, requests = 0, 0
    for _ in range(40):
        search = LevelSearch()
        level = found_by(search, services[kind], 8).level
        right += level is not None and 6 <= level <= 10
        requests += search.requests
    assert right >= 36
    assert requests / 40 <= 3 * constant_search.requests


def test_the_search_doubles_then_closes_in() -> None:
    search, asked = LevelSearch(), []
    while isinstance(step := search.step, Measure):
        asked.append(step.level)
        assert step.requests == block_of(step.level)
        search.add(step.level, closed_loop(step.level, step.requests, constant, 8))
    assert asked[:5] == [1, 2, 4, 8, 16]
    assert all(8 < level < 16 for level in asked[5:])
    assert step == Found(level=8, decided=True, highest=False)


def test_asking_for_the_step_twice_changes_nothing() -> None:
    search = LevelSearch()
    assert search.step == search.step == Measure(1, 60)


def test_a_server_without_a_ceiling_is_measured_up_to_the_highest_level() -> None:
    found = found_by(LevelSearch(24), constant, 1_000)
    assert (found.level, found.highest, found.decided) == (24, True, True)
    only = found_by(LevelSearch(1), constant, 8)
    assert (only.level, only.highest) == (1, True)


def test_a_level_that_broke_its_objective_is_not_recommended_nor_any_above() -> None:
    search = LevelSearch()
    while isinstance(step := search.step, Measure):
        if step.level > 5:
            search.reject(step.level)
        else:
            search.add(step.level, closed_loop(step.level, step.requests, constant, 100))
    assert step.level is not None
    assert 4 <= step.level <= 5


def test_where_the_lowest_level_is_ruled_out_there_is_none() -> None:
    search = LevelSearch()
    search.reject(1)
    assert search.step == Found(level=None, decided=True, highest=False)


def test_a_resumed_search_uses_what_was_measured_and_comes_to_the_same() -> None:
    rng = np.random.default_rng(7)
    search, blocks = LevelSearch(), []
    while isinstance(step := search.step, Measure):
        latencies = closed_loop(step.level, step.requests, lambda n: rng.exponential(0.1, n), 8)
        blocks.append((step.level, latencies))
        search.add(step.level, latencies)
    resumed = LevelSearch()
    for level, latencies in blocks[:-2]:
        resumed.add(level, latencies)
    for level, latencies in blocks[-2:]:
        assert resumed.step == Measure(level, len(latencies))
        resumed.add(level, latencies)
    assert resumed.step == step
    assert resumed.requests == search.requests


def test_what_stays_open_is_cut_and_called_undecided() -> None:
    """Latencies so scattered that no number of blocks allowed tells, and gains of about a third."""
    rng = np.random.default_rng(0)
    undecided = []
    for _ in range(30):
        search = LevelSearch(2)
        while isinstance(step := search.step, Measure):
            typical = 1.0 if step.level == 1 else 2**0.62
            search.add(step.level, typical * rng.lognormal(0, 2.0, step.requests))
        undecided.append(step)
    open_ones = [found for found in undecided if not found.decided]
    assert len(open_ones) > 5
    assert all(found.more_requests is not None and found.more_requests > 0 for found in open_ones)
    assert all(found.more_requests is None for found in undecided if found.decided)


def test_a_level_ruled_out_after_it_was_measured_gives_way_to_the_highest_left() -> None:
    search = LevelSearch()
    while isinstance(step := search.step, Measure):
        search.add(step.level, closed_loop(step.level, step.requests, constant, 8))
        if step.level == 16:
            search.reject(6)
    assert step.level == 4


def test_levels_must_make_sense() -> None:
    with pytest.raises(ValueError, match="1 <= lowest <= highest must hold, got 5 and 4"):
        LevelSearch(4, lowest=5)


# Throughput


def completions(
    level: int, requests: int, seed: int, service: str = "exponential", slots: int = 8
) -> tuple[Floats, Floats]:
    """When requests to a server of so many slots were sent and ended, in the order of their ends: 0.1 s on average."""
    rng = np.random.default_rng(seed)
    drawn = {
        "in step": lambda: np.full(requests, 0.1),
        "nearly in step": lambda: rng.normal(0.1, 0.0003, requests),
        "uniform": lambda: rng.uniform(0.05, 0.15, requests),
        "exponential": lambda: rng.exponential(0.1, requests),
        "pareto": lambda: (rng.pareto(3, requests) + 1) * 0.2 / 3,
    }
    free, ready, done = [0.0] * slots, [0.0] * level, []
    for seconds in drawn[service]().tolist():
        sent = heapq.heappop(ready)
        end = max(sent, heapq.heappop(free)) + seconds
        heapq.heappush(free, end)
        heapq.heappush(ready, end)
        done.append((end, sent))
    ended, sent_at = np.array(sorted(done)).T
    return sent_at, ended


def test_throughput_is_that_of_the_steady_state() -> None:
    """8 slots of 0.1 s: 80 a second, whatever the ramp and the drain."""
    found = [steady_throughput([completions(16, 400, i)], ramp=16) for i in range(200)]
    assert np.mean([one.rate for one in found if one is not None]) == pytest.approx(80, rel=0.03)
    assert np.mean([one.ci95[0] <= 80 <= one.ci95[1] for one in found if one is not None]) >= 0.9


@pytest.mark.parametrize("service", ["in step", "nearly in step", "uniform", "exponential", "pareto"])
@pytest.mark.parametrize(("level", "slots"), [(1, 1), (4, 4), (8, 8), (16, 16), (16, 8)])
def test_throughput_is_what_slots_and_latency_allow(service: str, level: int, slots: int) -> None:
    """Answers that come in step end together, a whole round of them at each end of the steady state."""
    requests = block_of(level) * (1 if "in step" in service else 4)
    blocks = [completions(level, requests, seed, service, slots) for seed in range(150)]
    found = [one for block in blocks if (one := steady_throughput([block], ramp=level)) is not None]
    assert len(found) == len(blocks)
    assert np.mean([one.rate for one in found]) == pytest.approx(slots / 0.1, rel=0.02)
    assert np.mean([one.ci95[0] <= slots / 0.1 <= one.ci95[1] for one in found]) >= 0.87


def test_more_blocks_make_throughput_surer() -> None:
    one, four = (steady_throughput([completions(16, 400, i) for i in range(n)], ramp=16) for n in (1, 4))
    assert one is not None
    assert four is not None
    assert four.ci95[1] - four.ci95[0] < one.ci95[1] - one.ci95[0]
    assert four.rate == pytest.approx(80, rel=0.1)


def test_goodput_counts_only_some() -> None:
    block = completions(16, 400, 1)
    whole = steady_throughput([block], ramp=16)
    half = steady_throughput([block], ramp=16, counts=[np.arange(400) % 2 == 0])
    assert whole is not None
    assert half is not None
    assert half.rate == pytest.approx(whole.rate / 2, rel=0.15)
    assert half.seconds == whole.seconds


def test_too_few_answers_have_no_throughput() -> None:
    assert steady_throughput([(np.zeros(3), np.array([0.1, 0.2, 0.3]))], ramp=1) is None
    assert steady_throughput([(np.empty(0), np.empty(0))], ramp=0) is None
    assert steady_throughput([], ramp=0) is None


# Levels that are given


def test_given_levels_are_all_measured_and_climbed_while_they_grow() -> None:
    search, asked = LevelSearch(sizes=[4, 1, 64, 16]), []
    while isinstance(step := search.step, Measure):
        asked.append(step.level)
        search.add(step.level, closed_loop(step.level, step.requests, constant, 8))
    assert asked[:4] == [1, 4, 16, 64]
    assert step.level == 16  # from 4 to 16 throughput doubles: half of what was promised
    gain = search.gain(16, 64)
    assert gain is not None
    assert gain.value == pytest.approx(0.0, abs=0.05)


def test_given_levels_above_a_broken_one_are_measured_and_not_recommended() -> None:
    search, asked = LevelSearch(sizes=[1, 2, 4, 8]), []
    while isinstance(step := search.step, Measure):
        asked.append(step.level)
        if step.level == 4:
            search.reject(4)
        search.add(step.level, closed_loop(step.level, step.requests, constant, 8))
    assert asked == [1, 2, 4, 8]
    assert step.level == 2


def test_a_level_that_says_nothing_is_left_out_and_those_above_it_are_not() -> None:
    search = LevelSearch(sizes=[1, 2, 4])
    while isinstance(step := search.step, Measure):
        if step.level == 2:
            search.skip(2)
        else:
            search.add(step.level, closed_loop(step.level, step.requests, constant, 8))
    assert step.level == 4


def test_a_search_goes_on_past_levels_that_say_nothing_and_gives_up_where_all_do() -> None:
    for hiccups, expected in (({1}, 8), ({2}, 8), ({2, 4}, 8), ({1, 2, 4, 8, 16, 32, 64, 128}, None)):
        search, asked = LevelSearch(), []
        while isinstance(step := search.step, Measure):
            asked.append(step.level)
            if step.level in hiccups:
                search.skip(step.level)
            else:
                search.add(step.level, closed_loop(step.level, step.requests, constant, 8))
        assert step.level == expected
        assert len(asked) <= 12
    assert asked == [1, 2, 4, 8]


def test_a_fixed_number_of_requests_is_sent_once() -> None:
    rng = np.random.default_rng(3)
    search, asked = LevelSearch(8, requests=20, max_blocks=1), []
    while isinstance(step := search.step, Measure):
        asked.append((step.level, step.requests))
        search.add(step.level, closed_loop(step.level, 20, lambda n: rng.exponential(0.1, n), 3))
    assert len({number for number, _ in asked}) == len(asked)
    assert {requests for _, requests in asked} == {20}


# Objectives


def test_an_objective_is_kept_broken_or_open() -> None:
    assert decide_slo(0, 100, 95).outcome == "kept"
    assert decide_slo(20, 100, 95).outcome == "broken"
    found = decide_slo(0, 20, 95)
    assert (found.outcome, found.interval[0]) == ("cannot tell", 0.0)
    assert found.interval[1] == pytest.approx(stats.beta.ppf(1 - 0.05 / MAX_BLOCKS, 1, 20))
    assert found.more_requests is not None
    assert decide_slo(0, 20 + found.more_requests, 95).outcome == "kept"
    assert decide_slo(0, 20 + found.more_requests - 2, 95).outcome == "cannot tell"


@pytest.mark.parametrize(("above", "n"), [(4, 100), (7, 100), (1, 60), (15, 250)])
def test_so_many_more_requests_settle_it_if_the_share_stays(above: int, n: int) -> None:
    found = decide_slo(above, n, 95)
    assert found.outcome == "cannot tell"
    assert found.more_requests is not None
    times = (n + found.more_requests) / n
    whole = round(times + 0.5) * n
    assert decide_slo(round(above / n * whole), whole, 95).outcome == ("kept" if above / n < 0.05 else "broken")


def test_a_share_just_as_allowed_is_never_settled() -> None:
    assert decide_slo(5, 100, 95).more_requests is None


def test_answers_that_are_alike_count_for_less() -> None:
    assert decide_slo(0, 100, 95, effective_n=40).outcome == "cannot tell"
    assert decide_slo(0, 100, 95, effective_n=400).outcome == "kept"


def test_nothing_measured_tells_nothing() -> None:
    found = decide_slo(0, 0, 99)
    assert (found.outcome, found.interval, found.more_requests is None) == ("cannot tell", (0.0, 1.0), False)
    with pytest.raises(ValueError, match=r"above must be within 0\.\.3, got 4"):
        decide_slo(4, 3, 99)
    with pytest.raises(ValueError, match="percent must be between 0 and 100"):
        decide_slo(1, 3, 100)


def test_four_looks_share_the_error() -> None:
    rng = np.random.default_rng(8)
    wrong = 0
    for above in np.cumsum(rng.binomial(60, 0.05001, (200, 4)), axis=1).tolist():
        said = [decide_slo(count, 60 * look, 95).outcome for look, count in enumerate(above, 1)]
        wrong += "kept" in said
    assert wrong / 200 <= 0.05
