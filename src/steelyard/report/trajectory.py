"""An agent's way through a case: each turn with its time, tokens and cost, and where the time went.

It is read from the model calls that the gateway recorded (`calls/`), else from the turns that were written down as they
came (`logs/ID/TRIAL.turns.jsonl`), so that a case that is still running has one too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from steelyard.disk import open_beneath
from steelyard.journal.files import CALLS, LOGS
from steelyard.records import Record
from steelyard.report.chart import Axis, Bar, Chart, LegendEntry, nice_ticks
from steelyard.stats.formatting import counted, escape_invisible, format_seconds
from steelyard.workspace.keeping import TURNS, TurnLine, read_turns
from steelyard.workspace.places import safe_name
from steelyard.workspace.recording import (
    CallLine,
    EndLine,
    SessionLine,
    common_length,
    is_models,
    read_lines,
    turn_mark,
)

Part = Literal["model", "tools", "waiting"]

PARTS: dict[Part, str] = {"model": "█", "waiting": "·", "tools": "░"}
"""What an attempt's time goes to, and its sign in a text."""
_SIGNS_WIDE = 60
_MAX_TURNS = 2_000
"""Calls, or recorded messages, of a case that are read."""
_MAX_LANES = 6
_MAX_BARS = 300
"""Bars in a lane: more are joined with their neighbours."""
_LANE, _AROUND_LANES = 24, 54
"""Pixels of a lane, and of what is above and below all of them."""


class TurnFigures(msgspec.Struct, omit_defaults=True):
    """When a turn was, and what it used. Times are seconds; `at` is since the attempt began."""

    at: float
    took: float
    waited: float | None = None
    """Of it in our own rate limits."""
    first: float | None = None
    """To the first token, from when the call was sent."""
    input: int | None = None
    output: int | None = None
    estimated: bool = False
    cost: float | None = None
    model: str | None = None
    error: str | None = None


class Turn(msgspec.Struct):
    """A message, of the model or of a tool, in the conversation (`thread`) that it belongs to."""

    message: dict[str, Any]
    figures: TurnFigures
    thread: int = 1


class Span(msgspec.Struct, frozen=True):
    """A stretch of time in which a model answered, a tool ran, or calls waited for our rate limits."""

    part: Part
    begin: float
    end: float
    thread: int = 1
    text: str = ""


class AgentTrajectory(msgspec.Struct):
    """The turns of an attempt, and where its time went."""

    turns: list[Turn]
    spans: list[Span]
    total: float
    """Seconds of the attempt, as far as they are known."""
    calls: int | None = None
    """Model calls, where a gateway counted them."""
    is_cut: bool = False
    """Whether there are more turns than were read."""

    def seconds(self, part: Part) -> float:
        """Time that went to a part: a model that answers counts before tools and waiting, tools before waiting."""
        before = {"model": (), "tools": ("model",), "waiting": ("model", "tools")}[part]
        hidden = [span for span in self.spans if span.part in before]
        both = _covered([*hidden, *(span for span in self.spans if span.part == part)])
        return both - _covered(hidden)


def read_trajectory(run: Path, case_id: str, trial: int, total: float | None = None) -> AgentTrajectory | None:
    """The trajectory of a case's last attempt; None where none was recorded. `total` is how long it took, if known."""
    name = safe_name(case_id)
    calls = _read_calls(run, f"{CALLS}/{name}/{trial}.jsonl")
    if calls:
        return _from_calls(calls, total)
    lines = _read_turns(run, f"{LOGS}/{name}/{trial}.{TURNS}")
    return _from_turns(lines, total) if len(lines) > 1 else None


def trajectory_of(run: Path, record: Record) -> AgentTrajectory | None:
    """The trajectory of a record, whose own figures say how long its attempt took."""
    split = [record.time_in_model, record.time_waiting, record.time_in_tools]
    total = sum(part or 0.0 for part in split) if record.time_in_model is not None else record.time_to_last_token
    return read_trajectory(run, record.id, record.trial, total)


# From the gateway's calls


def _read_calls(run: Path, path: str) -> list[CallLine]:
    """The calls of the last attempt in a file."""
    found: list[CallLine] = []
    session = None
    try:
        with os.fdopen(open_beneath(run, path), "rb") as file:
            for line in read_lines(file):
                if isinstance(line, SessionLine):
                    session, found = line.session, []
                elif isinstance(line, EndLine) or line.session != session or len(found) > _MAX_TURNS:
                    continue
                else:
                    found.append(line)
    except OSError:
        return []
    return found


