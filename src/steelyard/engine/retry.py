"""Asking again when a fault may pass: bounded in attempts and in time, with full jitter."""

from __future__ import annotations

import asyncio
import random
import time

import msgspec

from steelyard.contracts import Identity, InvocationContext, Target
from steelyard.errors import TransientError
from steelyard.records import EvalCase, InvocationResponse

_ALWAYS_TRANSIENT: tuple[type[Exception], ...] = (TransientError, ConnectionError, TimeoutError)


class RetryPolicy(msgspec.Struct, frozen=True):
    """At most `attempts` calls within `total_seconds`; waits are uniform in 0..min(longest, first * 2^n)."""

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


class Retrying:
    """A target that asks the one inside it again after transient faults. The caller's permit is kept meanwhile."""

    def __init__(self, target: Target, policy: RetryPolicy) -> None:
        self._target = target
        self._policy = policy
        self._transient = (*_ALWAYS_TRANSIENT, *policy.retry_on)

    @property
    def model_id(self) -> str | None:
        return self._target.model_id

    @property
    def default_parallelism(self) -> int:
        return self._target.default_parallelism

    def identity(self) -> Identity:
        return self._target.identity()

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Ask until there is an answer, a final fault, or no attempt or time left; `context.attempt` counts."""
        began = time.monotonic()
        while True:
            try:
                response = await self._target.invoke(case, context)
            except self._transient:
                wait = self._policy.wait_before(context.attempt + 1)
                spent = time.monotonic() - began
                if context.attempt >= self._policy.attempts or spent + wait > self._policy.total_seconds:
                    raise
            else:
                return response if context.attempt == 1 else _retried(response, context.attempt - 1)
            await asyncio.sleep(wait)
            context.attempt += 1


def _retried(response: InvocationResponse, times: int) -> InvocationResponse:
    """The response with our retries counted, on top of any the target made by itself; a copy, it may be shared."""
    if not isinstance(response, InvocationResponse):
        return response  # not ours to judge: the work names it for what it is
    return msgspec.structs.replace(response, retries=response.retries + times)
