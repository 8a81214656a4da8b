"""The Gemini API: how a case is asked, how every kind of answer is read, and the tool loop with thought signatures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from steelyard import EvalCase, InvocationResponse
from steelyard.errors import ConfigurationError, TargetError, TransientError
from steelyard.protocols import HttpReply, HttpRequest
from steelyard.scoring.trajectory import tool_calls
from steelyard.stats.prices import PriceBook
from steelyard.targets import Gemini
from tests.support.scripted_transport import CONTEXT, ScriptedTransport, broken, stream, whole

CASE = EvalCase(id="fr", prompt="Capital of France?")
USAGE = {"promptTokenCount": 8, "candidatesTokenCount": 2, "totalTokenCount": 10}
CALL = {"functionCall": {"name": "weather", "args": {"city": "Rome"}}, "thoughtSignature": "c2ln"}
TOOL = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_GEMINI_BASE_URL", "GEMINI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def chunk(*parts: dict[str, Any], finish: str | None = None, usage: Any = None, **more: Any) -> dict[str, Any]:
    candidate = {"content": {"role": "model", "parts": list(parts)}, "index": 0, **more}
    ending = {} if finish is None else {"finishReason": finish}
    return {"candidates": [{**candidate, **ending}], **({} if usage is None else {"usageMetadata": usage})}


def events(*chunks: Any, **timing: Any) -> HttpReply:
    return stream(*chunks, done=False, **timing)


PLAIN = events(chunk({"text": "Pa"}), chunk({"text": "ris"}, finish="STOP", usage=USAGE), first=1.0, step=1.0)


def ask(*replies: Any, case: EvalCase = CASE, **options: Any) -> tuple[InvocationResponse, ScriptedTransport]:
    transport = ScriptedTransport(*replies)
    options = {"base_url": "http://localhost:8000", **options}
    target = Gemini(options.pop("model", "gemini-2.5-flash"), transport=transport, **options)
    return asyncio.run(target.invoke(case, CONTEXT)), transport


def failure_of(*replies: Any, **options: Any) -> TargetError:
    with pytest.raises(TargetError) as caught:
        ask(*replies, **options)
    return caught.value


def test_a_case_is_asked_in_this_apis_shape() -> None:
    params = {"temperature": 0, "generationConfig": {"maxOutputTokens": 9}, "safetySettings": [{"category": "X"}]}
    case = EvalCase(id="a", system_prompt="Be brief.", prompt="?")
    _, transport = ask(PLAIN, case=case, params=params, api_key="AIza-test-key")
    url = "http://localhost:8000/v1beta/models/gemini-2.5-flash:streamGenerateContent?alt=sse"
    assert transport.requests[0].url == url
    assert transport.body == {
        "safetySettings": [{"category": "X"}],
        "generationConfig": {"maxOutputTokens": 9, "temperature": 0},
        "contents": [{"role": "user", "parts": [{"text": "?"}]}],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
    }
    assert transport.headers["x-goog-api-key"] == "AIza-test-key"
    assert "authorization" not in transport.headers


VERTEX = "https://us-central1-aiplatform.googleapis.com/v1/projects/p/locations/us-central1"


@pytest.mark.parametrize(
    ("base_url", "model", "path"),
    [
        ("http://h", "m", "http://h/v1beta/models/m"),
        ("http://h/v1beta", "models/m", "http://h/v1beta/models/m"),
        ("http://h/v1", "tunedModels/x", "http://h/v1/tunedModels/x"),
        (VERTEX, "m", f"{VERTEX}/publishers/google/models/m"),
        (f"{VERTEX}/publishers/google", "m", f"{VERTEX}/publishers/google/models/m"),
        (VERTEX, "endpoints/123", f"{VERTEX}/endpoints/123"),
        (VERTEX, "publishers/meta/models/llama", f"{VERTEX}/publishers/meta/models/llama"),
    ],
)
def test_the_address_is_googles_or_vertex(base_url: str, model: str, path: str) -> None:
    body = chunk({"text": "x"}, finish="STOP")
    _, transport = ask(whole(body), base_url=base_url, model=model, stream=False, api_key="AIza-k")
    assert transport.requests[0].url == f"{path}:generateContent"


def test_vertex_takes_access_tokens_from_a_program() -> None:
    for token in ("ya29.token-of-google", "other-kind-of-token"):
        _, transport = ask(PLAIN, base_url=VERTEX, api_key_command=["echo", token])
        assert transport.headers["authorization"] == f"Bearer {token}"
        assert "x-goog-api-key" not in transport.headers
    _, transport = ask(PLAIN, api_key_command=["echo", "AIza-key-in-a-vault"])
    assert transport.headers["x-goog-api-key"] == "AIza-key-in-a-vault"


def test_chat_messages_are_turned_into_this_apis_shape() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    other = {"id": "t2", "type": "function", "function": {"name": "clock", "arguments": "{oops"}}
    messages = [
        {"role": "system", "content": "One."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look:"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "image_url", "image_url": {"url": "https://example.com/a.jpg?x=1"}},
            ],
        },
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "t1", "content": '{"sky": "clear"}'},
        {"role": "tool", "tool_call_id": "t2", "content": "noon"},
    ]
    _, transport = ask(PLAIN, case=EvalCase(id="a", messages=messages, prompt="so?"))
    assert transport.body["systemInstruction"] == {"parts": [{"text": "One."}]}
    assert transport.body["contents"] == [
        {
            "role": "user",
            "parts": [
                {"text": "Look:"},
                {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
                {"fileData": {"mimeType": "image/jpeg", "fileUri": "https://example.com/a.jpg?x=1"}},
            ],
        },
        {
            "role": "model",
            "parts": [
                {"text": "Let me see."},
                {"functionCall": {"name": "weather", "args": {"city": "Rome"}}},
                {"functionCall": {"name": "clock", "args": {"INVALID_JSON": "{oops"}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"name": "weather", "response": {"sky": "clear"}}},
                {"functionResponse": {"name": "clock", "response": {"result": "noon"}}},
            ],
        },
        {"role": "user", "parts": [{"text": "so?"}]},
    ]
    _, transport = ask(PLAIN, model="gemini-3-pro", case=EvalCase(id="a", messages=messages))
    calls = [part for part in transport.body["contents"][1]["parts"] if "functionCall" in part]
    assert [part.get("thoughtSignature") for part in calls] == ["skip_thought_signature_validator", None]


def test_messages_and_tools_of_this_apis_own_shape_pass_through() -> None:
    turn = {"role": "model", "parts": [CALL]}
    search = {"googleSearch": {}}
    own = {"name": "f", "parameters": {"type": "OBJECT"}}
    _, transport = ask(PLAIN, case=EvalCase(id="a", messages=[turn]), tools=[TOOL, search, own])
    assert transport.body["contents"] == [turn]
    declared = {"name": "weather", "description": "d", "parametersJsonSchema": {"type": "object", "properties": {}}}
    assert transport.body["tools"] == [
        {"functionDeclarations": [declared, {"name": "f", "parameters": {"type": "OBJECT"}}]},
        search,
    ]


def test_a_streamed_answer_has_its_text_times_and_tokens() -> None:
    response, _ = ask(PLAIN)
    assert response.response_text == "Paris"
    assert response.messages == [{"role": "model", "parts": [{"text": "Paris"}]}]
    assert (response.time_to_first_token, response.time_to_last_token) == (1.0, 2.0)
    assert (response.num_tokens_input, response.num_tokens_output) == (8, 2)
    assert response.stop_reason == "STOP"


def test_thoughts_are_timed_and_counted_but_are_no_part_of_the_text() -> None:
    usage = {**USAGE, "thoughtsTokenCount": 30, "cachedContentTokenCount": 5, "toolUsePromptTokenCount": 4}
    signed = {"text": "", "thoughtSignature": "c2ln"}
    response, _ = ask(
        events(
            chunk({"text": "Hm", "thought": True}),
            chunk({"text": "m.", "thought": True}),
            chunk({"text": "Paris"}),
            chunk(signed, finish="STOP", usage=usage),
            first=1.0,
            step=1.0,
        )
    )
    assert response.response_text == "Paris"
    assert response.messages == [
        {"role": "model", "parts": [{"text": "Hmm.", "thought": True}, {"text": "Paris"}, signed]}
    ]
    assert (response.time_to_first_reasoning_token, response.time_to_first_content_token) == (1.0, 3.0)
    assert (response.num_tokens_input, response.num_tokens_input_cached) == (12, 5)
    assert (response.num_tokens_output, response.num_tokens_output_reasoning) == (32, 30)


def test_an_answer_in_one_piece_is_read_alike() -> None:
    body = chunk({"text": "Let me see."}, CALL, finish="STOP", usage=USAGE)
    response, transport = ask(whole(body), stream=False)
    assert transport.requests[0].url.endswith(":generateContent")
    (call,) = tool_calls(response.messages or [])
    assert (call.name, call.arguments) == ("weather", {"city": "Rome"})
    assert response.response_text == "Let me see."
    assert response.time_to_first_token is None


def strict(request: HttpRequest) -> HttpReply:
    """A server that refuses, as Gemini 3 does, a call that comes back without its signature."""
    contents = ScriptedTransport(PLAIN)
    contents.requests.append(request)
    turns = contents.body["contents"]
    for turn in turns:
        for part in turn["parts"]:
            if "functionCall" in part and part.get("thoughtSignature") != f"sig-{part['functionCall']['args']['n']}":
                error = {
                    "code": 400,
                    "status": "INVALID_ARGUMENT",
                    "message": "Function call is missing a thought_signature",
                }
                return whole({"error": error}, status=400)
    asked = sum("functionCall" in part for turn in turns for part in turn["parts"])
    if asked == 2:
        return PLAIN
    call = {"functionCall": {"id": f"c{asked}", "name": "weather", "args": {"n": asked}}}
    thought = {"text": "Hm.", "thought": True}
    return events(chunk(thought), chunk({**call, "thoughtSignature": f"sig-{asked}"}, finish="STOP", usage=USAGE))


def test_a_tool_loop_of_three_turns_sends_signatures_back() -> None:
    def weather(n: int) -> Any:
        return {"sky": "clear"} if n else "rain"

    response, transport = ask(strict, functions={"weather": weather})
    assert response.response_text == "Paris"
    assert response.num_tokens_input == 24
    results = [turn["parts"] for turn in transport.body["contents"] if "functionResponse" in turn["parts"][0]]
    assert results == [
        [{"functionResponse": {"name": "weather", "id": "c0", "response": {"result": "rain"}}}],
        [{"functionResponse": {"name": "weather", "id": "c1", "response": {"sky": "clear"}}}],
    ]
    assert [call.id for call in tool_calls(response.messages or [])] == ["c0", "c1"]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_block_by_a_filter_is_an_outcome(streamed: bool) -> None:
    ratings = [{"category": "HARM_CATEGORY_HARASSMENT", "probability": "HIGH", "blocked": True}]
    prompt = {"promptFeedback": {"blockReason": "SAFETY", "safetyRatings": ratings}, "usageMetadata": USAGE}
    answer = {"candidates": [{"finishReason": "PROHIBITED_CONTENT", "finishMessage": "Not that."}]}
    for body, text in (
        (prompt, "a filter blocked the prompt: SAFETY, HARM_CATEGORY_HARASSMENT"),
        (answer, "Not that."),
    ):
        response, _ = ask(events(body) if streamed else whole(body), stream=streamed)
        assert (response.response_text, response.stop_reason) == (text, "content_filter")
    half = chunk({"text": "Half"}, finish="RECITATION")
    response, _ = ask(events(half) if streamed else whole(half), stream=streamed)
    assert (response.response_text, response.stop_reason) == ("Half", "content_filter")


def test_an_empty_answer_and_a_malformed_call_are_errors() -> None:
    for reason in ("STOP", "MALFORMED_FUNCTION_CALL"):
        assert f"stop reason '{reason}'" in str(failure_of(events(chunk(finish=reason, usage=USAGE))))


def test_a_stream_without_its_finish_reason_is_transient_and_its_text_is_kept() -> None:
    for reply in (events(chunk({"text": "Par"})), broken(events(chunk({"text": "Par"})))):
        error = failure_of(reply)
        assert isinstance(error, TransientError)
        assert error.partial is not None
        assert error.partial.response_text == "Par"


def test_errors_say_when_to_come_back() -> None:
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.07s"}
    body = {"error": {"code": 429, "message": "Quota.", "status": "RESOURCE_EXHAUSTED", "details": [info]}}
    error = failure_of(whole(body, status=429))
    assert isinstance(error, TransientError)
    assert (error.retry_after, error.overloaded) == (34.07, True)
    assert "RESOURCE_EXHAUSTED" in str(error)
    late = failure_of(
        events(chunk({"text": "Par"}), {"error": {"code": 503, "message": "Busy", "status": "UNAVAILABLE"}})
    )
    assert isinstance(late, TransientError)
    assert late.overloaded
    invalid = failure_of(whole({"error": {"code": 400, "message": "Bad", "status": "INVALID_ARGUMENT"}}, status=400))
    assert not isinstance(invalid, TransientError)


def test_its_prices_are_known_at_google_and_at_vertex() -> None:
    pytest.importorskip("genai_prices")
    for options in ({}, {"base_url": VERTEX}):
        prices = PriceBook().of(Gemini("gemini-2.5-flash", api_key="k", **options))
        assert prices is not None
        assert prices.output > prices.input > 0


def test_fields_of_its_own_and_missing_keys_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="params cannot set 'contents'"):
        Gemini("m", params={"contents": []})
    with pytest.raises(ConfigurationError, match="GEMINI_API_KEY or GOOGLE_API_KEY"):
        Gemini("m").check()
