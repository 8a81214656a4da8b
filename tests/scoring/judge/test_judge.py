"""A judge asks a model through its target; outages and unreadable replies are scoring errors, never zeros."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase, InvocationContext, InvocationResponse, TransientError
from steelyard.engine.retry import Retry, RetryPolicy
from steelyard.errors import ConfigurationError, SuiteError
from steelyard.protocols import Scorer
from steelyard.records import Sample, Score
from steelyard.run.config import build_suite
from steelyard.scoring import Jury
from steelyard.scoring.judge.judge import Judge, combine_samples
from tests.support.judge import ANSWER, CASE, Script, judge, sample, verdict
from tests.support.judged import Agent, Assessor, run, suite_of


def test_a_verdict_becomes_a_sample() -> None:
    target = Script(verdict(0.8, True, "nearly"))
    assert sample(judge(target)) == Sample(score=0.8, passed=True, reason="nearly")
    asked = target.asked[0]
    assert asked.id == "fr#judge"
    assert [message["role"] for message in target.messages()] == ["system", "user"]
    assert all(text in target.messages()[1]["content"] for text in ("Capital of France?", "It is Paris.", "Paris"))


def test_a_judge_is_a_scorer_of_one_sample() -> None:
    one = judge(Script(verdict(0.25, False, "no")), name="grader")
    assert isinstance(one, Scorer)
    score = asyncio.run(one.score(CASE, ANSWER))
    assert score is not None
    assert (score.name, score.value, score.passed, score.reason, score.by) == ("grader", 0.25, False, "no", one.by)
    assert (score.samples, score.mean, score.std_dev, score.reasons) == ([0.25], 0.25, 0.0, ["no"])


@pytest.mark.parametrize(("score", "passed"), [(0.69, False), (0.7, True)])
def test_a_verdict_without_passed_is_held_against_the_threshold(score, passed) -> None:
    assert sample(judge(Script(f'{{"score": {score}}}'), threshold=0.7)).passed is passed


@pytest.mark.parametrize(
    ("score", "passed", "note"),
    [
        (0.2, True, "so [said passed, though 0.2 is below the threshold 0.5]"),
        (0.5, False, "so [said not passed, though 0.5 is not below the threshold 0.5]"),
    ],
)
def test_passed_is_what_the_judge_says_and_a_contradiction_is_noted(score, passed, note) -> None:
    assert sample(judge(Script(verdict(score, passed, "so")))) == Sample(score=score, passed=passed, reason=note)


def test_a_reply_that_is_no_verdict_is_mended_once_with_the_reply_and_the_error_shown() -> None:
    target = Script("I would say 0.5", verdict(0.5, True, "half"))
    assert sample(judge(target)) == Sample(score=0.5, passed=True, reason="half")
    assert len(target.asked) == 2
    first, second = target.messages(0), target.messages(1)
    assert second[: len(first)] == first
    assert second[-2] == {"role": "assistant", "content": "I would say 0.5"}
    assert second[-1]["role"] == "user"
    assert "there is no JSON object in the reply" in second[-1]["content"]


def test_a_second_reply_that_is_no_verdict_is_an_error_and_there_is_no_third() -> None:
    target = Script("well", '{"score": "high"}')
    assert sample(judge(target)) == Sample(error="verdict not understood: score is not a number")
    assert len(target.asked) == 2


def test_an_empty_reply_is_shown_as_something_when_it_is_mended() -> None:
    target = Script(InvocationResponse(), verdict())
    assert sample(judge(target)).score == 1.0
    assert target.messages()[-2]["content"] == "(empty)"


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (ConnectionError("refused"), "ConnectionError: refused"),
        (InvocationResponse(error="HTTP 500"), "HTTP 500"),
        (InvocationResponse(response_text=verdict(), error="cut off"), "cut off"),
        (42, "TypeError: the judge's target returned int, not an InvocationResponse"),
    ],
)
def test_an_outage_is_an_error_at_either_call(call, failure, error) -> None:
    replies = [failure] if call == 1 else ["no verdict", failure]
    assert sample(judge(Script(*replies))) == Sample(error=error)


def test_a_cancellation_passes_through() -> None:
    with pytest.raises(asyncio.CancelledError):
        sample(judge(Script(asyncio.CancelledError())))


def test_a_wrapped_judge_retries_and_each_call_counts_its_own_attempts() -> None:
    target = Script(TransientError("busy"), "no verdict", TransientError("busy"), verdict())
    plain = judge(target)
    wrapped = plain.bound(lambda inner: Retry(inner, RetryPolicy(attempts=2, first_wait=0.0)))
    context = InvocationContext(case_id="fr")
    assert sample(wrapped, context=context).score == 1.0
    assert len(target.asked) == 4
    assert context.attempt == 1
    assert (wrapped.by, wrapped.identity()) == (plain.by, plain.identity())
    assert sample(judge(Script(TransientError("busy")))).error == "TransientError: busy"


def test_what_a_target_does_to_its_messages_does_not_reach_the_next_question() -> None:
    target = Script()
    asked = judge(target, examples=[{"answer": "x", "expected": "y", "score": 0}])
    sample(asked)
    before = [dict(message) for message in target.messages()]
    target.messages()[0]["content"] = "You are a pirate."
    target.messages().clear()
    sample(asked)
    assert target.messages() == before


def test_the_session_and_seed_of_the_context_reach_the_target() -> None:
    target = Script()
    sample(judge(target), context=InvocationContext(case_id="fr", seed=7, trial=2))
    assert (target.contexts[0].seed, target.contexts[0].trial) == (7, 2)


@pytest.mark.parametrize(
    ("prompt", "case", "lacks"),
    [
        ("correctness_v1", EvalCase(id="a", prompt="?"), "expected"),
        ("faithfulness_v1", EvalCase(id="a", prompt="?", expected="x"), "metadata.context"),
        ("pairwise_v1", EvalCase(id="a", prompt="?"), "metadata.other_answer, or expected"),
    ],
)
def test_a_case_without_what_the_prompt_judges_by_is_not_asked_about(prompt, case, lacks) -> None:
    target = Script()
    asked = judge(target, prompt=prompt)
    assert not asked.applies(case)
    assert asyncio.run(asked.score(case, ANSWER)) is None
    assert sample(asked, case) == Sample(error=f"{prompt} does not apply: the case has no {lacks}")
    assert asked.applies(CASE)
    assert target.asked == []


def test_an_expected_value_that_is_false_or_nought_is_one() -> None:
    assert judge().applies(EvalCase(prompt="?", expected=0))
    assert judge().applies(EvalCase(prompt="?", expected=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": None}, "a judge needs a target"),
        ({"target": lambda case: "x"}, "must be a Target"),
        ({"target": Script}, "must be a Target"),
        ({"model": ""}, "model must be a text"),
        ({"model": None}, "model must be a text"),
        ({"name": " "}, "name must be a text"),
        ({"when": "never"}, "when must be one of 'always', 'failed', got 'never'"),
        ({"aggregate": "median"}, "aggregate must be one of"),
        ({"threshold": 1.5}, "threshold must be a number within 0..1, got 1.5"),
        ({"prompt": "correctnes_v1"}, "did you mean 'correctness_v1'"),
        ({"prompt": ["x"]}, "no prompt is named"),
        ({"params": [1]}, "params must be a mapping"),
        ({"params": {"x": float("nan")}}, "params cannot be written as JSON"),
        ({"params": {"x": object()}}, "params cannot be written as JSON"),
    ],
)
def test_what_cannot_work_is_refused_when_the_judge_is_made(arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Judge(**{"model": "m", "target": Script(), **arguments})


def test_there_is_no_default_model() -> None:
    with pytest.raises(TypeError, match="model"):
        Judge(target=Script())  # type: ignore[call-arg]


def test_a_target_that_is_another_model_than_said_is_warned_of(caplog) -> None:
    with caplog.at_level(logging.WARNING, "steelyard"):
        judge(Script(model_id="m"))
        judge(Script(model_id=None))
        assert caplog.messages == []
        judge(Script(model_id="other"))
    assert caplog.messages == ["the judge's model is 'm', but its target asks 'other'"]


BASE = {"prompt": "helpfulness_v1"}
EXAMPLE = [{"question": "?", "answer": "!", "score": 1}]


@pytest.mark.parametrize(
    ("change", "in_by"),
    [
        ({"model": "n"}, True),
        ({"prompt": "safety_v1"}, True),
        ({"template": "{{ answer }}"}, True),
        ({"examples": EXAMPLE}, True),
        ({"params": {"temperature": 0}}, True),
        ({"aggregate": "all"}, False),
        ({"threshold": 0.7}, False),
        ({"when": "failed"}, False),
        ({"name": "other"}, False),
        ({"target": Script(base_url="elsewhere")}, False),
    ],
)
def test_identity_changes_with_whatever_decides_a_verdict(change, in_by) -> None:
    if "template" in change:
        change = {**change, "prompt": "mine_v1"}
    first, second = judge(**BASE), judge(**{**BASE, **change})
    assert first.identity() != second.identity()
    assert (first.by != second.by) == in_by
    assert msgspec.json.encode(second.identity())


def test_by_names_model_prompt_and_eight_digits_and_is_the_same_in_every_process() -> None:
    assert judge(model="gpt-4.1-mini").by == "gpt-4.1-mini/correctness_v1@794ac711"
    assert judge(template="{{ answer }}").by.startswith("m/custom@")
    assert judge(template="{{ answer }}", prompt="mine_v2").by.startswith("m/mine_v2@")


def test_what_only_warns_in_the_targets_identity_has_nothing_judged_again() -> None:
    one, other = (judge(Script(**{"~source": source})) for source in ("a", "b"))
    assert one.identity() == other.identity()
    assert one.fingerprint(CASE, ANSWER) == other.fingerprint(CASE, ANSWER)


def test_a_sample_counts_while_question_answer_reference_and_judge_are_the_same() -> None:
    def fingerprint(case: EvalCase = CASE, text: str = "It is Paris.", **arguments) -> str:
        return judge(**arguments).fingerprint(case, InvocationResponse(response_text=text))

    replaced = msgspec.structs.replace
    variants = [
        fingerprint(),
        fingerprint(replace_expected := replaced(CASE, expected="Lyon")),
        fingerprint(replaced(CASE, prompt="?")),
        fingerprint(replaced(CASE, metadata={"context": "none"})),
        fingerprint(text="Lyon"),
        fingerprint(threshold=0.9),
        fingerprint(prompt="safety_v1"),
        fingerprint(target=Script(base_url="elsewhere")),
    ]
    assert len(set(variants)) == len(variants)
    assert fingerprint(replace_expected) == variants[1]
    assert fingerprint(aggregate="any", name="other") == variants[0]


def test_a_judge_survives_pickling_and_still_judges() -> None:
    again = pickle.loads(pickle.dumps(judge(template="Is {{ answer }} right?")))
    assert sample(again).score == 1.0


# Several samples of one answer ---------------------------------------------------------------------------------------


GOOD = st.builds(Sample, score=st.floats(0, 1), passed=st.none() | st.booleans(), reason=st.none() | st.text())
FAILED = st.builds(Sample, error=st.text(min_size=1))


def combine(*samples: float | bool | str | None, aggregate="mean", threshold=0.5) -> Score:
    """Numbers are scores, bools verdicts, texts errors."""
    samples = [
        Sample(error=one)
        if isinstance(one, str)
        else Sample(score=float(one or 0), passed=one if isinstance(one, bool) else None, reason=f"because {one}")
        for one in samples
    ]
    return combine_samples("judge", samples, aggregate=aggregate, threshold=threshold)


def test_three_runs_of_one_half_and_nought_have_mean_half_and_deviation_0_408() -> None:
    score = combine(1.0, 0.5, 0.0)
    assert (score.value, score.mean, score.passed) == (0.5, 0.5, True)
    assert score.std_dev == pytest.approx(0.408, abs=5e-4)
    assert score.samples == [1.0, 0.5, 0.0]
    assert score.reasons == ["because 1.0", "because 0.5", "because 0.0"]
    assert score.errors == []


def test_a_single_sample_keeps_its_reason_and_its_figures() -> None:
    score = combine(0.7)
    assert score == Score(
        "judge", 0.7, True, "because 0.7", samples=[0.7], mean=0.7, std_dev=0.0, reasons=["because 0.7"]
    )


@given(st.lists(GOOD | FAILED, min_size=1), st.sampled_from(["mean", "all", "any", "majority"]), st.floats(0, 1))
def test_the_figures_are_numpys_over_the_good_samples(samples, aggregate, threshold) -> None:
    score = combine_samples("judge", samples, aggregate=aggregate, threshold=threshold)
    good = [one for one in samples if one.score is not None]
    assert score.samples == [one.score for one in samples]
    assert score.reasons == [one.reason for one in samples]
    assert score.errors == [one.error for one in samples if one.score is None]
    if not good:
        assert (score.value, score.passed, score.mean, score.std_dev) == (None, None, None, None)
        return
    numbers = numpy.array([one.score for one in good])
    assert score.mean == pytest.approx(numbers.mean())
    assert score.std_dev == pytest.approx(numbers.std(), abs=1e-12)
    assert score.value is not None
    assert 0.0 <= score.value <= 1.0
    passes = [one.passed if one.passed is not None else one.score >= threshold for one in good]
    wanted = {
        "mean": score.mean >= threshold,
        "all": min(passes),
        "any": max(passes),
        "majority": numpy.mean(passes) > 0.5,
    }
    assert score.passed == wanted[aggregate]
    assert score.value == (score.mean if aggregate == "mean" else float(score.passed))


@pytest.mark.parametrize(
    ("aggregate", "samples", "passed", "reason"),
    [
        ("all", (True, True), True, "2 of 2 samples passed: because True"),
        ("all", (True, False), False, "1 of 2 samples passed: because False"),
        ("any", (True, False), True, "1 of 2 samples passed: because True"),
        ("any", (False, False), False, "0 of 2 samples passed: because False"),
        ("majority", (True, False, True), True, "2 of 3 samples passed: because True"),
        ("majority", (True, False), False, "1 of 2 samples passed, a tie, which is not a pass: because False"),
        (
            "majority",
            (True, False, "down"),
            False,
            "1 of 2 samples passed, a tie, which is not a pass, 1 failed: because False",
        ),
        ("mean", (1.0, 0.5, "down"), True, "mean 0.75 of 2 samples, 1 failed: because 1.0"),
        ("mean", (0.0, 0.8), False, "mean 0.4 of 2 samples: because 0.0"),
    ],
)
def test_the_reason_counts_the_samples_and_quotes_one_that_agrees(aggregate, samples, passed, reason) -> None:
    score = combine(*samples, aggregate=aggregate)
    assert (score.passed, score.reason) == (passed, reason)


def test_failed_samples_are_listed_and_not_averaged_in_as_zeros() -> None:
    score = combine(1.0, "judge is down", 0.8)
    assert (score.value, score.errors, score.samples) == (pytest.approx(0.9), ["judge is down"], [1.0, None, 0.8])


def test_a_judge_that_never_answered_gives_a_scoring_error_not_a_zero() -> None:
    score = combine("down", "still down")
    assert (score.value, score.passed, score.errors) == (None, None, ["down", "still down"])


def test_a_sample_that_says_passed_counts_as_passed_whatever_its_score() -> None:
    samples = [Sample(score=0.1, passed=True), Sample(score=0.9, passed=False)]
    assert combine_samples("j", samples, aggregate="any", threshold=0.5).passed is True
    assert combine_samples("j", samples, aggregate="all", threshold=0.05).passed is False


def test_nothing_cannot_be_combined() -> None:
    with pytest.raises(ValueError, match="no samples"):
        combine()


def test_a_judges_score_says_who_judged_and_how_it_came_to_be_asked() -> None:
    asked = judge(name="grader", aggregate="majority", threshold=0.9)
    score = asked.combine([Sample(score=0.8), Sample(score=0.95), Sample(score=1.0)], escalated=True)
    assert (score.name, score.passed, score.value) == ("grader", True, 1.0)
    assert (score.by, score.escalated, score.advisory) == (asked.by, True, False)


def jury_of(*scores: float | Exception, **more: Any) -> Jury:
    """A jury whose members m0, m1, … always give these scores."""
    members = []
    for number, score in enumerate(scores):
        reply = score if isinstance(score, Exception) else verdict(score, score >= 0.5, f"m{number} says so")
        model = f"m{number}"
        members.append(Judge(model=model, target=Script(reply, model_id=model)))
    return Jury(members, **more)


def test_more_than_half_of_the_votes_decide_and_each_is_kept() -> None:
    score = asyncio.run(jury_of(1.0, 0.0, 0.75).score(CASE, ANSWER))
    assert score is not None
    assert (score.passed, score.value) == (True, 2 / 3)
    assert score.votes == {"m0": True, "m1": False, "m2": True}
    assert score.samples == [1.0, 0.0, 0.75]
    assert score.reasons == ["m0 says so", "m1 says so", "m2 says so"]
    assert score.reason == "2 of 3 models passed it: m0 says so"


def test_a_tie_is_not_a_pass() -> None:
    score = asyncio.run(jury_of(1.0, 0.0).score(CASE, ANSWER))
    assert score is not None
    assert score.passed is False
    assert "a tie" in str(score.reason)


def test_a_member_without_a_verdict_has_no_vote_and_half_of_them_leave_the_jury_without_one() -> None:
    down = ValueError("down")
    score = asyncio.run(jury_of(1.0, down, 1.0).score(CASE, ANSWER))
    assert score is not None
    assert (score.passed, score.votes) == (True, {"m0": True, "m1": None, "m2": True})
    assert score.errors == ["m1: ValueError: down"]
    score = asyncio.run(jury_of(1.0, down).score(CASE, ANSWER))
    assert score is not None
    assert (score.passed, score.value) == (None, None)


def test_several_samples_of_a_member_make_one_vote() -> None:
    """Member 0 says yes, no, no; member 1 yes three times; member 2 no three times."""
    jury = jury_of(1.0, 1.0, 0.0)
    scores = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    score = jury.combine([Sample(score=value, passed=value >= 0.5) for value in scores])
    assert score.votes == {"m0": False, "m1": True, "m2": False}
    assert score.passed is False


def test_who_judged_names_the_models_and_changes_with_any_member() -> None:
    assert jury_of(1.0, 1.0).by.startswith("jury of m0, m1@")
    members = [Judge(model=f"m{n}", target=Script(model_id=f"m{n}"), prompt="helpfulness_v1") for n in range(2)]
    assert Jury(members).by != jury_of(1.0, 1.0).by
    assert Jury(members).fingerprint(CASE, ANSWER) != jury_of(1.0, 1.0).fingerprint(CASE, ANSWER)


def test_a_jury_of_one_and_a_model_twice_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two judges or more"):
        jury_of(1.0)
    twice = [Judge(model="m", target=Script(), prompt="helpfulness_v1") for _ in range(2)]
    with pytest.raises(ConfigurationError, match="'m' twice; num_runs asks one several times"):
        Jury(twice)


def assessors() -> list[Assessor]:
    replies = (lambda *_: 1.0, lambda case_id, *_: float(case_id == "c00"), lambda case_id, *_: float(case_id < "c02"))
    return [Assessor(reply, model_id=f"m{number}") for number, reply in enumerate(replies)]


def test_in_a_run_each_member_is_asked_num_runs_times_and_a_larger_number_only_adds(tmp_path: Path) -> None:
    models = assessors()
    options: dict[str, Any] = {"output_path": tmp_path / "run"}
    result = run(Agent(), suite_of(4), [Jury([model.judge() for model in models])], num_runs=1, **options)
    assert [len(model.calls) for model in models] == [4, 4, 4]
    assert result.metrics["passed"] == 2
    more = assessors()
    jury = Jury([model.judge() for model in more])
    run(Agent(), suite_of(4), [jury], num_runs=2, retry_errors=True, **options)
    assert [Counter(each for _, _, each in model.calls) for model in more] == [{1: 4}] * 3


SUITE = """
target: {{simulated: {{model: base}}}}
cases: [{{id: a, prompt: hello, expected: hello}}]
scorers:
  - judge: {judge}
