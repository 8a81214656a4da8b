"""The scorer for multiple choice, and how the chosen option is found in an answer."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.base import PlainScorer, alternatives, shown

# A runaway answer is read from its end, where the final answer is: that bounds the time.
MAX_READ = 500_000

_SHORT = 60

_OPEN = r"""(?: [\s*_`"'“\u2018«(\[<{$:] | \\(?:text|textbf|textrm|mathrm|mathbf|boxed|left|,|\() \s? ){0,12}+"""
_MARKS = r"""[\s*_:：=\-"'’,]{0,12}+"""
# Words that may follow a label; before any other word, `A` is an article and `I` a pronoun.
_AFTER = r"""(?: because | since | as | due | for | and | or | is | given | based | which | with | from | by | in
               | option | choice | would | will | must | according )"""
_SAYS = r"""(?: is | are | was | be | would | should | must | will | has | to | also | likely | most | probably
              | clearly | definitely | therefore | thus | then | indeed | simply | actually | letter | option | choice
              | answer | number | the | correct | best | final | ist | est | es | è | é )"""
_NAMES_ANSWER = r"""(?: answer | answers | antwort | réponse | respuesta | resposta | risposta | choose | select
                      | selected | pick | picked | go \s with | going \s with | opt \s for
                      | (?: option | choice )
                        (?= [*_]{0,3} \s? (?: : | = | \s (?: is | was | would | should | must ) \b ) ) )"""
_ANSWER_IS = re.compile(r"(?i)\banswer\b[*_]{0,3}(?:\s{1,3}is\b|\s?:)")
_NOT_DENIED = r"(?<! \b not \s ) (?<! n't \s ) (?<! n’t \s )"


@dataclass(frozen=True, kw_only=True)
class Choice(PlainScorer):
    """Passes when the answer settles on the expected option: its letter, its index from 0, or its text.

    The options' texts are read from the case's `metadata["choices"]`: a list, lettered from A, or a mapping.
    """

    name: str = "choice"

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """Return 1.0 or 0.0; None when the case expects nothing."""
        if case.expected is None:
            return None
        options = options_of(case.metadata.get("choices"))
        wanted = [_label(item, options) for item in alternatives(case.expected)]
        text = response.response_text or ""
        got = final_choice(text, options)
        if got is None:
            return self._score(False, f"no choice in {shown(text)}")
        return self._score(got in wanted, f"expected {' or '.join(wanted)}, got {got}")


def _label(expected: object, options: Mapping[str, str]) -> str:
    """Return the label of an expected value; ValueError when it is none of the options."""
    labels = list(options) or list(string.ascii_uppercase)
    if isinstance(expected, int) and not isinstance(expected, bool) and str(expected) not in options:
        if 0 <= expected < len(labels):
            return labels[expected]
    else:
        text = str(expected)
        bare = text.strip().strip("().[]*: ").upper()
        if bare in labels:
            return bare
        named = [label for label, option in options.items() if words_of(option) == words_of(text)]
        if named and words_of(text):
            return named[0]
    raise ValueError(f"expected {shown(expected)} is none of the choices: {', '.join(labels)}")


class _Patterns:
    """Compiled patterns that find the labels of one question."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        letters = "".join(label for label in labels if len(label) == 1)
        longer = [re.escape(label) for label in labels if len(label) > 1]
        label = "|".join([*longer, f"[{re.escape(letters)}]" if letters else "(?!)"])
        either = f"(?i:{label})"
        self.boxed = _compiled(rf"\\boxed \s? {{ {_OPEN} (?P<label> {either} ) (?! \w )")
        self.alone = _compiled(rf"{_OPEN} (?P<label> {either} ) (?: [\s*_`\"'”’»)\]>}}$.,:;!-] | \\\) )*+")
        self.leading = _compiled(
            rf"{_OPEN} (?P<label> {either} ) [*_`\"'”]{{0,3}} (?: [)\]:] | \.(?=\s) | \s?[-–—](?=\s) )"
        )
        self.stated = _compiled(
            rf"""(?: \b (?i: {_NAMES_ANSWER} ) \b | 答案 | 答え )
                 (?: {_MARKS} (?: \b (?i: {_SAYS} ) \b | 是 | 为 | は | 选 ) ){{0,5}}+ {_MARKS} {_OPEN}
                 (?: (?P<label> {label} ) (?! \w | ['’]\w ) (?! \s (?! (?i: {_AFTER} ) \b ) [a-z] )
                   | (?P<small> {either} ) (?= \s? (?: [.,;!)\]}}*_`"'”<$\n] | $ ) ) (?! ['’]\w ) )"""
        )
        self.wrapped = _compiled(
            rf"{_NOT_DENIED} (?: \( | \*\* \(? | \[ | ` ) (?P<label> {label} ) (?: \) | [).:]? \*\* | \] | ` )"
        )
        self.bare = _compiled(
            rf"""(?<! [\w'’.&/-] ) {_NOT_DENIED}
                 (?: (?P<label> (?! [AI]\b ) (?: {label} ) )
                   | (?P<article> (?= [AI]\b ) (?: {label} ) )
                     (?= \s? (?: [.,;:!?)*\n(–—-] | $ ) | \s (?i: {_AFTER} ) \b ) )
                 (?! [\w&/-] | ['’.]\w )"""
        )


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.VERBOSE)


