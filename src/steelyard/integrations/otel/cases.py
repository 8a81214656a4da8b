"""An engine whose runs and cases are spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span

from steelyard.contracts import Cancellation, Emit, Engine, InFlight, Pace, Permits, Tally, Work
from steelyard.integrations.otel.spans import Spans
from steelyard.records import Job, Record, StoredSample, Unjudged
from steelyard.stats.scores import verdict


class TracedEngine:
    """An engine whose runs are spans, each of their cases a span in it. A warm-up is a run of its own."""

    def __init__(self, engine: Engine, spans: Spans, name: str, attributes: Mapping[str, Any]) -> None:
        self._engine = engine
        self._spans = spans
        self._name = name
        self._attributes = attributes

    async def run(
        self,
        work: Work,
        jobs: Iterator[Job | None],
        emit: Emit,
        *,
        parallelism: int,
        token: Cancellation,
        permits: Permits | None = None,
        pace: Pace | None = None,
    ) -> Tally:
        """Run the jobs under a span that counts them at its end."""
        with self._spans.open(self._name, {**self._attributes, "steelyard.parallelism": parallelism}) as span:
            tally = await self._engine.run(
                _TracedWork(work, self._spans, trace.set_span_in_context(span)),
                jobs,
                emit,
                parallelism=parallelism,
                token=token,
                permits=permits,
                pace=pace,
            )
            span.set_attribute("steelyard.finished", tally.finished)
            span.set_attribute("steelyard.cancelled", tally.cancelled)
            return tally

    def in_flight(self) -> InFlight:
        return self._engine.in_flight()


class _TracedWork:
    """One case as a span of the run's."""

    def __init__(self, work: Work, spans: Spans, run: Context) -> None:
        self._work = work
        self._spans = spans
        self._run = run

    async def __call__(self, job: Job, emit: Emit) -> None:
        attributes: dict[str, Any] = {
            "steelyard.case.id": job.case.id,
            "steelyard.case.trial": job.trial,
            "steelyard.case.index": job.index,
        }
        with self._spans.open("case", attributes, parent=self._run) as span:

            def deliver(item: Record | Unjudged | StoredSample) -> None:
                emit(item)
                if isinstance(item, Record):
                    self._note(span, item)

            await self._work(job, deliver)

    def _note(self, span: Span, record: Record) -> None:
        span.set_attribute("steelyard.status", record.status)
        span.set_attribute("steelyard.attempts", record.attempts)
        if record.cached:
            span.set_attribute("steelyard.cached", True)
        if record.cost is not None:
            span.set_attribute("steelyard.cost", record.cost)
        if (passed := verdict(record.scores)) is not None:
            span.set_attribute("steelyard.passed", passed)
        if record.error is not None:
            self._spans.fail(span, record.error_type or "error", record.error)
