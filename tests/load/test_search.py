"""Which level a sweep recommends, and why; how levels and rates are written."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.load.levels import Level, parse_levels, parse_rates
from steelyard.load.search import recommend_rate
from tests.support.sweep import advice, level


def test_the_highest_level_before_errors_is_recommended() -> None:
    found = advice([level(1, 10), level(10, 100), level(50, 400), level(100, 500, errors=0.12)])
    assert found.level == 50
    assert found.reason == "at 100 the error rate is 12% (limit 1%)"
    assert found.describe() == "recommended: 50: at 100 the error rate is 12% (limit 1%)"


def test_the_highest_level_before_an_objective_breaks_is_recommended() -> None:
    slo = "ttft_p99<500ms"
    found = advice([level(10, 100, slo=slo), level(50, 400, slo=slo, first=0.3), level(100, 900, slo=slo)])
    assert found.level == 10
    assert found.reason == "at 50 time to first token p99 is 600ms (limit 500ms)"


def test_the_level_from_which_throughput_no_longer_grows_is_recommended_and_what_growth_means_is_said() -> None:
    found = advice([level(10, 100), level(50, 400), level(100, 408)])
    assert (found.level, found.decided) == (50, True)
    assert found.reason == (
        "throughput grew only 2% from 50 to 100 (+2% to +2%); growth means at least 19 % more answers per doubling"
    )


def test_falling_throughput_is_reported() -> None:
    assert advice([level(10, 100), level(20, 70)]).reason.startswith("throughput fell by 30% from 10 to 20")


def test_growth_is_measured_against_the_growth_of_parallelism() -> None:
    """Half as many calls again must bring 11 %, sixteen times as many twice as much."""
    assert advice([level(10, 100), level(15, 130)]).level == 15
    assert advice([level(10, 100), level(160, 150)]).level == 10


def test_one_noisy_level_does_not_end_the_growth() -> None:
    assert advice([level(10, 100), level(20, 90), level(40, 350)]).level == 40


def test_a_level_where_the_client_was_the_bottleneck_is_never_recommended() -> None:
    found = advice([level(10, 100), level(50, 400), level(100, 800, busy=True)])
    assert found.level == 50
    assert found.reason == "at 100 this client was the bottleneck: its event loop was busy 97% of the time"


def test_errors_at_a_level_where_the_client_was_the_bottleneck_end_nothing() -> None:
    assert advice([level(10, 100), level(50, 90, busy=True, errors=0.5), level(100, 900)]).level == 100


def test_a_level_that_was_not_reached_is_never_recommended() -> None:
    found = advice([level(10, 100), level(50, 400, reached=False)])
    assert (found.level, found.reason) == (10, "at 50 only 25 were in flight at once")


def test_the_highest_level_that_still_grew_says_that_there_may_be_more() -> None:
    found = advice([level(1, 10), level(10, 100)])
    assert found.level == 10
    assert found.reason.startswith("the highest level measured; throughput still grew 900% from 1 to 10")


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
    found = advice(levels)
    assert (found.level, found.reason) == (None, reason)
    assert found.describe() == f"no level can be recommended: {reason}"


def test_a_single_good_level_is_recommended_as_the_only_one() -> None:
    assert advice([level(7, 10)]).describe() == "recommended: 7: the only level that was measured"


def test_an_objective_of_which_nothing_can_be_told_is_not_kept() -> None:
    says = "time to first token p99: cannot tell: 279 more requests would"
    found = advice([level(1, 10, undecided=(says,)), level(2, 20)])
    assert (found.level, found.decided, found.reason) == (None, False, f"at 1 {says}")
    assert found.describe() == f"no level can be recommended: at 1 {says}; undecided"


some_levels = st.lists(
    st.builds(
        level,
        st.integers(1, 2000),
        st.floats(0.1, 1e5, allow_nan=False),
        errors=st.sampled_from([0.0, 0.005, 0.02, 1.0]),
        reached=st.booleans(),
        busy=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda one: one.level,
)


@given(some_levels)
def test_whatever_is_recommended_was_reached_valid_and_kept_the_objectives(levels: list[Level]) -> None:
    found = advice(levels)
    assert found.reason
    if found.level is not None:
        chosen = next(one for one in levels if one.level == found.level)
        assert chosen.reached
        assert chosen.invalid is None
        assert not chosen.broken
        trusted = [one for one in levels if one.usable and one.level < chosen.level]
        assert not any(one.broken for one in trusted)


@given(some_levels, st.randoms())
def test_the_order_in_which_levels_were_measured_does_not_matter(levels: list[Level], rng) -> None:
    shuffled = list(levels)
    rng.shuffle(shuffled)
    assert advice(shuffled) == advice(levels)


# Arrival rates


def test_the_highest_rate_before_an_objective_breaks_is_recommended() -> None:
    rates = [level(5, 5), level(10, 10), level(20, 15, errors=0.2), level(40, 40)]
    found = recommend_rate(rates)
    assert found.describe() == "recommended: 10/s: at 20/s the error rate is 20% (limit 1%)"


def test_a_rate_of_which_nothing_can_be_told_is_an_open_question() -> None:
    found = recommend_rate([level(5, 5), level(10, 10, undecided=("cannot tell",))])
    assert (found.level, found.decided, found.reason) == (5, False, "at 10/s cannot tell")
    assert "may be higher" in recommend_rate([level(5, 5)]).reason
    assert recommend_rate([]).level is None


def test_a_rate_at_which_the_client_was_the_bottleneck_is_passed_over() -> None:
    found = recommend_rate([level(5, 5), level(10, 10, busy=True), level(20, 20)])
    assert found.level == 20
    assert msgspec.structs.replace(found, level=None).describe().startswith("no level can be recommended")


def test_rates_are_read_in_ascending_order_each_once() -> None:
    found = parse_rates("poisson:20/s, 5/s,300/min,5/s")
    assert [(one.kind, one.rate.per_second) for one in found] == [("poisson", 5.0), ("poisson", 20.0)]
    assert parse_rates("constant:0.5/s")[0].rate.per_second == 0.5


@pytest.mark.parametrize("text", ["5/s", "poisson:", "poison:5/s", "poisson:5/s,x"])
def test_rates_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="arrivals"):
        parse_rates(text)


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
