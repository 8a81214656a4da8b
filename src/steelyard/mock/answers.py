"""Answers of the simulated model: reads the request, and composes a text, a refusal or a tool call, and the usage."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from steelyard.errors import SuiteError
from steelyard.mock.options import RequestOptions
from steelyard.mock.randomness import RandomNumbers, RequestRandomness, hits, pick

Stop = Literal["stop", "length", "tool_calls", "refusal"]
_FILLER_TEXT = (
    "the weight of a thing is told by its distance from the pivot and a long arm with small counterpoise will "
    "balance what no hand could lift so merchants trusted it for grain wool and iron until spring scales came"
)
_WORDS = _FILLER_TEXT.split()
_NEXT_WORDS = [" " + word for word in _WORDS * 2]
_REFUSAL = ("I", " am", " sorry", ",", " but", " I", " cannot", " help", " with", " that", ".")
_WRONG_ANSWERS = ("I do not know.", "?", "-")
_PROMPT_FIELDS = ("prompt", "question", "messages")
_ANSWER_FIELDS = ("answer", "expected")
_MAX_SCHEMA_DEPTH = 8


class StreamOptions(msgspec.Struct):
    """An OpenAI request's options for its stream."""

    include_usage: bool | None = None


class Tool(msgspec.Struct):
    """A function that a request offers, with the JSON schema of its arguments."""

    name: str
    schema: dict[str, Any]


