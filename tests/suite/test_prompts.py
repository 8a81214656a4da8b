"""Prompts: another system prompt or a template around the question; the cases keep their ids."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Runner
from steelyard.errors import ConfigurationError, SuiteError
from steelyard.suite.identity import case_fingerprint
from steelyard.suite.prompts import CasePrompt, Examples, read_prompts
from steelyard.suite.suite_file import read_suite_file

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


POOL = [EvalCase(id=f"t{n}", prompt=f"Is {n} even?", expected="no" if n % 2 else "yes") for n in range(20)]


def drawn(case: EvalCase) -> list[str]:
    """The questions of a case's examples, in order."""
    turns = case.messages or []
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
    return [turn["content"] for turn in turns[::2]]


def cases(**options: Any) -> list[EvalCase]:
    asked = [EvalCase(id=f"c{n}", prompt=f"Is {n} even?", expected="no" if n % 2 else "yes") for n in range(40)]
    return list(EvalSet("s", asked, examples=Examples(POOL, **{"n": 4, **options})))


def test_each_case_has_its_own_draw_and_draws_the_same_again() -> None:
    first = cases(seed=1)
    assert first == cases(seed=1)
    assert first != cases(seed=2)
    assert all(len(set(drawn(case))) == 4 for case in first)
    assert len({tuple(drawn(case)) for case in first}) > 30
    assert all(case.prompt not in drawn(case) for case in first)


def test_a_part_of_the_cases_draws_what_the_whole_draws() -> None:
    alone = EvalSet("s", [EvalCase(id="c7", prompt="Is 7 even?")], examples=Examples(POOL, 4, seed=1))
    assert drawn(next(iter(alone))) == drawn(cases(seed=1)[7])


def test_fixed_gives_all_the_first_ones() -> None:
    chosen = cases(select="fixed")
    assert drawn(chosen[30]) == [f"Is {n} even?" for n in range(4)]
    assert drawn(chosen[2]) == ["Is 0 even?", "Is 1 even?", "Is 3 even?", "Is 4 even?"]  # not the case itself


def test_balanced_shows_each_answer_equally_often() -> None:
    pool = [EvalCase(id=f"t{n}", prompt=str(n), expected="rare" if n < 3 else "common") for n in range(100)]
    asked = [EvalCase(id=f"c{n}", prompt="?") for n in range(30)]
    for case in EvalSet("s", asked, examples=Examples(pool, 4, select="balanced")):
        answers = Counter(turn["content"] for turn in (case.messages or [])[1::2])
        assert answers == {"rare": 2, "common": 2}


def test_they_are_in_the_fingerprint_but_not_in_an_automatic_id() -> None:
    bare = next(iter(EvalSet("s", [EvalCase(prompt="Is 5 even?")])))
    one, two = (
        next(iter(EvalSet("s", [EvalCase(prompt="Is 5 even?")], examples=Examples(POOL, 2, seed=seed))))
        for seed in (1, 2)
    )
    assert bare.id == one.id == two.id
    assert len({case_fingerprint(case) for case in (bare, one, two)}) == 3


def test_a_run_sends_them_before_the_question(tmp_path: Path) -> None:
    seen: list[EvalCase] = []
    suite = EvalSet("s", [EvalCase(id="a", prompt="Is 50 even?")], examples=Examples(POOL, 2))
    Runner(lambda case: seen.append(case) or "yes", suite, output_path=tmp_path / "run").run_sync()
    assert len(drawn(seen[0])) == 2
    assert seen[0].prompt == "Is 50 even?"


def test_a_suite_file_names_them(tmp_path: Path) -> None:
    rows = [{"q": f"{n}?", "a": n} for n in range(5)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "s.yaml").write_text(
        "cases: [{id: a, prompt: 9?}]\n"
        'examples: {from: train.json, n: 2, select: fixed, fields: {prompt: "{{ q }}", expected: "{{ a }}"}}'
    )
    (case,) = read_suite_file(tmp_path / "s.yaml").cases
    assert case.messages == [
        {"role": "user", "content": "0?"},
        {"role": "assistant", "content": "0"},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "1"},
    ]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n": 0}, "examples.n must be a number from 1"),
        ({"n": True}, "examples.n must be"),
        ({"seed": "x"}, "examples.seed must be a whole number"),
        ({"select": "best"}, "examples.select must be one of random, balanced, fixed"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        cases(**options)


def test_too_few_and_unanswered_examples_are_named(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="30 are asked for, and there are 20"):
        cases(n=30)
    with pytest.raises(SuiteError, match=r"example 1 \(x\) has no expected answer"):
        next(iter(EvalSet("s", [EvalCase(prompt="?")], examples=Examples([EvalCase(id="x", prompt="?")], 1))))
    (tmp_path / "s.yaml").write_text("cases: [{prompt: a}]\nexamples: {form: x, n: 1}")
    with pytest.raises(SuiteError, match=r"unknown key examples\.form"):
        read_suite_file(tmp_path / "s.yaml")
