"""What a request asks, whichever of the three APIs it came by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


class StreamOptions(msgspec.Struct):
    """What an OpenAI client says about its stream."""

    include_usage: bool | None = None


class Tool(msgspec.Struct):
    """A function on offer, with the JSON schema of its arguments."""

    name: str
    schema: dict[str, Any]


class Asked(msgspec.Struct, kw_only=True):
    """The fields that matter here, of all three APIs: each request has some of them."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The conversation so far."""
        if self.messages is not None:
            return self.messages
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return self.input or []

    @property
    def most_tokens(self) -> int | None:
        """How long the answer may be."""
        return self.max_tokens or self.max_completion_tokens or self.max_output_tokens

    def last_user_text(self) -> str:
        """What the user said last."""
        for turn in reversed(self.turns):
            if turn.get("role") == "user":
                return "".join(texts(turn.get("content")))
        return ""

    def count_input_tokens(self) -> int:
        """How many tokens went in, taking four characters for one."""
        size = len(self.instructions or "")
        if self.system:
            size += sum(map(len, texts(self.system)))
        for turn in self.turns:
            content = turn.get("content")
            size += len(content) if isinstance(content, str) else sum(map(len, texts(content)))
        return max(1, (size + 3) // 4)

    def brings_a_tool_result(self) -> bool:
        """Whether the last turn is what a tool returned: then the user is owed an answer, not another call."""
        last = self.turns[-1] if self.turns else {}
        if last.get("role") == "tool" or last.get("type") == "function_call_output":
            return True
        content = last.get("content")
        return isinstance(content, list) and any(
            isinstance(part, dict) and part.get("type") == "tool_result" for part in content
        )

    def functions(self) -> list[Tool]:
        """The functions on offer, in the spelling of any of the three APIs."""
        found = []
        for tool in self.tools or []:
            inner = tool.get("function")
            function = inner if isinstance(inner, dict) else tool
            if isinstance(name := function.get("name"), str):
                schema = function.get("parameters") or function.get("input_schema")
                found.append(Tool(name, schema if isinstance(schema, dict) else {}))
        return found

    def choice(self) -> tuple[str, str | None]:
        """What is asked about calling a tool: `none`, `auto` or `required`, and the name of the one that must be."""
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return (choice or "auto"), None
        function = choice.get("function")
        name = choice.get("name") or (function.get("name") if isinstance(function, dict) else None)
        kind = choice.get("type")
        if isinstance(name, str):
            return "required", name
        return ("required" if kind == "any" else str(kind)), None


def texts(content: Any) -> Iterator[str]:
    """The texts of a message: plain, or in parts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                yield text


_decoder = msgspec.json.Decoder(Asked)


def read_asked(body: bytes) -> Asked:
    """What a body asks; raises msgspec.DecodeError or ValidationError."""
    return _decoder.decode(body)