def _from_calls(calls: list[CallLine], total: float | None) -> AgentTrajectory:
    turns: list[Turn] = []
    spans: list[Span] = []
    sent: dict[int, _Request] = {}
    """The last request of each conversation."""
    for call in calls[:_MAX_TURNS]:
        request = _request(call, sent)
        if not call.generates:
            continue
        thread, response = call.thread or 1, call.response
        ended, waited = call.at + call.elapsed, response.time_waiting or 0.0
        before = sent.get(thread)
        if before is not None or thread > 1:  # else it is the case's own question
            known = 0 if before is None else common_length(before.marks, request.marks)
            since = 0.0 if before is None else before.ended
            figures = TurnFigures(at=since, took=max(0.0, call.at - since))
            turns += _given(request.turns[known:], thread, figures, before is not None)
        sent[thread] = request
        figures = TurnFigures(
            at=call.at,
            took=call.elapsed,
            waited=response.time_waiting,
            first=response.time_to_first_token,
            input=response.num_tokens_input,
            output=response.num_tokens_output,
            estimated=response.tokens_estimated,
            cost=response.cost,
            model=call.model,
            error=response.error,
        )
        replies = [message for message in response.messages or () if isinstance(message, dict)]
        turns.append(Turn(replies[0] if replies else {"role": "assistant"}, figures, thread))
        turns += [Turn(message, TurnFigures(at=ended, took=0.0), thread) for message in replies[1:]]
        if waited:
            spans.append(Span("waiting", call.at, call.at + waited, thread, "rate-limit wait"))
        spans.append(Span("model", call.at + waited, ended, thread, _in_words(figures)))
    total = max([total or 0.0, *(span.end for span in spans)])
    spans += [Span("tools", begin, end, 1, "tools, and the agent itself") for begin, end in _gaps(spans, total)]
    return AgentTrajectory(turns, spans, total, calls=len(calls), is_cut=len(calls) > _MAX_TURNS)


class _Request(NamedTuple):
    """The turns of a call's request and what they are known by, the call's number, and when its reply was there."""

    call: int
    turns: list[bytes]
    marks: list[bytes]
    ended: float


def _request(call: CallLine, sent: dict[int, _Request]) -> _Request:
    """A request put together from its difference; the turns of a base that is not known are left out."""
    delta, new = call.request, list(map(bytes, call.request.turns))
    base = next((one for one in sent.values() if one.call == delta.base), _Request(0, [], [], 0.0))
    turns, marks = base.turns[: delta.keep], base.marks[: delta.keep]
    return _Request(call.call, [*turns, *new], [*marks, *map(turn_mark, new)], call.at + call.elapsed)


def _given(raw: Sequence[bytes], thread: int, figures: TurnFigures, is_timed: bool) -> Iterator[Turn]:
    """What a request adds to its conversation besides the model's own words: results of tools, further questions."""
    for one in raw:
        message = msgspec.json.decode(one)
        if isinstance(message, dict) and not is_models(message) and message.get("role") != "system":
            yield Turn(message, figures if is_timed else TurnFigures(at=figures.at + figures.took, took=0.0), thread)
            figures, is_timed = TurnFigures(at=figures.at + figures.took, took=0.0), False


# From recorded turns


def _read_turns(run: Path, path: str) -> list[TurnLine]:
    try:
        with os.fdopen(open_beneath(run, path), "rb") as file:
            lines = read_turns(file)
            return [line for line, _ in zip(lines, range(_MAX_TURNS + 2), strict=False)]
    except OSError:
        return []


def _from_turns(lines: list[TurnLine], total: float | None) -> AgentTrajectory:
    """Each message took from the one before to its own time; tools run until their results are there."""
    turns: list[Turn] = []
    spans: list[Span] = []
    began, last = lines[0].time, 0.0
    for line in lines[1 : _MAX_TURNS + 1]:
        at = max(last, line.time - began)
        message = line.message or {"role": "assistant"}
        figures = TurnFigures(
            at=last, took=at - last, input=line.input_tokens, output=line.output_tokens, cost=line.cost
        )
        turns.append(Turn(message, figures))
        part: Part = "model" if message.get("role") == "assistant" else "tools"
        if at > last:
            spans.append(Span(part, last, at, 1, _in_words(figures)))
        last = at
    total = max(total or 0.0, last)
    spans += [Span("tools", begin, end, 1, "tools, and the agent itself") for begin, end in _gaps(spans, total)]
    return AgentTrajectory(turns, spans, total, is_cut=len(lines) > _MAX_TURNS + 1)


# Stretches of time


def _covered(spans: Iterable[Span]) -> float:
    """Seconds that at least one of the spans covers."""
    seconds, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        seconds += max(0.0, span.end - max(until, span.begin))
        until = max(until, span.end)
    return seconds


