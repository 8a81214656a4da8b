"""OpenAI's responses API, and whoever else speaks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steelyard.records import EvalCase
from steelyard.targets.answer import Answer, Call
from steelyard.targets.conversation import Conversation, asked_turns, encoded
from steelyard.targets.openai import OpenAIEndpoint
from steelyard.targets.responses_answer import read_response_stream, read_response_whole
from steelyard.targets.responses_items import as_items
from steelyard.transport.sse import Event


class OpenAIResponses(OpenAIEndpoint):
    """A model behind `POST {base_url}/responses`."""

    kind = "openai-responses"
    path = "/responses"
    turns_field = b',"input":'
    reserved = ("model", "input", "stream", "tools", "instructions")
    tool_shape = "responses"

    def _opening(self, case: EvalCase) -> Conversation:
        rest = self._tools_of(case)
        if case.system_prompt is not None:
            rest = b',"instructions":' + encoded(case.system_prompt) + rest
        return Conversation(as_items(asked_turns(case)), rest)

    def _read_stream(self, stream: list[Event]) -> Answer:
        return read_response_stream(stream)

    def _read_whole(self, body: bytes) -> Answer:
        return read_response_whole(body)

    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:
        return [{"type": "function_call_output", "call_id": call.id, "output": text} for call, text, _ in results]
