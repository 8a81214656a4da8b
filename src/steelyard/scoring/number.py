"""The scorer that compares the final number of an answer, and how that number is found and read."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cache, cached_property
from typing import Any, Literal

from steelyard.protocols import Identity
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.base import PlainScorer, alternatives, check_choice, check_number, shown

READER_VERSION = 2
"""Part of the scorer's identity: answers that another version read are scored again."""

# Tolerates float rounding such as 0.30000000000000004 for 0.3. Whole numbers are compared exactly.
_ROUNDING = Decimal("1e-12")

# A runaway answer is read from its end, where the final answer is: that bounds the time.
MAX_READ = 500_000
_FIRST_WINDOW = 4_000
_SEGMENT = 200
_MARKERS = 50

_EXACT = Context(prec=60)
_PLAIN = re.compile(r"-?[0-9]{1,300}(?:\.[0-9]{1,300})?")
_ALONE = re.compile(r"(?<![^\W_])(-?[0-9]{1,15}(?:\.[0-9]{1,15})?)[.!]?\s{0,20}")
"""A whole statement, as in `the answer is 18.`: found faster than by the pattern for any number."""
_MINUS = "-−–"
_VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_HAS_DIGIT = re.compile(rf"[\d{_VULGAR}]")

_NUMBER = rf"""
    (?<![^\W_]) (?<!\d\.)                       # not within a word, nor a later part of 1.2.3
    (?P<sign> [-+−–]? ) (?: \\?[$€£¥₹₩₽] \s? )? (?P<inner_sign> [-+−]? )
    (?:
      (?: (?P<latex_whole> \d++ ) \s? )? \\[dtc]?frac
        (?: \s? {{ \s? (?P<latex_top> [-−]? \d++ ) \s? }} \s? {{ \s? (?P<latex_bottom> \d++ ) \s? }}
          | (?P<short_top> \d ) (?P<short_bottom> \d ) )
    | (?: (?P<vulgar_whole> \d++ ) \s? )? (?P<vulgar> [{_VULGAR}] )
    | (?<! / ) (?: (?P<whole> \d++ ) [ \u00a0\u202f] )? (?P<top> \d++ ) [/⁄] (?P<bottom> \d++ ) (?! [/.] \d )
    | (?P<mantissa>
        (?P<commas> [1-9] \d{{0,2}} (?: (?: , \d{{2}} ){{1,6}} , \d{{3}} (?!\d) | (?: , \d{{3}} (?!\d) )++ )
              (?: \. \d++ )? )                                                   # 1,234.56 and 1,23,456
        | (?P<spaces> [1-9] \d{{0,2}} (?P<gap> ['’_ \u00a0\u2009\u202f] ) \d{{3}} (?!\d)
              (?: (?P=gap) \d{{3}} (?!\d) )*+ (?: [.,] \d++ )? )                 # 1 234,56 and 1'234.56
        | (?P<dots> [1-9] \d{{0,2}} \. \d{{3}} (?!\d)
              (?: (?: \. \d{{3}} (?!\d) )++ (?: , \d++ )? | , \d++ ) )           # 1.234,56 and 1.234.567
        | (?P<comma> (?<! \d, ) \d++ , \d++ (?! [,.]? \d ) )                   # 3,14
        | (?P<power> 10 (?= \^ | \*\* | [⁰¹²³⁴-⁹⁺⁻] ) )                        # 10^6, without a mantissa
        | (?P<plain> \d++ (?: \. \d++ )? | \. \d++ ) )
      (?: [eE] (?P<exponent> [-+−]? \d{{1,4}} ) (?! \w )
        | (?(power) | \s? (?: [x×*·⋅] | \\times | \\cdot ) \s? 10 ) \s?
          (?: (?: \^ | \*\* ) \s? {{? \s? (?P<caret> [-+−]? \d{{1,4}} ) (?! \d ) \s? }}?
            | (?P<raised> [⁺⁻]? [⁰¹²³⁴-⁹]{{1,4}} ) ) )?
    )
    (?P<percent> \s? (?: \\? % | per \s? cent\b ) )?
"""

