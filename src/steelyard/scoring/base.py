"""Turning what users hand in into scorers, and running them so that none can end a run."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias

from steelyard.contracts import Identity, Scorer, ScoreResult
from steelyard.errors import ConfigurationError, describe
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.threads import DaemonThreads

_LONGEST_REASON = 10_000

ScorerFunction: TypeAlias = Callable[[EvalCase, InvocationResponse], Any]


class FunctionScorer:
    """A plain function as a scorer: `case, response` in, a Score, a number in 0..1, a bool or None out."""

    def __init__(self, function: ScorerFunction, *, name: str | None = None, threshold: float = 0.5) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ConfigurationError(f"threshold must be within 0..1, got {threshold}")
        self._function = function
        self._threshold = threshold
        self._threads = DaemonThreads()
        self.name: str = name or getattr(function, "__name__", "") or type(function).__name__

    def identity(self) -> Identity:
        """Where the function lives and what it says: re-scoring is free, so changed source counts as a change."""
        function = inspect.unwrap(self._function)
        try:
            source = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
        except (OSError, TypeError):
            source = None
        return {
            "kind": "function",
            "name": self.name,
            "module": getattr(function, "__module__", None),
            "qualname": getattr(function, "__qualname__", type(function).__qualname__),
            "threshold": self._threshold,
            "source": source,
        }

    async def score(self, case: EvalCase, response: InvocationResponse) -> Score | list[Score] | None:
        """Call the function and read its answer. A plain one runs in a thread: the loop is timing other calls."""
        if inspect.iscoroutinefunction(self._function):
            answer: Any = await self._function(case, response)
        else:
            answer = await self._threads.run(self._function, case, response)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, (Score, list)) or answer is None:
            return answer
        if isinstance(answer, numbers.Real) or type(answer).__name__ in ("bool", "bool_"):
            value = float(answer)
            return Score(self.name, value, value >= self._threshold)
        raise TypeError(f"scorer {self.name!r} returned {type(answer).__name__}, not a Score, number, bool or None")


def as_scorer(item: object) -> Scorer:
    """A scorer from a scorer, a function, or a name."""
    if isinstance(item, str):
        from steelyard.scoring.registry import scorer_by_name

        return scorer_by_name(item)
    if isinstance(item, Scorer) and not inspect.isclass(item):
        return item
    if callable(item) and not inspect.isclass(item):
        return FunctionScorer(item)
    raise ConfigurationError(f"not a scorer: {item!r} (a name, a function of case and response, or a Scorer)")


def as_scorers(items: Iterable[object]) -> list[Scorer]:
    """Scorers from a list of them, refusing two of one name: their figures would be mixed."""
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise ConfigurationError(f"scorers must be a list of scorers, got {items!r}")
    scorers = [as_scorer(item) for item in items]
    names = [scorer.name for scorer in scorers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"two scorers are named {twice[0]!r}: give one of them another name")
    return scorers


async def run_scorers(
    scorers: Sequence[Scorer], case: EvalCase, response: InvocationResponse, *, timeout: float | None = None
) -> list[Score]:
    """All applicable scores, in the scorers' order; a scorer that raises yields a score that says so."""
    scores: list[Score] = []
    for scorer in scorers:
        try:
            answer = scorer.score(case, response)
            if type(answer) is Score and _is_plain(answer):  # as nearly all are: no need to look at anything else
                scores.append(answer)
            elif answer is not None:
                if inspect.isawaitable(answer):
                    answer = await _within(timeout, answer)
                scores.extend(_checked(answer, scorer.name))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _being_cancelled():
                raise
            scores.append(Score(scorer.name, errors=[describe(error)]))
    return scores


async def _within(timeout: float | None, answer: Awaitable[ScoreResult]) -> ScoreResult:
    try:
        async with asyncio.timeout(timeout) as limit:
            return await answer
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"no score within {timeout:g} s") from error
        raise


def _being_cancelled() -> bool:
    """Whether somebody wants this task to end; a CancelledError that nobody asked for is the scorer's own failure."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _checked(answer: object, name: str) -> list[Score]:
    """The scores in an answer, with plain types throughout, so that what is written can be read back."""
    if answer is None:
        return []
    if isinstance(answer, Score):
        return [_plain(answer, name)]
    if isinstance(answer, list) and all(isinstance(score, Score) for score in answer):
        return [_plain(score, name) for score in answer]
    raise TypeError(f"scorer {name!r} returned {type(answer).__name__}, not a Score, a list of Scores or None")


def _is_plain(score: Score) -> bool:
    """Whether a score is of the common kind that needs no second look: a value, a verdict and at most a reason."""
    value, reason = score.value, score.reason
    return (
        type(value) is float
        and 0.0 <= value <= 1.0
        and type(score.passed) is bool
        and type(score.name) is str
        and bool(score.name)
        and (reason is None or (type(reason) is str and len(reason) <= _LONGEST_REASON))
        and score.samples is None
        and score.mean is None
        and score.std_dev is None
        and not score.errors
        and score.reasons is None
        and score.by is None
    )


def _plain(score: Score, name: str) -> Score:
    if _is_plain(score):
        return score
    if score.value is None:
        if not score.errors:
            raise ValueError(f"scorer {name!r} returned a score with neither a value nor errors")
        value = None
    else:
        value = float(score.value)
        if not (math.isfinite(value) and 0.0 <= value <= 1.0):
            raise ValueError(f"scorer {name!r} returned the value {value}, which is not within 0..1")
    passed = None if score.passed is None else bool(score.passed)
    if passed is None and value is not None:
        passed = value >= 0.5
    return Score(
        name=str(score.name or name),
        value=value,
        passed=passed,
        reason=None if score.reason is None else str(score.reason)[:_LONGEST_REASON],
        samples=None if score.samples is None else [None if s is None else float(s) for s in score.samples],
        mean=None if score.mean is None else float(score.mean),
        std_dev=None if score.std_dev is None else float(score.std_dev),
        errors=[str(error)[:_LONGEST_REASON] for error in score.errors],
        reasons=None if score.reasons is None else [None if r is None else str(r) for r in score.reasons],
        by=None if score.by is None else str(score.by),
        escalated=bool(score.escalated),
        overruled=bool(score.overruled),
        advisory=bool(score.advisory),
    )
