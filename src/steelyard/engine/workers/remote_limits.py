"""Rate limits and callbacks across processes: how work on a worker uses the objects that stay in the driver.

A worker sends calls with its batches through `DriverLink`; the driver handles them in `WorkerCalls` and replies with
its messages. An endpoint's limits on a worker are `SharedPauseLimits`, `DriverLimits` or `SlicedRateLimits`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from steelyard.engine.rate_limit import EndpointLimits, Sent
from steelyard.engine.workers.messages import CALL, MessageQueue
from steelyard.errors import TransientError
from steelyard.protocols import DriverCallback, InvocationContext
from steelyard.records import InvocationResponse

SLICE_SECONDS = 0.1
"""How far ahead permits of a rate are granted."""
_SAME_PAUSE_SECONDS = 0.1
"""How long a report of an overload may be on its way: a pause that began since is the same one."""


class DriverLink:
    """A worker's link to the objects in the driver: calls go out with batches, replies come with messages."""

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue
        self._calls = 0
        self._awaited: dict[int, asyncio.Future[Any]] = {}
        self._pausing: dict[int, SharedPauseLimits] = {}

    def callback(self, number: int) -> Callable[..., None]:
        """Make a function that calls a callback in the driver."""

        def send(*args: Any) -> None:
            self.send(number, "callback", *args)

        return send

    def limits(self, number: int, is_counted: bool, pauses: bool, is_rate_only: bool = False) -> Any:
        """Make the limits of an endpoint that a worker uses in place of the driver's."""
        if is_rate_only:
            return SlicedRateLimits(self, number, pauses=pauses)
        if is_counted:
            return DriverLimits(self, number, pauses=pauses)
        limits = self._pausing[number] = SharedPauseLimits(self, number, pauses=pauses)
        return limits

    def send(self, number: int, name: str, *args: Any, urgent: bool = False) -> int:
        """Send a call without waiting for a reply; returns the call's number."""
        self._calls += 1
        self._queue.put((CALL, self._calls, (number, name, args)), urgent=urgent)
        return self._calls

    async def request(self, number: int, name: str, *args: Any) -> tuple[int, Any]:
        """Send a call and wait for its reply; returns the call's number and that. Cancelling withdraws the call."""
        call = self.send(number, name, *args, urgent=True)
        reply = self._awaited[call] = asyncio.get_running_loop().create_future()
        try:
            return call, await reply
        except asyncio.CancelledError:
            self.send(number, "withdraw", call)
            raise
        finally:
            self._awaited.pop(call, None)

    def deliver(self, replies: Iterable[tuple[int, Any]], overloads: Iterable[tuple[int, float | None]]) -> None:
        """Hand the replies and overloads of a message to those who wait for them."""
        for call, value in replies:
            if (awaited := self._awaited.get(call)) is not None and not awaited.done():
                awaited.set_result(value)
        for number, retry_after in overloads:
            if number in self._pausing:
                self._pausing[number].pause(retry_after)


class SharedPauseLimits(EndpointLimits):
    """Limits that only pause: each worker keeps its own, and the first to be refused informs the others."""

    def __init__(self, link: DriverLink, number: int, *, pauses: bool) -> None:
        super().__init__(pauses=pauses)
        self._link = link
        self._number = number
        self._reported_at = self._known_until = float("-inf")

    def failed(self, sent: Sent, error: Exception) -> None:
        """Handle a failure as in the driver, and report a new overload to it."""
        super().failed(sent, error)
        if not (self.pauses and isinstance(error, TransientError) and error.overloaded):
            return
        now = time.monotonic()
        until = now + (error.retry_after or 0.0)
        if sent.at >= self._reported_at or until > self._known_until + _SAME_PAUSE_SECONDS:
            self._reported_at, self._known_until = now, max(until, self._known_until)
            self._link.send(self._number, "overloaded", error.retry_after, urgent=True)

    def pause(self, retry_after: float | None) -> None:
        """Pause because the endpoint refused another worker."""
        now = time.monotonic()
        self._reported_at = now
        self._known_until = max(self._known_until, now + (retry_after or 0.0))
        refused = TransientError("refused elsewhere", retry_after=retry_after, overloaded=True)
        super().failed(Sent(now - _SAME_PAUSE_SECONDS, 0.0, 0.0, 0), refused)


