"""One case from question to record: asked within its time limit, scored, and never the end of a run."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from copy import copy, deepcopy
from datetime import datetime
from functools import partial
from numbers import Real
from operator import itemgetter
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import astuple

from steelyard.errors import TargetError
from steelyard.journal.writer import encode_unsealed
from steelyard.masking import masked_description, user_traceback
from steelyard.protocols import Cancellation, Emit, InvocationContext, RemoteTarget, Session, StartedPrograms, Target
from steelyard.records import (
    CUT_OFF,
    LAST_COMMON_FIELD,
    MAX_NUMBER,
    RECORD_VERSION,
    EvalCase,
    FailedAttempt,
    InvocationResponse,
    Job,
    Record,
    ResponseFields,
    Score,
    Status,
    UnscoredAnswer,
    bounded,
)
from steelyard.scoring.pipeline import ScoringPipeline
from steelyard.stats.formatting import counted
from steelyard.workspace.attempts import Workspaces

Task = asyncio.Task[Any]
_FIELDS = ResponseFields.__struct_fields__


class Deadlines:
    """Gives every call the same number of seconds.

    All limits are equal, so calls expire in the order in which they began, and one timer, set to the
    oldest, serves them all. `asyncio.timeout` would cost a timer for each call.

    Usage: `begin(task)`, await the call, and in any case `end(task)`: it says whether the time was up, and
    a CancelledError that this object asked for is then to be read as a timeout. Between the two, the clock that
    `begin` returns can be stopped and restarted: such a call leaves the order, and gets its own timer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._running: dict[Task, CallClock] = {}
        self._apart: dict[Task, CallClock] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __reduce__(self) -> tuple[type[Deadlines], tuple[float]]:
        """Timers do not travel: a copy starts with none."""
        return (Deadlines, (self.seconds,))

    def begin(self, task: Task) -> CallClock:
        """Start the clock on what this task does next, and return it; of no effect once that call has ended."""
        deadline = time.monotonic() + self.seconds
        self._running[task] = clock = CallClock(task, deadline, self._running, self._apart)
        if self._timer is None:
            self._set_timer(deadline)
        return clock

    def end(self, task: Task) -> bool:
        """Stop the clock; True when the call was cancelled for its time and nobody else wants the task to end."""
        if self._running.pop(task, None) is not None:
            return False
        if (clock := self._apart.pop(task, None)) is not None:
            clock.close()
            return False
        return not task.uncancel()

    def _set_timer(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._expire)

    def _expire(self) -> None:
        """Cancel the calls whose time is up, and set the timer to the oldest of the rest."""
        self._timer = None
        now = time.monotonic()
        late = []
        for task, clock in self._running.items():
            if clock.deadline > now:
                self._set_timer(clock.deadline)
                break
            late.append(task)
        for task in late:
            del self._running[task]
            task.cancel()


class CallClock(msgspec.Struct, eq=False):
    """The time limit of one call, which can be stopped while it waits for something else than the target.

    Parts of a call that wait at the same time may each stop it: it runs again when all of them have started it.
    """

    task: Task
    deadline: float
    running: dict[Task, CallClock]
    apart: dict[Task, CallClock]
    """The calls whose clock was stopped: they are not in the order of the rest."""
    left: float = 0.0
    stops: int = 0
    timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Stop the clock."""
        self.stops += 1
        if self.stops > 1:
            return
        # The same task runs one call after the other: a clock that outlived its call must not stop the next one's.
        if self.running.get(self.task) is self:
            del self.running[self.task]
            self.apart[self.task] = self
        elif self.apart.get(self.task) is not self:
            return
        self.left = self.deadline - time.monotonic()
        self._cancel_timer()

    def start(self) -> None:
        """Restart the clock with the time that is left."""
        if self.stops == 0:
            return
        self.stops -= 1
        if self.stops or self.apart.get(self.task) is not self:
            return
        self.deadline = time.monotonic() + self.left
        self.timer = asyncio.get_running_loop().call_later(max(0.0, self.left), self._expire)

    def close(self) -> None:
        """The call has ended."""
        self._cancel_timer()

    def _expire(self) -> None:
        if (early := self.deadline - time.monotonic()) > 0:  # timers of some loops count in whole milliseconds
            self.timer = asyncio.get_running_loop().call_later(early, self._expire)
            return
        self._cancel_timer()
        del self.apart[self.task]
        self.task.cancel()

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def _readable_types(hint: Any) -> tuple[type, ...]:
    """The types of a field's values that can be read back from the journal, its own first; none where any can."""
    if hint is Any:
        return ()
    own, *others = (get_origin(part) or part for part in (get_args(hint) if isinstance(hint, UnionType) else (hint,)))
    return (own, *((int,) if own is float else ()), *others)


