"""Asking again when a fault may pass: bounded in attempts and in time, with full jitter."""

from __future__ import annotations

import asyncio
import random
import time

import msgspec

from steelyard.engine.rate_limit import RateLimited
from steelyard.errors import TransientError
from steelyard.protocols import InvocationContext, Target, TargetWrapper
from steelyard.records import EvalCase, InvocationResponse

_ALWAYS_TRANSIENT: tuple[type[Exception], ...] = (TransientError, ConnectionError, TimeoutError)
_MOST_REFUSALS = 100
"""How often a call may be refused, beside its attempts, by an endpoint that answers others meanwhile."""


class RetryPolicy(msgspec.Struct, frozen=True):
    """At most `attempts` calls within `total_seconds`; waits are uniform in 0..min(longest, first * 2^n).

    An endpoint that asks to be left alone for longer (`Retry-After`) is, if that fits into the total time. Time
    spent waiting for leave to send does not count towards it. Nor does a refusal count as an attempt while the
    endpoint answers others: more was sent than it takes, and the call has done nothing but wait its turn.
    """

    attempts: int = 5
    first_wait: float = 0.5
    longest_wait: float = 30.0
    total_seconds: float = 600.0
    retry_on: tuple[type[Exception], ...] = ()

    def wait_before(self, attempt: int) -> float:
        """Seconds to wait before attempt number `attempt` (the second is 2): full jitter."""
        # The exponent is capped so that a large number of attempts cannot overflow a float.
        ceiling = min(self.longest_wait, self.first_wait * 2.0 ** min(attempt - 2, 60))
        return random.uniform(0.0, ceiling)


class Retry(TargetWrapper):
    """A target that asks the one inside it again after transient faults. The caller's permit is kept meanwhile."""

    def __init__(self, target: Target, policy: RetryPolicy) -> None:
        self._target = target
        self._policy = policy
        self._transient = (*_ALWAYS_TRANSIENT, *policy.retry_on)
        self._limited = target if isinstance(target, RateLimited) else None

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Ask until there is an answer, a final fault, or no attempt or time left; `context.attempt` counts the tries.

        A case may make several calls, one after the other: each has all attempts.
        """
        ends = time.monotonic() - context.waiting + self._policy.total_seconds
        before, refusals = context.attempt - 1, 0
        while True:
            answers = self._limited.answers if self._limited is not None else 0
            try:
                response = await self._target.invoke(case, context)
            except self._transient as error:
                refusals += self._only_waits(error, answers, refusals)
                attempt = context.attempt - before - refusals
                wait = self._wait_after(error, attempt, ends + context.waiting - time.monotonic())
                if wait is None:
                    raise
                # The error that is raised brings its own cost along; of those before it only this is left.
                context.spent += _cost_of(error)
            else:
                retries = context.attempt - 1 - before
                return _retried(response, retries) if retries else response
            await _back_off(wait, context)
            context.attempt += 1

    def _only_waits(self, error: Exception, answers: int, refusals: int) -> bool:
        """Whether the call was refused while the endpoint answered others, and may go on waiting for its turn.

        Not where nobody pauses for refusals: a load run counts them.
        """
        if self._limited is None or not self._limited.pauses:
            return False
        if self._policy.attempts == 1 or refusals >= _MOST_REFUSALS:
            return False
        return _is_refusal(error) and self._limited.answers > answers

    def _wait_after(self, error: Exception, attempt: int, left: float) -> float | None:
        """Seconds until the next try, None when there is to be none; raises when the endpoint asks for too many."""
        if attempt >= self._policy.attempts:
            return None
        wait = self._policy.wait_before(max(2, attempt + 1))
        if isinstance(error, TransientError) and error.retry_after is not None and error.retry_after > wait:
            wait = error.retry_after
            if wait > left:
                raise _hopeless(error, wait, left) from error
        if self._limited is not None and self._limited.pauses and _is_refusal(error):
            wait = 0.0  # all calls to the endpoint pause now: this one waits for leave among them
        return wait if wait <= left else None


def _is_refusal(error: Exception) -> bool:
    """Whether the endpoint said that it has too much to do."""
    return isinstance(error, TransientError) and error.overloaded


def _cost_of(error: Exception) -> float:
    """What a try has cost that failed, as far as that was told."""
    partial = getattr(error, "partial", None)
    cost = partial.cost if isinstance(partial, InvocationResponse) else None
    return cost if isinstance(cost, int | float) else 0.0


async def _back_off(seconds: float, context: InvocationContext) -> None:
    """Sleep, and add to the context what it came to, also when it was cut short."""
    began = time.monotonic()
    try:
        await asyncio.sleep(seconds)
    finally:
        context.backoff += time.monotonic() - began


def _hopeless(error: TransientError, asked: float, left: float) -> TransientError:
    """The error that says why no other try was made."""
    return TransientError(
        f"{error}; not tried again: it asks to wait {asked:g} s, and {max(0.0, left):.3g} s are left for retries",
        retry_after=error.retry_after,
        overloaded=error.overloaded,
        partial=error.partial,
    )


def _retried(response: InvocationResponse, times: int) -> InvocationResponse:
    """The response with our retries counted, on top of any the target made by itself; a copy, it may be shared."""
    if not isinstance(response, InvocationResponse):
        return response  # not ours to judge: the work names it for what it is
    return msgspec.structs.replace(response, retries=response.retries + times)
