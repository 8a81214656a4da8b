"""OpenAI's older completions API, which base models have: a text is continued, without roles, tools or reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from steelyard.errors import ConfigurationError, TargetError
from steelyard.records import EvalCase
from steelyard.targets.conversation import Call, Conversation, ModelAnswer, encoded
from steelyard.targets.openai_chat import StreamUsage, read_usage
from steelyard.targets.wire import NOTHING, Reader, TextParts, before_done, is_blank, reported_error
from steelyard.transport.sse import ServerSentEvent


class OpenAICompletions(StreamUsage):
    """A model behind `POST {base_url}/completions`. The case's prompt is continued, after its system prompt if any."""

    kind = "openai-completions"
    path = "/completions"
    names_deployment = True
    turns_field = b',"prompt":'
    reserved = ("model", "prompt", "stream", "tools")
    tool_shape = "chat"
    takes_attachments = False

    def _encode_tools(self, tools: list[dict[str, Any]]) -> bytes:
        if tools:
            raise ConfigurationError("openai-completions takes no tools or functions: a base model calls none")
        return b""

    def _opening(self, case: EvalCase) -> Conversation:
        if case.messages:
            raise TargetError("openai-completions continues a prompt, and the case has messages: use openai-chat")
        if case.prompt is None:
            raise TargetError("the case has no prompt")
        if case.tools:
            raise TargetError("openai-completions takes no tools, and the case has some: use openai-chat")
        prompt = case.prompt if case.system_prompt is None else f"{case.system_prompt}\n\n{case.prompt}"
        return Conversation([{"role": "user", "content": prompt}])

    def _body(self, conversation: Conversation) -> bytes:
        return b"".join((self._prefix, self.turns_field, encoded(conversation.turns[0]["content"]), b"}"))

    def _read_stream(self, stream: list[ServerSentEvent]) -> ModelAnswer:
        return read_completion_stream(stream)

    def _read_whole(self, body: bytes) -> ModelAnswer:
        return read_completion_whole(body)

    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:  # pragma: no cover
        raise AssertionError(f"a base model called {results[0][0].name}")


class _Choice(msgspec.Struct, gc=False):
    index: int | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct, gc=False):
    """A whole completion, or a chunk of a streamed one."""

    choices: list[_Choice] | None = None
    usage: msgspec.Raw = NOTHING
    error: Any = None


_COMPLETIONS = Reader(_Completion)


def read_completion_whole(body: bytes) -> ModelAnswer:
    """Read an answer that came as one object."""
    completion = _COMPLETIONS.read(body)
    choice = next((choice for choice in completion.choices or () if not choice.index), None)
    if choice is None or not is_blank(completion.error):
        raise reported_error(msgspec.json.decode(body))
    return _answer(choice.text or "", choice.finish_reason, completion.usage)


def read_completion_stream(stream: list[ServerSentEvent]) -> ModelAnswer:
    """Read a streamed answer; it is complete with its `[DONE]`, or with a clean end after a finish reason."""
    received, done = before_done(stream)
    pieces, fault = _COMPLETIONS.read_all(received)
    content = TextParts()
    stop_reason: str | None = None
    usage = NOTHING
    for event, piece in zip(received, pieces, strict=False):
        if piece.usage is not NOTHING and bytes(piece.usage) != b"null":
            usage = piece.usage
        for choice in piece.choices or ():
            if not choice.index:
                stop_reason = choice.finish_reason or stop_reason
                if choice.text:
                    content.add_text(choice.text, event.at)
        if not is_blank(piece.error) and fault is None:
            fault = reported_error(msgspec.json.decode(event.data))
    answer = _answer(content.text, stop_reason, usage)
    answer.first_content, answer.text_times = content.first_text, content.times()
    answer.token_times = content.token_times()
    answer.terminated = done
    answer.complete = done or stop_reason is not None
    answer.fault = fault
    return answer


def _answer(text: str, stop_reason: str | None, usage: msgspec.Raw) -> ModelAnswer:
    messages = [{"role": "assistant", "content": text}] if text else []
    answer = ModelAnswer(messages, text, stop_reason=stop_reason)
    answer.usage = read_usage(usage, answer.oddities)
    return answer
