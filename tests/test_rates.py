"""Rates as people write them."""

from __future__ import annotations

import pytest

from steelyard.errors import ConfigurationError
from steelyard.units import RateLimit, parse_rate


@pytest.mark.parametrize(
    ("written", "count", "seconds"),
    [
        ("10/s", 10, 1),
        ("600/min", 600, 60),
        ("5000/h", 5000, 3600),
        (" 2.5 / Minute ", 2.5, 60),
        (".5/sec", 0.5, 1),
        ("10000/day", 10_000, 86_400),
    ],
)
def test_a_number_and_a_unit_are_read(written, count, seconds) -> None:
    assert parse_rate(written) == RateLimit(count, seconds)
    assert parse_rate(written).per_second == count / seconds


@pytest.mark.parametrize(
    "written", ["", "10", "10/", "/s", "10/fortnight", "0/s", "0.0/min", "-1/s", "1e3/s", "x/s", 10]
)
def test_anything_else_is_refused_with_what_was_given(written) -> None:
    with pytest.raises(ConfigurationError, match="rate must be a number above 0 and a unit") as refusal:
        parse_rate(written)
    assert repr(written) in str(refusal.value)
