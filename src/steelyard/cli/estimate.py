"""What calls that are not made yet would use and cost, and how that is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from steelyard.contracts import Target
from steelyard.money import PriceBook, Prices, cost_of
from steelyard.records import EvalCase, InvocationResponse
from steelyard.stats.running import RunningStats
from steelyard.stats.spending import Spending, format_money
from steelyard.stats.wording import safe_text

OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""What the providers call the parameter that ends an answer."""

Bound = Literal["about", "at most", "at least"]


class OutputGuess(msgspec.Struct, frozen=True):
    """How many tokens an answer is taken to have: None when there is nothing to go by."""

    tokens: float | None
    bound: Bound
    source: str


class Estimate(msgspec.Struct, kw_only=True):
    """The tokens and the cost of calls to come. Of a cost whose output is not known, the input's is a lower bound."""

    input_tokens: int
    output_tokens: int | None
    output_tokens_from: str
    cost: float | None
    cost_bound: Bound | None
    currency: str
    prices_from: str

    def describe(self) -> list[str]:
        """The estimate in words."""
        output = "not known: no answer so far, and no limit in the target's params"
        if self.output_tokens is not None:
            output = f"{self.output_tokens:,}, {self.output_tokens_from}"
        cost = f"not known: {safe_text(self.prices_from)}"
        if self.cost is not None:
            alone = ", the input alone" if self.output_tokens is None else ""
            money = format_money(self.cost, safe_text(self.currency))
            cost = f"{self.cost_bound} {money}{alone} ({safe_text(self.prices_from)})"
        return [f"input tokens: about {self.input_tokens:,}", f"output tokens: {output}", f"cost: {cost}"]


def guess_output(target: Target, finished: RunningStats) -> OutputGuess:
    """As many as the answers so far had on average; else as many as the target's parameters allow."""
    average = finished.to_stats()["num_tokens_output-average"]
    if average is not None:
        return OutputGuess(average, "about", f"like the answers so far ({average:,.0f} each)")
    params = target.identity().get("params")
    given = params if isinstance(params, Mapping) else {}
    for name in OUTPUT_LIMITS:
        limit = given.get(name)
        if isinstance(limit, int) and not isinstance(limit, bool):
            return OutputGuess(limit, "at most", f"at most {limit:,} each ({name})")
    return OutputGuess(None, "at least", "not known")


class Estimator:
    """Adds up calls, one after another; keeps none of them."""

    def __init__(self, target: Target, book: PriceBook, output: OutputGuess) -> None:
        self._prices: Prices | None = book.of(target)
        self._source = book.unknown_because(target) if self._prices is None else self._prices.source
        self._output = output
        self._input_tokens = 0
        self._calls = 0
        self._spending = Spending(book.currency)

    def add(self, case: EvalCase) -> None:
        """Count in a call that asks this case."""
        from steelyard.tokens import estimate_input_tokens

        tokens = estimate_input_tokens(case)
        self._calls += 1
        self._input_tokens += tokens
        if self._prices is not None:
            output = round(self._output.tokens or 0)
            asked = InvocationResponse(num_tokens_input=tokens, num_tokens_output=output)
            asked.cost = cost_of(asked, self._prices)
            self._spending.update(asked)

    def estimate(self, calls: int | None = None) -> Estimate:
        """The sums; when more `calls` are to be made than were added, each as those were on average."""
        share = 1.0 if calls is None or not self._calls else calls / self._calls
        output = self._output.tokens
        unknown: dict[str, Any] = {"cost": None, "cost_bound": None}
        cost = {"cost": round(self._spending.total * share, 12), "cost_bound": self._output.bound}
        return Estimate(
            input_tokens=round(self._input_tokens * share),
            output_tokens=None if output is None else round(output * self._calls * share),
            output_tokens_from=self._output.source,
            currency=self._spending.currency,
            prices_from=self._source,
            **(unknown if self._prices is None else cost),
        )
