"""Readers of what agents print, on output of the documented shapes."""

import json

import pytest

from steelyard.errors import CaseLimitReached
from steelyard.scoring import Trajectory
from steelyard.targets.agent_output import ClaudeStreamReader, CodexReader, TextReader, WholeReader

USAGE = {"input_tokens": 10, "cache_creation_input_tokens": 5, "cache_read_input_tokens": 100, "output_tokens": 7}


def assistant(identifier, *content, usage=None):
    message = {"id": identifier, "type": "message", "role": "assistant", "model": "claude", "content": list(content)}
    return {
        "type": "assistant",
        "message": {**message, "usage": usage or USAGE},
        "parent_tool_use_id": None,
        "session_id": "s",
    }


def tool_result(identifier, content):
    part = {"type": "tool_result", "tool_use_id": identifier, "content": content}
    return {"type": "user", "message": {"role": "user", "content": [part]}, "session_id": "s"}


CLAUDE = [
    {"type": "system", "subtype": "init", "session_id": "s", "model": "claude", "tools": ["Bash"]},
    assistant("m1", {"type": "text", "text": "Let me look."}),
    assistant("m1", {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}),
    tool_result("t1", "a.py"),
    assistant("m2", {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "Done."}),
    {
        "type": "result", "subtype": "success", "is_error": False, "duration_ms": 5, "num_turns": 2, "result": "Done.",
        "session_id": "s", "total_cost_usd": 0.12,
        "usage": {name: 2 * count for name, count in USAGE.items()},
    },
]  # fmt: skip

CODEX = [
    {"type": "thread.started", "thread_id": "t"},
    {"type": "turn.started"},
    {"type": "item.completed", "item": {"id": "i0", "type": "reasoning", "text": "**Looking**"}},
    {"type": "item.started", "item": {"id": "i1", "type": "command_execution", "command": "ls"}},
    {
        "type": "item.completed",
        "item": {
            "id": "i1", "type": "command_execution", "command": "ls", "aggregated_output": "a.py\n", "exit_code": 0,
            "status": "completed",
        },
    },
    {
        "type": "item.completed",
        "item": {"id": "i2", "type": "file_change", "changes": [{"path": "a.py", "kind": "update"}]},
    },
    {"type": "item.completed", "item": {"id": "i3", "type": "agent_message", "text": "Fixed."}},
    {"type": "turn.completed", "usage": {"input_tokens": 100, "cached_input_tokens": 60, "output_tokens": 20}},
]  # fmt: skip


class Turns:
    """Keeps what is recorded, and says after some turns that a limit is reached."""

    def __init__(self, most=100):
        self.messages, self.tokens, self._most = [], 0, most
        self.times = []

    def __call__(self, message=None, *, input_tokens=None, output_tokens=None, cost=None, at=None):
        self.messages.append(message)
        self.times.append(at)
        self.tokens += (input_tokens or 0) + (output_tokens or 0)
        if len(self.messages) >= self._most:
            raise CaseLimitReached("turn_limit")


def spelled(events):
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def read(kind, events, size=7, turns=None):
    reader = kind(turns)
    data = events if isinstance(events, bytes) else spelled(events)
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])
    return reader.finish()


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_claude_code_is_read_to_text_trajectory_tokens_cost_and_turns(size):
    turns = Turns()
    response = read(ClaudeStreamReader, CLAUDE, size, turns)
    assert response.error is None
    assert response.response_text == "Done."
    assert (response.num_turns, response.cost) == (2, 0.12)
    assert (response.num_tokens_input, response.num_tokens_output) == (230, 14)
    assert (response.num_tokens_input_cached, response.num_tokens_input_cache_write) == (200, 10)
    assert [message["role"] for message in response.messages] == ["assistant", "tool", "assistant"]
    call = response.messages[0]["tool_calls"][0]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("Bash", {"command": "ls"})
    assert response.messages[0]["content"] == "Let me look."
    assert response.messages[1] == {"role": "tool", "tool_call_id": "t1", "content": "a.py"}
    assert response.messages[2]["reasoning"] == "hm"
    assert turns.messages == response.messages
    assert turns.tokens == 2 * 122


def test_the_trajectory_scorer_reads_what_the_readers_make():
    from steelyard import EvalCase

    for kind, events, tools in ((ClaudeStreamReader, CLAUDE, ["Bash"]), (CodexReader, CODEX, ["shell", "apply_patch"])):
        case = EvalCase(prompt="?", expected_trajectory=[{"name": tool} for tool in tools])
        score, _ = Trajectory(arguments="ignore").score(case, read(kind, events))
        assert score.passed, score.reason


