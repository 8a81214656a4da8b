"""What holds for every built-in scorer."""

from __future__ import annotations

import inspect
import json
import pickle
import time
from typing import Any

import pytest

import steelyard.scoring
from steelyard.errors import ConfigurationError, SuiteError
from steelyard.plugins import BUILT_IN, find
from steelyard.records import EvalCase, InvocationResponse
from steelyard.run.config import build_suite
from steelyard.scoring.base import LIMIT_NAMES, as_scorer, scorer_by_name
from tests.support.paths import DOCS

NEEDED: dict[str, dict[str, Any]] = {
    "latency": {"max_seconds": 1},
    "tokens": {"max_output": 1},
    "tests": {"argv": ["pytest"]},
    "combined": {"weights": {"exact": 1}},
    "program": {"argv": ["grade"]},
}
OTHER: dict[str, dict[str, Any]] = {
    "exact": {"ignore_case": True},
    "contains": {"all": True},
    "regex": {"pattern": "x"},
    "choice": {"name": "letter"},
    "number": {"tolerance": 1},
    "json_match": {"rules": {"a": "number"}},
    "json_schema": {"schema": {"type": "object"}},
    "similarity": {"threshold": 0.1},
    "rouge_l": {"threshold": 0.1},
    "bleu": {"tokens": "char"},
    "latency": {"max_seconds": 2},
    "tokens": {"max_output": 2},
    "trajectory": {"mode": "subset"},
}
"""Arguments unlike the defaults; for a scorer that is not here, another threshold."""
SCORERS = {name: find("scorers", name) for name in BUILT_IN["scorers"] if name not in ("judge", "python")}
NAMES = list(SCORERS)
COMPUTED = [name for name in NAMES if name not in ("tests", "program", "combined")]
"""Those that look at the answer themselves: no program is started."""


def made(kind: str, **more: Any) -> Any:
    return scorer_by_name(kind, {**NEEDED.get(kind, {}), **more})


def made_otherwise(kind: str) -> Any:
    return made(kind, **OTHER.get(kind, {"threshold": 0.1}))


@pytest.mark.parametrize("name", NAMES)
def test_its_default_name_is_its_registry_name_and_another_can_be_given(name) -> None:
    assert made(name).name == name
    assert made(name, name="mine").name == "mine"
    with pytest.raises(ConfigurationError, match="name must be a text that is not empty, got ''"):
        made(name, name="")


@pytest.mark.parametrize("name", NAMES)
def test_it_takes_a_threshold_within_its_range(name) -> None:
    for threshold in (0, 0.25, 1):
        assert made(name, threshold=threshold).threshold == threshold
    assert made(name, threshold=0.25).identity() != made(name, threshold=0.75).identity()
    for wrong in (-0.1, 1.1, float("nan"), True, "high", None):
        with pytest.raises(ConfigurationError, match=r"threshold must be a number within 0\.\.1, got "):
            made(name, threshold=wrong)


@pytest.mark.parametrize("threshold", [0.01, 0.5, 1.0])
def test_right_or_wrong_is_the_same_from_any_threshold_above_zero_on(threshold) -> None:
    case = EvalCase(prompt="p", expected="yes")
    right, wrong = InvocationResponse(response_text="yes"), InvocationResponse(response_text="no")
    scorer = made("exact", threshold=threshold)
    assert (scorer.score(case, right).passed, scorer.score(case, wrong).passed) == (True, False)


def test_with_a_threshold_of_zero_nobody_fails_and_the_value_and_reason_stay() -> None:
    case, wrong = EvalCase(prompt="p", expected="yes"), InvocationResponse(response_text="no")
    score = made("exact", threshold=0).score(case, wrong)
    assert (score.value, score.passed, score.reason) == (0.0, True, "expected 'yes', got 'no'")


@pytest.mark.parametrize("name", NAMES)
def test_its_identity_is_json_and_tells_every_argument_but_its_limits(name) -> None:
    plain, other = made(name).identity(), made_otherwise(name).identity()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["kind"] == other["kind"] == name
    assert plain != other
    deciding = set(inspect.signature(SCORERS[name]).parameters) - {*LIMIT_NAMES, "folder"}  # where, not what
    assert set(plain) - {"patterns", "reader"} == {"kind", *deciding}


