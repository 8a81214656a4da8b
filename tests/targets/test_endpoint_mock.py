"""The endpoints over the real transport, against the mock: what the server says it sent is what is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from steelyard import EvalCase, InvocationResponse
from steelyard.errors import TargetError, TransientError
from steelyard.scoring.trajectory import tool_calls
from steelyard.targets import AnthropicMessages, Bedrock, Gemini, OpenAIChat, OpenAICompletions, OpenAIResponses
from steelyard.targets.endpoint import EndpointTarget
from tests.support.mock import Mock, running_mock
from tests.support.scripted_transport import CONTEXT

KEY = "sk-mock-key-1234"
KINDS: list[type[EndpointTarget]] = [
    OpenAIChat,
    OpenAIResponses,
    OpenAICompletions,
    AnthropicMessages,
    Gemini,
    Bedrock,
]
WITH_TOOLS = [kind for kind in KINDS if kind is not OpenAICompletions]
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    with running_mock(key=KEY, output_tokens=8, latency="5ms", chunk_interval="2ms") as server:
        yield server


def base_url_of(mock: Mock, kind: type[EndpointTarget]) -> str:
    return mock.url if kind in (Gemini, Bedrock) else mock.base_url


def ask(mock: Mock, kind: type[EndpointTarget], *prompts: str, **options: Any) -> list[InvocationResponse]:
    target = kind("m", base_url=base_url_of(mock, kind), **{"api_key": KEY, **options})

    async def session() -> list[InvocationResponse]:
        await target.open(len(prompts))
        try:
            return await asyncio.gather(*(target.invoke(EvalCase(id=p, prompt=p), CONTEXT) for p in prompts))
        finally:
            await target.close()

    return asyncio.run(session())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_and_a_whole_answer_say_the_same(mock: Mock, kind: type[EndpointTarget]) -> None:
    (streamed,) = ask(mock, kind, f"{kind.kind} a")
    (at_once,) = ask(mock, kind, f"{kind.kind} a", stream=False)
    for response in (streamed, at_once):
        assert response.response_text
        assert response.num_tokens_output == 8
        assert response.num_tokens_input
        assert not response.tokens_estimated
        assert response.http_status == 200
        assert response.request_id
        assert response.messages
    assert streamed.stop_reason == at_once.stop_reason
    assert at_once.time_to_first_token is None
    assert streamed.time_to_first_token is not None
    assert streamed.time_to_last_token is not None
    assert 0 < streamed.time_to_first_token < streamed.time_to_last_token


@pytest.mark.parametrize("kind", KINDS)
def test_many_at_once_all_get_their_own_answer(mock: Mock, kind: type[EndpointTarget]) -> None:
    responses = ask(mock, kind, *(f"{kind.kind} many {n}" for n in range(30)))
    assert len({response.request_id for response in responses}) == 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_key_is_a_final_error_without_the_key_in_it(mock: Mock, kind: type[EndpointTarget]) -> None:
    with pytest.raises(TargetError, match="HTTP 401") as caught:
        ask(mock, kind, "a", api_key="sk-wrong-key-5678")
    assert not isinstance(caught.value, TransientError)
    assert "sk-wrong-key-5678" not in str(caught.value)


@pytest.mark.parametrize("kind", WITH_TOOLS)
@pytest.mark.parametrize("stream", [True, False])
def test_tool_calls_reasoning_and_refusals_come_through(kind: type[EndpointTarget], stream: bool) -> None:
    with running_mock(tool_call_rate=1.0, reasoning_tokens=4, output_tokens=4) as server:
        (response,) = ask(server, kind, "a", tools=[TOOL], stream=stream)
        (call,) = tool_calls(response.messages or [])
        assert (call.name, call.malformed) == ("weather", False)
        if stream:
            assert response.time_to_first_reasoning_token is not None
            assert response.time_to_first_token == response.time_to_first_reasoning_token
    with running_mock(refusal_rate=1.0) as server:
        (response,) = ask(server, kind, "a", stream=stream)
        # Gemini and Bedrock have no refusals, but filters that stop an answer.
        assert response.stop_reason == ("content_filter" if kind in (Gemini, Bedrock) else "refusal")
        assert response.response_text


@pytest.mark.parametrize("kind", WITH_TOOLS)
def test_a_tool_that_has_a_function_is_called_and_the_model_asked_again(kind: type[EndpointTarget]) -> None:
    asked: list[dict[str, Any]] = []

    def weather(**arguments: Any) -> str:
        asked.append(arguments)
        return "sunny"

    with running_mock(tool_call_rate=1.0) as server:
        (response,) = ask(server, kind, "a", tools=[TOOL], functions={"weather": weather})
        assert server.stats()["requests"] == 2
    assert len(asked) == 1
    assert response.response_text


@pytest.mark.parametrize("kind", KINDS)
def test_a_torn_stream_is_transient_and_a_429_says_overloaded(kind: type[EndpointTarget]) -> None:
    with running_mock(torn_rate=1.0, output_tokens=8) as server, pytest.raises(TransientError) as caught:
        ask(server, kind, "a")
    assert caught.value.partial is not None
    with running_mock(rate="1/min", retry_after=3) as server, pytest.raises(TransientError) as caught:
        ask(server, kind, "a", "b", "c")
    assert (caught.value.overloaded, caught.value.retry_after) == (True, 3.0)
