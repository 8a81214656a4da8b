"""Which cases are asked: conditions on metadata, and samples that are the same each time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import ConfigurationError
from steelyard.records import EvalCase, id_digest
from steelyard.suite.selection import Selection, parse_condition

HARD = {"difficulty": "hard", "year": 2024, "tags": ["law", "tax, income"], "deep": {"level": 3}, "ok": True}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("difficulty=hard", True),
        (" difficulty == hard ", True),
        ("difficulty=easy", False),
        ("difficulty!=easy", True),
        ("difficulty!=hard", False),
        ("difficulty in hard, easy", True),
        ("difficulty in easy,medium", False),
        ("difficulty not in easy, medium", True),
        ("tags=law", True),
        ("tags=tax", False),
        ("tags!=law", False),
        ('tags in ["tax, income", "x"]', True),
        ("year=2024", True),
        ("year in [2023, 2024]", True),
        ("year>=2024", True),
        ("year<2024", False),
        ("difficulty>3", False),
        ("deep.level>2", True),
        ("ok=true", True),
        ("absent=(none)", True),
        ("absent!=x", True),
        ("absent=x", False),
        ("difficulty!=(none)", True),
    ],
)
def test_conditions(text: str, holds: bool) -> None:
    assert parse_condition(text).holds(HARD) is holds


@pytest.mark.parametrize(
    "text", ["difficulty", "=hard", "difficulty=", "difficulty in", "year>soon", 'a in ["b"', "", 3]
)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="where: "):
        parse_condition(text)


def test_several_conditions_must_all_hold() -> None:
    case = EvalCase(id="a", prompt="?", metadata=HARD)
    assert Selection(where=(parse_condition("difficulty=hard"), parse_condition("year>2000"))).takes(case)
    assert not Selection(where=(parse_condition("difficulty=hard"), parse_condition("year>2030"))).takes(case)


def digests(count: int, prefix: str = "") -> np.ndarray:
    return np.array([id_digest(f"{prefix}{number}") for number in range(count)], dtype=np.uint64)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(-5, 1 << 70))
def test_a_sample_depends_on_seed_and_ids_alone_and_a_larger_one_holds_it(size: int, more: int, seed: int) -> None:
    ids = digests(100)
    drawn = Selection(sample=size, seed=seed).drawn(ids)
    assert len(drawn) == size
    assert list(drawn) == sorted(drawn)
    larger = Selection(sample=min(size + more, 99), seed=seed).drawn(ids)
    assert set(drawn) <= set(larger)
    order = np.random.default_rng(1).permutation(100)
    again = Selection(sample=size, seed=seed).drawn(ids[order])
    assert set(ids[order][again]) == set(ids[drawn])


def test_a_sample_as_large_as_the_suite_is_all_of_it() -> None:
    assert Selection(sample=100).drawn(digests(100)) is None
    assert Selection().drawn(digests(3)) is None


def test_each_case_is_drawn_equally_often() -> None:
    ids = digests(40)
    counts = np.zeros(40)
    for seed in range(2_000):
        counts[Selection(sample=10, seed=seed).drawn(ids)] += 1
    assert abs(counts - 500).max() < 5 * np.sqrt(2_000 * 0.25 * 0.75)
    assert counts.sum() == 20_000
