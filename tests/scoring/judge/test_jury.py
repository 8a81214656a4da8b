"""Juries: several models, a vote each, the majority decides, and what each said is kept."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import ConfigurationError, SuiteError
from steelyard.records import Sample
from steelyard.run.config import build_suite
from steelyard.scoring import Judge, Jury
from tests.support.judge import ANSWER, CASE, Script, verdict
from tests.support.judged import Agent, Assessor, run, suite_of


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
