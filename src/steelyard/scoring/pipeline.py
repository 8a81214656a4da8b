"""The scoring pipeline: scores one response with the deterministic scorers first, then with the judges.

Each scorer has its limits: its time for one answer, how many run at once, how often it is retried. It has its own
clock: the run's `timeout` is the target's. Waiting for a turn or a retry is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import ConfigurationError, TransientError
from steelyard.protocols import Emit, Identity, InvocationContext, RepeatedJudge, Scorer, ScoreResult, ScoringContext
from steelyard.records import EvalCase, InvocationResponse, Job, Sample, Score, StoredSample, overrules, verdict
from steelyard.scoring.base import (
    DEFAULT_LIMITS,
    PlainScorer,
    ScorerLimits,
    check_flags,
    check_number,
    limits_of,
    note_retries,
    run_scorers,
    takes_context,
    with_context,
)

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
        self._scorer = self.scorer = scorer
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


@dataclass(frozen=True, kw_only=True)
class Combined(PlainScorer):
    """The weighted mean of other scores, by their names; it passes from `threshold` on.

    The scores that it combines then decide nothing by themselves. With `decides: false` it is only shown, and they do.
    A score that does not apply to a case, or is only advisory, is left out of its mean.
    """

    name: str = "combined"
    weights: Mapping[str, float]
    decides: bool = True

    def _check(self) -> None:
        check_flags(self, "decides")
        if not isinstance(self.weights, Mapping) or not self.weights:
            raise ConfigurationError(f"weights must be a mapping from scores to numbers, got {self.weights!r}")
        for score, weight in self.weights.items():
            check_number(f"weights.{score}", weight)
        if not sum(self.weights.values()) > 0:
            raise ConfigurationError("weights must not all be 0")

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:  # noqa: ARG002
        """Nothing: it is made of the other scores, once these are there."""
        return None

    def add_to(self, scores: list[Score]) -> None:
        """Add the combined score; what it combines becomes a measurement where it decides."""
        # What a judge only advises may decide nothing, by this way either.
        parts = [score for score in scores if score.name in self.weights and not (score.overruled or score.advisory)]
        if not parts:
            return
        broken = [score.name for score in parts if score.value is None or score.is_number or not 0 <= score.value <= 1]
        if broken:
            scores.append(Score(self.name, errors=[f"{', '.join(broken)} has no value from 0 to 1 to combine"]))
            return
        total = sum(self.weights[score.name] for score in parts)
        if not total:
            return
        value = math.fsum(self.weights[score.name] * (score.value or 0.0) for score in parts) / total
        value = min(max(value, 0.0), 1.0)
        made = Score(self.name, value, value >= self.threshold - 1e-12 if self.decides else None)
        made.combines = [score.name for score in parts]
        made.reason = " + ".join(f"{self.weights[score.name]:g} × {score.name} {score.value:.3g}" for score in parts)
        if self.decides:
            for score in parts:
                score.passed = None
        elif made.passed is None:
            made.better = "higher"
        scores.append(made)


class ScoringPipeline:
    """The scorers of a run. Judges are asked one after another, each for all of its samples at once.

    How many calls are on the wire together is for the limits of the judge's endpoint to say. `trust` has the judges, by
    name, whose calibration was asked for: True where it is good; the scores of the others are only advisory.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer | RepeatedJudge],
        *,
        num_runs: int = 1,
        tracebacks: bool = True,
        trust: Mapping[str, bool] | None = None,
    ) -> None:
        self._tracebacks = tracebacks
        self._trust = trust or {}
        self._combined = [scorer for scorer in scorers if isinstance(scorer, Combined)]
        scorers = [scorer for scorer in scorers if not isinstance(scorer, Combined)]
        self._scorers = [limited(scorer) for scorer in scorers if not isinstance(scorer, RepeatedJudge)]
        self._judges = [scorer for scorer in scorers if isinstance(scorer, RepeatedJudge)]
        self._num_runs = num_runs
        self._limits = {judge.name: limits_of(judge) for judge in self._judges}
        self._turns = {name: Turns(limits.parallelism) for name, limits in self._limits.items()}
        self._waits_for_scorers = not all(map(is_immediate, self._scorers))
        self.is_immediate = not self._judges and not self._waits_for_scorers
        """Whether no scorer can wait, block or crash: an answer need not be on disk before it is scored."""
        self.takes_context = any(map(takes_context, self._scorers))
        """Whether some scorer takes a ScoringContext: a workspace, and more."""

    def __bool__(self) -> bool:
        return bool(self._scorers or self._judges)

    def score_without_judges(
        self, job: Job, response: InvocationResponse, new_context: Callable[[], ScoringContext] | None = None
    ) -> Awaitable[list[Score]]:
        """Return the scores of all scorers but the judges."""
        scores = run_scorers(self._scorers, job.case, response, tracebacks=self._tracebacks, new_context=new_context)
        return scores if not self._combined or self._judges else self._with_combined(scores)

    async def _with_combined(self, scoring: Awaitable[list[Score]]) -> list[Score]:
        scores = await scoring
        for combined in self._combined:
            combined.add_to(scores)
        return scores

    async def score(
        self,
        job: Job,
        response: InvocationResponse,
        context: InvocationContext,
        keep_answer: Callable[[], None],
        emit: Emit,
        new_context: Callable[[], ScoringContext] | None = None,
    ) -> list[Score]:
        """Return all applicable scores. `emit` is called after each sample of a judge.

        `new_context` makes the context of a scorer that takes one.

        `keep_answer` is called before anything that can wait, block or crash: the scorers, unless they are all
        immediate, or the first judge.
        """
        kept = self._waits_for_scorers
        if kept:
            keep_answer()
        scores = await self.score_without_judges(job, response, new_context)
        for judge in self._judges:
            escalated = judge.when == "failed"
            if not judge.applies(job.case) or (escalated and verdict(scores) is not False):
                continue
            if not kept:
                keep_answer()
                kept = True
            samples = await self._samples(judge, job, response, context, emit)
            score = judge.combine(samples, escalated=escalated)
            trusted = self._trust.get(judge.name)
            score.advisory, score.calibrated = trusted is False, trusted is True
            if overrules(score):
                _overrule(scores)
            scores.append(score)
        if self._judges:
            for combined in self._combined:
                combined.add_to(scores)
        return scores

    async def _samples(
        self, judge: RepeatedJudge, job: Job, response: InvocationResponse, context: InvocationContext, emit: Emit
    ) -> list[Sample]:
        """Return the judge's samples, one per run; runs that are already on record are not asked for."""
        about = judge.fingerprint(job.case, response)
        known = {
            stored.run: stored.sample
            for stored in job.samples
            if stored.by == judge.by and stored.answer_fp == about and stored.sample.error is None
        }

        async def ask(run: int) -> Sample:
            sample = await self._ask(judge, job, response, context, run)
            emit(StoredSample(id=job.case.id, trial=job.trial, answer_fp=about, by=judge.by, run=run, sample=sample))
            return sample

        runs = range(samples_per_answer(judge, self._num_runs))
        missing = [run for run in runs if run not in known]
        asked = dict(zip(missing, await _all_at_once([ask(run) for run in missing]), strict=True))
        return [known[run] if run in known else asked[run] for run in runs]

    async def _ask(
        self, judge: RepeatedJudge, job: Job, response: InvocationResponse, context: InvocationContext, run: int
    ) -> Sample:
        if context.token is not None and context.token.cancelled:
            raise asyncio.CancelledError(context.token.reason)
        asked = InvocationContext(
            case_id=f"{job.case.id}#{job.trial}", trial=run, seed=context.seed, token=context.token
        )
        timeout = self._limits[judge.name].timeout
        async with self._turns[judge.name].turn():
            try:
                async with asyncio.timeout(timeout) as limit:
                    if timeout is not None:
                        asked.clock = _JudgeClock(limit)
                    return await judge.sample(job.case, response, asked)
            except TimeoutError:
                return Sample(error=f"TimeoutError: no verdict within {timeout:g} s")


