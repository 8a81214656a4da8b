"""Model calls of an agent on disk: `calls/ID/TRIAL.jsonl`, a line for each call as it ends, and their reader.

An agent sends its whole conversation with each call, so whole bodies would grow with the square of the turns. A request
is written as its difference from an earlier one: how many leading turns are the same, the turns after those, and the
other fields that changed. Everything is compared and kept as the bytes that were sent.

A file begins with a `session` line for each attempt, which the attempt's calls follow. An attempt that ended has an
`end` line; one without was killed, and what its calls cost is in no record yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgspec

from steelyard.records import InvocationResponse

CALLS_VERSION = 1
_MAX_THREADS = 8
"""Conversations of which the last request is held, to write the next one's difference."""
_CACHE_MARK = re.compile(rb',?\s*"cache_control"\s*:\s*(\{[^{}]*\}|null)')
"""Moved from turn to turn by agents that use Anthropic's prompt cache: a turn is the same with and without it."""
_ENCODER = msgspec.json.Encoder()
_BODY = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TURNS = msgspec.json.Decoder(list[msgspec.Raw])
_TURN_FIELDS = ("messages", "input")


class RequestDelta(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A request's body as its difference from that of an earlier call of the attempt."""

    base: int | None = None
    """The earlier call's number; None when there is none, or the body is unlike any before."""
    keep: int = 0
    """How many leading turns are those of the base."""
    field: str | None = None
    """The field that holds the turns, `messages` or `input`; None when there is no such list."""
    turns: list[msgspec.Raw] = []
    set: dict[str, msgspec.Raw] = {}
    drop: list[str] = []
    text: str | None = None
    """A body that is not a JSON object, as it was sent."""


class SessionLine(msgspec.Struct, tag="session", tag_field="type", omit_defaults=True, kw_only=True):
    """The beginning of an attempt."""

    v: int
    id: str
    trial: int
    attempt: int
    session: str
    time: datetime


class CallLine(msgspec.Struct, tag="call", tag_field="type", omit_defaults=True, kw_only=True):
    """One call, as the gateway saw it. `response` has the fields of a record: tokens, cost, times, the reply."""

    session: str
    call: int
    """From 1 on, in the order in which the calls ended."""
    api: str
    path: str
    model: str | None = None
    at: float
    """Seconds from the beginning of the attempt to the request's arrival."""
    thread: int | None = None
    """Which conversation of the attempt it belongs to: 1 is the first, others are sub-agents or side questions."""
    elapsed: float
    """Seconds from the request's arrival to the end of its reply, waiting included."""
    generates: bool = True
    aborted: bool = False
    """The agent hung up before the reply was complete."""
    request: RequestDelta = msgspec.field(default_factory=RequestDelta)
    response: InvocationResponse = msgspec.field(default_factory=InvocationResponse)


class EndLine(msgspec.Struct, tag="end", tag_field="type", omit_defaults=True, kw_only=True):
    """The end of an attempt whose program has ended, by itself or by a limit."""

    session: str
    calls: int
    limit: str | None = None


Line: TypeAlias = SessionLine | CallLine | EndLine
_LINE = msgspec.json.Decoder(Line)


class Body:
    """A request's body, split into its turns and its other fields without decoding any of them."""

    __slots__ = ("field", "fields", "marks", "text", "turns")

    def __init__(self, body: bytes) -> None:
        self.turns: list[bytes] = []
        self.field: str | None = None
        self.text: str | None = None
        self.fields: dict[str, bytes] = {}
        try:
            if b"\n" in body or b"\r" in body:  # a line of the file must stay one line
                body = msgspec.json.format(body, indent=-1)
            self.fields = {name: bytes(value) for name, value in _BODY.decode(body).items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.text = body.decode("utf-8", "replace")
        for name in _TURN_FIELDS:
            if self.fields.get(name, b"")[:1] == b"[":
                self.turns = [bytes(turn) for turn in _TURNS.decode(self.fields.pop(name))]
                self.field = name
                break
        self.marks = [turn_mark(turn) for turn in self.turns]

    def value(self, name: str) -> Any:
        """A field's value, decoded; None where there is none."""
        raw = self.fields.get(name)
        return None if raw is None else msgspec.json.decode(raw)

    def after(self, base: Body, number: int) -> RequestDelta:
        """What of this body differs from an earlier one."""
        if self.text is not None:
            return RequestDelta(text=self.text)
        keep = common_length(self.turns, base.turns) if self.field == base.field else 0
        changed = {name: msgspec.Raw(raw) for name, raw in self.fields.items() if base.fields.get(name) != raw}
        return RequestDelta(
            base=number,
            keep=keep,
            field=self.field,
            turns=[msgspec.Raw(turn) for turn in self.turns[keep:]],
            set=changed,
            drop=[name for name in base.fields if name not in self.fields],
        )

    def whole(self) -> RequestDelta:
        """This body as the difference from nothing."""
        delta = self.after(_NOTHING, 0)
        delta.base = None
        return delta


def turn_mark(turn: bytes) -> bytes:
    """A digest of a turn that stays the same when only its cache mark moves."""
    plain = _CACHE_MARK.sub(b"", turn) if b"cache_control" in turn else turn
    return hashlib.blake2b(plain, digest_size=12).digest()


def is_models(turn: dict[str, Any]) -> bool:
    """Whether a turn of a request is the model's own, sent back to it: it is already in the trajectory."""
    kind = turn.get("type")
    return turn.get("role") == "assistant" or kind == "reasoning" or (isinstance(kind, str) and kind.endswith("_call"))


def common_length(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """How many leading items are equal."""
    same = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        same += 1
    return same


class Thread(msgspec.Struct):
    """A conversation: the calls whose requests each continue the one before."""

    number: int
    call: int = 0
    body: Body | None = None
    response_id: str | None = None
    """The id of the last reply, by which the next request may name it instead of repeating the conversation."""


class Threads:
    """Finds the conversation that a request continues: an agent's own, or one of its sub-agents'."""

    def __init__(self) -> None:
        self._threads: list[Thread] = []
        self._count = 0

    def place(self, body: Body) -> tuple[Thread, int]:
        """The request's thread, a new one where it continues none, and how many of its turns were sent before."""
        earlier = body.value("previous_response_id")
        for thread in reversed(self._threads):
            if isinstance(earlier, str) and thread.response_id == earlier:
                return thread, 0
            known = thread.body
            if known is None or not known.marks or known.field != body.field:
                continue
            if body.marks[: len(known.marks)] == known.marks:
                return thread, len(known.marks)
        self._count += 1
        return Thread(self._count), len(body.turns)

    def delta(self, body: Body) -> RequestDelta:
        """The request as its difference from the held one that it has most in common with."""
        best, number, shared = None, 0, -1
        for thread in reversed(self._threads):
            if thread.body is None or thread.body.text is not None:
                continue
            if (same := common_length(body.turns, thread.body.turns)) > shared:
                best, number, shared = thread.body, thread.call, same
        return body.whole() if best is None else body.after(best, number)

    def hold(self, thread: Thread, body: Body, call: int, response_id: str | None) -> None:
        """Keep the request as its thread's last; of too many threads the oldest are no longer held."""
        thread.body, thread.call, thread.response_id = body, call, response_id
        if thread in self._threads:
            self._threads.remove(thread)
        self._threads.append(thread)
        del self._threads[:-_MAX_THREADS]


class CallFile:
    """Appends the lines of one attempt. The file is opened with its first call."""

    def __init__(self, path: Path | None, begin: SessionLine) -> None:
        self._path = path
        self._begin = begin
        self._descriptor: int | None = None

    def append(self, line: CallLine | EndLine) -> None:
        """Write a line; OSError when the disk refuses it."""
        if self._path is None:
            return
        data = encode_line(line)
        if self._descriptor is None:
            if isinstance(line, EndLine):
                return  # no call: no file
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            torn = os.fstat(self._descriptor).st_size > 0 and not _ends_line(self._descriptor)
            data = (b"\n" if torn else b"") + encode_line(self._begin) + data
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def encode_line(line: Line) -> bytes:
    """A line of the file; text that no UTF-8 can hold becomes escapes."""
    try:
        return _ENCODER.encode(line) + b"\n"
    except UnicodeEncodeError:
        import json

        return json.dumps(msgspec.to_builtins(line, str_keys=True)).encode("ascii") + b"\n"


def _ends_line(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, 1, size - 1) == b"\n"


class RecordedCall(msgspec.Struct):
    """A call as it was recorded, with its request whole again."""

    line: CallLine
    body: Any
    """The request's body, decoded; text where it was not JSON; None where it could not be rebuilt."""


class RecordedSession(msgspec.Struct):
    """The calls of one attempt, in the order in which they ended."""

    begin: SessionLine
    calls: list[RecordedCall]
    end: EndLine | None = None
    """None for an attempt that was killed, or still runs."""

    @property
    def cost(self) -> float:
        """What the calls cost, as far as that is known."""
        return sum(call.line.response.cost or 0.0 for call in self.calls)


def read_lines(file: IO[bytes]) -> Iterator[Line]:
    """The readable lines of a file; a line that a crash cut short is left out."""
    for raw in file:
        try:
            yield _LINE.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue


def _lines_at(path: Path) -> Iterator[Line]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(path, "rb") as file:
        yield from read_lines(file)


def read_calls(path: Path) -> list[RecordedSession]:
    """The attempts in a file of calls, with every request rebuilt; empty when there is no such file."""
    found: list[RecordedSession] = []
    bodies: dict[int, tuple[list[bytes], dict[str, bytes]]] = {}
    for line in _lines_at(path):
        if isinstance(line, SessionLine):
            found.append(RecordedSession(line, []))
            bodies = {}
        elif not found or line.session != found[-1].begin.session:
            continue  # its beginning was lost
        elif isinstance(line, EndLine):
            found[-1].end = line
        else:
            found[-1].calls.append(RecordedCall(line, _rebuilt(line, bodies)))
    return found


def _rebuilt(line: CallLine, bodies: dict[int, tuple[list[bytes], dict[str, bytes]]]) -> Any:
    delta = line.request
    if delta.text is not None:
        return delta.text
    if delta.base is not None and delta.base not in bodies:
        return None
    turns, fields = ([], {}) if delta.base is None else bodies[delta.base]
    turns = [*turns[: delta.keep], *map(bytes, delta.turns)]
    fields = {name: raw for name, raw in fields.items() if name not in delta.drop}
    fields |= {name: bytes(raw) for name, raw in delta.set.items()}
    bodies[line.call] = (turns, fields)
    whole = {name: msgspec.json.decode(raw) for name, raw in fields.items()}
    if delta.field is not None:
        whole[delta.field] = [msgspec.json.decode(turn) for turn in turns]
    return whole


def lost_cost(path: Path) -> float:
    """What the calls of killed attempts cost: it is in no record."""
    costs: dict[str, float] = {}
    for line in _lines_at(path):
        if isinstance(line, CallLine):
            costs[line.session] = costs.get(line.session, 0.0) + (line.response.cost or 0.0)
        elif isinstance(line, EndLine):
            costs.pop(line.session, None)
    return sum(costs.values())


_NOTHING = Body(b"{}")
