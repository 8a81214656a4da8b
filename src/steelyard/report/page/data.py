"""The cases of a run as the HTML page reads them: columns for its table, and a body for each case's drawer.

Both are JSON, in blocks and chunks of bounded size, so that a run of any length is written in flat memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from steelyard.records import Record
from steelyard.report.case import as_text, question, turns
from steelyard.report.records import STATES, SuiteCase, state_of
from steelyard.scoring.trajectory import ToolCall

BLOCK = 500
"""Records in a block of columns."""
CHUNK_BYTES = 1 << 18
CHUNK_RECORDS = 256

_PREVIEW = 160
_WHOLE_FILE = 64 << 20
_MIN_TEXT_CHARS, _MAX_TEXT_CHARS = 1_000, 50_000
_MAX_TURNS = 60
_MAX_SAMPLES = 50
_MAX_ACCEPTED = 20

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
        values = {score.name: score.value for score in record.scores}
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
            "prompt": _preview(question(record, asked.case if asked is not None else None)),
            "answer": _preview(answer or ""),
        }
        for name, value in row.items():
            self._block[name].append(value)
        for column, name in zip(self._scores, self._names, strict=True):
            column.append(_short(values.get(name)))

    @property
    def full(self) -> bool:
        return len(self._block["id"]) >= BLOCK

    def take(self) -> bytes:
        """The block as JSON; the next record begins another."""
        block = msgspec.json.encode({**self._block, "scores": self._scores})
        self._clear()
        return block

    def _clear(self) -> None:
        names = ("id", "trial", "state", "flags", "first", "last", "input", "output", "cost", "prompt", "answer")
        self._block: dict[str, list[Any]] = {name: [] for name in names}
        self._scores: list[list[float | None]] = [[] for _ in self._names]


def flags_of(record: Record) -> int:
    """What is special about a record, as bits."""
    return ESCALATED * any(score.escalated for score in record.scores) | CACHED * record.cached


def body(record: Record, offset: int, asked: SuiteCase | None, limit: int) -> bytes:
    """All that the drawer shows of a record, as JSON. A text beyond the limit is a pair: its beginning, its length."""
    case = asked.case if asked is not None else None
    found: dict[str, Any] = {
        "offset": offset,
        "turns": list(_turns(record, asked, limit)),
        "answer": _cut(record.response_text, limit),
        "error": _cut(record.error, limit),
        "error_type": record.error_type,
        "scores": [_score(score, limit) for score in record.scores],
        "facts": dict(_facts(record)),
    }
    if record.error_traceback is not None:
        found["traceback"] = _cut(record.error_traceback, limit)
    if record.stderr is not None:
        found["stderr"] = _cut(record.stderr, limit)
    if record.retry_errors:
        found["retried"] = [_cut(f"{failed.time:%H:%M:%S} {failed.error}", limit) for failed in record.retry_errors]
    if case is not None and case.expected is not None:
        found["expected"] = [_cut(text, limit) for text in _accepted(case.expected)]
    if case is not None and case.expected_trajectory is not None:
        found["trajectory"] = _cut(as_text(case.expected_trajectory), limit)
    if asked is not None and asked.edited:
        found["edited"] = True
    return msgspec.json.encode(found)


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


def _turns(record: Record, asked: SuiteCase | None, limit: int) -> Iterator[dict[str, Any]]:
    spoken = turns(record, asked.case if asked is not None else None)
    for turn in spoken[:_MAX_TURNS]:
        shown: dict[str, Any] = {"role": turn.role[:40]}
        if turn is spoken[-1] and turn.text and turn.text == record.response_text:
            shown["is_answer"] = True
        else:
            shown["text"] = _cut(turn.text, limit)
        if turn.calls:
            shown["calls"] = [_call(call, limit) for call in turn.calls]
        yield shown
    if len(spoken) > _MAX_TURNS:
        yield {"role": "", "text": f"… and {len(spoken) - _MAX_TURNS} more messages", "more": True}


def _call(call: ToolCall, limit: int) -> dict[str, Any]:
    arguments = as_text(call.arguments)
    return {
        "name": call.name,
        "arguments": _cut(arguments, limit),
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
            shown[name] = [_cut(text, limit) for text in shown[name]]
    for name in ("reason", "error_traceback"):
        if name in shown:
            shown[name] = _cut(shown[name], limit)
    return shown


def _cut(text: str | None, limit: int) -> str | list[Any] | None:
    if text is None:
        return None
    text = _encodable(text)
    return text if len(text) <= limit else [text[:limit], len(text)]


def _preview(text: str) -> str:
    return " ".join(_encodable(text[: _PREVIEW * 2]).split())[:_PREVIEW]


def _encodable(text: str) -> str:
    """The text without lone surrogates, which a suite may hold and JSON may not."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _short(number: float | None) -> float | None:
    """A number to five digits: enough for a table, and a third of the bytes."""
    return None if number is None else float(f"{number:.5g}")
