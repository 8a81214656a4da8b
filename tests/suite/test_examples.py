"""Few-shot examples: drawn by seed and case, in the fingerprint, never the case itself."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Runner
from steelyard.errors import ConfigurationError, SuiteError
from steelyard.suite.examples import Examples
from steelyard.suite.identity import case_fingerprint
from steelyard.suite.suite_file import read_suite_file

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
