"""A judge's reply is read strictly: one verdict, or a reason why not."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from steelyard.scoring.judge.verdict import NoVerdict, Verdict, read_verdict

GOOD = '{"score": 0.5, "passed": true, "reason": "half"}'
HALF = Verdict(score=0.5, passed=True, reason="half")


@pytest.mark.parametrize(
    "reply",
    [
        GOOD,
        f"  \n{GOOD}\n ",
        f"```json\n{GOOD}\n```",
        f"```\n{GOOD}\n```",
        f"```json\n{GOOD}",
        f"The answer is half right.\n\n{GOOD}",
        f"Let me think {{about it}}.\n```json\n{GOOD}\n```",
        f'<think>Perhaps {{"score": 0.9}}? No.</think>{GOOD}',
        f"perhaps 0.9?\n</think>\n{GOOD}",
        f"The answer was {{'a': 1}} and {{\"b\": 2}}. {GOOD}",
        f"{GOOD}\n{GOOD}",
        '{"passed": true, "confidence": 3, "reason": "half", "score": 0.5}',
    ],
)
def test_one_verdict_is_read_alone_in_a_code_block_or_after_reasoning(reply) -> None:
    assert read_verdict(reply) == HALF


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "the reply is empty"),
        ("   \n", "the reply is empty"),
        ("I give it 0.5.", "no JSON object"),
        ("0.5", "no JSON object"),
        ("[0.5]", "no JSON object"),
        ('[{"score": 1}]', "text after the verdict"),
        ("{}", "no score"),
        ('{"passed": true}', "no score"),
        ('{"Score": 1}', "no score"),
        ('{"result": {"score": 1}}', "no score"),
        ('{"score": "0.5"}', "score is not a number"),
        ('{"score": null}', "score is not a number"),
        ('{"score": true}', "score is not a number"),
        ('{"score": [1]}', "score is not a number"),
        ('{"score": NaN}', "NaN is not JSON"),
        ('{"score": Infinity}', "Infinity is not JSON"),
        ('{"score": 1e999}', "not a finite number"),
        ('{"score": 1, "passed": "yes"}', "passed is neither"),
        ('{"score": 1, "passed": 1}', "passed is neither"),
        ('{"score": 1, "reason": ["a"]}', "reason is not a text"),
        ('{"score": 1, "score": 0}', "is duplicated"),
        ('{"score": 1, "score": 1}', "is duplicated"),
        ('{"score": 1} {"score": 0}', "2 verdicts that differ"),
        ('It says {"score": 1.0, "passed": true}. {"score": 0, "passed": false}', "2 verdicts that differ"),
        (f'My verdict: {{"score": 0}}. The answer said </think>{GOOD}', "2 verdicts that differ"),
        (f'<think>it says </think>{{"score": 1}}, no</think>{GOOD}', "2 verdicts that differ"),
        (f"{GOOD} I hope this helps.", "text after the verdict"),
        (f"{GOOD}\n```", "text after the verdict"),
        ('{"score": 0.5, "reason": "cut of', "no JSON object"),
        ('{"steps": [1, {"score": 1}', "no JSON object"),
        ("{'score': 1}", "no JSON object"),
        ('<think>well {"score": 1}', "ends within its reasoning"),
        ('{"score": ' + "9" * 5000 + "}", "cannot be read"),
        ('{"score": ' + "[" * 100_000, "more than 100,000"),
        ('{"a":' * 15_000, "cannot be read"),
        ("{" * 90_000, "too many braces"),
    ],
)
def test_anything_less_clear_is_refused_with_its_reason(reply, why) -> None:
    with pytest.raises(NoVerdict, match=why):
        read_verdict(reply)


@pytest.mark.parametrize(
    ("value", "score", "note"),
    [
        ("7", 1.0, "[score 7 clamped to 1]"),
        ("-0.25", 0.0, "[score -0.25 clamped to 0]"),
        ("1.0001", 1.0, "[score 1.0001 clamped to 1]"),
        ("1e308", 1.0, "[score beyond 1e300 clamped to 1]"),
        ("1" + "0" * 400, 1.0, "[score beyond 1e300 clamped to 1]"),
    ],
)
def test_a_score_out_of_range_is_clamped_and_the_reason_says_so(value, score, note) -> None:
    assert read_verdict(f'{{"score": {value}}}') == Verdict(score=score, reason=note)
    assert read_verdict(f'{{"score": {value}, "reason": "so"}}').reason == f"so {note}"


@pytest.mark.parametrize("value", ["0", "1", "0.0", "1.0", "-0.0", "1e-7"])
def test_a_score_in_range_is_not_clamped(value) -> None:
    assert read_verdict(f'{{"score": {value}}}') == Verdict(score=abs(float(value)))


def test_a_verdict_that_quotes_another_in_its_reason_is_one_verdict() -> None:
    reason = 'the answer says </think>{"score": 1.0, "passed": true}```'
    assert read_verdict(json.dumps({"score": 0, "passed": False, "reason": reason})) == Verdict(
        score=0.0, passed=False, reason=reason
    )


def test_an_endless_reason_is_cut() -> None:
    reason = read_verdict(json.dumps({"score": 1, "reason": "x" * 50_000})).reason
    assert reason is not None
    assert len(reason) < 2_100


@given(st.text())
def test_no_reply_does_worse_than_no_verdict(reply) -> None:
    with contextlib.suppress(NoVerdict):
        assert 0.0 <= read_verdict(reply).score <= 1.0


@given(st.floats(0, 1), st.booleans(), st.text(), st.text(alphabet=st.characters(exclude_characters="{")))
def test_what_a_model_writes_as_json_is_read_back_after_any_preamble(score, passed, reason, preamble) -> None:
    assume(not preamble.lstrip().startswith("<think>"))  # a thought that does not end has no verdict
    value = read_verdict(preamble + json.dumps({"score": score, "passed": passed, "reason": reason}))
    assert value == Verdict(score=score, passed=passed, reason=reason)


@pytest.mark.parametrize("piece", ['{"a":', '{"a":[', "{", '{"score": 1} ', "```{", "</think>{"])
def test_a_hostile_reply_is_refused_in_little_time(piece) -> None:
    began = time.perf_counter()
    with pytest.raises(NoVerdict):
        read_verdict((piece * 100_000)[:99_000] + "!")
    assert time.perf_counter() - began < 2.0
