"""A target that answers from a store what it has answered before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from copy import deepcopy
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from steelyard.cache.fingerprint import CacheKey, fingerprint_of
from steelyard.cache.store import EvaluationDataStore, is_cacheable
from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import describe
from steelyard.protocols import InvocationContext, Target, TargetWrapper
from steelyard.records import EvalCase, InvocationResponse

log = logging.getLogger("steelyard")


class Cached(TargetWrapper):
    """Looks a case up in the store before it asks the target, and stores what completed normally.

    A store that fails never fails a case: that is warned of once per kind of failure, and the target is asked.
    `parameters` are what decides an answer beside model and case; unless given, all that the target's identity says.
    """

    def __init__(
        self,
        target: Target,
        store: EvaluationDataStore,
        eval_set_id: str,
        *,
        session: Any = None,
        tools: Iterable[Any] = (),
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._target = target
        self._store = store
        self._eval_set_id = eval_set_id
        self._session = deepcopy(session)  # what a case does to its session must not change the next one's key
        self._tools = list(tools)
        self._parameters = dict(target.identity() if parameters is None else parameters)
        self._warned: set[str] = set()
        self._threads = DaemonThreads()

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """The stored response, marked as a hit; else the target's, stored when it completed normally."""
        key = self._key_of(case, context)
        if key is None:
            return await self._target.invoke(case, context)
        stored = self._look_up(case.id, key)
        if stored is not None:
            return _as_hit(stored)
        asked = False

        async def ask() -> InvocationResponse:
            nonlocal asked
            asked = True
            response = await self._target.invoke(case, context)
            if _is_whole(response, context):
                await self._keep(case.id, key, response)
            return response

        flights: SingleFlight[InvocationResponse] = flights_of(self._store)
        place = (self._eval_set_id, case.id, key)
        response = await flights.get_or_ask(place, ask, lambda answer: _is_whole(answer, context))
        return response if asked else _as_hit(response)

    def holds(self, case: EvalCase, context: InvocationContext) -> bool:
        """Whether the case would be answered from the store; nothing is asked."""
        key = self._key_of(case, context)
        return key is not None and self._look_up(case.id, key) is not None

    def _key_of(self, case: EvalCase, context: InvocationContext) -> CacheKey | None:
        """The key; None, and a warning, when the answer cannot be told apart from others."""
        try:
            fingerprint = fingerprint_of(
                case,
                session=self._session,
                target_parameters=self._parameters_of(context),
                model_id=self.model_id,
                tools=self._tools,
                trial=context.trial,
            )
            if fingerprint is None:
                self._warn("identity", "the target has no model_id: its answers are not cached")
            return fingerprint.key if fingerprint is not None else None
        except ValueError as error:
            self._warn("key", f"case {case.id!r:.100} is not cached: {error}")
            return None

    def _parameters_of(self, context: InvocationContext) -> dict[str, Any]:
        """The target's, and the run's seed where there is one: a target may draw its answer from it."""
        return {**self._parameters, "run_seed": context.seed} if context.seed else self._parameters

    def _look_up(self, case_id: str, key: CacheKey) -> InvocationResponse | None:
        try:
            stored = self._store.get(self._eval_set_id, case_id, key)
        except Exception as error:  # noqa: BLE001 - a store may be anybody's; its failure is a miss
            self._warn("read", f"cannot be read, the target is asked instead: {describe(error)}")
            return None
        # A store of somebody else's may hold what ours refuse.
        return stored if is_cacheable(stored) else None

    async def _keep(self, case_id: str, key: CacheKey, response: InvocationResponse) -> None:
        """Store in a thread: a disk may take its time, and the event loop is timing other calls."""
        try:
            await self._threads.run(self._store.put, self._eval_set_id, case_id, key, response)
        except asyncio.CancelledError:
            # The answer is there and paid for: it is handed on, and the write goes on by itself. Whoever cancelled
            # is heard at the next wait, of which the caller sees to it that there is none before the answer is safe.
            return
        except Exception as error:  # noqa: BLE001 - as above: the answer is there, only not kept
            self._warn("write", f"cannot be written, the answers are not kept: {describe(error)}")

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("cache: %s", message)


def _is_whole(response: object, context: InvocationContext) -> bool:
    """Whether a response may be served again: a target that saw the cancellation may have cut its answer short."""
    return is_cacheable(response) and not (context.token is not None and context.token.cancelled)


def _as_hit(response: InvocationResponse) -> InvocationResponse:
    """A copy marked as a hit, which costs nothing: the one who asked, and a store in memory, keep theirs as it is."""
    return msgspec.structs.replace(response, cached=True, retries=0, cost=None if response.cost is None else 0.0)


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
