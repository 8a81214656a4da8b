"""Figures as people read them; text from elsewhere made safe."""

from __future__ import annotations

import pytest

from steelyard.stats.formatting import (
    counted,
    format_bytes,
    format_number,
    format_rate,
    format_seconds,
    join,
    safe_text,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.000_34, "340µs"),
        (0.0012, "1.2ms"),
        (0.012, "12ms"),
        (0.0999, "100ms"),
        (0.2136, "214ms"),
        (0.9996, "1.00s"),
        (3.4, "3.40s"),
        (75.04, "75.0s"),
        (4321.0, "4,321s"),
    ],
)
def test_seconds_read_well(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (0.123, "0.12"), (24.13, "24.1"), (99.96, "100"), (12345.6, "12,346")]
)
def test_numbers_read_well(number, text):
    assert format_number(number) == text


def test_a_slow_rate_is_given_by_the_minute():
    assert format_rate(2, 60.0) == "2/min"
    assert format_rate(0, 60.0) == "\N{EN DASH}/s"


@pytest.mark.parametrize(("count", "text"), [(0, "0 answers"), (1, "1 answer"), (3000, "3,000 answers")])
def test_a_count_is_told_in_the_singular_or_the_plural(count, text):
    assert counted(count, "answer") == text


def test_a_single_segment_too_long_is_cut():
    assert join(["abcdefghij"], 6) == "abcde…"


def test_plain_text_in_any_script_stays_as_it_is():
    assert safe_text("Größe 国 é · ok") == "Größe 国 é · ok"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (9_950, "10 kB"), (34_000_000, "34 MB"), (999_600, "1.0 MB"),
     (1_200_000_000, "1.2 GB"), (5 * 10**15, "5000 TB")],
)  # fmt: skip
def test_bytes_are_told_in_a_unit_that_suits_them(size: int, text: str) -> None:
    assert format_bytes(size) == text
