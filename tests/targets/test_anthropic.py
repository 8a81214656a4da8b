"""The messages API: how a case is asked, and how every kind of answer is read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from steelyard import EvalCase, InvocationResponse
from steelyard.errors import TargetError, TransientError
from steelyard.scoring.trajectory import tool_calls
from steelyard.targets import AnthropicMessages
from tests.support.scripted_transport import CONTEXT, ScriptedTransport, broken, stream, whole

CASE = EvalCase(id="fr", prompt="Capital of France?")


def ask(*replies: Any, case: EvalCase = CASE, **options: Any) -> tuple[InvocationResponse, ScriptedTransport]:
    transport = ScriptedTransport(*replies)
    target = AnthropicMessages("c", base_url="http://localhost:8000", transport=transport, **options)
    return asyncio.run(target.invoke(case, CONTEXT)), transport


def failure_of(*replies: Any) -> TargetError:
    with pytest.raises(TargetError) as caught:
        ask(*replies)
    return caught.value


def start(**usage: Any) -> dict[str, Any]:
    counts = {"input_tokens": 25, "output_tokens": 1, **usage}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "stop_reason": None}
    return {"type": "message_start", "message": {**message, "usage": counts}}


def block(index: int, content: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": content},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def text_block(index: int, *pieces: str) -> list[dict[str, Any]]:
    return block(index, {"type": "text", "text": ""}, *({"type": "text_delta", "text": piece} for piece in pieces))


def end(reason: str = "end_turn", **usage: Any) -> list[dict[str, Any]]:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return [
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 15, **usage}},
        {"type": "message_stop"},
    ]


def events(*parts: Any, **timing: Any) -> Any:
    flat = [event for part in parts for event in (part if isinstance(part, list) else [part])]
    return stream(*flat, done=False, names=True, **timing)


PLAIN = events(start(), {"type": "ping"}, text_block(0, "Pa", "ris"), end(), first=1.0, step=1.0)


def test_a_case_is_asked_in_this_apis_shape() -> None:
    case = EvalCase(id="a", system_prompt="Be brief.", prompt="?")
    _, transport = ask(PLAIN, case=case, params={"temperature": 0}, api_key="sk-test-key")
    assert transport.requests[0].url == "http://localhost:8000/v1/messages"
    assert transport.body == {
        "model": "c",
        "max_tokens": 4096,
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": "?"}],
        "system": "Be brief.",
    }
    assert transport.headers["x-api-key"] == "sk-test-key"
    assert transport.headers["anthropic-version"] == "2023-06-01"
    assert "authorization" not in transport.headers


def test_max_tokens_and_version_can_be_said() -> None:
    _, transport = ask(PLAIN, params={"max_tokens": 7}, api_version="2024-01-01")
    assert transport.body["max_tokens"] == 7
    assert transport.headers["anthropic-version"] == "2024-01-01"


def test_a_base_url_with_its_v1_is_the_same_place() -> None:
    transport = ScriptedTransport(PLAIN)
    target = AnthropicMessages("c", base_url="http://localhost:8000/v1/", transport=transport)
    asyncio.run(target.invoke(CASE, CONTEXT))
    assert transport.requests[0].url == "http://localhost:8000/v1/messages"


def test_chat_messages_are_turned_into_this_apis_shape() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    other = {"id": "t2", "type": "function", "function": {"name": "clock", "arguments": "{oops"}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    linked = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    messages = [
        {"role": "system", "content": "One."},
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, picture, linked]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": "noon"},
        {"role": "developer", "content": "Two."},
    ]
    _, transport = ask(PLAIN, case=EvalCase(id="a", system_prompt="Zero.", messages=messages, prompt="so?"))
    assert transport.body["system"] == "Zero.\n\nOne.\n\nTwo."
    assert transport.body["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look:"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "t2", "name": "clock", "input": {"INVALID_JSON": "{oops"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                {"type": "tool_result", "tool_use_id": "t2", "content": "noon"},
            ],
        },
        {"role": "user", "content": "so?"},
    ]


def test_messages_of_this_apis_own_shape_pass_through() -> None:
    cached = {"type": "text", "text": "long", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [cached]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"n": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]},
    ]
    _, transport = ask(PLAIN, case=EvalCase(id="a", messages=messages))
    assert transport.body["messages"] == messages


def test_a_system_message_in_blocks_keeps_its_blocks() -> None:
    cached = {"type": "text", "text": "long", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "system", "content": [cached]}, {"role": "user", "content": "?"}]
    _, transport = ask(PLAIN, case=EvalCase(id="a", system_prompt="First.", messages=messages))
    assert transport.body["system"] == [{"type": "text", "text": "First."}, cached]


def test_tools_of_the_chat_shape_are_translated_and_the_providers_own_left_alone() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    _, transport = ask(PLAIN, tools=[{"type": "function", "function": function}, search])
    assert transport.body["tools"] == [{"name": "f", "description": "d", "input_schema": {"type": "object"}}, search]


def test_a_streamed_answer_has_its_text_times_and_tokens() -> None:
    response, _ = ask(PLAIN)
    assert response.response_text == "Paris"
    assert response.messages == [{"role": "assistant", "content": [{"type": "text", "text": "Paris"}]}]
    assert response.stop_reason == "end_turn"
    # message_start, ping and an empty block's start come before the first token.
    assert response.time_to_first_token == response.time_to_first_content_token == 4.0
    assert response.time_to_last_token == 8.0
    assert (response.num_tokens_input, response.num_tokens_output) == (25, 15)
    assert response.num_tokens_input_cached is None


def test_input_tokens_are_all_that_were_sent_cached_or_not() -> None:
    opening = start(input_tokens=3, cache_read_input_tokens=100, cache_creation_input_tokens=40)
    response, _ = ask(events(opening, text_block(0, "x"), end(cache_read_input_tokens=100)))
    assert response.num_tokens_input == 143
    assert response.num_tokens_input_cached == 100
    assert response.num_tokens_input_cache_write == 40


def test_running_totals_are_not_added_up() -> None:
    more = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 9, "input_tokens": 30}}
    details = {"output_tokens_details": {"thinking_tokens": 6}}
    response, _ = ask(events(start(), text_block(0, "x"), more, end(**details)))
    assert (response.num_tokens_input, response.num_tokens_output) == (30, 15)
    assert response.num_tokens_output_reasoning == 6


def test_thinking_is_timed_and_kept_with_its_signature_but_is_no_part_of_the_text() -> None:
    thinking = block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "Hm"},
        {"type": "thinking_delta", "thinking": "m."},
        {"type": "signature_delta", "signature": "c2ln"},
    )
    response, _ = ask(events(start(), thinking, text_block(1, "Paris"), end(), first=1.0, step=1.0))
    assert response.response_text == "Paris"
    assert response.messages == [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hmm.", "signature": "c2ln"},
                {"type": "text", "text": "Paris"},
            ],
        }
    ]
    assert response.time_to_first_token == response.time_to_first_reasoning_token == 3.0
    assert response.time_to_first_content_token == 8.0


def test_fragments_of_a_tools_input_are_joined() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    pieces = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", '{"ci', 'ty":"Rome"}')]
    response, _ = ask(events(start(), text_block(0, "Let me see."), block(1, use, *pieces), end("tool_use")))
    calls = tool_calls(response.messages or [])
    assert [(call.id, call.name, call.arguments) for call in calls] == [("toolu_1", "weather", {"city": "Rome"})]
    assert (response.response_text, response.stop_reason) == ("Let me see.", "tool_use")


def test_a_tool_without_input_is_called_with_none_and_a_torn_input_is_marked() -> None:
    bare = block(0, {"type": "tool_use", "id": "a", "name": "clock", "input": {}})
    torn = block(
        1, {"type": "tool_use", "id": "b", "name": "f", "input": {}}, {"type": "input_json_delta", "partial_json": "{n"}
    )
    response, _ = ask(events(start(), bare, torn, end("tool_use")))
    assert [call.arguments for call in tool_calls(response.messages or [])] == [{}, {"INVALID_JSON": "{n"}]


def test_an_answer_in_one_piece_is_read_alike() -> None:
    content = [{"type": "text", "text": "Paris"}, {"type": "tool_use", "id": "a", "name": "f", "input": {"n": 1}}]
    usage = {"input_tokens": 3, "output_tokens": 5, "cache_read_input_tokens": 4}
    body = {"type": "message", "role": "assistant", "content": content, "stop_reason": "tool_use", "usage": usage}
    response, _ = ask(whole(body, headers={"request-id": "req_9", "x-request-id": ""}), stream=False)
    assert response.response_text == "Paris"
    assert response.messages == [{"role": "assistant", "content": content}]
    assert (response.num_tokens_input, response.num_tokens_input_cached, response.num_tokens_output) == (7, 4, 5)
    assert (response.time_to_first_token, response.request_id) == (None, "req_9")


def test_a_refusal_is_no_error_even_without_words() -> None:
    response, _ = ask(events(start(), end("refusal")))
    assert (response.response_text, response.stop_reason) == ("", "refusal")


def test_an_empty_answer_is_an_error() -> None:
    error = failure_of(events(start(), end()))
    assert "the answer is empty" in str(error)
    assert not isinstance(error, TransientError)


def test_a_stream_without_message_stop_is_transient_and_its_text_is_kept() -> None:
    for reply in (events(start(), text_block(0, "Par"), end()[:1]), broken(events(start(), text_block(0, "Par")))):
        error = failure_of(reply)
        assert isinstance(error, TransientError)
        assert error.partial is not None
        assert error.partial.response_text == "Par"


@pytest.mark.parametrize(
    ("kind", "transient", "overloaded"),
    [
        ("overloaded_error", True, True),
        ("rate_limit_error", True, True),
        ("api_error", True, False),
        ("timeout_error", True, False),
        ("invalid_request_error", False, False),
        ("authentication_error", False, False),
    ],
)
def test_an_error_event_is_classified_by_its_type(kind: str, transient: bool, overloaded: bool) -> None:
    error = {"type": "error", "error": {"type": kind, "message": "Overloaded"}}
    for reply in (events(start(), text_block(0, "Par"), error), whole(error)):
        error = failure_of(reply)
        assert f"Overloaded ({kind})" in str(error)
        assert isinstance(error, TransientError) is transient
        assert getattr(error, "overloaded", False) is overloaded
