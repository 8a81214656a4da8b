"""A simulated model: deterministic answers, realistic times, no network."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from random import Random
from time import perf_counter
from typing import Any

import msgspec

from steelyard.errors import ConfigurationError, TargetError, TransientError
from steelyard.protocols import Identity, InvocationContext, derived_rng
from steelyard.records import EvalCase, InvocationResponse
from steelyard.targets.conversation import time_per_output_token

_TOKENS_PER_WORD = 1.3
_OUTPUT_SPREAD = 0.25
"""The standard deviation of the number of output tokens, as a share of their mean."""
_OPENINGS = ("As far as is known", "In short", "All things considered", "On balance")
_CLAIMS = ("it depends", "the answer is simple", "there are several views", "more would have to be said")
_EVASIONS = ("unknown", "none of these", "not sure", "hard to say", "?", "-")


class Simulated:
    """A simulated model. All is drawn from (seed, case, trial): the same case always gets the same answer.

    `latency` is the median time to the first token in seconds and `latency_sigma` the spread of its logarithm;
    zero latency and zero (or no) `tokens_per_second` mean no waiting at all. `error_rate` is the share of cases
    that always fail, `transient_rate` the share of attempts that fail and may be retried.
    """

    def __init__(
        self,
        *,
        model: str = "simulated",
        latency: float = 0.3,
        latency_sigma: float = 0.4,
        tokens_per_second: float | None = 80.0,
        output_tokens: int = 24,
        stream: bool = True,
        accuracy: float = 0.9,
        error_rate: float = 0.0,
        transient_rate: float = 0.0,
        parallelism: int = 50,
    ) -> None:
        if parallelism < 1:
            raise ConfigurationError(f"parallelism must be >= 1, got {parallelism}")
        self.model_id = model
        self.default_parallelism = parallelism
        self.latency = _non_negative("latency", latency)
        self.latency_sigma = _non_negative("latency_sigma", latency_sigma)
        self.tokens_per_second = _non_negative("tokens_per_second", tokens_per_second or 0.0)
        self.output_tokens = _non_negative("output_tokens", output_tokens)
        self.stream = stream
        self.accuracy = _share("accuracy", accuracy)
        self.error_rate = _share("error_rate", error_rate)
        self.transient_rate = _share("transient_rate", transient_rate)

    def __repr__(self) -> str:
        return f"Simulated(model={self.model_id!r})"

    def identity(self) -> Identity:
        """Every parameter that decides an answer; those that decide only its timing warn."""
        return {
            "kind": "simulated",
            "model": self.model_id,
            "accuracy": self.accuracy,
            "error_rate": self.error_rate,
            "output_tokens": self.output_tokens,
            "~latency": self.latency,
            "~latency_sigma": self.latency_sigma,
            "~tokens_per_second": self.tokens_per_second,
            "~stream": self.stream,
            "~transient_rate": self.transient_rate,
        }

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Answer the case after its random latency, or raise its random failure."""
        rng = derived_rng(context.seed, context.case_id, context.trial, self.model_id)
        # Always drawn in this order, so that one parameter never changes what another one decides.
        is_right = rng.random() < self.accuracy
        until_first = self.latency * math.exp(rng.gauss(0.0, self.latency_sigma))
        output_tokens = self._draw_output_tokens(rng)
        request_time = datetime.now(UTC)
        started = perf_counter()
        await _pause(until_first)
        first = perf_counter() - started
        self._fail_if_drawn(context)
        if self.tokens_per_second:
            await _pause(max(0, output_tokens - 1) / self.tokens_per_second)
        last = perf_counter() - started
        text = _answer(case, is_right, rng)
        return InvocationResponse(
            response_text=text,
            input_prompt=case.prompt,
            messages=[*_conversation(case), {"role": "assistant", "content": text}],
            time_to_first_token=first if self.stream else None,
            time_to_last_token=last,
            time_per_output_token=time_per_output_token(first if self.stream else None, last, output_tokens),
            num_tokens_input=_count_input_tokens(case),
            num_tokens_output=output_tokens,
            request_time=request_time,
            stop_reason="stop",
        )

    def _draw_output_tokens(self, rng: Random) -> int:
        drawn = round(rng.gauss(self.output_tokens, self.output_tokens * _OUTPUT_SPREAD))
        return max(drawn, 1) if self.output_tokens else 0

    def _fail_if_drawn(self, context: InvocationContext) -> None:
        """Raise a random failure: a permanent one is the same in every trial, a transient one is of one attempt."""
        if self.error_rate:
            drawn = derived_rng(context.seed, context.case_id, 0, self.model_id, "error").random()
            if drawn < self.error_rate:
                raise TargetError(f"simulated: {self.model_id} cannot answer case {context.case_id!r}")
        if self.transient_rate:
            rng = derived_rng(context.seed, context.case_id, context.trial, self.model_id, "transient", context.attempt)
            if rng.random() < self.transient_rate:
                raise TransientError(f"simulated: {self.model_id} was busy on attempt {context.attempt}")


async def _pause(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)


def _answer(case: EvalCase, is_right: bool, rng: Random) -> str:
    right = [_as_text(one) for one in _accepted(case.expected)] or [_sentence(rng)]
    return right[0] if is_right else _wrong_answer(right, rng)


def _accepted(expected: Any) -> list[Any]:
    if expected is None:
        return []
    return list(expected) if isinstance(expected, list | tuple) else [expected]


def _as_text(value: Any) -> str:
    """Return the value as a model would write it: text unchanged, anything else as JSON."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        return str(value)


def _sentence(rng: Random) -> str:
    return f"{rng.choice(_OPENINGS)}, {rng.choice(_CLAIMS)}."


def _wrong_answer(right: list[str], rng: Random) -> str:
    """Return an evasive text that contains no accepted answer, so that lenient scorers fail it too."""
    start = rng.randrange(len(_EVASIONS))
    folded = [one.casefold() for one in right if one]
    for evasion in _EVASIONS[start:] + _EVASIONS[:start]:
        if not any(one in evasion for one in folded):
            return evasion
    return "?" * (max(map(len, right)) + 1)


def _conversation(case: EvalCase) -> list[dict[str, Any]]:
    turns = list(case.messages or [])
    if case.prompt is not None:
        turns.append({"role": "user", "content": case.prompt})
    return turns


def _count_input_tokens(case: EvalCase) -> int:
    words = len(case.system_prompt.split()) if case.system_prompt else 0
    for turn in _conversation(case):
        words += sum(len(text.split()) for text in _texts(turn.get("content")))
    return round(words * _TOKENS_PER_WORD)


def _texts(content: Any) -> Iterator[str]:
    """Yield the texts of a message: plain, or in parts as in the chat formats."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


def _share(name: str, value: float) -> float:
    if not _is_number(value) or not 0 <= value <= 1:
        raise ConfigurationError(f"{name} must be a number from 0 to 1, got {value!r}")
    return float(value)


def _non_negative(name: str, value: float) -> float:
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ConfigurationError(f"{name} must be a number >= 0, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
