"""Prompts: another system prompt or a template around the question; the cases keep their ids."""

from __future__ import annotations

import pytest

from steelyard import EvalCase, EvalSet
from steelyard.errors import ConfigurationError, SuiteError
from steelyard.suite.examples import Examples
from steelyard.suite.identity import case_fingerprint
from steelyard.suite.prompts import CasePrompt, read_prompts

CASES = [EvalCase(prompt="What is 1 + 1?", metadata={"topic": "sums"}), EvalCase(id="own", prompt="What is 2 + 2?")]


def asked(prompt: CasePrompt, cases=CASES, **suite) -> list[EvalCase]:
    return list(EvalSet("s", cases, **suite).with_prompt(prompt))


def test_a_system_prompt_takes_the_place_of_the_suites_and_not_of_a_cases_own() -> None:
    cases = [*CASES, EvalCase(id="has one", prompt="Hi", system_prompt="mine")]
    found = asked(CasePrompt("Be brief."), cases, system_prompt="the suite's")
    assert [case.system_prompt for case in found] == ["Be brief.", "Be brief.", "mine"]
    assert [case.prompt for case in found] == [case.prompt for case in cases]


def test_a_template_without_a_system_prompt_leaves_the_suites() -> None:
    found = asked(CasePrompt(prompt="{{ prompt }} One word."), system_prompt="the suite's")
    assert [case.prompt for case in found] == ["What is 1 + 1? One word.", "What is 2 + 2? One word."]
    assert {case.system_prompt for case in found} == {"the suite's"}


def test_ids_are_the_same_with_every_prompt_and_fingerprints_are_not() -> None:
    plain = list(EvalSet("s", CASES))
    for prompt in (CasePrompt("Be brief."), CasePrompt(prompt="Q: {{ prompt }}")):
        found = asked(prompt)
        assert [case.id for case in found] == [case.id for case in plain]
        assert not {case_fingerprint(case) for case in found} & {case_fingerprint(case) for case in plain}


def test_a_template_sees_the_case_and_not_what_is_expected() -> None:
    case = EvalCase(id="a", prompt="Why?", metadata={"topic": "x{{ y }}"}, expected="secret")
    (found,) = asked(CasePrompt(prompt="{{ id }}|{{ metadata.topic }}|{{ prompt }}"), [case])
    assert found.prompt == "a|x{{ y }}|Why?"  # data is never evaluated
    with pytest.raises(ConfigurationError, match="unknown name 'expected'"):
        CasePrompt(prompt="{{ expected }}")


def test_of_messages_the_users_last_turn_is_the_question() -> None:
    turns = [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Why?"}]
    (found,) = asked(CasePrompt(prompt="{{ prompt }}!"), [EvalCase(id="a", messages=turns)])
    assert found.prompt is None
    assert found.messages == [turns[0], {"role": "user", "content": "Why?!"}]
    assert turns[1]["content"] == "Why?"


@pytest.mark.parametrize(
    "messages", [[{"role": "assistant", "content": "x"}], [{"role": "user", "content": [{"type": "image"}]}]]
)
def test_a_case_without_a_question_is_named(messages) -> None:
    with pytest.raises(SuiteError, match=r"prompts\.a\.prompt needs a prompt in the case"):
        asked(CasePrompt(prompt="{{ prompt }}!", where="prompts.a"), [EvalCase(id="odd", messages=messages)])


def test_a_template_that_cannot_be_filled_in_names_the_case() -> None:
    with pytest.raises(SuiteError, match="own"):
        asked(CasePrompt(prompt="{{ metadata.topic }} {{ prompt }}"))


def test_examples_stay_as_they_are() -> None:
    examples = Examples([EvalCase(id="e", prompt="What is 3 + 3?", expected="6")], 1)
    (found, _) = asked(CasePrompt(prompt="Q: {{ prompt }}"), examples=examples)
    assert found.prompt == "Q: What is 1 + 1?"
    assert [turn["content"] for turn in found.messages or []] == ["What is 3 + 3?", "6"]


def test_prompts_are_read_from_mappings_and_files(tmp_path) -> None:
    (tmp_path / "long.txt").write_text("You are careful.\n")
    (tmp_path / "steps.txt").write_text("{{ prompt }}\nThink step by step.\n")
    found = read_prompts({"terse": {"system_prompt": "One word."}, "long": "long.txt", "steps": "steps.txt"}, tmp_path)
    assert list(found) == ["terse", "long", "steps"]
    assert found["long"].system_prompt == "You are careful."
    assert found["steps"].system_prompt is None
    assert asked(found["steps"])[0].prompt == "What is 1 + 1?\nThink step by step."


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "prompts must be a mapping"),
        (["a"], "prompts must be a mapping"),
        ({"a": 3}, r"prompts\.a must be a text file's path"),
        ({"a": {}}, r"prompts\.a must have a system_prompt"),
        ({"a": {"system": "x"}}, r"unknown key prompts\.a\.system; did you mean 'system_prompt'"),
        ({"a": {"system_prompt": 3}}, r"prompts\.a\.system_prompt must be text"),
        ({"a": {"prompt": "always this"}}, "would ask the same of every case"),
        ({"a": {"prompt": "{{ promt }}"}}, "unknown name 'promt'; did you mean 'prompt'"),
        ({"a": {"prompt": "{{ prompt"}}, "is not a template"),
        ({"a": "Be brief."}, "cannot read .*Be brief.*for the words themselves write a mapping"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_said(tmp_path, given, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_prompts(given, tmp_path)