class DriverLimits:
    """Limits that the driver counts for all workers: a request rate, a token budget, adaptive permits.

    Each call asks the driver for a send permit: a round trip, which counts as waiting and not as the target's time.
    """

    def __init__(self, link: DriverLink, number: int, *, pauses: bool) -> None:
        self._link = link
        self._number = number
        self.pauses = pauses
        self.answers = 0
        """How many calls of this worker were answered: proof enough that the endpoint works."""

    def permit_now(self, estimate: float) -> None:  # noqa: ARG002 - nothing is known here without asking
        return None

    async def permit(self, estimate: float, context: InvocationContext) -> int:
        """Wait for a send permit, with the case's clock stopped; returns the number the driver knows the permit by."""
        began = time.monotonic()
        if context.clock is not None:
            context.clock.stop()
        try:
            call, _ = await self._link.request(self._number, "permit", estimate)
            return call
        finally:
            context.waiting += time.monotonic() - began
            if context.clock is not None:
                context.clock.start()

    def answered(self, sent: int, response: InvocationResponse) -> None:
        self.answers += 1
        self._link.send(self._number, "answered", sent, _usage_only(response))

    def failed(self, sent: int, error: Exception) -> None:
        """Report a failure; an overload is urgent, so that the others learn of it before they send more."""
        overloaded = isinstance(error, TransientError) and error.overloaded
        wait = getattr(error, "retry_after", None) if overloaded else None
        partial = getattr(error, "partial", None)
        usage = _usage_only(partial) if isinstance(partial, InvocationResponse) else None
        self._link.send(self._number, "failed", sent, overloaded, wait, usage, urgent=overloaded)

    def cancelled(self, sent: int) -> None:
        self._link.send(self._number, "forget", sent)

    def ended(self) -> None:
        self._link.send(self._number, "ended")


Grant: TypeAlias = tuple[int, int]
"""A send permit of a slice: the call that asked for the slice, and which of its permits."""


class SlicedRateLimits:
    """A rate that the driver counts for all workers, granted in slices.

    One request asks for as many permits as there are calls that wait. The reply has those of the next tenth of a
    second, each with its time: a round trip for many calls. The rest is asked for again.
    """

    def __init__(self, link: DriverLink, number: int, *, pauses: bool) -> None:
        self._link = link
        self._number = number
        self.pauses = pauses
        self.answers = 0
        """How many calls of this worker were answered."""
        self._waiting: deque[asyncio.Future[Grant]] = deque()
        self._asking: asyncio.Task[None] | None = None
        self._coming: dict[Grant, asyncio.TimerHandle] = {}
        """Granted, for a time that is yet to come."""
        self._answered: list[Grant] = []
        """Answered, and not yet reported."""

    def permit_now(self, estimate: float) -> None:  # noqa: ARG002 - nothing is known here without asking
        return None

    async def permit(self, estimate: float, context: InvocationContext) -> Grant:  # noqa: ARG002 - a call is a call
        """Wait for a send permit, with the case's clock stopped."""
        began = time.monotonic()
        if context.clock is not None:
            context.clock.stop()
        place: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._ask()
        try:
            return await place
        except asyncio.CancelledError:
            if place.cancelled():
                if place in self._waiting:  # else a permit came meanwhile, which went to the next one
                    self._waiting.remove(place)
                self._stop_asking()
            else:  # granted in the same turn of the loop
                self._grant(place.result())
            raise
        finally:
            context.waiting += time.monotonic() - began
            if context.clock is not None:
                context.clock.start()

    def answered(self, sent: Grant, response: InvocationResponse) -> None:  # noqa: ARG002 - its tokens do not count
        """Note an answer; they are reported together."""
        self.answers += 1
        self._answered.append(sent)
        if len(self._answered) == 1:
            asyncio.get_running_loop().call_later(SLICE_SECONDS, self._report_answers)

    def failed(self, sent: Grant, error: Exception) -> None:
        """Report a failure. An overload is urgent, and what was granted ahead is given back: there may be a pause."""
        self._report_answers()
        overloaded = isinstance(error, TransientError) and error.overloaded
        wait = getattr(error, "retry_after", None) if overloaded else None
        self._link.send(self._number, "failed", sent, overloaded, wait, None, urgent=overloaded)
        if overloaded and self.pauses:
            coming, self._coming = self._coming, {}
            for grant, timer in coming.items():
                timer.cancel()
                self._link.send(self._number, "withdraw", grant)
            self._ask()

    def cancelled(self, sent: Grant) -> None:
        self._link.send(self._number, "forget", sent)

    def ended(self) -> None:
        """Do nothing: calls in flight are not counted."""

    def _ask(self) -> None:
        if self._asking is None and len(self._waiting) > len(self._coming):
            self._asking = asyncio.create_task(self._ask_driver())
            self._asking.add_done_callback(self._asked)

    async def _ask_driver(self) -> None:
        call, delays = await self._link.request(self._number, "slice", len(self._waiting) - len(self._coming))
        loop = asyncio.get_running_loop()
        for place, delay in enumerate(delays):
            grant = (call, place)
            if delay > 0:
                self._coming[grant] = loop.call_later(delay, self._grant, grant)
            else:
                self._grant(grant)

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        if task.cancelled() or task.exception() is None:
            self._ask()

    def _stop_asking(self) -> None:
        """Withdraw the request if no call waits any more."""
        if not self._waiting and self._asking is not None and asyncio.current_task() is not self._asking:
            self._asking.cancel()

    def _grant(self, grant: Grant) -> None:
        """Give a permit to the first call that waits for one; back to the driver if none does any more."""
        self._coming.pop(grant, None)
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(grant)
                self._stop_asking()
                return
        self._link.send(self._number, "withdraw", grant)

    def _report_answers(self) -> None:
        if self._answered:
            answered, self._answered = self._answered, []
            self._link.send(self._number, "answered_all", answered)


