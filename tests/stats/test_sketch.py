"""The sketch behind live percentiles keeps its promised error in fixed memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.stats.sketch import PercentileSketch

in_range = st.floats(min_value=1e-9, max_value=1e10) | st.just(0.0)
percents = st.floats(min_value=0, max_value=100)


def sketch_of(values: list[float]) -> PercentileSketch:
    sketch = PercentileSketch()
    sketch.add(np.array(values, dtype=np.float64))
    return sketch


@given(st.lists(in_range, min_size=1, max_size=200), percents)
def test_a_percentile_is_within_half_a_percent_of_numpys_linear_one(values, percent):
    estimate = sketch_of(values).percentile(percent)
    assert estimate == pytest.approx(float(np.percentile(values, percent)), rel=0.005, abs=1e-12)


@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 99.9, 100])
def test_the_error_holds_over_a_long_skewed_stream(percent):
    values = np.random.default_rng(7).lognormal(-1.0, 1.5, 50_000)
    sketch = PercentileSketch()
    for chunk in np.array_split(values, 49):
        sketch.add(chunk)
    assert sketch.percentile(percent) == pytest.approx(float(np.percentile(values, percent)), rel=0.005)


@given(st.lists(st.floats(min_value=-1e300, max_value=1e300), min_size=1, max_size=50), percents)
def test_no_estimate_leaves_the_range_of_the_values(values, percent):
    estimate = sketch_of(values).percentile(percent)
    slack = 1e-12 * max(abs(value) for value in values)
    assert min(values) - slack <= estimate <= max(values) + slack


def test_an_empty_sketch_has_no_percentile():
    assert sketch_of([]).percentile(50) is None


def test_values_added_after_a_percentile_was_read_are_seen():
    sketch = sketch_of([1.0, 1.0, 1.0])
    assert sketch.percentile(50) == 1.0
    sketch.add(np.array([8.0] * 10 + [100.0]))
    assert sketch.percentile(50) == pytest.approx(8.0, rel=0.005)


def test_count_total_and_ends_are_exact():
    sketch = sketch_of([3.0, 0.5, 2.0])
    assert (sketch.count, sketch.total, sketch.minimum, sketch.maximum) == (3, 5.5, 0.5, 3.0)
