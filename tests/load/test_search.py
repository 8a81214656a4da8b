"""Which level a sweep recommends, and why, and where a search looks next."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.load.levels import Level, parse_levels
from steelyard.load.search import MAX_LEVELS, next_level, recommend
from tests.support.sweep import level


def test_the_highest_level_before_errors_is_recommended() -> None:
    advice = recommend([level(1, 10), level(10, 100), level(50, 400), level(100, 500, errors=0.12)])
    assert advice.level == 50
    assert advice.reason == "at 100 the error rate is 12% (limit 1%)"
    assert advice.describe() == "recommended: 50: at 100 the error rate is 12% (limit 1%)"


def test_the_highest_level_before_an_objective_breaks_is_recommended() -> None:
    slo = "ttft_p99<500ms"
    advice = recommend([level(10, 100, slo=slo), level(50, 400, slo=slo, first=0.3), level(100, 900, slo=slo)])
    assert advice.level == 10
    assert advice.reason == "at 50 time to first token p99 is 600ms (limit 500ms)"


def test_the_level_from_which_throughput_no_longer_grows_is_recommended() -> None:
    advice = recommend([level(10, 100), level(50, 400), level(100, 408)])
    assert (advice.level, advice.reason) == (50, "throughput grew only 2% from 50 to 100")


def test_falling_throughput_is_reported() -> None:
    assert recommend([level(10, 100), level(20, 70)]).reason == "throughput fell by 30% from 10 to 20"


def test_growth_is_measured_against_the_growth_of_parallelism() -> None:
    """Ten per cent more is much for half as many calls again, and little for sixteen times as many."""
    assert recommend([level(10, 100), level(15, 110)]).level == 15
    assert recommend([level(10, 100), level(160, 110)]).level == 10


def test_one_noisy_level_does_not_end_the_growth() -> None:
    assert recommend([level(10, 100), level(20, 90), level(40, 350)]).level == 40


def test_a_slow_rise_adds_up() -> None:
    """No step alone is above the noise, all of them together are."""
    advice = recommend([level(40, 100), level(42, 101.5), level(44, 103)])
    assert advice.level == 44


def test_a_plateau_with_noise_does_not_climb() -> None:
    levels = [level(2**power, 100 * (1.02 if power % 2 else 0.98)) for power in range(5, 12)]
    assert recommend(levels).level == 32


def test_a_level_where_the_client_was_the_bottleneck_is_never_recommended() -> None:
    advice = recommend([level(10, 100), level(50, 400), level(100, 800, busy=True)])
    assert advice.level == 50
    assert advice.reason == "at 100 this client was the bottleneck: its event loop was busy 97% of the time"


def test_errors_at_a_level_where_the_client_was_the_bottleneck_end_nothing() -> None:
    assert recommend([level(10, 100), level(50, 90, busy=True, errors=0.5), level(100, 900)]).level == 100


def test_a_level_that_was_not_reached_is_never_recommended() -> None:
    advice = recommend([level(10, 100), level(50, 400, reached=False)])
    assert (advice.level, advice.reason) == (10, "at 50 only 25 were in flight at once")


def test_the_highest_level_that_still_grew_says_that_there_may_be_more() -> None:
    advice = recommend([level(1, 10), level(10, 100)])
    assert advice.level == 10
    assert advice.reason.startswith("the highest level measured; throughput still grew 900% from 1 to 10")


@pytest.mark.parametrize(
    ("levels", "reason"),
    [
        ([], "nothing was measured"),
        ([level(1, 0, errors=1.0)], "at 1 the error rate is 100% (limit 1%)"),
        ([level(1, 10, busy=True)], "at 1 this client was the bottleneck: its event loop was busy 97% of the time"),
        ([level(4, 10, reached=False)], "at 4 only 2 were in flight at once"),
    ],
)
def test_where_no_level_qualifies_none_is_recommended(levels: list[Level], reason: str) -> None:
    advice = recommend(levels)
    assert (advice.level, advice.reason) == (None, reason)
    assert advice.describe() == f"no level can be recommended: {reason}"


def test_a_single_good_level_is_recommended_as_the_only_one() -> None:
    assert recommend([level(7, 10)]).describe() == "recommended: 7: the only level that was measured"


some_levels = st.lists(
    st.builds(
        level,
        st.integers(1, 2000),
        st.floats(0, 1e5, allow_nan=False),
        errors=st.sampled_from([0.0, 0.005, 0.02, 1.0]),
        reached=st.booleans(),
        busy=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda one: one.level,
)


@given(some_levels)
def test_whatever_is_recommended_was_reached_valid_and_kept_the_objectives(levels: list[Level]) -> None:
    advice = recommend(levels)
    assert advice.reason
    if advice.level is not None:
        chosen = next(one for one in levels if one.level == advice.level)
        assert chosen.reached
        assert chosen.invalid is None
        assert not chosen.broken
        trusted = [one for one in levels if one.invalid is None and one.level < chosen.level]
        assert not any(one.broken for one in trusted)


@given(some_levels, st.randoms())
def test_the_order_in_which_levels_were_measured_does_not_matter(levels: list[Level], rng) -> None:
    shuffled = list(levels)
    rng.shuffle(shuffled)
    assert recommend(shuffled) == recommend(levels)


def search(endpoint: Callable[[int], Level], most: int = 512) -> list[Level]:
    levels: list[Level] = []
    while (number := next_level(levels, most)) is not None:
        assert number not in {one.level for one in levels}
        assert 1 <= number <= most
        levels.append(endpoint(number))
    return levels


@pytest.mark.parametrize("places", [3, 17, 40, 64, 100])
def test_a_search_ends_just_within_what_a_refusing_endpoint_handles(places: int) -> None:
    found = search(lambda n: level(n, min(n, places) * 5, errors=max(0.0, 1 - places / n)))
    advice = recommend(found).level
    assert advice is not None
    assert 0.85 * places <= advice <= places


@pytest.mark.parametrize("places", [10, 40, 100])
def test_a_search_ends_near_the_knee_of_an_endpoint_that_queues(places: int) -> None:
    advice = recommend(search(lambda n: level(n, min(n, places) * 5))).level
    assert advice is not None
    assert 0.85 * places <= advice <= 1.4 * places


def test_a_search_stops_at_the_most_that_is_allowed() -> None:
    found = search(lambda n: level(n, n * 5), most=100)
    assert [one.level for one in found] == [1, 2, 4, 8, 16, 32, 64, 100]


def test_a_search_gives_up_where_not_even_one_call_is_borne() -> None:
    assert len(search(lambda n: level(n, 0, errors=1.0))) == 1


def test_a_search_goes_on_past_a_first_level_that_says_nothing() -> None:
    found = search(lambda n: level(n, min(n, 40) * 5, errors=max(0.0, 1 - 40 / n), busy=n < 3))
    assert 34 <= (recommend(found).level or 0) <= 40


def test_a_search_gives_up_where_this_client_is_always_the_bottleneck() -> None:
    assert [one.level for one in search(lambda n: level(n, n * 5, busy=True))] == [1, 2, 4]


@given(st.data())
def test_a_search_is_bounded_whatever_it_meets(data: st.DataObject) -> None:
    def endpoint(number: int) -> Level:
        return level(
            number,
            data.draw(st.floats(0.1, 1e4)),
            errors=data.draw(st.sampled_from([0.0, 0.0, 0.3])),
            reached=data.draw(st.booleans()),
            busy=data.draw(st.booleans()),
        )

    assert len(search(endpoint)) <= MAX_LEVELS


@pytest.mark.parametrize(
    ("text", "levels"),
    [("1,10,50", [1, 10, 50]), (" 50, 1,1,10, ", [1, 10, 50]), ("auto", "auto"), ((4, 2), [2, 4])],
)
def test_levels_are_read_in_ascending_order_each_once(text: str, levels: object) -> None:
    assert parse_levels(text) == levels


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ("1,ten", "got 'ten'"),
        ("", "at least one"),
        ("0,5", "got 0"),
        ([True], "got True"),
        ([2.5], "got 2.5"),
        ("-3", "got -3"),
    ],
)
def test_invalid_levels_are_refused_with_their_value(levels: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_levels(levels)  # type: ignore[arg-type]
