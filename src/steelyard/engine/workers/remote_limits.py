"""An endpoint's limits as a worker sees them: counted by the driver, or paused along with everybody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from steelyard.engine.rate_limit import EndpointLimits, Sent
from steelyard.engine.workers.messages import CALL, MessageQueue
from steelyard.errors import TransientError
from steelyard.protocols import DriverCallback, InvocationContext
from steelyard.records import InvocationResponse

_OLD_NEWS = 0.1
"""Seconds that word of an overload may be on its way: a pause that began since is the same one."""


class DriverLink:
    """A worker's way to what stayed with the driver: calls go out with the batches, answers come with the letters."""

    def __init__(self, outbox: MessageQueue) -> None:
        self._outbox = outbox
        self._calls = 0
        self._awaited: dict[int, asyncio.Future[Any]] = {}
        self._pausing: dict[int, PausedTogether] = {}

    def callback(self, number: int) -> Callable[..., None]:
        """What sends word to a callback at home."""

        def send(*args: Any) -> None:
            self.send(number, "callback", *args)

        return send

    def limits(self, number: int, is_counted: bool, pauses: bool) -> Any:
        """The limits of an endpoint, in place of the driver's own."""
        if is_counted:
            return CountedAtHome(self, number, pauses=pauses)
        limits = self._pausing[number] = PausedTogether(self, number, pauses=pauses)
        return limits

    def send(self, number: int, name: str, *args: Any, urgent: bool = False) -> int:
        """Send a call, to which no answer need come; its own number."""
        self._calls += 1
        self._outbox.put((CALL, self._calls, (number, name, args)), urgent=urgent)
        return self._calls

    async def ask(self, number: int, name: str, *args: Any) -> int:
        """Send a call and wait for its answer: the call's own number. One who stops waiting says so."""
        call = self.send(number, name, *args, urgent=True)
        answer = self._awaited[call] = asyncio.get_running_loop().create_future()
        try:
            await answer
        except asyncio.CancelledError:
            self.send(number, "withdraw", call)
            raise
        finally:
            self._awaited.pop(call, None)
        return call

    def deliver(self, answers: Iterable[tuple[int, Any]], overloads: Iterable[tuple[int, float | None]]) -> None:
        """Hand out what came with a letter."""
        for call, value in answers:
            if (awaited := self._awaited.get(call)) is not None and not awaited.done():
                awaited.set_result(value)
        for number, retry_after in overloads:
            if number in self._pausing:
                self._pausing[number].hear(retry_after)


class PausedTogether(EndpointLimits):
    """Limits that are only a pause: each worker keeps its own, and the first to be refused tells the others."""

    def __init__(self, post: DriverLink, number: int, *, pauses: bool) -> None:
        super().__init__(pauses=pauses)
        self._post = post
        self._number = number
        self._told_at = self._known_until = float("-inf")

    def failed(self, sent: Sent, error: Exception) -> None:
        """As at home; a refusal that is news is passed on."""
        super().failed(sent, error)
        if not (self.pauses and isinstance(error, TransientError) and error.overloaded):
            return
        now = time.monotonic()
        until = now + (error.retry_after or 0.0)
        if sent.at >= self._told_at or until > self._known_until + _OLD_NEWS:
            self._told_at, self._known_until = now, max(until, self._known_until)
            self._post.send(self._number, "overloaded", error.retry_after, urgent=True)

    def hear(self, retry_after: float | None) -> None:
        """Pause because the endpoint refused another worker."""
        now = time.monotonic()
        self._told_at = now
        self._known_until = max(self._known_until, now + (retry_after or 0.0))
        refused = TransientError("refused elsewhere", retry_after=retry_after, overloaded=True)
        super().failed(Sent(now - _OLD_NEWS, 0.0, 0.0, 0), refused)