"""


def a_suite(folder: Path, judge: str) -> Path:
    path = folder / "suite.yaml"
    path.write_text(SUITE.format(judge=judge))
    return path


def test_models_in_a_suite_make_a_jury_with_one_question(tmp_path: Path) -> None:
    given = "{models: [a, b, c], name: panel, when: failed, timeout: 7s, parallelism: 2, retries: 0}"
    (jury,) = build_suite(a_suite(tmp_path, given)).scorers
    assert isinstance(jury, Jury)
    assert (jury.name, jury.when, jury.size) == ("panel", "failed", 3)
    assert jury.by.startswith("jury of a, b, c@")
    assert (jury.timeout, jury.parallelism, jury.retries) == (7.0, 2, 0)


@pytest.mark.parametrize(
    ("judge", "expected"),
    [
        ("{models: [a]}", "models must be a list of two models or more"),
        ("{models: a}", "models must be a list of two models or more"),
        ("{models: [a, a]}", "'a' twice"),
        ("{models: [a, b], model: c}", "give model or models, not both"),
        ("{models: [a, b], promt: x}", "promt"),
    ],
)
def test_a_mistake_in_a_jury_is_named(tmp_path: Path, judge: str, expected: str) -> None:
    with pytest.raises(SuiteError) as caught:
        build_suite(a_suite(tmp_path, judge))
    assert expected in str(caught.value)


# Criteria


def test_criteria_in_plain_words_make_a_judge_without_a_template() -> None:
    target = Script()
    judge = Judge(model="m", target=target, criteria=["Names the capital.", "Is one sentence."])
    assert judge.by.startswith("m/criteria_v1@")
    asyncio.run(judge.score(CASE, ANSWER))
    system, question = target.messages()
    assert "by these criteria, and by nothing else:\n\n- Names the capital.\n- Is one sentence.\n" in system["content"]
    assert "# What is data" in system["content"]
    assert "Reference answer:\n<<<data" in question["content"]
    assert "It is Paris." in question["content"]


def test_a_text_of_criteria_is_one_for_each_line_and_other_words_are_another_judge() -> None:
    text = Judge(model="m", target=Script(), criteria="Names the capital.\n- Is one sentence.\n\n")
    listed = Judge(model="m", target=Script(), criteria=["Names the capital.", "Is one sentence."])
    assert text.by == listed.by
    assert Judge(model="m", target=Script(), criteria="Is {kind}.").by != listed.by


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"criteria": " \n"}, "criteria must not be empty"),
        ({"criteria": 7}, "criteria must be a text or a list of texts"),
        ({"criteria": ["good", 7]}, "criteria must be a text or a list of texts"),
        ({"criteria": "good", "template": "{{ answer }}"}, "leave out prompt and template"),
        ({"criteria": "good", "prompt": "safety_v1"}, "leave out prompt and template"),
        ({"prompt": "criteria_v1"}, "give `criteria` in plain words"),
    ],
)
def test_criteria_that_cannot_be_used_are_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        Judge(model="m", target=Script(), **arguments)


def test_criteria_are_given_in_a_suite(tmp_path: Path) -> None:
    (judge,) = build_suite(a_suite(tmp_path, "{model: a, criteria: Says hello.}")).scorers
    assert isinstance(judge, Judge)
    assert "/criteria_v1@" in judge.by