_MARKER = r"""
    (?: \#\#\#\# \s? (?= [-+−$€£\\.\d½⅓⅔¼¾] [^\n]{0,40} $ ) (?! \d{1,3} [.):] \s )    # not the heading `#### 2. Next`
      | (?P<boxed> \\ boxed \s? \{ )
      | ^ [ \t*_>]{0,8} A [*_]{0,3} :
      | \b (?i: answer | result | antwort | réponse | respuesta | resposta | risposta ) [*_"'’)]{0,4}
        (?: \s (?i: to | for | of ) \s [^\n.:=]{1,60}? )? \s{0,3}
        (?: [:：=] | \b (?i: is | would \s be | should \s be | equals | comes \s to | ist | est | es | è | é ) \b
          | (?= [*_ ]{0,4} \n ) )
      | (?: 答案 | 答え ) (?: 是 | 为 | は )? [:：]?
    ) [\s*_:=\#]{0,20}
"""


_CONTEXT = 60
_NEAR = 32
"""Characters before a number that are looked at to tell what it is part of; fractions and brackets need more."""
_CANDIDATES = 200
"""How many numbers are looked at, from the end, for one that is not denied."""
_FUNCTIONS = "sqrt | pi | infty | ln | log | sin | cos | tan | binom"
_ASIDE = re.compile(
    r"""(?: (?: \b (?: not | never | neither | nor | rather \s than | instead \s of ) | n['’]t ) \s+
            (?: (?: exactly | simply | just | actually | equal \s to | be | the | number ) \s+ ){0,2} [*_$("'“]{0,4}
          | (?: ≠ | != | \\neq? ) \s*
          | [A-Za-z}] _ \{? | \\ (?: text | mathrm ) \s? \{ [^{}]* \} \s? \^ \{?
          | [A-Za-z\xb0] \^ \{? ) $ """,
    re.VERBOSE | re.IGNORECASE,
)
"""What precedes a number that is no candidate: a denial, a subscript, the power of a unit or a variable."""
_GOES_ON = re.compile(
    rf"""\s* (?: \^ (?! \s* \{{? \s* (?: \\circ | ° ) ) | \*\* (?= [-−]? \d ) )
      | [⁰¹²³⁴-⁹⁺⁻]
      | \s* (?: (?: \\cdot | \\times | [*·×⋅] ) \s* )?
        (?: \\ (?: {_FUNCTIONS} ) (?! [A-Za-z] ) | [√π∞] | sqrt \s? \( | pi \b )
      | i (?! \w )
      | : (?= \d )""",
    re.VERBOSE,
)
"""What makes a number only the beginning of what is written: `2^{10}`, `2\\sqrt{3}`, `3\\pi`, `4i`, `3:30`."""
_BEGAN_BEFORE = re.compile(
    r"""(?: \\sqrt (?: \[ [^\]]{0,9} \] )? \s* \{? \s* | \\sqrt \[ | [√∛] \s? \(? | \b sqrt \s? \( | \b sqrt \s
          | [\d)}eπ] \s? \^ \s? [{(]? \s* | [\d)] \*\* | \\ (?: pm | mp | le | ge | leq | geq | lt | gt ) \s* | ± \s?
          | [\w)}$] \s? [<>≤≥] =? \s*
          | \\ log _ \{? \d+ \}? \s* | \\ (?: log | ln | sin | cos | tan | binom | pi ) \b [\s{(_+-]*
          | \d : | [A-Za-z)}π] / | \d \s? [+×÷·] \s? | \d \s [*x] \s | \d \*
          | [)}π] \s? [+*·×] \s? | \\ (?: cdot | times ) \s* ) $ """,
    re.VERBOSE,
)
"""What makes a number only the end of what is written: `\\sqrt{3`, `2^{10`, `\\pi/4`, `x > 5`, `3 + 4`."""
_IN_FRACTION = re.compile(
    r"""\\ [dtc]?frac \s* (?: \{ (?: [^{}] | \{ [^{}]* \} ){0,40} \} \s* )? \{ (?: [^{}] | \{ [^{}]* \} ){0,40} $""",
    re.VERBOSE,
)
_SYMBOL_BEFORE = re.compile(r"(?:[}π]|\\pi)\s*$")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>$")
_OPENED = re.compile(r"[(\[]([^()\[\]\n]*)$")
_CLOSED = re.compile(r"([\d\s,.+\-−/\\{}a-z$]*)[)\]]")
_JOINED = re.compile(
    r"""[*_$)"'”]{0,3} \s*
        (?: (?: or | and/or | to | and ) \s+ (?= [-−$\d½⅓⅔¼¾.\\] ) | [-–—] \s? (?= [\d$] ) | \s [-−] \s (?= \d )
          | [+×÷·*] \s? (?= \d ) | \\ (?: cdot | times | div ) \s* (?= \d )
          | (?P<list> , \s* (?: and \s | or \s )? (?= [-−]? \d ) ) )""",
    re.VERBOSE,
)
_LIST_ENDS = re.compile(r"\s*(?:[.,;)\]$]|and\b|or\b|\Z|\n)")
_BETWEEN = re.compile(r"\bbetween\s+[*_$]{0,3}$", re.IGNORECASE)
_HEDGED = re.compile(
    r"""(?: (?<! [\w.] ) ( [-−]? [$€£]? \d [\d.,]* ) [*_$]{0,3} (?: \s+ or \s+ | (?P<range> [-–] ) ) [*_$]{0,3}
          | \b between \s+ ( [^\n]{1,20}? ) \s+ and \s+ [*_$]{0,3} ) $ """,
    re.VERBOSE | re.IGNORECASE,
)
_IN_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s?\{[^{}]*$")
_SEPARATOR = re.compile(r"[,;]|\b(?:or|and)\b")
_CORRECTION = re.compile(r"(?i)\b(?:wait|actually|correction|scratch that|oops|on second thought|i made an? \w{5,7})\b")
_STATES = re.compile(r"(?i)(?:\b(?:is|be|equals|get|answer|to)|['’]s|=|:)\s+(?:the\s+|actually\s+)?[*_$\\({]{0,4}$")
_RETRACTED = re.compile(r"(?i)\w+\W{1,3}no\b|[^\n]{0,30}\b(?:wrong|incorrect|not right)\b")


@dataclass(frozen=True, kw_only=True)
class Number(PlainScorer):
    """Passes when the final number of the answer is the expected one, within `tolerance` or `relative_tolerance`.

    With `percent="keep"` 18% is 18, with "fraction" it is 0.18, in the answer and in the expected text alike.
    """

    name: str = "number"
    tolerance: float = 0.0
    relative_tolerance: float = 0.0
    percent: Literal["keep", "fraction"] = "keep"

    def _check(self) -> None:
        check_number("tolerance", self.tolerance)
        check_number("relative_tolerance", self.relative_tolerance)
        check_choice("percent", self.percent, ("keep", "fraction"))

    def identity(self) -> Identity:
        """Its arguments, and how answers are read."""
        return {**super().identity(), "reader": READER_VERSION}

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """Return 1.0 or 0.0, also where the answer cannot be read; None when the case expects nothing."""
        if case.expected is None:
            return None
        text = response.response_text or ""
        if text == case.expected and is_plain(text):  # the common right answer: no parsing needed
            return self._score(True)
        wanted = [self._expected(item) for item in alternatives(case.expected)]
        try:
            got = self._read(text)
        except UnreadableNumber as error:
            return self._score(False, f"unreadable: {error}: {shown(text)}")
        if got is None:
            return self._score(False, f"no number in {shown(text)}")
        if any(self._close(item, got) for item in wanted):
            return self._score(True)
        return self._score(False, f"expected {' or '.join(map(_shown_number, wanted[:3]))}, got {_shown_number(got)}")

    def _expected(self, item: Any) -> Decimal:
        try:
            value = as_decimal(item) if not isinstance(item, str) else self._read(item)
        except UnreadableNumber as error:
            raise ValueError(f"expected is no plain number ({error}): {shown(item)}") from error
        if value is None:
            raise ValueError(f"expected holds no number: {shown(item)}")
        return value

    def _read(self, text: str) -> Decimal | None:
        return read_number(text, percent_as_fraction=self.percent == "fraction")

    def _close(self, wanted: Decimal, got: Decimal) -> bool:
        return close(wanted, got, *self._tolerances)

    @cached_property
    def _tolerances(self) -> tuple[Decimal, Decimal]:
        return Decimal(repr(self.tolerance)), Decimal(repr(self.relative_tolerance))


def _shown_number(number: Decimal) -> str:
    """Format a number with twelve digits; a short one is returned unchanged, which is much faster."""
    text = str(number)
    return text if len(text) <= 12 and text.isdecimal() else f"{number:.12g}"


def as_decimal(value: object) -> Decimal | None:
    """Return a JSON number exactly as written; None for anything that is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    exact = Decimal(value) if isinstance(value, int) else Decimal(repr(value))
    return exact if exact.is_finite() else None


def close(wanted: Decimal, got: Decimal, tolerance: Decimal, relative_tolerance: Decimal) -> bool:
    """Whether two numbers are equal within the tolerances and float rounding."""
    if wanted == got:
        return True
    if not tolerance and not relative_tolerance and abs(wanted - got) >= 1 > abs(wanted) * _ROUNDING:
        return False  # the common wrong answer: off by 1 or more
    whole = wanted == wanted.to_integral_value() and got == got.to_integral_value()
    relative = relative_tolerance if whole else max(relative_tolerance, _ROUNDING)
    return abs(wanted - got) <= max(tolerance, relative * abs(wanted))


@cache
def _number() -> re.Pattern[str]:
    """Compile when first needed: it takes longer than importing the rest of the package."""
    return re.compile(_NUMBER, re.VERBOSE)


@cache
def _marker() -> re.Pattern[str]:
    return re.compile(_MARKER, re.VERBOSE | re.MULTILINE)


def is_plain(text: str) -> bool:
    """Whether a text is only a number in digits."""
    return _PLAIN.fullmatch(text) is not None


class UnreadableNumber(ValueError):
    """An answer whose final number is part of something else, or one of several: taking it would be a guess."""


def final_number(text: str, *, percent_as_fraction: bool = False) -> Decimal | None:
    """Return a text's final number; None when it has none or it cannot be read."""
    try:
        return read_number(text, percent_as_fraction=percent_as_fraction)
    except UnreadableNumber:
        return None


def read_number(text: str, *, percent_as_fraction: bool = False) -> Decimal | None:
    """Return a text's final number: after its last answer marker, else its last number; None when it has none."""
    text = text.strip()
    if _PLAIN.fullmatch(text):
        return Decimal(text)
    text = _without_latex_gaps(text[-MAX_READ:])
    if not _HAS_DIGIT.search(text):
        return None
    found = _marked(text) or _last(text)
    if found is None:
        return None
    return Decimal(found[1]) if found.re is _ALONE else _value(found, percent_as_fraction)


def _without_latex_gaps(text: str) -> str:
    r"""Replace the separators of `1{,}234` and `1\,234` by plain ones."""
    if "\\" in text or "{,}" in text:
        return text.replace("{,}", ",").replace("\\,", "\u2009").replace("\\!", "")
    return text


def _marked(text: str) -> re.Match[str] | None:
    """Find the number after the last marker that has one, unless the text corrects it afterwards."""
    for marker in reversed(deque(_marker().finditer(text), maxlen=_MARKERS)):
        end = min(marker.end() + _SEGMENT, len(text))
        if marker["boxed"]:
            end = _closing_brace(text, marker.end(), end)
        elif (line_end := text.find("\n", marker.end(), end)) >= 0:
            end = line_end
        if match := _stated(text, marker.end(), end, boxed=bool(marker["boxed"])):
            return _corrected(text, match)
    return None


def _stated(text: str, start: int, end: int, *, boxed: bool) -> re.Match[str] | None:
    """Find the number after a segment's last `=`, else its first: `the answer is 3 + 4 = 7`, `18 of the 20`."""
    if alone := _ALONE.fullmatch(text, start, end):
        return alone
    numbers = _numbers(text, start, end)
    if boxed and numbers:
        return _only_boxed(text, start, end, numbers)
    equals = text.rfind("=", start, end)
    found = next((match for match in numbers if match.start() > equals), None) if equals >= 0 else None
    found = found or next(iter(numbers), None)
    if found is None:
        if denied := next(_number().finditer(text, start, end), None):
            raise UnreadableNumber(f"it only says what the answer is not ({denied[0].strip()})")
        return None
    _check_not_part(text, found)
    _check_not_several(text, found, end)
    return found


def _only_boxed(text: str, start: int, end: int, numbers: list[re.Match[str]]) -> re.Match[str]:
    """The number of a box: `x = 5` and `18\\text{ km}` have one, `3, 4` and `2x + 3` several."""
    equals = max(text.rfind("=", start, end), text.rfind("\\approx", start, end))
    tail = [match for match in numbers if match.start() > equals]
    found = tail[0] if tail else numbers[0]
    _check_not_part(text, found)
    outside = [match for match in tail[1:] if not _IN_TEXT.search(text, start, match.start())]
    listed = equals >= 0 and _SEPARATOR.search(text, start, equals) and len(numbers) > len(tail)
    if outside or listed:
        raise UnreadableNumber("the box holds several numbers")
    return found


def _corrected(text: str, match: re.Match[str]) -> re.Match[str]:
    """The number, or the one that a later `Wait, no: it is 6` puts in its place."""
    cues = deque(_CORRECTION.finditer(text, match.end()), maxlen=1)
    if not cues:
        return match
    cue = cues[0]
    later = _numbers(text, cue.end(), min(len(text), cue.end() + _SEGMENT))
    stated = [number for number in later if _STATES.search(text, cue.start(), number.start())]
    if stated:
        _check_not_part(text, stated[-1])
        _check_not_several(text, stated[-1], len(text))
        return stated[-1]
    if _RETRACTED.match(text, cue.start()):
        raise UnreadableNumber("the answer is taken back")
    return match


def _numbers(text: str, start: int, end: int) -> list[re.Match[str]]:
    """The numbers of a segment that count: neither denied nor a subscript nor the power of a unit."""
    return [match for match in _number().finditer(text, start, end) if _counts(text, match)]


def _counts(text: str, match: re.Match[str]) -> bool:
    return _is_number(match) and not _ASIDE.search(text, max(0, match.start() - _NEAR), match.start())


def _check_not_part(text: str, match: re.Match[str]) -> None:
    """Refuse a number that is only a part of what is written: a power, a root, a tuple, a clock's time."""
    start, end = match.span()
    after = _GOES_ON.match(text, end)
    before = _BEGAN_BEFORE.search(text, max(0, start - _NEAR), start)
    if before and _TAG.search(text, max(0, start - _CONTEXT), start):
        before = None
    if "frac" in text[max(0, start - _CONTEXT) : start]:
        before = before or _IN_FRACTION.search(text, max(0, start - _CONTEXT), start)
    signed = match["sign"] and _SYMBOL_BEFORE.search(text, max(0, start - _NEAR), start)
    if after or before or signed or _in_tuple(text, match):
        shown_from = before.start() if before else start
        whole = text[shown_from : (after.end() if after else end)].strip()
        raise UnreadableNumber(f"{whole!r} is not a plain number")


def _in_tuple(text: str, match: re.Match[str]) -> bool:
    """Whether a number is one of several in brackets: `(3,4)`, `[1, 2]`."""
    start, end = match.span()
    if match["commas"] or "," not in text[max(0, start - _CONTEXT) : end + _CONTEXT]:
        return False
    opened = _OPENED.search(text, max(0, start - _CONTEXT), start)
    closed = _CLOSED.match(text, end)
    if opened is None or closed is None:
        return False
    return bool(match["comma"] or "," in opened[1] or "," in closed[1])


def _check_not_several(text: str, match: re.Match[str], end: int) -> None:
    """Refuse one of several numbers: `5 or 6`, `3, 4 and 5`, `between 5 and 6`, `5 to 6`, `5 + 6`."""
    joined = _JOINED.match(text, match.end(), end)
    between = _BETWEEN.search(text, max(0, match.start() - _CONTEXT), match.start())
    if joined is None and between is None:
        return
    other = None if joined is None else _number().match(text, joined.end())
    if joined is not None and joined["list"] and other is not None and not _LIST_ENDS.match(text, other.end()):
        return
    if other is not None and other.end() <= end and _value(other, False) != _value(match, False):
        raise UnreadableNumber(f"it names several numbers ({text[match.start() : other.end()]!r})")
    if between is not None:
        raise UnreadableNumber("it names a range")


def _last(text: str) -> re.Match[str] | None:
    """Find the last number in growing windows at the end: most texts need only the first."""
    window = _FIRST_WINDOW
    while True:
        start = max(len(text) - window, 0)
        found = list(_number().finditer(text, start)) if _HAS_DIGIT.search(text, start) else []
        found = [match for match in found if _is_number(match)]
        last = next((match for match in reversed(found[-_CANDIDATES:]) if _counts(text, match)), None)
        # A match right at the window's edge may be the rest of a longer number.
        if start == 0 or len(found) > _CANDIDATES or (last is not None and last.start() > start + 1):
            if last is None and found:
                raise UnreadableNumber("it only says what the answer is not")
            if last is not None:
                _check_last(text, last)
            return last
        window *= 8


def _check_last(text: str, match: re.Match[str]) -> None:
    """Refuse a last number that is part of something, or the second of two between which nothing decides."""
    _check_not_part(text, match)
    hedged = _HEDGED.search(text, max(0, match.start() - _CONTEXT), match.start())
    if hedged is None:
        return
    first = _number().search(text, hedged.start(1), match.start())
    if first is None or not _is_number(first):
        return
    low, high = _value(first, False), _value(match, False)
    if hedged["range"] and low >= high:
        return
    if low != high:
        raise UnreadableNumber(f"it names several numbers ({text[first.start() : match.end()]!r})")


def _closing_brace(text: str, start: int, end: int) -> int:
    """Return where the brace opened just before `start` is closed, or `end`."""
    depth = 1
    for position in range(start, end):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
    return end


def _is_number(match: re.Match[str]) -> bool:
    """Whether a match has a value: a fraction with denominator zero has none."""
    bottom = match["bottom"] or match["latex_bottom"] or match["short_bottom"]
    return bottom is None or bottom.strip("0") != ""


def _value(match: re.Match[str], percent_as_fraction: bool) -> Decimal:
    value = _fraction(match) if match["mantissa"] is None else _decimal(match)
    if (match["sign"] or match["inner_sign"] or "+") in _MINUS:
        value = -value
    return _EXACT.divide(value, Decimal(100)) if percent_as_fraction and match["percent"] else value


def _decimal(match: re.Match[str]) -> Decimal:
    digits = match["mantissa"]
    if match["commas"]:
        digits = digits.replace(",", "")
    elif match["spaces"]:
        digits = digits.replace(match["gap"], "").replace(",", ".")
    elif match["dots"]:
        digits = digits.replace(".", "").replace(",", ".")
    elif match["comma"]:
        digits = digits.replace(",", ".")
    exponent = match["exponent"] or match["caret"] or (match["raised"] or "").translate(_SUPERSCRIPTS)
    if not exponent:
        return Decimal(digits)
    if match["power"]:
        digits = "1"
    return _EXACT.scaleb(Decimal(digits), int(exponent.replace("−", "-")))


def _fraction(match: re.Match[str]) -> Decimal:
    whole = match["latex_whole"] or match["vulgar_whole"] or match["whole"] or "0"
    if match["vulgar"]:
        top, _, bottom = unicodedata.normalize("NFKC", match["vulgar"]).partition("⁄")
    else:
        top = match["top"] or match["latex_top"] or match["short_top"]
        bottom = match["bottom"] or match["latex_bottom"] or match["short_bottom"]
    return _EXACT.add(Decimal(whole), _EXACT.divide(Decimal(top.replace("−", "-")), Decimal(bottom)))
