"""The driver's side of what workers call for: leave to send, word of overloads, callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from steelyard.contracts import InvocationContext
from steelyard.engine.home import AtHome
from steelyard.engine.limits import EndpointLimits, Sent
from steelyard.errors import TransientError
from steelyard.records import InvocationResponse


class Calls:
    """What one worker has called for and not got, or not given back."""

    def __init__(self, kept: list[AtHome | EndpointLimits], answer: Callable[[int, Any], None]) -> None:
        self._kept = kept
        self._answer = answer
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._sent: dict[int, Sent] = {}
        self._on_the_wire: list[EndpointLimits] = []

    def take(self, call: int, number: int, name: str, args: tuple[Any, ...]) -> float | bool | None:
        """Do what a worker called for; the seconds of an overload that the others should hear of, else False."""
        kept = self._kept[number]
        if isinstance(kept, AtHome):
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
