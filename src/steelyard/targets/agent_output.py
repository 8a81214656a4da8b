"""Readers of what agents print: plain text, JSON, and the event streams of Claude Code and Codex.

A reader takes the output as it comes and records each turn, so that limits hold while the agent runs and a killed agent
leaves its trajectory. Messages are in the shape of chat APIs: the assistant's `tool_calls`, answers with the role tool.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import msgspec

from steelyard.errors import CaseLimitReached
from steelyard.protocols import RecordTurn
from steelyard.records import STOP_REASONS, InvocationResponse

MAX_TEXT = 1 << 20
"""Characters of plain output that a record keeps, its end; the log has all of it."""
MAX_WHOLE = 64 << 20
"""Bytes of output that are read as one JSON document, or given to a function."""
_MAX_LINE = 16 << 20
_MAX_CONTENT = 100_000
"""Characters of one tool's output that a trajectory keeps."""
MALFORMED = "MalformedOutput"


class OutputReader(ABC):
    """Reads what one agent prints to stdout."""

    enforces: ClassVar[frozenset[str]] = frozenset()
    """The limits that it can tell of while the agent runs."""

    def __init__(self, record_turn: RecordTurn | None = None) -> None:
        self._record_turn = record_turn

    @abstractmethod
    def feed(self, data: bytes) -> None:
        """Take output as it comes."""

    @abstractmethod
    def finish(self) -> InvocationResponse:
        """The response, from all that came. With `error` where it cannot be read or says that the agent failed."""

    def _turn(
        self, message: Mapping[str, Any], usage: Mapping[str, int | None] | None = None, at: float | None = None
    ) -> None:
        if self._record_turn is not None:
            with suppress(CaseLimitReached):  # the agent is being ended
                self._record_turn(message, at=at, **(usage or {}))


class TextReader(OutputReader):
    """All that is printed is the answer."""

    def __init__(self, record_turn: RecordTurn | None = None) -> None:
        super().__init__(record_turn)
        self._data = bytearray()
        self._cut = 0

    def feed(self, data: bytes) -> None:
        """Keep the end of what comes."""
        self._data += data
        if len(self._data) > 4 * MAX_TEXT:
            self._cut += len(self._data) - 2 * MAX_TEXT
            del self._data[: -2 * MAX_TEXT]

    def finish(self) -> InvocationResponse:
        """The text, without its last line end."""
        text = bytes(self._data).decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")
        if self._cut or len(text) > MAX_TEXT:
            text = f"[… the beginning is in the log]\n{text[-MAX_TEXT:]}"
        return InvocationResponse(response_text=text)


class WholeReader(OutputReader):
    """What is printed is given to a function as a whole: JSON, or a function of the user's own."""

    def __init__(self, read: Callable[[bytes], Any], record_turn: RecordTurn | None = None) -> None:
        super().__init__(record_turn)
        self._read = read
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Collect what comes."""
        if len(self._data) <= MAX_WHOLE:
            self._data += data

    def finish(self) -> InvocationResponse:
        """What the function makes of it: text, a response, or a mapping of its fields."""
        if len(self._data) > MAX_WHOLE:
            return InvocationResponse(
                response_text=bytes(self._data[:MAX_TEXT]).decode("utf-8", "replace"),
                error=f"the agent printed more than {MAX_WHOLE:,} bytes, which cannot be read as a whole",
                error_type=MALFORMED,
            )
        found = self._read(bytes(self._data))
        if isinstance(found, str):
            return InvocationResponse(response_text=found)
        if isinstance(found, Mapping):
            found = msgspec.convert(dict(found), InvocationResponse)
        if not isinstance(found, InvocationResponse):
            raise TypeError(f"output must be read as text or an InvocationResponse, got {type(found).__name__}")
        return found


class EventReader(OutputReader):
    """One JSON object a line. Lines that are not JSON, such as warnings, are passed over."""

    def __init__(self, record_turn: RecordTurn | None = None) -> None:
        super().__init__(record_turn)
        self._rest = b""
        self._skipping = False
        self._events = 0
        self._other = bytearray()
        self.messages: list[dict[str, Any]] = []

    def feed(self, data: bytes) -> None:
        """Take the events that are whole."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self._skipping:
                self._take_line(line)
            self._skipping = False
        if len(rest) > _MAX_LINE:
            rest, self._skipping = b"", True
        self._rest = rest

    def _take_line(self, line: bytes) -> None:
        try:
            event = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            event = None
        if isinstance(event, dict) and isinstance(event.get("type"), str):
            self._events += 1
            self._take(event)
        elif line.strip():
            self._other = (self._other + line + b"\n")[-MAX_TEXT:]

    @abstractmethod
    def _take(self, event: dict[str, Any]) -> None:
        """Take one event."""

    @abstractmethod
    def _response(self) -> InvocationResponse:
        """The response, from the events."""

    def finish(self) -> InvocationResponse:
        """The response; one that says so where there was no event at all."""
        if self._rest and not self._skipping:
            self._take_line(self._rest)
            self._rest = b""
        if not self._events:
            text = self._other.decode("utf-8", "replace")
            problem = "the agent printed no events: check that its output format is the one that `output` names"
            return InvocationResponse(response_text=text, error=problem, error_type=MALFORMED)
        response = self._response()
        response.messages = self.messages or None
        return response

    def _add(
        self, message: dict[str, Any], usage: Mapping[str, int | None] | None = None, at: float | None = None
    ) -> None:
        self.messages.append(message)
        self._turn(message, usage, at)


