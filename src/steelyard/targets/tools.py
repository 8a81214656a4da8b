"""Tools: definitions in each API's shape, Python functions as tools, and the loop that carries out tool calls."""

from __future__ import annotations

import asyncio
import inspect
import time
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import ConfigurationError, TargetError
from steelyard.masking import masked_description
from steelyard.protocols import InvocationContext, Target, TargetWrapper
from steelyard.records import STOP_REASONS, TOKEN_FIELDS, EvalCase, InvocationResponse
from steelyard.targets.conversation import Call

ToolShape: TypeAlias = Literal["chat", "responses", "anthropic"]

_SCHEMA_KEYS = ("parameters", "input_schema")
_PLAIN_TEXT = ("custom", "custom_tool")
"""Kinds of calls whose arguments are plain text: their function gets it as `input`."""
_ANY_OBJECT: dict[str, Any] = {"type": "object", "properties": {}}

Messages: TypeAlias = list[dict[str, Any]]
ToolResult: TypeAlias = tuple[Call, str, bool]
"""The call, the text that the model gets back, and whether it failed."""

_FROM_FIRST_TURN = (
    "time_to_first_token",
    "time_to_first_content_token",
    "time_to_first_reasoning_token",
    "request_time",
    "input_payload",
)
_SUMMED = (
    *TOKEN_FIELDS,
    "time_queued",
    "retries",
    "resent",
    "cost",
)


def merged_tools(shape: ToolShape, tools: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the tools in an API's shape. Of two with one name the later one counts."""
    if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Iterable)):
        raise ConfigurationError(f"tools must be a list of tool definitions, got {tools!r:.200}")
    named: dict[Any, dict[str, Any]] = {}
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise ConfigurationError(f"tools[{number}] must be a mapping, got {tool!r:.200}")
        named[tool_name(tool) or f"#{number}"] = in_shape(shape, tool)
    return list(named.values())


def tool_name(tool: Mapping[str, Any]) -> str | None:
    """Return the name in a definition of any shape."""
    inner = tool.get("function")
    name = inner.get("name") if isinstance(inner, Mapping) else tool.get("name")
    return name if isinstance(name, str) else None


