"""What all endpoints share: addresses, keys, headers, identity, pickling, opening and closing."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any

import pytest

from steelyard import EvalCase
from steelyard.errors import ConfigurationError, TargetError
from steelyard.targets import AnthropicMessages, OpenAIChat, OpenAIResponses
from steelyard.targets.endpoint import EndpointTarget
from tests.support.scripted_transport import CONTEXT, ScriptedTransport, chat_text, stream, whole

CASE = EvalCase(id="a", prompt="?")
KEY = "sk-very-secret-123456"
KINDS: list[type[EndpointTarget]] = [OpenAIChat, OpenAIResponses, AnthropicMessages]
VARIABLES = (
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_BASE_URL",
    "AZURE_OPENAI_API_KEY",
    "AZURE_OPENAI_ENDPOINT",
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def sent(target_kind: type[EndpointTarget] = OpenAIChat, reply: Any = None, **options: Any) -> ScriptedTransport:
    """What goes out for one case."""
    transport = ScriptedTransport(reply or stream(*chat_text("x")))
    asyncio.run(target_kind("m", transport=transport, **options).invoke(CASE, CONTEXT))
    return transport


@pytest.mark.parametrize(
    ("given", "shown", "endpoint"),
    [
        ("http://localhost:8000/v1", "http://localhost:8000/v1", "http://localhost:8000"),
        ("http://localhost:8000/v1///", "http://localhost:8000/v1", "http://localhost:8000"),
        ("https://api.example.com", "https://api.example.com", "https://api.example.com:443"),
        ("http://10.0.0.5/llm", "http://10.0.0.5/llm", "http://10.0.0.5:80"),
        ("http://[::1]:9/v1", "http://[::1]:9/v1", "http://[::1]:9"),
        (f"https://me:{KEY}@api.example.com/v1?key={KEY}", "https://api.example.com/v1", "https://api.example.com:443"),
    ],
)
def test_a_base_url_is_normalised_and_shown_without_secrets(given: str, shown: str, endpoint: str) -> None:
    target = OpenAIChat("m", base_url=given)
    assert (target.base_url, target.endpoint) == (shown, endpoint)
    assert target.identity()["base_url"] == shown
    assert KEY not in repr(target) + str(target.identity())


@pytest.mark.parametrize("port", ["99999", "65536", "0", "abc", "80a", "-1"])
def test_a_port_that_cannot_be_is_told_with_the_url_before_anything_is_asked(port: str) -> None:
    with pytest.raises(ConfigurationError, match=f"a port from 1 to 65535, or none, got 'http://127.0.0.1:{port}/v1'"):
        OpenAIChat("m", base_url=f"http://127.0.0.1:{port}/v1")
    with pytest.raises(ConfigurationError, match=f"got '127.0.0.1:{port}/v1'"):
        OpenAIChat("m", base_url=f"http://me:{KEY}@127.0.0.1:{port}/v1")


@pytest.mark.parametrize("bad", ["ftp://x/v1", "localhost:8000", "http://", "http://a b/", "http://x:99999/", "", 5])
def test_what_is_no_web_address_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match="base_url"):
        OpenAIChat("m", base_url=bad)


@pytest.mark.parametrize("mistyped", [f"htps://me:{KEY}@host/v1", f"htps://host/v1?key={KEY}", f"http:/host?key={KEY}"])
def test_a_mistyped_address_is_refused_without_showing_its_secrets(mistyped: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OpenAIChat("m", base_url=mistyped)
    assert KEY not in str(caught.value)


def test_user_and_query_of_the_base_url_are_sent() -> None:
    transport = sent(base_url="http://me:pass@localhost/v1?tenant=7")
    assert transport.requests[0].url == "http://localhost/v1/chat/completions?tenant=7"
    assert transport.headers["authorization"] == "Basic bWU6cGFzcw=="


def test_the_usual_variables_say_where_and_with_which_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1/v1/")
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    transport = sent()
    assert transport.requests[0].url == "http://localhost:1/v1/chat/completions"
    assert transport.headers["authorization"] == f"Bearer {KEY}"
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://localhost:2")
    assert AnthropicMessages("m").base_url == "http://localhost:2"


def test_without_anything_said_it_is_the_providers_own_place() -> None:
    assert OpenAIChat("m").endpoint == "https://api.openai.com:443"
    assert OpenAIResponses("m").base_url == "https://api.openai.com/v1"
    assert AnthropicMessages("m").endpoint == "https://api.anthropic.com:443"


@pytest.mark.parametrize("kind", KINDS)
def test_no_key_for_a_public_host_is_refused_before_the_first_case(kind: type[EndpointTarget]) -> None:
    with pytest.raises(ConfigurationError, match=kind.key_variables[0]):
        kind("m").check()


@pytest.mark.parametrize(
    "base_url",
    [
        "http://localhost:8000/v1",
        "http://127.0.0.1/v1",
        "http://192.168.1.5:11434/v1",
        "http://10.1.2.3/v1",
        "http://100.64.0.9/v1",
        "http://[fd00::1]/v1",
        "http://vllm:8000/v1",
        "http://box.local/v1",
        "http://llm.default.svc/v1",
        "https://me:pass@api.example.com/v1",
    ],
)
def test_hosts_near_by_need_no_key(base_url: str) -> None:
    OpenAIChat("m", base_url=base_url).check()


@pytest.mark.parametrize("base_url", ["https://api.example.com/v1", "http://8.8.8.8/v1", "https://[2606:4700::1]/v1"])
def test_hosts_out_in_the_world_need_one(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="no key"):
        OpenAIChat("m", base_url=base_url).check()
    OpenAIChat("m", base_url=base_url, headers={"Authorization": "Bearer abc"}).check()
    OpenAIChat("m", base_url=base_url, api_key=KEY).check()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    OpenAIChat("m", base_url=base_url).check()


def test_a_missing_key_is_named_with_the_target_that_needs_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        OpenAIChat("gpt-9", base_url="https://api.example.com/v1").check()
    start = "openai-chat, model gpt-9: no key for https://api.example.com/v1: set OPENAI_API_KEY in the environment"
    assert str(caught.value).startswith(start)
    assert caught.value.topic == "api-key"
    with pytest.raises(ConfigurationError, match="model gpt-9: api_key_env names GONE, which is not set"):
        OpenAIChat("gpt-9", api_key_env="GONE").check()


def test_an_empty_variable_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "  ")
    with pytest.raises(ConfigurationError, match="no key"):
        OpenAIChat("m").check()


def test_another_variable_can_be_named_and_must_then_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    target = OpenAIChat("m", base_url="http://localhost/v1", api_key_env="MY_KEY")
    with pytest.raises(ConfigurationError, match="MY_KEY"):
        target.check()
    monkeypatch.setenv("MY_KEY", KEY)
    target.check()
    assert sent(base_url="http://localhost/v1", api_key_env="MY_KEY").headers["authorization"] == f"Bearer {KEY}"


def test_azure_is_asked_by_deployment_version_and_its_own_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", KEY)
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", "https://res.openai.azure.com/")
    transport = sent(api_version="2024-10-21")
    place = "https://res.openai.azure.com/openai/deployments/m/chat/completions?api-version=2024-10-21"
    assert transport.requests[0].url == place
    assert transport.headers["api-key"] == KEY
    assert "authorization" not in transport.headers
    deployed = "https://res.openai.azure.com/openai/deployments/other"
    assert sent(api_version="1", base_url=deployed).requests[0].url == f"{deployed}/chat/completions?api-version=1"
    assert OpenAIResponses("m", api_version="1")._url == "https://res.openai.azure.com/openai/responses?api-version=1"


def test_azures_new_address_needs_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", KEY)
    transport = sent(base_url="https://res.openai.azure.com/openai/v1/")
    assert transport.requests[0].url == "https://res.openai.azure.com/openai/v1/chat/completions"
    assert transport.headers["api-key"] == KEY


def test_extra_headers_are_sent_and_take_the_place_of_ours() -> None:
    headers = {"Authorization": "Bearer mine", "X-Team": "evals", "User-Agent": "me/1"}
    transport = sent(base_url="http://localhost/v1", api_key=KEY, headers=headers)
    assert transport.headers["authorization"] == "Bearer mine"
    assert transport.headers["x-team"] == "evals"
    assert transport.headers["user-agent"] == "me/1"
    assert len([name for name, _ in transport.requests[0].headers if name.lower() == "authorization"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "model must be a text"),
        ({"headers": {"a b": "x"}}, "invalid name"),
        ({"headers": {"x": "a\r\nb: c"}}, "line break"),
        ({"headers": {"x": None}}, "must be text, got NoneType"),
        ({"headers": ["x"]}, "headers must be a mapping"),
        ({"params": {"model": "x"}}, "params cannot set 'model'"),
        ({"params": {"x": float("nan")}}, "params cannot be written as JSON"),
        ({"params": [1]}, "params must be a mapping"),
        ({"tools": [5]}, "tools[0] must be a mapping"),
        ({"tools": {"a": 1}}, "tools must be a list"),
        ({"functions": {"f": 5}}, "functions['f'] must be a function"),
        ({"functions": ["f"]}, "functions must be a mapping"),
        ({"parallelism": 0}, "parallelism must be >= 1, got 0"),
        ({"max_turns": 0}, "max_turns must be >= 1, got 0"),
        ({"api_key": ""}, "api_key must be a text"),
        ({"api_version": 7}, "api_version must be text, got int"),
        ({"stream": "false"}, "stream must be true or false, got 'false'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_arguments_are_refused_with_their_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OpenAIChat(**{"model": "m", "base_url": "http://localhost/v1", **options})
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_identity_is_what_decides_an_answer_and_has_no_secret_in_it(kind: type[EndpointTarget]) -> None:
    tool = {"name": "f", "parameters": {"type": "object"}}
    options: dict[str, Any] = {"base_url": "http://localhost/v1", "params": {"temperature": 0}, "tools": [tool]}
    target = kind("m", api_key=KEY, headers={"X-Pass": KEY}, **options)
    identity = target.identity()
    assert (identity["kind"], identity["model"], identity["headers"]) == (kind.kind, "m", ["x-pass"])
    assert KEY not in str(identity) + repr(target) + repr(target._auth._given_key)
    assert kind("m", api_key="another-key", headers={"X-Pass": "other"}, **options).identity() == identity
    assert kind("other", **options).identity() != identity
    for name, changed in (("params", {"temperature": 1}), ("tools", []), ("base_url", "http://localhost/v2")):
        assert kind("m", headers={"X-Pass": KEY}, **{**options, name: changed}).identity() != identity


def test_streaming_or_not_only_warns() -> None:
    one, other = (OpenAIChat("m", base_url="http://localhost/v1", stream=stream).identity() for stream in (True, False))
    assert {name for name in one if one[name] != other[name]} == {"~stream"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_target_finds_its_key_where_it_wakes_up(
    kind: type[EndpointTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kind.key_variables[0], KEY)
    transport = ScriptedTransport(whole({}))
    target = kind("m", base_url="http://localhost/v1", transport=transport, params={"a": 1})
    with pytest.raises(TargetError):
        asyncio.run(target.invoke(CASE, CONTEXT))  # so that it has read the key and holds a transport
    data = pickle.dumps(target)
    assert KEY.encode() not in data
    copy = pickle.loads(data)
    assert copy.identity() == target.identity()
    monkeypatch.setenv(kind.key_variables[0], "sk-of-the-other-side")
    assert "sk-of-the-other-side" in str(copy._make_headers())


def test_a_key_that_was_given_travels_along() -> None:
    copy = pickle.loads(pickle.dumps(OpenAIChat("m", base_url="http://localhost/v1", api_key=KEY)))
    assert ("authorization", f"Bearer {KEY}") in copy._make_headers()


def test_a_key_that_the_server_repeats_is_taken_out_of_the_error() -> None:
    secret = "header-secret-9876"
    body = {"error": {"message": f"Incorrect API key provided: {KEY} ({secret})"}}
    transport = ScriptedTransport(whole(body, status=401))
    target = OpenAIChat(
        "m", base_url="http://localhost/v1", api_key=KEY, headers={"x-pass": f"Token {secret}"}, transport=transport
    )
    with pytest.raises(TargetError) as caught:
        asyncio.run(target.invoke(CASE, CONTEXT))
    assert "Incorrect API key provided: *** (***)" in str(caught.value)


def test_what_the_address_lets_one_in_with_is_taken_out_of_an_error_too() -> None:
    body = {"error": {"message": f"POST /v1/chat/completions?tenant=7&key={KEY}%2B1 ({KEY}+1): bad password hunter-22"}}
    transport = ScriptedTransport(whole(body, status=404))
    url = f"http://me:hunter-22@localhost/v1?tenant=7&key={KEY}%2B1"
    with pytest.raises(TargetError) as caught:
        asyncio.run(OpenAIChat("m", base_url=url, transport=transport).invoke(CASE, CONTEXT))
    assert "POST /v1/chat/completions?tenant=7&key=*** (***): bad password ***" in str(caught.value)


def test_opened_twice_it_stays_open_until_it_was_closed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ScriptedTransport] = []

    def make(_url: str, connections: int, **_: Any) -> ScriptedTransport:
        made.append(ScriptedTransport(stream(*chat_text(f"{connections}"))))
        return made[-1]

    monkeypatch.setattr("steelyard.transport.client.new_transport", make)
    target = OpenAIChat("m", base_url="http://localhost/v1")

    async def session() -> None:
        await target.open(7)
        await target.open(7)
        await target.close()
        assert (await target.invoke(CASE, CONTEXT)).response_text == "7"
        assert made[-1].closed == 0
        await target.close()
        assert made[-1].closed == 1

    asyncio.run(session())
    asyncio.run(session())  # on another loop, another transport
    assert len(made) == 2


def test_two_event_loops_at_once_have_a_transport_each_and_close_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, list[ScriptedTransport]] = {"one": [], "two": []}

    def make(_url: str, connections: int, **_: Any) -> ScriptedTransport:
        transport = ScriptedTransport(stream(*chat_text("x")))
        made[threading.current_thread().name].append(transport)
        return transport

    monkeypatch.setattr("steelyard.transport.client.new_transport", make)
    target = OpenAIChat("m", base_url="http://localhost/v1")
    together = threading.Barrier(2, timeout=10)

    async def session() -> None:
        await target.open(5)
        for _ in range(5):
            together.wait()
            await target.invoke(CASE, CONTEXT)
        together.wait()
        await target.close()

    threads = [threading.Thread(target=asyncio.run, args=(session(),), name=name) for name in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(len(own), own[0].closed) for own in made.values()] == [(1, 1), (1, 1)]


def test_loops_that_are_gone_leave_no_transport_behind() -> None:
    target = OpenAIChat("m", base_url="http://localhost/v1", transport=ScriptedTransport(stream(*chat_text("x"))))
    for _ in range(3):
        asyncio.run(target.invoke(CASE, CONTEXT))  # which nobody closes
    assert len(target._connections._of_loop) == 1


def test_a_transport_that_was_given_is_left_open() -> None:
    transport = ScriptedTransport(stream(*chat_text("x")))
    target = OpenAIChat("m", base_url="http://localhost/v1", transport=transport)

    async def session() -> None:
        await target.open(5)
        await target.invoke(CASE, CONTEXT)
        await target.close()

    asyncio.run(session())
    assert transport.closed == 0
