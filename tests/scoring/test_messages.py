"""Tool calls, whichever API's shape the messages have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steelyard.scoring.trajectory import ToolCall, tool_calls

JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "type", "function", "input"]), inner)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["role", "type", "content", "tool_calls", "function_call", "output"])


def chat(*calls: dict[str, object]) -> dict[str, object]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def function(name: str, arguments: object, call_id: str = "c1") -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


SEARCH = ToolCall("search", {"q": "x"}, "c1")


def test_openai_chat_messages() -> None:
    log = [
        {"role": "user", "content": "hi"},
        chat(function("search", '{"q": "x"}'), function("fetch", '{"url": "y"}', "c2")),
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "assistant", "content": "done"},
    ]
    assert tool_calls(log) == [SEARCH, ToolCall("fetch", {"url": "y"}, "c2")]


def test_openai_chats_legacy_function_call_and_custom_tools() -> None:
    log = [
        {"role": "assistant", "function_call": {"name": "search", "arguments": '{"q": "x"}'}},
        chat({"id": "c2", "type": "custom", "custom": {"name": "shell", "input": "3"}}),
    ]
    assert tool_calls(log) == [ToolCall("search", {"q": "x"}), ToolCall("shell", 3, "c2")]


def test_openai_responses_items() -> None:
    log = [
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "search", "arguments": '{"q": "x"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "z"}},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
    ]
    assert tool_calls(log) == [SEARCH, ToolCall("web_search", {"type": "search", "query": "z"}, "w")]


def test_anthropic_content_blocks() -> None:
    log = [
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "x"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "found"}]},
    ]
    assert tool_calls(log) == [SEARCH]


def test_shapes_may_be_mixed_and_the_order_is_the_logs() -> None:
    log = [
        chat({"name": "flat", "args": {"a": 1}, "id": "c0"}),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "x"}}]},
        {"output": [{"type": "function_call", "call_id": "c2", "name": "fetch", "arguments": "{}"}]},
    ]
    assert tool_calls(log) == [ToolCall("flat", {"a": 1}, "c0"), SEARCH, ToolCall("fetch", {}, "c2")]


def test_malformed_arguments_are_kept_as_text_and_noted() -> None:
    calls = tool_calls([chat(function("search", '{"q": "x'), function("search", "[" * 100_000))])
    assert calls[0] == ToolCall("search", '{"q": "x', "c1", malformed=True)
    assert calls[1].malformed


def test_empty_arguments_are_no_arguments() -> None:
    assert [
        call.arguments for call in tool_calls([chat(function("a", ""), function("b", None), function("c", "{}"))])
    ] == [
        {},
        {},
        {},
    ]


def test_what_is_not_a_message_is_passed_over() -> None:
    odd = [None, 3, "x", [], {}, {"tool_calls": None}, {"tool_calls": [None]}, {"content": 5}, {"function_call": "x"}]
    assert tool_calls(odd) == []
    assert tool_calls([chat({"function": {"name": 7}})]) == [ToolCall("")]


@given(st.lists(st.dictionaries(KEYS, JSON), max_size=4))
def test_no_log_can_break_it(log) -> None:
    assert isinstance(tool_calls(log), list)
