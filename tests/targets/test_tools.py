"""The bounded agent loop: tools are called, the model gets their results, and the whole trajectory is kept."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any, Literal

import msgspec
import pytest

from steelyard import CancellationToken, CaseLimits, EvalCase, InvocationResponse
from steelyard.errors import ConfigurationError, TargetError, TransientError
from steelyard.protocols import HttpRequest, InvocationContext
from steelyard.scoring.trajectory import Trajectory, tool_calls
from steelyard.targets import AnthropicMessages, OpenAIChat, OpenAIResponses
from steelyard.targets.conversation import Call
from steelyard.targets.tools import Functions, schema_of
from tests.support.scripted_transport import (
    CONTEXT,
    ScriptedTransport,
    chat_chunk,
    chat_end,
    chat_text,
    chat_usage,
    stream,
    tool_fragment,
    whole,
)

CASE = EvalCase(
    id="a", prompt="Weather in Rome?", expected_trajectory=[{"name": "weather", "arguments": {"city": "Rome"}}]
)


def weather(city: str, days: int = 1) -> dict[str, Any]:
    """The weather of a city."""
    return {"city": city, "days": days, "sky": "clear"}


async def slow_weather(city: str) -> str:
    await asyncio.sleep(0)
    return f"clear in {city}"


def calls(*wanted: tuple[str, str, str], **timing: Any) -> Any:
    """A turn of the chat API that asks for tools."""
    fragments = [tool_fragment(n, arguments, id=i, name=name) for n, (i, name, arguments) in enumerate(wanted)]
    usage = chat_end(chat_usage(prompt=10, completion=3, cached=2, reasoning=1))
    return stream(chat_chunk(tool_calls=fragments), chat_chunk("tool_calls"), usage, **timing)


ROME = ("c1", "weather", '{"city": "Rome"}')
FINAL = stream(*chat_text("Clear", ".", usage=chat_usage(prompt=30, completion=5, cached=8)), first=0.5, step=0.25)


def target(*replies: Any, **options: Any) -> tuple[OpenAIChat, ScriptedTransport]:
    transport = ScriptedTransport(*replies)
    given = {"functions": {"weather": weather}, **options}
    return OpenAIChat("m", base_url="http://localhost/v1", transport=transport, **given), transport


def ask(
    *replies: Any, context: InvocationContext = CONTEXT, **options: Any
) -> tuple[InvocationResponse, ScriptedTransport]:
    made, transport = target(*replies, **options)
    return asyncio.run(made.invoke(CASE, context)), transport


def reported_to_model(transport: ScriptedTransport) -> str:
    """What was reported to the model about its last tool call."""
    text = transport.body["messages"][-1]["content"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("function", [weather, slow_weather], ids=["sync", "async"])
def test_a_tool_is_called_and_the_model_asked_again(function: Any) -> None:
    response, transport = ask(calls(ROME), FINAL, functions={"weather": function})
    asked, result = transport.bodies[1]["messages"][-2:]
    assert asked["tool_calls"][0]["id"] == result["tool_call_id"] == "c1"
    assert "clear" in result["content"]
    assert response.response_text == "Clear."
    assert [message["role"] for message in response.messages or []] == ["assistant", "tool", "assistant"]
    assert [call.arguments for call in tool_calls(response.messages or [])] == [{"city": "Rome"}]
    scores = Trajectory().score(CASE, response)
    assert scores is not None
    assert scores[0].passed


def test_a_sync_tool_runs_beside_the_event_loop() -> None:
    threads = []

    def whereabouts(city: str) -> str:
        threads.append(threading.current_thread())
        return city

    ask(calls(ROME), FINAL, functions={"weather": whereabouts})
    assert threads[0] is not threading.main_thread()
    assert threads[0].daemon


def test_tokens_are_summed_and_times_run_from_the_first_request() -> None:
    response, _ = ask(calls(ROME, first=1.0, step=1.0), FINAL)
    assert (response.num_tokens_input, response.num_tokens_output) == (40, 8)
    assert (response.num_tokens_input_cached, response.num_tokens_output_reasoning) == (10, 1)
    assert response.time_to_first_token == 1.0
    assert response.time_to_last_token is not None
    assert response.time_to_last_token >= 1.5  # of the last turn alone; the clock between the turns is a real one
    # (4.0 - 1.0) over 2 tokens after the first, (1.75 - 0.75) over 4
    assert response.time_per_output_token == pytest.approx((3.0 + 1.0) / 6)
    assert response.time_queued == pytest.approx(0.01)


def test_calls_of_one_turn_are_all_answered_in_order() -> None:
    _, transport = ask(calls(ROME, ("c2", "weather", '{"city": "Oslo"}')), FINAL)
    results = [message for message in transport.bodies[1]["messages"] if message["role"] == "tool"]
    assert [(result["tool_call_id"], "Oslo" in result["content"]) for result in results] == [
        ("c1", False),
        ("c2", True),
    ]


def raising(city: str) -> str:
    raise ValueError(f"no such city: {city}")


def leaving(city: str) -> str:
    raise SystemExit(3)


async def cancelling(city: str) -> str:
    raise asyncio.CancelledError


MISTAKES: dict[str, tuple[tuple[str, str, str], Any, str]] = {
    "arguments that are no JSON": (("c1", "weather", '{"city": '), weather, "the arguments are not JSON"),
    "arguments that are no object": (("c1", "weather", "[1]"), weather, "must be an object, got list"),
    "a tool that is not there": (("c1", "wether", "{}"), weather, "there is no tool named 'wether'"),
    "an argument that is not there": (("c1", "weather", '{"town": "Rome"}'), weather, "unexpected keyword argument"),
    "a tool that raises": (ROME, raising, "ValueError: no such city: Rome"),
    "a tool that wants to leave": (ROME, leaving, "SystemExit"),
    "a tool that cancels itself": (ROME, cancelling, "the tool was cancelled"),
}


@pytest.mark.parametrize(("call", "function", "message"), MISTAKES.values(), ids=MISTAKES)
def test_what_is_wrong_with_a_call_is_reported_to_the_model(
    call: tuple[str, str, str], function: Any, message: str
) -> None:
    response, transport = ask(calls(call), FINAL, functions={"weather": function})
    assert reported_to_model(transport).startswith("error: ")
    assert message in reported_to_model(transport)
    assert response.response_text == "Clear."


@pytest.mark.parametrize(("value", "text"), [("plain", "plain"), (None, "null"), ([1, "ü"], '[1,"ü"]'), (1.5, "1.5")])
def test_results_are_text_as_they_are_and_json_otherwise(value: Any, text: str) -> None:
    _, transport = ask(calls(ROME), FINAL, functions={"weather": lambda city: value})
    assert reported_to_model(transport) == text


def test_a_tool_without_arguments_may_be_called_with_empty_text() -> None:
    result = asyncio.run(Functions({"now": lambda: "noon"}).call(Call("c", "now", "")))
    assert result[1:] == ("noon", False)


def test_too_many_turns_are_an_outcome_with_the_trajectory() -> None:
    made, transport = target(calls(ROME), max_turns=3)
    response = asyncio.run(made.invoke(CASE, CONTEXT))
    assert len(transport.requests) == 3
    assert (response.error, response.stop_reason) == (None, "turn_limit")
    assert len(tool_calls(response.messages or [])) == 3
    assert response.num_tokens_input == 30


@pytest.mark.parametrize(
    ("limits", "stop_reason", "requests"),
    [
        (CaseLimits(turns=2), "turn_limit", 2),
        (CaseLimits(tokens=1), "token_limit", 1),
        (CaseLimits(turns=50), "turn_limit", 3),
    ],
)
def test_limits_of_a_case_end_the_loop(limits, stop_reason, requests) -> None:
    made, transport = target(calls(ROME), max_turns=3)
    context = msgspec.structs.replace(CONTEXT, limits=limits)
    assert asyncio.run(made.invoke(CASE, context)).stop_reason == stop_reason
    assert len(transport.requests) == requests


def test_a_fault_in_a_later_turn_keeps_what_was_said_and_paid_before_it() -> None:
    made, _ = target(calls(ROME), whole({"error": {"message": "boom"}}, status=500))
    with pytest.raises(TransientError, match="boom") as caught:
        asyncio.run(made.invoke(CASE, CONTEXT))
    partial = caught.value.partial
    assert partial is not None
    assert [message["role"] for message in partial.messages or []] == ["assistant", "tool"]
    assert (partial.num_tokens_input, partial.http_status) == (10, 500)
    assert partial.time_to_first_token is not None


def test_a_cancelled_run_takes_no_further_turn() -> None:
    token = CancellationToken()

    def cancel(city: str) -> str:
        token.cancel("enough")
        return "x"

    made, transport = target(calls(ROME), FINAL, functions={"weather": cancel})
    with pytest.raises(TargetError, match="cancelled between turns: enough"):
        asyncio.run(made.invoke(CASE, InvocationContext(case_id="a", token=token)))
    assert len(transport.requests) == 1


def test_cancelling_the_task_leaves_a_sync_tool_behind_as_excess() -> None:
    release = threading.Event()

    async def session() -> None:
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def stuck(city: str) -> str:
            loop.call_soon_threadsafe(started.set)
            release.wait(10)
            return "late"

        made, _ = target(calls(ROME), FINAL, functions={"weather": stuck})
        task = asyncio.create_task(made.invoke(CASE, CONTEXT))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.excess == 1

    try:
        asyncio.run(session())
    finally:
        release.set()


def test_without_functions_a_tool_call_is_the_answer() -> None:
    response, transport = ask(calls(ROME), functions=None)
    assert len(transport.requests) == 1
    assert [call.name for call in tool_calls(response.messages or [])] == ["weather"]


def test_functions_nobody_described_are_described_by_their_signature() -> None:
    def plan(
        city: str, mode: Literal["walk", "drive"], stops: list[str], when: Any = None, *, fast: bool = False
    ) -> str:
        """Plan a trip.

        More that the model need not read.
        """
        return ""

    assert schema_of("plan", plan) == {
        "name": "plan",
        "description": "Plan a trip.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "mode": {"enum": ["drive", "walk"]},
                "stops": {"type": "array", "items": {"type": "string"}},
                "when": {},
                "fast": {"type": "boolean"},
            },
            "required": ["city", "mode", "stops"],
        },
    }
    own = {"name": "weather", "description": "mine", "parameters": {"type": "object"}}
    _, transport = ask(FINAL, functions={"weather": weather, "slow": slow_weather}, tools=[own])
    described = {tool["function"]["name"]: tool["function"].get("description") for tool in transport.body["tools"]}
    assert described == {"weather": "mine", "slow": None}


def test_a_function_without_a_signature_needs_a_description() -> None:
    with pytest.raises(ConfigurationError, match="describe it in tools"):
        target(FINAL, functions={"highest": max})
    target(FINAL, functions={"highest": max}, tools=[{"name": "highest", "parameters": {"type": "object"}}])


def test_a_function_that_models_cannot_call_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot be given by name"):
        schema_of("f", lambda city, /: city)


def test_functions_are_part_of_the_identity_and_survive_pickling() -> None:
    made, _ = target(FINAL)
    assert made.identity()["functions"] == {"weather": "tests.targets.test_tools:weather"}
    assert made.identity()["max_turns"] == 10
    copy = pickle.loads(pickle.dumps(made))
    assert copy.identity() == made.identity()
    assert made.identity() != target(FINAL, functions={"weather": slow_weather})[0].identity()


def test_the_messages_api_gets_results_in_its_own_shape() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
    uses = [{"type": "tool_use", "id": f"t{n}", "name": name, "input": {"city": "Rome"}} for n, name in enumerate("wx")]
    usage = {"input_tokens": 1, "output_tokens": 1}
    first = {"content": [thinking, *uses], "stop_reason": "tool_use", "usage": usage}
    last = {"content": [{"type": "text", "text": "Clear."}], "stop_reason": "end_turn", "usage": usage}
    transport = ScriptedTransport(whole(first), whole(last))
    made = AnthropicMessages(
        "c", base_url="http://localhost", transport=transport, functions={"w": slow_weather}, stream=False
    )
    response = asyncio.run(made.invoke(CASE, CONTEXT))
    assert transport.body["messages"][1:] == [
        {"role": "assistant", "content": [thinking, *uses]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t0", "content": "clear in Rome"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": "error: there is no tool named 'x'",
                    "is_error": True,
                },
            ],
        },
    ]
    assert response.response_text == "Clear."
    assert response.num_tokens_output == 2


def test_the_responses_api_gets_results_in_its_own_shape() -> None:
    call = {"type": "function_call", "id": "fc", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rome"}'}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Clear."}]}
    usage = {"input_tokens": 1, "output_tokens": 1}

    def reply(request: HttpRequest) -> Any:
        output = [message] if b"function_call_output" in request.body else [reasoning, call]
        return whole({"status": "completed", "output": output, "usage": usage})

    transport = ScriptedTransport(reply)
    made = OpenAIResponses(
        "m", base_url="http://localhost/v1", transport=transport, functions={"weather": slow_weather}
    )
    response = asyncio.run(made.invoke(CASE, CONTEXT))
    result = {"type": "function_call_output", "call_id": "c1", "output": "clear in Rome"}
    assert transport.body["input"][1:] == [reasoning, call, result]
    assert response.messages == [reasoning, call, result, message]
    assert response.response_text == "Clear."
