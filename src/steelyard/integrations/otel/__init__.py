"""OpenTelemetry spans of a run: run → case → model call and score, named after the GenAI conventions.

The names are those of the conventions as of 2026, all of them still in development. Prompts and answers are left out
unless requested. A run that is not traced uses none of this.
"""

from __future__ import annotations

from steelyard.errors import ConfigurationError

try:
    import opentelemetry.trace  # noqa: F401 - checked once, here, for the whole package
except ImportError as error:
    raise ConfigurationError("tracing needs opentelemetry: pip install 'steelyard[otel]'", topic="extra") from error

from steelyard.integrations.otel.tracing import exported, trace_runner

__all__ = ["exported", "trace_runner"]
