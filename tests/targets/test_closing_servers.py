"""Servers that announce keep-alive and close their connections: no call is lost, and none is acted on twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Runner, Sweep
from steelyard.errors import TransportError
from steelyard.targets import AnthropicMessages, OpenAIChat, OpenAIResponses
from steelyard.targets.endpoint import EndpointTarget
from tests.support.closing_server import ClosingServer
from tests.support.scripted_transport import CONTEXT
from tests.support.transports import KINDS as KINDS_OF_TRANSPORT

KINDS: list[type[EndpointTarget]] = [OpenAIChat, OpenAIResponses, AnthropicMessages]
each_api = pytest.mark.parametrize("kind", KINDS, ids=[kind.kind for kind in KINDS])
each_parallelism = pytest.mark.parametrize("parallelism", [1, 4, 50])

CLOSING: dict[str, dict[str, Any]] = {
    "after each": {"ending": "close"},
    "after each, a moment later": {"ending": "close", "delay": 0.002},
    "after each, half": {"ending": "half"},
    "after each, half, a moment later": {"ending": "half", "delay": 0.002},
    "after three": {"ending": "close", "served": 3},
    "after forty": {"ending": "close", "served": 40},
}


@pytest.fixture(autouse=True, params=KINDS_OF_TRANSPORT.values(), ids=KINDS_OF_TRANSPORT)
def _transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent over TLS goes through libcurl, which these servers do not speak: so each transport is tried."""
    make = request.param
    monkeypatch.setattr(
        "steelyard.transport.client.new_transport", lambda _url, most, signs, **rest: make(most, **rest)
    )


def errors_of(
    server: ClosingServer, kind: type[EndpointTarget], cases: int, parallelism: int, **options: Any
) -> list[str]:
    suite = EvalSet("closing", [EvalCase(id=str(number), prompt="?") for number in range(cases)])
    target = kind("m", base_url=server.url, **options)
    result = Runner(target, suite, retries=0, parallelism=parallelism, progress="off").run_sync()
    assert len(result.responses) == cases
    return [record.error for record in result.responses if record.error is not None]


@each_api
@each_parallelism
@pytest.mark.parametrize("closing", CLOSING.values(), ids=CLOSING)
def test_no_streamed_call_fails_where_the_server_closes(
    closing: dict[str, Any], parallelism: int, kind: type[EndpointTarget]
) -> None:
    with ClosingServer(**closing) as server:
        cases = max(60, 3 * parallelism)
        assert errors_of(server, kind, cases, parallelism) == []
        assert server.read == cases


@each_api
@each_parallelism
@pytest.mark.parametrize("served", [1, 10])
def test_no_call_without_a_stream_fails_where_the_server_closes(
    served: int, parallelism: int, kind: type[EndpointTarget]
) -> None:
    with ClosingServer(served=served) as server:
        cases = max(60, 3 * parallelism)
        assert errors_of(server, kind, cases, parallelism, stream=False) == []
        assert server.read == cases


@each_parallelism
def test_no_call_fails_at_the_moment_when_an_idle_connection_is_closed(parallelism: int) -> None:
    idle, rounds = 0.05, 12

    async def main(url: str) -> None:
        target = OpenAIChat("m", base_url=url)
        await target.open(parallelism)
        for number in range(rounds):
            calls = (target.invoke(EvalCase(id="a", prompt="?"), CONTEXT) for _ in range(parallelism))
            await asyncio.gather(*calls)
            await asyncio.sleep(idle + (number - rounds / 2) / 4000)
        await target.close()

    with ClosingServer(ending="never", idle=idle) as server:
        asyncio.run(main(server.url))
        assert server.read == rounds * parallelism


@each_api
@each_parallelism
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_call_that_a_server_has_read_is_never_sent_again_for_free(
    streamed: bool, parallelism: int, kind: type[EndpointTarget]
) -> None:
    with ClosingServer(ending="unanswered", served=1) as server:
        cases = 4 * parallelism
        errors = errors_of(server, kind, cases, parallelism, stream=streamed)
        assert errors
        assert all("ConnectionLost" in error for error in errors)
        assert server.read == cases


def test_calls_that_are_sent_again_are_counted_and_cost_no_try() -> None:
    async def main(url: str) -> list[int]:
        target = OpenAIChat("m", base_url=url, stream=False)
        await target.open(1)
        responses = [await target.invoke(EvalCase(id="a", prompt="?"), CONTEXT) for _ in range(200)]
        await target.close()
        assert all(response.retries == 0 for response in responses)
        return [response.resent for response in responses]

    with ClosingServer(served=30) as server:
        resent = asyncio.run(main(server.url))
        assert server.read == 200
    assert set(resent) <= {0, 1}
    assert sum(resent) <= server.connections


def test_an_endpoint_that_closes_after_each_stream_gets_a_new_connection_for_each_call() -> None:
    with ClosingServer(delay=0.002) as server:
        assert errors_of(server, OpenAIChat, 20, 1) == []
        assert server.connections == 20


def test_an_endpoint_that_keeps_alive_keeps_its_connections() -> None:
    with ClosingServer(ending="never") as server:
        assert errors_of(server, OpenAIChat, 200, 4) == []
        assert server.connections == 4


def test_a_server_that_never_answers_on_a_kept_connection_is_not_tried_twice_in_one_call() -> None:
    async def main(url: str) -> None:
        target = OpenAIChat("m", base_url=url, stream=False)
        await target.open(1)
        await target.invoke(EvalCase(id="a", prompt="?"), CONTEXT)
        with pytest.raises(TransportError):
            await target.invoke(EvalCase(id="a", prompt="?"), CONTEXT)
        await target.close()

    with ClosingServer(ending="unanswered") as server:
        asyncio.run(main(server.url))
        assert server.read == 2


@each_parallelism
def test_a_load_run_loses_no_request_where_the_server_closes(parallelism: int) -> None:
    suite = EvalSet("closing", [EvalCase(id="a", prompt="?")])
    with ClosingServer(delay=0.001) as server:
        runner = Runner(OpenAIChat("m", base_url=server.url), suite, progress="off")
        result = runner.run_sync(requests=150, parallelism=parallelism)
        assert result.metrics["counts"] == {"planned": 150, "ok": 150, "error": 0, "cancelled": 0, "not_started": 0}
        assert server.read == 150


def test_a_sweep_recommends_a_level_where_the_server_closes(tmp_path: Path) -> None:
    suite = EvalSet("closing", [EvalCase(id="a", prompt="?")])
    with ClosingServer(delay=0.001) as server:
        runner = Runner(OpenAIChat("m", base_url=server.url), suite, progress="off")
        swept = Sweep(runner, levels=(1, 4), output_path=tmp_path / "sweep", requests=40).run_sync()
    assert [level.error_rate for level in swept.levels] == [0.0, 0.0]
