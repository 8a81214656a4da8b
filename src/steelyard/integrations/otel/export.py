"""Sending spans where the OTEL_* environment variables say."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from steelyard._version import __version__
from steelyard.errors import ConfigurationError
from steelyard.integrations.otel.tracing import trace_runner
from steelyard.runner import Runner

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("steelyard")

_QUEUE = 16_384
"""Spans that may wait for the exporter: a run makes thousands a second, and the SDK's own 2,048 would soon be full."""
_FLUSH_SECONDS, _HURRIED_FLUSH_SECONDS = 5.0, 1.0


@contextmanager
def exported(runner: Runner, *, content: bool | None = None) -> Iterator[None]:
    """Trace the runner, and send its spans where the OTEL_* environment variables say; for a program of its own.

    A global provider that is there already (`opentelemetry-instrument`) is used as it is. At the end, spans that are
    still waiting are given a few seconds to get away.
    """
    ours = None
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        ours = provider_from_environment()
        trace.set_tracer_provider(ours)  # what the target's own libraries trace belongs to the same run
    trace_runner(runner, content=content)
    try:
        yield
    finally:
        if ours is not None:
            interrupted = runner.token is not None and runner.token.cancelled
            _flush(ours, _HURRIED_FLUSH_SECONDS if interrupted else _FLUSH_SECONDS)


def provider_from_environment() -> TracerProvider:
    """A provider with the exporters that OTEL_TRACES_EXPORTER names, `otlp` unless it is set."""
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError("exporting spans needs the SDK: pip install 'steelyard[otel]'") from error
    ours = Resource({"service.name": "steelyard", "service.version": __version__})
    # What the environment says outranks ours, which outranks what the SDK makes up.
    resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    room = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else _QUEUE
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
    """Wait for the exporter, but not for ever: the SDK's own time limit is not kept when a collector is away."""
    flushing = threading.Thread(target=provider.force_flush, name="steelyard-spans", daemon=True)
    flushing.start()
    flushing.join(seconds)
    if flushing.is_alive():
        log.warning("not all spans could be exported within %g s", seconds)
