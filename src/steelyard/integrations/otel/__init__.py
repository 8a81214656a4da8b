"""OpenTelemetry spans of a run: run → case → model call and score, named as the GenAI conventions have it.

The names are those of the conventions as of 2026, all of them still in development there. What was asked and answered
is left out unless it is asked for. A run that is not traced does not pass through any of this.
"""

from __future__ import annotations

from steelyard.errors import ConfigurationError

try:
    import opentelemetry.trace  # noqa: F401 - looked for once, here, for all that is in this package
except ImportError as error:
    raise ConfigurationError("tracing needs opentelemetry: pip install 'steelyard[otel]'") from error

from steelyard.integrations.otel.tracing import exported, trace_runner

__all__ = ["exported", "trace_runner"]
