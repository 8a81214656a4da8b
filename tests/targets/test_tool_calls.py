"""A tool loop's calls to the model, one by one: each has its leave, its tries and its price."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Runner
from steelyard.engine.rate_limit import EndpointLimits, RateLimited
from steelyard.engine.retry import Retry, RetryPolicy
from steelyard.errors import TargetError, TransientError
from steelyard.protocols import InvocationContext, Target
from steelyard.stats.prices import Priced, Prices
from steelyard.targets import OpenAIChat
from steelyard.tokens import estimate_input_tokens
from steelyard.units import parse_rate
from tests.support.scripted_transport import (
    ScriptedTransport,
    chat_chunk,
    chat_end,
    chat_text,
    chat_usage,
    stream,
    tool_fragment,
    whole,
)
from tests.support.virtual_time import run_virtually, virtual_clock

CASE = EvalCase(id="a", prompt="Weather in Rome?")
BUSY = whole({"error": {"message": "try again"}}, status=500)
WRONG = whole({"error": {"message": "too long"}}, status=400)
AT_ONCE = RetryPolicy(first_wait=0.0, max_wait=0.0)
PRICES = Prices(input=1_000.0, output=10_000.0)  # a million tokens


async def weather(city: str) -> str:
    return f"clear in {city}"


def wants_tool(number: int) -> Any:
    """A turn that asks for the weather, at 10 tokens in and 3 out."""
    fragment = tool_fragment(0, '{"city": "Rome"}', id=f"c{number}", name="weather")
    usage = chat_end(chat_usage(prompt=10, completion=3))
    return stream(chat_chunk(tool_calls=[fragment]), chat_chunk("tool_calls"), usage)


FINAL = stream(*chat_text("Clear", ".", usage=chat_usage(prompt=30, completion=5)))


def looping(*replies: Any) -> tuple[OpenAIChat, ScriptedTransport]:
    transport = ScriptedTransport(*replies)
    target = OpenAIChat("m", base_url="http://localhost/v1", transport=transport, functions={"weather": weather})
    return target, transport


def retried(call: Target) -> Target:
    return Retry(Priced(call, PRICES), AT_ONCE)


def test_only_the_turn_that_failed_is_asked_again() -> None:
    target, transport = looping(wants_tool(1), BUSY, BUSY, FINAL)
    context = InvocationContext("a")
    response = asyncio.run(target.bound(retried).invoke(CASE, context))
    assert [len(body["messages"]) for body in transport.bodies] == [1, 3, 3, 3]
    assert response.response_text == "Clear."
    assert [message["role"] for message in response.messages or []] == ["assistant", "tool", "assistant"]
    assert (response.retries, context.attempt) == (2, 3)


def test_what_was_paid_for_is_paid_once() -> None:
    target, _ = looping(wants_tool(1), wants_tool(2), BUSY, FINAL)
    context = InvocationContext("a")
    response = asyncio.run(target.bound(retried).invoke(CASE, context))
    assert response.cost == pytest.approx((10 + 10 + 30) * 1e-3 + (3 + 3 + 5) * 1e-2)
    assert context.spent == 0
    assert (response.num_tokens_input, response.num_tokens_output) == (50, 11)


def test_each_turn_has_all_its_tries() -> None:
    failing = [BUSY] * 4
    target, transport = looping(*failing, wants_tool(1), *failing, wants_tool(2), *failing, FINAL)
    response = asyncio.run(target.bound(retried).invoke(CASE, InvocationContext("a")))
    assert response.retries == 12
    assert len(transport.requests) == 15


def test_a_turn_that_never_comes_leaves_the_turns_before_it_and_their_cost() -> None:
    target, transport = looping(wants_tool(1), BUSY)
    with pytest.raises(TransientError) as raised:
        asyncio.run(target.bound(retried).invoke(CASE, InvocationContext("a")))
    assert len(transport.requests) == 1 + 5
    partial = raised.value.partial
    assert partial is not None
    assert [message["role"] for message in partial.messages or []] == ["assistant", "tool"]
    assert partial.cost == pytest.approx(10 * 1e-3 + 3 * 1e-2)


def test_a_case_that_runs_out_of_time_keeps_the_turns_it_had_and_their_cost() -> None:
    async def weather(city: str) -> str:
        await asyncio.Event().wait()
        return city

    transport = ScriptedTransport(wants_tool(1))
    target = OpenAIChat("m", base_url="http://localhost/v1", transport=transport, functions={"weather": weather})
    runner = Runner(target, EvalSet(id="s", cases=[CASE]), progress="off", prices={"input": 1_000, "output": 10_000})
    result = runner.run_sync(timeout=0.05)
    (record,) = result.responses
    assert record.error == "TimeoutError: timed out after 0.05 s with 3 tokens received"
    assert (record.num_tokens_input, record.num_tokens_output) == (10, 3)
    assert [message["role"] for message in record.messages or []] == ["assistant"]
    assert result.metrics["cost"] == pytest.approx(10 * 1e-3 + 3 * 1e-2)


def test_a_fault_that_does_not_pass_is_not_tried_again_in_any_turn() -> None:
    target, transport = looping(wants_tool(1), WRONG)
    with pytest.raises(TargetError, match="HTTP 400: too long"):
        asyncio.run(target.bound(retried).invoke(CASE, InvocationContext("a")))
    assert len(transport.requests) == 2


def test_a_rate_and_a_token_budget_count_every_call_to_the_model() -> None:
    async def main() -> None:
        sent: list[float] = []
        clock = virtual_clock()
        began = clock()
        replies = iter([wants_tool(1), wants_tool(2), FINAL] * 2)

        def reply(_: Any) -> Any:
            sent.append(clock() - began)
            return next(replies)

        target, _ = looping(reply)
        limits = EndpointLimits(rate=parse_rate("1/s"), clock=clock)
        bound = target.bound(lambda call: RateLimited(call, limits))
        contexts = [InvocationContext("a"), InvocationContext("b")]
        responses = await asyncio.gather(*(bound.invoke(CASE, context) for context in contexts))
        assert sent == pytest.approx([0, 1, 2, 3, 4, 5], rel=0.02)
        assert limits.answers == 6
        assert sum(context.waiting for context in contexts) > 5
        for response in responses:  # as slow as the model was, not as the rate is
            assert response.time_to_last_token is not None
            assert response.time_to_last_token < 1

    run_virtually(main())


def test_the_estimate_of_a_later_turn_counts_all_turns_before_it() -> None:
    seen: list[float] = []

    def estimate(case: EvalCase) -> float:
        seen.append(estimate_input_tokens(case))
        return seen[-1]

    target, _ = looping(wants_tool(1), wants_tool(2), FINAL)
    bound = target.bound(lambda call: RateLimited(call, EndpointLimits(tokens_per_min=10**9), estimate=estimate))
    asyncio.run(bound.invoke(CASE, InvocationContext("a")))
    assert len(seen) == 3
    assert seen == sorted(set(seen))


def test_without_functions_what_is_put_around_the_calls_is_put_around_the_target() -> None:
    target = OpenAIChat("m", base_url="http://localhost/v1", transport=ScriptedTransport(FINAL))
    seen: list[Target] = []
    assert target.bound(lambda call: seen.append(call) or call) is target  # type: ignore[func-returns-value]
    assert seen == [target]


def test_a_bound_target_says_what_the_target_says_and_can_be_pickled() -> None:
    target, _ = looping(FINAL)
    bound = target.bound(retried)
    assert bound.identity() == target.identity()
    assert (bound.model_id, bound.default_parallelism) == ("m", 50)
    assert pickle.loads(pickle.dumps(bound)).identity() == target.identity()


def test_an_answer_of_one_turn_is_the_models_own() -> None:
    target, _ = looping(FINAL)
    response = asyncio.run(target.bound(retried).invoke(CASE, InvocationContext("a")))
    assert isinstance(response, InvocationResponse)
    assert response.cost == pytest.approx(30 * 1e-3 + 5 * 1e-2)
