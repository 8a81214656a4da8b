"""Asking again when a fault may pass: bounded in attempts and in time, with full jitter."""

from __future__ import annotations

import asyncio
import random
import time

import msgspec

from steelyard.contracts import InvocationContext, Target, TargetAround
from steelyard.errors import TransientError
from steelyard.records import EvalCase, InvocationResponse

_ALWAYS_TRANSIENT: tuple[type[Exception], ...] = (TransientError, ConnectionError, TimeoutError)


class RetryPolicy(msgspec.Struct, frozen=True):
    """At most `attempts` calls within `total_seconds`; waits are uniform in 0..min(longest, first * 2^n).

    An endpoint that asks to be left alone for longer (`Retry-After`) is, if that fits into the total time. Time
    spent waiting for leave to send does not count towards it.
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


class Retrying(TargetAround):
    """A target that asks the one inside it again after transient faults. The caller's permit is kept meanwhile."""

    def __init__(self, target: Target, policy: RetryPolicy) -> None:
        self._target = target
        self._policy = policy
        self._transient = (*_ALWAYS_TRANSIENT, *policy.retry_on)

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Ask until there is an answer, a final fault, or no attempt or time left; `context.attempt` counts."""
        ends = time.monotonic() - context.waiting + self._policy.total_seconds
        while True:
            try:
                response = await self._target.invoke(case, context)
            except self._transient as error:
                wait = self._wait_after(error, context.attempt, ends + context.waiting - time.monotonic())
                if wait is None:
                    raise
                # The error that is raised brings its own cost along; of those before it only this is left.
                context.spent += _cost_of(error)
            else:
                return response if context.attempt == 1 else _retried(response, context.attempt - 1)
            await _back_off(wait, context)
            context.attempt += 1

    def _wait_after(self, error: Exception, attempt: int, left: float) -> float | None:
        """Seconds until the next try, None when there is to be none; raises when the endpoint asks for too many."""
        if attempt >= self._policy.attempts:
            return None
        wait = self._policy.wait_before(attempt + 1)
        if isinstance(error, TransientError) and error.retry_after is not None and error.retry_after > wait:
            wait = error.retry_after
            if wait > left:
                raise _hopeless(error, wait, left) from error
        return wait if wait <= left else None


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
