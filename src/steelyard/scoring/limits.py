"""The limits of one scorer: its time for one answer, how many run at once, how often it is retried.

A scorer has its own clock: the run's `timeout` is the target's. Waiting for a turn and for a retry is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import TransientError
from steelyard.protocols import Identity, Scorer, ScoreResult, ScoringContext
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.base import DEFAULT_LIMITS, ScorerLimits, limits_of, note_retries, takes_context, with_context

_TRANSIENT = (TransientError, ConnectionError)
_FIRST_WAIT = 0.5
_MAX_WAIT = 30.0


class Turns:
    """Limit how many run at once on one event loop; picklable: a copy starts with all turns free."""

    def __init__(self, parallelism: int | None) -> None:
        self._parallelism = parallelism
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphore: asyncio.Semaphore | None = None

    def __reduce__(self) -> tuple[type[Turns], tuple[int | None]]:
        return (Turns, (self._parallelism,))

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it."""
        if self._parallelism is None:
            yield
            return
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._loop is not loop:
            self._loop, self._semaphore = loop, asyncio.Semaphore(self._parallelism)
        async with self._semaphore:
            yield


class LimitedScorer:
    """A scorer within its limits. One that is not async runs in a thread where limits were asked for."""

    def __init__(self, scorer: Scorer, limits: ScorerLimits) -> None:
        self._scorer = scorer
        self._turns = Turns(limits.parallelism)
        in_thread = limits != DEFAULT_LIMITS and not inspect.iscoroutinefunction(scorer.score)
        self._threads = DaemonThreads() if in_thread else None
        self._retries = (DEFAULT_LIMITS.retries or 0) if limits.retries is None else limits.retries
        self.timeout, self.parallelism, self.retries = limits.timeout, limits.parallelism, limits.retries
        self.sandbox_provider = getattr(scorer, "sandbox_provider", None)
        self.name = scorer.name
        self.takes_context = takes_context(scorer)

    def identity(self) -> Identity:
        """The scorer's own: limits decide whether there is a score, not which."""
        return self._scorer.identity()

    async def score(
        self, case: EvalCase, response: InvocationResponse, context: ScoringContext | None = None
    ) -> ScoreResult:
        """Score within the limits; what the scorer raises last is raised."""
        score: Any = with_context(self._scorer.score, context) if self.takes_context else self._scorer.score
        async with self._turns.turn():
            retries = 0
            while True:
                try:
                    return _counted(await self._once(partial(score, case, response)), retries)
                except _TRANSIENT as error:
                    wait = _wait_before(retries + 1, error)
                    if retries >= self._retries or wait > _MAX_WAIT:
                        note_retries(error, retries)
                        raise
                retries += 1
                await asyncio.sleep(wait)

    async def _once(self, score: Callable[[], Any]) -> ScoreResult:
        try:
            async with asyncio.timeout(self.timeout) as limit:
                if self._threads is not None:
                    answer: Any = await self._threads.run(score)
                else:
                    answer = score()
                if inspect.isawaitable(answer):
                    answer = await answer
                result: ScoreResult = answer
                return result
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(f"no score within {self.timeout:g} s") from error
            raise


def is_immediate(scorer: object) -> bool:
    """Whether a scorer says that it only computes, as most built-in ones do, and sets no limits.

    It can neither wait nor block nor crash. An answer is on disk before any other scorer sees it.
    """
    is_plain = getattr(scorer, "immediate", False) is True and limits_of(scorer) == DEFAULT_LIMITS
    return is_plain and not takes_context(scorer)


def limited(scorer: Scorer) -> Scorer:
    """The scorer within its limits; an immediate one as it is."""
    if is_immediate(scorer) or isinstance(scorer, LimitedScorer):
        return scorer
    return LimitedScorer(scorer, limits_of(scorer))


def _wait_before(retry: int, error: Exception) -> float:
    """Seconds to wait before a retry (the first is 1): full jitter, or as long as the error asks for."""
    wait = random.uniform(0.0, min(_MAX_WAIT, _FIRST_WAIT * 2.0 ** min(retry - 1, 60)))
    asked = error.retry_after if isinstance(error, TransientError) else None
    return wait if asked is None else max(wait, asked)


def _counted(answer: ScoreResult, retries: int) -> ScoreResult:
    """The scores, each with the number of retries that it took."""
    if retries:
        for score in answer if isinstance(answer, list) else [answer]:
            if isinstance(score, Score):
                score.retries = retries
    return answer
