"""The scorer that compares the final number of an answer, and how that number is found and read."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cache, cached_property
from typing import Any, Literal

from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.base import PlainScorer, alternatives, check_choice, check_number, shown

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

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """Return 1.0 or 0.0; None when the case expects nothing."""
        if case.expected is None:
            return None
        text = response.response_text or ""
        if text == case.expected and is_plain(text):  # the common right answer: no parsing needed
            return self._score(True)
        wanted = [self._expected(item) for item in alternatives(case.expected)]
        got = self._read(text)
        if got is None:
            return self._score(False, f"no number in {shown(text)}")
        if any(self._close(item, got) for item in wanted):
            return self._score(True)
        return self._score(False, f"expected {' or '.join(map(_shown_number, wanted[:3]))}, got {_shown_number(got)}")

    def _expected(self, item: Any) -> Decimal:
        value = as_decimal(item) if not isinstance(item, str) else self._read(item)
        if value is None:
            raise ValueError(f"expected holds no number: {shown(item)}")
        return value

    def _read(self, text: str) -> Decimal | None:
        return final_number(text, percent_as_fraction=self.percent == "fraction")

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


def final_number(text: str, *, percent_as_fraction: bool = False) -> Decimal | None:
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
    """Find the number after the last marker that has one."""
    for marker in reversed(deque(_marker().finditer(text), maxlen=_MARKERS)):
        end = min(marker.end() + _SEGMENT, len(text))
        if marker["boxed"]:
            end = _closing_brace(text, marker.end(), end)
        elif (line_end := text.find("\n", marker.end(), end)) >= 0:
            end = line_end
        if match := _stated(text, marker.end(), end):
            return match
    return None


def _stated(text: str, start: int, end: int) -> re.Match[str] | None:
    """Find the number after a segment's last `=`, else its first: `the answer is 3 + 4 = 7`, `18 of the 20`."""
    if alone := _ALONE.fullmatch(text, start, end):
        return alone
    equals = text.rfind("=", start, end)
    if equals >= 0 and (match := _first(text, equals + 1, end)):
        return match
    return _first(text, start, end)


def _first(text: str, start: int, end: int) -> re.Match[str] | None:
    return next((match for match in _number().finditer(text, start, end) if _is_number(match)), None)


def _last(text: str) -> re.Match[str] | None:
    """Find the last number in growing windows at the end: most texts need only the first."""
    window = _FIRST_WINDOW
    while True:
        start = max(len(text) - window, 0)
        last = None
        if _HAS_DIGIT.search(text, start):
            for match in _number().finditer(text, start):
                if _is_number(match):
                    last = match
        # A match right at the window's edge may be the rest of a longer number.
        if start == 0 or (last is not None and last.start() > start + 1):
            return last
        window *= 8


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