_SHAPE = {name: _readable_types(hint) for name, hint in get_type_hints(ResponseFields).items() if name in _FIELDS}
_NUMBERS = tuple(
    (place, name)
    for place, name in enumerate(InvocationResponse.__struct_fields__)
    if name in _SHAPE and _SHAPE[name] and _SHAPE[name][0] in (int, float)
)
"""The fields that hold numbers, with their places in a response."""


RecordMaker = Callable[[Job, InvocationResponse, Status, int, float, list[Score]], Record]


def _record_maker(names: Iterable[str]) -> RecordMaker:
    """A function that makes a record with these fields of a response.

    It is written out as code, as it runs for every case: passing the fields in a dict takes twice as long.
    """
    fields = "".join(f", {name}=response.{name}" for name in names)
    head = "version, job.case.id, job.trial, job.index, status, attempts, elapsed, job.case_fp, job.scored_by, 0.0"
    code = f"lambda job, response, status, attempts, elapsed, scores: Record({head}, scores=scores{fields})"
    maker: RecordMaker = eval(code, {"Record": Record, "version": RECORD_VERSION})
    return maker


_record_of_any = _record_maker(_FIELDS)
_FACTORY_MADE = {field.name for field in msgspec.structs.fields(ResponseFields) if callable(field.default_factory)}
"""Fields that are cheaper to pass, even when they are None, than to leave to their default factory."""


_COMMON = InvocationResponse.__struct_fields__.index(LAST_COMMON_FIELD) + 1
_RARE_DEFAULTS = astuple(InvocationResponse())[_COMMON:]
"""What the other fields hold in most responses."""


class _Shape:
    """A combination of types that a response's fields may have: which of them have a value, and which are numbers.

    It is of all fields, or of the common ones in a response whose other fields have their defaults.
    """

    __slots__ = ("numbers_of", "record_of")

    def __init__(self, values: tuple[Any, ...]) -> None:
        places = [place for place, _ in _NUMBERS if place < len(values) and values[place] is not None]
        # The first one twice: of a single place an itemgetter would make no tuple.
        numbers_of = itemgetter(places[0], *places) if places else itemgetter(slice(0))
        self.numbers_of: Callable[[tuple[Any, ...]], tuple[float, ...]] = numbers_of
        filled = dict(zip(InvocationResponse.__struct_fields__, values, strict=False))
        names = (name for name in _FIELDS if filled.get(name) is not None or name in _FACTORY_MADE)
        self.record_of = _record_maker(names)


_GOOD_SHAPES: dict[tuple[type, ...], _Shape] = {}
"""Combinations of types that were checked before. There are few, and looking one up is cheap."""


