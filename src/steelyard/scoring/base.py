"""What all scorers share: functions as scorers, running them so that none can end a run, and argument checks."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import json
import numbers
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, TypeAlias

import msgspec

from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import ConfigurationError, suggestion
from steelyard.masking import masked_description, user_traceback
from steelyard.plugins import find
from steelyard.protocols import Identity, Scorer, ScoreResult, ScoringContext
from steelyard.records import MAX_NUMBER, EvalCase, InvocationResponse, Score
from steelyard.units import parse_duration

_MAX_STORED_TEXT = 10_000

ScorerFunction: TypeAlias = Callable[..., Any]
"""Takes `case, response`, or `case, response, context`."""

_MAX_SHOWN = 200
_RETRIED = "scorer retries: "
_MAX_REASON = 1_000
MAX_LABEL = 200


class ScorerLimits(msgspec.Struct, frozen=True):
    """The limits of one scorer; None means no limit. `retries` are those after a TransientError."""

    timeout: float | None = 600.0
    """Seconds for one answer; each retry has them again."""
    parallelism: int | None = None
    retries: int | None = 2
    """None: as many as the run's `retries`, for a judge."""


DEFAULT_LIMITS = ScorerLimits()
LIMIT_NAMES = ScorerLimits.__struct_fields__


def limits_of(scorer: object) -> ScorerLimits:
    """The limits that a scorer's attributes `timeout`, `parallelism` and `retries` set, checked.

    The time of one that ends its own programs in time (`keeps_own_time`) is not limited a second time.
    """
    given = {name: getattr(scorer, name) for name in LIMIT_NAMES if hasattr(scorer, name)}
    limits = read_limits(given)
    if getattr(scorer, "keeps_own_time", False) is True:
        return msgspec.structs.replace(limits, timeout=None)
    return limits


def read_limits(given: Mapping[str, Any]) -> ScorerLimits:
    """Limits as written in a suite file or in Python: a time may have a unit."""
    timeout = given.get("timeout", DEFAULT_LIMITS.timeout)
    if timeout is not None:
        timeout = parse_duration(timeout, "timeout")
        if timeout <= 0:
            raise ConfigurationError(f"timeout must be above 0, got {given['timeout']!r}")
    parallelism, retries = given.get("parallelism"), given.get("retries", DEFAULT_LIMITS.retries)
    for name, value, least in (("parallelism", parallelism, 1), ("retries", retries, 0)):
        if value is not None and (type(value) is not int or value < least):
            raise ConfigurationError(f"{name} must be a whole number >= {least}, got {value!r}")
    return ScorerLimits(timeout, parallelism, retries)


def takes_context(scorer: object) -> bool:
    """Whether a scorer's `score`, or a function, takes a ScoringContext: as its third argument, or as `context`."""
    declared = getattr(scorer, "takes_context", None)
    if isinstance(declared, bool):
        return declared
    try:
        parameters = inspect.signature(getattr(scorer, "score", scorer)).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):  # some of those written in C do not say
        return False
    if any(one.name == "context" for one in parameters):
        return True
    required = [
        one
        for one in parameters
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
    ]
    return len(required) == 3


def with_context(function: ScorerFunction, context: ScoringContext | None) -> ScorerFunction:
    """The function, which takes a context, with its context filled in."""
    if "context" in inspect.signature(function).parameters:
        return partial(function, context=context)
    return lambda case, response: function(case, response, context)


class FunctionScorer:
    """A function as a scorer: it takes `case, response`, and may take `context` (ScoringContext) as a third argument.

    It returns a Score, a number in 0..1, a bool or None.
    """

    def __init__(
        self,
        function: ScorerFunction,
        *,
        name: str | None = None,
        threshold: float = 0.5,
        timeout: float | str | None = DEFAULT_LIMITS.timeout,
        parallelism: int | None = None,
        retries: int | None = DEFAULT_LIMITS.retries,
    ) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ConfigurationError(f"threshold must be within 0..1, got {threshold}")
        read_limits({"timeout": timeout, "parallelism": parallelism, "retries": retries})
        self.timeout, self.parallelism, self.retries = timeout, parallelism, retries
        self._function = function
        self.takes_context = takes_context(function)
        self._threshold = threshold
        self._threads = DaemonThreads()
        self.name: str = name or getattr(function, "__name__", "") or type(function).__name__

    def identity(self) -> Identity:
        """Where the function is defined, and its source: scoring again is free, so a changed source is a change."""
        function = inspect.unwrap(self._function)
        return {
            "kind": "function",
            "name": self.name,
            "module": getattr(function, "__module__", None),
            "qualname": getattr(function, "__qualname__", type(function).__qualname__),
            "threshold": self._threshold,
            "source": _source_digest(function),
        }

    async def score(
        self, case: EvalCase, response: InvocationResponse, context: ScoringContext | None = None
    ) -> Score | list[Score] | None:
        """Call the function and read its result. A sync one runs in a thread: the loop is timing other calls."""
        function = with_context(self._function, context) if self.takes_context else self._function
        if inspect.iscoroutinefunction(self._function):
            answer: Any = await function(case, response)
        else:
            answer = await self._threads.run(function, case, response)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, (Score, list)) or answer is None:
            return answer
        return _score_of(answer, self.name, self._threshold)


