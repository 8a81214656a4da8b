"""The scoring pipeline: scores one response with the deterministic scorers first, then with the judges, `num_runs`
times each at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from steelyard.protocols import Emit, InvocationContext, RepeatedJudge, Scorer, ScoringContext
from steelyard.records import InvocationResponse, Job, Sample, Score, StoredSample, verdict
from steelyard.scoring.base import limits_of, run_scorers, takes_context
from steelyard.scoring.limits import Turns, is_immediate, limited


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
        return run_scorers(self._scorers, job.case, response, tracebacks=self._tracebacks, new_context=new_context)

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
            if escalated and score.value is not None and not score.advisory:
                _overrule(scores)
            scores.append(score)
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
    """Mark failed scores as overruled: the escalated judge's verdict replaces them."""
    for score in scores:
        if score.passed is False and not score.advisory:
            score.overruled = True
