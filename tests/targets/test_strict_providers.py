"""Providers that refuse what they do not know: a tool loop of three turns passes on each, sent back as it came."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Runner
from steelyard.errors import TargetError
from steelyard.protocols import HttpReply, HttpRequest
from steelyard.report.summary import summary
from steelyard.targets import AnthropicMessages, OpenAIChat, OpenAIResponses
from steelyard.targets.endpoint import EndpointTarget
from tests.support.scripted_transport import CONTEXT, ScriptedTransport, stream, whole

CASE = EvalCase(id="a", prompt="Weather in Rome and Oslo?")
CITIES = ("Rome", "Oslo")

Body = dict[str, Any]
Check = Callable[[Body], HttpReply | None]
"""Returns the refusal of a request, or None for one that is taken."""
Turn = Callable[[int], dict[str, Any]]


def weather(city: str) -> str:
    return f"clear in {city}"


def refusal(message: str, status: int = 400, **more: Any) -> HttpReply:
    return whole({"error": {"message": message, "type": "invalid_request_error", **more}}, status=status)


def assistants(body: Body) -> list[tuple[int, Body]]:
    return [(place, turn) for place, turn in enumerate(body["messages"]) if turn["role"] == "assistant"]


class StrictChat:
    """Asks for the weather twice, then answers; each request is checked as its provider checks it."""

    def __init__(self, turn: Turn, check: Check, *, streamed: bool) -> None:
        self._turn = turn
        self._check = check
        self._streamed = streamed
        self.refused = 0

    def __call__(self, request: HttpRequest) -> HttpReply:
        body = json.loads(request.body)
        results = [turn for turn in body["messages"] if turn["role"] == "tool"]
        named = [call["id"] for _, turn in assistants(body) for call in turn.get("tool_calls", ())]
        assert [turn["tool_call_id"] for turn in results] == named
        if (refused := self._check(body)) is not None:
            self.refused += 1
            return refused
        number = len(results)
        message = self._turn(number) if number < len(CITIES) else {"role": "assistant", "content": "Clear in both."}
        finish = "tool_calls" if number < len(CITIES) else "stop"
        if not self._streamed:
            return whole({"choices": [{"index": 0, "message": message, "finish_reason": finish}]})
        deltas = [{name: value} for name, value in message.items() if name != "role"]
        ending = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
        return stream(*({"choices": [{"index": 0, "delta": delta}]} for delta in deltas), ending)


def call(number: int, identifier: str | None = None, **more: Any) -> dict[str, Any]:
    arguments = json.dumps({"city": CITIES[number]})
    function = {"name": "weather", "arguments": arguments}
    return {"index": 0, "id": identifier or f"call_{number}", "type": "function", "function": function, **more}


def groq_turn(number: int) -> dict[str, Any]:
    return {"role": "assistant", "reasoning": "I must look.", "tool_calls": [call(number)]}


def groq_check(body: Body) -> HttpReply | None:
    for place, turn in assistants(body):
        for name in turn.keys() - {"role", "content", "tool_calls", "reasoning", "name"}:
            problem = f"('messages.{place}' : property '{name}' is unsupported)"
            return refusal(f"'messages.{place}' : for 'role:assistant' the following must be satisfied[{problem}]")
    return None


def mistral_turn(number: int) -> dict[str, Any]:
    thinking = [{"type": "thinking", "thinking": [{"type": "text", "text": "I must look."}]}]
    return {"role": "assistant", "content": thinking, "tool_calls": [call(number, f"Abcdefgh{number}")]}


def mistral_check(body: Body) -> HttpReply | None:
    for place, turn in assistants(body):
        for name in turn.keys() - {"role", "content", "tool_calls", "prefix"}:
            problem = {"type": "extra_forbidden", "loc": ["body", "messages", place, "assistant", name],
                       "msg": "Extra inputs are not permitted", "input": turn[name]}  # fmt: skip
            return whole({"object": "error", "message": {"detail": [problem]}, "code": None}, status=422)
        if turn["tool_calls"] and not isinstance(turn["content"], list):
            return refusal("the thinking chunks must be passed back", 400)
    return None


def gemini_turn(number: int) -> dict[str, Any]:
    signature = {"google": {"thought_signature": f"signed-{number}"}}
    return {"role": "assistant", "tool_calls": [call(number, extra_content=signature)]}


def gemini_check(body: Body) -> HttpReply | None:
    for number, (place, turn) in enumerate(assistants(body)):
        for name in turn.keys() - {"role", "content", "tool_calls", "extra_content"}:
            problem = (
                f"Invalid JSON payload received. Unknown name \"{name}\" at 'messages[{place}]': Cannot find field."
            )
            return whole([{"error": {"code": 400, "message": problem, "status": "INVALID_ARGUMENT"}}], status=400)
        for one in turn["tool_calls"]:
            if one.get("extra_content") != {"google": {"thought_signature": f"signed-{number}"}}:
                problem = "Function call is missing a thought_signature in functionCall parts."
                return whole([{"error": {"code": 400, "message": problem, "status": "INVALID_ARGUMENT"}}], status=400)
    return None


def openrouter_turn(number: int) -> dict[str, Any]:
    details = [{"type": "reasoning.encrypted", "data": f"data-{number}", "format": "x", "index": 0}]
    return {"role": "assistant", "content": "", "reasoning": "Hm.", "reasoning_details": details,
            "tool_calls": [call(number)]}  # fmt: skip


def openrouter_check(body: Body) -> HttpReply | None:
    for number, (_, turn) in enumerate(assistants(body)):
        wanted = [{"type": "reasoning.encrypted", "data": f"data-{number}", "format": "x", "index": 0}]
        if turn.get("reasoning_details") != wanted:
            return refusal("reasoning_details must be passed back unmodified", code=400)
    return None


PROVIDERS: dict[str, tuple[Turn, Check]] = {
    "Groq": (groq_turn, groq_check),
    "Mistral": (mistral_turn, mistral_check),
    "Gemini": (gemini_turn, gemini_check),
    "OpenRouter": (openrouter_turn, openrouter_check),
}


def converse(
    server: Callable[[HttpRequest], HttpReply], kind: type[EndpointTarget] = OpenAIChat, **options: Any
) -> tuple[InvocationResponse, ScriptedTransport]:
    transport = ScriptedTransport(server)
    target = kind("m", base_url="http://localhost/v1", transport=transport, functions={"weather": weather}, **options)
    return asyncio.run(target.invoke(CASE, CONTEXT)), transport


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(("turn", "check"), PROVIDERS.values(), ids=PROVIDERS)
def test_a_tool_loop_of_three_turns_is_never_refused(turn: Turn, check: Check, streamed: bool) -> None:
    server = StrictChat(turn, check, streamed=streamed)
    response, transport = converse(server, stream=streamed)
    assert response.response_text == "Clear in both."
    assert (len(transport.requests), server.refused) == (3, 0)


def thinking_server(request: HttpRequest) -> HttpReply:
    """Anthropic with extended thinking: the thinking blocks before a tool call come back with their signatures."""
    body = json.loads(request.body)
    turns = [turn for turn in body["messages"] if turn["role"] == "assistant"]
    for number, turn in enumerate(turns):
        first = turn["content"][0]
        if first != {"type": "thinking", "thinking": "I must look.", "signature": f"signed-{number}"}:
            message = f"messages.{number}.content.0: Invalid `signature` in `thinking` block"
            return whole({"type": "error", "error": {"type": "invalid_request_error", "message": message}}, status=400)
    number = len(turns)
    if number == len(CITIES):
        return whole({"content": [{"type": "text", "text": "Clear in both."}], "stop_reason": "end_turn"})
    events: list[Any] = [
        {"type": "message_start", "message": {"content": []}},
        {"type": "content_block_start", "index": 0,
         "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "I must "}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "look."}},
        {"type": "content_block_delta", "index": 0,
         "delta": {"type": "signature_delta", "signature": f"signed-{number}"}},
        {"type": "content_block_start", "index": 1,
         "content_block": {"type": "tool_use", "id": f"t{number}", "name": "weather", "input": {}}},
        {"type": "content_block_delta", "index": 1,
         "delta": {"type": "input_json_delta", "partial_json": json.dumps({"city": CITIES[number]})}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
        {"type": "message_stop"},
    ]  # fmt: skip
    return stream(*events, done=False, names=True)


def test_thinking_comes_back_to_anthropic_with_its_signatures() -> None:
    response, transport = converse(thinking_server, AnthropicMessages)
    assert response.response_text == "Clear in both."
    assert len(transport.requests) == 3


def responses_server(request: HttpRequest) -> HttpReply:
    """OpenAI without storage: encrypted reasoning comes back, and each kind of call has its own kind of output."""
    items = json.loads(request.body)["input"]
    kinds = [item.get("type") for item in items]
    if "custom_tool_call" not in kinds:
        call = {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c1", "name": "weather", "input": "Rome"}
        reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
        return whole({"status": "completed", "output": [reasoning, call]})
    assert items[1]["encrypted_content"] == "gAAA"
    assert items[3] == {"type": "custom_tool_call_output", "call_id": "c1", "output": "clear in Rome"}
    if "apply_patch_call" not in kinds:
        operation = {"type": "delete_file", "path": "a.py"}
        call = {"type": "apply_patch_call", "id": "a1", "call_id": "c2", "status": "completed", "operation": operation}
        return whole({"status": "completed", "output": [call]})
    assert items[-1]["type"] == "apply_patch_call_output"
    assert (items[-1]["call_id"], items[-1]["status"]) == ("c2", "failed")
    return whole(
        {"status": "completed", "output": [{"type": "message", "content": [{"type": "output_text", "text": "ok"}]}]}
    )


def test_each_kind_of_call_is_answered_by_its_own_kind_of_output() -> None:
    transport = ScriptedTransport(responses_server)
    functions = {"weather": lambda input: f"clear in {input}"}
    target = OpenAIResponses("m", base_url="http://localhost/v1", transport=transport, functions=functions)
    response = asyncio.run(target.invoke(CASE, CONTEXT))
    assert response.response_text == "ok"


def refusing(name: str) -> Check:
    def check(body: Body) -> HttpReply | None:
        for place, turn in assistants(body):
            if name in turn:
                return refusal(f"messages[{place}].{name}: {name} is not supported with this model")
        return None

    return check


def test_a_field_that_is_refused_is_left_out_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    server = StrictChat(groq_turn, refusing("reasoning"), streamed=True)
    transport = ScriptedTransport(server)
    target = OpenAIChat("m", base_url="http://localhost/v1", transport=transport, functions={"weather": weather})

    async def twice() -> list[InvocationResponse]:
        return [await target.invoke(CASE, CONTEXT) for _ in range(2)]

    with caplog.at_level(logging.WARNING, logger="steelyard"):
        responses = asyncio.run(twice())
    assert [response.response_text for response in responses] == ["Clear in both."] * 2
    assert server.refused == 1
    assert len(transport.requests) == 1 + 3 + 3
    assert len(caplog.records) == 1
    assert "reasoning" in caplog.text
    first = (responses[0].messages or [])[0]
    assert first["reasoning"] == "I must look."  # what came is kept, whatever is sent back


def test_a_parameter_of_the_users_is_never_left_out() -> None:
    def check(body: Body) -> HttpReply | None:
        return refusal("reasoning is not supported with this model") if assistants(body) else None

    server = StrictChat(groq_turn, check, streamed=False)
    with pytest.raises(TargetError, match="reasoning is not supported"):
        converse(server, stream=False, params={"reasoning": {"effort": "low"}})
    assert server.refused == 1


def test_an_echo_is_left_out_although_a_parameter_has_its_name() -> None:
    server = StrictChat(groq_turn, refusing("reasoning"), streamed=False)
    response, transport = converse(server, stream=False, params={"reasoning": {"effort": "low"}})
    assert response.response_text == "Clear in both."
    assert all(body["reasoning"] == {"effort": "low"} for body in transport.bodies)


def test_a_400_about_something_else_is_final() -> None:
    def check(body: Body) -> HttpReply | None:
        return refusal("maximum context length exceeded") if assistants(body) else None

    server = StrictChat(groq_turn, check, streamed=False)
    with pytest.raises(TargetError, match="maximum context length"):
        converse(server, stream=False)
    assert server.refused == 1


def test_a_run_notes_the_fields_that_were_left_out(tmp_path: Path) -> None:
    server = StrictChat(groq_turn, refusing("reasoning"), streamed=True)
    target = OpenAIChat(
        "m", base_url="http://localhost/v1", transport=ScriptedTransport(server), functions={"weather": weather}
    )
    result = Runner(target, EvalSet("s", [CASE]), progress="off", output_path=tmp_path / "run").run_sync()
    assert result.metrics["fields_left_out"] == ["reasoning"]
    assert result.metrics["counts"]["ok"] == 1
    assert json.loads((tmp_path / "run" / "run.json").read_bytes())["fields_left_out"] == ["reasoning"]


def test_a_run_counts_answers_that_think_in_their_text_and_scores_what_follows() -> None:
    texts = iter(["<think>Hm.</think>Paris", "Paris"])

    def reply(_: HttpRequest) -> HttpReply:
        message = {"role": "assistant", "content": next(texts)}
        return whole({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    target = OpenAIChat("m", base_url="http://localhost/v1", transport=ScriptedTransport(reply))
    cases = [EvalCase(id=str(number), prompt="Capital of France?", expected="Paris") for number in range(2)]
    result = Runner(target, EvalSet("s", cases), ["exact"], progress="off", parallelism=1).run_sync()
    assert (result.metrics["passed"], result.metrics["reasoning_in_text"]) == (2, 1)
    assert "thinks in text" in summary(result.typed_metrics)
