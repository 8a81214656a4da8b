"""The cases of a run as the HTML page reads them: columns for its table, and a body for each case's drawer.

Both are JSON, in blocks and chunks of bounded size, so that a run of any length is written in flat memory.
"""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from steelyard.records import Record, is_digest
from steelyard.report.case import (
    CaseFile,
    CaseFiles,
    ChatMessage,
    as_text,
    beginning,
    case_files,
    ending,
    has_files,
    patch_summary,
    question,
    turns,
)
from steelyard.report.chart import draw
from steelyard.report.records import STATES, SuiteCase, state_of
from steelyard.report.trajectory import PARTS, AgentTrajectory, time_chart, trajectory_of
from steelyard.scoring.trajectory import ToolCall
from steelyard.stats.slices import keys_of, values_of

BLOCK = 500
"""Records in a block of columns."""
CHUNK_BYTES = 1 << 18
CHUNK_RECORDS = 256

_PREVIEW = 160
_WHOLE_FILE = 64 << 20
_MIN_TEXT_CHARS, _MAX_TEXT_CHARS = 1_000, 50_000
_MAX_TURNS = 400
_LOG_SHARE = 4
"""How many logs share the characters of one text."""
_SHOWN_LOGS = ("out", "err")
_TIME_LINE_WIDTH = 570
_SHAPES = ("description", "width", "height", "left", "right", "bottom", "x_label", "x_ticks", "rows", "bars")
"""What the page needs of a drawing with bars: it puts the shapes in place, as the template does in other pages."""
_MAX_SAMPLES = 50
_MAX_ACCEPTED = 20
_MAX_KEYS = 20
"""Keys of metadata that cases can be searched by, and values of one that is a list."""

ESCALATED, CACHED = 1, 2
"""The bits of a record's flags."""

_FACTS = (
    "attempts",
    "elapsed",
    "run_time",
    "time_to_first_token",
    "time_to_last_token",
    "time_per_output_token",
    "time_to_first_content_token",
    "time_to_first_reasoning_token",
    "time_between_tokens_p50",
    "time_between_tokens_p99",
    "time_between_tokens_max",
    "stalls",
    "time_waiting",
    "time_in_backoff",
    "time_in_failed_tries",
    "time_queued",
    "time_from_planned",
    "num_turns",
    "time_in_model",
    "time_in_tools",
    "cpu_seconds",
    "peak_memory",
    "disk_used",
    "exit_code",
    "num_tokens_input",
    "num_tokens_output",
    "num_tokens_input_cached",
    "num_tokens_output_reasoning",
    "tokens_estimated",
    "cost",
    "retries",
    "cached",
    "stop_reason",
    "http_status",
    "request_id",
    "node",
    "request_time",
    "notes",
)


