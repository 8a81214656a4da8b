"""Scorers that compare text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring import Exact


def score(expected: object, text: str | None, **options: bool) -> Score | None:
    case = EvalCase(id="c", prompt="p", expected=expected)
    return Exact(**options).score(case, InvocationResponse(response_text=text))


@pytest.mark.parametrize(
    ("expected", "text", "passed"),
    [
        ("Paris", "Paris", True),
        ("Paris", " Paris\n", True),
        (" Paris ", "Paris", True),
        ("Paris", "paris", False),
        ("Paris", "Paris.", False),
        ("Paris", "", False),
        ("Paris", None, False),
        (["Paris", "Lutetia"], "Lutetia", True),
        (["Paris", "Lutetia"], "Rome", False),
        ([], "Rome", False),
        (4, "4", True),
        (4, "4.0", False),
        (0.5, "0.5", True),
        (True, "true", True),
        (False, "false", True),
        (True, "True", False),
        ([1, 2], "2", True),
    ],
)
def test_the_answer_must_be_the_expected_text_but_for_white_space_around_it(expected, text, passed) -> None:
    result = score(expected, text)
    assert result is not None
    assert (result.name, result.value, result.passed) == ("exact", float(passed), passed)


def test_a_case_that_expects_nothing_is_not_scored() -> None:
    assert score(None, "anything") is None


@pytest.mark.parametrize(("expected", "text"), [("PARIS", "paris"), ("straße", "STRASSE"), (True, "TRUE")])
def test_case_can_be_ignored(expected, text) -> None:
    strict, loose = score(expected, text), score(expected, text, ignore_case=True)
    assert strict is not None
    assert loose is not None
    assert (strict.passed, loose.passed) == (False, True)


def test_a_wrong_answer_says_what_was_expected_and_what_came() -> None:
    result = score(["a", "b"], "c")
    assert result is not None
    assert result.reason == "expected 'a' or 'b', got 'c'"


def test_the_reason_stays_short_whatever_the_texts_are() -> None:
    result = score("x" * 100_000, "y" * 100_000)
    assert result is not None
    assert len(result.reason or "") < 1_000


@given(st.text())
def test_every_text_equals_itself(text) -> None:
    result = score(text, text)
    assert result is not None
    assert result.passed


def test_identity_tells_how_it_compares() -> None:
    assert Exact().identity() != Exact(ignore_case=True).identity()
    assert Exact(name="other").name == "other"
