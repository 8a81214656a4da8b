"""Tool definitions: from one API's shape to another's, and from a Python function's signature."""

from __future__ import annotations

import asyncio
import inspect
import time
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import ConfigurationError, TargetError, describe
from steelyard.protocols import InvocationContext, Target, TargetWrapper
from steelyard.records import EvalCase, InvocationResponse
from steelyard.targets.wire import Call

ToolShape: TypeAlias = Literal["chat", "responses", "anthropic"]

_SCHEMA_KEYS = ("parameters", "input_schema")
_ANY_OBJECT: dict[str, Any] = {"type": "object", "properties": {}}


def merged_tools(shape: ToolShape, tools: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools in an API's own shape. Of two with one name the later one stands."""
    if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Iterable)):
        raise ConfigurationError(f"tools must be a list of tool definitions, got {tools!r:.200}")
    named: dict[Any, dict[str, Any]] = {}
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise ConfigurationError(f"tools[{number}] must be a mapping, got {tool!r:.200}")
        named[tool_name(tool) or f"#{number}"] = in_shape(shape, tool)
    return list(named.values())


def tool_name(tool: Mapping[str, Any]) -> str | None:
    """The name in a definition of any shape."""
    inner = tool.get("function")
    name = inner.get("name") if isinstance(inner, Mapping) else tool.get("name")
    return name if isinstance(name, str) else None


