"""OpenTelemetry spans of a run: run → case → model call and score, named after the GenAI conventions.

The runner's target, scorers and engine are replaced by traced ones, and the spans exported. The names are those of the
conventions as of 2026, all of them still in development. Prompts and answers are left out unless requested. A run that
is not traced uses none of this.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from steelyard.errors import ConfigurationError

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Span
except ImportError as error:
    raise ConfigurationError("tracing needs opentelemetry: pip install 'steelyard[otel]'", topic="extra") from error

from steelyard._version import __version__
from steelyard.engine.base import Engine
from steelyard.engine.local import LocalEngine
from steelyard.integrations.otel_spans import Spans, Traced, TracedRemote
from steelyard.protocols import (
    Cancellation,
    Emit,
    Identity,
    InFlight,
    InvocationContext,
    Pace,
    Permits,
    RemoteTarget,
    RepeatedJudge,
    Scorer,
    ScoreResult,
    Tally,
    Target,
    Work,
)
from steelyard.records import (
    EncodedRecords,
    EvalCase,
    InvocationResponse,
    Job,
    Record,
    Sample,
    Score,
    StoredSample,
    UnscoredAnswer,
    verdict,
)
from steelyard.run.runner import Runner
from steelyard.scoring.base import LIMIT_NAMES
from steelyard.stats.client_load import ClientLoad

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["exported", "trace_runner"]

log = logging.getLogger("steelyard")
CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_WITH_CONTENT = ("true", "1", "span_only", "span_and_event")
_MAX_QUEUED_SPANS = 16_384
"""A run makes thousands of spans a second, and the SDK's default of 2,048 would soon be full."""
_FLUSH_SECONDS = 5.0
_INTERRUPTED_FLUSH_SECONDS = 1.0


def trace_runner(
    runner: Runner, *, tracer_provider: trace.TracerProvider | None = None, content: bool | None = None
) -> Runner:
    """Make the runner's runs create spans, with this provider or the global one; returns the runner itself.

    `content` puts prompts, answers, reasons and error messages into them; None leaves that to the environment variable
    OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT.
    """
    if isinstance(runner.engine, TracedEngine):
        return runner
    if content is None:
        content = os.environ.get(CONTENT_VARIABLE, "").lower() in _WITH_CONTENT
    spans = Spans(trace.get_tracer("steelyard", __version__, tracer_provider), content)
    targets: dict[int, Target] = {}

    def traced(target: Target) -> Target:
        # A judge may share the run's target: then both must share the traced one.
        if id(target) not in targets:
            targets[id(target)] = (TracedRemote if isinstance(target, RemoteTarget) else Traced)(target, spans)
        return targets[id(target)]

    about = {"steelyard.suite": runner.suite.id, "steelyard.seed": runner.options.seed}
    if runner.target.model_id is not None:
        about["gen_ai.request.model"] = runner.target.model_id
    runner.target = traced(runner.target)
    runner.scorers = [_traced_scorer(scorer, spans, traced) for scorer in runner.scorers]
    runner.engine = TracedEngine(runner.engine or LocalEngine(), spans, f"run {runner.suite.id}", about)
    return runner


def _traced_scorer(scorer: Scorer, spans: Spans, traced: Callable[[Target], Target]) -> Scorer:
    if isinstance(scorer, RepeatedJudge):
        return cast(Scorer, TracedJudge(scorer.bound(traced), spans))
    return TracedScorer(scorer, spans)


@contextmanager
def exported(runner: Runner, *, content: bool | None = None) -> Iterator[None]:
    """Trace the runner, and export its spans as the OTEL_* environment variables configure; for programs.

    A global provider that exists already (`opentelemetry-instrument`) is used as it is. At the end, spans that are
    still queued have a few seconds to be exported.
    """
    ours = None
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        ours = provider_from_environment()
        trace.set_tracer_provider(ours)  # spans of the target's own libraries belong to the same run
    trace_runner(runner, content=content)
    try:
        yield
    finally:
        if ours is not None:
            interrupted = runner.token is not None and runner.token.cancelled
            _flush(ours, _INTERRUPTED_FLUSH_SECONDS if interrupted else _FLUSH_SECONDS)


def provider_from_environment() -> TracerProvider:
    """Make a provider with the exporters that OTEL_TRACES_EXPORTER names, `otlp` unless it is set."""
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(
            "exporting spans needs the SDK: pip install 'steelyard[otel]'", topic="extra"
        ) from error
    ours = Resource({"service.name": "steelyard", "service.version": __version__})
    # The environment overrides our attributes, which override the SDK's defaults.
    resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    room = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else _MAX_QUEUED_SPANS
    for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        if (name := name.strip()) and name != "none":
            provider.add_span_processor(BatchSpanProcessor(_exporter(name), max_queue_size=room))
    return provider


