"""The chat completions API: OpenAI's, Azure's, and that of vLLM, Ollama, llama.cpp, LiteLLM and many more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steelyard.contracts import HttpReply
from steelyard.errors import TransportError
from steelyard.records import EvalCase
from steelyard.targets.answer import Answer, Call
from steelyard.targets.chat_answer import read_chat_stream, read_chat_whole
from steelyard.targets.conversation import Conversation, asked_turns
from steelyard.targets.links import Link
from steelyard.targets.openai import OpenAIEndpoint
from steelyard.transport.sse import Event

_USAGE_FIELD = b'"stream_options":{"include_usage":true}'


class OpenAIChat(OpenAIEndpoint):
    """A model behind `POST {base_url}/chat/completions`.

    A stream is asked to end with its usage; a server that refuses to be asked that is not asked again.
    """

    kind = "openai-chat"
    path = "/chat/completions"
    names_deployment = True
    turns_field = b',"messages":'
    reserved = ("model", "messages", "stream", "tools")
    tool_shape = "chat"

    def _fixed_fields(self) -> dict[str, Any]:
        fields = super()._fixed_fields()
        if self.stream:
            fields.setdefault("stream_options", {"include_usage": True})
        return fields

    def _opening(self, case: EvalCase) -> Conversation:
        turns = asked_turns(case)
        if case.system_prompt is not None:
            turns.insert(0, {"role": "system", "content": case.system_prompt})
        return Conversation(turns, self._tools_of(case))

    async def _send(self, link: Link, body: bytes) -> tuple[HttpReply, TransportError | None]:
        reply, broken = await super()._send(link, body)
        if _refuses_usage(reply) and _USAGE_FIELD in body and "stream_options" not in self.params:
            self._prefix = self._prefix.replace(b"," + _USAGE_FIELD, b"")
            return await super()._send(link, body.replace(b"," + _USAGE_FIELD, b"", 1))
        return reply, broken

    def _read_stream(self, stream: list[Event]) -> Answer:
        return read_chat_stream(stream)

    def _read_whole(self, body: bytes) -> Answer:
        return read_chat_whole(body)

    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:
        return [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text, _ in results]


def _refuses_usage(reply: HttpReply) -> bool:
    return reply.status in (400, 422) and any(word in reply.body for word in (b"stream_options", b"include_usage"))
