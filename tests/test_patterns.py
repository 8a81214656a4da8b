"""Users' patterns: matched as written, and never longer than a match may take."""

from __future__ import annotations

import re
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import patterns
from steelyard.errors import ConfigurationError
from steelyard.patterns import Pattern, PatternTimeout


@pytest.mark.parametrize("source", [r"(a|aa)+$", r"^(?:a|aa|aaa)+$"])
def test_a_pattern_that_backtracks_without_end_is_named_and_given_up(monkeypatch, source: str) -> None:
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 0.05)
    text = "a" * 60 + "b"
    with pytest.raises(PatternTimeout, match="backtracks") as caught:
        Pattern(source).search(text)
    assert repr(source) in str(caught.value)


def test_other_threads_run_while_a_pattern_backtracks(monkeypatch) -> None:
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 0.3)
    turns = 0
    done = threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0.001)

    other = threading.Thread(target=count)
    other.start()
    try:
        with pytest.raises(PatternTimeout):
            Pattern(r"(a|aa)+$").search("a" * 60 + "b")
    finally:
        done.set()
        other.join()
    assert turns > 10


@pytest.mark.parametrize("source", ["(", "a{2", "[", "(?P<x>a)(?P<x>b", "*"])
def test_what_is_no_pattern_for_re_and_is_refused_says_so(source: str) -> None:
    try:
        re.compile(source)
    except re.error:
        with pytest.raises(ConfigurationError, match="not a regular expression"):
            Pattern(source)


def test_a_pattern_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="too long"):
        Pattern("a" * (patterns.MAX_PATTERN_LENGTH + 1))


@given(st.sampled_from([r"\d+", r"^a.*b$", r"(foo|bar)", r"\bword\b", r"[A-Z]\w+", r"a{2,3}", r"(?i)x"]), st.text())
def test_ordinary_patterns_match_as_re_does(source: str, text: str) -> None:
    ours, theirs = Pattern(source).search(text), re.search(source, text)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None and text.isascii():
        assert ours.span() == theirs.span()


def test_flags_and_whole_matches() -> None:
    assert Pattern("PARIS", ignore_case=True).search("in paris")
    assert Pattern("^b", multiline=True).search("a\nb")
    assert Pattern("a.b", dotall=True).search("a\nb")
    assert Pattern("a+").fullmatch("aaa")
    assert not Pattern("a+").fullmatch("aab")