class CaseRunner:
    """Asks the target, runs the scorers, hands on one record. Picklable when its target and scorers are."""

    def __init__(
        self,
        target: Target,
        pipeline: ScoringPipeline,
        *,
        timeout: float | None,
        seed: int,
        session: Session | None = None,
        token: Cancellation | None = None,
        waits: bool = False,
        remotes: Sequence[RemoteTarget] = (),
        programs: StartedPrograms | None = None,
        answered: Callable[[str, int], None] | None = None,
        tracebacks: bool = True,
        keep_expected: bool = True,
        workspaces: Workspaces | None = None,
    ) -> None:
        self._tracebacks = tracebacks
        self._keep_expected = keep_expected
        self._workspaces = workspaces
        """None in a run whose cases have neither workspaces nor limits, and whose scorers take no context."""
        self._waits = waits
        self._answered = answered
        """Called with the id and trial of each case that has its answer and is yet to be scored."""
        self._target = target
        self._pipeline = pipeline if pipeline else None
        self._timeout = timeout
        self._deadlines = Deadlines(timeout) if timeout is not None else None
        self._seed = seed
        self._session = session
        self._token = token
        self._remotes = remotes
        self._programs = programs

    async def open(self, parallelism: int) -> None:
        """Have the endpoints ready in a process that is not the run's own; ConfigurationError where one cannot be."""
        for remote in self._remotes:
            remote.check()
            await remote.open(parallelism)

    async def close(self) -> None:
        """Let go of what `open` opened, whatever any of them makes of it."""
        async with AsyncExitStack() as stack:
            for remote in self._remotes:
                stack.push_async_callback(remote.close)

    def encode(self, record: Record) -> bytes:
        """The record as the driver writes it: a worker does this part of the work, too."""
        return encode_unsealed(record)

    def for_warm_up(self, target: Target) -> CaseRunner:
        """Return a copy that calls this target and does not score its answers."""
        work = copy(self)
        work._target = target
        work._pipeline = None
        return work

    async def __call__(self, job: Job, emit: Emit) -> None:
        """Ask (unless the response is already stored), score, emit."""
        started = time.perf_counter()
        shape: _Shape | None = None
        case, workspaces, pipeline = job.case, self._workspaces, self._pipeline
        context = InvocationContext(case.id, job.trial, 1, self._seed, self._token, programs=self._programs)
        if job.stored is not None:
            response, attempts, before = job.stored.response, job.stored.attempts, job.stored.elapsed
            failures: list[FailedAttempt] | None = job.stored.retry_errors
            context.attempt = max(1, attempts)
        else:
            if workspaces is not None and workspaces.workspace is not None:
                context.template_digest = workspaces.digest_of(case)
            response, shape = await self._ask(job, context, emit)
            if workspaces is not None and response.workspace_patch is not None:
                response, shape = await workspaces.unpacked(case.id, job.trial, response), None
            before = None
            if context.waiting or context.backoff or job.planned_at is not None:
                response, shape = _with_waits(response, context, job.planned_at), None
            attempts = 0 if response.cached else context.attempt
            failures = context.retry_errors
        if self._answered is not None:
            self._answered(case.id, job.trial)
        scores: list[Score] = []
        scoring_began: float | None = None
        if pipeline is None or response.error is not None:
            pass
        elif pipeline.is_immediate:
            scores = await pipeline.score_without_judges(job, response)
        else:
            scoring_began = time.perf_counter()
            new_context = None
            if workspaces is not None and pipeline.takes_context:
                new_context = partial(workspaces.scoring_context, case, context)
                if context.workspace is None:
                    await workspaces.restore(case, context)
            elapsed = scoring_began - started
            unscored = None if before is not None else _record(job, response, [], attempts, elapsed, failures, shape)
            keep_answer = partial(_keep_answer, unscored, emit)
            scores = await pipeline.score(job, response, context, keep_answer, emit, new_context)
        ended = time.perf_counter()
        elapsed = ended - started if before is None else before
        record = _record(job, response, scores, attempts, elapsed, failures, shape)
        if scoring_began is not None and before is None:
            record.time_scoring = ended - scoring_began
        if self._keep_expected:
            if case.expected is not None:
                record.expected = bounded(case.expected)
            if case.metadata:
                record.metadata = bounded(case.metadata)
        if workspaces is not None:
            await workspaces.keep(record, context)
        emit(record)
        if workspaces is not None:
            # A case with a record has finished: the end of the run does not wait until its workspace is removed.
            with suppress(asyncio.CancelledError):
                await workspaces.done(record)

    async def _ask(self, job: Job, context: InvocationContext, emit: Emit) -> tuple[InvocationResponse, _Shape | None]:
        """The target's answer and its shape, where known; whatever it raises becomes an answer that says so."""
        task = asyncio.current_task()
        assert task is not None
        deadlines = self._deadlines
        late = False
        case = job.case
        if self._session is not None:
            case = self._begin_session(case, context)
        if deadlines is not None:
            clock = deadlines.begin(task)
            if self._waits:
                context.clock = clock
        try:
            try:
                response = await self._target.invoke(case, context)
            finally:
                if deadlines is not None:
                    late = deadlines.end(task)
            return _checked(response)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a target is the user's code: its crash is data
            if isinstance(error, GeneratorExit) and not _is_running(task):
                raise  # this coroutine is being closed, and may not await anything more
            partial = getattr(error, "partial", None)
            if isinstance(error, asyncio.CancelledError):
                if late:
                    # With the traceback of the cancellation, which says where the target was.
                    where = error.__traceback__
                    error = TimeoutError(_timeout_message(self._timeout or 0.0, partial)).with_traceback(where)
                elif self._wants_to_end(task):
                    if partial is not None:
                        _keep_cut(job, error, partial, context, emit)
                    raise
            response = _failed(error, partial, context.attempt - 1)
            if self._tracebacks:
                response.error_traceback = user_traceback(error)
            return response, None

    def _begin_session(self, case: EvalCase, context: InvocationContext) -> EvalCase:
        """The case after the session's messages; the context gets its own copy of the session."""
        context.session = session = deepcopy(self._session)
        if session is None or not session.messages:
            return case
        return msgspec.structs.replace(case, messages=[*session.messages, *(case.messages or [])])

    def _wants_to_end(self, task: asyncio.Task[Any]) -> bool:
        """Whether a cancellation is for us. One that nobody asked for is the target's own, and taken back here."""
        if not task.cancelling():
            return False
        if self._token is None or self._token.cancelled:
            return True
        while task.uncancel():
            pass
        return False