@pytest.mark.parametrize(
    ("subtype", "stop_reason"), [("error_max_turns", "turn_limit"), ("error_max_budget_usd", "cost_limit")]
)
def test_a_limit_of_claude_code_itself_is_an_outcome(subtype, stop_reason):
    result = {"type": "result", "subtype": subtype, "is_error": True, "num_turns": 3, "total_cost_usd": 0.5}
    response = read(ClaudeStreamReader, [*CLAUDE[:-1], result])
    assert (response.stop_reason, response.error) == (stop_reason, None)
    assert response.response_text == "Done."


def test_an_error_of_claude_code_is_an_error():
    result = {"type": "result", "subtype": "success", "is_error": True, "result": "API Error: 529 overloaded"}
    assert "API Error: 529" in read(ClaudeStreamReader, [result]).error


def test_what_a_killed_claude_code_had_printed_is_kept():
    response = read(ClaudeStreamReader, spelled(CLAUDE[:4]) + b'{"type":"assis')
    assert response.error is not None
    assert response.response_text == "Let me look."
    assert response.num_turns == 1
    assert response.num_tokens_output == 7


@pytest.mark.parametrize("size", [1, 9, 100_000])
def test_codex_is_read_to_text_trajectory_tokens_and_turns(size):
    response = read(CodexReader, CODEX, size)
    assert response.error is None
    assert response.response_text == "Fixed."
    assert (response.num_tokens_input, response.num_tokens_input_cached, response.num_tokens_output) == (100, 60, 20)
    assert response.num_turns == 3
    names = [call["function"]["name"] for message in response.messages for call in message.get("tool_calls", ())]
    assert names == ["shell", "apply_patch"]
    assert response.messages[1]["content"] == "a.py\n"


def test_a_failed_turn_of_codex_is_an_error():
    events = [*CODEX[:-1], {"type": "turn.failed", "error": {"message": "stream disconnected"}}]
    assert read(CodexReader, events).error == "Codex reported an error: stream disconnected"


@pytest.mark.parametrize("kind", [ClaudeStreamReader, CodexReader])
def test_output_without_events_is_named(kind):
    response = read(kind, b"Usage: agent [options]\n")
    assert "printed no events" in response.error
    assert response.response_text == "Usage: agent [options]\n"


@pytest.mark.parametrize("kind", [ClaudeStreamReader, CodexReader])
def test_odd_lines_cost_nothing(kind):
    events = CLAUDE if kind is ClaudeStreamReader else CODEX
    odd = (
        b'warning: x\n\n[1,2]\n{"type": 5}\n{"type":"assistant"}\n{"type":"user","message":{"content":5}}\n' + b"\xff\n"
    )
    assert read(kind, odd + spelled(events)).response_text in ("Done.", "Fixed.")


def test_a_turn_beyond_the_limit_does_not_break_the_reader():
    assert read(ClaudeStreamReader, CLAUDE, turns=Turns(most=1)).response_text == "Done."


def test_text_keeps_its_end_and_whole_readers_give_all_to_a_function():
    assert read(TextReader, b"caf\xc3\xa9\n", 1).response_text == "café"
    reader = WholeReader(lambda data: {"response_text": data.decode().upper()})
    reader.feed(b"ab")
    reader.feed(b"c")
    assert reader.finish().response_text == "ABC"


def test_a_reply_of_claude_code_came_before_the_tool_that_it_called(monkeypatch):
    """That it is whole is known only when the tool's result comes: its time is that of its last part."""
    moments = iter(range(100, 200))
    monkeypatch.setattr("steelyard.targets.agent_output.time.time", lambda: next(moments))
    turns = Turns()
    read(ClaudeStreamReader, CLAUDE, turns=turns)
    replies = [at for message, at in zip(turns.messages, turns.times, strict=True) if message["role"] == "assistant"]
    assert replies == sorted(replies)
    assert all(at is not None for at in replies)
    tools = [at for message, at in zip(turns.messages, turns.times, strict=True) if message["role"] == "tool"]
    assert set(tools) == {None}


def test_an_action_of_codex_is_recorded_when_it_begins():
    turns = Turns()
    reader = CodexReader(turns)
    reader.feed(spelled(CODEX[:4]))
    (call,) = turns.messages
    assert call["tool_calls"][0]["function"] == {"name": "shell", "arguments": '{"command": "ls"}'}
    reader.feed(spelled(CODEX[4:]))
    assert [message["role"] for message in turns.messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert reader.finish().num_turns == 3
