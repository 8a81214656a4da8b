"""Lengths of time are read as people write them."""

from __future__ import annotations

import pytest

from steelyard.errors import ConfigurationError
from steelyard.units import parse_duration


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
def test_written_lengths_are_read(written: object, seconds: float) -> None:
    assert parse_duration(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "written", ["", "s", "-5s", "5 days", "1e9", "nan", float("nan"), float("inf"), -1, True, None, "5s5s", "٣s s"]
)
def test_anything_else_is_refused_with_its_value(written: object) -> None:
    with pytest.raises(ConfigurationError, match="must be a length of time like") as caught:
        parse_duration(written, "pause")
    assert repr(written) in str(caught.value)
    assert str(caught.value).startswith("pause")