def _score_of(answer: Any, name: str, threshold: float = 0.5) -> Score:
    """The score that a number or a bool is; TypeError for anything else."""
    if isinstance(answer, numbers.Real) or type(answer).__name__ in ("bool", "bool_"):  # NumPy's is no number
        value = float(answer)
        return Score(name, value, value >= threshold)
    kind = type(answer).__name__
    raise TypeError(f"scorer {name!r} returned {kind}, not a Score, a list of Scores, a number, a bool or None")


class ObjectScorer:
    """An object with a `score` method as a scorer: its class gives the name and identity that it does not have."""

    def __init__(self, scorer: Any) -> None:
        self._scorer = scorer
        self.name = str(getattr(scorer, "name", "") or type(scorer).__name__)
        limits = limits_of(scorer)
        self.timeout, self.parallelism, self.retries = limits.timeout, limits.parallelism, limits.retries
        self.immediate = getattr(scorer, "immediate", False) is True
        self.takes_context = takes_context(scorer)

    def identity(self) -> Identity:
        """Where the class is, what it says and what the object holds."""
        kind = type(self._scorer)
        attributes = getattr(self._scorer, "__dict__", {}).items()
        held = {name: _as_json(value) for name, value in attributes if name not in LIMIT_NAMES}
        return {
            "kind": "object",
            "name": self.name,
            "module": kind.__module__,
            "qualname": kind.__qualname__,
            "arguments": held if _is_json(held) else {name: repr(value) for name, value in held.items()},
            "source": _source_digest(kind),
        }

    def score(
        self, case: EvalCase, response: InvocationResponse, context: ScoringContext | None = None
    ) -> ScoreResult | Awaitable[ScoreResult]:
        score = with_context(self._scorer.score, context) if self.takes_context else self._scorer.score
        result: ScoreResult | Awaitable[ScoreResult] = score(case, response)
        return result


def _source_digest(item: Any) -> str | None:
    try:
        return hashlib.sha256(inspect.getsource(item).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return None


def _is_json(value: object) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def scorer_by_name(name: str, arguments: Mapping[str, Any] | None = None) -> Scorer:
    """The scorer of that name, made with these arguments or its defaults."""
    try:
        return make_scorer(find("scorers", name), arguments)
    except TypeError as error:  # an argument that is missing or not known
        raise ConfigurationError(f"scorer {name!r}: {error}") from error


def make_scorer(found: Any, arguments: Mapping[str, Any] | None = None) -> Scorer:
    """A scorer from what a name refers to: a class is made with the arguments, anything else takes none."""
    if inspect.isclass(found):
        return as_scorer(found(**(arguments or {})))
    if arguments:
        raise TypeError(f"it takes no arguments, got {', '.join(arguments)}")
    return as_scorer(found)


def as_scorer(item: object) -> Scorer:
    """A scorer from a scorer, an object with a `score` method, a function, or a name."""
    if isinstance(item, str):
        return scorer_by_name(item)
    if not inspect.isclass(item):
        if isinstance(item, Scorer):
            limits_of(item)
            return item
        if callable(getattr(item, "score", None)):
            return ObjectScorer(item)
        if callable(item):
            return FunctionScorer(item)
    raise ConfigurationError(f"not a scorer: {item!r} (a name, a function of case and response, or a Scorer)")


def as_scorers(items: Iterable[object]) -> list[Scorer]:
    """Return the scorers of a list, refusing two of one name: their figures would be mixed."""
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise ConfigurationError(f"scorers must be a list of scorers, got {items!r}")
    scorers = [as_scorer(item) for item in items]
    names = [scorer.name for scorer in scorers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"two scorers are named {twice[0]!r}: give one of them another name")
    _check_weights(scorers)
    return scorers


def _check_weights(scorers: Sequence[Scorer]) -> None:
    """Refuse a combined score of one that is not there; a class or function of the user's may give any names."""
    names = [scorer.name for scorer in scorers if not hasattr(scorer, "weights")]
    for scorer in scorers:
        for name in getattr(scorer, "weights", None) or ():
            if name not in names and all(isinstance(one, PlainScorer) for one in scorers):
                raise ConfigurationError(f"{scorer.name}: no scorer is named {name!r}; {suggestion(str(name), names)}")


async def run_scorers(
    scorers: Sequence[Scorer],
    case: EvalCase,
    response: InvocationResponse,
    *,
    tracebacks: bool = True,
    new_context: Callable[[], ScoringContext] | None = None,
) -> list[Score]:
    """Return all applicable scores, in the scorers' order; a scorer that raises yields a score with the error.

    `new_context` makes the context of a scorer that takes one.
    """
    scores: list[Score] = []
    for scorer in scorers:
        try:
            if new_context is not None and takes_context(scorer):
                answer = with_context(scorer.score, new_context())(case, response)
            else:
                answer = scorer.score(case, response)
            if type(answer) is Score and _is_plain(answer):  # the common case, checked first for speed
                scores.append(answer)
            elif answer is not None:
                if inspect.isawaitable(answer):
                    answer = await answer
                scores.extend(_checked(answer, scorer.name))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, GeneratorExit) and not _in_a_task():
                raise  # this coroutine is being closed, and may not await anything more
            if isinstance(error, asyncio.CancelledError) and _being_cancelled():
                raise
            failed = _failed_score(scorer.name, error)
            failed.error_traceback = user_traceback(error) if tracebacks else None
            scores.append(failed)
    return scores


