"""Keys that expire: from a program or a function, fetched once for many calls, replaced when refused or too old."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, InvocationResponse
from steelyard.errors import ConfigurationError, TargetError, TransientError
from steelyard.masking import Secret
from steelyard.protocols import HttpReply, HttpRequest
from steelyard.run.config import build_suite
from steelyard.targets import AnthropicMessages, OpenAIChat, OpenAIResponses, keys
from steelyard.targets.endpoint import EndpointTarget
from steelyard.targets.keys import KeySource, read_key
from tests.support.scripted_transport import CONTEXT, ScriptedTransport, chat_text, stream, whole

CASE = EvalCase(id="a", prompt="?")
NOW = 1_800_000_000.0
REFUSED = whole({"error": {"message": "expired", "code": "invalid_api_key"}}, status=401)
KINDS: list[type[EndpointTarget]] = [OpenAIChat, OpenAIResponses, AnthropicMessages]


def key_of(request: HttpRequest) -> str:
    headers = dict(request.headers)
    return headers.get("x-api-key") or headers.get("api-key") or headers["authorization"].removeprefix("Bearer ")


def counted(path: Path, program: str = "print(f'key-number-{n}')") -> list[str]:
    """A program that counts how often it is run, and prints a key with that number."""
    count = f"open({str(path)!r}, 'a').write('.'); n = len(open({str(path)!r}).read())"
    return [sys.executable, "-c", f"{count}\n{program}"]


class Server:
    """Accepts only some keys."""

    def __init__(self, *good: str) -> None:
        self.good = set(good)
        self.keys: list[str] = []

    def __call__(self, request: HttpRequest) -> HttpReply:
        self.keys.append(key_of(request))
        return stream(*chat_text("x")) if self.keys[-1] in self.good else REFUSED


def ask(target: OpenAIChat, calls: int = 1) -> list[InvocationResponse]:
    async def all_of_them() -> list[InvocationResponse]:
        return await asyncio.gather(*(target.invoke(CASE, CONTEXT) for _ in range(calls)))

    return asyncio.run(all_of_them())


def target_of(server: Server, **options: Any) -> OpenAIChat:
    return OpenAIChat("m", base_url="https://api.example.com/v1", transport=ScriptedTransport(server), **options)


def test_a_programs_output_is_the_key_and_is_fetched_once_for_many_calls(tmp_path: Path) -> None:
    server = Server("key-number-1")
    target = target_of(server, api_key_command=counted(tmp_path / "runs"))
    target.check()
    ask(target, 50)
    ask(target, 5)
    assert server.keys == ["key-number-1"] * 55
    assert (tmp_path / "runs").read_text() == "."


@pytest.mark.parametrize("kind", KINDS)
def test_every_endpoint_takes_a_program_or_a_function(kind: type[EndpointTarget]) -> None:
    for options in ({"api_key_command": ["echo", "fetched-key"]}, {"api_key": lambda: "fetched-key"}):
        transport = ScriptedTransport(whole({"error": {"message": "no"}}, status=400))
        target = kind("m", base_url="http://localhost:1", transport=transport, **options)
        with pytest.raises(TargetError):
            asyncio.run(target.invoke(CASE, CONTEXT))
        assert key_of(transport.requests[0]) == "fetched-key"


def test_a_key_that_expires_is_replaced_once_for_all_calls_that_it_failed(tmp_path: Path) -> None:
    server = Server("key-number-1")
    target = target_of(server, api_key_command=counted(tmp_path / "runs"))
    ask(target)
    server.good = {"key-number-2"}
    server.keys.clear()
    assert len(ask(target, 20)) == 20
    assert server.keys.count("key-number-1") == server.keys.count("key-number-2") == 20
    assert (tmp_path / "runs").read_text() == ".."


def test_a_key_that_was_never_accepted_is_wrong_and_fetched_only_once(tmp_path: Path) -> None:
    server = Server("another")
    target = target_of(server, api_key_command=counted(tmp_path / "runs"))
    for _ in range(3):
        with pytest.raises(TargetError, match="HTTP 401"):
            ask(target)
    assert (tmp_path / "runs").read_text() == "."


def test_a_new_key_that_is_refused_too_is_an_error_without_the_key(tmp_path: Path) -> None:
    server = Server("key-number-1")
    target = target_of(server, api_key_command=counted(tmp_path / "runs"))
    ask(target)
    server.good = set()
    with pytest.raises(TargetError, match="HTTP 401") as caught:
        ask(target)
    assert not isinstance(caught.value, TransientError)
    assert server.keys == ["key-number-1", "key-number-1", "key-number-2"]


def test_a_key_is_fetched_again_by_the_life_it_states(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(keys.time, "monotonic", lambda: now)
    given: list[str] = []

    def function() -> tuple[str, int]:
        given.append(f"key-{len(given)}-abcdefgh")
        return given[-1], 600

    source = KeySource(function=function)
    assert asyncio.run(source.key()).reveal() == asyncio.run(source.key()).reveal() == given[0]
    now += 539
    assert asyncio.run(source.key()).reveal() == given[0]
    now += 2  # a minute before it expires
    assert asyncio.run(source.key()).reveal() == "key-1-abcdefgh"


def jwt(**claims: Any) -> str:
    parts = (
        base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({"alg": "x"}, claims)
    )
    return ".".join([*parts, "c2ln"])


@pytest.mark.parametrize(
    ("output", "key", "life"),
    [
        ("  plain-key\n", "plain-key", None),
        (Secret("plain-key"), "plain-key", None),
        (("plain-key", 30), "plain-key", 30),
        ('{"access_token": "t", "expires_in": 3599, "token_type": "Bearer"}', "t", 3599),
        ({"token": "t", "expires_in": "60"}, "t", 60),
        (
            json.dumps({"accessToken": "t", "expires_on": NOW + 600, "expiresOn": "2020-01-01 00:00:00"}),
            "t",
            600,
        ),
        (json.dumps({"credential": {"access_token": "t", "token_expiry": "2999-01-01T00:00:00Z"}}), "t", ...),
        (jwt(exp=NOW + 900), ..., 900),
    ],
)
def test_a_key_and_its_life_are_read_from_what_tools_print(
    output: Any, key: Any, life: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys.time, "time", lambda: NOW)
    read, lives = read_key(output)
    assert key is ... or read == key
    assert lives is not None if life is ... else lives == (None if life is None else pytest.approx(life))


@pytest.mark.parametrize("output", ["", "  \n", "two\nlines", "{}", '{"access_token": 5}', None, 7, b"bytes"])
def test_what_is_no_key_is_refused(output: Any) -> None:
    with pytest.raises(TransientError):
        read_key(output)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["no-such-program-anywhere"], "could not be started: No such file"),
        (
            [sys.executable, "-c", "import sys; sys.exit('please log in ' + 'x' * 50)"],
            "exit code 1: please log in \\*\\*\\*$",
        ),
        ([sys.executable, "-c", "raise SystemExit(3)"], "exit code 3: it wrote nothing"),
        ([sys.executable, "-c", ""], "gave no key"),
    ],
)
def test_a_program_that_gives_no_key_is_a_clear_error_before_anything_is_called(
    command: list[str], message: str
) -> None:
    target = target_of(Server(), api_key_command=command)
    with pytest.raises(ConfigurationError, match=message):
        target.check()
    with pytest.raises(TransientError, match=message):
        ask(target)


def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MAX_FETCH_SECONDS", 0.2)
    with pytest.raises(ConfigurationError, match="sleep"):
        target_of(Server(), api_key_command=["sleep", "600"]).check()


def test_a_function_may_be_async_or_slow_and_its_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def good() -> str:
        await asyncio.sleep(0)
        return "async-key"

    def bad() -> str:
        raise RuntimeError("not logged in")

    server = Server("async-key")
    ask(target_of(server, api_key=good))
    assert server.keys == ["async-key"]
    with pytest.raises(TransientError, match="the api_key function failed: RuntimeError: not logged in"):
        ask(target_of(server, api_key=bad))
    release = threading.Event()
    monkeypatch.setattr(keys, "MAX_FETCH_SECONDS", 0.05)
    with pytest.raises(TransientError, match=r"gave no key within 0\.05 s"):
        ask(target_of(server, api_key=release.wait))
    release.set()


def test_a_call_that_is_cancelled_does_not_take_the_key_from_the_others() -> None:
    release = threading.Event()

    def slow() -> str:
        release.wait(10)
        return "late-key"

    async def session() -> Secret:
        source = KeySource(function=slow)
        first, second = asyncio.create_task(source.key()), asyncio.create_task(source.key())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        release.set()
        return await second

    assert asyncio.run(session()).reveal() == "late-key"


def test_no_fetched_key_is_pickled_or_shown() -> None:
    server = Server("fetched-secret-key")
    target = target_of(server, api_key_command=[sys.executable, "-c", "print('fetched-secret' + '-key')"])
    ask(target)
    copy = pickle.loads(pickle.dumps(target))
    for text in (repr(target), str(target.identity()), pickle.dumps(target).decode("latin-1"), repr(copy)):
        assert "fetched-secret-key" not in text


def test_a_server_that_repeats_an_earlier_key_does_not_get_it_shown(tmp_path: Path) -> None:
    server = Server("key-number-1")
    target = target_of(server, api_key_command=counted(tmp_path / "runs"))
    ask(target)
    server.good = set()
    echo = {"error": {"message": "not valid: key-number-1, key-number-2"}}
    transport = ScriptedTransport(REFUSED, whole(echo, status=401))
    target._given_transport = transport
    with pytest.raises(TargetError) as caught:
        ask(target)
    assert "key-number" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_key_command": "gcloud auth print-access-token"}, "must be a list"),
        ({"api_key_command": []}, "list of texts"),
        ({"api_key_command": ["a", 5]}, "list of texts"),
        ({"api_key_command": ["a"], "api_key": "k"}, "api_key and api_key_command cannot be used together"),
        ({"api_key_command": ["a"], "api_key_life": "soon"}, "api_key_life must be a length of time"),
        ({"api_key_command": ["a"], "api_key_life": 0}, "above 0"),
        ({"api_key_life": "5m"}, "goes with api_key_command"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        OpenAIChat("m", **options)


def test_a_suite_names_a_program_or_a_function(tmp_path: Path) -> None:
    (tmp_path / "cases.jsonl").write_text('{"prompt": "?"}\n')
    (tmp_path / "own_keys.py").write_text("def token():\n    return 'from-a-function'\n")
    suite = "target:\n  openai-chat: {model: m, base_url: 'http://localhost:1', %s}\ncases: cases.jsonl\n"
    for line, key in (
        ("api_key_command: [echo, from-a-program], api_key_life: 45m", "from-a-program"),
        ("api_key: {python: 'own_keys.py:token'}", "from-a-function"),
    ):
        (tmp_path / "suite.yaml").write_text(suite % line)
        target = build_suite(tmp_path / "suite.yaml").target
        assert isinstance(target, OpenAIChat)
        assert target._auth.source is not None
        assert asyncio.run(target._auth.source.key()).reveal() == key


@pytest.mark.parametrize(
    ("options", "header"),
    [
        ({"api_key": "0123456789abcdef"}, ("api-key", "0123456789abcdef")),
        ({"api_key": jwt(a=1)}, ("authorization", f"Bearer {jwt(a=1)}")),
        ({"api_key_command": ["echo", jwt(a=1)]}, ("authorization", f"Bearer {jwt(a=1)}")),
    ],
)
def test_azure_takes_keys_and_tokens_of_entra_id_and_its_models_address(
    options: dict[str, Any], header: tuple[str, str]
) -> None:
    transport = ScriptedTransport(stream(*chat_text("x")))
    target = OpenAIChat(
        "Phi-4",
        base_url="https://x.services.ai.azure.com/models",
        api_version="2024-05-01-preview",
        transport=transport,
        **options,
    )
    asyncio.run(target.invoke(CASE, CONTEXT))
    url = "https://x.services.ai.azure.com/models/chat/completions?api-version=2024-05-01-preview"
    assert transport.requests[0].url == url
    assert transport.body["model"] == "Phi-4"
    assert header in transport.requests[0].headers


def test_a_token_of_entra_id_is_found_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_OPENAI_AD_TOKEN", jwt(a=1))
    monkeypatch.delenv("AZURE_OPENAI_API_KEY", raising=False)
    transport = ScriptedTransport(stream(*chat_text("x")))
    target = OpenAIChat("d", base_url="https://x.openai.azure.com", api_version="2024-10-21", transport=transport)
    asyncio.run(target.invoke(CASE, CONTEXT))
    assert ("authorization", f"Bearer {jwt(a=1)}") in transport.requests[0].headers
