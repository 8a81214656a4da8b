"""The chat completions API: how a case is asked, and how every kind of answer is read."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase, InvocationResponse
from steelyard.errors import TargetError, TransientError, TransportError
from steelyard.protocols import HttpReply, RemoteTarget
from steelyard.scoring.trajectory import tool_calls
from steelyard.targets import OpenAIChat
from tests.support.scripted_transport import (
    CONTEXT,
    ScriptedTransport,
    broken,
    chat_chunk,
    chat_end,
    chat_text,
    chat_usage,
    chat_whole,
    chunked,
    stream,
    tool_fragment,
    whole,
)

CASE = EvalCase(id="fr", prompt="Capital of France?")
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def ask(*replies: Any, case: EvalCase = CASE, **options: Any) -> tuple[InvocationResponse, ScriptedTransport]:
    transport = ScriptedTransport(*replies)
    target = OpenAIChat("m", base_url="http://localhost:8000/v1", transport=transport, **options)
    return asyncio.run(target.invoke(case, CONTEXT)), transport


def failure_of(*replies: Any, **options: Any) -> TargetError:
    with pytest.raises(TargetError) as caught:
        ask(*replies, **options)
    return caught.value


def test_it_is_a_remote_target() -> None:
    assert isinstance(OpenAIChat("m", base_url="http://localhost/v1"), RemoteTarget)


def test_a_stream_is_asked_for_with_its_usage_and_the_fixed_parts() -> None:
    _, transport = ask(stream(*chat_text("Paris")), params={"temperature": 0, "max_tokens": 5})
    assert transport.requests[0].url == "http://localhost:8000/v1/chat/completions"
    assert transport.body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "Capital of France?"}],
    }


def test_a_case_is_its_system_prompt_then_its_messages_then_its_prompt() -> None:
    history = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    case = EvalCase(id="a", system_prompt="Be brief.", messages=history, prompt="now?")
    _, transport = ask(stream(*chat_text("x")), case=case)
    assert transport.body["messages"] == [
        {"role": "system", "content": "Be brief."},
        *history,
        {"role": "user", "content": "now?"},
    ]
    assert len(history) == 2  # the case's own list is left alone


def test_tools_of_the_target_and_of_the_case_are_sent_in_this_apis_shape() -> None:
    anthropic = {"name": "clock", "description": "the time", "input_schema": {"type": "object"}}
    _, transport = ask(stream(*chat_text("x")), tools=[anthropic], case=EvalCase(id="a", prompt="?", tools=[WEATHER]))
    clock = {"name": "clock", "description": "the time", "parameters": {"type": "object"}}
    assert transport.body["tools"] == [{"type": "function", "function": clock}, WEATHER]


def test_lone_surrogates_are_sent_as_escapes() -> None:
    _, transport = ask(stream(*chat_text("x")), case=EvalCase(id="a", prompt="\ud800 ü"))
    assert transport.body["messages"][0]["content"] == "\ud800 ü"


def test_a_streamed_answer_has_its_text_times_tokens_and_ids() -> None:
    usage = chat_usage(prompt=20, completion=5, cached=16, reasoning=2)
    response, _ = ask(stream(*chat_text("Pa", "ris", usage=usage), first=1.0, step=0.5))
    assert response.response_text == "Paris"
    assert response.messages == [{"role": "assistant", "content": "Paris"}]
    assert response.input_prompt == CASE.prompt
    assert (response.num_tokens_input, response.num_tokens_input_cached) == (20, 16)
    assert (response.num_tokens_output, response.num_tokens_output_reasoning) == (5, 2)
    # The first chunk has only a role in it, which is no token. The last bytes are those of [DONE].
    assert response.time_to_first_token == response.time_to_first_content_token == 1.5
    assert response.time_to_last_token == 1.0 + 0.5 * 5
    assert response.time_per_output_token == pytest.approx((3.5 - 1.5) / 4)
    assert response.time_to_first_reasoning_token is None
    assert response.time_queued == 0.005
    assert response.request_time is not None
    assert response.request_time.tzinfo is not None
    assert (response.stop_reason, response.http_status, response.request_id) == ("stop", 200, "req-1")
    assert not response.tokens_estimated


def test_a_stream_has_the_gaps_between_its_tokens_and_a_whole_answer_has_none() -> None:
    texts = [
        chat_chunk(role="assistant"),
        *(chat_chunk(content=text) for text in "abcdefghijk"),
        chat_end(chat_usage()),
    ]
    reply = stream(*texts, first=1.0, step=0.01)
    # The eighth token comes 0.7 s late, and those after it with it.
    reply.arrivals = [at + 0.7 * (number > 7) for number, at in enumerate(reply.arrivals)]
    response, _ = ask(reply)
    assert response.time_between_tokens_p50 == pytest.approx(0.01)
    assert response.time_between_tokens_max == pytest.approx(0.71)
    assert response.time_between_tokens_p99 == pytest.approx(0.01 + 0.91 * 0.7)
    assert response.stalls == 1
    response, _ = ask(whole(chat_whole({"content": "Paris"})), stream=False)
    assert (response.time_between_tokens_p50, response.time_between_tokens_max, response.stalls) == (None, None, 0)


def test_reasoning_and_tool_calls_are_tokens_too() -> None:
    pieces = [chat_chunk(role="assistant"), chat_chunk(reasoning_content="Hm"), chat_chunk(content="a")]
    calls = [chat_chunk(tool_calls=[tool_fragment(0, "{}", id="c", name="weather")]), chat_chunk(content="b")]
    response, _ = ask(stream(*pieces, chat_end(chat_usage()), step=0.02))
    assert response.time_between_tokens_max == pytest.approx(0.02)
    response, _ = ask(stream(*pieces, *calls, chat_end(chat_usage()), step=0.02))
    assert response.time_between_tokens_max == pytest.approx(0.02)


def test_an_answer_in_one_piece_has_no_first_token_time() -> None:
    response, transport = ask(whole(chat_whole({"content": "Paris"}), at=0.25), stream=False)
    assert transport.body["stream"] is False
    assert "stream_options" not in transport.body
    assert response.response_text == "Paris"
    assert (response.time_to_first_token, response.time_to_last_token) == (None, 0.25)
    assert response.num_tokens_output == 4


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_timed_and_kept_but_is_no_part_of_the_text(field: str) -> None:
    pieces = [chat_chunk(role="assistant"), chat_chunk(**{field: "Hm"}), chat_chunk(**{field: "m."})]
    response, _ = ask(stream(*pieces, *chat_text("Paris")[1:], first=1.0, step=1.0))
    assert response.response_text == "Paris"
    assert response.messages == [{"role": "assistant", "content": "Paris", field: "Hmm."}]
    assert response.time_to_first_token == response.time_to_first_reasoning_token == 2.0
    assert response.time_to_first_content_token == 4.0


def test_content_in_parts_is_split_into_text_and_reasoning() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, {"type": "text", "text": "Paris"}]
    response, _ = ask(whole(chat_whole({"content": parts})))
    assert response.response_text == "Paris"
    assert response.messages == [{"role": "assistant", "content": parts}]


def test_fragments_of_several_tool_calls_are_joined_by_index() -> None:
    response, _ = ask(
        stream(
            chat_chunk(role="assistant", content=None),
            chat_chunk(tool_calls=[tool_fragment(0, "", id="a", type="function", name="weather")]),
            chat_chunk(tool_calls=[tool_fragment(0, '{"ci')]),
            chat_chunk(tool_calls=[tool_fragment(1, "", id="b", type="function", name="clock")]),
            chat_chunk(tool_calls=[tool_fragment(0, 'ty":"Rome"}'), tool_fragment(1, "{}")]),
            chat_chunk("tool_calls"),
            chat_end(chat_usage()),
            first=1.0,
            step=1.0,
        )
    )
    assert response.messages is not None
    calls = tool_calls(response.messages)
    assert [(call.id, call.name, call.arguments) for call in calls] == [
        ("a", "weather", {"city": "Rome"}),
        ("b", "clock", {}),
    ]
    assert response.time_to_first_token == 2.0
    assert (response.response_text, response.stop_reason) == ("", "tool_calls")


FRAGMENTS = {
    "whole calls that all say index 0": [
        tool_fragment(0, '{"n":1}', id="a", name="f"),
        tool_fragment(0, '{"n":2}', id="b", name="f"),
    ],
    "calls without an index": [
        {"id": "a", "function": {"name": "f", "arguments": '{"n":1}'}},
        {"id": "b", "function": {"name": "f", "arguments": '{"n":2}'}},
    ],
    "arguments that are an object": [
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": {"n": 1}}},
        {"index": 1, "id": "b", "function": {"name": "f", "arguments": {"n": 2}}},
    ],
    "a name and an id in every fragment": [
        tool_fragment(0, '{"n":', id="a", name="f"),
        tool_fragment(0, "1}", id="a", name="f"),
        tool_fragment(1, '{"n":2}', id="b", name="f"),
    ],
}


@pytest.mark.parametrize("fragments", FRAGMENTS.values(), ids=FRAGMENTS)
def test_tool_calls_are_told_apart_as_compatible_servers_send_them(fragments: list[Any]) -> None:
    chunks = [chat_chunk(tool_calls=[fragment]) for fragment in fragments]
    response, _ = ask(stream(*chunks, chat_chunk("tool_calls"), chat_end(chat_usage())))
    assert [(call.name, call.arguments) for call in tool_calls(response.messages or [])] == [
        ("f", {"n": 1}),
        ("f", {"n": 2}),
    ]


def test_the_old_function_call_is_a_tool_call_too() -> None:
    call = {"name": "f", "arguments": '{"n":1}'}
    response, _ = ask(whole(chat_whole({"content": None, "function_call": call}, "function_call")))
    assert [call.arguments for call in tool_calls(response.messages or [])] == [{"n": 1}]


def test_a_refusal_is_the_text_and_says_that_it_is_one() -> None:
    pieces = [chat_chunk(role="assistant", content=None), chat_chunk(refusal="I ca"), chat_chunk(refusal="nnot.")]
    response, _ = ask(stream(*pieces, chat_chunk("stop"), chat_end(chat_usage()), first=1.0, step=1.0))
    assert (response.response_text, response.stop_reason) == ("I cannot.", "refusal")
    assert response.messages == [{"role": "assistant", "content": None, "refusal": "I cannot."}]
    assert response.time_to_first_token == 2.0


def test_other_choices_than_the_first_are_left_out() -> None:
    second = chat_chunk(content="no")
    second["choices"][0]["index"] = 1
    response, _ = ask(stream(second, *chat_text("yes")))
    assert response.response_text == "yes"


def test_a_server_that_refuses_to_be_asked_for_usage_is_not_asked_again() -> None:
    refusal = whole({"error": {"message": "Unrecognized argument: stream_options", "code": 400}}, status=400)
    without = [event for event in chat_text("x") if event["choices"]]
    transport = ScriptedTransport(refusal, stream(*without, chat_end(chat_usage())))
    target = OpenAIChat("m", base_url="http://localhost/v1", transport=transport)

    async def twice() -> None:
        await target.invoke(CASE, CONTEXT)
        await target.invoke(CASE, CONTEXT)

    asyncio.run(twice())
    assert ["stream_options" in body for body in transport.bodies] == [True, False, False]


def test_another_400_is_final_and_keeps_what_the_provider_said() -> None:
    body = {"error": {"message": "bad temperature", "type": "invalid_request_error", "code": None}}
    error = failure_of(whole(body, status=400))
    assert not isinstance(error, TransientError)
    assert "bad temperature" in str(error)
    assert "req-1" in str(error)
    assert error.partial is not None
    assert (error.partial.http_status, error.partial.request_id) == (400, "req-1")
    assert error.partial.time_to_last_token is None


def test_a_429_is_transient_overloaded_and_says_how_long() -> None:
    error = failure_of(whole({"error": {"message": "slow down"}}, status=429, headers={"retry-after": "7"}))
    assert isinstance(error, TransientError)
    assert (error.retry_after, error.overloaded) == (7.0, True)


EMPTY = {
    "a stream": stream(*chat_text(finish="length")),
    "one piece": whole(chat_whole({"content": ""}, "length")),
    "content null": whole(chat_whole({"content": None}, "length")),
    "only reasoning": stream(chat_chunk(reasoning_content="Hm"), chat_chunk("length"), chat_end(chat_usage())),
}


@pytest.mark.parametrize("reply", EMPTY.values(), ids=EMPTY)
def test_an_empty_answer_is_an_error(reply: HttpReply) -> None:
    error = failure_of(reply)
    assert not isinstance(error, TransientError)
    assert "the answer is empty" in str(error)
    assert "'length', 4 output tokens" in str(error)
    assert error.partial is not None
    assert error.partial.stop_reason == "length"


def test_a_stream_without_its_end_is_transient_and_its_text_is_kept() -> None:
    error = failure_of(stream(chat_chunk(role="assistant"), chat_chunk(content="Par"), done=False))
    assert isinstance(error, TransientError)
    assert "ended before the answer did" in str(error)
    assert error.partial is not None
    assert error.partial.response_text == "Par"
    assert error.partial.time_to_first_token is not None


def test_a_finish_reason_and_a_clean_end_make_a_whole_answer_without_done() -> None:
    response, _ = ask(stream(*chat_text("Paris"), done=False))
    assert response.response_text == "Paris"


def test_done_without_a_finish_reason_makes_a_whole_answer() -> None:
    response, _ = ask(stream(chat_chunk(content="Paris"), chat_end(chat_usage())))
    assert (response.response_text, response.stop_reason) == ("Paris", None)


def test_a_connection_lost_after_done_loses_nothing() -> None:
    response, _ = ask(broken(stream(*chat_text("Paris"))))
    assert response.response_text == "Paris"


def test_a_connection_lost_before_done_keeps_the_text_and_the_transports_error() -> None:
    error = failure_of(broken(stream(*chat_text("Par", "is")[:2], b'{"choices": [{"del', done=False)))
    assert isinstance(error, TransportError)
    assert error.partial is not None
    assert error.partial.response_text == "Par"


def test_a_connection_that_brought_nothing_is_the_transports_error() -> None:
    error = failure_of(TransportError("cannot connect"))
    assert str(error) == "cannot connect"
    assert error.partial is not None
    assert error.partial.request_time is not None


IN_STREAM: dict[str, tuple[Any, bool, bool]] = {
    "a server's trouble": ({"error": {"message": "boom", "type": "server_error"}}, True, False),
    "overload by code": ({"error": {"message": "boom", "code": 429}}, True, True),
    "overload by type": ({"error": {"message": "boom", "type": "rate_limit_exceeded"}}, True, True),
    "a plain text": ({"error": "boom"}, True, False),
    "the request's fault": ({"error": {"message": "boom", "type": "invalid_request_error"}}, False, False),
    "no credit": ({"error": {"message": "boom", "code": "insufficient_quota"}}, False, False),
    "an error object": ({"object": "error", "message": "boom", "type": "BadRequestError", "code": 400}, False, False),
}


@pytest.mark.parametrize(("event", "transient", "overloaded"), IN_STREAM.values(), ids=IN_STREAM)
def test_an_error_inside_a_stream_is_told_with_the_text_before_it(
    event: Any, transient: bool, overloaded: bool
) -> None:
    error = failure_of(stream(chat_chunk(content="Par"), event))
    assert "boom" in str(error)
    assert isinstance(error, TransientError) is transient
    assert getattr(error, "overloaded", False) is overloaded
    assert error.partial is not None
    assert error.partial.response_text == "Par"


def test_a_good_status_with_an_error_body_is_an_error() -> None:
    error = failure_of(whole({"error": {"message": "no such model", "type": "not_found_error"}}))
    assert not isinstance(error, TransientError)
    assert "no such model" in str(error)


def test_a_page_instead_of_json_asks_whether_the_address_is_right() -> None:
    page = whole(b"<html><body>Welcome</body></html>", headers={"content-type": "text/html"})
    error = failure_of(page)
    assert not isinstance(error, TransientError)
    assert "text/html" in str(error)
    assert "base_url" in str(error)


MALFORMED = {
    "half a JSON": (whole(b'{"choices": [{"mess'), True, "not JSON"),
    "nothing": (whole(b""), True, "with an empty body"),
    "no JSON": (whole(b"oops"), True, "not JSON"),
    "bad UTF-8": (whole(b'{"choices":[{"message":{"content":"\xff\xfe"}}]}'), True, "not UTF-8"),
    "a shape that is not this API's": (whole({"choices": [{"message": {"content": 5}}]}), False, "not what this API"),
    "choices that are none": (whole({"choices": []}), True, "reported an error"),
    "an event that is no JSON": (stream(chat_chunk(content="Par"), b"{oops", chat_chunk("stop")), True, "event 2 of 3"),
    "an event that is no UTF-8": (stream(b'{"choices":[{"delta":{"content":"\xff"}}]}'), True, "not UTF-8"),
}


@pytest.mark.parametrize(("reply", "transient", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_answer_says_what_is_wrong_with_it(reply: HttpReply, transient: bool, message: str) -> None:
    error = failure_of(reply)
    assert message in str(error)
    assert isinstance(error, TransientError) is transient


def test_one_piece_is_taken_where_a_stream_was_asked_for_and_the_other_way_round() -> None:
    assert ask(whole(chat_whole({"content": "Paris"})))[0].response_text == "Paris"
    assert ask(stream(*chat_text("Paris")), stream=False)[0].response_text == "Paris"
    unlabelled = whole(b"data: " + json.dumps(chat_chunk("stop", chat_usage(), content="Paris")).encode() + b"\n\n")
    assert ask(unlabelled)[0].response_text == "Paris"


@given(
    pieces=st.lists(st.text(), min_size=1, max_size=8).filter(lambda pieces: any(pieces)),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    newline=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    comments=st.booleans(),
)
def test_however_a_stream_is_cut_and_spelled_the_text_is_the_same(
    pieces: list[str], cuts: list[int], newline: bytes, comments: bool
) -> None:
    events = [json.dumps(event).encode() for event in chat_text(*pieces)]
    noise = b": keep-alive" + newline * 2 if comments else b""
    data = b"".join(noise + b"data:" + event + newline * 2 for event in (*events, b"[DONE]"))
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    reply = chunked(*(data[start:end] for start, end in itertools.pairwise(places)))
    assert ask(reply)[0].response_text == "".join(pieces)


def test_half_a_surrogate_pair_is_read_as_the_sign_for_what_cannot_be_read() -> None:
    halves = [json.dumps(chat_chunk(content=text)).encode() for text in ("a\ud83d", "\ude00b \\ud83d 😀")]
    assert ask(stream(*halves, *chat_text("")))[0].response_text == "a\ufffd\ufffdb \\ud83d 😀"
    at_once = json.dumps(chat_whole({"content": "a\ud83d"})).encode()
    assert ask(whole(at_once))[0].response_text == "a\ufffd"


def test_a_character_split_between_chunks_is_put_together() -> None:
    data = b"data: " + json.dumps(chat_chunk("stop", chat_usage(), content="ü"), ensure_ascii=False).encode() + b"\n\n"
    cut = data.index("ü".encode()) + 1
    assert ask(chunked(data[:cut], data[cut:], b"data: [DONE]"))[0].response_text == "ü"


def test_a_case_that_asks_nothing_is_an_error_and_nothing_is_sent() -> None:
    transport = ScriptedTransport(stream(*chat_text("x")))
    target = OpenAIChat("m", base_url="http://localhost/v1", transport=transport)
    with pytest.raises(TargetError, match="neither a prompt nor messages"):
        asyncio.run(target.invoke(EvalCase(id="a"), CONTEXT))
    assert transport.requests == []


def test_the_payload_is_stored_when_asked_for() -> None:
    case = EvalCase(id="a", prompt="\ud800")
    response, transport = ask(stream(*chat_text("x")), store_payload=True, case=case)
    assert response.input_payload == transport.body
    assert ask(stream(*chat_text("x")))[0].input_payload is None
