"""Keys that a server repeats, as they are or encoded: masked in every field that is kept, and in every message."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from steelyard import EvalCase, EvalSet, Runner
from steelyard.errors import TargetError
from steelyard.protocols import HttpReply, InvocationContext
from steelyard.targets import AnthropicMessages, Bedrock, Gemini, OpenAIChat, OpenAIResponses
from tests.support.scripted_transport import ScriptedTransport

KEY = "sk-live/a+b=c~0123456789abcdef"
FORMS = {
    "plain": KEY,
    "quoted": quote(KEY, safe=""),
    "quoted in lower case": quote(KEY, safe="").lower(),
    "base64": base64.b64encode(KEY.encode()).decode(),
    "base64 of a header": base64.b64encode(f"Bearer {KEY}".encode()).decode(),
    "urlsafe": base64.urlsafe_b64encode(f"u:{KEY}".encode()).decode(),
}
CASES = EvalSet(id="s", cases=[EvalCase(id="a", prompt="?")])


def leaks(text: str) -> list[str]:
    """The forms of the key of which a text has twenty characters in a row; `Bearer` in base64 is not of the key."""
    return [name for name, form in FORMS.items() if any(form[n : n + 20] in text for n in range(10, len(form) - 20))]


def chat(secret: str, **headers: str) -> HttpReply:
    message = {
        "role": "assistant",
        "content": f"Your key is {secret}, I think.",
        "reasoning_content": f"It was {secret}",
        "tool_calls": [
            {"id": secret, "type": "function", "function": {"name": "f", "arguments": f'{{"k":"{secret}"}}'}}
        ],
        secret: secret,
    }
    body = {"choices": [{"index": 0, "message": message, "finish_reason": secret}], "usage": {"prompt_tokens": secret}}
    return reply(json.dumps(body), **headers)


def reply(body: str, status: int = 200, **headers: str) -> HttpReply:
    named = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpReply(status, named, [body.encode()], [0.1], 0.1, 0.0)


@pytest.mark.parametrize("form", FORMS)
def test_no_file_of_a_run_has_a_key_that_the_server_put_into_its_answer(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = FORMS[form]
    transport = ScriptedTransport(chat(secret, x_request_id=f"req-{secret}"))
    target = OpenAIChat("m", base_url="http://localhost/v1", api_key=KEY, transport=transport)
    result = Runner(target, CASES, progress="off").run_sync(output_path=tmp_path / "run")
    (record,) = result.responses
    for kept in (record.response_text, record.stop_reason, record.request_id):
        assert kept is not None
        assert "***" in kept
    for file in (tmp_path / "run").iterdir():
        assert leaks(file.read_text("utf-8", "replace")) == [], file
    assert leaks(caplog.text) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("status", [200, 400, 500])
def test_no_error_has_a_key_that_the_server_put_into_it(form: str, status: int) -> None:
    """Wherever its message was cut: texts of servers are shortened before they are masked."""
    secret = FORMS[form]
    for padding in range(160, 320, 8):
        for body in (
            json.dumps({"error": {"message": "x" * padding + secret, "type": secret}}),
            "x" * padding + secret,
        ):
            transport = ScriptedTransport(reply(body, status, x_request_id=secret))
            target = OpenAIChat("m", base_url="http://localhost/v1", api_key=KEY, transport=transport)
            with pytest.raises(TargetError) as raised:
                asyncio.run(target.invoke(EvalCase(id="a", prompt="?"), InvocationContext("a")))
            assert leaks(str(raised.value)) == []
            assert raised.value.partial is not None
            assert leaks(str(raised.value.partial)) == []


def test_a_key_in_a_stream_is_masked_across_its_pieces() -> None:
    pieces = [KEY[n : n + 3] for n in range(0, len(KEY), 3)]
    events = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    transport = ScriptedTransport(reply(body, content_type="text/event-stream"))
    target = OpenAIChat("m", base_url="http://localhost/v1", api_key=KEY, transport=transport)
    response = asyncio.run(target.invoke(EvalCase(id="a", prompt="?"), InvocationContext("a")))
    assert response.response_text == "***"
    assert leaks(str(response.messages)) == []


WHOLE: dict[str, tuple[Any, dict[str, Any]]] = {
    "responses": (
        OpenAIResponses,
        {"status": "completed", "output": [{"type": "message", "content": [{"type": "output_text", "text": KEY}]}]},
    ),
    "anthropic": (AnthropicMessages, {"content": [{"type": "text", "text": KEY}], "stop_reason": "end_turn"}),
    "gemini": (Gemini, {"candidates": [{"content": {"parts": [{"text": KEY}]}, "finishReason": "STOP"}]}),
    "bedrock": (Bedrock, {"output": {"message": {"content": [{"text": KEY}]}}, "stopReason": "end_turn"}),
}


@pytest.mark.parametrize("api", WHOLE)
def test_every_api_masks_the_key(api: str) -> None:
    kind, body = WHOLE[api]
    more = {"region": "eu-west-1"} if api == "bedrock" else {}
    transport = ScriptedTransport(reply(json.dumps(body)))
    target = kind("m", base_url="http://localhost/v1", api_key=KEY, transport=transport, **more)
    response = asyncio.run(target.invoke(EvalCase(id="a", prompt="?"), InvocationContext("a")))
    assert response.response_text == "***"
    assert leaks(str(response)) == []


def test_a_key_in_a_header_of_ones_own_is_masked_and_other_headers_are_not() -> None:
    transport = ScriptedTransport(chat("the token-in-a-header of application/json"))
    headers = {"x-gateway-token": "token-in-a-header", "x-kind": "application/json"}
    target = OpenAIChat("m", base_url="http://localhost/v1", headers=headers, transport=transport)
    response = asyncio.run(target.invoke(EvalCase(id="a", prompt="?"), InvocationContext("a")))
    assert response.response_text == "Your key is the *** of application/json, I think."


def test_what_a_tool_returns_is_masked_before_it_is_sent_and_kept() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    first = {"choices": [{"message": {"role": "assistant", "tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    last = {"choices": [{"message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}]}
    transport = ScriptedTransport(reply(json.dumps(first)), reply(json.dumps(last)))

    def f() -> str:
        return f"the environment has {KEY}"

    target = OpenAIChat("m", base_url="http://localhost/v1", api_key=KEY, transport=transport, functions={"f": f})
    response = asyncio.run(target.invoke(EvalCase(id="a", prompt="?"), InvocationContext("a")))
    assert leaks(str(response.messages)) == []
    assert KEY.encode() not in transport.requests[1].body


def test_a_copy_on_another_machine_masks_its_key_too(monkeypatch: pytest.MonkeyPatch) -> None:
    target = pickle.loads(pickle.dumps(OpenAIChat("m", base_url="http://localhost/v1", api_key=KEY)))
    target._given_transport = ScriptedTransport(chat(KEY))
    response = asyncio.run(target.invoke(EvalCase(id="a", prompt="?"), InvocationContext("a")))
    assert leaks(str(response)) == []
