"""The model calls of an agent, as its gateway recorded them: a time line, and a line for each call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from steelyard.records import Record
from steelyard.stats.formatting import format_seconds
from steelyard.workspace.places import CALLS, safe_name
from steelyard.workspace.recording import CallLine, read_calls

_WIDTH = 60
_MARKS = {"model": "█", "waiting": "·", "tools": "░"}


def call_lines(run: Path, record: Record) -> Iterator[str]:
    """The calls of the record's last attempt; nothing where none were recorded."""
    sessions = read_calls(run / CALLS / safe_name(record.id) / f"{record.trial}.jsonl")
    if not sessions:
        return
    calls = [call.line for call in sessions[-1].calls]
    parts = {
        "model": record.time_in_model or 0.0,
        "waiting": record.time_waiting or 0.0,
        "tools": record.time_in_tools or 0.0,
    }
    total = max([sum(parts.values()), *(call.at + call.elapsed for call in calls)])
    shares = ", ".join(f"{_MARKS[name]} {name} {format_seconds(seconds)}" for name, seconds in parts.items() if seconds)
    yield f"model calls: {len(calls)} in {format_seconds(total)}; {shares}"
    yield f"  {time_line(calls, total)}"
    for call in sorted(calls, key=lambda call: call.at):
        yield f"  {_call(call)}"


def time_line(calls: Sequence[CallLine], total: float) -> str:
    """What went on in each of sixty moments: a model answered, calls only waited, or neither."""
    marks = []
    for place in range(_WIDTH):
        moment = (place + 0.5) * total / _WIDTH
        state = "tools"
        for call in calls:
            sent = call.at + (call.response.time_waiting or 0.0)
            if sent <= moment < call.at + call.elapsed:
                state = "model"
                break
            if call.at <= moment < sent:
                state = "waiting"
        marks.append(_MARKS[state])
    return "".join(marks)


def _call(call: CallLine) -> str:
    response = call.response
    parts = [f"{format_seconds(call.at)}", call.model or call.path]
    if call.thread not in (None, 1):
        parts.append(f"(conversation {call.thread})")
    parts.append(f"took {format_seconds(call.elapsed)}")
    if response.time_waiting:
        parts.append(f"of it waiting {format_seconds(response.time_waiting)}")
    if response.time_to_first_token is not None:
        parts.append(f"first token {format_seconds(response.time_to_first_token)}")
    if response.num_tokens_input is not None or response.num_tokens_output is not None:
        about = "about " if response.tokens_estimated else ""
        parts.append(f"tokens {about}{response.num_tokens_input or 0:,} + {response.num_tokens_output or 0:,}")
    if response.cost is not None:
        parts.append(f"cost {response.cost:.6g}")
    if response.error is not None:
        parts.append(response.error)
    return "  ".join(parts)
