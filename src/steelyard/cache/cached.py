"""Cached: a target wrapper that answers from a store, and asks only once for equal cases at the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from copy import deepcopy
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from steelyard.cache.store import CacheKey, EvaluationDataStore, fingerprint_of, is_cacheable
from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import describe
from steelyard.protocols import InvocationContext, Target, TargetWrapper
from steelyard.records import EvalCase, InvocationResponse

log = logging.getLogger("steelyard")

T = TypeVar("T")

_of_owner: WeakKeyDictionary[object, SingleFlight[Any]] = WeakKeyDictionary()


class Cached(TargetWrapper):
    """Looks a case up in the store before it calls the target, and stores responses that completed normally.

    A store that fails never fails a case: each kind of failure is logged once, and the target is called.
    `parameters` are what decides an answer besides model and case; by default the target's identity. `is_good` says
    of a response whether it is worth keeping: a judge's reply that is no verdict is not.
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
        is_good: Callable[[InvocationResponse], bool] | None = None,
    ) -> None:
        self._target = target
        self._store = store
        self._eval_set_id = eval_set_id
        self._session = deepcopy(session)  # a case that changes its session must not change the next one's key
        self._tools = list(tools)
        self._parameters = dict(target.identity() if parameters is None else parameters)
        self._is_good = is_good
        self._warned: set[str] = set()
        self._threads = DaemonThreads()

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Return the stored response, marked as a hit; else the target's, stored when it completed normally."""
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
            if self._is_kept(response, context):
                await self._keep(case.id, key, response)
            return response

        flights: SingleFlight[InvocationResponse] = flights_of(self._store)
        place = (self._eval_set_id, case.id, key)
        response = await flights.get_or_ask(place, ask, lambda answer: self._is_kept(answer, context))
        return response if asked else _as_hit(response)

    def holds(self, case: EvalCase, context: InvocationContext) -> bool:
        """Whether the case would be answered from the store; the target is not called."""
        key = self._key_of(case, context)
        return key is not None and self._look_up(case.id, key) is not None

    def _key_of(self, case: EvalCase, context: InvocationContext) -> CacheKey | None:
        """Return the key; None, with a warning, when there is no usable key."""
        try:
            fingerprint = fingerprint_of(
                case,
                session=self._session,
                target_parameters=self._parameters_of(context),
                model_id=self.model_id,
                tools=self._tools,
                trial=context.trial,
                workspace=context.template_digest,
                limits=case.limits,
            )
            if fingerprint is None:
                self._warn("identity", "the target has no model_id: its answers are not cached")
            return fingerprint.key if fingerprint is not None else None
        except ValueError as error:
            self._warn("key", f"case {case.id!r:.100} is not cached: {error}")
            return None

    def _is_kept(self, response: InvocationResponse, context: InvocationContext) -> bool:
        return _is_whole(response, context) and (self._is_good is None or self._is_good(response))

    def _parameters_of(self, context: InvocationContext) -> dict[str, Any]:
        """Return the target's parameters, and the run's seed where there is one: answers may depend on it."""
        return {**self._parameters, "run_seed": context.seed} if context.seed else self._parameters

    def _look_up(self, case_id: str, key: CacheKey) -> InvocationResponse | None:
        try:
            stored = self._store.get(self._eval_set_id, case_id, key)
        except Exception as error:  # noqa: BLE001 - a store may be the user's; its failure is a miss
            self._warn("read", f"cannot be read, the target is asked instead: {describe(error)}")
            return None
        # A user's store may hold responses that ours refuse.
        return stored if is_cacheable(stored) else None

    async def _keep(self, case_id: str, key: CacheKey, response: InvocationResponse) -> None:
        """Store in a thread: a disk may be slow, and the event loop is timing other calls."""
        try:
            await self._threads.run(self._store.put, self._eval_set_id, case_id, key, response)
        except asyncio.CancelledError:
            # The answer is paid for: it is returned, and the write finishes in its thread. The cancellation takes
            # effect at the next await; the caller has none before the answer is safe.
            return
        except Exception as error:  # noqa: BLE001 - as above: the answer is returned, only not stored
            self._warn("write", f"cannot be written, the answers are not kept: {describe(error)}")

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("cache: %s", message)


def _is_whole(response: object, context: InvocationContext) -> bool:
    """Whether a response may be stored and shared: after a cancellation the target may have cut it short."""
    return is_cacheable(response) and not (context.token is not None and context.token.cancelled)


def _as_hit(response: InvocationResponse) -> InvocationResponse:
    """Return a copy marked as a hit at no cost; the original may be held by another caller or an in-memory store."""
    return msgspec.structs.replace(
        response, cached=True, retries=0, resent=0, cost=None if response.cost is None else 0.0
    )


class SingleFlight(Generic[T]):
    """Lets one caller per key ask and shares its answer with the rest. Each event loop is separate."""

    def __init__(self) -> None:
        self._flights: dict[tuple[asyncio.AbstractEventLoop, Hashable], asyncio.Future[T]] = {}

    async def get_or_ask(
        self, key: Hashable, ask: Callable[[], Awaitable[T]], shareable: Callable[[T], bool] | None = None
    ) -> T:
        """Return the answer of a caller that already asks, else of `ask`.

        When that caller fails, is cancelled, or gets an answer that is not `shareable`, the next one asks.
        """
        loop = asyncio.get_running_loop()
        place = (loop, key)
        while (flight := self._flights.get(place)) is not None:
            await asyncio.wait([flight])  # unlike `await flight`, does not cancel it when we are cancelled
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
            flight.cancel()  # no answer to share: the first waiter to wake asks. No effect on a finished one


def flights_of(owner: object) -> SingleFlight[Any]:
    """Return the flights shared by all users of one store, for as long as the store lives."""
    try:
        return _of_owner.setdefault(owner, SingleFlight())
    except TypeError:  # not hashable or weakly referenceable: not shared
        return SingleFlight()
