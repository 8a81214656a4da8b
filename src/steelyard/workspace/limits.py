"""The limits of one attempt: its clock, the turns it has recorded, and the signal that a limit was reached."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import CaseLimitReached, ConfigurationError
from steelyard.protocols import Clock, Target
from steelyard.records import STOP_REASONS, CaseLimits


def check_enforced(names: Iterable[str], target: Target) -> None:
    """Refuse limits that nothing can hold a target to: it would go on, and nobody would know."""
    enforced: frozenset[str] = getattr(target, "enforces", frozenset({"time"}))
    for name in sorted(set(names) - enforced):
        kind = target.identity().get("kind", "this")
        raise ConfigurationError(
            f"case_limits.{name} cannot be enforced for this target ({kind}), which can be held to "
            f"{', '.join(sorted(enforced))}: use a gateway, an `output` that tells of {name}, or a Python agent that "
            f"calls context.record_turn, or leave the limit out"
        )


class AttemptLimits:
    """Counts what an attempt uses, and tells its target when a limit is reached (protocols.LimitSignal)."""

    def __init__(self, limits: CaseLimits | None) -> None:
        self.limits = limits or CaseLimits()
        self.reached: str | None = None
        """The `stop_reason` of the limit that was reached first."""
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._lock = threading.Lock()
        self._left = self.limits.time
        self._began: float | None = None
        self._pauses = 0
        self._timer: asyncio.TimerHandle | None = None

    def reach(self, stop_reason: str) -> None:
        """Say that a limit was reached. The first counts. Safe from any thread."""
        with self._lock:
            if self.reached is not None:
                return
            self.reached = stop_reason
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> str:
        """Wait until a limit is reached; its `stop_reason`."""
        await self._event.wait()
        assert self.reached is not None
        return self.reached

    def begin(self) -> None:
        """Start the clock: the target is about to be called."""
        self._run_clock()

    def end(self) -> None:
        """Stop the clock for good."""
        self._pause_clock()
        self._left = None

    def pause(self) -> None:
        """Stop the clock: the agent waits for our own rate limits."""
        self._pauses += 1
        if self._pauses == 1:
            self._pause_clock()

    def resume(self) -> None:
        """Let the clock go on. Each pause needs its own."""
        self._pauses -= 1
        if self._pauses == 0:
            self._run_clock()

    def _run_clock(self) -> None:
        if self._left is not None and self._began is None and not self._pauses:
            self._began = time.monotonic()
            self._timer = self._loop.call_later(self._left, self.reach, STOP_REASONS["time"])

    def _pause_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._began is not None and self._left is not None:
            self._left = max(0.0, self._left - (time.monotonic() - self._began))
        self._began = None


class BothClocks:
    """The case's clock and the attempt's, stopped and started as one (protocols.Clock)."""

    def __init__(self, clock: Clock | None, limits: AttemptLimits) -> None:
        self._clock = clock
        self._limits = limits

    def stop(self) -> None:
        """Stop both."""
        if self._clock is not None:
            self._clock.stop()
        self._limits.pause()

    def start(self) -> None:
        """Let both go on."""
        if self._clock is not None:
            self._clock.start()
        self._limits.resume()


class TurnRecorder:
    """`context.record_turn`: writes each turn to disk at once and counts it against the limits. Thread-safe."""

    def __init__(self, path: Path | None, signal: AttemptLimits) -> None:
        self._path = path
        self._signal = signal
        self._lock = threading.Lock()
        self.turns = 0
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cost: float | None = None
        self.messages: list[dict[str, Any]] = []

    def __call__(
        self,
        message: Mapping[str, Any] | None = None,
        *,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        cost: float | None = None,
    ) -> None:
        """Record one message of the trajectory; one of the model (`role: assistant`) is a turn.

        CaseLimitReached once a limit is reached: an agent that catches it can still give its answer.
        """
        with self._lock:
            entry: dict[str, Any] = {"time": time.time(), "message": dict(message) if message is not None else None}
            entry |= {"input_tokens": input_tokens, "output_tokens": output_tokens, "cost": cost}
            if message is not None:
                self.messages.append(dict(message))
            if message is None or message.get("role") == "assistant":
                self.turns += 1
            self._write({name: value for name, value in entry.items() if value is not None})
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

    def _write(self, entry: dict[str, Any]) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab") as file:
            file.write(msgspec.json.encode(entry, enc_hook=repr) + b"\n")


def _sum(before: Any, more: Any) -> Any:
    return before if more is None else more if before is None else before + more
