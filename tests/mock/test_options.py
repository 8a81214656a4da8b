"""The mock's options: distributions, rates, and messages that name a mistake."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steelyard.errors import ConfigurationError
from steelyard.mock import MockOptions
from steelyard.mock.randomness import RandomNumbers, RandomSource, hits, parse_distribution, pick
from steelyard.mock.service import Limits, Service, Times
from tests.support.paths import DOCS

NUMBERS = np.random.default_rng(0).integers(0, 2**32, 4000).tolist()


@pytest.mark.parametrize(
    ("text", "oracle"),
    [
        ("uniform:100ms,300ms", stats.uniform(0.1, 0.2)),
        ("normal:200ms,20ms", stats.norm(0.2, 0.02)),
        ("lognormal:0.2s,0.5", stats.lognorm(0.5, scale=0.2)),
        ("exponential:200ms", stats.expon(scale=0.2)),
    ],
)
def test_a_distribution_is_the_one_it_is_named_after(text: str, oracle: Any) -> None:
    drawn = [parse_distribution("latency", text, "seconds").draw(number) for number in NUMBERS]
    assert stats.kstest(drawn, oracle.cdf).pvalue > 0.01


@given(st.integers(0, 2**32 - 1), st.sampled_from(["normal:1,5", "lognormal:1,2", "exponential:3", "uniform:0,2", "7"]))
def test_no_draw_is_below_zero(number: int, text: str) -> None:
    distribution = parse_distribution("output_tokens", text, "number")
    assert 0 <= distribution.draw(number) < 1e9
    assert distribution.draw_count(number) >= 0


@given(st.integers(0, 2**32 - 1), st.integers(1, 50))
def test_a_random_number_never_hits_rate_0_and_always_hits_rate_1(number: int, count: int) -> None:
    assert not hits(number, 0.0)
    assert hits(number, 1.0)
    assert 0 <= pick(number, count) < count


def test_random_numbers_are_uniform_and_independent_of_each_other() -> None:
    source = RandomSource(0)
    drawn = [source.for_request(b"%d" % number).numbers() for number in range(2000)]
    table = np.array([[getattr(one, name) for name in RandomNumbers.__struct_fields__] for one in drawn]) / 2**32
    assert all(stats.kstest(column, "uniform").pvalue > 1e-4 for column in table.T)
    correlations = np.corrcoef(table.T) - np.eye(table.shape[1])
    assert np.abs(correlations).max() < 0.1


def test_randomness_depends_only_on_seed_body_and_how_often_it_came() -> None:
    first, second, third = RandomSource(1), RandomSource(1), RandomSource(-(2**200))
    assert [first.for_request(b"a").id, first.for_request(b"b").id] == [
        second.for_request(b"a").id,
        second.for_request(b"b").id,
    ]
    assert first.for_request(b"a").id == second.for_request(b"a").id
    assert third.for_request(b"a").id not in {first.for_request(b"a").id for _ in range(3)}


def test_the_bucket_holds_one_units_worth_and_fills_evenly() -> None:
    limits = Limits(rate="4/s")
    assert [limits.admit(100.0) is None for _ in range(5)] == [True] * 4 + [False]
    assert [limits.admit(100.5) is None for _ in range(3)] == [True, True, False]
    refusal = limits.admit(100.5)
    assert refusal is not None
    assert refusal.retry_after == pytest.approx(0.25)
    assert limits.admit(100.75) is None


def test_a_rate_below_one_a_unit_lets_one_through_at_a_time() -> None:
    limits = Limits(rate="0.5/s")
    assert [limits.admit(moment) is None for moment in (100.0, 101.0, 102.0)] == [True, False, True]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"error_rate": 1.5}, "error_rate must be a number from 0 to 1, got 1.5"),
        ({"drop_rate": -0.1}, "drop_rate must be a number from 0 to 1, got -0.1"),
        ({"latency": "fast"}, "latency must be a length of time"),
        ({"latency": "norml:1,2"}, "did you mean 'normal'?"),
        ({"latency": "normal:200ms"}, "normal:MEAN,SD"),
        ({"latency": "uniform:2s,1s"}, "the low end is above the high end"),
        ({"output_tokens": "many"}, "output_tokens must be a number >= 0, got 'many'"),
        ({"output_tokens": -1}, "output_tokens must be a number >= 0, got -1"),
        ({"tokens_per_second": 5, "chunk_interval": 1}, "give one of them"),
        ({"max_concurrency": 0}, "max_concurrency must be >= 1, got 0"),
        ({"port": 70_000}, "port must be from 0 to 65535, got 70000"),
        ({"rate": "fast"}, "rate must be a number above 0 and a unit"),
        ({"rate": "0/s"}, "got '0/s'"),
        ({"retry_after": "soon"}, "retry_after must be a length of time"),
    ],
    ids=str,
)
def test_a_mistake_is_named_with_its_value(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        MockOptions(**options)
    assert named in str(caught.value)


def test_the_docs_name_every_option_and_every_figure() -> None:
    page = (DOCS / "mock.md").read_text(encoding="utf-8")
    figures = Service(MockOptions()).stats_report(with_times=True)
    assert [name for name in (*figures, *Times.__struct_fields__) if f"`{name}`" not in page] == []
    flags = {"usage": "--no-usage", "models": "--model"}
    names = [flags.get(name, "--" + name.replace("_", "-")) for name in MockOptions.__struct_fields__]
    assert [name for name in names if f"`{name}" not in page] == []
