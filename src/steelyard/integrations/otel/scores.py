"""Scorers and judges whose scores are spans."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from steelyard.contracts import Identity, InvocationContext, RepeatedJudge, Scorer, ScoreResult, Target
from steelyard.integrations.otel.spans import Spans
from steelyard.records import EvalCase, InvocationResponse, Sample, Score


class TracedScorer:
    """A scorer whose every score is a span."""

    def __init__(self, scorer: Scorer, spans: Spans) -> None:
        self._scorer = scorer
        self._spans = spans
        self._attributes = {"gen_ai.evaluation.name": scorer.name}

    @property
    def name(self) -> str:
        return self._scorer.name

    def identity(self) -> Identity:
        return self._scorer.identity()

    def score(self, case: EvalCase, response: InvocationResponse) -> ScoreResult | Awaitable[ScoreResult]:
        """The scorer's answer; a scorer that waits is traced while it waits."""
        if inspect.iscoroutinefunction(self._scorer.score):
            return self._awaited(case, response)
        with self._spans.open(f"score {self.name}", self._attributes) as span:
            answer = self._scorer.score(case, response)
            if not inspect.isawaitable(answer):
                self._spans.note_scores(span, answer)
            return answer

    async def _awaited(self, case: EvalCase, response: InvocationResponse) -> ScoreResult:
        with self._spans.open(f"score {self.name}", self._attributes) as span:
            answer = await cast(Awaitable[ScoreResult], self._scorer.score(case, response))
            self._spans.note_scores(span, answer)
            return answer


class TracedJudge:
    """A judge whose every sample is a span, with the call of its model inside."""

    def __init__(self, judge: RepeatedJudge, spans: Spans) -> None:
        self._judge = judge
        self._spans = spans

    @property
    def name(self) -> str:
        return self._judge.name

    @property
    def by(self) -> str:
        return self._judge.by

    @property
    def when(self) -> str:
        return self._judge.when

    @property
    def calibration(self) -> object:
        return getattr(self._judge, "calibration", None)

    @property
    def advisory(self) -> bool:
        return self._judge.advisory

    @advisory.setter
    def advisory(self, value: bool) -> None:
        self._judge.advisory = value

    def identity(self) -> Identity:
        return self._judge.identity()

    def applies(self, case: EvalCase) -> bool:
        return self._judge.applies(case)

    def fingerprint(self, case: EvalCase, response: InvocationResponse) -> str:
        return self._judge.fingerprint(case, response)

    def bound(self, wrap: Callable[[Target], Target]) -> RepeatedJudge:
        """The same judge, its target wrapped."""
        return TracedJudge(self._judge.bound(wrap), self._spans)

    async def score(self, case: EvalCase, response: InvocationResponse) -> ScoreResult:
        """One sample as a score; None when it does not apply to the case."""
        if not self.applies(case):
            return None
        return self.combine([await self.sample(case, response, InvocationContext(case_id=case.id))])

    async def sample(self, case: EvalCase, response: InvocationResponse, context: InvocationContext) -> Sample:
        """What the judge says when it is asked once."""
        attributes = {
            "gen_ai.evaluation.name": self.name,
            "steelyard.judge": self.by,
            "steelyard.sample": context.trial,
        }
        with self._spans.open(f"score {self.name}", attributes) as span:
            sample = await self._judge.sample(case, response, context)
            self._spans.note_score(span, self.name, sample.score, sample.passed, sample.reason)
            if sample.error is not None:
                self._spans.fail(span, "scoring_error", sample.error)
            return sample

    def combine(self, samples: Sequence[Sample], *, escalated: bool = False) -> Score:
        return self._judge.combine(samples, escalated=escalated)
