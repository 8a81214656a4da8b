"""exact's options, contains and regex."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import patterns
from steelyard.errors import ConfigurationError
from steelyard.patterns import PatternTimeout
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring import Contains, Exact, Regex
from tests.support.scorers import scored, scored_or_none


@pytest.mark.parametrize(
    ("options", "expected", "text"),
    [
        ({"ignore_case": True}, "Paris", "PARIS"),
        ({"ignore_whitespace": True}, "New York", " New \n\t York "),
        ({"ignore_punctuation": True}, "Paris", "Paris."),
        ({"ignore_punctuation": True}, "Paris", "“Paris”!"),
        ({"ignore_punctuation": True}, "パリ", "「パリ」。"),
        ({"ignore_punctuation": True}, "5", "$5"),
        ({"unicode": "NFKC"}, "Paris 1", "\uff30aris\u00a0\uff11"),
        ({"unicode": "NFKC"}, "office", "oﬃce"),
        ({"ignore_case": True, "ignore_punctuation": True, "ignore_whitespace": True}, "yes, it is", "YES  it is."),
    ],
)
def test_an_option_of_exact_makes_equal_what_is_not_without_it(options, expected, text) -> None:
    assert scored(Exact(**options), text, expected).passed
    assert not scored(Exact(), text, expected).passed


def test_the_reason_of_exact_quotes_the_answer_as_it_was_given() -> None:
    found = scored(Exact(ignore_case=True, ignore_punctuation=True), " London – ", "Paris")
    assert found.reason == "expected 'Paris', got 'London –'"


def test_exact_takes_composed_and_decomposed_letters_for_the_same_unless_told_not_to() -> None:
    assert scored(Exact(), "cafe\u0301", "caf\u00e9").passed
    assert not scored(Exact(unicode=None), "cafe\u0301", "caf\u00e9").passed


@given(st.text(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["NFC", "NFKC", None]))
def test_every_text_equals_itself_whatever_is_ignored(text, case, whitespace, punctuation, form) -> None:
    exact = Exact(ignore_case=case, ignore_whitespace=whitespace, ignore_punctuation=punctuation, unicode=form)
    assert scored(exact, text, text).passed


@pytest.mark.parametrize(
    ("scorer", "expected", "text", "passed"),
    [
        (Contains(), "Paris", "It is Paris.", True),
        (Contains(), "paris", "It is Paris.", False),
        (Contains(ignore_case=True), "paris", "It is PARIS.", True),
        (Contains(ignore_case=True), "STRASSE", "die Straße", True),
        (Contains(), ["Rome", "Paris"], "It is Paris.", True),
        (Contains(), ["Rome", "Oslo"], "It is Paris.", False),
        (Contains(all=True), ["is", "Paris"], "It is Paris.", True),
        (Contains(all=True), ["is", "Rome"], "It is Paris.", False),
        (Contains(), 42, "It is 42.", True),
        (Contains(), True, "it is true", True),
        (Contains(), "caf\u00e9", "un cafe\u0301", True),
        (Contains(), "x", None, False),
        (Contains(not_contains="sorry"), "Paris", "Paris, sorry", False),
        (Contains(not_contains=["sorry", "cannot"]), "Paris", "Paris", True),
        (Contains(not_contains="SORRY", ignore_case=True), "Paris", "Paris, sorry", False),
        (Contains(not_contains="sorry"), None, "I am sorry", False),
        (Contains(not_contains="sorry"), None, "Paris", True),
    ],
)
def test_contains_looks_for_the_expected_and_the_forbidden_texts(scorer, expected, text, passed) -> None:
    assert scored(scorer, text, expected).passed is passed


def test_contains_says_which_texts_are_missing_or_forbidden() -> None:
    assert scored(Contains(all=True), "a", ["a", "b", "c"]).reason == "the answer does not contain 'b' or 'c'"
    assert scored(Contains(not_contains="b"), "abc", "a").reason == "the answer contains 'b'"


@pytest.mark.parametrize("scorer", [Exact(), Contains(), Regex()])
def test_a_case_that_expects_nothing_is_not_scored(scorer) -> None:
    assert scored_or_none(scorer, "anything") is None


@pytest.mark.parametrize("all_of_them", [True, False])
def test_contains_does_not_apply_to_an_empty_list(all_of_them) -> None:
    assert scored_or_none(Contains(all=all_of_them), "anything", []) is None


def test_an_empty_expected_text_is_an_error_because_every_answer_contains_it() -> None:
    with pytest.raises(ValueError, match="empty text"):
        scored(Contains(), "anything", "")


@pytest.mark.parametrize(
    ("scorer", "expected", "text", "passed"),
    [
        (Regex(pattern=r"\bParis\b"), None, "It is Paris.", True),
        (Regex(pattern=r"\bParis\b"), None, "Parisian", False),
        (Regex(pattern=r"\bParis\b"), "Rome", "Paris", True),
        (Regex(), r"^\d+$", "42", True),
        (Regex(), r"^\d+$", " 42\n", True),
        (Regex(), [r"^\d+$", "none"], "none", True),
        (Regex(), r"^\d+$", "x", False),
        (Regex(pattern="paris", flags="i"), None, "PARIS", True),
        (Regex(pattern="^b$", flags="m"), None, "a\nb", True),
        (Regex(pattern="a.b", flags="s"), None, "a\nb", True),
        (Regex(pattern="a b # spaces do not count", flags="x"), None, "ab", True),
        (Regex(pattern="yes|no", fullmatch=True), None, "yes", True),
        (Regex(pattern="yes|no", fullmatch=True), None, "yes, sir", False),
        (Regex(pattern="."), None, None, False),
    ],
)
def test_regex_searches_the_scorers_pattern_or_else_the_cases(scorer, expected, text, passed) -> None:
    assert scored(scorer, text, expected).passed is passed


def test_a_bad_pattern_of_a_case_raises_so_that_it_is_a_scoring_error() -> None:
    with pytest.raises(ConfigurationError, match="not a regular expression"):
        scored(Regex(), "x", "(")


def test_a_pattern_that_backtracks_is_a_scoring_error_that_names_it(monkeypatch) -> None:
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 0.05)
    for scorer, expected in ((Regex(pattern="(a|aa)+$"), None), (Regex(), "(a|aa)+$")):
        with pytest.raises(PatternTimeout, match=r"the pattern '\(a\|aa\)\+\$' ran for more than 0.05 s"):
            scored(scorer, "a" * 60 + "b", expected)


def test_the_engine_that_reads_patterns_is_part_of_a_scorers_identity() -> None:
    assert Regex(pattern="x").identity()["patterns"] == patterns.PATTERNS_VERSION
    assert "patterns" not in Exact().identity()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Regex(pattern="("), r"pattern '\(' is not a regular expression"),
        (lambda: Regex(pattern=3), "pattern must be a text, got 3"),  # type: ignore[arg-type]
        (lambda: Regex(flags="q"), "flags must be letters of 'aimsx', got 'q'"),
        (lambda: Regex(fullmatch="no"), "fullmatch must be true or false, got 'no'"),  # type: ignore[arg-type]
        (lambda: Exact(unicode="UTF-8"), "unicode must be one of .*, got 'UTF-8'"),  # type: ignore[arg-type]
        (lambda: Exact(ignore_case="no"), "ignore_case must be true or false, got 'no'"),  # type: ignore[arg-type]
        (lambda: Contains(all=1), "all must be true or false, got 1"),  # type: ignore[arg-type]
        (lambda: Contains(not_contains=""), "not_contains must be a text or a list of texts, got ''"),
        (lambda: Contains(not_contains=[3]), r"not_contains .*, got \[3\]"),  # type: ignore[list-item]
    ],
)
def test_a_bad_argument_is_refused_with_its_value(make, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


# Exact, case by case -------------------------------------------------------------------------------------------------


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


def test_exact_does_not_score_a_case_that_expects_nothing() -> None:
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


@pytest.mark.parametrize(
    ("expected", "text", "passed"),
    [
        ("cat", "The cat sat.", True),
        ("cat", "concatenate", False),
        ("cat", "concatenate a cat", True),
        ("cat", "cats", False),
        ("cat", "(cat)", True),
        ("cat", "CAT", False),
        ("5", "15", False),
        ("5", "5.", True),
        ("5", "3.5", False),
        ("5", "5.3", False),
        ("1", "1,234", False),
        ("5", "It is 5, I think", True),
        ("-5", "x = -5", True),
        ("New York", "in New York, of course", True),
        ("C++", "I like C++.", True),
        ("caf", "cafe\u0301", False),
        (["dog", "cat"], "a cat", True),
    ],
)
def test_whole_words_are_not_found_within_longer_words_or_numbers(expected, text, passed) -> None:
    assert scored(Contains(whole_words=True), text, expected).passed is passed


def test_whole_words_hold_for_forbidden_texts_and_without_case_too() -> None:
    scorer = Contains(whole_words=True, ignore_case=True, not_contains="no")
    assert scored(scorer, "YES, I know", "yes").passed
    assert not scored(scorer, "Yes? No.", "yes").passed


def test_whole_words_are_looked_for_in_linear_time() -> None:
    assert not scored(Contains(whole_words=True), "ab" * 500_000, "a").passed