def samples_per_answer(judge: RepeatedJudge, num_runs: int) -> int:
    """How often a judge is asked about one answer: each member of a jury `num_runs` times."""
    return num_runs * int(getattr(judge, "size", 1))


async def _all_at_once(asking: Sequence[Coroutine[Any, Any, Sample]]) -> list[Sample]:
    """Await all; where one is cancelled or breaks down, none goes on in the background."""
    if len(asking) == 1:
        return [await asking[0]]
    tasks = [asyncio.create_task(one) for one in asking]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        raise


class _JudgeClock:
    """A judge's timeout (protocols.Clock): it is paused while the judge waits for a send permit (rate limit)."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._left = 0.0
        self._stops = 0

    def stop(self) -> None:
        """Pause the timeout."""
        self._stops += 1
        if self._stops == 1 and not self._limit.expired():
            self._left = (self._limit.when() or 0.0) - asyncio.get_running_loop().time()
            self._limit.reschedule(None)

    def start(self) -> None:
        """Resume the timeout with the time that is left."""
        self._stops -= 1
        if self._stops == 0 and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left)


def _overrule(scores: list[Score]) -> None:
    """Mark failed scores as overruled: an escalated judge passed the answer."""
    for score in scores:
        if score.passed is False and not score.advisory:
            score.overruled = True
