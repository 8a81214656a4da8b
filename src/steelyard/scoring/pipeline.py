"""All that weighs one response: the deterministic scorers first, then the judges, each as often as was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from steelyard.protocols import Emit, InvocationContext, RepeatedJudge, Scorer
from steelyard.records import InvocationResponse, Job, Sample, Score, StoredSample
from steelyard.scoring.base import run_scorers
from steelyard.stats.scores import verdict


class ScoringPipeline:
    """The scorers of a run. Judges ask one after another, so that a case never holds more than its one permit."""

    def __init__(
        self, scorers: Sequence[Scorer | RepeatedJudge], *, num_runs: int = 1, timeout: float | None = None
    ) -> None:
        self._scorers = [scorer for scorer in scorers if not isinstance(scorer, RepeatedJudge)]
        self._judges = [scorer for scorer in scorers if isinstance(scorer, RepeatedJudge)]
        self._num_runs = num_runs
        self._timeout = timeout

        self.has_judges = bool(self._judges)

    def __bool__(self) -> bool:
        return bool(self._scorers or self._judges)

    def score_plainly(self, job: Job, response: InvocationResponse) -> Awaitable[list[Score]]:
        """What all scorers but the judges say."""
        return run_scorers(self._scorers, job.case, response, timeout=self._timeout)

    async def score(
        self,
        job: Job,
        response: InvocationResponse,
        context: InvocationContext,
        keep_answer: Callable[[], None],
        emit: Emit,
    ) -> list[Score]:
        """All applicable scores. `keep_answer` is called before the first judge is asked, `emit` after each reply."""
        scores = await self.score_plainly(job, response)
        kept = False
        for judge in self._judges:
            escalated = judge.when == "failed"
            if not judge.applies(job.case) or (escalated and verdict(scores) is not False):
                continue
            if not kept:
                keep_answer()
                kept = True
            samples = await self._samples(judge, job, response, context, emit)
            score = judge.combine(samples, escalated=escalated)
            score.advisory = judge.advisory
            if escalated and score.value is not None and not score.advisory:
                _overrule(scores)
            scores.append(score)
        return scores

    async def _samples(
        self, judge: RepeatedJudge, job: Job, response: InvocationResponse, context: InvocationContext, emit: Emit
    ) -> list[Sample]:
        """What the judge says, run by run; only runs that are not on record yet are asked."""
        about = judge.fingerprint(job.case, response)
        known = {
            stored.run: stored.sample
            for stored in job.samples
            if stored.by == judge.by and stored.answer_fp == about and stored.sample.error is None
        }
        samples = []
        for run in range(self._num_runs):
            sample = known.get(run)
            if sample is None:
                sample = await self._ask(judge, job, response, context, run)
                emit(
                    StoredSample(id=job.case.id, trial=job.trial, answer_fp=about, by=judge.by, run=run, sample=sample)
                )
            samples.append(sample)
        return samples

    async def _ask(
        self, judge: RepeatedJudge, job: Job, response: InvocationResponse, context: InvocationContext, run: int
    ) -> Sample:
        if context.token is not None and context.token.cancelled:
            raise asyncio.CancelledError(context.token.reason)
        asked = InvocationContext(
            case_id=f"{job.case.id}#{job.trial}", trial=run, seed=context.seed, token=context.token
        )
        try:
            async with asyncio.timeout(self._timeout) as limit:
                if self._timeout is not None:
                    asked.clock = _JudgeClock(limit)
                return await judge.sample(job.case, response, asked)
        except TimeoutError:
            return Sample(error=f"TimeoutError: no verdict within {self._timeout:g} s")


class _JudgeClock:
    """A judge's time limit (contracts.Clock): it stands still while the judge waits for leave to be asked."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._left = 0.0
        self._stops = 0

    def stop(self) -> None:
        """Let no more of the time pass."""
        self._stops += 1
        if self._stops == 1 and not self._limit.expired():
            self._left = (self._limit.when() or 0.0) - asyncio.get_running_loop().time()
            self._limit.reschedule(None)

    def start(self) -> None:
        """Let the rest of the time pass."""
        self._stops -= 1
        if self._stops == 0 and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left)


def _overrule(scores: list[Score]) -> None:
    """The escalated judge's verdict stands in the place of those that said no."""
    for score in scores:
        if score.passed is False and not score.advisory:
            score.overruled = True
