"""Scorers that compare a response with a limit: how long it took, how many tokens it used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from steelyard.errors import ConfigurationError
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.base import PlainScorer, check_choice, check_number

TimeMetric: TypeAlias = Literal["time_to_first_token", "time_to_last_token", "time_per_output_token"]


@dataclass(frozen=True, kw_only=True)
class Latency(PlainScorer):
    """Passes when the response took at most `max_seconds`, by one of its times."""

    name: str = "latency"
    max_seconds: float
    metric: TimeMetric = "time_to_last_token"

    def _check(self) -> None:
        check_number("max_seconds", self.max_seconds)
        check_choice("metric", self.metric, get_args(TimeMetric))

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:  # noqa: ARG002 - the protocol's
        """Return 1.0 or 0.0; None when the response does not have that time."""
        seconds = getattr(response, self.metric)
        if seconds is None or seconds != seconds:  # NaN counts as not measured
            return None
        return self._score(
            seconds <= self.max_seconds, f"{self.metric} {seconds:.4g} s is above {self.max_seconds:g} s"
        )


@dataclass(frozen=True, kw_only=True)
class Tokens(PlainScorer):
    """Passes when the response has at most `max_output` tokens and its request at most `max_input`."""

    name: str = "tokens"
    max_output: int | None = None
    max_input: int | None = None

    def _check(self) -> None:
        if self.max_output is None and self.max_input is None:
            raise ConfigurationError("tokens needs max_output or max_input, got neither")
        for name in ("max_output", "max_input"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:  # noqa: ARG002 - the protocol's
        """Return 1.0 or 0.0; None when the response has none of the limited figures."""
        figures = (
            ("output", response.num_tokens_output, self.max_output),
            ("input", response.num_tokens_input, self.max_input),
        )
        known = [(side, count, most) for side, count, most in figures if count is not None and most is not None]
        if not known:
            return None
        over = [f"{count} {side} tokens, at most {most} allowed" for side, count, most in known if count > most]
        return self._score(not over, "; ".join(over))
