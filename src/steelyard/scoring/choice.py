"""The scorer for multiple choice, and how the chosen option is found in an answer."""

from __future__ import annotations

import re
import string
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from steelyard.protocols import Identity
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.base import PlainScorer, alternatives, shown

# A runaway answer is read from its end, where the final answer is: that bounds the time.
MAX_READ = 500_000

READER_VERSION = 2
"""Part of the scorer's identity: answers that another version read are scored again."""

_SHORT = 60
_NEAR = 40
"""Characters before a label that are looked at to tell whether it is asserted or denied."""
_CANDIDATES = 200
"""How many labels are looked at, from the end of an answer."""

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
_DENIED_BEFORE = re.compile(
    r"""(?: \b (?: not | never | nor | neither | than | unlike | without | over | instead \s of
              | eliminat(?:e[sd]? | ing) | rul(?:e[sd]? | ing) \s out
              | exclud(?:e[sd]? | ing) | discard(?:ing)? | reject(?:ing)? )
          | n['’]t ) \s+ (?: (?: be | option | choice | answer | both | either ) \s+ ){0,2}
        (?: [(*]{0,3} [A-Z] [)*]{0,3} \s (?: or | nor ) \s ){0,3} [(*"'`]{0,3} $""",
    re.VERBOSE | re.IGNORECASE,
)
_ASSERTED_BEFORE = re.compile(
    r"""(?: \b (?: is | was | be | think | believe | say | guess | so | thus | therefore | hence | leaves | leaving
              | means | correct | right | best | likely | probably ) | (?: it | that ) ['’]s | → | => ) [\s:,]{1,3}
        (?: (?: actually | clearly | definitely | probably | likely | most | indeed | really | rather | option | choice
              | answer | the | letter | it['’]s | it \s is | must | be ) [\s:,]{1,3} ){0,4} [(\[*"'`]{0,3} $""",
    re.VERBOSE | re.IGNORECASE,
)
_CORRECTION = re.compile(
    r"""\b (?: wait | actually | correction | scratch \s that | on \s second \s thought | oops | i \s was \s wrong
            | let \s me \s (?: reconsider | correct ) ) \b""",
    re.VERBOSE | re.IGNORECASE,
)
_LIST_ENDS = re.compile(r"[)\]*\"'’]{0,3}\s*(?:[.,;!?)\]]|or\b|and\b|\Z|\n)")
_LEADING_LINE = 200
_TAKEN_BACK = re.compile(r"(?i)\w+\W{1,3}no\b|[^\n]{0,40}\b(?:wrong|incorrect|not right)\b")
_NOT_DENIED = r"(?<! \b not \s ) (?<! n't \s ) (?<! n’t \s )"


