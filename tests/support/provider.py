"""A model provider in virtual time: limits of its own, queues, noise and brown-outs; asked by the real engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from unittest.mock import patch

import msgspec

from steelyard.engine import local, retry
from steelyard.engine.adaptive import AdaptivePermits
from steelyard.engine.base import CancellationToken
from steelyard.engine.local import LocalEngine
from steelyard.engine.rate_limit import EndpointLimits, RateLimited
from steelyard.engine.retry import Retry, RetryPolicy
from steelyard.errors import TransientError
from steelyard.protocols import InvocationContext
from steelyard.records import EvalCase, InvocationResponse, Record
from steelyard.run.case import CaseRunner
from steelyard.scoring.pipeline import ScoringPipeline
from tests.support.engine import Asked, make_jobs
from tests.support.virtual_time import LOOP_TIME, run_virtually, virtual_clock

REFUSAL_SECONDS = 0.005


class Provider:
    """Answers after `latency(calls in service)` seconds; refuses at once what comes while `limit` are in service."""

    def __init__(
        self,
        latency: Callable[[int], float],
        *,
        limit: Callable[[float], int] = lambda now: 1_000_000,
        retry_after: float | None = None,
    ) -> None:
        self._latency = latency
        self._limit = limit
        self._retry_after = retry_after
        self.in_service = 0
        self.answered = 0
        self.refused = 0
        self.began: float | None = None

    async def answer(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        now = asyncio.get_running_loop().time()
        self.began = now if self.began is None else self.began
        if self.in_service >= self._limit(now - self.began):
            self.refused += 1
            await asyncio.sleep(REFUSAL_SECONDS)
            raise TransientError("429", overloaded=True, retry_after=self._retry_after)
        self.in_service += 1
        try:
            seconds = self._latency(self.in_service)
            await asyncio.sleep(seconds)
        finally:
            self.in_service -= 1
        self.answered += 1
        return InvocationResponse(time_to_last_token=seconds)


class Queueing(Provider):
    """Works on `knee` calls at once; the others wait their turn, first come, first served."""

    def __init__(self, service: Callable[[], float], knee: int) -> None:
        super().__init__(lambda _: service())
        self._desks = asyncio.Semaphore(knee)
        self._service = service

    async def answer(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        self.began = arrived if self.began is None else self.began
        async with self._desks:
            await asyncio.sleep(self._service())
        self.answered += 1
        return InvocationResponse(time_to_last_token=loop.time() - arrived)


class Outcome(msgspec.Struct):
    """What became of a run."""

    allowed: int
    history: list[tuple[float, int, str]]
    per_second: float
    """Answers a second over the whole run."""
    errors: int
    refused: int


def noisy(median: float, sigma: float, seed: int = 1) -> Callable[[], float]:
    """Latencies that are lognormal."""
    source = random.Random(seed)
    return lambda: median * source.lognormvariate(0.0, sigma)


def run_against(
    make_provider: Callable[[], Provider], *, calls: int, most: int = 512, fixed: int | None = None
) -> Outcome:
    """Ask so many cases with adaptive permits, or with a fixed parallelism."""
    random.seed(7)  # the jitter between tries

    async def main() -> Outcome:
        provider = make_provider()
        clock = virtual_clock()
        permits = AdaptivePermits(most, clock=clock) if fixed is None else None
        limits = EndpointLimits(permits=permits, clock=clock)
        policy = RetryPolicy(attempts=50)
        work = CaseRunner(
            Retry(RateLimited(Asked(provider.answer), limits), policy), ScoringPipeline(()), timeout=None, seed=0
        )
        records: list[Record] = []
        await LocalEngine().run(
            work,
            make_jobs(calls),
            records.append,
            parallelism=fixed or most,
            token=CancellationToken(),
            permits=permits,
        )
        assert provider.began is not None
        took = clock() - provider.began
        errors = sum(record.status == "error" for record in records)
        history = permits.history if permits is not None else []
        return Outcome(permits.allowed if permits else fixed or 0, history, calls / took, errors, provider.refused)

    with patch.object(local, "time", LOOP_TIME), patch.object(retry, "time", LOOP_TIME):
        return run_virtually(main())