def _keep_answer(unscored: Record | None, emit: Emit) -> None:
    """Write an answer down before it is scored; one that was stored is on disk already."""
    if unscored is not None:
        emit(UnscoredAnswer(unscored))


def _is_running(task: asyncio.Task[Any]) -> bool:
    """Whether the event loop is running this task: it is not while the task is thrown away."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no event loop
        return False


def _timeout_message(seconds: float, partial: Any) -> str:
    """What a case that ran out of time says: how much of its answer had come."""
    if not isinstance(partial, InvocationResponse):
        return f"no answer within {seconds:g} s"
    received = None
    if isinstance(partial.num_tokens_output, int) and partial.num_tokens_output > 0:
        estimated = " (estimated)" if partial.tokens_estimated else ""
        received = f"{counted(partial.num_tokens_output, 'token')} received{estimated}"
    elif isinstance(partial.response_text, str) and partial.response_text:
        received = f"{counted(len(partial.response_text), 'character')} received"
    elif partial.stderr:
        received = "output on stderr only"
    if received is None:
        return f"no answer within {seconds:g} s"
    return f"timed out after {seconds:g} s with {received}"


def _keep_cut(job: Job, error: BaseException, partial: Any, context: InvocationContext, emit: Emit) -> None:
    """Write down what had come of an answer that the end of the run cut off. Its case is sent again on resume."""
    response = _failed(error, partial, context.attempt - 1)
    if response.response_text is None and response.cost is None and not response.messages and not response.stderr:
        return
    response.error, response.error_type = "the run ended while the answer came", CUT_OFF
    response = _with_waits(response, context, None)
    emit(UnscoredAnswer(_record(job, response, [], context.attempt, 0.0, context.retry_errors, None)))


def _failed(error: BaseException, partial: Any, retries: int) -> InvocationResponse:
    """An answer that says what went wrong, with as much of the real one as there is."""
    try:
        response = _checked(copy(partial))[0] if partial is not None else InvocationResponse()
    except TargetError as bad:  # what a target reports of a failure may be as broken as the rest
        response = bad.partial or InvocationResponse()
    except TypeError:
        response = InvocationResponse()
    response.error, response.error_type, response.retries = masked_description(error), type(error).__name__, retries
    return response


def _with_waits(
    response: InvocationResponse, context: InvocationContext, planned_at: float | None
) -> InvocationResponse:
    """The response with where the time went that is not its own, and the money; a copy, for it may be shared."""
    cost = response.cost
    if context.spent and (cost is not None or response.error is not None):
        cost = (cost or 0.0) + context.spent
    return msgspec.structs.replace(
        response,
        time_waiting=context.waiting or None,
        time_in_backoff=context.backoff or None,
        time_in_failed_tries=context.failed or None,
        time_from_planned=response.time_from_planned if planned_at is None else time.monotonic() - planned_at,
        cost=cost,
    )


def _checked(returned: Any) -> tuple[InvocationResponse, _Shape | None]:
    """The response, if its fields have types that can be read back from the journal, and its shape; else TypeError."""
    response = returned if type(returned) is InvocationResponse else _plain(returned)
    values = _values_to_check(response)
    shape: _Shape | None = _GOOD_SHAPES.get(tuple(map(type, values)))
    if shape is None:
        _coerce_types(response)
        values = _values_to_check(response)
        shape = _GOOD_SHAPES[tuple(map(type, values))] = _Shape(values)
    if not _are_small(shape.numbers_of(values)):
        _refuse_numbers(response)
        shape = None
    for message in response.messages or ():
        if not isinstance(message, dict):
            raise TypeError("the response's messages are not all objects")
    if response.error is None and response.error_type is not None:
        response.error = response.error_type
        shape = None
    return response, shape


def _values_to_check(response: InvocationResponse) -> tuple[Any, ...]:
    """The response's values; only those of the common fields where the others have their defaults."""
    values = astuple(response)
    try:
        return values[:_COMMON] if values[_COMMON:] == _RARE_DEFAULTS else values
    except Exception:  # noqa: BLE001 - some objects cannot be compared, such as arrays
        return values


