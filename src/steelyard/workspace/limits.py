"""The limits of one attempt: its clock, the totals of its calls, and the signal that a limit was reached."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, Literal

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.protocols import Clock, LimitSignal, Target
from steelyard.records import STOP_REASONS, TOKEN_FIELDS, CaseLimits, InvocationResponse
from steelyard.workspace.recording import Body, CallLine, is_models

_Part = Literal["model", "waiting", "tools"]
NO_CALLS = "0 model calls: is it pointed at the gateway?"
_DECIMALS = 12


def check_enforced(names: Iterable[str], target: Target) -> None:
    """Refuse limits that nothing can hold a target to: it would go on, and nobody would know."""
    enforced: frozenset[str] = getattr(target, "enforces", frozenset({"time"}))
    for name in sorted(set(names) - enforced):
        kind = target.identity().get("kind", "this")
        raise ConfigurationError(
            f"case_limits.{name} cannot be enforced for this target ({kind}), which can be limited by "
            f"{', '.join(sorted(enforced))}: use a gateway, an `output` that reports {name}, or a Python agent that "
            f"calls context.record_turn, or leave the limit out",
            topic="case-limits",
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


class GatewaySummary(msgspec.Struct, kw_only=True):
    """What an attempt's calls were, as its gateway saw them."""

    calls: int
    """All calls that were passed on, lists of models and token counts included."""
    turns: int
    """Generation calls that were answered, those of sub-agents included."""
    messages: list[dict[str, Any]]
    """What the models and the tools said, in order of time; of a conversation but the first with its `thread`."""
    num_tokens_input: int | None
    num_tokens_output: int | None
    num_tokens_input_cached: int | None
    num_tokens_output_reasoning: int | None
    num_tokens_input_cache_write: int | None
    tokens_estimated: bool
    cost: float | None
    """None when the cost of a call is not known."""
    lost_cost: float
    """What earlier attempts cost that were killed with their run, and that no record counts."""
    time_in_model: float
    """Seconds in which at least one call was being answered."""
    time_waiting: float
    """Seconds in which calls only waited for our own rate limits."""
    time_in_tools: float
    """The rest: the agent itself, and the tools that it ran."""
    time_to_first_token: float | None
    limit: str | None
    """The `stop_reason` of the limit that refused a call."""
    problem: str | None
    """Why what is here is not complete."""

    def apply(self, response: InvocationResponse) -> None:
        """Set what the gateway measured in the agent's response, in place of what the agent said of itself."""
        if self.lost_cost:
            response.cost = (response.cost or 0.0) + self.lost_cost
        if not self.turns:
            return
        for name in (*TOKEN_FIELDS, "tokens_estimated", "time_in_model", "time_in_tools", "time_to_first_token"):
            setattr(response, name, getattr(self, name))
        response.cost = None if self.cost is None else self.cost + self.lost_cost
        response.messages = self.messages or response.messages
        response.num_turns = self.turns
        response.time_waiting = self.time_waiting or None


class TimeSplit:
    """Splits an attempt's time: a call is being answered, calls only wait for a send permit, or neither.

    While calls only wait, the attempt's time limit is stopped.
    """

    def __init__(self, signal: LimitSignal | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._signal = signal
        self._clock = clock
        self._since = clock()
        self._part: _Part = "tools"
        self._waiting = 0
        self._answering = 0
        self._seconds: dict[_Part, float] = {"model": 0.0, "waiting": 0.0, "tools": 0.0}

    def change(self, *, waiting: int = 0, answering: int = 0) -> None:
        """A number more, or fewer, calls wait for a send permit, and are being answered."""
        self._waiting += waiting
        self._answering += answering
        self._turn()

    def end(self) -> None:
        """Count nothing more."""
        self._waiting = self._answering = 0
        self._turn()

    @property
    def model(self) -> float:
        return self._seconds["model"]

    @property
    def waiting(self) -> float:
        return self._seconds["waiting"]

    @property
    def tools(self) -> float:
        return self._seconds["tools"]

    def _turn(self) -> None:
        now = self._clock()
        self._seconds[self._part] += now - self._since
        self._since = now
        part: _Part = "model" if self._answering else "waiting" if self._waiting else "tools"
        if self._signal is not None and (part == "waiting") != (self._part == "waiting"):
            (self._signal.pause if part == "waiting" else self._signal.resume)()
        self._part = part


class CallTotals:
    """Sums over the calls of an attempt, and its trajectory."""

    def __init__(self) -> None:
        self.calls = 0
        self.turns = 0
        self.tokens = 0
        self.cost = 0.0
        self.largest_tokens = 0
        self.largest_cost = 0.0
        self._cost_is_known = True
        self._sums: dict[str, int | None] = dict.fromkeys(TOKEN_FIELDS)
        self._estimated = False
        self._first_token: float | None = None
        self._messages: list[dict[str, Any]] = []

    def next_call(self) -> int:
        """The number of the call that has just ended."""
        self.calls += 1
        return self.calls

    def add(self, line: CallLine, body: Body, known: int) -> None:
        """Add a generation call; its first `known` turns were sent before, or are the question itself."""
        response = line.response
        tokens = (response.num_tokens_input or 0) + (response.num_tokens_output or 0)
        for name in TOKEN_FIELDS:
            if (value := getattr(response, name)) is not None:
                self._sums[name] = (self._sums[name] or 0) + value
        self.tokens += tokens
        self.cost = round(self.cost + (response.cost or 0.0), _DECIMALS)
        self.largest_tokens = max(self.largest_tokens, tokens)
        self.largest_cost = max(self.largest_cost, response.cost or 0.0)
        if response.http_status is None or response.http_status >= 300:
            return  # nothing was generated, and nothing is billed
        self.turns += 1
        self._cost_is_known = self._cost_is_known and response.cost is not None
        self._estimated = self._estimated or response.tokens_estimated
        if self._first_token is None and response.time_to_first_token is not None:
            self._first_token = line.at + (response.time_waiting or 0.0) + response.time_to_first_token
        thread = {} if line.thread in (None, 1) else {"thread": line.thread}
        new = (msgspec.json.decode(turn) for turn in body.turns[known:])
        given = [turn for turn in new if isinstance(turn, dict) and not is_models(turn)]
        self._messages += [{**turn, **thread} for turn in (*given, *(response.messages or ()))]

    def summary(self, split: TimeSplit, *, limit: str | None, problem: str | None, lost_cost: float) -> GatewaySummary:
        return GatewaySummary(
            calls=self.calls,
            turns=self.turns,
            messages=self._messages,
            cost=self.cost if self._cost_is_known and self.turns else None,
            tokens_estimated=self._estimated,
            lost_cost=lost_cost,
            time_in_model=split.model,
            time_waiting=split.waiting,
            time_in_tools=split.tools,
            time_to_first_token=self._first_token,
            limit=limit,
            problem=problem,
            **self._sums,
        )