class ClaudeStreamReader(EventReader):
    """`claude -p … --output-format stream-json --verbose`.

    A reply of the model may come in several events, one for each part, with one id.
    """

    enforces = frozenset({"turns", "tokens"})

    def __init__(self, record_turn: RecordTurn | None = None) -> None:
        super().__init__(record_turn)
        self._open: dict[str, Any] | None = None
        self._open_id: str | None = None
        self._open_at: float | None = None
        """When the last part of the reply came: that it is whole is known with the next event, after a tool has run."""
        self._usage: dict[str, Any] = {}
        self._result: dict[str, Any] | None = None
        self._turns = 0
        self._totals = {"input": 0, "cached": 0, "written": 0, "output": 0}

    def _take(self, event: dict[str, Any]) -> None:
        kind, message = event["type"], event.get("message")
        if kind == "result":
            self._close()
            self._result = event
        elif kind == "assistant" and isinstance(message, dict):
            self._take_assistant(message, event.get("parent_tool_use_id"))
        elif kind == "user" and isinstance(message, dict):
            self._close()
            for part in _parts(message.get("content")):
                if part.get("type") == "tool_result":
                    self._add(
                        {
                            "role": "tool",
                            "tool_call_id": part.get("tool_use_id"),
                            "content": _text_of(part.get("content"))[:_MAX_CONTENT],
                        }
                    )

    def _take_assistant(self, message: dict[str, Any], parent: Any) -> None:
        identifier = message.get("id")
        if self._open is None or identifier is None or identifier != self._open_id:
            self._close()
            self._open, self._open_id = {"role": "assistant", "content": ""}, identifier
            if parent is not None:
                self._open["parent_tool_call_id"] = parent
        for part in _parts(message.get("content")):
            if part.get("type") == "text":
                self._open["content"] += str(part.get("text") or "")
            elif part.get("type") == "thinking":
                self._open["reasoning"] = self._open.get("reasoning", "") + str(part.get("thinking") or "")
            elif part.get("type") == "tool_use":
                call = _tool_call(part.get("id"), part.get("name"), part.get("input"))
                self._open.setdefault("tool_calls", []).append(call)
        self._open_at = time.time()
        if isinstance(message.get("usage"), dict):
            self._usage = message["usage"]

    def _close(self) -> None:
        """A reply of the model is whole."""
        if self._open is None:
            return
        message, self._open = self._open, None
        counts = _claude_usage(self._usage)
        self._usage = {}
        self._turns += 1
        for name, count in counts.items():
            self._totals[name] += count
        used = counts["input"], counts["output"]
        usage = {"input_tokens": used[0], "output_tokens": used[1]} if any(used) else None
        self._add(message, usage, self._open_at)

    def _response(self) -> InvocationResponse:
        self._close()
        result = self._result or {}
        usage = result.get("usage")
        totals = _claude_usage(usage) if isinstance(usage, dict) else self._totals
        text = result.get("result")
        response = InvocationResponse(
            response_text=text if isinstance(text, str) else _last_answer(self.messages),
            num_turns=_count(result.get("num_turns")) or self._turns or None,
            num_tokens_input=totals["input"] or None,
            num_tokens_output=totals["output"] or None,
            num_tokens_input_cached=totals["cached"] or None,
            num_tokens_input_cache_write=totals["written"] or None,
            cost=_number(result.get("total_cost_usd")),
        )
        subtype = str(result.get("subtype") or "")
        if subtype == "error_max_turns":
            response.stop_reason = STOP_REASONS["turns"]
        elif subtype == "error_max_budget_usd":
            response.stop_reason = STOP_REASONS["cost"]
        elif result.get("is_error") or subtype.startswith("error"):
            reported = text or result.get("errors") or subtype
            response.error, response.error_type = f"Claude Code reported an error: {reported}"[:2000], "AgentError"
        elif self._result is None:
            response.error = "Claude Code printed no result: it was ended, or crashed"
            response.error_type = "AgentError"
        return response