def in_shape(shape: ToolShape, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function's definition in the wanted shape; a provider's own tool (`web_search`, say) as it is."""
    if tool.get("type", "function") not in ("function", "custom") or tool.get("format") is not None:
        return dict(tool)
    inner = tool.get("function")
    fields = dict(inner) if isinstance(inner, Mapping) else {key: tool[key] for key in tool if key != "type"}
    if "custom" in tool or not isinstance(fields.get("name"), str):
        return dict(tool)
    schema = next((fields.pop(key) for key in _SCHEMA_KEYS if key in fields), _ANY_OBJECT)
    if shape == "anthropic":
        fields.pop("strict", None)
        return {**fields, "input_schema": schema}
    if shape == "responses":
        return {"type": "function", **fields, "parameters": schema}
    return {"type": "function", "function": {**fields, "parameters": schema}}


def schema_of(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """A function as a tool: its docstring's first paragraph, its parameters, and their types where they are plain."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"functions[{name!r}] has no signature: give its schema in tools") from error
    hints = _hints(function)
    properties: dict[str, Any] = {}
    required = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigurationError(f"functions[{name!r}]: {parameter.name} cannot be given by name, as models do")
        properties[parameter.name] = _type_schema(hints.get(parameter.name, Any))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    described = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ").strip()
    schema = {"type": "object", "properties": properties, "required": required}
    return {"name": name, **({"description": described} if described else {}), "parameters": schema}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - an annotation may name anything; without types the model sees names alone
        return {}


def _type_schema(hint: Any) -> dict[str, Any]:
    try:
        return {} if hint is Any else msgspec.json.schema(hint)
    except (TypeError, NotImplementedError):
        return {}


Messages: TypeAlias = list[dict[str, Any]]
ToolResult: TypeAlias = tuple[Call, str, bool]
"""The call, what the model is told of it, and whether it failed."""


class Turn(msgspec.Struct):
    """One answer of the model within a conversation."""

    response: InvocationResponse
    calls: Sequence[Call] = ()
    began: float = 0.0
    """The reading of `time.monotonic()` when its request was handed to the socket."""
    waited: float = 0.0
    """Seconds before that in which it was wanted: for leave to send, and over tries that failed."""


class TurnCase(EvalCase, kw_only=True):
    """A case as far as it has come: `messages` are all turns so far, and `take` asks for the next one."""

    take: Callable[[], Awaitable[InvocationResponse]]


class OneTurn(TargetWrapper):
    """The model's next turn as a target of its own, so that what is put around it meets every call and not the case."""

    def __init__(self, target: Target) -> None:
        self._target = target

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:  # noqa: ARG002 - a Target
        assert isinstance(case, TurnCase)
        return await case.take()


class Conversing(Target, Protocol):
    """A target that may need several calls to answer a case."""

    async def converse(self, case: EvalCase, context: InvocationContext, call: Target) -> InvocationResponse:
        """The answer, each turn of the model asked for through `call`."""


class TurnByTurn(TargetWrapper):
    """A target whose every call to the model goes through `call`: what stands around a `OneTurn` of it."""

    _target: Conversing

    def __init__(self, target: Conversing, call: Target) -> None:
        self._target = target
        self._call = call

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        return await self._target.converse(case, context, self._call)


TakeTurn: TypeAlias = Callable[[Messages], Awaitable[Turn]]


class Functions:
    """Python functions by the names of the tools they stand for. Sync ones run in daemon threads."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        if not isinstance(functions, Mapping):
            raise ConfigurationError(f"functions must be a mapping of tool names to functions, got {functions!r:.200}")
        for name, function in functions.items():
            if not isinstance(name, str) or not callable(function):
                raise ConfigurationError(f"functions[{name!r}] must be a function, got {function!r:.200}")
        self._functions = dict(functions)
        self._threads = DaemonThreads()

    def __len__(self) -> int:
        return len(self._functions)

    @property
    def excess(self) -> int:
        return self._threads.excess

    def undescribed(self, tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Tools made of the signatures of those functions that none of these tools describes."""
        described = set(map(tool_name, tools))
        return [schema_of(name, function) for name, function in self._functions.items() if name not in described]

    def identity(self) -> dict[str, str]:
        """Where each function lives: another function, another answer."""
        return {name: _home(function) for name, function in sorted(self._functions.items())}

    async def call(self, call: Call) -> ToolResult:
        """What the function gave; anything wrong with the call is told to the model, which may mend it."""
        function = self._functions.get(call.name)
        if function is None:
            return (call, f"error: there is no tool named {call.name!r}", True)
        try:
            arguments = msgspec.json.decode(call.arguments) if call.arguments.strip() else {}
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return (call, f"error: the arguments are not JSON: {error}", True)
        if not isinstance(arguments, dict):
            return (call, f"error: the arguments must be an object, got {type(arguments).__name__}", True)
        try:
            return (call, _as_text(await self._run(function, arguments)), False)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return (call, "error: the tool was cancelled", True)
        except Exception as error:  # noqa: BLE001 - a tool is the user's code; the model is told and goes on
            return (call, f"error: {describe(error)}", True)

    async def _run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        value = await self._threads.run(lambda: function(**arguments))
        return await value if inspect.isawaitable(value) else value


async def run_loop(
    take_turn: TakeTurn,
    functions: Functions,
    as_messages: Callable[[Sequence[ToolResult]], Messages],
    context: InvocationContext,
    *,
    max_turns: int,
) -> InvocationResponse:
    """The model's last answer, with the whole trajectory; what ends the loop before brings along how far it came."""
    turns: list[Turn] = []
    trajectory: Messages = []
    additions: Messages = []
    try:
        while True:
            await _stop_if_cancelled(context)
            turn = await take_turn(additions)
            turns.append(turn)
            trajectory += turn.response.messages or []
            if not turn.calls:
                return joined(turns, trajectory)
            if len(turns) == max_turns:
                raise TargetError(f"the model still asks for tools after {max_turns} turns (max_turns)")
            results = as_messages([await functions.call(call) for call in turn.calls])
            additions = [*(turn.response.messages or []), *results]
            trajectory += results
    except (TargetError, asyncio.CancelledError) as error:  # the case's time may be up: its turns are paid for
        partial = _so_far(turns, trajectory, getattr(error, "partial", None), max_turns)
        error.partial = partial  # type: ignore[union-attr]
        raise


def joined(turns: Sequence[Turn], trajectory: Messages) -> InvocationResponse:
    """One response of all turns: the last one's text, all tokens, the times from the first request on.

    Waiting for leave to send, and between tries, is left out of them. The time per token counts only while the model
    speaks: tools and the waits for a next turn are left out too.
    """
    first, last = turns[0].response, turns[-1].response
    if len(turns) == 1:
        return first
    responses = [turn.response for turn in turns]
    if last.time_to_last_token is not None:
        last.time_to_last_token += turns[-1].began - turns[0].began - sum(turn.waited for turn in turns[1:])
    last.time_per_output_token = _time_per_token(responses)
    for name in _OF_THE_FIRST_TURN:
        setattr(last, name, getattr(first, name))
    for name in _SUMMED:
        told = [value for response in responses if (value := getattr(response, name)) is not None]
        setattr(last, name, sum(told) if told else None)
    last.tokens_estimated = any(response.tokens_estimated for response in responses)
    last.messages = trajectory
    return last


_OF_THE_FIRST_TURN = (
    "time_to_first_token",
    "time_to_first_content_token",
    "time_to_first_reasoning_token",
    "request_time",
    "input_payload",
)
_SUMMED = (
    "num_tokens_input",
    "num_tokens_output",
    "num_tokens_input_cached",
    "num_tokens_output_reasoning",
    "num_tokens_input_cache_write",
    "time_queued",
    "retries",
    "cost",
)


def _time_per_token(responses: Sequence[InvocationResponse]) -> float | None:
    """Of all turns together, each with as much weight as it has tokens."""
    timed = [
        (response.time_per_output_token, response.num_tokens_output - 1)
        for response in responses
        if response.time_per_output_token is not None and response.num_tokens_output is not None
    ]
    tokens = sum(count for _, count in timed)
    return sum(seconds * count for seconds, count in timed) / tokens if tokens else None


def _so_far(
    turns: list[Turn], trajectory: Messages, partial: InvocationResponse | None, max_turns: int
) -> InvocationResponse | None:
    """What an unfinished loop leaves behind: the trajectory and all that was paid for."""
    if not turns:
        return partial
    if partial is None:
        response = joined(turns, trajectory)
        response.messages = trajectory
        if len(turns) == max_turns:
            response.stop_reason = "max_turns"
        return response
    trajectory += partial.messages or []
    began = turns[-1].began if partial.time_to_last_token is None else time.monotonic() - partial.time_to_last_token
    return joined([*turns, Turn(partial, began=began)], trajectory)


async def _stop_if_cancelled(context: InvocationContext) -> None:
    """End between turns when the run is over, even if nothing was awaited that would have told us."""
    if context.token is not None and context.token.cancelled:
        await asyncio.sleep(0)  # lets a cancellation of this task that is on its way arrive: that is the better end
        raise TargetError(f"cancelled between turns: {context.token.reason}")


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _home(function: Callable[..., Any]) -> str:
    named = inspect.unwrap(getattr(function, "func", function))
    return f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', type(function).__name__)}"
