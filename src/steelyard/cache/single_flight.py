"""Identical questions in flight are asked once: the others wait for the one that is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Lets one caller per key ask and gives its answer to the rest. Callers on other event loops ask for themselves."""

    def __init__(self) -> None:
        self._flights: dict[tuple[asyncio.AbstractEventLoop, Hashable], asyncio.Future[T]] = {}

    async def get_or_ask(
        self, key: Hashable, ask: Callable[[], Awaitable[T]], shareable: Callable[[T], bool] | None = None
    ) -> T:
        """The answer of whoever asks already, else of `ask`.

        When the one who asks fails, is cancelled, or gets an answer that is not `shareable`, the next in line asks.
        """
        loop = asyncio.get_running_loop()
        place = (loop, key)
        while (flight := self._flights.get(place)) is not None:
            await asyncio.wait([flight])  # unlike awaiting it, this leaves the flight alone when we are cancelled
            if not flight.cancelled():
                return flight.result()
        flight = self._flights[place] = loop.create_future()
        try:
            answer = await ask()
            if shareable is None or shareable(answer):
                flight.set_result(answer)
            return answer
        finally:
            del self._flights[place]
            flight.cancel()  # no answer to share: whoever wakes first asks. Without effect on one that has its result


_of_owner: WeakKeyDictionary[object, SingleFlight[Any]] = WeakKeyDictionary()


def flights_of(owner: object) -> SingleFlight[Any]:
    """The flights that everybody who uses the same store shares, for as long as the store lives."""
    try:
        return _of_owner.setdefault(owner, SingleFlight())
    except TypeError:  # cannot be referred to weakly, or hashed: nobody to share with
        return SingleFlight()
