"""The real `openai` and `anthropic` clients against the mock: all three APIs, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.mock import Mock, running_mock

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

ASK = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}
ARGUMENTS = {"city": "example", "days": 1, "unit": "C"}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
RESPONSES_TOOLS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
MESSAGES_TOOLS: Any = [{"name": "weather", "input_schema": SCHEMA}]
CALLS = {"x-mock": "tool-call-rate=1"}
REFUSES = {"x-mock": "refusal-rate=1"}
THINKS = {"x-mock": "reasoning-tokens=5,answer=Paris"}
ANSWERS = {"x-mock": "answer=Paris%2C%20of%20course"}
TEXT = "Paris, of course"
TOKENS = 4


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    with running_mock() as mock:
        yield mock


@pytest.fixture
def open_ai(mock: Mock) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=mock.base_url, api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(mock: Mock) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=mock.url, api_key="x", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, headers: dict[str, str], **more: Any) -> Any:
    return client.chat.completions.create(model="m", messages=ASK, extra_headers=headers, **more)  # type: ignore[call-overload]


def message(client: anthropic.Anthropic, headers: dict[str, str], **more: Any) -> Any:
    return client.messages.create(
        **{"model": "m", "max_tokens": 100, "messages": ASK, "extra_headers": headers, **more}
    )


def respond(client: openai.OpenAI, headers: dict[str, str], **more: Any) -> Any:
    return client.responses.create(**{"model": "m", "input": "hi", "extra_headers": headers, **more})


def test_chat_answers(open_ai: openai.OpenAI) -> None:
    answer = chat(open_ai, ANSWERS)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "m"
    assert answer._request_id.startswith("req_")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, TOKENS, 8 + TOKENS)


def test_chat_streams_the_same_answer_with_usage_only_when_asked(open_ai: openai.OpenAI) -> None:
    chunks = list(chat(open_ai, ANSWERS, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], TOKENS)
    assert all(chunk.usage is None for chunk in chat(open_ai, ANSWERS, stream=True))


def test_chat_calls_a_tool_whole_and_in_fragments(open_ai: openai.OpenAI) -> None:
    answer = chat(open_ai, CALLS, tools=CHAT_TOOLS)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
    deltas = [chunk.choices[0].delta for chunk in chat(open_ai, CALLS, tools=CHAT_TOOLS, stream=True)]
    fragments = [call.function for delta in deltas for call in delta.tool_calls or []]
    assert [one.name for one in fragments if one.name] == ["weather"]
    assert len(fragments) > 5
    assert json.loads("".join(one.arguments for one in fragments)) == ARGUMENTS


def test_chat_answers_in_words_once_it_has_the_tools_result(open_ai: openai.OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "rain"}
    messages: Any = [*ASK, {"role": "assistant", "tool_calls": [call]}, result]
    answer = open_ai.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS, extra_headers=CALLS)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content


@pytest.mark.parametrize(("choice", "called"), [("required", True), ("none", False), ("auto", False)])
def test_chat_honours_the_choice_of_tools(open_ai: openai.OpenAI, choice: str, called: bool) -> None:
    answer = chat(open_ai, {}, tools=CHAT_TOOLS, tool_choice=choice)
    assert bool(answer.choices[0].message.tool_calls) is called


def test_chat_refuses(open_ai: openai.OpenAI) -> None:
    refusing = chat(open_ai, REFUSES).choices[0].message
    assert (refusing.content, refusing.refusal.startswith("I am sorry")) == (None, True)
    deltas = [chunk.choices[0].delta for chunk in chat(open_ai, REFUSES, stream=True)]
    assert "".join(delta.refusal or "" for delta in deltas) == refusing.refusal
    assert not any(delta.content for delta in deltas)


def test_chat_reasons_first(open_ai: openai.OpenAI) -> None:
    answer = chat(open_ai, THINKS)
    assert len(answer.choices[0].message.reasoning_content.split()) == 5
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5
    deltas = [chunk.choices[0].delta for chunk in chat(open_ai, THINKS, stream=True)]
    kinds = ["reasoning" if hasattr(d, "reasoning_content") else "content" for d in deltas if d.content != ""]
    assert kinds[:6] == ["reasoning"] * 5 + ["content"]


def test_chat_stops_at_max_tokens(open_ai: openai.OpenAI) -> None:
    answer = chat(open_ai, ANSWERS, max_tokens=2)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Paris, o", "length")


def test_a_prompt_that_came_before_is_cached(open_ai: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    first, second = (chat(open_ai, {}, seed=17).usage.prompt_tokens_details.cached_tokens for _ in range(2))
    assert (first, second) == (0, 7)
    first, second = (message(claude, {}, max_tokens=17).usage for _ in range(2))
    assert (first.input_tokens, first.cache_read_input_tokens) == (8, 0)
    assert (second.input_tokens, second.cache_read_input_tokens) == (1, 7)


def test_azure_paths_and_keys_work(mock: Mock) -> None:
    with openai.AzureOpenAI(azure_endpoint=mock.url, api_key="x", api_version="2024-10-21") as client:
        answer = client.chat.completions.create(model="mine", messages=ASK, extra_headers=ANSWERS)  # type: ignore[arg-type]
        assert (answer.choices[0].message.content, answer.model) == (TEXT, "mine")


def test_responses_answers(open_ai: openai.OpenAI) -> None:
    answer = respond(open_ai, ANSWERS)
    assert (answer.output_text, answer.status) == (TEXT, "completed")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (1, TOKENS)


def test_responses_streams_events_in_order_that_end_with_the_whole_answer(open_ai: openai.OpenAI) -> None:
    events = list(respond(open_ai, ANSWERS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == TEXT
    assert events[-1].response.usage.output_tokens == TOKENS


def test_responses_can_be_read_through_the_clients_own_accumulator(open_ai: openai.OpenAI) -> None:
    for headers in (ANSWERS, THINKS, REFUSES, CALLS):
        with open_ai.responses.stream(model="m", input="hi", tools=RESPONSES_TOOLS, extra_headers=headers) as stream:
            final = stream.get_final_response()
        assert final.output[-1].type == ("function_call" if headers is CALLS else "message")


def test_responses_calls_a_tool_whole_and_in_fragments(open_ai: openai.OpenAI) -> None:
    (call,) = respond(open_ai, CALLS, tools=RESPONSES_TOOLS).output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", ARGUMENTS)
    events = list(respond(open_ai, CALLS, tools=RESPONSES_TOOLS, stream=True))
    fragments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(fragments) > 5
    assert json.loads("".join(fragments)) == ARGUMENTS


def test_responses_reasons_refuses_and_stops_short(open_ai: openai.OpenAI) -> None:
    thought = respond(open_ai, THINKS)
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    assert thought.usage.output_tokens_details.reasoning_tokens == 5
    kinds = [event.type for event in respond(open_ai, THINKS, stream=True)]
    assert kinds.index("response.reasoning_summary_text.delta") < kinds.index("response.output_text.delta")
    assert respond(open_ai, REFUSES).output[0].content[0].refusal.startswith("I am sorry")
    short = respond(open_ai, ANSWERS, max_output_tokens=2)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    *_, last = respond(open_ai, ANSWERS, max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete"


def test_messages_answers(claude: anthropic.Anthropic) -> None:
    answer = message(claude, ANSWERS)
    assert (answer.content[0].text, answer.stop_reason) == (TEXT, "end_turn")
    assert answer.usage.output_tokens == TOKENS
    assert answer._request_id.startswith("req_")


def test_messages_streams_the_same_answer_with_usage_at_both_ends(claude: anthropic.Anthropic) -> None:
    events = list(message(claude, ANSWERS, stream=True))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    assert events[0].message.usage.input_tokens + events[0].message.usage.cache_read_input_tokens == 8
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == TEXT
    (end,) = (event for event in events if event.type == "message_delta")
    assert (end.delta.stop_reason, end.usage.output_tokens) == ("end_turn", TOKENS)


@pytest.mark.parametrize(
    ("headers", "more", "kinds", "reason"),
    [
        (ANSWERS, {}, ["text"], "end_turn"),
        (THINKS, {}, ["thinking", "text"], "end_turn"),
        (CALLS, {"tools": MESSAGES_TOOLS}, ["tool_use"], "tool_use"),
        (REFUSES, {}, ["text"], "refusal"),
        (ANSWERS, {"max_tokens": 2}, ["text"], "max_tokens"),
        ({"x-mock": "output-tokens=0"}, {}, [], "end_turn"),
    ],
    ids=["text", "thinking", "tool", "refusal", "short", "empty"],
)
def test_messages_gives_the_same_answer_streamed_and_not(
    claude: anthropic.Anthropic, headers: dict[str, str], more: dict[str, Any], kinds: list[str], reason: str
) -> None:
    fields: Any = {"model": "m", "max_tokens": 100, "messages": ASK, "extra_headers": headers, **more}
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert [block.type for block in answer.content] == kinds
        assert answer.stop_reason == reason
    assert [_content(block) for block in whole.content] == [_content(block) for block in streamed.content]
    if headers is CALLS:
        assert whole.content[0].input == ARGUMENTS


def _content(block: Any) -> Any:
    return {name: value for name, value in block.model_dump().items() if name in ("text", "input", "name")}


@pytest.mark.parametrize(
    ("status", "of_openai", "of_anthropic"),
    [
        (400, openai.BadRequestError, anthropic.BadRequestError),
        (401, openai.AuthenticationError, anthropic.AuthenticationError),
        (404, openai.NotFoundError, anthropic.NotFoundError),
        (429, openai.RateLimitError, anthropic.RateLimitError),
        (500, openai.InternalServerError, anthropic.InternalServerError),
        (529, openai.InternalServerError, anthropic.InternalServerError),
    ],
)
def test_an_error_is_the_clients_own_kind(
    open_ai: openai.OpenAI,
    claude: anthropic.Anthropic,
    status: int,
    of_openai: type[openai.APIStatusError],
    of_anthropic: type[anthropic.APIStatusError],
) -> None:
    headers = {"x-mock": f"fail={status}"}
    for call in (chat, respond):
        with pytest.raises(of_openai, match="The mock was told to fail") as caught:
            call(open_ai, headers, stream=True)
        assert (caught.value.status_code, bool(caught.value.request_id)) == (status, True)
    with pytest.raises(of_anthropic, match="The mock was told to fail") as refused:
        message(claude, headers)
    assert refused.value.body["request_id"] == refused.value.request_id  # type: ignore[index]


def test_an_error_in_the_stream_is_raised_by_the_clients(open_ai: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    headers = {"x-mock": "tear=error"}
    with pytest.raises(openai.APIError, match="told to fail"):
        list(chat(open_ai, headers, stream=True))
    with pytest.raises(anthropic.APIError, match="told to fail"):
        list(message(claude, headers, stream=True))


def test_a_cut_stream_is_an_error_to_the_clients(open_ai: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    headers = {"x-mock": "tear=cut"}
    with pytest.raises(openai.APIConnectionError):
        list(chat(open_ai, headers, stream=True))
    with pytest.raises(Exception, match="incomplete chunked read"):
        list(message(claude, headers, stream=True))


def test_a_dropped_connection_is_a_connection_error(open_ai: openai.OpenAI) -> None:
    with pytest.raises(openai.APIConnectionError):
        chat(open_ai, {"x-mock": "drop-rate=1"})


def test_the_key_and_the_models_are_checked() -> None:
    with running_mock(key="secret", models=("small", "large")) as mock:
        with (
            openai.OpenAI(base_url=mock.base_url, api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="Incorrect API key"),
        ):
            chat(client, {})
        with openai.OpenAI(base_url=mock.base_url, api_key="secret", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["small", "large"]
            with pytest.raises(openai.NotFoundError, match="`m` does not exist") as caught:
                chat(client, {})
            assert caught.value.code == "model_not_found"
        with anthropic.Anthropic(base_url=mock.url, api_key="secret", max_retries=0) as claude:
            assert claude.messages.create(model="small", max_tokens=5, messages=ASK).content  # type: ignore[arg-type]
            assert [model.id for model in claude.models.list()] == ["small", "large"]


def test_no_usage_is_reported_where_none_is_wanted(open_ai: openai.OpenAI) -> None:
    headers = {"x-mock": "usage=0"}
    assert chat(open_ai, headers).usage is None
    assert respond(open_ai, headers).usage is None
    chunks = list(chat(open_ai, headers, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks)