class CodexReader(EventReader):
    """`codex exec --json`. Tokens are reported when a turn of the conversation ends, after all its steps."""

    enforces = frozenset({"turns"})
    _ACTIONS: ClassVar[dict[str, str]] = {
        "command_execution": "shell",
        "file_change": "apply_patch",
        "web_search": "web_search",
        "mcp_tool_call": "mcp",
    }

    def __init__(self, record_turn: RecordTurn | None = None) -> None:
        super().__init__(record_turn)
        self._steps = 0
        self._totals: dict[str, int] = {}
        self._failed: str | None = None
        self._ended = False
        self._begun: set[str] = set()
        """Actions that have begun and not ended, by id."""

    def _take(self, event: dict[str, Any]) -> None:
        kind, item = event["type"], event.get("item")
        if kind == "item.completed" and isinstance(item, dict):
            self._take_item(item)
        elif kind == "item.started" and isinstance(item, dict) and _kind(item) in self._ACTIONS:
            self._begin_action(item)
        elif kind == "turn.completed":
            self._ended, self._failed = True, None
            self._count(event.get("usage"))
        elif kind == "turn.failed":
            error = event.get("error")
            self._failed = str(error.get("message") if isinstance(error, dict) else error or "the turn failed")
            self._count(event.get("usage"))
        elif kind == "error":
            self._failed = str(event.get("message") or "unknown error")

    def _count(self, usage: Any) -> None:
        for name, count in usage.items() if isinstance(usage, dict) else ():
            self._totals[name] = self._totals.get(name, 0) + (_count(count) or 0)

    def _take_item(self, item: dict[str, Any]) -> None:
        kind = _kind(item)
        if kind in ("agent_message", "assistant_message"):
            self._steps += 1
            self._add({"role": "assistant", "content": str(item.get("text") or "")})
        elif kind in self._ACTIONS:
            if str(item.get("id")) not in self._begun:
                self._begin_action(item)
            self._begun.discard(str(item.get("id")))
            outcome = item.get("aggregated_output") or item.get("result") or item.get("error") or item.get("status")
            content = _text_of(outcome)[:_MAX_CONTENT]
            if item.get("exit_code"):
                content += f"\n[exit code {item['exit_code']}]"
            self._add({"role": "tool", "tool_call_id": item.get("id"), "content": content})
        elif kind == "error" and item.get("message"):
            self._other = (self._other + str(item["message"]).encode() + b"\n")[-MAX_TEXT:]

    def _begin_action(self, item: dict[str, Any]) -> None:
        """The model has called a tool, which runs now."""
        kind = _kind(item)
        self._steps += 1
        self._begun.add(str(item.get("id")))
        name = self._ACTIONS[kind]
        if kind == "mcp_tool_call":
            name = f"{item.get('server')}.{item.get('tool')}"
        known = ("id", "type", "item_type", "status", "aggregated_output", "exit_code", "result", "error")
        arguments = item.get("arguments") or {key: value for key, value in item.items() if key not in known}
        call = _tool_call(item.get("id"), name, arguments)
        self._add({"role": "assistant", "content": "", "tool_calls": [call]})

    def _response(self) -> InvocationResponse:
        totals = self._totals
        response = InvocationResponse(
            response_text=_last_answer(self.messages),
            num_turns=self._steps or None,
            num_tokens_input=totals.get("input_tokens"),
            num_tokens_output=totals.get("output_tokens"),
            num_tokens_input_cached=totals.get("cached_input_tokens"),
            num_tokens_output_reasoning=totals.get("reasoning_output_tokens"),
        )
        if self._failed is not None:
            response.error, response.error_type = f"Codex reported an error: {self._failed}"[:2000], "AgentError"
        elif not self._ended:
            response.error, response.error_type = (
                "Codex printed no end of its turn: it was ended, or crashed",
                "AgentError",
            )
        return response


STREAM_READERS: Mapping[str, type[OutputReader]] = {
    "text": TextReader,
    "claude-stream-json": ClaudeStreamReader,
    "codex-json": CodexReader,
}
"""Readers that need nothing but the output, by the name that `output` has."""


def _kind(item: Mapping[str, Any]) -> str:
    """What an item of Codex is; its older versions call the field differently."""
    return str(item.get("type") or item.get("item_type"))


def _parts(content: Any) -> list[dict[str, Any]]:
    """The parts of a message's content, text as one part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _text_of(content: Any) -> str:
    """What a tool returned, as text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in _parts(content) if isinstance(part.get("text"), str)]
    return "\n".join(map(str, texts)) if texts else json.dumps(content)


def _tool_call(identifier: Any, name: Any, arguments: Any) -> dict[str, Any]:
    spelled = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
    return {"id": identifier, "type": "function", "function": {"name": str(name), "arguments": spelled}}


def _last_answer(messages: list[dict[str, Any]]) -> str:
    for message in reversed(messages):
        if message["role"] == "assistant" and message.get("content"):
            return str(message["content"])
    return ""


def _claude_usage(usage: Mapping[str, Any]) -> dict[str, int]:
    cached, written = _count(usage.get("cache_read_input_tokens")), _count(usage.get("cache_creation_input_tokens"))
    fresh = _count(usage.get("input_tokens"))
    return {
        "input": (fresh or 0) + (cached or 0) + (written or 0),
        "cached": cached or 0,
        "written": written or 0,
        "output": _count(usage.get("output_tokens")) or 0,
    }


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
