"""Putting the spans into a runner: its target, its scorers and its engine are replaced by traced ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import cast

from opentelemetry import trace

from steelyard._version import __version__
from steelyard.contracts import RemoteTarget, RepeatedJudge, Scorer, Target
from steelyard.engine.local import LocalEngine
from steelyard.integrations.otel.calls import Traced, TracedRemote
from steelyard.integrations.otel.cases import TracedEngine
from steelyard.integrations.otel.scores import TracedJudge, TracedScorer
from steelyard.integrations.otel.spans import Spans
from steelyard.runner import Runner

CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_WITH_CONTENT = ("true", "1", "span_only", "span_and_event")


def trace_runner(
    runner: Runner, *, tracer_provider: trace.TracerProvider | None = None, content: bool | None = None
) -> Runner:
    """Have the runner's runs make spans, through this provider or the global one; the runner itself is returned.

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
        # A judge may share the run's own target: then both must share what stands for it.
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