@dataclass(frozen=True, kw_only=True)
class Choice(PlainScorer):
    """Passes when the answer settles on the expected option: its letter, its index from 0, or its text.

    The options' texts are read from the case's `metadata["choices"]`: a list, lettered from A, or a mapping.
    """

    name: str = "choice"

    def identity(self) -> Identity:
        """Its arguments, and how answers are read."""
        return {**super().identity(), "reader": READER_VERSION}

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """Return 1.0 or 0.0, also where the answer settles on none; None when the case expects nothing."""
        if case.expected is None:
            return None
        options = options_of(case.metadata.get("choices"))
        wanted = [_label(item, options) for item in alternatives(case.expected)]
        text = response.response_text or ""
        try:
            got = read_choice(text, options)
        except UnreadableChoice as error:
            return self._score(False, f"unreadable: {error}: {shown(text)}")
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
        named = [label for label, option in options.items() if _words_of(option) == _words_of(text)]
        if named and _words_of(text):
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
        joined = rf"""(?: \s? (?: , | & | / | \b and \b | \b or \b ) \s? (?: (?:and|or|option) \s )?
                          [(*]{{0,3}} (?:{label}) [)*]{{0,3}} )"""
        self.denied_after = _compiled(
            rf"""[)\]*_`"'”.]{{0,3}} {joined}{{0,5}} \s?
                 (?: [,;]? \s? (?: but | which ) \b [^.\n]{{0,40}} \b (?: wrong | incorrect | mistake )
                   | \b (?: is | are | was | were | seems? | looks? | sounds? | would \s be | being ) \s
                     (?: (?: all | both | also | clearly | simply | just | a | an | the ) \s ){{0,3}}
                     (?: wrong | incorrect | false | not | out | impossible | invalid | mistake | distractor | tempting
                       | common | unlikely | irrelevant | ruled | eliminated | excluded | implausible | mistaken ) \b
                   | \b (?: isn | aren | wasn | doesn | don | can | couldn | won ) ['’]t \b | \b can \s? not \b
                   | \b (?: does | do | is | are ) \s not \b | \b (?: fails? | contradicts? | violates? ) \b )"""
        )
        self.asserted_after = _compiled(
            r"""[)\]*_`"'”]{0,3} \s (?: because | since | as \s
                  | (?: is | was | seems | looks | would \s be | fits | must \s be ) \s
                    (?: (?: the | clearly | most | indeed | definitely | only | likely | therefore ) \s ){0,3}
                    (?: correct | right | best | true | answer | accurate | option | one | choice ) \b )"""
        )
        self.another = _compiled(
            rf"""[)\]*_`"'”.]{{0,3}} \s? (?: (?P<comma> , | & | / ) | \b (?: or | and | and/or ) \b ) \s?
                 (?: (?: or | and | maybe | perhaps | possibly | option | choice | even ) \s ){{0,2}} [(\[*"'`]{{0,3}}
                 (?P<label> {label} ) (?! \w | ['’]\w ) (?! (?<= [AI] ) \s [a-z] )"""
        )
        self.or_leading = _compiled(rf"\b or \s [(*]{{0,3}} (?P<label> {label} ) [).:*]")
        self.bare = _compiled(
            rf"""(?<! [\w'’.&/-] ) {_NOT_DENIED}
                 (?: (?P<label> (?! [AI]\b ) (?: {label} ) | (?<= ption \s ) (?: {label} ) )
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


class UnreadableChoice(ValueError):
    """An answer that names several options and settles on none, or takes back the one it named."""


def final_choice(text: str, options: Mapping[str, str]) -> str | None:
    """Return the label of the option that a text settles on; None when it settles on none."""
    try:
        return read_choice(text, options)
    except UnreadableChoice:
        return None


def read_choice(text: str, options: Mapping[str, str]) -> str | None:
    """Return the label of the option that a text settles on; None when it names none."""
    text = text.strip()[-MAX_READ:]
    patterns = _patterns(tuple(options) or tuple(string.ascii_uppercase))
    alone = _alone(text, patterns) or _alone(text[text.rfind("\n") + 1 :], patterns)
    stated = _last_match(patterns.boxed, text) or (None if alone else _last_match(patterns.stated, text))
    corrected = None if alone else _corrected(text, stated.end() if stated else 0, patterns)
    if corrected is not None:
        return corrected
    boxed = stated if stated is not None and stated.re is patterns.boxed else None
    return (
        _label_of(boxed)
        or alone
        or _exact_words(text, options)
        or (_label_of(stated) if stated is None or _is_single(text, stated, patterns) else None)
        or _stated_words(text, options)
        or _alone(text.partition("\n")[0], patterns)
        or _leading(text, patterns)
        or _mentioned(text, patterns)
        or _named(text, options)
    )


def _corrected(text: str, start: int, patterns: _Patterns) -> str | None:
    """Find the label that a text puts in place of an earlier one: `Wait, no. Actually it is D`."""
    cue = _CORRECTION.search(text, start)
    if cue is None:
        return None
    asserted = [match for match in _candidates(text, cue.end(), patterns) if _is_asserted(text, match, patterns)]
    if asserted and _is_single(text, asserted[-1], patterns):
        return _label_of(asserted[-1])
    if start and _TAKEN_BACK.match(text, cue.start()):
        raise UnreadableChoice("the answer is taken back")
    return None


def _mentioned(text: str, patterns: _Patterns) -> str | None:
    """Find the label that is asserted last (`it's B`, `B is correct`), else the only one that is not denied."""
    candidates = _candidates(text, 0, patterns)
    asserted = [match for match in candidates if _is_asserted(text, match, patterns)]
    if asserted and _is_single(text, asserted[-1], patterns):
        return _label_of(asserted[-1])
    wrapped = [match for match in _last_matches(patterns.wrapped, text) if not _is_denied(text, match, patterns)]
    for matches in (wrapped, candidates):
        labels = list(dict.fromkeys(_label_of(match) or "" for match in matches))
        if len(labels) == 1:
            return labels[0]
        if labels:
            raise UnreadableChoice(f"it names {', '.join(labels[:5])} and settles on none")
    return None


def _candidates(text: str, start: int, patterns: _Patterns) -> list[re.Match[str]]:
    return [match for match in _last_matches(patterns.bare, text, start) if not _is_denied(text, match, patterns)]


def _is_denied(text: str, match: re.Match[str], patterns: _Patterns) -> bool:
    """Whether a label is said to be wrong: `not A`, `rather than A`, `A is wrong`, `A and B are wrong`."""
    start, end = _span_of(match)
    before = _DENIED_BEFORE.search(text, max(0, start - _NEAR), start)
    return before is not None or patterns.denied_after.match(text, end) is not None


def _is_asserted(text: str, match: re.Match[str], patterns: _Patterns) -> bool:
    start, end = _span_of(match)
    before = _ASSERTED_BEFORE.search(text, max(0, start - _NEAR), start)
    return before is not None or patterns.asserted_after.match(text, end) is not None


def _is_single(text: str, match: re.Match[str], patterns: _Patterns) -> bool:
    """Whether a label is not followed by another one that would do as well; UnreadableChoice when it is."""
    other = patterns.another.match(text, _span_of(match)[1])
    if other is None or other["label"] == _label_of(match) or _is_denied(text, other, patterns):
        return True
    if other["comma"] and not _LIST_ENDS.match(text, other.end()):
        return True
    raise UnreadableChoice(f"it names {_label_of(match)} and {other['label']}")


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


def _last_matches(pattern: re.Pattern[str], text: str, start: int = 0) -> Iterable[re.Match[str]]:
    return deque(pattern.finditer(text, start), maxlen=_CANDIDATES)


def _span_of(match: re.Match[str]) -> tuple[int, int]:
    """Where the label itself is."""
    name = next(name for name, value in match.groupdict().items() if value and name != "comma")
    return match.span(name)


def _label_of(match: re.Match[str] | None) -> str | None:
    return None if match is None else match.string[slice(*_span_of(match))].upper()


def _alone(text: str, patterns: _Patterns) -> str | None:
    """Find a label with nothing but punctuation around it."""
    match = patterns.alone.fullmatch(text) if len(text) < _SHORT else None
    return None if match is None else match["label"].upper()


def _exact_words(text: str, options: Mapping[str, str]) -> str | None:
    """Find the option whose text is the whole answer."""
    words = _words_of(text) if options else ""
    return next((label for label, option in options.items() if words and _words_of(option) == words), None)


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
    if len(found) != 1:
        return None
    label = found.pop()
    if (other := patterns.or_leading.search(text[:_LEADING_LINE])) and other["label"] != label:
        raise UnreadableChoice(f"it names {label} and {other['label']}")
    return label


def _named(text: str, options: Mapping[str, str]) -> str | None:
    """Find the only option whose words occur in the text; None when there are none or several."""
    plain = f" {_words_of(text)} "
    spelled = {label: _words_of(option) for label, option in options.items()}
    named = {label: words for label, words in spelled.items() if words and f" {words} " in plain}
    # `New York` also names `York`: an option within another that is named does not count.
    outer = [
        label
        for label, words in named.items()
        if not any(other != words and f" {words} " in f" {other} " for other in named.values())
    ]
    return outer[0] if len(outer) == 1 else None


def _words_of(text: str) -> str:
    """Return the words only, in lower case, one space between them."""
    return " ".join(re.findall(r"\w+", text.casefold()))
