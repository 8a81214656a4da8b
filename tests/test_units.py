"""Durations, rates, sizes and percentages are read as people write them."""

from __future__ import annotations

import pytest

from steelyard.errors import ConfigurationError
from steelyard.units import RateLimit, parse_duration, parse_percentage, parse_rate, parse_size


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("500ms", 0.5),
        ("60s", 60),
        ("2m", 120),
        ("2 min", 120),
        ("1.5h", 5400),
        ("30", 30),
        (".5s", 0.5),
        (3, 3),
        (0.2, 0.2),
        (" 5 S ", 5),
    ],
)
def test_written_durations_are_read(written: object, seconds: float) -> None:
    assert parse_duration(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "written", ["", "s", "-5s", "5 days", "1e9", "nan", float("nan"), float("inf"), -1, True, None, "5s5s", "٣s s"]
)
def test_anything_else_is_no_duration_and_is_refused_with_its_value(written: object) -> None:
    with pytest.raises(ConfigurationError, match="must be a length of time like") as caught:
        parse_duration(written, "pause")
    assert repr(written) in str(caught.value)
    assert str(caught.value).startswith("pause")


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
def test_written_rates_are_read(written, count, seconds) -> None:
    assert parse_rate(written) == RateLimit(count, seconds)
    assert parse_rate(written).per_second == count / seconds


@pytest.mark.parametrize(
    "written", ["", "10", "10/", "/s", "10/fortnight", "0/s", "0.0/min", "-1/s", "1e3/s", "x/s", 10]
)
def test_anything_else_is_no_rate_and_is_refused_with_its_value(written) -> None:
    with pytest.raises(ConfigurationError, match="rate must be a number above 0 and a unit") as refusal:
        parse_rate(written)
    assert repr(written) in str(refusal.value)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("200k", 200_000),
        ("2G", 2_000_000_000),
        ("1.5M", 1_500_000),
        ("512Mi", 512 * 1024**2),
        ("1 KiB", 1024),
        ("3kB", 3000),
        ("0.1k", 100),
        ("7", 7),
        (7, 7),
        (0, 0),
    ],
)
def test_written_sizes_are_read(written: object, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize("written", ["", "k", "-1", -1, "1.5", 1.5, True, None, "2 apples", "1e3", "1kk", "0.0001k"])
def test_anything_else_is_no_size_and_is_refused_with_its_value(written: object) -> None:
    with pytest.raises(ConfigurationError, match="memory must be a whole number or a size like 200k") as caught:
        parse_size(written, "memory")
    assert repr(written) in str(caught.value)


@pytest.mark.parametrize(
    ("written", "share"),
    [("5%", 0.05), ("0.1%", 0.001), ("100 %", 1), ("0.05", 0.05), (0.05, 0.05), (1, 1), ("0", 0), (" 1% ", 0.01)],
)
def test_written_percentages_are_read_as_shares(written: object, share: float) -> None:
    assert parse_percentage(written) == share


@pytest.mark.parametrize("written", ["", "%", "5", 5, "101%", "-1%", -0.1, True, None, "half", float("nan")])
def test_anything_else_is_no_percentage_and_is_refused_with_its_value(written: object) -> None:
    with pytest.raises(ConfigurationError, match=r"limit must be within 0\.\.1, or 0%\.\.100%") as caught:
        parse_percentage(written, "limit")
    assert repr(written) in str(caught.value)
