"""The simulated model."""

from __future__ import annotations

import asyncio
import math
import pickle
import time
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steelyard import targets
from steelyard.errors import ConfigurationError, TargetError, TransientError
from steelyard.protocols import InvocationContext, Target
from steelyard.records import EvalCase, InvocationResponse
from steelyard.targets import Simulated
from steelyard.targets import simulated as simulated_module


def instant(**options: Any) -> Simulated:
    return Simulated(**{"latency": 0, "tokens_per_second": 0} | options)


def ask(target: Simulated, case: EvalCase, **context: Any) -> InvocationResponse:
    return asyncio.run(target.invoke(case, InvocationContext(**{"case_id": case.id} | context)))


def ask_many(target: Simulated, count: int, expected: Any = "Paris", **context: Any) -> list[Any]:
    """Responses, or the exceptions in their place, for cases 0 .. count - 1."""

    async def main() -> list[Any]:
        return await asyncio.gather(
            *(
                target.invoke(
                    EvalCase(id=str(number), prompt="?", expected=expected),
                    InvocationContext(**{"case_id": str(number)} | context),
                )
                for number in range(count)
            ),
            return_exceptions=True,
        )

    return asyncio.run(main())


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The seconds that the target would have slept, instead of sleeping."""
    slept: list[float] = []

    async def pause(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(simulated_module, "_pause", pause)
    return slept


CASE = EvalCase(id="fr", prompt="Capital of France?", expected="Paris")


def test_a_simulated_model_is_a_target() -> None:
    target = Simulated(model="m", parallelism=9)
    assert isinstance(target, Target)
    assert (target.model_id, target.default_parallelism) == ("m", 9)
    assert Simulated().default_parallelism == 50


def test_the_same_case_gets_the_same_answer_whatever_else_runs() -> None:
    target = instant(accuracy=0.5)
    alone = ask(target, EvalCase(id="17", prompt="?", expected="Paris"))
    among = ask_many(target, 40)[17]
    assert (alone.response_text, alone.num_tokens_output) == (among.response_text, among.num_tokens_output)


def test_the_draws_of_a_case_are_its_own_and_other_trials_and_seeds_have_others(waits) -> None:
    target = Simulated()
    ask(target, CASE)
    first = list(waits)
    waits.clear()
    ask(target, CASE, attempt=2)
    assert waits == first
    for other in ({"trial": 1}, {"seed": 1}, {"case_id": "de"}):
        waits.clear()
        ask(target, CASE, **other)
        assert waits != first


def test_changing_how_fast_it_is_does_not_change_what_it_says() -> None:
    slow, quick = instant(accuracy=0.5, latency_sigma=2.0), instant(accuracy=0.5, tokens_per_second=1e9)
    assert [one.response_text for one in ask_many(slow, 60)] == [one.response_text for one in ask_many(quick, 60)]


def test_two_models_err_on_different_cases() -> None:
    texts = [[one.response_text for one in ask_many(instant(model=model, accuracy=0.5), 60)] for model in "ab"]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.9, 1.0])
def test_the_share_of_right_answers_is_the_accuracy(accuracy) -> None:
    right = sum(one.response_text == "Paris" for one in ask_many(instant(accuracy=accuracy), 1000))
    assert stats.binomtest(right, 1000, accuracy).pvalue > 1e-4


def test_the_time_to_the_first_token_is_lognormal_around_the_latency(waits) -> None:
    ask_many(Simulated(latency=0.3, latency_sigma=0.4, tokens_per_second=None), 1000)
    assert stats.kstest([math.log(seconds) for seconds in waits], stats.norm(math.log(0.3), 0.4).cdf).pvalue > 1e-4


def test_tokens_take_their_time_after_the_first(waits) -> None:
    response = ask(Simulated(latency=0.3, latency_sigma=0, tokens_per_second=10), CASE)
    assert waits == [0.3, (response.num_tokens_output - 1) / 10]


def test_output_tokens_are_drawn_around_their_mean() -> None:
    tokens = [one.num_tokens_output for one in ask_many(instant(output_tokens=24), 1000)]
    assert 23 < sum(tokens) / len(tokens) < 25
    assert len(set(tokens)) > 5
    assert min(tokens) >= 1
    assert {one.num_tokens_output for one in ask_many(instant(output_tokens=0), 20)} == {0}


def test_it_really_sleeps_and_reports_what_the_clock_says() -> None:
    target = Simulated(latency=0.02, latency_sigma=0, tokens_per_second=1000)
    started = time.perf_counter()
    response = ask(target, CASE)
    elapsed = time.perf_counter() - started
    assert 0.019 < response.time_to_first_token < response.time_to_last_token <= elapsed
    tokens = response.num_tokens_output
    assert response.time_to_last_token - response.time_to_first_token >= (tokens - 1) / 1000 * 0.95
    gap = (response.time_to_last_token - response.time_to_first_token) / (tokens - 1)
    assert response.time_per_output_token == pytest.approx(gap)


def test_without_streaming_there_is_no_first_token() -> None:
    response = ask(instant(stream=False), CASE)
    assert response.time_to_first_token is None
    assert response.time_per_output_token is None
    assert response.time_to_last_token >= 0


@pytest.mark.parametrize("tokens_per_second", [0, None])
def test_no_latency_and_no_token_rate_mean_no_sleep_at_all(tokens_per_second, monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("slept")

    monkeypatch.setattr(asyncio, "sleep", refuse)
    coroutine = Simulated(latency=0, tokens_per_second=tokens_per_second).invoke(CASE, InvocationContext(case_id="fr"))
    with pytest.raises(StopIteration):
        coroutine.send(None)


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("Paris", "Paris"),
        (["Paris", "paris"], "Paris"),
        ([7, 8], "7"),
        (42, "42"),
        (True, "true"),
        ({"city": "Paris"}, '{"city":"Paris"}'),
        ("", ""),
    ],
)
def test_a_right_answer_is_what_was_expected_as_text(expected, text) -> None:
    case = EvalCase(id="x", prompt="?", expected=expected)
    assert ask(instant(accuracy=1), case).response_text == text


@pytest.mark.parametrize("expected", [None, []])
def test_where_nothing_is_expected_the_answer_is_made_up(expected) -> None:
    case = EvalCase(id="x", prompt="?", expected=expected)
    first, second = (ask(instant(accuracy=1), case).response_text for _ in range(2))
    assert first == second
    assert first.endswith(".")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@given(json_values, st.integers(0, 50))
def test_a_wrong_answer_is_never_one_of_those_expected(expected, seed) -> None:
    case = EvalCase(id="x", prompt="?", expected=expected)
    right = ask(instant(accuracy=1), case, seed=seed).response_text
    wrong = ask(instant(accuracy=0), case, seed=seed).response_text
    assert wrong != right
    assert wrong == ask(instant(accuracy=0), case, seed=seed).response_text
    if isinstance(expected, list):
        assert wrong not in expected


@pytest.mark.parametrize("expected", ["unknown", "NOT", "n", "o", "?", "Paris"])
def test_a_wrong_answer_does_not_contain_what_was_expected(expected) -> None:
    for response in ask_many(instant(accuracy=0), 30, expected=expected):
        assert expected.casefold() not in response.response_text.casefold()


def test_a_share_of_the_cases_fails_for_good_in_every_trial_and_attempt() -> None:
    target = instant(error_rate=0.2)

    def failed(**context: Any) -> set[int]:
        outcomes = ask_many(target, 500, **context)
        return {number for number, one in enumerate(outcomes) if isinstance(one, TargetError)}

    first = failed()
    assert stats.binomtest(len(first), 500, 0.2).pvalue > 1e-4
    assert failed(attempt=2) == failed(trial=3) == first
    assert failed(seed=1) != first


def test_a_lasting_failure_says_that_it_is_simulated_and_is_not_transient() -> None:
    with pytest.raises(TargetError, match=r"^simulated: .*'fr'") as caught:
        ask(instant(error_rate=1), CASE)
    assert not isinstance(caught.value, TransientError)


def test_a_share_of_the_attempts_fails_for_the_moment() -> None:
    target = instant(transient_rate=0.3)
    outcomes = [ask_many(target, 500, attempt=attempt) for attempt in (1, 2)]
    failed = [{n for n, one in enumerate(some) if isinstance(one, TransientError)} for some in outcomes]
    for some in failed:
        assert stats.binomtest(len(some), 500, 0.3).pvalue > 1e-4
    assert failed[0] != failed[1]


def test_a_retried_answer_is_the_one_it_would_have_been() -> None:
    steady, shaky = instant(accuracy=0.5), instant(accuracy=0.5, transient_rate=0.5)
    for number in range(30):
        case = EvalCase(id=str(number), prompt="?", expected="Paris")
        for attempt in range(1, 40):
            try:
                response = ask(shaky, case, attempt=attempt)
            except TransientError:
                continue
            assert response.response_text == ask(steady, case).response_text
            break


def test_the_response_is_complete() -> None:
    response = ask(instant(accuracy=1), CASE)
    assert response.input_prompt == CASE.prompt
    assert response.stop_reason == "stop"
    assert response.request_time.utcoffset() == timedelta(0)
    assert response.num_tokens_input == round(3 * 1.3)
    assert response.messages == [
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris"},
    ]


def test_input_tokens_count_system_prompt_messages_and_prompt() -> None:
    history = [
        {"role": "user", "content": [{"type": "text", "text": "one two"}, {"type": "image_url"}, "three"]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    case = EvalCase(id="x", prompt="four five", system_prompt="six", messages=history)
    response = ask(instant(), case)
    assert response.num_tokens_input == round(6 * 1.3)
    assert response.messages[:2] == history
    assert [turn["role"] for turn in response.messages[2:]] == ["user", "assistant"]
    assert len(case.messages) == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"accuracy": 1.5}, "accuracy must be a number from 0 to 1, got 1.5"),
        ({"accuracy": "high"}, "accuracy must be a number from 0 to 1, got 'high'"),
        ({"accuracy": math.nan}, "accuracy must be a number from 0 to 1, got nan"),
        ({"accuracy": True}, "accuracy must be a number from 0 to 1, got True"),
        ({"error_rate": -0.1}, "error_rate must be a number from 0 to 1, got -0.1"),
        ({"transient_rate": 2}, "transient_rate must be a number from 0 to 1, got 2"),
        ({"latency": -1}, "latency must be a number >= 0, got -1"),
        ({"latency": math.inf}, "latency must be a number >= 0, got inf"),
        ({"latency_sigma": -1}, "latency_sigma must be a number >= 0, got -1"),
        ({"tokens_per_second": -1}, "tokens_per_second must be a number >= 0, got -1"),
        ({"output_tokens": -1}, "output_tokens must be a number >= 0, got -1"),
        ({"parallelism": 0}, "parallelism must be >= 1, got 0"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_value(options, error) -> None:
    with pytest.raises(ConfigurationError, match=error):
        Simulated(**options)


def test_identity_changes_with_what_decides_an_answer_and_warns_about_timing() -> None:
    base = Simulated().identity()
    for changed in ({"model": "x"}, {"accuracy": 0.1}, {"error_rate": 0.1}, {"output_tokens": 5}):
        other = Simulated(**changed).identity()
        assert {key for key in base if base[key] != other[key]} == set(changed)
    for changed in (
        {"latency": 1.0},
        {"latency_sigma": 0.0},
        {"tokens_per_second": None},
        {"stream": False},
        {"transient_rate": 0.1},
    ):
        other = Simulated(**changed).identity()
        assert {key for key in base if base[key] != other[key]} == {f"~{key}" for key in changed}
    assert Simulated(parallelism=1).identity() == base


def test_a_pickled_model_answers_alike() -> None:
    target = instant(accuracy=0.5)
    assert ask(pickle.loads(pickle.dumps(target)), CASE).response_text == ask(target, CASE).response_text


def test_the_package_offers_each_target_by_name_and_nothing_else() -> None:
    endpoints = ["AnthropicMessages", "Bedrock", "Gemini", "OpenAIChat", "OpenAICompletions", "OpenAIResponses"]
    assert (
        dir(targets)
        == sorted(targets.__all__)
        == sorted([*endpoints, "Agent", "Answers", "CallableTarget", "Command", "Simulated", "as_target"])
    )
    assert all(getattr(targets, name).__name__ == name for name in targets.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Callable_'"):
        targets.Callable_  # noqa: B018