@pytest.mark.parametrize("name", COMPUTED)
def test_it_can_be_sent_to_another_process(name) -> None:
    scorer = made_otherwise(name)
    expected = {"choice": "B"}.get(name, "3")
    case = EvalCase(id="c", expected=expected, expected_trajectory=["a"])
    response = InvocationResponse(response_text="3", messages=[], time_to_last_token=1.0, num_tokens_output=1)
    before = scorer.score(case, response)  # which also fills whatever the scorer keeps
    copy = pickle.loads(pickle.dumps(scorer))
    assert copy.identity() == scorer.identity()
    assert copy.score(case, response) == before


@pytest.mark.parametrize("name", NAMES)
def test_it_cannot_be_changed_once_it_is_made(name) -> None:
    with pytest.raises(AttributeError):
        made(name).name = "other"


def test_a_missing_or_unknown_argument_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"scorer 'latency': .*max_seconds"):
        as_scorer("latency")
    with pytest.raises(ConfigurationError, match=r"scorer 'exact': .*ignore_cas"):
        scorer_by_name("exact", {"ignore_cas": True})
    with pytest.raises(ConfigurationError, match="no scorer is named 'rouge'; did you mean 'rouge_l'"):
        as_scorer("rouge")


def test_every_scorer_has_a_public_class() -> None:
    public = {getattr(steelyard.scoring, name) for name in steelyard.scoring.__all__}
    assert set(SCORERS.values()) <= public
    assert set(steelyard.scoring.__all__) == set(steelyard.scoring._HOMES)


def test_every_scorer_stands_in_the_documentation() -> None:
    text = (DOCS / "scorers.md").read_text()
    for name, kind in SCORERS.items():
        assert f"`{name}`" in text
        for argument in inspect.signature(kind).parameters:
            assert f"`{argument}`" in text or f"`{argument}=" in text or f"{argument}:" in text, (name, argument)


def test_a_suite_file_names_scorers_with_their_arguments(tmp_path) -> None:
    (tmp_path / "s.yaml").write_text(
        "id: s\ntarget: {simulated: {}}\ncases: [{id: a, prompt: p, expected: 3}]\n"
        "scorers:\n"
        "  - number: {tolerance: 0.5}\n"
        "  - contains: {not_contains: [sorry], ignore_case: true}\n"
        "  - json_match: {rules: {a.b: {number: {tolerance: 1}}}}\n"
        "  - trajectory: {mode: in_order, counts: {search: {min: 1, max: 3}}}\n"
        "  - latency: {max_seconds: 2}\n"
    )
    assert [scorer.name for scorer in build_suite(tmp_path / "s.yaml").scorers] == [
        "number",
        "contains",
        "json_match",
        "trajectory",
        "latency",
    ]
    (tmp_path / "bad.yaml").write_text(
        "id: s\ntarget: {simulated: {}}\ncases: [{id: a, prompt: p}]\nscorers:\n  - number: {tolerance: -1}\n"
    )
    with pytest.raises(SuiteError, match=r"scorers\[0\].number: tolerance must be a number >= 0, got -1"):
        build_suite(tmp_path / "bad.yaml")


MEGABYTES = 5_000_000
HUGE = {
    "prose": "the quick brown fox ",
    "digits": "1",
    "list": "1,2,",
    "grouped": "1 234,",
    "answers": "answer is the ",
    "answer to": "answer to ",
    "boxes": "\\boxed{",
    "capitals": "A I ",
    "stars": "*",
    "brackets": "[",
    "objects": '{"a":',
    "near json": "[[a",
    "code blocks": "```[1,",
    "quotes": '{"',
    "escapes": '["\\"',
    "space": "{ ",
    "ideographs": "漢",
}


@pytest.mark.parametrize("kind", HUGE)
@pytest.mark.parametrize("name", [name for name in COMPUTED if name not in ("latency", "tokens", "trajectory")])
def test_no_answer_of_five_megabytes_takes_a_second(name, kind) -> None:
    unit = HUGE[kind]
    text = (unit * (MEGABYTES // len(unit.encode())))[:MEGABYTES]
    scorer = scorer_by_name(
        name, {"json_schema": {"schema": {"type": "array"}}, "regex": {"pattern": "fo+y"}}.get(name)
    )
    expected = {"choice": "B", "number": 3, "json_match": {"a": 1}}.get(name, "the quick brown dog " * 5)
    case, response = EvalCase(id="c", expected=expected), InvocationResponse(response_text=text)
    began = time.process_time()
    if name == "bleu":
        with pytest.raises(ValueError, match="too long to compare"):
            scorer.score(case, response)
    else:
        score = scorer.score(case, response)
        assert score is not None
        assert len(score.reason or "") < 1_100
    assert time.process_time() - began < 1.0
