"""What the pretend model says: an answer, a refusal or a tool call, token by token, and what it costs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from steelyard.errors import SuiteError
from steelyard.mock.options import RequestOptions
from steelyard.mock.randomness import Draw, Lots, hits, pick

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


def compose(asked: Asked, manner: RequestOptions, draw: Draw, lots: Lots, book: AnswerBook | None) -> Answer:
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


def _text(asked: Asked, manner: RequestOptions, lots: Lots, book: AnswerBook | None) -> Sequence[str]:
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


def _tool_call(asked: Asked, manner: RequestOptions, draw: Draw, lots: Lots) -> ToolCall | None:
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


_PROMPTS = ("prompt", "question", "messages")
_ANSWERS = ("answer", "expected")
_WRONG = ("I do not know.", "?", "-")


class AnswerBook:
    """Finds the answer to a prompt: one that is known, or one that contains a known prompt, as templates make them."""

    def __init__(self, answers: dict[str, str]) -> None:
        self._answers = answers
        self._longest_first = sorted(answers, key=len, reverse=True)

    def right(self, prompt: str) -> str | None:
        """The right answer, where the book has one."""
        prompt = prompt.strip()
        found = self._answers.get(prompt)
        if found is None and prompt:
            known = next((one for one in self._longest_first if one in prompt), None)
            return None if known is None else self._answers[known]
        return found


def wrong_answer(right: str) -> str:
    """An answer that does not contain the right one, so that a lenient scorer finds it wrong as well."""
    folded = right.casefold()
    return next((one for one in _WRONG if not folded or folded not in one.casefold()), "#")


def read_book(path: str | os.PathLike[str]) -> AnswerBook:
    """The book in a file: one JSON object a line, with `prompt` and `answer`, or a case's `expected`."""
    return AnswerBook(dict(_entries(Path(path))))


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _entry(line, path, number)
    except OSError as error:
        raise SuiteError(f"cannot read the answers: {error.strerror}", path=path) from error


def _entry(line: bytes, path: Path, number: int) -> tuple[str, str]:
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"not a JSON object: {error}", path=path, line=number) from error
    prompt = next((record[name] for name in _PROMPTS if record.get(name)), None)
    answer = next((record[name] for name in _ANSWERS if record.get(name) is not None), None)
    if isinstance(prompt, list):
        prompt = next(("".join(texts(turn.get("content"))) for turn in reversed(prompt) if _is_users(turn)), None)
    if not isinstance(prompt, str) or answer is None:
        raise SuiteError("an answer needs `prompt` (text) and `answer` or `expected`", path=path, line=number)
    if isinstance(answer, list) and answer:
        answer = answer[0]
    return prompt.strip(), answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()


def _is_users(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "user"


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
