"""The final number of an answer, as models and people write numbers."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import ConfigurationError
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring import Number
from steelyard.scoring import number as number_module
from steelyard.scoring.number import UnreadableNumber, _shown_number, final_number, read_number
from tests.support.scorers import scored, scored_or_none

SPELLINGS = [
    ("18", "18"),
    ("  18\n", "18"),
    ("18.", "18"),
    ("3.0", "3"),
    ("-7", "-7"),
    ("+7", "7"),
    ("-.5", "-0.5"),
    ("\u22125", "-5"),
    ("about –5", "-5"),
    ("\uff11\uff18", "18"),
    ("(18)", "18"),
    ("**18**", "18"),
    ("_18_", "18"),
    ("18km", "18"),
    ("It costs 18 dollars.", "18"),
    # thousands
    ("1,234", "1234"),
    ("$1,234.56", "1234.56"),
    ("USD 1,000,000.00.", "1000000"),
    ("12,34,567", "1234567"),
    ("1'234'567.5", "1234567.5"),
    ("1’234", "1234"),
    ("1_000_000", "1000000"),
    ("18 000", "18000"),
    ("1\u00a0234\u00a0567", "1234567"),
    ("1\u202f234,5", "1234.5"),
    ("1\u2009234", "1234"),
    (r"\boxed{1{,}234}", "1234"),
    (r"$1\,234$", "1234"),
    ("1.234,56 €", "1234.56"),
    ("1 234,56", "1234.56"),
    ("1.234.567", "1234567"),
    ("1.234", "1.234"),
    ("3,14", "3.14"),
    ("0,123", "0.123"),
    # currency
    ("-$5.50", "-5.5"),
    ("$-5", "-5"),
    ("£3.50", "3.5"),
    (r"\$18", "18"),
    ("$18$", "18"),
    ("Rs.500", "500"),
    # percent, kept
    ("45%", "45"),
    ("45 %", "45"),
    (r"\boxed{18\%}", "18"),
    # fractions
    ("3/4", "0.75"),
    ("3⁄4", "0.75"),
    ("-3/4", "-0.75"),
    ("1 1/2 cups", "1.5"),
    ("½", "0.5"),
    ("2½", "2.5"),
    ("2 ½ cups", "2.5"),
    (r"\frac{3}{4}", "0.75"),
    (r"$\frac{-3}{4}$", "-0.75"),
    (r"-\dfrac{1}{2}", "-0.5"),
    (r"2\frac{1}{2}", "2.5"),
    (r"\frac12", "0.5"),
    (r"so $\boxed{\frac{3}{4}}$ of 10", "0.75"),
    # scientific
    ("1.2e-3", "0.0012"),
    ("6.02E23", "602000000000000000000000"),
    ("1.2×10^-3", "0.0012"),
    ("1.2 x 10^{-3}", "0.0012"),
    ("1.2×10⁻³", "0.0012"),
    (r"1.2 \times 10^{5}", "120000"),
    (r"$3 \cdot 10^2$", "300"),
    ("2 * 10**3", "2000"),
    ("10^6", "1000000"),
    ("10⁶", "1000000"),
]

FINAL = [
    ("#### 18", "18"),
    ("She sells 9 a day.\n#### -1,000", "-1000"),
    ("A: 18", "18"),
    ("A: 18 apples\n(3 left)", "18"),
    (r"\boxed{18}", "18"),
    (r"\boxed{x = 5}", "5"),
    (r"\boxed{18} because 2 = 2", "18"),
    ("The answer is 18.", "18"),
    ("The final answer is $18$ dollars, as 20-2 is 18.", "18"),
    ("Answer: 18 (out of 20)", "18"),
    ("**Answer:** 18\n\nSee step 3.", "18"),
    ("### Final Answer\n\n42", "42"),
    ("The answer is 3 + 4 = 7.", "7"),
    ("The answer to the question of 5 apples is 18, not 20", "18"),
    ("The answer is 5. No, the answer is 6. I checked 3 times.", "6"),
    ("She has 3 apples and 4 pears, so 7 fruits in total", "7"),
    ("Total: 2,000 + 500 = 2,500.", "2500"),
    ("#### 2. Next step\nso x is 7", "7"),
    ("1,2,3", "3"),
    ("5-3", "3"),
    ("12/05/2024", "2024"),
    ("5/0 and 3", "3"),
    ("110^3 or so is 4", "4"),
    ("答案：18", "18"),
    ("Die Antwort ist 18, nicht 20", "18"),
]


@pytest.mark.parametrize(("text", "number"), SPELLINGS)
def test_a_number_is_read_however_it_is_written(text, number) -> None:
    assert final_number(text) == Decimal(number)
    assert final_number(f"So it must be {text}") == Decimal(number)


@pytest.mark.parametrize(("text", "number"), FINAL)
def test_a_marked_answer_wins_over_the_last_number_and_the_last_over_the_others(text, number) -> None:
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "x2", "H2O", "∞", "nan", "inf", "1/0", "²", "----", "Ⅷ"])
def test_a_text_without_a_number_has_none(text) -> None:
    assert final_number(text) is None
    assert scored(Number(), text, 5).reason == f"no number in {text!r}"


@pytest.mark.parametrize(
    ("scorer", "text", "expected", "passed"),
    [
        (Number(), "18", 18, True),
        (Number(), "18", "18", True),
        (Number(), "18", 18.0, True),
        (Number(), "18", "He has 20 - 2 = 18 left.\n#### 18", True),
        (Number(), "18", 19, False),
        (Number(), "18", [17, 18], True),
        (Number(), "0.3", 0.1 + 0.2, True),
        (Number(), "0.333", 1 / 3, False),
        (Number(), "1/3", 1 / 3, True),
        (Number(), "12345678901234567891", 12345678901234567890, False),
        (Number(), "1,000,000,000,001", 1_000_000_000_000, False),
        (Number(tolerance=0.01), "3.14", 3.15, True),
        (Number(tolerance=0.01), "3.14", 3.16, False),
        (Number(tolerance=1), "9", 10, True),
        (Number(relative_tolerance=0.1), "91", 100, True),
        (Number(relative_tolerance=0.1), "89", 100, False),
        (Number(relative_tolerance=0.1), "-91", -100, True),
        (Number(), "18%", 18, True),
        (Number(percent="fraction"), "18%", 0.18, True),
        (Number(percent="fraction"), "18.7 percent", 0.187, True),
        (Number(percent="fraction"), "0.18", "18%", True),
        (Number(percent="fraction"), "18", 18, True),
        (Number(), "1e9999", 1, False),
        (Number(tolerance=1e308), "1e9999", 1, False),
    ],
)
def test_numbers_are_equal_within_the_tolerances(scorer, text, expected, passed) -> None:
    assert scored(scorer, text, expected).passed is passed


def test_a_wrong_number_says_what_was_expected_and_read() -> None:
    assert scored(Number(), "I count 19 of them", "18").reason == "expected 18, got 19"


@pytest.mark.parametrize("expected", ["none", "", True, {}, float("nan"), float("inf"), ["18", "many"]])
def test_an_expected_value_without_a_number_is_a_scoring_error(expected) -> None:
    with pytest.raises(ValueError, match="expected holds no number"):
        scored(Number(), "18", expected)


def test_a_case_that_expects_nothing_is_not_scored() -> None:
    assert scored_or_none(Number(), "18") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": -1}, "tolerance must be a number >= 0, got -1"),
        ({"tolerance": "much"}, "tolerance must be a number >= 0, got 'much'"),
        ({"relative_tolerance": float("nan")}, "relative_tolerance must be a number >= 0, got nan"),
        ({"percent": "drop"}, "percent must be one of 'keep', 'fraction', got 'drop'"),
    ],
)
def test_a_bad_argument_is_refused_with_its_value(options, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Number(**options)


def grouped(number: Decimal, group: str, point: str) -> str:
    return f"{number:,f}".replace(",", "\0").replace(".", point).replace("\0", group)


@given(
    st.decimals(min_value=-(10**12), max_value=10**12, places=2),
    st.sampled_from([("", "."), (",", "."), ("'", "."), (" ", "."), ("\u202f", ","), ("\u00a0", ","), (".", ",")]),
    st.sampled_from(
        ["{}", "${}", "{} €", "The answer is {}.", "#### {}", r"\boxed{{{}}}", "A: {}", "3 + x = {}!", "= {} kg"]
    ),
    st.sampled_from(["-", "−"]),
)
def test_a_number_reads_back_from_every_style_it_can_be_written_in(number, style, frame, minus) -> None:
    text = frame.format(grouped(number, *style).replace("-", minus))
    assert final_number(text) == number, text


@given(
    st.integers(-(10**6), 10**6),
    st.integers(1, 10**4),
    st.sampled_from(["{}/{}", r"\frac{{{}}}{{{}}}", r"$\dfrac{{{}}}{{{}}}$"]),
)
def test_a_fraction_reads_back(top, bottom, style) -> None:
    read = final_number(style.format(top, bottom))
    assert read is not None
    assert float(read) == pytest.approx(top / bottom, rel=1e-15)


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["{!r}", "{:e}", "It is {!r}."]))
def test_a_float_reads_back_as_python_writes_it(number, style) -> None:
    text = style.format(number)
    read = final_number(text)
    assert read is not None
    assert float(read) == float(text.removeprefix("It is ").rstrip("."))


TAILS = ("", ".", "!", "%", " apples", "\n", ". So 3.", ",5", " = 7", "e3", "^2", "/2", "½", " 000", "**", ")")


@given(
    st.sampled_from(
        ("The answer is ", "answer: ", "A: ", "#### ", "答案", "答案是", r"\boxed{", "= ", "The answer is **")
    ),
    st.sampled_from(("18", "-18", "+18", "−18", "0.50", "-0.5", "007", "$18", "1,234", "1.234.567", ".5", "9" * 20)),
    st.sampled_from(TAILS),
    st.booleans(),
)
def test_a_number_alone_is_read_as_the_pattern_for_any_number_reads_it(marker, number, tail, as_fraction) -> None:
    text = f"{marker}{number}{tail}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(number_module, "_ALONE", re.compile("(?!)"))
        slowly = final_number(text, percent_as_fraction=as_fraction)
    assert final_number(text, percent_as_fraction=as_fraction) == slowly


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20))
def test_a_reason_shows_twelve_digits_however_they_are_spelled(number) -> None:
    assert _shown_number(number) == f"{number:.12g}"


@given(text=st.sampled_from(("18", "-1.50", "1,234", "eighteen", "", " 18 ")), tolerance=st.sampled_from((0.0, 0.1)))
def test_an_answer_that_is_the_expected_text_passes_where_it_holds_a_number(text, tolerance) -> None:
    case, response = EvalCase(prompt="p", expected=text), InvocationResponse(response_text=text)
    if final_number(text) is None:
        with pytest.raises(ValueError, match="expected holds no number"):
            Number(tolerance=tolerance).score(case, response)
    else:
        assert Number(tolerance=tolerance).score(case, response) == Score("number", 1.0, True)


@given(st.text(alphabet="0123456789,.'-+/eE%$^{} ½\\\n:#=Aanswer is×10⁻³", max_size=60))
def test_any_mixture_of_signs_gives_a_finite_number_or_none(text) -> None:
    read = final_number(text)
    assert read is None or read.is_finite()


@given(st.integers(0, 20_000), st.integers(0, 10**9))
def test_the_last_number_is_found_however_far_it_is_from_the_end(distance, number) -> None:
    assert final_number(f"of 3 and {number} there is {'no more ' * (distance // 8)}") == number


UNREADABLE = [
    "2\\sqrt{3}",
    "\\boxed{2\\sqrt{3}}",
    "3\\pi",
    "\\boxed{3\\pi}",
    "The answer is 3π.",
    "2^{10}",
    "\\boxed{2^{10}}",
    "The answer is 2**10",
    "2¹⁰",
    "(3,4)",
    "(3, 4)",
    "The answer is (3,4).",
    "\\boxed{(3,4)}",
    "\\boxed{(3, 4)}",
    "\\boxed{3, 4}",
    "\\boxed{x=5, y=6}",
    "The answer is not 5",
    "The answer is not 5.",
    "The answer isn't 5",
    "It is not 5",
    "It can't be 5.",
    "The answer is 5 or 6",
    "It's 5 or 6.",
    "The answer is either 5 or 6.",
    "The answer is between 5 and 6",
    "It is between 5 and 6",
    "The answer is 5-6",
    "It takes 5-6 days",
    "The answer is 3 + 4",
    "3 + 4",
    "\\frac{\\sqrt{3}}{2}",
    "\\boxed{\\frac{\\sqrt{3}}{2}}",
    "\\frac{\\pi}{4}",
    "\\pi/4",
    "\\sqrt{3}",
    "\\sqrt[3]{5}",
    "√2",
    "\\boxed{3+4i}",
    "3 + 4i",
    "\\boxed{\\pm 2}",
    "±2",
    "x > 5",
    "\\boxed{x \\ge 5}",
    "3:30",
    "The ratio is 1:2",
    "\\boxed{2x+3}",
    "\\boxed{1 + \\sqrt{5}}",
    "\\sqrt{5} + 1",
    "The answer is 3, 4 and 5.",
    "The answer is 5. Wait, no.",
    "2024-05-12",
    "[1, 2]",
    "5 sqrt(2)",
    "3 * pi",
    "\\log_2 8",
    "The answer is 10 to 20.",
    "20 x 30",
    "e^2",
]

PLAIN_AFTER_ALL = [
    ("The answer is not 5 but 6", "6"),
    ("There are 6, not 5.", "6"),
    ("The answer is 5. Wait, no. It is 6.", "6"),
    ("The answer is 5. Actually, it's 6", "6"),
    ("The area is 18 cm^2", "18"),
    ("\\boxed{18 \\text{ cm}^2}", "18"),
    ("\\boxed{18\\text{ km}}", "18"),
    ("The answer is 5.2 ± 0.1", "5.2"),
    ("<answer>18</answer>", "18"),
    ("The answer is 90^\\circ", "90"),
    ("\\boxed{90^{\\circ}}", "90"),
    ("-> 18", "18"),
    ("The answer is 18 - see step 3", "18"),
    ("The answer is 18, 3 of them red", "18"),
    ("The answer is 18 and it took 3 steps", "18"),
    ("x_1 = 5", "5"),
    ("Answer: x = 5", "5"),
    ("The result is 3 + 4 = 7", "7"),
    ("\\boxed{3+4=7}", "7"),
    ("18 m/s^2", "18"),
    ("The answer is 18 m/s²", "18"),
    ("Step 1 **18**", "18"),
    ("**18**", "18"),
    ("It is **18** dollars.", "18"),
    ("$\\frac{3}{4}$", "0.75"),
    ("x \\approx 3.14", "3.14"),
    ("She has 2 dogs or so, and 4 cats", "4"),
    ("The answer is 5. Wait, let me check: 2+3 = 5. Yes.", "5"),
    ("The answer is 18. Actually, I checked 3 times.", "18"),
    ("(1,234)", "1234"),
    ("Answer: 18 (3 + 15)", "18"),
    ("Answer: 1,234", "1234"),
    ("\\boxed{5 \\text{ or so}}", "5"),
    ("f(2) = 5", "5"),
    ("The answer is $18.", "18"),
    ("\\(18\\)", "18"),
    ("A: 5-year plan", "5"),
    ("The answer is 3 1/2 cups", "3.5"),
    ("It's 18, isn't it?", "18"),
    ("The answer is 1,000 to the nearest hundred", "1000"),
    ("Answer: 42\n\nSee section 3:30", "42"),
    ("The answer is 10^-3", "0.001"),
    ("I did not find 5 apples but 6", "6"),
    ("The answer is 5%", "5"),
    ("That is 2,5 or 5/2.", "2.5"),
    ("18\xa0%", "18"),
    ("Answer = 18", "18"),
    ("2 x 3 = 6", "6"),
    ("16 * 9 = 144", "144"),
    ("The answer is 24 hours, or 1 day", "24"),
    ("The answer is 18 or 18.0", "18"),
]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_number_that_is_part_of_something_else_or_one_of_several_is_unreadable_and_not_guessed(text) -> None:
    with pytest.raises(UnreadableNumber):
        read_number(text)
    score = scored(Number(), text, 5)
    assert not score.passed
    assert score.reason is not None
    assert score.reason.startswith("unreadable: ")


@pytest.mark.parametrize(("text", "number"), PLAIN_AFTER_ALL)
def test_units_denials_corrections_and_asides_do_not_hide_the_number(text, number) -> None:
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("expected", [r"2\sqrt{3}", "(3,4)", "5 or 6"])
def test_an_expected_value_that_is_no_plain_number_is_a_scoring_error(expected) -> None:
    with pytest.raises(ValueError, match="expected is no plain number"):
        scored(Number(), "18", expected)


@pytest.mark.parametrize("part", ["not 5 ", "x^2 ", "5 or ", "(1,", "\\frac{", "between 1 and ", "wait "])
def test_an_endless_answer_is_read_in_time(part) -> None:
    final_number(part * (number_module.MAX_READ // len(part)))
