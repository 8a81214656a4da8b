"""Scorers for the similarity of two texts: similarity (characters), rouge_l and bleu (words)."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.base import PlainScorer, alternatives, as_text, check_choice, check_flags, need_extra
from steelyard.scoring.text import is_punctuation

BleuTokens: TypeAlias = Literal["13a", "intl", "char", "none"]

# Work grows with the product of the lengths. Beyond these, about a second, the comparison is refused rather than
# made on a part of the texts.
_MAX_CHARACTER_PAIRS = 10_000_000_000
_MAX_WORD_PAIRS = 1_000_000_000
_MAX_BLEU_CHARACTERS = 200_000


@dataclass(frozen=True, kw_only=True)
class _Likeness(PlainScorer):
    """Base of the scorers here: the best value over the texts that a case accepts."""

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """Return the similarity of the answer and the nearest expected text; None when the case expects no text."""
        wanted = [] if case.expected is None else [as_text(item).strip() for item in alternatives(case.expected)]
        if not wanted:
            return None
        value = self._value((response.response_text or "").strip(), wanted)
        return self._graded(value, None if value >= self.threshold else f"{value:.3f} is below {self.threshold:g}")

    def _value(self, text: str, wanted: list[str]) -> float:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Similarity(_Likeness):
    """1 minus the Levenshtein distance over the longer text's length."""

    name: str = "similarity"
    threshold: float = 0.8
    ignore_case: bool = False

    def _check(self) -> None:
        check_flags(self, "ignore_case")
        need_extra("rapidfuzz", "text", "similarity")

    def _value(self, text: str, wanted: list[str]) -> float:
        from rapidfuzz.distance import Levenshtein

        texts = [unicodedata.normalize("NFC", item) for item in (text, *wanted)]
        answer, *others = [item.casefold() for item in texts] if self.ignore_case else texts
        for other in others:
            _refuse_beyond(_MAX_CHARACTER_PAIRS, answer, other, "characters")
        return max(Levenshtein.normalized_similarity(answer, other) for other in others)


@dataclass(frozen=True, kw_only=True)
class RougeL(_Likeness):
    """F1 of the longest common subsequence of words, whatever their case and punctuation.

    Chinese characters and kana count as one word each.
    """

    name: str = "rouge_l"
    threshold: float = 0.5

    def _value(self, text: str, wanted: list[str]) -> float:
        words = words_of(text)
        return max(_f1(words, words_of(other)) for other in wanted)


@dataclass(frozen=True, kw_only=True)
class Bleu(_Likeness):
    """sacrebleu's sentence BLEU (exponential smoothing, effective order), over 100; a list holds references."""

    name: str = "bleu"
    threshold: float = 0.5
    tokens: BleuTokens = "13a"
    ignore_case: bool = False

    def _check(self) -> None:
        check_choice("tokens", self.tokens, get_args(BleuTokens))
        check_flags(self, "ignore_case")
        need_extra("sacrebleu", "text", "bleu")

    def _value(self, text: str, wanted: list[str]) -> float:
        from sacrebleu import sentence_bleu

        length = max(map(len, (text, *wanted)))
        if length > _MAX_BLEU_CHARACTERS:
            raise ValueError(f"too long to compare: {length:,} characters, at most {_MAX_BLEU_CHARACTERS:,}")
        bleu = sentence_bleu(text, wanted, tokenize=self.tokens, lowercase=self.ignore_case)
        return min(max(bleu.score / 100, 0.0), 1.0)


def words_of(text: str) -> list[str]:
    """Return the words in lower case, without punctuation."""
    return unicodedata.normalize("NFC", text).casefold().translate(_SPACED).split()


def longest_common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """Return its length. An integer holds a row of the table as bits, so a row costs a few operations."""
    places: dict[str, int] = {}
    for index, word in enumerate(right):
        places[word] = places.get(word, 0) | 1 << index
    row = (1 << len(right)) - 1
    full = row
    for word in left:
        common = row & places.get(word, 0)
        if common:
            row = ((row + common) | (row - common)) & full
    return len(right) - row.bit_count()


def _f1(words: list[str], others: list[str]) -> float:
    if not words or not others:
        return float(words == others)
    _refuse_beyond(_MAX_WORD_PAIRS, words, others, "words")
    return 2 * longest_common_subsequence(words, others) / (len(words) + len(others))


def _refuse_beyond(limit: int, left: Sequence[str], right: Sequence[str], what: str) -> None:
    if left != right and len(left) * len(right) > limit:
        raise ValueError(f"too long to compare: {len(left):,} and {len(right):,} {what}")


class _Spaced(dict[int, int | str]):
    """A table for `str.translate`: punctuation becomes a space; ideographs and kana are set apart."""

    def __missing__(self, code: int) -> int | str:
        character = chr(code)
        if is_punctuation(character):
            self[code] = " "
        elif 0x3040 <= code <= 0x30FF or 0x3400 <= code <= 0x9FFF or 0xF900 <= code <= 0xFAFF or code >= 0x20000:
            self[code] = f" {character} "
        else:
            self[code] = code
        return self[code]


_SPACED = _Spaced()
