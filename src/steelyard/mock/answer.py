"""What the pretend model says: an answer, a refusal or a tool call, token by token, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from steelyard.mock.asked import Asked, Tool
from steelyard.mock.book import AnswerBook, wrong_answer
from steelyard.mock.draws import Draw, Lots, hits, pick
from steelyard.mock.manner import Manner

Stop = Literal["stop", "length", "tool_calls", "refusal"]

_RUNNING_TEXT = (
    "the weight of a thing is told by its distance from the pivot and a long arm with small counterpoise will "
    "balance what no hand could lift so merchants trusted it for grain wool and iron until spring scales came"
)
_WORDS = _RUNNING_TEXT.split()
_AROUND = [" " + word for word in _WORDS * 2]
_REFUSAL = ("I", " am", " sorry", ",", " but", " I", " cannot", " help", " with", " that", ".")
_DEEPEST = 8


class Usage(msgspec.Struct, gc=False):
    """Tokens in (of them cached) and out (of them reasoning)."""

    input: int
    cached: int
    output: int
    reasoning: int


class ToolCall(msgspec.Struct, gc=False):
    """A function that the model wants called."""

    id: str
    name: str
    arguments: str
    """JSON."""


class Answer(msgspec.Struct, gc=False):
    """All that is said in reply to one request."""

    id: str
    model: str
    created: int
    reasoning: Sequence[str]
    tokens: Sequence[str]
    """Of the text, of the refusal, or of the tool call's arguments."""
    tool_call: ToolCall | None
    stop: Stop
    usage: Usage | None
    include_usage: bool
    """Whether a chat stream is to tell it."""

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def steps(self) -> int:
        return len(self.reasoning) + len(self.tokens)


def compose(asked: Asked, manner: Manner, draw: Draw, lots: Lots, book: AnswerBook | None) -> Answer:
    """The answer to a request, as chance and the manner have it."""
    call = _tool_call(asked, manner, draw, lots)
    stop: Stop = "stop"
    if call is not None:
        tokens: Sequence[str] = split(call.arguments)
        stop = "tool_calls"
    elif hits(lots.refusal, manner.refusal_rate):
        tokens, stop = _REFUSAL, "refusal"
    else:
        tokens = _text(asked, manner, lots, book)
        most = asked.most_tokens
        if most is not None and len(tokens) > most:
            tokens, stop = tokens[: max(0, most)], "length"
    reasoning = words(manner.reasoning_tokens.count(lots.reasoning_tokens), lots.words)
    return Answer(
        id=draw.id,
        model=asked.model or "mock",
        created=int(time.time()),
        reasoning=reasoning,
        tokens=tokens,
        tool_call=call,
        stop=stop,
        usage=_usage(asked, draw, len(tokens), len(reasoning)) if manner.usage else None,
        include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
    )


def words(count: int, lot: int) -> Sequence[str]:
    """So many tokens of running text that says little, from a place that the lot decides."""
    if count <= 0:
        return ()
    start = pick(lot, len(_WORDS))
    first = _WORDS[start]
    if count <= len(_WORDS):
        return [first, *_AROUND[start + 1 : start + count]]
    return [first, *(_AROUND[(start + at) % len(_WORDS)] for at in range(1, count))]


def split(text: str) -> list[str]:
    """A text in pieces the size of tokens; together they are the text."""
    return [text[at : at + 4] for at in range(0, len(text), 4)]


def _text(asked: Asked, manner: Manner, lots: Lots, book: AnswerBook | None) -> Sequence[str]:
    if manner.answer is not None:
        return split(manner.answer)
    right = book.right(asked.last_user_text()) if book is not None else None
    if right is not None:
        return split(right if hits(lots.right, manner.right_rate) else wrong_answer(right))
    return words(manner.output_tokens.count(lots.output_tokens), lots.words)


def _usage(asked: Asked, draw: Draw, output: int, reasoning: int) -> Usage:
    """A prompt that came before is cached, all but its last token, which a model always reads again."""
    count = asked.count_input_tokens()
    return Usage(count, count - 1 if draw.nth else 0, output + reasoning, reasoning)


def _tool_call(asked: Asked, manner: Manner, draw: Draw, lots: Lots) -> ToolCall | None:
    if not asked.tools or not (tools := asked.functions()):
        return None
    choice, name = asked.choice()
    wanted = choice == "required" or (hits(lots.tool_call, manner.tool_call_rate) and not asked.brings_a_tool_result())
    if choice == "none" or not wanted:
        return None
    tool = next((one for one in tools if one.name == name), tools[pick(lots.tool, len(tools))])
    return ToolCall(draw.id, tool.name, msgspec.json.encode(_arguments(tool)).decode())


def _arguments(tool: Tool) -> Any:
    sample = _sample(tool.schema, 0)
    return sample if isinstance(sample, dict) else {}


def _sample(schema: Any, depth: int) -> Any:
    """A value that fits a JSON schema, as far as its type and properties say."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return None
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    for name in ("enum", "examples"):
        if isinstance(schema.get(name), list) and schema[name]:
            return schema[name][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    properties = schema.get("properties")
    if isinstance(properties, dict):
        return {name: _sample(one, depth + 1) for name, one in properties.items()}
    if kind == "array":
        return [_sample(schema.get("items"), depth + 1)]
    return {"object": {}, "string": "example", "integer": 1, "number": 1.5, "boolean": True}.get(str(kind))
