"""Counting tokens where the server reports none: tiktoken where it works, else an estimate, always marked."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase, tokens
from steelyard.targets import AnthropicMessages, OpenAIChat
from steelyard.tokens import estimate, estimate_input_tokens, load_counter
from tests.support.scripted_transport import CONTEXT, ScriptedTransport, chat_text, chat_whole, stream, whole


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_counters", {})
    monkeypatch.setattr(tokens, "_loading", {})


class Encoding:
    """Counts words, so that it can be told from the rule of thumb."""

    def encode_ordinary(self, text: str) -> list[str]:
        return text.split()


@pytest.fixture
def tiktoken(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    asked: list[str] = []

    def encoding_for_model(model: str) -> Encoding:
        asked.append(model)
        if model != "known":
            raise KeyError(model)
        return Encoding()

    def get_encoding(name: str) -> Encoding:
        asked.append(name)
        return Encoding()

    module = types.SimpleNamespace(encoding_for_model=encoding_for_model, get_encoding=get_encoding, asked=asked)
    monkeypatch.setitem(sys.modules, "tiktoken", module)
    return module


@given(st.text())
def test_the_rule_of_thumb_is_a_token_for_four_bytes_and_none_for_nothing(text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    assert estimate(text) == (size + 3) // 4
    assert (estimate(text) == 0) == (text == "")


@given(st.text(), st.text())
def test_more_text_is_never_fewer_tokens(one: str, other: str) -> None:
    assert estimate(one + other) >= max(estimate(one), estimate(other))


def test_a_case_costs_its_prompt_messages_and_tools() -> None:
    assert estimate_input_tokens(EvalCase(id="a")) == 0
    assert estimate_input_tokens(EvalCase(id="a", prompt="x" * 40)) == 10 + 4
    assert estimate_input_tokens(EvalCase(id="a", prompt="x" * 40, system_prompt="y" * 8)) == 10 + 4 + 2 + 4
    messages = [
        {"role": "user", "content": "x" * 40},
        {"role": "assistant", "content": [{"type": "text", "text": "y"}]},
    ]
    assert estimate_input_tokens(EvalCase(id="a", messages=messages)) == 10 + 4 + 1 + 4
    tool = {"name": "f", "description": "z" * 400}
    assert estimate_input_tokens(EvalCase(id="a", tools=[tool])) > 100


def test_an_image_is_not_counted_by_its_bytes() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    source = {"type": "image", "source": {"type": "base64", "data": "A" * 100_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look"}, image, source]}]
    assert estimate_input_tokens(EvalCase(id="a", messages=messages)) == 1 + 4


def test_the_words_of_tool_calls_count() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "x" * 40}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert estimate_input_tokens(EvalCase(id="a", messages=messages)) == 1 + 10 + 4


def test_tiktoken_counts_where_it_is_there(tiktoken: types.SimpleNamespace) -> None:
    count = asyncio.run(load_counter("known"))
    assert count("one two three") == 3


def test_an_unknown_model_is_counted_by_the_newest_encoding(tiktoken: types.SimpleNamespace) -> None:
    assert asyncio.run(load_counter("mine"))("one two three") == 3
    assert tiktoken.asked == ["mine", "o200k_base"]


def test_a_very_long_text_is_not_left_to_tiktoken(tiktoken: types.SimpleNamespace) -> None:
    assert asyncio.run(load_counter("known"))("x" * 100_000) == 25_000


def test_many_who_ask_at_once_load_it_once(tiktoken: types.SimpleNamespace) -> None:
    async def many() -> None:
        counts = await asyncio.gather(*(load_counter("known") for _ in range(20)))
        assert len({id(count) for count in counts}) == 1

    asyncio.run(many())
    assert tiktoken.asked == ["known"]


def test_where_tiktoken_cannot_load_the_rule_of_thumb_counts_and_it_is_not_asked_again(
    tiktoken: types.SimpleNamespace,
) -> None:
    def offline(name: str) -> Any:
        tiktoken.asked.append(name)
        raise ConnectionError("offline")

    tiktoken.encoding_for_model = offline
    assert asyncio.run(load_counter("known")) is estimate
    assert asyncio.run(load_counter("other")) is estimate
    assert tiktoken.asked == ["known"]


def test_a_load_that_hangs_is_given_up(tiktoken: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    tiktoken.encoding_for_model = lambda model: release.wait(10)
    monkeypatch.setattr(tokens, "_LOADING_SECONDS", 0.01)
    try:
        assert asyncio.run(load_counter("known")) is estimate
    finally:
        release.set()


def without_usage(target: Any) -> Any:
    return asyncio.run(target.invoke(EvalCase(id="a", system_prompt="s t", prompt="one two three"), CONTEXT))


def test_an_answer_without_usage_has_estimated_tokens_and_says_so(tiktoken: types.SimpleNamespace) -> None:
    reply = whole(chat_whole({"content": "four words are here"}, usage=None))
    options: dict[str, Any] = {"base_url": "http://localhost/v1", "transport": ScriptedTransport(reply)}
    response = without_usage(OpenAIChat("known", **options))
    assert (response.num_tokens_input, response.num_tokens_output) == (2 + 3 + 2 * 4, 4)
    assert response.tokens_estimated


def test_a_stream_without_usage_has_a_time_per_token_all_the_same(tiktoken: types.SimpleNamespace) -> None:
    events = [event for event in chat_text("four words", " are here") if event["choices"]]
    transport = ScriptedTransport(stream(*events, first=1.0, step=1.0))
    response = without_usage(OpenAIChat("known", base_url="http://localhost/v1", transport=transport))
    assert response.num_tokens_output == 4
    assert response.time_per_output_token == pytest.approx((5.0 - 2.0) / 3)
    assert response.tokens_estimated


def test_the_messages_api_without_usage_is_estimated_with_its_system_prompt(tiktoken: types.SimpleNamespace) -> None:
    reply = whole({"content": [{"type": "text", "text": "four words are here"}], "stop_reason": "end_turn"})
    transport = ScriptedTransport(reply)
    response = without_usage(AnthropicMessages("known", base_url="http://localhost", transport=transport))
    assert response.num_tokens_output == 4
    assert response.num_tokens_input > 3 + 4
    assert response.tokens_estimated
