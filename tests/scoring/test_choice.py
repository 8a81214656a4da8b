"""The option that a model really means."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.scoring import Choice
from steelyard.scoring.choice import final_choice, options_of
from tests.support.scorers import scored, scored_or_none

CITIES = ["London", "Paris", "Rome", "Berlin"]

LETTERS = [
    ("B", "B"),
    ("b", "B"),
    ("(B)", "B"),
    ("B.", "B"),
    ("[B]", "B"),
    ("`B`", "B"),
    ('"B"', "B"),
    ("**B**", "B"),
    ("A", "A"),
    ("A.", "A"),
    ("I", "I"),
    ("(J)", "J"),
    ("B) Paris", "B"),
    ("B. Paris", "B"),
    ("B: Paris", "B"),
    ("B - Paris", "B"),
    ("**B) Paris**", "B"),
    ("The answer is B", "B"),
    ("Answer: (b)", "B"),
    ("Answer: b", "B"),
    ("ANSWER: C", "C"),
    ("answer=B", "B"),
    ('{"answer": "B"}', "B"),
    ("<answer>B</answer>", "B"),
    ("**Answer:** B", "B"),
    ("**Final Answer**: (B)", "B"),
    ("### Answer\nB", "B"),
    ("My answer is:\n\n**D**", "D"),
    (r"\boxed{B}", "B"),
    (r"\boxed{\text{B}}", "B"),
    (r"The final answer is $\boxed{(D)}$. I hope it is correct.", "D"),
    (r"answer is: $\textbf{(C)}$", "C"),
    ("The correct answer is **C**.", "C"),
    ("The correct answer is B: Paris", "B"),
    ("The correct option is (D) Berlin", "D"),
    ("The best choice would be D, I think.", "D"),
    ("The answer is option (B).", "B"),
    ("Answer is likely C", "C"),
    ("So the answer must be (a).", "A"),
    ("The answer is A because dogs bark.", "A"),
    ("I choose option C", "C"),
    ("I'd go with B.", "B"),
    ("I think B", "B"),
    ("It's B", "B"),
    ("It is A.", "A"),
    ("Option B is correct.", "B"),
    ("B because the others are wrong", "B"),
    ("Let me think.\n\nB", "B"),
    ("B\n\nExplanation: A is wrong because it is.", "B"),
    ("A is incorrect. B is correct.", "B"),
    ("A seems plausible at first, but the answer is C", "C"),
    ("Both A and B are wrong, so C", "C"),
    ("The answer is B, not A.", "B"),
    ("The answer is A... wait. The answer is C.", "C"),
    ("A) London\nB) Paris\nC) Rome\n\nThe answer is B", "B"),
    ("Vitamin C is good for you. The answer: A", "A"),
    ("答案是B", "B"),
    ("答案：B", "B"),
    ("Réponse : B", "B"),
    ("Die Antwort ist B.", "B"),
]

NOTHING = [
    "",
    "none",
    "A dog is an animal",
    "I think it is so",
    "I'm sure",
    "The answer is not B",
    "It isn't B",
    "The answer is a matter of taste",
    "The U.S. is big",
    "R&D matters",
    "Plan A/B testing",
    "A/B",
    "The answer is not A or B",
    "Neither A nor B",
    "Not sure",
]


SETTLED = [
    ("I think it's B because A is wrong", "B"),
    ("The answer is B. Wait, no. Actually it is D", "D"),
    ("The answer is B. Wait, no. Actually it is D.", "D"),
    ("B\n\nWait, no. Actually it is D", "D"),
    ("The answer is B, C is wrong", "B"),
    ("The answer is B and I am sure", "B"),
    ("(B) is right because (A) is wrong", "B"),
    ("**B** because (A) is wrong", "B"),
    ("B is better than A", "B"),
    ("It is B rather than A", "B"),
    ("It's B, not A", "B"),
    ("A is wrong. C is wrong. So B", "B"),
    ("I would eliminate A and C. That leaves B.", "B"),
    ("The answer is B. Actually, A is a common mistake.", "B"),
    ("The answer is B. Actually, many think it is A, but that is wrong.", "B"),
    ("The answer is B or a variant of it", "B"),
    ("Hmm, A? No, wait, B is correct", "B"),
    ("It's B since A isn't a prime.", "B"),
    ("I think A is wrong, and it's C.", "C"),
    ("The correct answer is C. A and B are wrong.", "C"),
    ("C, because A and B are false.", "C"),
    ("Between A and B, I pick B.", "B"),
    ("The answer is (B), as (A) does not hold.", "B"),
    ("My final answer: B. Oops, I meant to say: it is C.", "C"),
    ("The answer is B, D being too large", "B"),
    ("\\boxed{B}. Wait, let me check. Yes, B is correct.", "B"),
    ("B, definitely", "B"),
    ("Either B or D, but more likely D", "D"),
    ("D. The others (A, B, C) are wrong", "D"),
    ("It must be C; A fails the test", "C"),
]
"""Hedges that end in a choice, options said to be wrong, answers that are corrected."""

UNSETTLED = [
    "A or B",
    "The answer is A or B",
    "The answer is A or B.",
    "The answer is either A or B",
    "I'd go with B or C",
    "Answer: A, B",
    "The answer is A, B, and C",
    "The answer is B. Wait, no.",
    "B) Paris or C) Rome",
    "(A) or (B)",
    "Option A looks at x. Option B looks at y.",
    "It could be A, B or C.",
    "Answer: B/C",
    "A) London\nB) Paris\nC) Rome",
    "The answer is **A** or **B**.",
]


@pytest.mark.parametrize(("text", "label"), SETTLED)
def test_options_that_are_denied_or_taken_back_are_not_the_choice(text, label) -> None:
    assert final_choice(text, {}) == label


@pytest.mark.parametrize("text", UNSETTLED)
def test_an_answer_that_settles_on_no_single_option_is_unreadable_and_not_guessed(text) -> None:
    score = scored(Choice(), text, "B")
    assert not score.passed
    assert score.reason is not None
    assert score.reason.startswith("unreadable: ")
    assert final_choice(text, {}) is None


@pytest.mark.parametrize(("text", "label"), LETTERS)
def test_a_letter_is_found_however_it_is_written(text, label) -> None:
    assert final_choice(text, {}) == label


@pytest.mark.parametrize("text", NOTHING)
def test_an_article_a_pronoun_or_a_denied_letter_is_no_choice(text) -> None:
    assert final_choice(text, {}) is None
    assert scored(Choice(), text, "B").reason == f"no choice in {text!r}"


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("Paris", "B"),
        ("paris.", "B"),
        ("**Paris**", "B"),
        ("It is Paris.", "B"),
        ("A big city: Paris", "B"),
        ("The answer is Paris", "B"),
        ("London is big, but the answer is Paris.", "B"),
        ("The capital is Paris, so B.", "B"),
        ("Answer: Berlin (D)", "D"),
        ("I believe it's Rome", "C"),
        ("A: London", "A"),
        ("Paris or Rome, who knows", None),
        ("A city", None),
        ("E", None),
        ("I", None),
    ],
)
def test_an_options_own_words_count_when_the_options_are_known(text, label) -> None:
    assert final_choice(text, options_of(CITIES)) == label


@pytest.mark.parametrize(("text", "label"), [("York", "A"), ("It is New York", "B"), ("in york, of course", "A")])
def test_an_option_within_another_is_told_from_it(text, label) -> None:
    assert final_choice(text, options_of(["York", "New York"])) == label


def test_a_mapping_brings_its_own_labels() -> None:
    options = options_of({"1": "x-ray", "2": "yes", "10": "zoo"})
    assert [final_choice(text, options) for text in ("2", "The answer is 10.", "(1)", "zoo")] == ["2", "10", "1", "10"]


@pytest.mark.parametrize(
    ("expected", "choices"),
    [
        ("B", None),
        ("b", None),
        ("(B)", None),
        (1, None),
        ("B", CITIES),
        (1, CITIES),
        ("Paris", CITIES),
        (["A", "B"], None),
    ],
)
def test_the_expected_option_may_be_a_letter_an_index_or_its_text(expected, choices) -> None:
    metadata = {} if choices is None else {"choices": choices}
    assert scored(Choice(), "The answer is B.", expected, **metadata).passed
    wrong = scored(Choice(), "The answer is C.", expected, **metadata)
    assert not wrong.passed
    assert wrong.reason is not None
    assert wrong.reason.endswith("B, got C")


@pytest.mark.parametrize("expected", ["Madrid", 4, -1, True, "E", ""])
def test_an_expected_value_that_is_no_option_is_a_scoring_error(expected) -> None:
    with pytest.raises(ValueError, match="is none of the choices: A, B, C, D"):
        scored(Choice(), "B", expected, choices=CITIES)


@pytest.mark.parametrize("choices", ["ABCD", 4, ["x"] * 27])
def test_choices_that_are_neither_a_list_nor_a_mapping_are_a_scoring_error(choices) -> None:
    with pytest.raises(ValueError, match="choices must be"):
        scored(Choice(), "B", "B", choices=choices)


def test_a_case_that_expects_nothing_is_not_scored() -> None:
    assert scored_or_none(Choice(), "B") is None


@given(
    st.sampled_from(string.ascii_uppercase),
    st.sampled_from(
        ["{}", "({})", "**{}**", "The answer is {}.", "Answer: ({})", r"\boxed{{{}}}", "It is {}, clearly."]
    ),
    st.sampled_from(["", "Hmm. A or B? I do not know yet.\n\n", "First, A) x. Then D) y.\n"]),
)
def test_every_letter_is_found_in_every_spelling_after_any_musing(letter, spelling, musing) -> None:
    assert final_choice(musing + spelling.format(letter), {}) == letter


@given(st.text())
def test_any_text_is_a_choice_among_the_options_or_none(text) -> None:
    assert final_choice(text, options_of(CITIES)) in {"A", "B", "C", "D", None}
