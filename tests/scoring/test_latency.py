"""Limits on time and tokens."""

from __future__ import annotations

import pytest

from steelyard.errors import ConfigurationError
from steelyard.records import EvalCase, InvocationResponse
from steelyard.scoring import Latency, Tokens

CASE = EvalCase(id="c")


@pytest.mark.parametrize(("seconds", "passed"), [(1.0, True), (2.0, True), (2.001, False), (0.0, True)])
@pytest.mark.parametrize("metric", ["time_to_first_token", "time_to_last_token", "time_per_output_token"])
def test_latency_passes_up_to_its_limit(metric, seconds, passed) -> None:
    result = Latency(max_seconds=2, metric=metric).score(CASE, InvocationResponse(**{metric: seconds}))
    assert result is not None
    assert (result.value, result.passed) == (float(passed), passed)
    assert result.reason == (None if passed else f"{metric} 2.001 s is above 2 s")


def test_latency_does_not_apply_where_the_time_was_not_measured() -> None:
    assert Latency(max_seconds=2).score(CASE, InvocationResponse(time_to_first_token=9)) is None
    assert Latency(max_seconds=2).score(CASE, InvocationResponse(time_to_last_token=float("nan"))) is None


@pytest.mark.parametrize(
    ("limits", "output", "prompt", "passed", "reason"),
    [
        ({"max_output": 10}, 10, 99, True, None),
        ({"max_output": 10}, 11, 0, False, "11 output tokens, at most 10 allowed"),
        ({"max_input": 10}, 99, 10, True, None),
        ({"max_input": 10}, 0, 11, False, "11 input tokens, at most 10 allowed"),
        (
            {"max_input": 1, "max_output": 2},
            3,
            4,
            False,
            "3 output tokens, at most 2 allowed; 4 input tokens, at most 1 allowed",
        ),
        ({"max_input": 1, "max_output": 2}, None, 1, True, None),
        ({"max_output": 0}, 0, None, True, None),
    ],
)
def test_tokens_passes_up_to_its_limits(limits, output, prompt, passed, reason) -> None:
    result = Tokens(**limits).score(CASE, InvocationResponse(num_tokens_output=output, num_tokens_input=prompt))
    assert result is not None
    assert (result.passed, result.reason) == (passed, reason)


def test_tokens_does_not_apply_where_they_were_not_counted() -> None:
    assert Tokens(max_output=5).score(CASE, InvocationResponse(num_tokens_input=9)) is None


@pytest.mark.parametrize(
    ("make", "result"),
    [
        (lambda: Latency(max_seconds=-1), "max_seconds must be a number >= 0, got -1"),
        (lambda: Latency(max_seconds="2s"), "max_seconds must be a number >= 0, got '2s'"),  # type: ignore[arg-type]
        (lambda: Latency(max_seconds=1, metric="cost"), "metric must be one of .*, got 'cost'"),  # type: ignore[arg-type]
        (lambda: Tokens(), "tokens needs max_output or max_input, got neither"),
        (lambda: Tokens(max_output=-1), "max_output must be a number >= 0, got -1"),
        (lambda: Tokens(max_input=True), "max_input must be a number >= 0, got True"),
    ],
)
def test_a_bad_argument_is_refused_with_its_value(make, result) -> None:
    with pytest.raises(ConfigurationError, match=result):
        make()
