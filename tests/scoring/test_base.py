"""Scorers from what users hand in, run so that none can end a run."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import ConfigurationError
from steelyard.records import EvalCase, InvocationResponse, Score, verdict
from steelyard.scoring import Exact, FunctionScorer
from steelyard.scoring.base import as_scorer, as_scorers, run_scorers
from steelyard.scoring.pipeline import limited
from tests.support.engine import until

CASE = EvalCase(id="c", expected="x")
RESPONSE = InvocationResponse(response_text="x")


class Given:
    """A scorer that gives back, or raises, what it was made with."""

    def __init__(self, answer: Any, name: str = "given") -> None:
        self._answer = answer
        self.name = name

    def identity(self) -> dict[str, Any]:
        return {"kind": "given"}

    def score(self, case: EvalCase, response: InvocationResponse) -> Any:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


class GivenLater(Given):
    async def score(self, case: EvalCase, response: InvocationResponse) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().score(case, response)


def run(*scorers: Any) -> list[Score]:
    return asyncio.run(run_scorers([limited(scorer) for scorer in scorers], CASE, RESPONSE))


def only(*scorers: Any) -> Score:
    scores = run(*scorers)
    assert len(scores) == 1
    return scores[0]


@pytest.mark.parametrize("kind", [Given, GivenLater])
def test_sync_and_async_scorers_are_run_in_order(kind) -> None:
    scores = run(kind(Score("a", 1.0, True)), Given(None), kind([Score("b", 0.0), Score("c", 1.0)]))
    assert [(score.name, score.value, score.passed) for score in scores] == [
        ("a", 1.0, True),
        ("b", 0.0, False),
        ("c", 1.0, True),
    ]


def test_a_scorer_that_does_not_apply_adds_nothing() -> None:
    assert run(Given(None), Given([])) == []


class Exit(BaseException):
    """Neither an Exception nor one of Python's own exits, as some libraries raise."""


@pytest.mark.parametrize("kind", [Given, GivenLater])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        SystemExit(3),
        RecursionError("deep"),
        ExceptionGroup("several", [ValueError("a")]),
        BaseExceptionGroup("several", [SystemExit(1)]),
        asyncio.CancelledError("its own"),
        Exit("gone"),
        AssertionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_scorer_that_raises_yields_a_score_that_says_so(kind, error) -> None:
    """And the scorers after it are still run."""
    broken, fine = run(kind(error, "broken"), Given(Score("fine", 1.0)))
    assert (broken.name, broken.value, broken.passed) == ("broken", None, None)
    assert len(broken.errors) == 1
    assert broken.errors[0].startswith(type(error).__name__)
    assert fine.value == 1.0


def test_a_keyboard_interrupt_is_not_a_score() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Given(KeyboardInterrupt()))


@pytest.mark.parametrize(("answer", "value", "passed"), [(True, 1.0, True), (0.4, 0.4, False), (1, 1.0, True)])
def test_a_class_may_return_a_number_or_a_bool_as_a_function_does(answer, value, passed) -> None:
    (score,) = run(Given(answer))
    assert (score.name, score.value, score.passed) == (Given(answer).name, value, passed)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (1.5, "not within 0..1"),
        ("pass", "returned str"),
        ([Score("a", 1.0), 1.0], "returned list"),
        (Score("a"), "neither a value, a label nor errors"),
        (Score("a", 1.5), "not within 0..1"),
        (Score("a", -0.1), "not within 0..1"),
        (Score("a", float("nan")), "not within 0..1"),
        (Score("a", float("inf")), "not within 0..1"),
        (Score("a", "much"), "could not convert"),  # type: ignore[arg-type]
        (Score("a", float("nan"), unit="steps"), "not within ±1e+15"),
        (Score("a", 1e16, better="lower"), "not within ±1e+15"),
        (Score("a", 7.0, unit="steps", better="less"), "'higher' or 'lower'"),  # type: ignore[arg-type]
        (Score("a", 7.0), "a measurement needs a unit"),
        (Score("a", label="  "), "an empty label"),
        (Score("a", 1.0, errors=None), "NoneType"),  # type: ignore[arg-type]
    ],
)
def test_a_malformed_answer_is_a_scoring_error_and_not_a_wrong_answer(answer, message) -> None:
    score = only(Given(answer))
    assert (score.name, score.value, score.passed) == ("given", None, None)
    assert message in score.errors[0]


@pytest.mark.parametrize(
    "answer",
    [
        Score("steps", 7.0, unit="steps", better="lower"),
        Score("steps", 0.7, better="higher"),
        Score("tone", label="formal"),
        Score("tone", 0.2, label="formal"),
        Score("depth", -3.5, unit="m", label="deep"),
    ],
)
def test_a_measurement_or_label_decides_nothing_unless_it_says_so(answer) -> None:
    found = only(Given(answer))
    assert found == answer
    assert verdict([found]) is None
    decided = only(Given(msgspec.structs.replace(answer, passed=False)))
    assert verdict([decided, Score("exact", 1.0, True)]) is False


def test_a_long_label_is_cut_and_its_blanks_are_one() -> None:
    assert only(Given(Score("tone", label=" very\n formal "))).label == "very formal"
    assert len(only(Given(Score("tone", label="x" * 1000))).label) == 200


