"""Spans and their attributes, and the traced target: a span for each call of a model or agent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from steelyard.attachments import shown, without_contents
from steelyard.errors import describe
from steelyard.protocols import CallByCall, InvocationContext, RemoteTarget, ScoreResult, Target, TargetWrapper
from steelyard.records import EvalCase, InvocationResponse, Score

_OPERATION = "gen_ai.operation.name"
_PROVIDERS = {
    "openai-chat": "openai",
    "openai-responses": "openai",
    "openai-completions": "openai",
    "anthropic-messages": "anthropic",
    "gemini": "gcp.gemini",
    "bedrock": "aws.bedrock",
}
_REQUEST_ATTRIBUTES = {
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
_RESPONSE_ATTRIBUTES = {
    "num_tokens_input": "gen_ai.usage.input_tokens",
    "num_tokens_output": "gen_ai.usage.output_tokens",
    "num_tokens_input_cached": "gen_ai.usage.cache_read.input_tokens",
    "num_tokens_input_cache_write": "gen_ai.usage.cache_creation.input_tokens",
    "num_tokens_output_reasoning": "gen_ai.usage.reasoning.output_tokens",
    "time_to_first_token": "gen_ai.response.time_to_first_chunk",
    "http_status": "http.response.status_code",
    "request_id": "steelyard.request_id",
}


class Spans:
    """Makes spans; `content` decides whether prompts, answers and messages are put into them."""

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
        """Open a span as the current one; an exception inside ends it as an error."""
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
        """Record a scorer's result; of several scores, the first that failed, else the first."""
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


class Traced(TargetWrapper):
    """A target with a span for each call, each retry included; `about` has the attributes that all of them share."""

    def __init__(self, target: Target, spans: Spans, about: Mapping[str, Any] | None = None) -> None:
        self._target = target
        self._spans = spans
        self._attributes = _about_target(target) if about is None else about
        named = self._attributes.get("gen_ai.request.model") or self._attributes.get("gen_ai.agent.name")
        self._name = f"{self._attributes[_OPERATION]} {named}"
        self._kind = SpanKind.CLIENT if "server.address" in self._attributes else SpanKind.INTERNAL

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Call the target inside a span with the figures of its response."""
        attributes = {**self._attributes, "steelyard.attempt": context.attempt}
        with self._spans.open(self._name, attributes, kind=self._kind) as span:
            if self._spans.content:
                _note_input(span, case)
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
        for field, attribute in _RESPONSE_ATTRIBUTES.items():
            if (value := getattr(response, field)) is not None:
                span.set_attribute(attribute, value)
        if response.stop_reason is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [response.stop_reason])
        if response.error is not None:
            self._spans.fail(span, response.error_type or "error", response.error)
        if self._spans.content:
            span.set_attribute("gen_ai.output.messages", output_messages(response))


class TracedRemote(Traced):
    """A traced target at the other end of a connection."""

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
        """Wrap each call to the model; where a case makes several, each has a span inside the agent's."""
        target = self._target
        if self._attributes[_OPERATION] == "chat" or not isinstance(target, CallByCall):
            return wrap(self)
        of_model = {**self._attributes, _OPERATION: "chat"}
        each = target.bound(lambda call: wrap(Traced(call, self._spans, of_model)))
        return Traced(each, self._spans, self._attributes)


def _note_input(span: Span, case: EvalCase) -> None:
    span.set_attribute("gen_ai.input.messages", input_messages(case))
    if (instructions := system_instructions(case)) is not None:
        span.set_attribute("gen_ai.system_instructions", instructions)


def _about_target(target: Target) -> dict[str, Any]:
    """Collect the attributes that all calls of a target share. User code, and a model with tools, count as an agent."""
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
        if name in _REQUEST_ATTRIBUTES and isinstance(value, (int, float)):
            about[_REQUEST_ATTRIBUTES[name]] = value
    return about


def system_instructions(case: EvalCase) -> str | None:
    """Encode the system prompt as JSON; None where there is none."""
    return None if case.system_prompt is None else _as_json([_text(case.system_prompt)])


def input_messages(case: EvalCase) -> str:
    """Encode the case's messages as JSON, its prompt last."""
    turns = list(case.messages or [])
    if case.prompt is not None or case.attachments:
        content: Any = case.prompt
        if case.attachments:
            content = [*map(shown, case.attachments), *([] if case.prompt is None else [case.prompt])]
        turns.append({"role": "user", "content": content})
    return _as_json([_message(turn) for turn in turns])


def output_messages(response: InvocationResponse) -> str:
    """Encode the response as JSON: its messages where there are some, else its text."""
    turns = response.messages or [{"role": "assistant", "content": response.response_text}]
    messages = [_message(turn) for turn in turns]
    if response.stop_reason is not None:
        messages[-1]["finish_reason"] = response.stop_reason
    return _as_json(messages)


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    role = str(turn.get("role", "user"))
    if role == "tool":
        parts = [{"type": "tool_call_response", "id": turn.get("tool_call_id"), "result": turn.get("content")}]
    else:
        parts = [*_content(turn.get("content")), *_tool_calls(turn.get("tool_calls") or ())]
    return {"role": role, "parts": parts}


def _content(content: Any) -> Iterator[dict[str, Any]]:
    """Iterate over the parts of a message: plain text is one part; other parts are passed on unchanged."""
    if isinstance(content, str):
        yield _text(content)
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, dict):
                text = part.get("text")
                if "attachment" in part:
                    yield _text(shown(part["attachment"]))
                else:
                    yield _text(text) if isinstance(text, str) else {"type": "unknown", **without_contents(part)}
            else:
                yield _text(str(part))


def _tool_calls(calls: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        named = function if isinstance(function, dict) else call if isinstance(call, dict) else {}
        identifier = call.get("id") if isinstance(call, dict) else None
        yield {"type": "tool_call", "id": identifier, "name": named.get("name"), "arguments": named.get("arguments")}


def _text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


def _as_json(value: object) -> str:
    # json's escapes, not msgspec's UTF-8: a lone surrogate would make the exporter lose the whole batch.
    return json.dumps(value, default=str)
