"""Patterns that users write, matched within a time limit.

Python's own `re` backtracks without end on a pattern such as `(a|aa)+$`, and holds the interpreter's lock meanwhile: no
timeout, no Ctrl-C and no other case gets a turn. The `regex` package takes a time limit and gives the lock up while it
matches. Its dialect is `re`'s with additions: `\\p{L}`, `[[:alpha:]]` and `\\h` mean classes here. The limit does not
cover compiling, so a pattern's length and its counted repetitions are bounded.
"""

from __future__ import annotations

from functools import lru_cache

import regex

from steelyard.errors import ConfigurationError, SteelyardError

PATTERNS_VERSION = 1
"""Part of the identity of scorers that match patterns: another engine reads some patterns differently."""
MATCH_SECONDS = 1.0
"""How long one match may take."""
MAX_PATTERN_LENGTH = 10_000
_MAX_SHOWN = 100


class PatternTimeout(SteelyardError):
    """A pattern that backtracked for longer than a match may take."""

    topic = "could-not-score"


class Pattern:
    """A compiled pattern; its searches raise PatternTimeout instead of running on."""

    def __init__(
        self,
        source: str,
        *,
        ignore_case: bool = False,
        multiline: bool = False,
        dotall: bool = False,
        verbose: bool = False,
        ascii_only: bool = False,
    ) -> None:
        self.source = source
        flags = (ignore_case, multiline, dotall, verbose, ascii_only)
        self._compiled = _compiled(source, *flags)

    def search(self, text: str) -> regex.Match[str] | None:
        """The first place in the text that matches, if any does."""
        try:
            return self._compiled.search(text, timeout=MATCH_SECONDS, concurrent=True)
        except TimeoutError:
            raise self._timeout(text) from None

    def last(self, text: str) -> regex.Match[str] | None:
        """The last place in the text that matches, if any does."""
        found = None
        try:
            for found in self._compiled.finditer(text, timeout=MATCH_SECONDS, concurrent=True):  # noqa: B007
                pass
        except TimeoutError:
            raise self._timeout(text) from None
        return found

    def fullmatch(self, text: str) -> regex.Match[str] | None:
        """The match of the whole text, if it matches."""
        try:
            return self._compiled.fullmatch(text, timeout=MATCH_SECONDS, concurrent=True)
        except TimeoutError:
            raise self._timeout(text) from None

    def _timeout(self, text: str) -> PatternTimeout:
        shown = self.source if len(self.source) <= _MAX_SHOWN else f"{self.source[:_MAX_SHOWN]}…"
        return PatternTimeout(
            f"the pattern {shown!r} ran for more than {MATCH_SECONDS:g} s on a text of {len(text):,} characters: "
            "it backtracks; write it without nested or overlapping repetition"
        )


@lru_cache(maxsize=512)
def _compiled(
    source: str, ignore_case: bool, multiline: bool, dotall: bool, verbose: bool, ascii_only: bool
) -> regex.Pattern[str]:
    if len(source) > MAX_PATTERN_LENGTH:
        raise ConfigurationError(f"a pattern of {len(source):,} characters is too long; at most {MAX_PATTERN_LENGTH:,}")
    flags = regex.VERSION0
    for wanted, flag in (
        (ignore_case, regex.IGNORECASE),
        (multiline, regex.MULTILINE),
        (dotall, regex.DOTALL),
        (verbose, regex.VERBOSE),
        (ascii_only, regex.ASCII),
    ):
        flags |= flag if wanted else 0
    try:
        return regex.compile(source, flags)
    except regex.error as error:
        raise ConfigurationError(f"{source[:_MAX_SHOWN]!r} is not a regular expression: {error}") from error
    except (OverflowError, RecursionError, MemoryError) as error:
        raise ConfigurationError(f"{source[:_MAX_SHOWN]!r} is too large a regular expression") from error