def in_shape(shape: ToolShape, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a function's definition to the wanted shape; a provider's tool (`web_search`, say) is unchanged."""
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
    """Describe a function as a tool: its docstring's first paragraph, its parameters, and their types where plain."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"functions[{name!r}] has no signature: describe it in tools") from error
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


class ModelTurn(msgspec.Struct):
    """One answer of the model within a conversation."""

    response: InvocationResponse
    calls: Sequence[Call] = ()
    began: float = 0.0
    """`time.monotonic()` when its request was handed to the socket."""
    waited: float = 0.0
    """Seconds before that: waiting for a send permit (rate limit), and in attempts that failed."""


class TurnCase(EvalCase, kw_only=True):
    """A case in the middle of a tool loop: `messages` are all turns so far, `take` requests the next one."""

    take: Callable[[], Awaitable[InvocationResponse]]


class OneTurn(TargetWrapper):
    """The model's next turn as a target, so that wrappers (retry, rate limit) apply to each call, not to the case."""

    def __init__(self, target: Target) -> None:
        self._target = target

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:  # noqa: ARG002 - a Target
        assert isinstance(case, TurnCase)
        return await case.take()


class Conversing(Target, Protocol):
    """A target that may need several calls to answer a case."""

    async def converse(self, case: EvalCase, context: InvocationContext, call: Target) -> InvocationResponse:
        """Return the answer; each turn of the model is requested through `call`."""


class TurnByTurn(TargetWrapper):
    """A target whose calls to the model all go through `call`, a wrapped `OneTurn` of it."""

    _target: Conversing

    def __init__(self, target: Conversing, call: Target) -> None:
        self._target = target
        self._call = call

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        return await self._target.converse(case, context, self._call)


TakeTurn: TypeAlias = Callable[[Messages, Messages], Awaitable[ModelTurn]]
"""Takes the model's last turn, to be sent back, and the results of its tool calls; returns its next turn."""


class Functions:
    """Python functions by tool name. Sync ones run in daemon threads."""

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
        """Return tools for the functions that none of these tools describes, made from their signatures."""
        described = set(map(tool_name, tools))
        return [schema_of(name, function) for name, function in self._functions.items() if name not in described]

    def identity(self) -> dict[str, str]:
        """Where each function is defined: another function may give another answer."""
        return {name: _home(function) for name, function in sorted(self._functions.items())}

    async def call(self, call: Call) -> ToolResult:
        """Call the function; anything wrong with the call is reported to the model, which may correct it."""
        function = self._functions.get(call.name)
        if function is None:
            return (call, f"error: there is no tool named {call.name!r}", True)
        try:
            arguments: Any = {"input": call.arguments}
            if call.kind not in _PLAIN_TEXT:
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
        except Exception as error:  # noqa: BLE001 - a tool is the user's code: the error is reported to the model
            return (call, f"error: {masked_description(error)}", True)

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
    """Run the tool loop: the last answer with the whole trajectory; an error carries what was done so far.

    A model that still asks for tools after `max_turns`, or at a limit of its case, has answered: the answer is what
    there is, with the limit as its stop reason.
    """
    if context.limits is not None and context.limits.turns is not None:
        max_turns = min(max_turns, context.limits.turns)
    turns: list[ModelTurn] = []
    trajectory: Messages = []
    given: Messages = []
    results: Messages = []
    try:
        while True:
            await _stop_if_cancelled(context)
            turn = await take_turn(given, results)
            turns.append(turn)
            trajectory += turn.response.messages or []
            if not turn.calls:
                return joined(turns, trajectory)
            if (limit := _limit_reached(turns, max_turns, context)) is not None:
                response = joined(turns, trajectory)
                response.stop_reason = limit
                response.response_text = response.response_text or ""
                return response
            results = as_messages([await functions.call(call) for call in turn.calls])
            given = turn.response.messages or []
            trajectory += results
    except (TargetError, asyncio.CancelledError) as error:  # keep the turns so far: they are paid for
        partial = _so_far(turns, trajectory, getattr(error, "partial", None))
        error.partial = partial  # type: ignore[union-attr]
        raise


def _limit_reached(turns: Sequence[ModelTurn], max_turns: int, context: InvocationContext) -> str | None:
    """The stop reason of a loop whose model asks for more tools than it may; None while it may go on."""
    if len(turns) >= max_turns:
        return STOP_REASONS["turns"]
    limits = context.limits
    if limits is None:
        return None
    responses = [turn.response for turn in turns]
    tokens = sum((one.num_tokens_input or 0) + (one.num_tokens_output or 0) for one in responses)
    if limits.tokens is not None and tokens > limits.tokens:
        return STOP_REASONS["tokens"]
    if limits.cost is not None and sum(one.cost or 0.0 for one in responses) > limits.cost:
        return STOP_REASONS["cost"]
    return None


def joined(turns: Sequence[ModelTurn], trajectory: Messages) -> InvocationResponse:
    """Combine all turns into one response: the last one's text, all tokens, times from the first request on.

    Rate-limit waits and retry backoff are excluded. The time per token counts only generation: tools and the waits
    for the next turn are excluded too.
    """
    first, last = turns[0].response, turns[-1].response
    if len(turns) == 1:
        return first
    responses = [turn.response for turn in turns]
    if last.time_to_last_token is not None:
        last.time_to_last_token += turns[-1].began - turns[0].began - sum(turn.waited for turn in turns[1:])
    last.time_per_output_token = _time_per_token(responses)
    for name in _FROM_FIRST_TURN:
        setattr(last, name, getattr(first, name))
    for name in _SUMMED:
        reported = [value for response in responses if (value := getattr(response, name)) is not None]
        setattr(last, name, sum(reported) if reported else None)
    last.reasoning_in_text = any(response.reasoning_in_text for response in responses)
    last.fields_left_out = [name for response in responses for name in response.fields_left_out or ()] or None
    last.tokens_estimated = any(response.tokens_estimated for response in responses)
    last.messages = trajectory
    return last


def _time_per_token(responses: Sequence[InvocationResponse]) -> float | None:
    """Return the time per token over all turns, weighted by their tokens."""
    timed = [
        (response.time_per_output_token, response.num_tokens_output - 1)
        for response in responses
        if response.time_per_output_token is not None and response.num_tokens_output is not None
    ]
    tokens = sum(count for _, count in timed)
    return sum(seconds * count for seconds, count in timed) / tokens if tokens else None


def _so_far(
    turns: list[ModelTurn], trajectory: Messages, partial: InvocationResponse | None
) -> InvocationResponse | None:
    """Return what an unfinished loop has produced: the trajectory and everything paid for."""
    if not turns:
        return partial
    if partial is None:
        response = joined(turns, trajectory)
        response.messages = trajectory
        return response
    trajectory += partial.messages or []
    began = turns[-1].began if partial.time_to_last_token is None else time.monotonic() - partial.time_to_last_token
    return joined([*turns, ModelTurn(partial, began=began)], trajectory)


async def _stop_if_cancelled(context: InvocationContext) -> None:
    """Stop between turns when the run is cancelled, even if nothing was awaited that would have raised."""
    if context.token is not None and context.token.cancelled:
        await asyncio.sleep(0)  # lets a pending cancellation of this task arrive, which is the better error
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