def test_a_scorer_that_hangs_is_a_scoring_error_within_the_time_limit() -> None:
    async def hang(case: EvalCase, response: InvocationResponse) -> float:
        await asyncio.sleep(3600)
        return 1.0

    began = time.monotonic()
    stuck, fine = run(FunctionScorer(hang, timeout=0.03), Given(Score("fine", 1.0)))
    assert time.monotonic() - began < 5
    assert (stuck.name, stuck.errors) == ("hang", ["TimeoutError: no score within 0.03 s"])
    assert fine.value == 1.0


def test_a_timeout_that_the_scorer_raised_itself_keeps_its_own_words() -> None:
    assert only(GivenLater(TimeoutError("the judge did not answer"))).errors == [
        "TimeoutError: the judge did not answer"
    ]


def test_cancelling_a_run_cancels_its_scorer() -> None:
    """A cancellation from outside is not the scorer's failure: no score is made of it."""
    inside = False

    async def hang(case: EvalCase, response: InvocationResponse) -> float:
        nonlocal inside
        inside = True
        await asyncio.sleep(3600)
        return 1.0

    async def main() -> None:
        task = asyncio.create_task(run_scorers([limited(FunctionScorer(hang))], CASE, RESPONSE))
        await until(lambda: inside)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_what_a_scorer_gives_is_turned_into_plain_values() -> None:
    class Text(str):
        pass

    odd = Score(
        Text("n"),
        np.float32(0.5),
        np.bool_(True),  # type: ignore[arg-type]
        Text("why"),
        samples=[np.float64(1), None],
        mean=np.float64(0.5),
        std_dev=np.int64(0),
    )
    score = only(Given(odd))
    assert score == Score("n", 0.5, True, "why", [1.0, None], 0.5, 0.0)
    assert [type(value) for value in (score.name, score.value, score.passed, score.reason, score.std_dev)] == [
        str,
        float,
        bool,
        str,
        float,
    ]


def test_a_score_without_a_name_gets_its_scorers() -> None:
    assert only(Given(Score("", 1.0), "mine")).name == "mine"


def test_an_endless_reason_is_cut() -> None:
    assert len(only(Given(Score("a", 1.0, reason="x" * 1_000_000))).reason or "") == 10_000


@pytest.mark.parametrize(
    ("answer", "value", "passed"),
    [
        (True, 1.0, True),
        (False, 0.0, False),
        (1, 1.0, True),
        (0.5, 0.5, True),
        (0.49, 0.49, False),
        (np.float32(1), 1.0, True),
        (np.int64(0), 0.0, False),
        (np.bool_(True), 1.0, True),
    ],
)
def test_a_function_may_give_a_number_or_a_bool(answer, value, passed) -> None:
    assert only(FunctionScorer(lambda case, response: answer, name="f")) == Score("f", value, passed)


@given(value=st.floats(0, 1), threshold=st.floats(0, 1))
def test_a_function_passes_from_its_threshold_on(value, threshold) -> None:
    score = only(FunctionScorer(lambda case, response: value, name="f", threshold=threshold))
    assert (score.value, score.passed) == (value, value >= threshold)


@pytest.mark.parametrize("answer", ["yes", {}, object(), 1.01, -1, float("nan"), 1 + 0j])
def test_a_function_that_gives_anything_else_is_a_scoring_error(answer) -> None:
    score = only(FunctionScorer(lambda case, response: answer, name="f"))
    assert score.value is None
    assert score.errors


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_a_threshold_outside_its_range_is_refused(threshold) -> None:
    with pytest.raises(ConfigurationError, match="threshold must be within"):
        FunctionScorer(lambda case, response: 1, threshold=threshold)


def good(case: EvalCase, response: InvocationResponse) -> bool:
    return True


def test_a_name_a_function_and_a_scorer_are_scorers() -> None:
    mine = Given(None)
    scorers = as_scorers(["exact", good, mine])
    assert isinstance(scorers[0], Exact)
    assert (scorers[1].name, scorers[2]) == ("good", mine)


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        ("exakt", "no scorer is named 'exakt'; did you mean 'exact'?"),
        (3, "not a scorer: 3"),
        (None, "not a scorer: None"),
        (Exact, "not a scorer: <class"),
    ],
)
def test_anything_else_is_refused_and_named(thing, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        as_scorer(thing)


@pytest.mark.parametrize("things", ["exact", good, Exact(), None, 3])
def test_scorers_that_are_not_a_list_are_refused_with_a_word_on_what_to_do(things) -> None:
    with pytest.raises(ConfigurationError, match="scorers must be a list"):
        as_scorers(things)


def test_two_scorers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two scorers are named 'exact'"):
        as_scorers(["exact", Exact(ignore_case=True)])


def test_a_functions_identity_changes_with_its_source_and_threshold() -> None:
    """Re-scoring is free, so a changed function is another scorer."""
    first = FunctionScorer(good).identity()
    assert first["qualname"] == "good"
    assert first["source"]
    assert FunctionScorer(good, threshold=0.9).identity() != first
    assert FunctionScorer(lambda case, response: False, name="good").identity()["source"] != first["source"]


def test_a_function_without_source_has_an_identity() -> None:
    assert FunctionScorer(eval("lambda case, response: 1"), name="f").identity()["source"] is None
