"""Bedrock's Converse API: how a case is asked and signed, and how every kind of answer is read."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, InvocationResponse
from steelyard.errors import ConfigurationError, TargetError, TransientError
from steelyard.protocols import HttpReply, HttpRequest, RequestSigning
from steelyard.run.config import build_suite
from steelyard.scoring.trajectory import tool_calls
from steelyard.stats.prices import PriceBook
from steelyard.targets import Bedrock
from steelyard.transport import CurlTransport
from steelyard.transport.sse import frame
from tests.support.mock import Mock, running_mock
from tests.support.scripted_transport import CONTEXT, ScriptedTransport, broken, chunked, whole

CASE = EvalCase(id="fr", prompt="Capital of France?")
CLAUDE = "anthropic.claude-3-5-sonnet-20241022-v2:0"
ARN = "arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.anthropic.claude-sonnet-4-20250514-v1:0"
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
USAGE = {"inputTokens": 8, "outputTokens": 2, "totalTokens": 10}
TOOL = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "REGION", "DEFAULT_REGION", "PROFILE")
    for name in (*names, "BEARER_TOKEN_BEDROCK", "ENDPOINT_URL_BEDROCK_RUNTIME"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def event(kind: str, **fields: Any) -> bytes:
    return frame(json.dumps(fields).encode(), event_type=kind, content_type="application/json", message_type="event")


def delta(index: int, **fields: Any) -> bytes:
    return event("contentBlockDelta", contentBlockIndex=index, delta=fields, p="abcdefgh")


def ending(reason: str = "end_turn", **usage: Any) -> list[bytes]:
    return [
        event("messageStop", stopReason=reason),
        event("metadata", usage={**USAGE, **usage}, metrics={"latencyMs": 1}),
    ]


def streamed(*events: bytes, **timing: Any) -> HttpReply:
    reply = chunked(*events, **timing)
    reply.headers["content-type"] = "application/vnd.amazon.eventstream"
    return reply


def text_stream(*pieces: str, **timing: Any) -> HttpReply:
    return streamed(
        event("messageStart", role="assistant"), *(delta(0, text=piece) for piece in pieces), *ending(), **timing
    )


PLAIN = text_stream("Pa", "ris", first=1.0, step=1.0)


def body_of(*content: dict[str, Any], reason: str = "end_turn") -> dict[str, Any]:
    message = {"role": "assistant", "content": list(content)}
    return {"output": {"message": message}, "stopReason": reason, "usage": USAGE, "metrics": {"latencyMs": 1}}


def ask(*replies: Any, case: EvalCase = CASE, **options: Any) -> tuple[InvocationResponse, ScriptedTransport]:
    transport = ScriptedTransport(*replies)
    options = {"base_url": "http://localhost:8000", "api_key": "bearer-key-1", **options}
    target = Bedrock(options.pop("model", CLAUDE), transport=transport, **options)
    return asyncio.run(target.invoke(case, CONTEXT)), transport


def failure_of(*replies: Any, **options: Any) -> TargetError:
    with pytest.raises(TargetError) as caught:
        ask(*replies, **options)
    return caught.value


def test_a_case_is_asked_in_this_apis_shape() -> None:
    params = {"temperature": 0, "maxTokens": 9, "top_k": 5, "guardrailConfig": {"guardrailIdentifier": "g"}}
    case = EvalCase(id="a", system_prompt="Be brief.", prompt="?")
    _, transport = ask(PLAIN, case=case, params={**params, "toolChoice": {"any": {}}}, tools=[TOOL])
    url = "http://localhost:8000/model/anthropic.claude-3-5-sonnet-20241022-v2%3A0/converse-stream"
    assert transport.requests[0].url == url
    spec = {"name": "weather", "description": "d", "inputSchema": {"json": {"type": "object", "properties": {}}}}
    assert transport.body == {
        "guardrailConfig": {"guardrailIdentifier": "g"},
        "inferenceConfig": {"temperature": 0, "maxTokens": 9},
        "additionalModelRequestFields": {"top_k": 5},
        "messages": [{"role": "user", "content": [{"text": "?"}]}],
        "system": [{"text": "Be brief."}],
        "toolConfig": {"tools": [{"toolSpec": spec}], "toolChoice": {"any": {}}},
    }
    assert transport.headers["authorization"] == "Bearer bearer-key-1"
    assert transport.requests[0].signing is None


def test_chat_messages_are_turned_into_this_apis_shape() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    stored = {"type": "image_url", "image_url": {"url": "s3://bucket/a.jpg"}}
    messages = [
        {"role": "system", "content": "One."},
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, picture, stored]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
    ]
    _, transport = ask(PLAIN, case=EvalCase(id="a", messages=messages, prompt="so?"))
    assert transport.body["system"] == [{"text": "One."}]
    assert transport.body["messages"] == [
        {
            "role": "user",
            "content": [
                {"text": "Look:"},
                {"image": {"format": "png", "source": {"bytes": "AAAA"}}},
                {"image": {"format": "jpeg", "source": {"s3Location": {"uri": "s3://bucket/a.jpg"}}}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"text": "Let me see."},
                {"toolUse": {"toolUseId": "t1", "name": "weather", "input": {"city": "Rome"}}},
            ],
        },
        {
            "role": "user",
            "content": [{"toolResult": {"toolUseId": "t1", "content": [{"text": "sunny"}]}}, {"text": "so?"}],
        },
    ]
    linked = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    case = EvalCase(id="a", messages=[{"role": "user", "content": [linked]}])
    assert "fetches nothing from the web" in str(failure_of(PLAIN, case=case))


def test_a_streamed_answer_has_its_text_times_and_tokens() -> None:
    response, _ = ask(PLAIN)
    assert response.response_text == "Paris"
    assert response.messages == [{"role": "assistant", "content": [{"text": "Paris"}]}]
    assert (response.time_to_first_token, response.time_to_last_token) == (2.0, 5.0)
    assert (response.num_tokens_input, response.num_tokens_output, response.stop_reason) == (8, 2, "end_turn")


def test_input_tokens_are_all_that_were_sent_cached_or_not() -> None:
    usage = {"cacheReadInputTokens": 100, "cacheWriteInputTokens": 40}
    response, _ = ask(streamed(delta(0, text="x"), *ending(**usage)))
    assert (response.num_tokens_input, response.num_tokens_input_cached) == (148, 100)
    assert response.num_tokens_input_cache_write == 40


def test_reasoning_is_timed_and_kept_with_its_signature_but_is_no_part_of_the_text() -> None:
    reply = streamed(
        event("messageStart", role="assistant"),
        delta(0, reasoningContent={"text": "Hm"}),
        delta(0, reasoningContent={"text": "m."}),
        delta(0, reasoningContent={"signature": "c2ln"}),
        event("contentBlockStop", contentBlockIndex=0),
        delta(1, text="Paris"),
        *ending(),
        first=1.0,
        step=1.0,
    )
    response, _ = ask(reply)
    kept = {"reasoningContent": {"reasoningText": {"text": "Hmm.", "signature": "c2ln"}}}
    assert response.messages == [{"role": "assistant", "content": [kept, {"text": "Paris"}]}]
    assert (response.time_to_first_reasoning_token, response.time_to_first_content_token) == (2.0, 6.0)
    whole_answer, _ = ask(whole(body_of(kept, {"text": "Paris"})), stream=False)
    assert (whole_answer.messages, whole_answer.response_text) == (response.messages, "Paris")


def call_stream(*pieces: str) -> HttpReply:
    start = {"toolUse": {"toolUseId": "t1", "name": "weather"}}
    return streamed(
        event("contentBlockStart", contentBlockIndex=0, start=start),
        *(delta(0, toolUse={"input": piece}) for piece in pieces),
        event("contentBlockStop", contentBlockIndex=0),
        *ending("tool_use"),
    )


def test_a_tool_loop_sends_the_calls_and_results_back() -> None:
    def weather(city: str) -> str:
        if city == "Rome":
            return "sunny"
        raise ValueError("no such city")

    replies = (call_stream('{"ci', 'ty": "Rome"}'), call_stream('{"city": "Atlantis"}'), PLAIN)
    response, transport = ask(*replies, functions={"weather": weather})
    assert response.response_text == "Paris"
    assert [call.arguments for call in tool_calls(response.messages or [])] == [{"city": "Rome"}, {"city": "Atlantis"}]
    first, second = transport.body["messages"][2], transport.body["messages"][4]
    assert first == {"role": "user", "content": [{"toolResult": {"toolUseId": "t1", "content": [{"text": "sunny"}]}}]}
    assert second["content"][0]["toolResult"]["status"] == "error"
    called = {"toolUse": {"toolUseId": "t1", "name": "weather", "input": {"city": "Rome"}}}
    assert transport.body["messages"][1] == {"role": "assistant", "content": [called]}


@pytest.mark.parametrize("reason", ["content_filtered", "guardrail_intervened"])
def test_a_filter_is_an_outcome(reason: str) -> None:
    for reply, stream in ((streamed(*ending(reason)), True), (whole(body_of(reason=reason)), False)):
        response, _ = ask(reply, stream=stream)
        assert (response.stop_reason, reason in (response.response_text or "")) == ("content_filter", True)


@pytest.mark.parametrize(
    ("kind", "transient", "overloaded"),
    [
        ("throttlingException", True, True),
        ("serviceUnavailableException", True, True),
        ("internalServerException", True, False),
        ("modelStreamErrorException", True, False),
        ("validationException", False, False),
    ],
)
def test_an_exception_in_a_stream_is_classified_and_the_text_kept(kind: str, transient: bool, overloaded: bool) -> None:
    failed = frame(b'{"message":"Oh no"}', exception_type=kind, message_type="exception")
    error = failure_of(streamed(delta(0, text="Par"), failed))
    assert f"Oh no ({kind})" in str(error)
    assert (isinstance(error, TransientError), getattr(error, "overloaded", False)) == (transient, overloaded)
    assert error.partial is not None
    assert error.partial.response_text == "Par"


def test_a_damaged_or_cut_stream_is_transient_and_the_text_kept() -> None:
    damaged = bytearray(delta(0, text="is"))
    damaged[-1] ^= 1
    cut = streamed(delta(0, text="Par"), event("messageStop", stopReason="end_turn")[:-3])
    for reply in (streamed(delta(0, text="Par"), bytes(damaged), *ending()), cut, broken(cut)):
        error = failure_of(reply)
        assert isinstance(error, TransientError)
        assert error.partial is not None
        assert error.partial.response_text == "Par"


def test_an_error_status_is_named_as_aws_names_it() -> None:
    headers = {"x-amzn-errortype": "ThrottlingException:http://internal.amazon.com/coral/"}
    error = failure_of(whole({"message": "Too many requests"}, status=429, headers=headers))
    assert "HTTP 429 (ThrottlingException): Too many requests" in str(error)
    assert isinstance(error, TransientError)
    assert error.overloaded
    daily = failure_of(whole({"message": "Too many tokens per day"}, status=429, headers=headers))
    assert not isinstance(daily, TransientError)


@contextmanager
def raw_server() -> Iterator[tuple[str, list[bytes]]]:
    """A server that keeps each request's bytes and answers with a whole answer."""
    seen: list[bytes] = []
    answer = json.dumps(body_of({"text": "Paris"})).encode()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with line:
                data = b""
                while b"\r\n\r\n" not in data:
                    data += line.recv(65536)
                head, _, body = data.partition(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                while len(body) < length:
                    body += line.recv(65536)
                seen.append(head + b"\r\n\r\n" + body)
                fields = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d" % len(answer)
                line.sendall(b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n\r\n" + answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def send(base_url: str, model: str = CLAUDE, **options: Any) -> InvocationResponse:
    target = Bedrock(model, base_url=base_url, stream=False, **options)

    async def session() -> InvocationResponse:
        await target.open(1)
        try:
            return await target.invoke(CASE, CONTEXT)
        finally:
            await target.close()

    return asyncio.run(session())


def head_of(request: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = request.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    return first, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("model", [CLAUDE, ARN, "amazon.nova-lite-v1:0"])
@pytest.mark.parametrize("token", [None, "session/token+with=signs=="])
def test_a_signature_is_the_one_of_botocore(model: str, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    auth = pytest.importorskip("botocore.auth")
    awsrequest = pytest.importorskip("botocore.awsrequest")
    credentials = pytest.importorskip("botocore.credentials")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    if token is not None:
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    with raw_server() as (base_url, seen):
        response = send(base_url, model, region="eu-west-1")
    assert response.response_text == "Paris"
    first, headers = head_of(seen[0])
    given = headers["authorization"]
    signed = given.partition("SignedHeaders=")[2].partition(",")[0].split(";")
    assert {"host", "x-amz-date", "x-amz-content-sha256"} <= set(signed)
    assert ("x-amz-security-token" in signed) is (token is not None)
    signer = auth.SigV4Auth(credentials.Credentials("AKIDEXAMPLE", SECRET, token), "bedrock", "eu-west-1")
    request = awsrequest.AWSRequest("POST", base_url + first.split()[1], data=seen[0].partition(b"\r\n\r\n")[2])
    # botocore leaves some headers out that libcurl signs: AWS takes those that the signature names.
    monkeypatch.setattr(auth, "SIGNED_HEADERS_BLACKLIST", [])
    for name in signed:
        request.headers[name] = headers[name]
    request.context["timestamp"] = headers["x-amz-date"]
    text = signer.string_to_sign(request, signer.canonical_request(request))
    assert given.partition("Signature=")[2] == signer.signature(text, request)
    assert "Credential=AKIDEXAMPLE/" in given
    assert "/eu-west-1/bedrock/aws4_request" in given


def test_a_bearer_key_is_used_before_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_BEARER_TOKEN_BEDROCK", "bearer-key-2")
    with raw_server() as (base_url, seen):
        send(base_url)
    assert head_of(seen[0])[1]["authorization"] == "Bearer bearer-key-2"


def test_credentials_come_from_a_profile(tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(f"[work]\naws_access_key_id = AKIDWORK\naws_secret_access_key = {SECRET}\n")
    (tmp_path / "config").write_text("[profile work]\nregion = ap-south-1\n")
    with raw_server() as (base_url, seen):
        send(base_url, profile="work")
    given = head_of(seen[0])[1]["authorization"]
    assert "Credential=AKIDWORK/" in given
    assert "/ap-south-1/bedrock/" in given
    assert Bedrock(CLAUDE, profile="work").endpoint == "https://bedrock-runtime.ap-south-1.amazonaws.com:443"


def printing(**credentials: Any) -> list[str]:
    return [sys.executable, "-c", f"print({json.dumps(json.dumps({'Version': 1, **credentials}))})"]


def test_credentials_come_from_a_program_named_here_or_in_a_profile(tmp_path: Path) -> None:
    command = printing(AccessKeyId="AKIDPROGRAM", SecretAccessKey=SECRET, SessionToken="token-1234")
    (tmp_path / "print.py").write_text(command[2])
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {tmp_path / 'print.py'}\n")
    with raw_server() as (base_url, seen):
        send(base_url, api_key_command=command)
        send(base_url)
    for request in seen:
        headers = head_of(request)[1]
        assert "Credential=AKIDPROGRAM/" in headers["authorization"]
        assert headers["x-amz-security-token"] == "token-1234"


def test_expired_credentials_are_fetched_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    program = (
        f"import json; open({str(count)!r}, 'a').write('.'); n = len(open({str(count)!r}).read());"
        f"keys = dict(AccessKeyId=f'AKID{{n}}', SecretAccessKey={SECRET!r}, SessionToken=f'token{{n}}');"
        "print(json.dumps(keys))"
    )
    expired = whole({"message": "The security token included in the request is expired"}, status=403)
    transport = ScriptedTransport(PLAIN, expired, PLAIN)
    target = Bedrock(
        CLAUDE, base_url="http://localhost:1", transport=transport, api_key_command=[sys.executable, "-c", program]
    )
    for _ in range(2):
        assert asyncio.run(target.invoke(CASE, CONTEXT)).response_text == "Paris"
    ids = [request.signing.key_id for request in transport.requests if request.signing is not None]
    assert ids == ["AKID1", "AKID1", "AKID2"]
    assert transport.headers["x-amz-security-token"] == "token2"
    assert SECRET not in repr(transport.requests[0].signing) + repr(target)
    assert b"token2" not in pickle.dumps(target)


def test_without_credentials_or_a_region_it_says_what_is_missing() -> None:
    with pytest.raises(ConfigurationError, match="needs a region"):
        Bedrock(CLAUDE)
    with pytest.raises(ConfigurationError, match="AWS_BEARER_TOKEN_BEDROCK, or AWS_ACCESS_KEY_ID"):
        Bedrock(CLAUDE, region="us-east-1").check()
    with pytest.raises(ConfigurationError, match="region must be a name"):
        Bedrock(CLAUDE, region="us-east-1.evil.example/")


def test_a_suite_names_its_region_and_profile(tmp_path: Path) -> None:
    (tmp_path / "cases.jsonl").write_text('{"prompt": "?"}\n')
    suite = "target: {bedrock: {model: 'amazon.nova-lite-v1:0', region: eu-central-1, params: {maxTokens: 9}}}\n"
    (tmp_path / "suite.yaml").write_text(suite + "cases: cases.jsonl\n")
    target = build_suite(tmp_path / "suite.yaml").target
    assert isinstance(target, Bedrock)
    assert target.endpoint == "https://bedrock-runtime.eu-central-1.amazonaws.com:443"


def test_its_prices_are_known() -> None:
    pytest.importorskip("genai_prices")
    assert PriceBook().of(Bedrock("anthropic.claude-3-5-sonnet-20241022-v2:0", region="us-east-1")) is not None


def test_many_signed_calls_of_any_length_share_connections_and_a_handle_stops_signing_when_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    prompts = ["x" * (number * 9000) + "?" for number in range(20)]
    signing = RequestSigning("aws:amz:us-east-1:bedrock", "AKIDEXAMPLE", SECRET)
    body = b'{"messages":[{"role":"user","content":[{"text":"?"}]}]}'
    headers = (("content-type", "application/json"), ("x-amz-content-sha256", hashlib.sha256(body).hexdigest()))

    async def session(mock: Mock) -> tuple[int, list[int]]:
        target = Bedrock(CLAUDE, base_url=mock.url)
        await target.open(4)
        calls = (target.invoke(EvalCase(id="a", prompt=prompt), CONTEXT) for prompt in prompts)
        answered = len(await asyncio.gather(*calls))
        await target.close()
        transport = CurlTransport(1)
        statuses = []
        for one in (signing, None, signing):
            request = HttpRequest(f"{mock.url}/model/m/converse", headers, body, signing=one)
            statuses.append((await transport.send(request)).status)
        await transport.close()
        return answered, statuses

    with running_mock(key="AKIDEXAMPLE") as mock:
        assert asyncio.run(session(mock)) == (20, [200, 401, 200])
