"""Files of calls: requests as differences, threads, torn files, and what killed attempts cost."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from steelyard.records import InvocationResponse
from steelyard.workspace.recording import (
    CALLS_VERSION,
    Body,
    CallFile,
    CallLine,
    EndLine,
    SessionLine,
    Threads,
    lost_cost,
    read_calls,
)


def begin(session: str = "s1", attempt: int = 1) -> SessionLine:
    now = datetime.now(UTC)
    return SessionLine(v=CALLS_VERSION, id="c", trial=0, attempt=attempt, session=session, time=now)


def line(number: int, session: str = "s1", cost: float | None = None, **more: Any) -> CallLine:
    return CallLine(
        session=session, call=number, api="openai", path="/chat/completions", at=0.0, elapsed=1.0,
        response=InvocationResponse(cost=cost), **more,
    )  # fmt: skip


def written(path: Path, bodies: list[bytes]) -> None:
    """Record calls with these bodies, as a session does."""
    file, threads = CallFile(path, begin()), Threads()
    for number, raw in enumerate(bodies, start=1):
        body = Body(raw)
        delta = threads.delta(body)
        thread, _ = threads.place(body)
        threads.hold(thread, body, number, None)
        file.append(line(number, thread=thread.number, request=delta))
    file.append(EndLine(session="s1", calls=len(bodies)))
    file.close()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5), st.lists, max_leaves=4
)
TURNS = st.lists(st.dictionaries(st.sampled_from(["role", "content", "cache_control"]), VALUES), max_size=4)
BODIES = st.dictionaries(st.sampled_from(["model", "tools", "stream", "input"]), VALUES) | st.builds(
    lambda fields, turns: {**fields, "messages": turns},
    st.dictionaries(st.sampled_from(["model", "system"]), VALUES),
    TURNS,
)


@given(bodies=st.lists(BODIES, max_size=6), indent=st.sampled_from([None, 1]))
def test_any_requests_are_rebuilt_as_they_were_sent(tmp_path_factory, bodies, indent) -> None:
    path = tmp_path_factory.mktemp("calls") / "0.jsonl"
    written(path, [json.dumps(body, indent=indent).encode() for body in bodies])
    assert [call.body for session in read_calls(path) for call in session.calls] == bodies
    assert all(json.loads(raw) for raw in path.read_text().splitlines()) if bodies else not path.exists()


def test_a_body_that_is_not_json_is_kept_as_text(tmp_path: Path) -> None:
    written(tmp_path / "0.jsonl", [b"not json", b"[1, 2]", b"{}"])
    (session,) = read_calls(tmp_path / "0.jsonl")
    assert [call.body for call in session.calls] == ["not json", "[1, 2]", {}]


def conversation(turns: int, *, first: str = "fix the bug", marked: bool = False) -> bytes:
    """The request of an agent's n-th turn: the same system prompt and tools each time, and a longer conversation."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
    for number in range(turns):
        messages.append({"role": "assistant", "content": f"step {number} " + "x" * 200})
        messages.append({"role": "user", "content": [{"type": "text", "text": f"result {number} " + "y" * 200}]})
    if marked:
        last = messages[-1]
        last["content"] = last["content"] if isinstance(last["content"], list) else [{"type": "text", "text": first}]
        last["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return json.dumps({"model": "m", "system": "s" * 5000, "tools": ["t" * 5000], "messages": messages}).encode()


def test_the_file_grows_with_the_turns_and_not_with_their_square(tmp_path: Path) -> None:
    sizes = []
    for turns in (20, 40):
        written(tmp_path / f"{turns}.jsonl", [conversation(turn, marked=turn > 0) for turn in range(turns)])
        sizes.append((tmp_path / f"{turns}.jsonl").stat().st_size)
    assert sizes[1] < 2 * sizes[0]
    assert sizes[1] < sum(len(conversation(turn)) for turn in range(40)) / 8


def test_a_conversation_is_followed_while_its_cache_mark_moves(tmp_path: Path) -> None:
    threads = Threads()
    numbers = []
    for number, raw in enumerate([conversation(turn, marked=turn > 0) for turn in range(5)], start=1):
        thread, _ = threads.place(Body(raw))
        threads.hold(thread, Body(raw), number, None)
        numbers.append(thread.number)
    assert numbers == [1] * 5


def test_a_sub_agent_between_the_turns_is_a_thread_of_its_own(tmp_path: Path) -> None:
    bodies = [conversation(0), conversation(0, first="search"), conversation(1, first="search"), conversation(1)]
    written(tmp_path / "0.jsonl", bodies)
    (session,) = read_calls(tmp_path / "0.jsonl")
    assert [call.line.thread for call in session.calls] == [1, 2, 2, 1]
    assert session.calls[3].line.request.base == 1
    assert [call.body for call in session.calls] == [json.loads(body) for body in bodies]


def test_a_request_that_names_the_reply_before_it_continues_its_thread() -> None:
    threads = Threads()
    first = Body(b'{"model": "m", "input": [{"role": "user", "content": "a"}]}')
    thread, _ = threads.place(first)
    threads.hold(thread, first, 1, "resp_1")
    later, known = threads.place(
        Body(b'{"input": [{"type": "function_call_output"}], "previous_response_id": "resp_1"}')
    )
    assert (later.number, known) == (1, 0)


def test_a_torn_line_is_left_out_and_the_next_attempt_begins_on_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    written(path, [conversation(0), conversation(1)])
    path.write_bytes(path.read_bytes()[:-40])  # the end line is gone, and half of it stays
    file = CallFile(path, begin("s2"))
    file.append(line(1, "s2"))
    file.close()
    sessions = read_calls(path)
    assert [(one.begin.session, len(one.calls), one.end) for one in sessions] == [("s1", 2, None), ("s2", 1, None)]


def test_only_attempts_without_an_end_have_a_lost_cost(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    for session, costs, ends in (("a", (1.0, 2.0), False), ("b", (4.0,), True), ("c", (8.0, None), False)):
        file = CallFile(path, begin(session))
        for number, cost in enumerate(costs, start=1):
            file.append(line(number, session, cost))
        if ends:
            file.append(EndLine(session=session, calls=len(costs)))
        file.close()
    assert lost_cost(path) == 11.0
    assert lost_cost(tmp_path / "none.jsonl") == 0.0


def test_an_attempt_without_calls_leaves_no_file(tmp_path: Path) -> None:
    file = CallFile(tmp_path / "x" / "0.jsonl", begin())
    file.append(EndLine(session="s1", calls=0))
    file.close()
    assert not (tmp_path / "x").exists()
    assert read_calls(tmp_path / "x" / "0.jsonl") == []


def test_half_a_surrogate_pair_is_written_as_an_escape(tmp_path: Path) -> None:
    file = CallFile(tmp_path / "0.jsonl", begin())
    file.append(line(1, model="\ud800"))
    file.close()
    assert "\\ud800" in (tmp_path / "0.jsonl").read_text()