class ParsedRequest(msgspec.Struct, kw_only=True):
    """The request fields that the mock uses, of all three APIs: each request has some of them."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[str] | None = None
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
        if self.prompt is not None:
            prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
            return [{"role": "user", "content": prompt} for prompt in prompts]
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return self.input or []

    @property
    def token_limit(self) -> int | None:
        """The most tokens that the answer may have."""
        return self.max_tokens or self.max_completion_tokens or self.max_output_tokens

    def last_user_text(self) -> str:
        """The user's last message."""
        for turn in reversed(self.turns):
            if turn.get("role") == "user":
                return "".join(texts(turn.get("content")))
        return ""

    def count_input_tokens(self) -> int:
        """Count the input tokens, as four characters each."""
        size = len(self.instructions or "")
        if self.system:
            size += sum(map(len, texts(self.system)))
        for turn in self.turns:
            content = turn.get("content")
            size += len(content) if isinstance(content, str) else sum(map(len, texts(content)))
        return max(1, (size + 3) // 4)

    def has_tool_result(self) -> bool:
        """Whether the last turn is a tool's result: then an answer is due, not another call."""
        last = self.turns[-1] if self.turns else {}
        if last.get("role") == "tool" or last.get("type") == "function_call_output":
            return True
        content = last.get("content")
        return isinstance(content, list) and any(
            isinstance(part, dict) and part.get("type") == "tool_result" for part in content
        )

    def functions(self) -> list[Tool]:
        """List the functions that the request offers, in the format of any of the three APIs."""
        found = []
        for tool in self.tools or []:
            inner = tool.get("function")
            function = inner if isinstance(inner, dict) else tool
            if isinstance(name := function.get("name"), str):
                schema = function.get("parameters") or function.get("input_schema")
                found.append(Tool(name, schema if isinstance(schema, dict) else {}))
        return found

    def choice(self) -> tuple[str, str | None]:
        """Read the tool choice: `none`, `auto` or `required`, and the name of a function that must be called."""
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return (choice or "auto"), None
        function = choice.get("function")
        name = choice.get("name") or (function.get("name") if isinstance(function, dict) else None)
        kind = choice.get("type")
        if isinstance(name, str):
            return "required", name
        return ("required" if kind == "any" else str(kind)), None


_decoder = msgspec.json.Decoder(ParsedRequest)


def parse_request(body: bytes) -> ParsedRequest:
    """Parse a request's body; raises msgspec.DecodeError or ValidationError."""
    return _decoder.decode(body)


def texts(content: Any) -> Iterator[str]:
    """Iterate over the texts of a message, plain or in parts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                yield text


class AnswerUsage(msgspec.Struct, gc=False):
    """Tokens in (of them cached) and out (of them reasoning)."""

    input: int
    cached: int
    output: int
    reasoning: int


class AnswerToolCall(msgspec.Struct, gc=False):
    """A function that the model wants called."""

    id: str
    name: str
    arguments: str
    """JSON."""


class SimulatedAnswer(msgspec.Struct, gc=False):
    """The whole answer to one request."""

    id: str
    model: str
    created: int
    reasoning: Sequence[str]
    tokens: Sequence[str]
    """Of the text, of the refusal, or of the tool call's arguments."""
    tool_call: AnswerToolCall | None
    stop: Stop
    usage: AnswerUsage | None
    include_usage: bool
    """Whether a chat stream should report the usage."""

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def steps(self) -> int:
        return len(self.reasoning) + len(self.tokens)


def compose(
    request: ParsedRequest,
    options: RequestOptions,
    randomness: RequestRandomness,
    numbers: RandomNumbers,
    answer_file: AnswerFile | None,
) -> SimulatedAnswer:
    """Compose the answer to a request from its options and random numbers."""
    call = _tool_call(request, options, randomness, numbers)
    stop: Stop = "stop"
    if call is not None:
        tokens: Sequence[str] = split(call.arguments)
        stop = "tool_calls"
    elif hits(numbers.refusal, options.refusal_rate):
        tokens, stop = _REFUSAL, "refusal"
    else:
        tokens = _text(request, options, numbers, answer_file)
        limit = request.token_limit
        if limit is not None and len(tokens) > limit:
            tokens, stop = tokens[: max(0, limit)], "length"
    reasoning = words(options.reasoning_tokens.draw_count(numbers.reasoning_tokens), numbers.words)
    return SimulatedAnswer(
        id=randomness.id,
        model=request.model or "mock",
        created=int(time.time()),
        reasoning=reasoning,
        tokens=tokens,
        tool_call=call,
        stop=stop,
        usage=_usage(request, randomness, len(tokens), len(reasoning)) if options.usage else None,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


def words(count: int, number: int) -> Sequence[str]:
    """Return `count` tokens of filler text, from a start that the random number picks."""
    if count <= 0:
        return ()
    start = pick(number, len(_WORDS))
    first = _WORDS[start]
    if count <= len(_WORDS):
        return [first, *_NEXT_WORDS[start + 1 : start + count]]
    return [first, *(_NEXT_WORDS[(start + at) % len(_WORDS)] for at in range(1, count))]


def split(text: str) -> list[str]:
    """Split a text into pieces the size of tokens."""
    return [text[at : at + 4] for at in range(0, len(text), 4)]


def _text(
    request: ParsedRequest, options: RequestOptions, numbers: RandomNumbers, answer_file: AnswerFile | None
) -> Sequence[str]:
    if options.answer is not None:
        return split(options.answer)
    right = answer_file.right(request.last_user_text()) if answer_file is not None else None
    if right is not None:
        return split(right if hits(numbers.right, options.right_rate) else wrong_answer(right))
    return words(options.output_tokens.draw_count(numbers.output_tokens), numbers.words)


def _usage(request: ParsedRequest, randomness: RequestRandomness, output: int, reasoning: int) -> AnswerUsage:
    """Count tokens. A prompt that came before is cached, all but its last token, which a model always reads again."""
    count = request.count_input_tokens()
    return AnswerUsage(count, count - 1 if randomness.nth else 0, output + reasoning, reasoning)


def _tool_call(
    request: ParsedRequest, options: RequestOptions, randomness: RequestRandomness, numbers: RandomNumbers
) -> AnswerToolCall | None:
    if not request.tools or not (tools := request.functions()):
        return None
    choice, name = request.choice()
    wanted = choice == "required" or (hits(numbers.tool_call, options.tool_call_rate) and not request.has_tool_result())
    if choice == "none" or not wanted:
        return None
    tool = next((one for one in tools if one.name == name), tools[pick(numbers.tool, len(tools))])
    return AnswerToolCall(randomness.id, tool.name, msgspec.json.encode(_arguments(tool)).decode())


def _arguments(tool: Tool) -> Any:
    sample = _sample(tool.schema, 0)
    return sample if isinstance(sample, dict) else {}


def _sample(schema: Any, depth: int) -> Any:
    """Make a value that fits a JSON schema, as far as its type and properties go."""
    if not isinstance(schema, dict) or depth > _MAX_SCHEMA_DEPTH:
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


class AnswerFile:
    """The answers to known prompts; a prompt may also contain a known one, as templates make them."""

    def __init__(self, answers: dict[str, str]) -> None:
        self._answers = answers
        self._longest_first = sorted(answers, key=len, reverse=True)

    def right(self, prompt: str) -> str | None:
        """Find the right answer to a prompt, if the file has one."""
        prompt = prompt.strip()
        found = self._answers.get(prompt)
        if found is None and prompt:
            known = next((one for one in self._longest_first if one in prompt), None)
            return None if known is None else self._answers[known]
        return found


def read_answer_file(path: str | os.PathLike[str]) -> AnswerFile:
    """Read a file with one JSON object per line, with `prompt` and `answer`, or a case's `expected`."""
    return AnswerFile(dict(_entries(Path(path))))


def wrong_answer(right: str) -> str:
    """Make an answer that does not contain the right one, so that a lenient scorer finds it wrong as well."""
    folded = right.casefold()
    return next((one for one in _WRONG_ANSWERS if not folded or folded not in one.casefold()), "#")


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
    prompt = next((record[name] for name in _PROMPT_FIELDS if record.get(name)), None)
    answer = next((record[name] for name in _ANSWER_FIELDS if record.get(name) is not None), None)
    if isinstance(prompt, list):
        prompt = next(("".join(texts(turn.get("content"))) for turn in reversed(prompt) if _is_user(turn)), None)
    if not isinstance(prompt, str) or answer is None:
        raise SuiteError("an answer needs `prompt` (text) and `answer` or `expected`", path=path, line=number)
    if isinstance(answer, list) and answer:
        answer = answer[0]
    return prompt.strip(), answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()


def _is_user(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "user"