def note_retries(error: BaseException, retries: int) -> None:
    """Remember with an error how often the scorer was retried before it."""
    if retries:
        error.add_note(f"{_RETRIED}{retries}")


def _failed_score(name: str, error: BaseException) -> Score:
    notes = [note for note in getattr(error, "__notes__", ()) if str(note).startswith(_RETRIED)]
    if not notes:
        return Score(name, errors=[masked_description(error)])
    retries = int(notes[-1].removeprefix(_RETRIED))
    return Score(name, errors=[f"{masked_description(error)} (tried {retries + 1} times)"], retries=retries)


def _in_a_task() -> bool:
    """Whether an event loop is running this: it is not while a task is thrown away."""
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no event loop
        return False


def _being_cancelled() -> bool:
    """Whether this task is being cancelled; any other CancelledError is the scorer's failure."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _checked(answer: object, name: str) -> list[Score]:
    """Return the scores in a scorer's result, as plain types that can be written and read back."""
    if answer is None:
        return []
    if isinstance(answer, Score):
        return [_plain(answer, name)]
    if isinstance(answer, list) and all(isinstance(score, Score) for score in answer):
        return [_plain(score, name) for score in answer]
    return [_plain(_score_of(answer, name), name)]


def _is_plain(score: Score) -> bool:
    """Whether a score is of the common kind that needs no conversion: a value, a verdict and at most a reason."""
    value, reason = score.value, score.reason
    return (
        type(value) is float
        and 0.0 <= value <= 1.0
        and type(score.passed) is bool
        and type(score.name) is str
        and bool(score.name)
        and (reason is None or (type(reason) is str and len(reason) <= _MAX_STORED_TEXT))
        and score.samples is None
        and score.mean is None
        and score.std_dev is None
        and not score.errors
        and score.reasons is None
        and score.by is None
        and score.error_traceback is None
        and score.label is None
        and score.unit is None
        and score.better is None
        and score.extracted is None
        and score.combines is None  # only the pipeline says that
    )


def _plain(score: Score, name: str) -> Score:
    if _is_plain(score):
        return score
    if score.value is None:
        if not score.errors and score.label is None:
            raise ValueError(f"scorer {name!r} returned a score with neither a value, a label nor errors")
        value = None
    else:
        value = _checked_value(score, name)
    passed = None if score.passed is None else bool(score.passed)
    if passed is None and value is not None and not score.is_number and score.label is None:
        passed = value >= 0.5
    return Score(
        name=str(score.name or name),
        value=value,
        passed=passed,
        reason=None if score.reason is None else str(score.reason)[:_MAX_STORED_TEXT],
        samples=None if score.samples is None else [None if s is None else float(s) for s in score.samples],
        mean=None if score.mean is None else float(score.mean),
        std_dev=None if score.std_dev is None else float(score.std_dev),
        errors=[str(error)[:_MAX_STORED_TEXT] for error in score.errors],
        reasons=None if score.reasons is None else [None if r is None else str(r) for r in score.reasons],
        by=None if score.by is None else str(score.by),
        escalated=bool(score.escalated),
        overruled=bool(score.overruled),
        advisory=bool(score.advisory),
        retries=int(score.retries),
        calibrated=bool(score.calibrated),
        votes=score.votes,
        error_traceback=None if score.error_traceback is None else str(score.error_traceback)[:_MAX_STORED_TEXT],
        label=None if score.label is None else _label(score.label, name),
        unit=None if score.unit is None else str(score.unit)[:MAX_LABEL],
        better=score.better,
        extracted=score.extracted,
    )


