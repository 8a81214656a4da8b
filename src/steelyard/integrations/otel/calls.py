"""A target whose calls are spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.trace import Span, SpanKind

from steelyard.contracts import CallByCall, InvocationContext, RemoteTarget, Target, TargetAround
from steelyard.integrations.otel.messages import input_messages, output_messages, system_instructions
from steelyard.integrations.otel.spans import Spans
from steelyard.records import EvalCase, InvocationResponse

_OPERATION = "gen_ai.operation.name"
_PROVIDERS = {"openai-chat": "openai", "openai-responses": "openai", "anthropic-messages": "anthropic"}
_REQUEST = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}
_ANSWER = {
    "num_tokens_input": "gen_ai.usage.input_tokens",
    "num_tokens_output": "gen_ai.usage.output_tokens",
    "num_tokens_input_cached": "gen_ai.usage.cache_read.input_tokens",
    "num_tokens_input_cache_write": "gen_ai.usage.cache_creation.input_tokens",
    "num_tokens_output_reasoning": "gen_ai.usage.reasoning.output_tokens",
    "time_to_first_token": "gen_ai.response.time_to_first_chunk",
    "http_status": "http.response.status_code",
    "request_id": "steelyard.request_id",
}


class Traced(TargetAround):
    """A target whose every call, retries one by one, is a span; `about` is what all of them have in common."""

    def __init__(self, target: Target, spans: Spans, about: Mapping[str, Any] | None = None) -> None:
        self._target = target
        self._spans = spans
        self._attributes = _about_target(target) if about is None else about
        named = self._attributes.get("gen_ai.request.model") or self._attributes.get("gen_ai.agent.name")
        self._name = f"{self._attributes[_OPERATION]} {named}"
        self._kind = SpanKind.CLIENT if "server.address" in self._attributes else SpanKind.INTERNAL

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """The target's answer, under a span that tells how it came."""
        attributes = {**self._attributes, "steelyard.attempt": context.attempt}
        with self._spans.open(self._name, attributes, kind=self._kind) as span:
            if self._spans.content:
                _note_question(span, case)
            try:
                response = await self._target.invoke(case, context)
            except Exception as error:
                self._note(span, getattr(error, "partial", None))
                raise
            self._note(span, response)
            return response

    def _note(self, span: Span, response: object) -> None:
        if not isinstance(response, InvocationResponse):
            return
        for field, attribute in _ANSWER.items():
            if (value := getattr(response, field)) is not None:
                span.set_attribute(attribute, value)
        if response.stop_reason is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [response.stop_reason])
        if response.error is not None:
            self._spans.fail(span, response.error_type or "error", response.error)
        if self._spans.content:
            span.set_attribute("gen_ai.output.messages", output_messages(response))


class TracedRemote(Traced):
    """The same for a target at the other end of a connection."""

    _target: RemoteTarget

    @property
    def endpoint(self) -> str:
        return self._target.endpoint

    def check(self) -> None:
        self._target.check()

    async def open(self, parallelism: int) -> None:
        await self._target.open(parallelism)

    async def close(self) -> None:
        await self._target.close()

    def bound(self, wrap: Callable[[Target], Target]) -> Target:
        """With `wrap` around each call to the model; where a case makes several, each is a span within the agent's."""
        target = self._target
        if self._attributes[_OPERATION] == "chat" or not isinstance(target, CallByCall):
            return wrap(self)
        of_model = {**self._attributes, _OPERATION: "chat"}
        each = target.bound(lambda call: wrap(Traced(call, self._spans, of_model)))
        return Traced(each, self._spans, self._attributes)


def _note_question(span: Span, case: EvalCase) -> None:
    span.set_attribute("gen_ai.input.messages", input_messages(case))
    if (instructions := system_instructions(case)) is not None:
        span.set_attribute("gen_ai.system_instructions", instructions)


def _about_target(target: Target) -> dict[str, Any]:
    """What every call of a target has in common. Code of one's own, and a model with tools, count as an agent."""
    identity = target.identity()
    kind = str(identity.get("kind", type(target).__name__))
    is_model = kind in _PROVIDERS or kind == "simulated"
    about: dict[str, Any] = {
        _OPERATION: "chat" if is_model and not identity.get("functions") else "invoke_agent",
        "gen_ai.provider.name": _PROVIDERS.get(kind, kind),
    }
    if target.model_id is not None:
        about["gen_ai.request.model"] = target.model_id
    if not is_model:
        about["gen_ai.agent.name"] = str(identity.get("qualname") or kind)
    if isinstance(target, RemoteTarget):
        address = urlsplit(target.endpoint)
        about |= {"server.address": address.hostname or "", "server.port": address.port or 0}
    if "~stream" in identity:
        about["gen_ai.request.stream"] = bool(identity["~stream"])
    params = identity.get("params")
    for name, value in params.items() if isinstance(params, Mapping) else ():
        if name in _REQUEST and isinstance(value, (int, float)):
            about[_REQUEST[name]] = value
    return about
