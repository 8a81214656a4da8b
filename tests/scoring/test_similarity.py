"""How alike two texts are, by characters and by words."""

from __future__ import annotations

import sys
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu import sentence_bleu

from steelyard.errors import ConfigurationError
from steelyard.scoring import Bleu, RougeL, Similarity
from steelyard.scoring.similarity import longest_common_subsequence, words_of
from tests.support.scorers import scored, scored_or_none

LETTERS = st.text(alphabet="abc é漢", max_size=12).map(str.strip)
WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), max_size=12)


def levenshtein(left: str, right: str) -> int:
    """The textbook recurrence."""

    @cache
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        same = left[i - 1] == right[j - 1]
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (not same))

    return distance(len(left), len(right))


def common(left: list[str], right: list[str]) -> int:
    """The textbook recurrence of the longest common subsequence."""

    @cache
    def length(i: int, j: int) -> int:
        if not i or not j:
            return 0
        return length(i - 1, j - 1) + 1 if left[i - 1] == right[j - 1] else max(length(i - 1, j), length(i, j - 1))

    return length(len(left), len(right))


@given(LETTERS, LETTERS)
def test_similarity_is_one_minus_the_edit_distance_over_the_longer_length(text, expected) -> None:
    longer = max(len(text), len(expected))
    wanted = 1 - levenshtein(text, expected) / longer if longer else 1.0
    assert scored(Similarity(), text, expected).value == pytest.approx(wanted)


@given(WORDS, WORDS)
def test_the_longest_common_subsequence_is_the_textbooks(left, right) -> None:
    assert longest_common_subsequence(left, right) == common(left, right)


@given(WORDS, WORDS)
def test_rouge_l_is_the_f1_of_precision_and_recall(words, others) -> None:
    value = scored(RougeL(), " ".join(words), " ".join(others)).value
    shared = common(words, others)
    if not shared:
        assert value == float(words == others)
    else:
        precision, recall = shared / len(words), shared / len(others)
        assert value == pytest.approx(2 * precision * recall / (precision + recall))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, World!", ["hello", "world"]),
        ("don't", ["don", "t"]),
        ("Crème-brûlée", ["crème", "brûlée"]),
        ("नमस्ते दुनिया।", ["नमस्ते", "दुनिया"]),
        ("東京は都", ["東", "京", "は", "都"]),
        ("Straße", ["strasse"]),
        ("", []),
    ],
)
def test_words_are_told_apart_in_any_script(text, words) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize("scorer", [Similarity(), RougeL(), Bleu()])
def test_a_text_is_wholly_like_itself_and_the_best_of_several_counts(scorer) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    assert scored(scorer, text, text).value == pytest.approx(1.0)
    assert scored(scorer, f" {text}\n", ["something else altogether", text]).value == pytest.approx(1.0)
    assert scored(scorer, "nothing", text).reason is not None
    assert not scored(scorer, None, text).passed


@given(WORDS, WORDS)
def test_bleu_is_sacrebleus_over_a_hundred(words, others) -> None:
    text, expected = " ".join(words), " ".join(others)
    wanted = sentence_bleu(text, [expected]).score / 100
    assert scored(Bleu(), text, expected).value == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("scorer", "threshold"), [(Similarity(), 0.8), (RougeL(), 0.5), (Bleu(), 0.5), (RougeL(threshold=0.9), 0.9)]
)
def test_it_passes_from_the_threshold_on(scorer, threshold) -> None:
    assert scorer.threshold == threshold
    result = scored(scorer, "a b c d", "a b c x")
    assert result.value is not None
    assert result.passed is (result.value >= threshold)
    assert (result.reason is None) is result.passed


def test_case_can_be_ignored() -> None:
    assert scored(Similarity(ignore_case=True), "PARIS", "paris").value == 1.0
    assert scored(Similarity(), "PARIS", "paris").value == 0.0
    assert scored(Bleu(ignore_case=True), "A B C D", "a b c d").value == pytest.approx(1.0)


def test_a_comparison_that_would_take_for_ever_is_a_scoring_error() -> None:
    long, other = "a " * 300_000, "b " * 300_000
    for scorer in (Similarity(), RougeL(), Bleu()):
        with pytest.raises(ValueError, match="too long to compare"):
            scored(scorer, long, other)


@pytest.mark.parametrize("scorer", [Similarity(), RougeL(), Bleu()])
def test_a_case_that_expects_nothing_is_not_scored(scorer) -> None:
    assert scored_or_none(scorer, "x") is None
    assert scored_or_none(scorer, "x", []) is None


@pytest.mark.parametrize(("kind", "module"), [(Similarity, "rapidfuzz"), (Bleu, "sacrebleu")])
def test_a_scorer_without_its_library_says_what_to_install(monkeypatch, kind, module) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=rf"needs {module}: pip install 'steelyard\[text\]'"):
        kind()


@pytest.mark.parametrize(
    ("make", "result"),
    [
        (lambda: Similarity(threshold=1.5), "threshold must be a number within 0..1, got 1.5"),
        (lambda: RougeL(threshold=True), "threshold must be a number within 0..1, got True"),
        (lambda: Bleu(threshold="high"), "threshold must be a number within 0..1, got 'high'"),  # type: ignore[arg-type]
        (lambda: Bleu(tokens="words"), "tokens must be one of .*, got 'words'"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_argument_is_refused_with_its_value(make, result) -> None:
    with pytest.raises(ConfigurationError, match=result):
        make()
