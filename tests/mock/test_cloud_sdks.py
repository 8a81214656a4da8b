"""The real `google-genai` and `boto3` clients, and `openai` for base models, against the mock: streamed and not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from tests.support.mock import Mock, running_mock

boto3 = pytest.importorskip("boto3")
botocore_config = pytest.importorskip("botocore.config")
botocore_errors = pytest.importorskip("botocore.exceptions")
genai = pytest.importorskip("google.genai")
openai = pytest.importorskip("openai")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
QUESTION = "What is the capital of France?"
CLAUDE = "anthropic.claude-3-5-sonnet-20241022-v2:0"


THINKS = "reasoning-tokens=3,answer=Paris%2C%20of%20course"


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    with running_mock(key="mock-key-1234") as mock:
        yield mock


@contextmanager
def gemini(mock: Mock, behaviour: str) -> Iterator[Any]:
    options = {"base_url": mock.url, "headers": {"x-mock": behaviour}}
    with genai.Client(api_key="mock-key-1234", http_options=options) as client:
        yield client


@contextmanager
def bedrock(mock: Mock, behaviour: str, key: str = "mock-key-1234") -> Iterator[Any]:
    config = botocore_config.Config(retries={"total_max_attempts": 1})
    session = boto3.Session(aws_access_key_id=key, aws_secret_access_key="secret", region_name="us-east-1")
    client = session.client("bedrock-runtime", endpoint_url=mock.url, config=config)
    client.meta.events.register("before-sign", lambda request, **_: request.headers.add_header("x-mock", behaviour))
    try:
        yield client
    finally:
        client.close()


def asked(*, model: str = CLAUDE, **more: Any) -> dict[str, Any]:
    return {"modelId": model, "messages": [{"role": "user", "content": [{"text": QUESTION}]}], **more}


def test_gemini_answers_whole_and_streamed_with_thoughts_and_usage(mock: Mock) -> None:
    with gemini(mock, THINKS) as client:
        answer = client.models.generate_content(model="gemini-3-flash", contents=QUESTION)
        chunks = list(client.models.generate_content_stream(model="gemini-3-flash", contents=QUESTION))
    assert answer.text == "Paris, of course"
    assert [part.thought for part in answer.candidates[0].content.parts] == [True, None]
    assert answer.candidates[0].finish_reason == "STOP"
    usage = answer.usage_metadata
    assert (usage.prompt_token_count, usage.candidates_token_count, usage.thoughts_token_count) == (8, 4, 3)
    assert "".join(chunk.text or "" for chunk in chunks) == answer.text
    assert chunks[-1].usage_metadata.candidates_token_count == 4


def test_gemini_calls_a_tool_whole_and_streamed_and_takes_its_result(mock: Mock) -> None:
    called: list[str] = []

    def weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "sunny"

    with gemini(mock, "tool-call-rate=1,answer=sunny") as client:
        config = genai.types.GenerateContentConfig(tools=[weather])
        answer = client.models.generate_content(model="gemini-3-flash", contents=QUESTION, config=config)
        assert (answer.text, called) == ("sunny", ["example"])
        declared = genai.types.FunctionDeclaration(name="weather", parameters_json_schema=SCHEMA)
        config = genai.types.GenerateContentConfig(tools=[genai.types.Tool(function_declarations=[declared])])
        chunks = list(client.models.generate_content_stream(model="m", contents=QUESTION, config=config))
    (part,) = [part for chunk in chunks for part in chunk.candidates[0].content.parts or () if part.function_call]
    assert (part.function_call.name, part.function_call.args) == ("weather", {"city": "example"})
    assert part.thought_signature


def test_gemini_refuses_and_fails_as_the_client_expects(mock: Mock) -> None:
    with gemini(mock, "refusal-rate=1") as client:
        answer = client.models.generate_content(model="m", contents=QUESTION)
        assert answer.candidates[0].finish_reason == "SAFETY"
    for status, kind in ((429, "RESOURCE_EXHAUSTED"), (503, "UNAVAILABLE"), (400, "INVALID_ARGUMENT")):
        with gemini(mock, f"fail={status}") as client, pytest.raises(genai.errors.APIError) as caught:
            client.models.generate_content(model="m", contents=QUESTION)
        assert (caught.value.code, caught.value.status) == (status, kind)


def test_bedrock_answers_whole_and_streamed_with_reasoning_and_usage(mock: Mock) -> None:
    with bedrock(mock, THINKS) as client:
        answer = client.converse(**asked(system=[{"text": "Be brief."}], inferenceConfig={"maxTokens": 50}))
        events = list(client.converse_stream(**asked())["stream"])
    reasoning, text = answer["output"]["message"]["content"]
    assert text == {"text": "Paris, of course"}
    assert reasoning["reasoningContent"]["reasoningText"]["text"]
    assert (answer["stopReason"], answer["usage"]["outputTokens"]) == ("end_turn", 7)
    deltas = [event["contentBlockDelta"]["delta"] for event in events if "contentBlockDelta" in event]
    assert "".join(delta.get("text", "") for delta in deltas) == "Paris, of course"
    assert events[-2]["messageStop"]["stopReason"] == "end_turn"
    assert events[-1]["metadata"]["usage"]["outputTokens"] == 7


def test_bedrock_calls_a_tool_whole_and_streamed_and_takes_its_result(mock: Mock) -> None:
    tools = {"tools": [{"toolSpec": {"name": "weather", "inputSchema": {"json": SCHEMA}}}]}
    with bedrock(mock, "tool-call-rate=1") as client:
        answer = client.converse(**asked(toolConfig=tools))
        (block,) = answer["output"]["message"]["content"]
        assert (block["toolUse"]["name"], block["toolUse"]["input"]) == ("weather", {"city": "example"})
        assert answer["stopReason"] == "tool_use"
        events = list(client.converse_stream(**asked(toolConfig=tools))["stream"])
        starts = [event["contentBlockStart"]["start"] for event in events if "contentBlockStart" in event]
        assert starts[0]["toolUse"]["name"] == "weather"
        result = {"toolUseId": block["toolUse"]["toolUseId"], "content": [{"text": "sunny"}]}
        after = [answer["output"]["message"], {"role": "user", "content": [{"toolResult": result}]}]
        turns = [*asked()["messages"], *after]
        assert client.converse(modelId=CLAUDE, messages=turns, toolConfig=tools)["stopReason"] == "end_turn"


def test_bedrock_fails_as_the_client_expects_whole_and_in_a_stream(mock: Mock) -> None:
    for status, kind in ((429, "ThrottlingException"), (400, "ValidationException"), (403, "AccessDeniedException")):
        with bedrock(mock, f"fail={status}") as client, pytest.raises(botocore_errors.ClientError) as caught:
            client.converse(**asked())
        assert caught.value.response["Error"]["Code"] == kind
    with (
        bedrock(mock, "tear=error") as client,
        closing(client.converse_stream(**asked())["stream"]) as stream,
        pytest.raises(botocore_errors.EventStreamError, match="told to fail"),
    ):
        list(stream)
    with (
        bedrock(mock, "", key="another") as client,
        pytest.raises(botocore_errors.ClientError, match="Incorrect API key"),
    ):
        client.converse(**asked())


def test_base_models_continue_a_prompt_whole_and_streamed(mock: Mock) -> None:
    headers = {"x-mock": "answer=Paris%2C%20of%20course"}
    with openai.OpenAI(
        base_url=mock.base_url, api_key="mock-key-1234", max_retries=0, default_headers=headers
    ) as client:
        answer = client.completions.create(model="m", prompt=QUESTION)
        assert (answer.choices[0].text, answer.usage.completion_tokens) == ("Paris, of course", 4)
        chunks = list(client.completions.create(model="m", prompt=QUESTION, stream=True, max_tokens=2))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Paris, o"
        assert chunks[-1].choices[0].finish_reason == "length"