@lru_cache(maxsize=64)
def _patterns(labels: tuple[str, ...]) -> _Patterns:
    return _Patterns(labels)


def options_of(choices: object) -> dict[str, str]:
    """Return labels and texts of a question's options: a list is lettered from A, a mapping has its own labels."""
    if choices is None:
        return {}
    if isinstance(choices, Mapping):
        return {str(label).strip().upper(): str(text) for label, text in choices.items()}
    if isinstance(choices, list) and len(choices) <= len(string.ascii_uppercase):
        return {string.ascii_uppercase[index]: str(text) for index, text in enumerate(choices)}
    raise ValueError(f"choices must be a list of at most 26 options or a mapping, got {type(choices).__name__}")


def final_choice(text: str, options: Mapping[str, str]) -> str | None:
    """Return the label of the option that a text settles on; None when it settles on none."""
    text = text.strip()[-MAX_READ:]
    patterns = _patterns(tuple(options) or tuple(string.ascii_uppercase))
    return (
        _last_label(patterns.boxed, text)
        or _alone(text, patterns)
        or _alone(text[text.rfind("\n") + 1 :], patterns)
        or _exact_words(text, options)
        or _last_label(patterns.stated, text)
        or _stated_words(text, options)
        or _alone(text.partition("\n")[0], patterns)
        or _leading(text, patterns)
        or _last_label(patterns.wrapped, text)
        or _last_label(patterns.bare, text)
        or _named(text, options)
    )


def _last_label(pattern: re.Pattern[str], text: str) -> str | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return None if last is None else next(group for group in last.groups() if group).upper()


def _alone(text: str, patterns: _Patterns) -> str | None:
    """Find a label with nothing but punctuation around it."""
    match = patterns.alone.fullmatch(text) if len(text) < _SHORT else None
    return None if match is None else match["label"].upper()


def _exact_words(text: str, options: Mapping[str, str]) -> str | None:
    """Find the option whose text is the whole answer."""
    words = words_of(text) if options else ""
    return next((label for label, option in options.items() if words and words_of(option) == words), None)


def _stated_words(text: str, options: Mapping[str, str]) -> str | None:
    """Find the option whose words follow the last `the answer is`."""
    last = None
    for match in _ANSWER_IS.finditer(text) if options else ():
        last = match
    return None if last is None else _named(text[last.end() : last.end() + 300].partition("\n")[0], options)


def _leading(text: str, patterns: _Patterns) -> str | None:
    """Find `B) Paris` at the start of the answer or of its last line, unless the two disagree."""
    starts = (text[:_SHORT], text[text.rfind("\n") + 1 :][:_SHORT])
    found = {match["label"].upper() for start in starts if (match := patterns.leading.match(start))}
    return found.pop() if len(found) == 1 else None


def _named(text: str, options: Mapping[str, str]) -> str | None:
    """Find the only option whose words occur in the text; None when there are none or several."""
    plain = f" {words_of(text)} "
    named = {label: words for label, option in options.items() if (words := words_of(option)) and f" {words} " in plain}
    # `New York` also names `York`: an option within another that is named does not count.
    outer = [
        label
        for label, words in named.items()
        if not any(other != words and f" {words} " in f" {other} " for other in named.values())
    ]
    return outer[0] if len(outer) == 1 else None


def words_of(text: str) -> str:
    """Return the words only, in lower case, one space between them."""
    return " ".join(re.findall(r"\w+", text.casefold()))