class CountedAtHome:
    """Limits of which there must be one for all workers: a rate, a token budget, permits that adapt.

    Each call asks the driver for leave: a round trip, which counts as waiting and not as the target's time.
    """

    def __init__(self, post: DriverLink, number: int, *, pauses: bool) -> None:
        self._post = post
        self._number = number
        self.pauses = pauses
        self.answers = 0
        """How many calls of this worker were answered: proof enough that the endpoint is at work."""

    def leave_now(self, estimate: float) -> None:  # noqa: ARG002 - nothing is known here without asking
        return None

    async def leave(self, estimate: float, context: InvocationContext) -> int:
        """Leave to send, as the number that the driver knows it by; meanwhile the case's own time stands still."""
        began = time.monotonic()
        if context.clock is not None:
            context.clock.stop()
        try:
            return await self._post.ask(self._number, "leave", estimate)
        finally:
            context.waiting += time.monotonic() - began
            if context.clock is not None:
                context.clock.start()

    def answered(self, sent: int, response: InvocationResponse) -> None:
        self.answers += 1
        self._post.send(self._number, "answered", sent, _gist(response))

    def failed(self, sent: int, error: Exception) -> None:
        """Urgent when it is a refusal: the others should hear of it before they send more."""
        overloaded = isinstance(error, TransientError) and error.overloaded
        wait = getattr(error, "retry_after", None) if overloaded else None
        partial = getattr(error, "partial", None)
        gist = _gist(partial) if isinstance(partial, InvocationResponse) else None
        self._post.send(self._number, "failed", sent, overloaded, wait, gist, urgent=overloaded)

    def ended(self) -> None:
        self._post.send(self._number, "ended")


def _gist(response: InvocationResponse) -> InvocationResponse:
    """What limits look at, and not the answer itself."""
    return InvocationResponse(
        time_to_last_token=response.time_to_last_token,
        num_tokens_input=response.num_tokens_input,
        num_tokens_output=response.num_tokens_output,
        error=None if response.error is None else "error",
    )


class Calls:
    """What one worker has called for and not got, or not given back."""

    def __init__(self, kept: list[DriverCallback | EndpointLimits], answer: Callable[[int, Any], None]) -> None:
        self._kept = kept
        self._answer = answer
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._sent: dict[int, Sent] = {}
        self._on_the_wire: list[EndpointLimits] = []

    def take(self, call: int, number: int, name: str, args: tuple[Any, ...]) -> float | bool | None:
        """Do what a worker called for; the seconds of an overload that the others should hear of, else False."""
        kept = self._kept[number]
        if isinstance(kept, DriverCallback):
            kept(*args)
        elif name == "overloaded":
            retry_after: float | None = args[0]
            return retry_after
        elif name == "leave":
            self._asking[call] = asyncio.create_task(self._leave(kept, call, *args))
        elif name == "withdraw":
            self._withdraw(*args)
        elif name == "ended":
            self._on_the_wire.remove(kept)
            kept.ended()
        else:
            self._settle(kept, name, *args)
        return False

    def close(self) -> None:
        """The worker is gone: nobody waits for leave any more, and its calls are off the wire."""
        for asking in self._asking.values():
            asking.cancel()
        for limits in self._on_the_wire:
            limits.ended()
        self._asking.clear()
        self._on_the_wire.clear()
        self._sent.clear()

    async def _leave(self, limits: EndpointLimits, call: int, estimate: float) -> None:
        sent = limits.leave_now(estimate) or await limits.leave(estimate, InvocationContext(""))
        self._asking.pop(call, None)
        self._sent[call] = sent
        self._on_the_wire.append(limits)
        self._answer(call, True)

    def _withdraw(self, call: int) -> None:
        """Whoever asked stopped waiting; leave that was on its way is given back."""
        if (asking := self._asking.pop(call, None)) is not None:
            asking.cancel()
        elif self._sent.pop(call, None) is not None and self._on_the_wire:
            self._on_the_wire.pop().ended()

    def _settle(self, limits: EndpointLimits, name: str, call: int, *rest: Any) -> None:
        sent = self._sent.pop(call, None)
        if sent is None:
            return
        if name == "answered":
            limits.answered(sent, rest[0])
        else:
            overloaded, retry_after, partial = rest
            limits.failed(sent, _as_it_was(overloaded, retry_after, partial))


def _as_it_was(overloaded: bool, retry_after: float | None, partial: InvocationResponse | None) -> TransientError:
    """A failure, as far as limits look at it."""
    return TransientError("on a worker", retry_after=retry_after, overloaded=overloaded, partial=partial)