def _exporter(name: str) -> Any:
    if name == "otlp":
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    known = {point.name: point for point in entry_points(group="opentelemetry_traces_exporter")}
    if name not in known:
        raise ConfigurationError(
            f"OTEL_TRACES_EXPORTER: no exporter {name!r} is installed; known here: {', '.join(known)}"
        )
    return known[name].load()()


def _flush(provider: TracerProvider, seconds: float) -> None:
    """Wait for the exporter, with a time limit: the SDK does not keep its own when a collector is unreachable."""
    flushing = threading.Thread(target=provider.force_flush, name="steelyard-spans", daemon=True)
    flushing.start()
    flushing.join(seconds)
    if flushing.is_alive():
        log.warning("not all spans could be exported within %g s", seconds)


class TracedEngine(Engine):
    """An engine with a span for each run, and one inside it for each case. A warm-up is a separate run."""

    def __init__(self, engine: Engine, spans: Spans, name: str, attributes: Mapping[str, Any]) -> None:
        self._engine = engine
        self._spans = spans
        self._name = name
        self._attributes = attributes
        self.runs_in_other_processes = engine.runs_in_other_processes

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
        together: bool = False,
    ) -> Tally:
        """Run the jobs inside a span that has their counts at its end."""
        with self._spans.open(self._name, {**self._attributes, "steelyard.parallelism": parallelism}) as span:
            tally = await self._engine.run(
                _TracedWork(work, self._spans, trace.set_span_in_context(span)),
                jobs,
                emit,
                parallelism=parallelism,
                token=token,
                permits=permits,
                pace=pace,
                together=together,
            )
            span.set_attribute("steelyard.finished", tally.finished)
            span.set_attribute("steelyard.cancelled", tally.cancelled)
            return tally

    def in_flight(self) -> InFlight:
        return self._engine.in_flight()

    def check(self, *, pace: bool = False) -> None:
        self._engine.check(pace=pace)

    def client_loads(self) -> Sequence[ClientLoad]:
        return self._engine.client_loads()

    def close(self) -> None:
        self._engine.close()


class _TracedWork:
    """Work with a span for each case, inside the run's span."""

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

            def deliver(item: Record | UnscoredAnswer | StoredSample | EncodedRecords) -> None:
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


def _copy_limits(scorer: object, traced: object) -> None:
    """Give a traced scorer the time limit, parallelism and retries that the scorer sets."""
    for name in LIMIT_NAMES:
        if hasattr(scorer, name):
            setattr(traced, name, getattr(scorer, name))


class TracedScorer:
    """A scorer with a span for each score."""

    def __init__(self, scorer: Scorer, spans: Spans) -> None:
        self._scorer = scorer
        self._spans = spans
        self._attributes = {"gen_ai.evaluation.name": scorer.name}
        _copy_limits(scorer, self)

    @property
    def name(self) -> str:
        return self._scorer.name

    @property
    def immediate(self) -> bool:
        return getattr(self._scorer, "immediate", False) is True

    def identity(self) -> Identity:
        return self._scorer.identity()

    def score(self, case: EvalCase, response: InvocationResponse) -> ScoreResult | Awaitable[ScoreResult]:
        """Score inside a span; the span of an async scorer lasts until its result."""
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
    """A judge with a span for each sample, and the call of its model inside."""

    def __init__(self, judge: RepeatedJudge, spans: Spans) -> None:
        self._judge = judge
        self._spans = spans
        _copy_limits(judge, self)

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
    def size(self) -> int:
        """How many models judge."""
        return int(getattr(self._judge, "size", 1))

    @property
    def calibration(self) -> object:
        return getattr(self._judge, "calibration", None)

    def identity(self) -> Identity:
        return self._judge.identity()

    def applies(self, case: EvalCase) -> bool:
        return self._judge.applies(case)

    def fingerprint(self, case: EvalCase, response: InvocationResponse) -> str:
        return self._judge.fingerprint(case, response)

    def bound(self, wrap: Callable[[Target], Target]) -> RepeatedJudge:
        """Return the same judge with its target wrapped."""
        return TracedJudge(self._judge.bound(wrap), self._spans)

    async def score(self, case: EvalCase, response: InvocationResponse) -> ScoreResult:
        """Take one sample as the score; None when the judge does not apply to the case."""
        if not self.applies(case):
            return None
        return self.combine([await self.sample(case, response, InvocationContext(case_id=case.id))])

    async def sample(self, case: EvalCase, response: InvocationResponse, context: InvocationContext) -> Sample:
        """Ask the judge once."""
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
