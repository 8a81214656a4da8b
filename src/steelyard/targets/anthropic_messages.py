"""Anthropic's messages API, and whoever else speaks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steelyard.records import EvalCase
from steelyard.targets.answer import Answer, Call
from steelyard.targets.anthropic_answer import read_anthropic_stream, read_anthropic_whole
from steelyard.targets.anthropic_turns import split_system
from steelyard.targets.conversation import Conversation, asked_turns, encoded
from steelyard.targets.endpoint import EndpointTarget
from steelyard.transport.sse import Event

DEFAULT_MAX_TOKENS = 4096
"""The API wants to be told; `params: {max_tokens: …}` says another number."""

_API_VERSION = "2023-06-01"


class AnthropicMessages(EndpointTarget):
    """A model behind `POST {base_url}/v1/messages`. `api_version` is the `anthropic-version` that is asked for."""

    kind = "anthropic-messages"
    default_base_url = "https://api.anthropic.com"
    base_url_variables = ("ANTHROPIC_BASE_URL",)
    key_variables = ("ANTHROPIC_API_KEY",)
    path = "/v1/messages"
    turns_field = b',"messages":'
    reserved = ("model", "messages", "stream", "tools", "system")
    tool_shape = "anthropic"

    def _fixed_fields(self) -> dict[str, Any]:
        return {"max_tokens": DEFAULT_MAX_TOKENS, **super()._fixed_fields()}

    def _opening(self, case: EvalCase) -> Conversation:
        turns, system = split_system(asked_turns(case), case.system_prompt)
        rest = self._tools_of(case)
        return Conversation(turns, rest if system is None else b',"system":' + encoded(system) + rest)

    def _make_url(self) -> str:
        path = self.path.removeprefix("/v1") if self._address.path.endswith("/v1") else self.path
        return self._address.url(path)

    def _own_headers(self) -> list[tuple[str, str]]:
        return [("anthropic-version", self.api_version or _API_VERSION)]

    def _key_header(self, key: str) -> tuple[str, str]:
        return ("x-api-key", key)

    def _read_stream(self, stream: list[Event]) -> Answer:
        return read_anthropic_stream(stream)

    def _read_whole(self, body: bytes) -> Answer:
        return read_anthropic_whole(body)

    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:
        blocks = [
            {"type": "tool_result", "tool_use_id": call.id, "content": text, **({"is_error": True} if failed else {})}
            for call, text, failed in results
        ]
        return [{"role": "user", "content": blocks}]
