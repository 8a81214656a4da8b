"""Turns of an agent on disk: `logs/ID/TRIAL.turns.jsonl`, a line for each message as it comes, and their reader."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from steelyard.errors import CaseLimitReached
from steelyard.records import STOP_REASONS
from steelyard.workspace.keeping import AttemptLogs, move_aside
from steelyard.workspace.limits import AttemptLimits

TURNS = "turns.jsonl"


class TurnLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One line: the beginning of an attempt, or a message of it."""

    time: float
    """Seconds since 1970."""
    attempt: int | None = None
    """On the first line alone, whose time is the attempt's beginning."""
    message: dict[str, Any] | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost: float | None = None


_LINE = msgspec.json.Decoder(TurnLine)


class TurnRecorder:
    """`context.record_turn`: writes each turn to disk at once and counts it against the limits. Thread-safe."""

    def __init__(
        self, path: Path | None, signal: AttemptLimits, *, attempt: int = 1, logs: AttemptLogs | None = None
    ) -> None:
        self._path = path
        self._signal = signal
        self._logs = logs
        """Knows the secrets that must not be written."""
        self._begin = TurnLine(time=time.time(), attempt=attempt)
        self._lock = threading.Lock()
        self.turns = 0
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cost: float | None = None
        self.messages: list[dict[str, Any]] = []
        if path is not None:
            move_aside(path)

    def __call__(
        self,
        message: Mapping[str, Any] | None = None,
        *,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        cost: float | None = None,
        at: float | None = None,
    ) -> None:
        """Record one message of the trajectory; one of the model (`role: assistant`) is a turn.

        CaseLimitReached once a limit is reached: an agent that catches it can still give its answer.
        """
        with self._lock:
            line = TurnLine(
                time=time.time() if at is None else at,
                message=None if message is None else dict(message),
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                cost=cost,
            )
            if line.message is not None:
                self.messages.append(line.message)
            if message is None or message.get("role") == "assistant":
                self.turns += 1
            self._write(line)
            self.count(input_tokens=input_tokens, output_tokens=output_tokens, cost=cost)
        if self._signal.reached is not None:
            raise CaseLimitReached(self._signal.reached)

    def count(
        self, *, input_tokens: int | None = None, output_tokens: int | None = None, cost: float | None = None
    ) -> None:
        """Add to what was used, and see whether that reaches a limit."""
        self.input_tokens = _sum(self.input_tokens, input_tokens)
        self.output_tokens = _sum(self.output_tokens, output_tokens)
        self.cost = _sum(self.cost, cost)
        limits = self._signal.limits
        tokens = (self.input_tokens or 0) + (self.output_tokens or 0)
        for name, used in (("turns", self.turns), ("tokens", tokens), ("cost", self.cost or 0.0)):
            limit = getattr(limits, name)
            if limit is not None and used > limit:
                self._signal.reach(STOP_REASONS[name])

    def _write(self, line: TurnLine) -> None:
        if self._path is None:
            return
        if self._logs is not None and line.message is not None:
            line = msgspec.structs.replace(line, message=self._logs.masker.value(line.message))
        data = msgspec.json.encode(line, enc_hook=repr) + b"\n"
        if self._begin.attempt is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            data = msgspec.json.encode(self._begin) + b"\n" + data
            self._begin.attempt = None
        with open(self._path, "ab") as file:
            file.write(data)


def read_turns(file: IO[bytes]) -> Iterator[TurnLine]:
    """The readable lines of a file of turns; one that a crash cut short is left out."""
    for raw in file:
        try:
            yield _LINE.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue


def _sum(before: Any, more: Any) -> Any:
    return before if more is None else more if before is None else before + more
