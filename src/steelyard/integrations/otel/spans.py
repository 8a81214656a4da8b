"""Making spans, and what may be said in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from steelyard.contracts import ScoreResult
from steelyard.errors import describe
from steelyard.records import Score


class Spans:
    """Makes spans, and knows what may be said in them."""

    def __init__(self, tracer: trace.Tracer, content: bool) -> None:
        self._tracer = tracer
        self.content = content

    @contextmanager
    def open(
        self,
        name: str,
        attributes: Mapping[str, Any],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: Context | None = None,
    ) -> Iterator[Span]:
        """A span that is the current one inside; what is raised there ends it as an error."""
        with self._tracer.start_as_current_span(
            name, parent, kind, attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                self.fail(span, type(error).__name__, describe(error))
                raise

    def fail(self, span: Span, kind: str, message: str | None) -> None:
        """Mark the span as an error; its message may quote an answer, so that it counts as content."""
        span.set_attribute("error.type", kind)
        span.set_status(Status(StatusCode.ERROR, message if self.content else None))

    def note_scores(self, span: Span, answer: ScoreResult) -> None:
        """Write down what a scorer said; of several scores, the first that failed speaks for them."""
        if answer is None:
            return
        scores = [answer] if isinstance(answer, Score) else answer
        for score in sorted(scores, key=lambda score: score.passed is not False)[:1]:
            self.note_score(span, score.name, score.value, score.passed, score.reason)
            if score.errors:
                self.fail(span, "scoring_error", score.errors[0])

    def note_score(self, span: Span, name: str, value: float | None, passed: bool | None, reason: str | None) -> None:
        span.set_attribute("gen_ai.evaluation.name", name)
        if value is not None:
            span.set_attribute("gen_ai.evaluation.score.value", float(value))
        if passed is not None:
            span.set_attribute("gen_ai.evaluation.score.label", "pass" if passed else "fail")
        if reason is not None and self.content:
            span.set_attribute("gen_ai.evaluation.explanation", reason)
