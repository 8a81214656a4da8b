"""Scorers that compare text: exact, contains, regex."""

from __future__ import annotations

import string
import unicodedata
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from steelyard.errors import ConfigurationError
from steelyard.patterns import PATTERNS_VERSION, Pattern
from steelyard.protocols import Identity
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.base import PlainScorer, alternatives, as_text, check_choice, check_flags, shown, shown_any

UnicodeForm: TypeAlias = Literal["NFC", "NFKC"]

_FLAGS = {"a": "ascii_only", "i": "ignore_case", "m": "multiline", "s": "dotall", "x": "verbose"}


@dataclass(frozen=True, kw_only=True)
class Exact(PlainScorer):
    """Passes when the answer, stripped, is the expected text, or one of them when `expected` is a list."""

    name: str = "exact"
    ignore_case: bool = False
    ignore_whitespace: bool = False
    ignore_punctuation: bool = False
    unicode: UnicodeForm | None = "NFC"

    def _check(self) -> None:
        check_choice("unicode", self.unicode, ("NFC", "NFKC", None))
        check_flags(self, "ignore_case", "ignore_whitespace", "ignore_punctuation")

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """1.0 or 0.0; None when the case expects nothing."""
        if case.expected is None:
            return None
        answer = response.response_text or ""
        if type(case.expected) is str and answer == case.expected:  # most right answers: nothing to make alike
            return self._score(True)
        wanted = alternatives(case.expected)
        got = self._normal(answer)
        for item in wanted:
            if self._normal(as_text(item)) == got:
                return self._score(True)
        return self._score(False, f"expected {shown_any(wanted) or 'one of no texts'}, got {shown(answer.strip())}")

    def _normal(self, text: str) -> str:
        if self.unicode is not None and not text.isascii():
            text = unicodedata.normalize(self.unicode, text)
        if self.ignore_punctuation:
            text = text.translate(_WITHOUT_PUNCTUATION)
        if self.ignore_case:
            text = text.casefold()
        return " ".join(text.split()) if self.ignore_whitespace else text.strip()


@dataclass(frozen=True, kw_only=True)
class Contains(PlainScorer):
    """Passes when the answer holds the expected text, any (or `all`) of a list, and nothing of `not_contains`.

    With `whole_words`, a text is not found within a longer word or number: `cat` is not in `concatenate`.
    """

    name: str = "contains"
    ignore_case: bool = False
    whole_words: bool = False
    all: bool = False
    not_contains: str | list[str] | None = None

    def _check(self) -> None:
        check_flags(self, "ignore_case", "whole_words", "all")
        if not all(isinstance(text, str) and text for text in self._forbidden):
            raise ConfigurationError(f"not_contains must be a text or a list of texts, got {self.not_contains!r}")

    @cached_property
    def _forbidden(self) -> list[Any]:
        return [] if self.not_contains is None else alternatives(self.not_contains)

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """1.0 or 0.0; None when there is no text to look for."""
        if type(case.expected) is str and case.expected and not self._forbidden:  # the common case
            return self._one(case.expected, response.response_text or "")
        wanted = [] if case.expected is None else [as_text(item) for item in alternatives(case.expected)]
        if not wanted and not self._forbidden:
            return None
        if "" in wanted:
            raise ValueError("expected holds an empty text, which every answer contains")
        text = self._normal(response.response_text or "")
        for item in self._forbidden:
            if self._holds(text, item):
                return self._score(False, f"the answer contains {shown(item)}")
        missing = [item for item in wanted if not self._holds(text, item)]
        if not missing or (not self.all and len(missing) < len(wanted)):
            return self._score(True)
        return self._score(False, f"the answer does not contain {shown_any(missing)}")

    def _one(self, wanted: str, text: str) -> Score:
        """Score an answer that must contain one text."""
        if self._holds(self._normal(text), wanted):
            return self._score(True)
        return self._score(False, f"the answer does not contain {shown(wanted)}")

    def _holds(self, text: str, wanted: str) -> bool:
        """Whether a normalised text holds what is wanted."""
        wanted = self._normal(wanted)
        if not self.whole_words:
            return wanted in text
        start = text.find(wanted)
        while start >= 0:
            end = start + len(wanted)
            if not _runs_on(text, start) and not _runs_on(text, end):
                return True
            start = text.find(wanted, start + 1)
        return False

    def _normal(self, text: str) -> str:
        if not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True, kw_only=True)
class Regex(PlainScorer):
    """Passes when `pattern`, or else the case's expected as a pattern, is found in the stripped answer.

    A match has a time limit: a pattern such as `(a|aa)+$` that backtracks beyond it is a scoring error.
    """

    name: str = "regex"
    pattern: str | None = None
    flags: str = ""
    fullmatch: bool = False

    def _check(self) -> None:
        check_flags(self, "fullmatch")
        if not isinstance(self.flags, str) or not set(self.flags) <= set(_FLAGS):
            raise ConfigurationError(f"flags must be letters of {''.join(_FLAGS)!r}, got {self.flags!r}")
        if self.pattern is not None and not isinstance(self.pattern, str):
            raise ConfigurationError(f"pattern must be a text, got {self.pattern!r}")
        if self.pattern is not None:
            try:
                self._compile(self.pattern)
            except ConfigurationError as error:
                raise ConfigurationError(f"pattern {error}") from error

    def identity(self) -> Identity:
        """Its arguments, and which engine reads the patterns."""
        return {**super().identity(), "patterns": PATTERNS_VERSION}

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """1.0 or 0.0; None when neither the scorer nor the case has a pattern."""
        wanted = [self.pattern] if self.pattern is not None else alternatives(case.expected)
        if wanted == [None]:
            return None
        text = (response.response_text or "").strip()
        for item in wanted:
            pattern = self._compile(as_text(item))
            if pattern.fullmatch(text) if self.fullmatch else pattern.search(text):
                return self._score(True)
        return self._score(False, f"{shown(text)} does not match {shown_any(wanted)}")

    def _compile(self, pattern: str) -> Pattern:
        """Compile the pattern; it is cached."""
        return Pattern(pattern, **self._flags)

    @cached_property
    def _flags(self) -> dict[str, bool]:
        return {_FLAGS[letter]: True for letter in self.flags}


def _runs_on(text: str, position: int) -> bool:
    """Whether a word or number goes on across a position: no edge of a word is there, nor of `3.14` or `1,234`."""
    if not 0 < position < len(text):
        return False
    before, after = text[position - 1], text[position]
    if _in_word(before) and _in_word(after):
        return True
    if after in ".," and before.isdigit():
        return text[position + 1 : position + 2].isdigit()
    return before in ".," and after.isdigit() and text[position - 2 : position - 1].isdigit()


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_" or unicodedata.category(character)[0] == "M"


def is_punctuation(character: str) -> bool:
    """Whether it is punctuation in Unicode or in ASCII, which includes `$+<=>^|~` and the backtick."""
    return character in string.punctuation or unicodedata.category(character)[0] == "P"


class _WithoutPunctuation(dict[int, int | None]):
    """A table for `str.translate` that is filled as characters occur."""

    def __missing__(self, code: int) -> int | None:
        self[code] = None if is_punctuation(chr(code)) else code
        return self[code]


_WITHOUT_PUNCTUATION = _WithoutPunctuation()