def _checked_value(score: Score, name: str) -> float:
    """The value as a float: within 0..1 or, of a measurement, any that sums and squares of stay finite."""
    assert score.value is not None
    value = float(score.value)
    if score.better not in (None, "higher", "lower"):
        raise ValueError(f"scorer {name!r}: better must be 'higher' or 'lower', got {score.better!r}")
    if score.is_number:
        if not abs(value) <= MAX_NUMBER:
            raise ValueError(f"scorer {name!r} returned the value {value}, which is not within ±{MAX_NUMBER:g}")
    elif not 0.0 <= value <= 1.0:
        raise ValueError(
            f"scorer {name!r} returned the value {value}, which is not within 0..1: "
            "a measurement needs a unit, or better='lower' or 'higher'"
        )
    return value


def _label(label: object, name: str) -> str:
    text = " ".join(str(label).split())
    if not text:
        raise ValueError(f"scorer {name!r} returned an empty label")
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"


@dataclass(frozen=True, kw_only=True)
class PlainScorer:
    """A scorer whose fields are its arguments. A subclass gives `name` a default, which is also its kind.

    A value passes from `threshold` on. For scorers that give only 1.0 or 0.0, every threshold above 0 means the same,
    and with 0 the score is a measurement that never fails.
    """

    name: str
    threshold: float = 0.5
    timeout: float | str | None = DEFAULT_LIMITS.timeout
    parallelism: int | None = None
    retries: int | None = DEFAULT_LIMITS.retries
    _is_built_in: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        cls._is_built_in = cls.__module__.partition(".")[0] == "steelyard"

    @property
    def immediate(self) -> bool:
        """Whether it only computes (see `limits.is_immediate`). A class that a user derives may do anything."""
        return self._is_built_in

    def __post_init__(self) -> None:
        check_share("threshold", self.threshold)
        limits_of(self)
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"name must be a text that is not empty, got {self.name!r}")
        self._check()

    def _check(self) -> None:
        """Refuse invalid arguments; overridden by each scorer."""

    def identity(self) -> Identity:
        """Its kind and every argument but its limits: everything that can change a score."""
        named = (field.name for field in fields(self) if field.name not in LIMIT_NAMES)
        arguments = {name: _as_json(getattr(self, name)) for name in named}
        return {"kind": type(self).__dataclass_fields__["name"].default, **arguments}

    def _score(self, right: bool, reason: str | None = None) -> Score:
        """Return 1.0 or 0.0; a right answer needs no reason."""
        if right:
            return Score(self.name, 1.0, True)
        return Score(self.name, 0.0, self.threshold <= 0.0, _cut(reason))

    def _graded(self, value: float, reason: str | None = None) -> Score:
        return Score(self.name, value, value >= self.threshold, _cut(reason))


def check_number(name: str, value: object, *, least: float = 0.0, most: float | None = None) -> None:
    """Refuse a value that is not a number within its limits."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not least <= value or (most is not None and not value <= most):  # type: ignore[operator]
        allowed = f">= {least:g}" if most is None else f"within {least:g}..{most:g}"
        raise ConfigurationError(f"{name} must be a number {allowed}, got {value!r}")


def check_share(name: str, value: object) -> None:
    """Refuse a value that is not a number within 0..1."""
    check_number(name, value, most=1.0)


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse a value that is not one of those allowed."""
    if value not in allowed:
        raise ConfigurationError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_flags(scorer: PlainScorer, *names: str) -> None:
    """Refuse a flag that is not a bool: in YAML, `ignore_case: "no"` is text, and would count as true."""
    for name in names:
        value = getattr(scorer, name)
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} must be true or false, got {value!r}")


def need_extra(module: str, extra: str, scorer: str) -> None:
    """Refuse to create a scorer whose library is not installed, and name what to install."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{scorer} needs {module}: pip install 'steelyard[{extra}]'", topic="extra") from error


def alternatives(expected: Any) -> list[Any]:
    """Return the accepted values of a case: the items of a list, or the only value."""
    return expected if isinstance(expected, list) else [expected]


def as_text(expected: object) -> str:
    """Return an expected value as a model would write it: JSON's true, not Python's True."""
    if isinstance(expected, str):
        return expected
    if isinstance(expected, bool):
        return "true" if expected else "false"
    return str(expected)


def shown(value: object) -> str:
    """Return a value as a reason quotes it: its repr, cut."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]!r}…"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def shown_any(values: list[Any]) -> str:
    """Return a few alternatives as a reason quotes them."""
    if len(values) == 1:
        return shown(as_text(values[0]))
    more = f" or {len(values) - 3} more" if len(values) > 3 else ""
    return " or ".join(shown(as_text(value)) for value in values[:3]) + more


def _cut(reason: str | None) -> str | None:
    return reason if reason is None or len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}…"


def _as_json(value: object) -> Any:
    """Return an argument as JSON; a function as its identity."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if callable(value):
        return dict(FunctionScorer(value).identity())
    return value