def _gaps(spans: Sequence[Span], total: float) -> Iterator[tuple[float, float]]:
    """What no span covers between the beginning and the end of an attempt."""
    until = 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        if span.begin > until:
            yield until, span.begin
        until = max(until, span.end)
    if total > until:
        yield until, total


# As text


def trajectory_lines(found: AgentTrajectory) -> Iterator[str]:
    """A time line, and a line for each reply of a model."""
    replies = [turn for turn in found.turns if is_models(turn.message)]
    parts = {part: found.seconds(part) for part in PARTS}
    shares = ", ".join(f"{PARTS[part]} {part} {format_seconds(spent)}" for part, spent in parts.items() if spent)
    count = counted(len(replies), "turn") if found.calls is None else f"model calls: {found.calls}"
    yield f"{count} in {format_seconds(found.total)}; {shares}"
    yield f"  {time_line(found)}"
    for turn in sorted(replies, key=lambda turn: turn.figures.at):
        thread = f"(conversation {turn.thread})  " if turn.thread > 1 else ""
        yield f"  {format_seconds(turn.figures.at)}  {thread}{_in_words(turn.figures)}"


def time_line(found: AgentTrajectory) -> str:
    """What went on in each of sixty moments."""
    signs = []
    for place in range(_SIGNS_WIDE):
        moment = (place + 0.5) * found.total / _SIGNS_WIDE
        there = {span.part for span in found.spans if span.begin <= moment < span.end}
        signs.append(next((PARTS[part] for part in ("model", "tools", "waiting") if part in there), PARTS["tools"]))
    return "".join(signs)


def _in_words(figures: TurnFigures) -> str:
    parts = [figures.model, f"took {format_seconds(figures.took)}"]
    if figures.waited:
        parts.append(f"of it waiting {format_seconds(figures.waited)}")
    if figures.first is not None:
        parts.append(f"first token {format_seconds(figures.first)}")
    if figures.input is not None or figures.output is not None:
        about = "about " if figures.estimated else ""
        parts.append(f"tokens {about}{figures.input or 0:,} + {figures.output or 0:,}")
    if figures.cost is not None:
        parts.append(f"cost {figures.cost:.6g}")
    parts.append(figures.error)
    return "  ".join(part for part in parts if part)


# As a picture


def time_chart(found: AgentTrajectory) -> tuple[Chart, int]:
    """The time line as a chart with a lane for each conversation, for tools and for waiting; and its height."""
    threads = sorted({span.thread for span in found.spans if span.part == "model"})
    lanes: list[tuple[str, Part, list[Span]]] = []
    for thread in threads[:_MAX_LANES]:
        spans = [span for span in found.spans if span.part == "model" and span.thread == thread]
        lanes.append(("model" if thread == threads[0] else f"model {thread}", "model", spans))
    for part in ("tools", "waiting"):
        spans = [span for span in found.spans if span.part == part]
        if spans:
            lanes.append((part, part, spans))
    names = [name for name, _, _ in lanes]
    total = found.total or 1.0
    bars = [
        Bar(span.begin, span.end, len(lanes) - row - 0.5, f"span-{part}", _bar_text(span))
        for row, (_, part, spans) in enumerate(lanes)
        for span in _joined(spans, total)
    ]
    shares = ", ".join(f"{part} {format_seconds(found.seconds(part))}" for part in PARTS if found.seconds(part))
    chart = Chart(
        title="Time line",
        description=f"Time line of {format_seconds(found.total)}: {shares}",
        x=Axis(0.0, total, nice_ticks(total, 5), format_seconds, "since the attempt began"),
        y=Axis(0.0, float(len(lanes)), [], str),
        rows=names,
        bars=bars,
        legend=[LegendEntry(f"span-{part}", part) for part in PARTS if found.seconds(part)],
    )
    return chart, _AROUND_LANES + _LANE * max(1, len(lanes))


def _bar_text(span: Span) -> str:
    return escape_invisible(f"{format_seconds(span.begin)} to {format_seconds(span.end)}: {span.text or span.part}")


def _joined(spans: Sequence[Span], total: float) -> list[Span]:
    """The spans of a lane; of too many, those that are next to each other are one."""
    ordered = sorted(spans, key=lambda span: span.begin)
    if len(ordered) <= _MAX_BARS:
        return ordered
    near, joined, members = total / _MAX_BARS, [ordered[0]], 1
    for span in ordered[1:]:
        last = joined[-1]
        if span.begin - last.end < near and span.end - last.begin < 2 * near:
            members += 1
            end = max(last.end, span.end)
            joined[-1] = msgspec.structs.replace(last, end=end, text=f"{members} stretches of {span.part}")
        else:
            joined.append(span)
            members = 1
    return joined
