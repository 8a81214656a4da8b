"""The responses API: how a case is asked, and how every kind of answer is read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from steelyard import EvalCase, InvocationResponse
from steelyard.errors import TargetError, TransientError
from steelyard.scoring.trajectory import tool_calls
from steelyard.targets import OpenAIResponses
from tests.support.scripted_transport import CONTEXT, ScriptedTransport, broken, stream, whole

CASE = EvalCase(id="fr", prompt="Capital of France?")
USAGE = {
    "input_tokens": 20,
    "input_tokens_details": {"cached_tokens": 16},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 25,
}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Rome"}'}


def ask(*replies: Any, case: EvalCase = CASE, **options: Any) -> tuple[InvocationResponse, ScriptedTransport]:
    transport = ScriptedTransport(*replies)
    target = OpenAIResponses("m", base_url="http://localhost:8000/v1", transport=transport, **options)
    return asyncio.run(target.invoke(case, CONTEXT)), transport


def failure_of(*replies: Any) -> TargetError:
    with pytest.raises(TargetError) as caught:
        ask(*replies)
    return caught.value


def message(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": list(parts)}


def text(words: str) -> dict[str, Any]:
    return {"type": "output_text", "text": words, "annotations": []}


def body(*output: dict[str, Any], status: str = "completed", **more: Any) -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "status": status, "output": list(output), "usage": USAGE, **more}


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", "sequence_number": 1, **fields}


def deltas(kind: str, *pieces: str) -> list[dict[str, Any]]:
    return [event(f"{kind}.delta", item_id="i", output_index=0, content_index=0, delta=piece) for piece in pieces]


def events(*parts: Any, **timing: Any) -> Any:
    flat = [one for part in parts for one in (part if isinstance(part, list) else [part])]
    opening = event("created", response=body(status="in_progress", usage=None))
    return stream(opening, *flat, done=False, names=True, **timing)


def completed(*output: dict[str, Any]) -> dict[str, Any]:
    return event("completed", response=body(*output))


PLAIN = events(
    event("output_item.added", output_index=0, item=message()),
    event("content_part.added", part=text("")),
    deltas("output_text", "Pa", "ris"),
    event("output_item.done", output_index=0, item=message(text("Paris"))),
    completed(message(text("Paris"))),
    first=1.0,
    step=1.0,
)


def test_a_case_is_asked_in_this_apis_shape() -> None:
    case = EvalCase(id="a", system_prompt="Be brief.", prompt="?")
    _, transport = ask(PLAIN, case=case, params={"store": False})
    assert transport.requests[0].url == "http://localhost:8000/v1/responses"
    assert transport.body == {
        "model": "m",
        "stream": True,
        "store": False,
        "input": [{"role": "user", "content": "?"}],
        "instructions": "Be brief.",
    }


def test_chat_messages_become_items_and_items_pass_through() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, picture]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        CALL,
        {"role": "assistant", "content": [{"type": "text", "text": "So."}]},
    ]
    _, transport = ask(PLAIN, case=EvalCase(id="a", messages=messages))
    assert transport.body["input"] == [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Look:"},
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"},
            ],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        CALL,
        {"role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
    ]


def test_tools_of_the_chat_shape_are_flattened() -> None:
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    _, transport = ask(PLAIN, tools=[{"type": "function", "function": function}, {"type": "web_search"}])
    assert transport.body["tools"] == [{"type": "function", **function}, {"type": "web_search"}]


def test_a_streamed_answer_has_its_text_times_and_tokens() -> None:
    response, _ = ask(PLAIN)
    assert response.response_text == "Paris"
    assert response.messages == [message(text("Paris"))]
    assert response.stop_reason == "stop"
    assert response.time_to_first_token == response.time_to_first_content_token == 4.0
    assert response.time_to_last_token == 7.0
    assert (response.num_tokens_input, response.num_tokens_input_cached) == (20, 16)
    assert (response.num_tokens_output, response.num_tokens_output_reasoning) == (5, 2)


@pytest.mark.parametrize("kind", ["reasoning_summary_text", "reasoning_text"])
def test_reasoning_is_timed_but_is_no_part_of_the_text(kind: str) -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}
    reply = events(
        deltas(kind, "Hm."),
        deltas("output_text", "Paris"),
        completed(item, message(text("Paris"))),
        first=1.0,
        step=1.0,
    )
    response, _ = ask(reply)
    assert response.response_text == "Paris"
    assert response.messages == [item, message(text("Paris"))]
    assert response.time_to_first_token == response.time_to_first_reasoning_token == 2.0
    assert response.time_to_first_content_token == 3.0


def test_a_tool_call_is_read_and_timed_from_its_first_sign() -> None:
    added = event("output_item.added", output_index=0, item={**CALL, "arguments": ""})
    reply = events(
        added, deltas("function_call_arguments", '{"ci', 'ty":"Rome"}'), completed(CALL), first=1.0, step=1.0
    )
    response, _ = ask(reply)
    calls = tool_calls(response.messages or [])
    assert [(call.id, call.name, call.arguments) for call in calls] == [("call_1", "weather", {"city": "Rome"})]
    assert response.time_to_first_token == 2.0
    assert response.stop_reason == "tool_calls"


def test_items_that_were_done_stand_in_for_an_output_that_the_last_event_leaves_out() -> None:
    done = event("output_item.done", output_index=0, item=message(text("Paris")))
    response, _ = ask(events(deltas("output_text", "Paris"), done, completed()))
    assert response.response_text == "Paris"


def test_an_answer_in_one_piece_is_read_alike() -> None:
    response, _ = ask(whole(body(message(text("Paris")))), stream=False)
    assert (response.response_text, response.stop_reason) == ("Paris", "stop")
    assert response.time_to_first_token is None


def test_a_refusal_is_the_text_and_says_that_it_is_one() -> None:
    refusal = message({"type": "refusal", "refusal": "I cannot."})
    response, _ = ask(events(deltas("refusal", "I cannot."), completed(refusal)))
    assert (response.response_text, response.stop_reason) == ("I cannot.", "refusal")


def test_an_answer_that_ran_out_of_tokens_is_whole_and_says_so() -> None:
    last = body(message(text("Par")), status="incomplete", incomplete_details={"reason": "max_output_tokens"})
    response, _ = ask(events(deltas("output_text", "Par"), event("incomplete", response=last)))
    assert (response.response_text, response.stop_reason) == ("Par", "max_output_tokens")


def test_an_empty_answer_is_an_error() -> None:
    assert "the answer is empty" in str(failure_of(events(completed())))


def test_a_stream_without_its_last_event_is_transient_and_its_text_is_kept() -> None:
    for reply in (events(deltas("output_text", "Pa", "r")), broken(events(deltas("output_text", "Pa", "r")))):
        error = failure_of(reply)
        assert isinstance(error, TransientError)
        assert error.partial is not None
        assert error.partial.response_text == "Par"


FAILED = {
    "failed": (
        event("failed", response=body(status="failed", error={"code": "server_error", "message": "boom"})),
        True,
    ),
    "rate": (
        event("failed", response=body(status="failed", error={"code": "rate_limit_exceeded", "message": "boom"})),
        True,
    ),
    "error event": ({"type": "error", "code": "server_error", "message": "boom", "param": None}, True),
    "the request's fault": ({"type": "error", "code": "invalid_prompt", "message": "boom", "param": None}, False),
}


@pytest.mark.parametrize(("last", "transient"), FAILED.values(), ids=FAILED)
def test_a_failure_inside_a_stream_is_told(last: dict[str, Any], transient: bool) -> None:
    error = failure_of(events(deltas("output_text", "Par"), last))
    assert "boom" in str(error)
    assert isinstance(error, TransientError) is transient
    assert error.partial is not None
    assert error.partial.response_text == "Par"


def test_a_failed_response_in_one_piece_is_told() -> None:
    error = failure_of(whole(body(status="failed", error={"code": "server_error", "message": "boom"})))
    assert "boom (server_error)" in str(error)
    assert isinstance(error, TransientError)
