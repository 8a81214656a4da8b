"""A bare function as a target: sync or async, whole or streaming, text or a full response."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import reprlib
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing, closing, suppress
from copy import copy
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, TypeAlias

from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import ConfigurationError, TargetError
from steelyard.protocols import Identity, InvocationContext, Target
from steelyard.records import EvalCase, InvocationResponse
from steelyard.targets.conversation import time_per_output_token

Ask: TypeAlias = Callable[[EvalCase, InvocationContext], Any]

ASYNC_PARALLELISM = 10
"""How many calls of an async function are in flight where nothing is said; of any other function, one."""


def as_target(obj: Any) -> Target:
    """Return a Target unchanged, wrap a callable or an object with `invoke`; anything else is a ConfigurationError."""
    if inspect.isclass(obj):
        raise ConfigurationError(f"a target must be an instance, got the class {obj.__name__}")
    if isinstance(obj, Target):
        return obj
    if callable(getattr(obj, "invoke", None)):
        return _from_invoke(obj)
    if callable(obj):
        return CallableTarget(obj)
    given = f"{reprlib.repr(obj)} ({type(obj).__name__})"
    raise ConfigurationError(f"a target must be a callable or have a method `invoke`, got {given}")


def _from_invoke(obj: Any) -> CallableTarget:
    """An object whose method `invoke` answers; what else a Target has is taken from it where it is there."""
    return CallableTarget(
        obj.invoke,
        model_id=getattr(obj, "model_id", None),
        version=getattr(obj, "version", None),
        name=type(obj).__qualname__,
        parallelism=getattr(obj, "default_parallelism", None),
        identity=obj.identity() if callable(getattr(obj, "identity", None)) else None,
    )


class CallableTarget:
    """A function of `case` or `case, context` as a target.

    It returns text or an InvocationResponse, or yields pieces of text (then the first token is timed). `async def`
    runs on the event loop, anything else in a daemon thread. Bound arguments are not part of its identity: set
    `version` when they change an answer. An async function has ten calls in flight unless something else is said.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        model_id: str | None = None,
        version: str | None = None,
        name: str | None = None,
        parallelism: int | None = None,
        identity: Identity | None = None,
        gateway: Mapping[str, Any] | None = None,
    ) -> None:
        if parallelism is not None and parallelism < 1:
            raise ConfigurationError(f"parallelism must be >= 1, got {parallelism}")
        origin = _origin(function)
        self.function = function
        self.gateway = gateway
        """The APIs whose calls the function makes through `context.gateway`; None without a gateway."""
        self.model_id = model_id
        self.version = version
        self.name: str = name or origin.__qualname__
        self._ask, self._takes_context = _asking(function, self.name)
        self._is_coroutine = _is_kind(function, inspect.iscoroutinefunction)
        self._is_stream = _is_kind(function, inspect.isasyncgenfunction)
        usual = ASYNC_PARALLELISM if self._is_coroutine or self._is_stream else 1
        self.default_parallelism = usual if parallelism is None else parallelism
        self._threads = DaemonThreads()
        self._identity: Identity = identity or {
            "kind": "callable",
            "module": _module_name(origin),
            "qualname": origin.__qualname__,
            "version": version,
            "~source": _source_digest(origin),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the identity too: on another machine the source may not be available."""
        made_again = functools.partial(
            CallableTarget,
            model_id=self.model_id,
            version=self.version,
            name=self.name,
            parallelism=self.default_parallelism,
            identity=dict(self._identity),
            gateway=self.gateway,
        )
        return (made_again, (self.function,))

    def __repr__(self) -> str:
        return f"CallableTarget({self.name})"

    @property
    def excess(self) -> int:
        """Number of calls that outlived their timeout and still run in a thread."""
        return self._threads.excess

    @property
    def enforces(self) -> frozenset[str]:
        """The limits of a case that can hold: of a function that takes `context`, also those that it records."""
        return frozenset({"time", "turns", "tokens", "cost"} if self._takes_context else {"time"})

    def identity(self) -> Identity:
        """Where the function is defined and its declared version; a changed source only warns."""
        return self._identity

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Call the function for one case; times that it does not report are measured."""
        request_time = datetime.now(UTC)
        started = perf_counter()
        first = None
        try:
            if self._is_coroutine:
                answer = await self._ask(case, context)
            elif self._is_stream:
                pieces = _Pieces(case, request_time, started)
                answer, first = await self._join_async(self._ask(case, context), pieces)
            else:
                return await self._invoke_in_thread(case, context)
        except (SystemExit, asyncio.CancelledError) as error:
            self._raise_own_exit(error)
        return self._response(answer, case, request_time, started, first, perf_counter())

    async def _invoke_in_thread(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        stop = threading.Event()
        pieces = _Pieces(case)
        try:
            answer, request_time, started, first, ended = await self._threads.run(
                self._call_timed, case, context, stop, pieces
            )
        except asyncio.CancelledError as error:
            pieces.keep_in(error)
            raise
        finally:
            stop.set()
        if isinstance(answer, AsyncGenerator):
            answer, first = await self._join_async(answer, pieces)
            ended = perf_counter()
        elif inspect.isawaitable(answer):
            answer = await answer
            ended = perf_counter()
        return self._response(answer, case, request_time, started, first, ended)

    def _call_timed(
        self, case: EvalCase, context: InvocationContext, stop: threading.Event, pieces: _Pieces
    ) -> tuple[Any, datetime, float, float | None, float]:
        """Call the function where it runs, so that waiting for a thread is not counted as its time."""
        pieces.request_time = request_time = datetime.now(UTC)
        pieces.started = started = perf_counter()
        first = None
        answer = self._ask(case, context)
        if isinstance(answer, Generator):
            answer, first = self._join(answer, stop, pieces)
        return answer, request_time, started, first, perf_counter()

    def _join(
        self, stream: Generator[Any, Any, Any], stop: threading.Event, pieces: _Pieces
    ) -> tuple[str, float | None]:
        """Join the pieces into one text and time the first; stop early when `stop` is set."""
        try:
            with closing(stream):
                for piece in stream:
                    if stop.is_set():
                        break
                    pieces.add(self._checked_piece(piece))
        except Exception as error:
            pieces.keep_in(error)
            raise
        return "".join(pieces.texts), pieces.first

    async def _join_async(self, stream: AsyncGenerator[Any, Any], pieces: _Pieces) -> tuple[str, float | None]:
        try:
            async with aclosing(stream):
                async for piece in stream:
                    pieces.add(self._checked_piece(piece))
        except (Exception, asyncio.CancelledError) as error:
            pieces.keep_in(error)
            raise
        return "".join(pieces.texts), pieces.first

    def _checked_piece(self, piece: Any) -> str:
        if not isinstance(piece, str):
            raise TypeError(f"{self.name} must yield text, got {type(piece).__name__}")
        return piece

    def _response(
        self,
        answer: Any,
        case: EvalCase,
        request_time: datetime,
        started: float,
        first: float | None,
        ended: float,
    ) -> InvocationResponse:
        if isinstance(answer, str):
            return InvocationResponse(
                response_text=answer,
                input_prompt=case.prompt,
                time_to_first_token=None if first is None else first - started,
                time_to_last_token=ended - started,
                request_time=request_time,
            )
        if isinstance(answer, InvocationResponse):
            # A copy: the function may return the same object again.
            return _completed(copy(answer), case, request_time, ended - started)
        raise TypeError(f"{self.name} must return text or an InvocationResponse, got {type(answer).__name__}")

    def _raise_own_exit(self, error: BaseException) -> NoReturn:
        """Re-raise a real cancellation; an exit or cancellation raised by the function is a TargetError."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise error
        message = f"{self.name} raised {type(error).__name__}: {error}".removesuffix(": ")
        raise TargetError(message) from error


class _Pieces:
    """The text that a function has yielded so far: kept when its time is up, or when it fails."""

    def __init__(self, case: EvalCase, request_time: datetime | None = None, started: float = 0.0) -> None:
        self._case = case
        self.request_time = request_time
        self.started = started
        self.texts: list[str] = []
        self.first: float | None = None

    def add(self, piece: str) -> None:
        """Add a piece, and time the first that is not empty."""
        if self.first is None and piece:
            self.first = perf_counter()
        self.texts.append(piece)

    def keep_in(self, error: BaseException) -> None:
        """Have the error carry what came before it, unless it carries something already, or cannot."""
        if self.first is None or getattr(error, "partial", None) is not None:
            return
        partial = InvocationResponse(
            response_text="".join(self.texts),
            input_prompt=self._case.prompt,
            request_time=self.request_time,
            time_to_first_token=self.first - self.started,
        )
        with suppress(AttributeError, TypeError):
            error.partial = partial  # type: ignore[attr-defined]


def _completed(
    response: InvocationResponse, case: EvalCase, request_time: datetime, elapsed: float
) -> InvocationResponse:
    """Fill in what the function left out; what it set is kept."""
    if response.request_time is None:
        response.request_time = request_time
    if response.input_prompt is None:
        response.input_prompt = case.prompt
    if response.time_to_last_token is None:
        response.time_to_last_token = elapsed
    if response.time_per_output_token is None:
        response.time_per_output_token = time_per_output_token(
            response.time_to_first_token, response.time_to_last_token, response.num_tokens_output
        )
    return response


def _asking(function: Callable[..., Any], name: str) -> tuple[Ask, bool]:
    """Return how to call the function, and whether it takes the context: it is passed only to a parameter for it.

    That is a second positional parameter without a default, or one called `context`. A second parameter with
    another default (`temperature=0.5`) and `*args` are left alone.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} has no readable signature: wrap it in a function of `case`") from error
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    has_rest = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    required = [one for one in positional if one.default is one.empty]
    bound = function.keywords if isinstance(function, functools.partial) else {}
    named = [
        one
        for one in parameters
        if one.kind is one.KEYWORD_ONLY
        and (one.default is one.empty or one.name == "context")
        and one.name not in bound
    ]
    if (not positional and not has_rest) or len(required) > 2 or any(one.name != "context" for one in named):
        raise ConfigurationError(f"{name} must take `case` or `case, context`, got {inspect.signature(function)}")
    if named:
        return (lambda case, context: function(case, context=context)), True
    if len(required) == 2 or (len(positional) > 1 and positional[1].name == "context"):
        return function, True
    return (lambda case, context: function(case)), False  # noqa: ARG005 - the shape of Ask


def _origin(function: Callable[..., Any]) -> Any:
    """Return what is in a source file: the function inside partials, or the class of a callable object or `invoke`."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.ismethod(function) and function.__name__ == "invoke":
        return type(function.__self__)
    return function if hasattr(function, "__qualname__") else type(function)


def _is_kind(function: Callable[..., Any], predicate: Callable[[Any], bool]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return predicate(function) or predicate(getattr(function, "__call__", None))  # noqa: B004 - tests what kind it is


def _module_name(origin: Any) -> str | None:
    """Return the module's importable name: a script keeps its identity however it is started."""
    name: str | None = getattr(origin, "__module__", None)
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return name if file is None else Path(file).stem


def _source_digest(origin: Any) -> str | None:
    try:
        source = inspect.getsource(origin)
    except (OSError, TypeError, SyntaxError):
        return None
    return hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