def text_limit(records: int) -> int:
    """How many characters of one text the page holds: fewer the more cases there are, so that it can be opened."""
    return min(max(_WHOLE_FILE // max(records, 1), _MIN_TEXT_CHARS), _MAX_TEXT_CHARS)


class TableColumns:
    """The table's columns, gathered record by record and handed out in blocks."""

    def __init__(self, score_names: Sequence[str]) -> None:
        self._names = score_names
        self._clear()

    def add(self, record: Record, asked: SuiteCase | None) -> None:
        """Take in one record."""
        values = {score.name: score.shown_value for score in record.scores}
        answer = record.error if record.error is not None else record.response_text
        row = {
            "id": record.id,
            "trial": record.trial,
            "state": STATES.index(state_of(record)),
            "flags": flags_of(record),
            "first": _short(record.time_to_first_token),
            "last": _short(record.time_to_last_token),
            "input": record.num_tokens_input,
            "output": record.num_tokens_output,
            "cost": _short(record.cost),
            "prompt": preview(question(record, asked.case if asked is not None else None)),
            "answer": preview(answer or ""),
            "meta": metadata_text(record.metadata),
        }
        for name, value in row.items():
            self._block[name].append(value)
        for column, name in zip(self._scores, self._names, strict=True):
            value = values.get(name)
            column.append(value if isinstance(value, str) else _short(value))

    @property
    def full(self) -> bool:
        return len(self._block["id"]) >= BLOCK

    def take(self) -> bytes:
        """The block as JSON; the next record begins another."""
        block = msgspec.json.encode({**self._block, "scores": self._scores})
        self._clear()
        return block

    def _clear(self) -> None:
        names = (
            "id",
            "trial",
            "state",
            "flags",
            "first",
            "last",
            "input",
            "output",
            "cost",
            "prompt",
            "answer",
            "meta",
        )
        self._block: dict[str, list[Any]] = {name: [] for name in names}
        self._scores: list[list[float | str | None]] = [[] for _ in self._names]


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """What a search by metadata looks at: a line `key=value` for each value, of the first keys."""
    if not metadata or is_digest(metadata):
        return ""
    keys = itertools.islice(keys_of(metadata), _MAX_KEYS)
    lines = (f"{key}={value}" for key in keys for value in values_of(metadata, key)[:_MAX_KEYS])
    return "\n".join(_encodable(" ".join(line.split()))[:_PREVIEW] for line in lines)


def flags_of(record: Record) -> int:
    """What is special about a record, as bits."""
    return ESCALATED * any(score.escalated for score in record.scores) | CACHED * record.cached


class CaseWork:
    """Reads what a run directory has of an agent's cases besides their records; of most runs there is nothing."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._is_there = has_files(run)

    def trajectory(self, record: Record) -> AgentTrajectory | None:
        """The turns of a case with their times; None where none were recorded."""
        return trajectory_of(self._run, record) if self._is_there else None

    def files(self, case_id: str, trial: int, limit: int) -> dict[str, Any]:
        """The patch and the ends of the logs of a case as texts, and the names of all its files."""
        found = case_files(self._run, case_id, trial) if self._is_there else None
        return _files(self._run, found, limit) if found else {}


def _files(run: Path, found: CaseFiles, limit: int) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "logs": [_log(run, file, limit // _LOG_SHARE) for file in found.logs],
        "artifacts": [[_encodable(file.path), file.size] for file in found.artifacts],
    }
    if found.more:
        shown["more_artifacts"] = found.more
    if found.patch is not None:
        text, summary = beginning(run, found.patch, limit), patch_summary(run, found.patch)
        shown["patch"] = {
            "path": _encodable(found.patch.path),
            "text": text if found.patch.size <= 4 * limit and len(text) < limit else [text, found.patch.size],
        }
        if summary is not None:
            shown["patch"] |= {"files": summary.files, "added": summary.added, "removed": summary.removed}
    return shown


def _log(run: Path, file: CaseFile, limit: int) -> dict[str, Any]:
    """A log, with its end if it is what the last attempt printed."""
    name = file.path.rpartition("/")[2]
    shown: dict[str, Any] = {"path": _encodable(file.path), "size": file.size}
    if file.size and name.split(".", 1)[1] in _SHOWN_LOGS:
        shown["end"] = ending(run, file, limit)
    return shown


def time_line(found: AgentTrajectory) -> dict[str, Any]:
    """The time line of a case: the shapes of its drawing, and the seconds of each part."""
    chart, height = time_chart(found)
    drawing = draw(chart, _TIME_LINE_WIDTH, height)
    return {
        "drawing": {name: drawing[name] for name in _SHAPES},
        "parts": {part: _short(seconds) for part in PARTS if (seconds := found.seconds(part))},
        "calls": found.calls,
        "cut": found.is_cut,
    }


def body(record: Record, offset: int, asked: SuiteCase | None, limit: int, work: CaseWork | None = None) -> bytes:
    """All that the drawer shows of a record, as JSON. A text beyond the limit is a pair: its beginning, its length."""
    return msgspec.json.encode({**answer_body(record, offset, asked, limit, work), **expected_body(asked, limit)})


def answer_body(
    record: Record, offset: int, asked: SuiteCase | None, limit: int, work: CaseWork | None = None
) -> dict[str, Any]:
    """What a record has of that: the answer, its scores and how it came about."""
    case = asked.case if asked is not None else None
    trajectory = None if work is None else work.trajectory(record)
    found: dict[str, Any] = {
        "offset": offset,
        "turns": list(shown_turns(turns(record, case, trajectory), limit, record.response_text)),
        "answer": cut(record.response_text, limit),
        "error": cut(record.error, limit),
        "error_type": record.error_type,
        "scores": [_score(score, limit) for score in record.scores],
        "facts": dict(_facts(record)),
    }
    if trajectory is not None:
        found["time_line"] = time_line(trajectory)
    if work is not None:
        found |= work.files(record.id, record.trial, limit)
    if record.error_traceback is not None:
        found["traceback"] = cut(record.error_traceback, limit)
    if record.stderr is not None:
        found["stderr"] = cut(record.stderr, limit)
    if record.retry_errors:
        found["retried"] = [cut(f"{failed.time:%H:%M:%S} {failed.error}", limit) for failed in record.retry_errors]
    return found


def expected_body(asked: SuiteCase | None, limit: int) -> dict[str, Any]:
    """What its case has of that: what was expected."""
    found: dict[str, Any] = {}
    case = asked.case if asked is not None else None
    if case is not None and case.expected is not None:
        found["expected"] = [cut(text, limit) for text in _accepted(case.expected)]
    if case is not None and case.expected_trajectory is not None:
        found["trajectory"] = cut(as_text(case.expected_trajectory), limit)
    if asked is not None and asked.edited:
        found["edited"] = True
    return found


def _facts(record: Record) -> Iterator[tuple[str, Any]]:
    """The fields that have something to say; a count of zero does."""
    for name in _FACTS:
        value = getattr(record, name)
        if value is not None and value is not False and value != []:
            yield name, value


def _accepted(expected: Any) -> list[str]:
    """What was expected as texts: a list of texts means any of them, any other value is one."""
    several = isinstance(expected, list | tuple) and expected and all(isinstance(one, str) for one in expected)
    return list(expected)[:_MAX_ACCEPTED] if several else [as_text(expected)]


def shown_turns(messages: Sequence[ChatMessage], limit: int, answer: str | None = None) -> Iterator[dict[str, Any]]:
    """The messages of a conversation as the drawer reads them, with the names of the tools whose results they are."""
    tools = {call.id: call.name for turn in messages for call in turn.calls if call.id}
    for turn in messages[:_MAX_TURNS]:
        shown: dict[str, Any] = {"role": turn.role[:40]}
        if turn is messages[-1] and turn.text and turn.text == answer:
            shown["is_answer"] = True
        else:
            shown["text"] = cut(turn.text, limit)
        if turn.calls:
            shown["calls"] = [_call(call, limit) for call in turn.calls]
        if turn.answers in tools:
            shown["tool"] = tools[turn.answers]
        if turn.thread is not None:
            shown["thread"] = turn.thread
        if turn.figures is not None:
            shown["figures"] = turn.figures
        yield shown
    if len(messages) > _MAX_TURNS:
        yield {"role": "", "text": f"… and {len(messages) - _MAX_TURNS} more messages", "more": True}


def _call(call: ToolCall, limit: int) -> dict[str, Any]:
    arguments = as_text(call.arguments)
    return {
        "name": call.name,
        "arguments": cut(arguments, limit),
        **({"id": call.id} if call.id else {}),
        **({"malformed": True} if call.malformed else {}),
    }


def _score(score: Any, limit: int) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(score)
    for name in ("samples", "reasons", "errors"):
        if name in shown:
            shown[name] = shown[name][:_MAX_SAMPLES]
    for name in ("reasons", "errors"):
        if name in shown:
            shown[name] = [cut(text, limit) for text in shown[name]]
    for name in ("reason", "error_traceback"):
        if name in shown:
            shown[name] = cut(shown[name], limit)
    return shown


def cut(text: str | None, limit: int) -> str | list[Any] | None:
    """A text as a page holds it: beyond the limit a pair, its beginning and its length."""
    if text is None:
        return None
    text = _encodable(text)
    return text if len(text) <= limit else [text[:limit], len(text)]


def preview(text: str, longest: int = _PREVIEW) -> str:
    """The beginning of a text, on one line."""
    return " ".join(_encodable(text[: longest * 2]).split())[:longest]


_LEVEL = 6
_COPIED_AT_ONCE = 3 << 18
"""Bytes; a multiple of three, so that pieces in base64 can be joined."""


class PackedCases:
    """The cases, compressed as they come, in two files: their bodies in chunks, the table's columns in one stream."""

    def __init__(self, bodies: IO[bytes], columns: IO[bytes]) -> None:
        self.starts: list[int] = []
        """Which body each chunk begins with."""
        self._bodies_file, self._columns_file = bodies, columns
        self._compress = zlib.compressobj(_LEVEL, wbits=-15)
        self._blocks = self._count = 0
        self._bodies: list[bytes] = []
        self._size = 0

    def put_body(self, body: bytes) -> None:
        """Take in all that is shown of a record, or of a case, once it is opened."""
        if not self._bodies:
            self.starts.append(self._count)
        self._bodies.append(body)
        self._size += len(body)
        self._count += 1
        if len(self._bodies) >= CHUNK_RECORDS or self._size >= CHUNK_BYTES:
            self._end_chunk()

    def put_block(self, block: bytes) -> None:
        """Take in some rows of the table, as JSON."""
        self._columns_file.write(self._compress.compress((b"," if self._blocks else b"[") + block))
        self._blocks += 1

    def finish(self) -> None:
        """Close what is still open."""
        self._end_chunk()
        self._columns_file.write(self._compress.compress(b"]" if self._blocks else b"[]") + self._compress.flush())

    def data(self) -> Iterator[str]:
        """The elements that hold the cases."""
        yield '<script type="application/octet-stream" id="columns">'
        self._columns_file.seek(0)
        while piece := self._columns_file.read(_COPIED_AT_ONCE):
            yield base64.b64encode(piece).decode()
        yield "</script>\n"
        self._bodies_file.seek(0)
        while piece := self._bodies_file.read(_COPIED_AT_ONCE):
            yield piece.decode()

    def _end_chunk(self) -> None:
        if not self._bodies:
            return
        packed = zlib.compress(b"[" + b",".join(self._bodies) + b"]", _LEVEL, wbits=-15)
        name = f"chunk-{len(self.starts) - 1}"
        element = b'<script type="application/octet-stream" id="%b">%b</script>\n'
        self._bodies_file.write(element % (name.encode(), base64.b64encode(packed)))
        self._bodies.clear()
        self._size = 0


def _encodable(text: str) -> str:
    """The text without lone surrogates, which a suite may hold and JSON may not."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _short(number: float | None) -> float | None:
    """A number to five digits: enough for a table, and a third of the bytes."""
    return None if number is None else float(f"{number:.5g}")
