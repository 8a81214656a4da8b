"""Retries after transient errors: bounded in attempts and in time, with full jitter."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime

import msgspec

from steelyard.engine.rate_limit import RateLimited
from steelyard.errors import TransientError
from steelyard.masking import masked_description
from steelyard.protocols import InvocationContext, Target, TargetWrapper
from steelyard.records import MAX_NUMBER, EvalCase, FailedAttempt, InvocationResponse

_ALWAYS_TRANSIENT: tuple[type[Exception], ...] = (TransientError, ConnectionError, TimeoutError)
MAX_RETRY_ERRORS = 20
"""Failed attempts that a record keeps."""
_MAX_MESSAGE = 1_000
_MAX_REFUSALS = 100
"""How often a call may be refused, in addition to its attempts, while the endpoint answers other calls."""


class RetryPolicy(msgspec.Struct, frozen=True):
    """At most `attempts` calls within `total_seconds`; the backoff is uniform in 0..min(max_wait, first_wait * 2^n).

    A longer wait that the endpoint asks for (`Retry-After`) is respected if it fits into the total time. Time spent
    waiting for a send permit does not count towards it. Nor does a refusal count as an attempt while the endpoint
    answers other calls: more was sent than it takes, and this call only has to wait its turn.
    """

    attempts: int = 5
    first_wait: float = 0.5
    max_wait: float = 30.0
    total_seconds: float = 600.0
    retry_on: tuple[type[Exception], ...] = ()

    def wait_before(self, attempt: int) -> float:
        """Return the seconds to wait before attempt number `attempt` (the second is 2): full jitter."""
        # The exponent is capped so that a large number of attempts cannot overflow a float.
        ceiling = min(self.max_wait, self.first_wait * 2.0 ** min(attempt - 2, 60))
        return random.uniform(0.0, ceiling)


class Retry(TargetWrapper):
    """A target that retries the one inside it after transient errors. The caller's permit is kept meanwhile."""

    def __init__(self, target: Target, policy: RetryPolicy) -> None:
        self._target = target
        self._policy = policy
        self._transient = (*_ALWAYS_TRANSIENT, *policy.retry_on)
        self._limited = target if isinstance(target, RateLimited) else None

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Call until there is an answer, a lasting error, or no attempt or time left; `context.attempt` counts them.

        A case may make several calls, one after the other: each has all attempts.
        """
        began = time.monotonic() - context.waiting
        ends = began + self._policy.total_seconds
        before, refusals = context.attempt - 1, 0
        while True:
            answers = self._limited.limits.answers if self._limited is not None else 0
            try:
                response = await self._target.invoke(case, context)
            except self._transient as error:
                refusals += self._may_keep_waiting(error, answers, refusals)
                attempt = context.attempt - before - refusals
                wait = self._wait_after(error, attempt, ends + context.waiting - time.monotonic())
                if wait is None:
                    raise
                # The error that is raised at last carries its own cost; those of the attempts before are added up here.
                context.spent += _cost_of(error)
                context.failed += time.monotonic() - context.waiting - began
                _note_failure(error, context)
            else:
                retries = context.attempt - 1 - before
                return _retried(response, retries) if retries else response
            await _back_off(wait, context)
            context.attempt += 1
            began = time.monotonic() - context.waiting

    def _may_keep_waiting(self, error: Exception, answers: int, refusals: int) -> bool:
        """Whether the call was refused while the endpoint answered others, and may keep waiting for its turn.

        Not in a load run, which does not pause for refusals but counts them.
        """
        if self._limited is None or not self._limited.limits.pauses:
            return False
        if self._policy.attempts == 1 or refusals >= _MAX_REFUSALS:
            return False
        return _is_refusal(error) and self._limited.limits.answers > answers

    def _wait_after(self, error: Exception, attempt: int, left: float) -> float | None:
        """Return the seconds until the next attempt, None for no other; raises when the endpoint asks for too many."""
        if attempt >= self._policy.attempts:
            return None
        wait = self._policy.wait_before(max(2, attempt + 1))
        if isinstance(error, TransientError) and error.retry_after is not None and error.retry_after > wait:
            wait = error.retry_after
            if wait > left:
                raise _hopeless(error, wait, left) from error
        if self._limited is not None and self._limited.limits.pauses and _is_refusal(error):
            wait = 0.0  # all calls to the endpoint pause now: this one waits for a send permit like them
        return wait if wait <= left else None


def _is_refusal(error: Exception) -> bool:
    """Whether the endpoint said that it is overloaded."""
    return isinstance(error, TransientError) and error.overloaded


def _cost_of(error: Exception) -> float:
    """Return the cost of a failed attempt, as far as it is known."""
    partial = getattr(error, "partial", None)
    cost = partial.cost if isinstance(partial, InvocationResponse) else None
    return float(cost) if isinstance(cost, int | float) and abs(cost) <= MAX_NUMBER else 0.0


def _note_failure(error: Exception, context: InvocationContext) -> None:
    """Remember a failed attempt for the record; of very many, the latest."""
    status = getattr(getattr(error, "partial", None), "http_status", None)
    failed = FailedAttempt(
        error_type=type(error).__name__,
        error=masked_description(error, _MAX_MESSAGE),
        time=datetime.now(UTC),
        http_status=status if isinstance(status, int) else None,
    )
    context.retry_errors = [*(context.retry_errors or [])[1 - MAX_RETRY_ERRORS :], failed]


async def _back_off(seconds: float, context: InvocationContext) -> None:
    """Sleep, and add the time to the context, also when it was cut short."""
    began = time.monotonic()
    try:
        await asyncio.sleep(seconds)
    finally:
        context.backoff += time.monotonic() - began


def _hopeless(error: TransientError, asked: float, left: float) -> TransientError:
    """Return the error that says why there was no other attempt."""
    return TransientError(
        f"{error}; not retried: it asks to wait {asked:g} s, and {max(0.0, left):.3g} s are left for retries",
        retry_after=error.retry_after,
        overloaded=error.overloaded,
        partial=error.partial,
    )


def _retried(response: InvocationResponse, times: int) -> InvocationResponse:
    """Return a copy of the response with our retries added to those that the target made itself."""
    if not isinstance(response, InvocationResponse):
        return response  # reported by the case runner
    return msgspec.structs.replace(response, retries=response.retries + times)
