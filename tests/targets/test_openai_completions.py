"""The completions API of base models: a prompt is continued."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from steelyard import EvalCase, InvocationResponse
from steelyard.errors import ConfigurationError, TargetError, TransientError
from steelyard.targets import OpenAICompletions
from tests.support.scripted_transport import CONTEXT, ScriptedTransport, broken, chat_usage, stream, whole

CASE = EvalCase(id="fr", prompt="The capital of France is")


def piece(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return {"object": "text_completion", "choices": [choice], **more}


END = {"choices": [], "usage": chat_usage(5, 2)}


def ask(*replies: Any, case: EvalCase = CASE, **options: Any) -> tuple[InvocationResponse, ScriptedTransport]:
    transport = ScriptedTransport(*replies)
    target = OpenAICompletions("base", base_url="http://localhost:8000/v1", transport=transport, **options)
    return asyncio.run(target.invoke(case, CONTEXT)), transport


def test_a_prompt_is_asked_and_continued_in_a_stream() -> None:
    reply = stream(piece(" Pa"), piece("ris"), piece("", "stop"), END, first=1.0, step=1.0)
    response, transport = ask(reply, params={"max_tokens": 5})
    assert transport.requests[0].url == "http://localhost:8000/v1/completions"
    assert transport.body == {
        "model": "base",
        "stream": True,
        "max_tokens": 5,
        "stream_options": {"include_usage": True},
        "prompt": "The capital of France is",
    }
    assert (response.response_text, response.stop_reason) == (" Paris", "stop")
    assert (response.time_to_first_token, response.time_to_last_token) == (1.0, 5.0)
    assert (response.num_tokens_input, response.num_tokens_output) == (5, 2)


def test_a_whole_answer_is_read_alike_and_a_system_prompt_comes_first() -> None:
    case = EvalCase(id="a", system_prompt="Facts.", prompt="Paris is")
    response, transport = ask(whole(piece(" big", "length", usage=chat_usage(5, 1))), case=case, stream=False)
    assert transport.body["prompt"] == "Facts.\n\nParis is"
    assert (response.response_text, response.stop_reason, response.num_tokens_output) == (" big", "length", 1)
    assert response.messages == [{"role": "assistant", "content": " big"}]


def test_a_server_that_refuses_usage_is_asked_without() -> None:
    refusal = whole({"error": {"message": "unknown field stream_options"}}, status=400)
    _, transport = ask(refusal, stream(piece("x", "stop")))
    assert "stream_options" not in transport.body


def test_a_stream_that_breaks_off_or_reports_an_error_is_transient() -> None:
    failed = {"error": {"message": "oops", "type": "server_error"}}
    for reply in (
        broken(stream(piece("Par"), done=False)),
        stream(piece("Par"), failed),
        stream(piece("Par"), done=False),
    ):
        with pytest.raises(TransientError) as caught:
            ask(reply)
        assert caught.value.partial is not None
        assert caught.value.partial.response_text == "Par"


def test_what_a_base_model_cannot_do_is_refused() -> None:
    with pytest.raises(TargetError, match="use openai-chat"):
        ask(stream(piece("x")), case=EvalCase(id="a", messages=[{"role": "user", "content": "?"}]))
    with pytest.raises(TargetError, match="takes no tools"):
        ask(stream(piece("x")), case=EvalCase(id="a", prompt="?", tools=[{"name": "f"}]))
    with pytest.raises(ConfigurationError, match="takes no tools or functions"):
        OpenAICompletions("m", functions={"f": print})