def _plain(returned: Any) -> InvocationResponse:
    """A response without what a subclass adds, which a record does not have; TypeError for anything else."""
    if not isinstance(returned, InvocationResponse):
        raise TypeError(f"the target returned {type(returned).__name__}, not an InvocationResponse")
    return InvocationResponse(**{name: getattr(returned, name) for name in ("id", *_FIELDS)})


def _are_small(numbers: tuple[float, ...]) -> bool:
    """Whether each number is surely within the limit: none is larger than the length of them all as a vector."""
    try:
        return math.hypot(*numbers) <= MAX_NUMBER
    except OverflowError:
        return False


def _refuse_numbers(response: InvocationResponse) -> None:
    """Leave out numbers that no figure can hold. NaN means that there is none; any other is an error.

    The error keeps the rest of the response.
    """
    bad = []
    for _, name in _NUMBERS:
        number = getattr(response, name)
        if number is not None and not -MAX_NUMBER <= number <= MAX_NUMBER:
            setattr(response, name, None if type(None) in _SHAPE[name] else 0)
            if isinstance(number, int) or not math.isnan(number):
                bad.append(f"{name} is {_shown(number)}")
    if bad:
        problem = f"the response's {', '.join(bad)}: numbers must be within ±{MAX_NUMBER:.0e}"
        raise TargetError(problem, partial=response)


def _shown(number: float) -> str:
    if isinstance(number, int):
        return f"a whole number of {number.bit_length():,} bits"
    return f"{number:g}"


def _coerce_types(response: InvocationResponse) -> None:
    """Give each field a type that can be read back; TypeError where that cannot be done."""
    for name, types in _SHAPE.items():
        value = getattr(response, name)
        if types and type(value) not in types:
            setattr(response, name, _coerced(name, value, types[0]))


def _coerced(name: str, value: Any, wanted: type) -> Any:
    """The plain value of a subclass or of numpy's and pandas' own types; TypeError for anything else."""
    if wanted is datetime and isinstance(value, datetime):
        return datetime.fromisoformat(value.isoformat())
    if wanted is str and isinstance(value, str):
        return str.__str__(value)
    if wanted is list and isinstance(value, (list, tuple)):
        return list(value)
    if wanted in (int, float) and isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        plain = wanted(number) if math.isfinite(number) else number
        if plain == value and type(plain) is wanted:
            return plain
    raise TypeError(f"the response's {name} is {type(value).__name__} {value!r:.100}, not {wanted.__name__}")


def _record(
    job: Job,
    response: InvocationResponse,
    scores: list[Score],
    attempts: int,
    elapsed: float,
    failures: list[FailedAttempt] | None,
    shape: _Shape | None,
) -> Record:
    record_of = _record_of_any if shape is None else shape.record_of
    record = record_of(job, response, "ok" if response.error is None else "error", attempts, elapsed, scores)
    if failures:
        record.retry_errors = failures
    if job.case.group is not None:
        record.group = job.case.group
    return record