def _usage_only(response: InvocationResponse) -> InvocationResponse:
    """Keep the fields that limits use, without the answer itself."""
    return InvocationResponse(
        time_to_last_token=response.time_to_last_token,
        num_tokens_input=response.num_tokens_input,
        num_tokens_output=response.num_tokens_output,
        error=None if response.error is None else "error",
    )


class WorkerCalls:
    """Handles one worker's calls to objects in the driver, and frees what it holds when the worker is lost."""

    def __init__(
        self, driver_objects: list[DriverCallback | EndpointLimits], reply: Callable[[int, Any], None]
    ) -> None:
        self._objects = driver_objects
        self._reply = reply
        self._waiting: dict[int, asyncio.Task[None]] = {}
        """Calls that wait for a send permit."""
        self._sent: dict[int | Grant, Sent] = {}
        self._in_flight: list[EndpointLimits] = []
        """The limits of each call that has a permit and has not ended."""

    def handle(self, call: int, number: int, name: str, args: tuple[Any, ...]) -> float | bool | None:
        """Do what a call asks; returns the seconds of an overload to report to the other workers, else False."""
        called = self._objects[number]
        if isinstance(called, DriverCallback):
            called(*args)
        elif name == "overloaded":
            retry_after: float | None = args[0]
            return retry_after
        elif name == "permit":
            self._waiting[call] = asyncio.create_task(self._permit(called, call, *args))
        elif name == "slice":
            self._waiting[call] = asyncio.create_task(self._slice(called, call, *args))
        elif name == "withdraw":
            self._withdraw(called, *args)
        elif name == "forget":
            self._sent.pop(args[0], None)
        elif name == "answered_all":
            for sent in args[0]:
                self._settle(called, "answered", sent, InvocationResponse())
        elif name == "ended":
            self._in_flight.remove(called)
            called.ended()
        else:
            self._settle(called, name, *args)
        return False

    def close(self) -> None:
        """End what the worker waits for and has in flight: the worker is gone."""
        for waiting in self._waiting.values():
            waiting.cancel()
        for limits in self._in_flight:
            limits.ended()
        self._waiting.clear()
        self._in_flight.clear()
        self._sent.clear()

    async def _permit(self, limits: EndpointLimits, call: int, estimate: float) -> None:
        sent = limits.permit_now(estimate) or await limits.permit(estimate, InvocationContext(""))
        self._waiting.pop(call, None)
        self._sent[call] = sent
        self._in_flight.append(limits)
        self._reply(call, True)

    async def _slice(self, limits: EndpointLimits, call: int, count: int) -> None:
        """Grant what there is to grant within the next moment, at least one permit."""
        sent = limits.permit_now(0.0) or await limits.permit(0.0, InvocationContext(""))
        self._waiting.pop(call, None)
        granted = [sent, *limits.permits_ahead(count - 1, SLICE_SECONDS)]
        self._sent.update({(call, place): sent for place, sent in enumerate(granted)})
        now = granted[0].at
        self._reply(call, [max(0.0, sent.at - now) for sent in granted])

    def _withdraw(self, limits: EndpointLimits, call: int | Grant) -> None:
        """End a call that is no longer waited for; a permit that was on its way is returned."""
        if isinstance(call, tuple):
            self._sent.pop(call, None)
        elif (waiting := self._waiting.pop(call, None)) is not None:
            waiting.cancel()
        elif self._sent.pop(call, None) is not None:
            self._in_flight.remove(limits)
            limits.ended()

    def _settle(self, limits: EndpointLimits, name: str, call: int | Grant, *rest: Any) -> None:
        sent = self._sent.pop(call, None)
        if sent is None:
            return
        if name == "answered":
            limits.answered(sent, rest[0])
        else:
            overloaded, retry_after, partial = rest
            error = TransientError("on a worker", retry_after=retry_after, overloaded=overloaded, partial=partial)
            limits.failed(sent, error)
