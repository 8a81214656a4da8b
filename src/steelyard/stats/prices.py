"""Prices: what an answer costs, by its tokens and the prices of the suite or a public list; what a run has spent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from steelyard.errors import ConfigurationError, TargetError, reject_unknown
from steelyard.protocols import InvocationContext, RemoteTarget, Target, TargetWrapper
from steelyard.records import EvalCase, InvocationResponse

_UNIT = 1e12
"""Costs are summed as whole numbers of 1e-12: exact for one token at any price per million tokens with up to six
decimals. A million of them add up to the last digit, which floats do not."""

_LIMIT = 1e9
"""A single call above this is a mistake, and counted as unknown."""
_MILLION = 1_000_000
_LISTED_CURRENCY = "USD"
_DECIMALS = 12
_LISTED = {"input": "input", "output": "output", "cached_input": "cache_read", "cache_write": "cache_write"}
"""What the public list calls each price."""
_KEYS = ("input", "output", "cached_input", "cache_write", "per", "currency")


class Costed(Protocol):
    """What Spending reads of a response or a record."""

    @property
    def error(self) -> str | None: ...
    @property
    def cached(self) -> bool: ...
    @property
    def cost(self) -> float | None: ...
    @property
    def tokens_estimated(self) -> bool: ...


class Spending:
    """The cost of answers, failed calls and judges, and the number of calls whose cost is not known.

    Add each answer that counts, and each error, superseded or not: it was paid for.
    """

    def __init__(self, currency: str = "USD", unknown_because: str | None = None) -> None:
        self.currency = currency
        self.unknown_because = unknown_because
        """Why no price is known, where one is expected."""
        self.calls = 0
        """Number of answers and errors with a known cost."""
        self.unknown = 0
        """Number of answers without one."""
        self.unknown_errors = 0
        self.unknown_judges = 0
        self.estimated = 0
        """Number of answers whose cost comes from estimated tokens."""
        self._answers = 0
        self._errors = 0
        self._judges = 0

    def update(self, record: Costed) -> None:
        """Add an answer or an error. One from the cache costs nothing now."""
        if record.cached:
            return
        units = _units(record.cost)
        failed = record.error is not None
        if units is None:
            self.unknown_errors += failed
            self.unknown += not failed
            return
        self.calls += 1
        if failed:
            self._errors += units
        else:
            self._answers += units
            self.estimated += record.tokens_estimated

    def update_judge(self, cost: float | None) -> None:
        """Add one call of a judge."""
        units = _units(cost)
        if units is None:
            self.unknown_judges += 1
        else:
            self._judges += units

    def merge(self, other: Spending) -> None:
        """Add another's calls, as if each had been counted here."""
        self.unknown_because = self.unknown_because or other.unknown_because
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)

    @property
    def answers(self) -> float:
        return self._answers / _UNIT

    @property
    def errors(self) -> float:
        return self._errors / _UNIT

    @property
    def judges(self) -> float:
        return self._judges / _UNIT

    @property
    def total(self) -> float:
        """Everything that is known to be spent."""
        return (self._answers + self._errors + self._judges) / _UNIT

    @property
    def per_call(self) -> float:
        """What a call has cost so far on average, its judges included; 0 before any is known."""
        return self.total / self.calls if self.calls else 0.0

    def to_metrics(self, *, n: int, passed: int) -> dict[str, Any]:
        """The figures for `metrics.json`: of `n` records, `passed` of them good. None where nothing is known."""
        nothing_known = not (self.calls or self._judges) and bool(
            self.unknown or self.unknown_errors or self.unknown_judges
        )
        total = None if nothing_known else self.total
        return {
            "cost": total,
            "cost_answers": None if total is None else self.answers,
            "cost_errors": None if total is None else self.errors,
            "cost_judges": None if total is None else self.judges,
            "cost_per_1000_cases": None if total is None or not n else total * 1000 / n,
            "cost_per_passed_case": None if total is None or not passed else total / passed,
            "cost_unknown": self.unknown,
            "cost_unknown_errors": self.unknown_errors,
            "cost_unknown_judges": self.unknown_judges,
            "cost_unknown_because": self.unknown_because,
            "cost_estimated": self.estimated,
            "currency": self.currency,
        }


def _units(cost: float | None) -> int | None:
    """Return a cost as a whole number; None when it is missing, negative, NaN or too large."""
    if cost is None or not 0 <= cost < _LIMIT:
        return None
    return round(cost * _UNIT)


def format_money(amount: float, currency: str) -> str:
    """Format an amount to the cent, or to two digits where it is less than that: 12.30 USD, 0.0042 USD."""
    digits = 2
    if 0 < abs(amount) < 1:
        digits = max(2, 1 - math.floor(math.log10(abs(amount))))
    return f"{amount:,.{digits}f} {currency}"


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """What a million tokens of a model cost. Reasoning is billed as output, as providers do."""

    input: float
    output: float
    cached_input: float | None = None
    """Of input tokens that the provider had in its prompt cache; as other input when None."""
    cache_write: float | None = None
    """Of input tokens that the provider wrote to its prompt cache; as other input when None."""
    currency: str = _LISTED_CURRENCY
    source: str = "the suite"
    above: tuple[tuple[int, Prices], ...] = ()
    """Other prices for requests of more input tokens than these, the highest number first."""


def cost_of(response: InvocationResponse, prices: Prices) -> float | None:
    """Return the cost of an answer, failed or not: 0 when it came from the cache, None when its tokens are not known.

    `num_tokens_input` are all input tokens, those from the provider's prompt cache and those written to it included.
    """
    if response.cached:
        return 0.0
    tokens, output = response.num_tokens_input, response.num_tokens_output
    if tokens is None or output is None:
        return None
    for more_than, others in prices.above:
        if tokens > more_than:
            prices = others
            break
    cached = min(response.num_tokens_input_cached or 0, tokens)
    written = min(response.num_tokens_input_cache_write or 0, tokens - cached)
    cost = (tokens - cached - written) * prices.input + output * prices.output
    cost += cached * (prices.input if prices.cached_input is None else prices.cached_input)
    cost += written * (prices.input if prices.cache_write is None else prices.cache_write)
    return round(cost / _MILLION, _DECIMALS)


class Priced(TargetWrapper):
    """A target whose answers say what they cost, unless they said so themselves.

    `on_cost` is called for every call, with None where its cost is not known: for judges, which have no record.
    """

    def __init__(
        self, target: Target, prices: Prices | None, on_cost: Callable[[float | None], None] | None = None
    ) -> None:
        self._target = target
        self._prices = prices
        self._on_cost = on_cost

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Call the target and add the cost. What was received before an error is priced too: it is billed."""
        try:
            response = await self._target.invoke(case, context)
        except (TargetError, asyncio.CancelledError) as error:
            if (partial := getattr(error, "partial", None)) is not None:
                error.partial = self._priced(partial)  # type: ignore[union-attr]
            raise
        return self._priced(response)

    def _priced(self, response: InvocationResponse) -> InvocationResponse:
        if not isinstance(response, InvocationResponse):
            return response  # the case runner reports it as an invalid response
        cost = response.cost
        if cost is None and self._prices is not None:
            cost = cost_of(response, self._prices)
            if cost is not None:
                # A copy: a user's function may return the same object again.
                response = msgspec.structs.replace(response, cost=cost)
        if self._on_cost is not None:
            self._on_cost(cost)
        return response


class PriceBook(msgspec.Struct, frozen=True):
    """The prices of a run: by model, as the suite gives them; for the rest a public list, if it is installed."""

    models: Mapping[str | None, Prices] = {}

    @property
    def currency(self) -> str:
        """The one currency of all prices."""
        return next((prices.currency for prices in self.models.values()), _LISTED_CURRENCY)

    def of(self, target: Target) -> Prices | None:
        """Return what the target's tokens cost; None when not known. Reads the list: not for the event loop."""
        if target.model_id in self.models:
            return self.models[target.model_id]
        # Only an endpoint identifies the provider, and amounts in different currencies cannot be added.
        if not isinstance(target, RemoteTarget) or target.model_id is None or self.currency != _LISTED_CURRENCY:
            return None
        return listed_prices(target.model_id, target.endpoint)

    def of_model(self, model: str | None, endpoint: str) -> Prices | None:
        """Return what a model's tokens cost at an endpoint, where an agent chooses the model. Reads the list."""
        found = self.models.get(model) or self.models.get(None)
        if found is None and model is not None and self.currency == _LISTED_CURRENCY:
            found = listed_prices(model, endpoint)
        return found

    def unknown_because(self, target: Target) -> str:
        """Explain why `of` knows no price, and what helps."""
        model = f"model {target.model_id!r}" if target.model_id is not None else "the target"
        why = f"the suite has no `prices` for {model}"
        if isinstance(target, RemoteTarget) and target.model_id is not None and self.currency == _LISTED_CURRENCY:
            where = target.endpoint
            listed = f"genai-prices knows none at {where}" if _has_list() else "genai-prices is not installed"
            return f"{why}, and {listed}"
        return why


def read_prices(raw: Mapping[str, Any] | None, model_id: str | None) -> PriceBook:
    """Read a suite's `prices`: one set, for the model of its target, or a set for each model."""
    if not raw:
        return PriceBook()
    if not isinstance(raw, Mapping):
        raise ConfigurationError(f"prices must be a mapping, got {raw!r}")
    models: dict[str | None, Prices]
    if all(isinstance(value, Mapping) for value in raw.values()):
        models = {str(model): _read_set(given, f"prices.{model}") for model, given in raw.items()}
    else:
        models = {model_id: _read_set(raw, "prices")}
    currencies = sorted({prices.currency for prices in models.values()})
    if len(currencies) > 1:
        raise ConfigurationError(f"prices must be in one currency, got {', '.join(currencies)}")
    return PriceBook(models)


def _read_set(raw: Mapping[str, Any], where: str) -> Prices:
    reject_unknown(raw, _KEYS, where)
    for key in ("input", "output"):
        if raw.get(key) is None:
            raise ConfigurationError(f"{where} must say what {key} tokens cost: {where}.{key}")
    scale = _MILLION / _number(raw.get("per", _MILLION), f"{where}.per", above=0)
    currency = raw.get("currency", _LISTED_CURRENCY)
    if not isinstance(currency, str) or not currency.strip():
        raise ConfigurationError(f"{where}.currency must be text, got {currency!r}")
    given = [name for name in ("input", "output", "cached_input", "cache_write") if raw.get(name) is not None]
    prices = {name: _number(raw[name], f"{where}.{name}") * scale for name in given}
    return Prices(**prices, currency=currency.strip())  # type: ignore[arg-type]


def _number(value: object, where: str, *, above: float | None = None) -> float:
    try:
        # Text too: `1_000_000` is text in a suite file, but meant as a number.
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (above is not None and number <= above):
        least = "at least 0" if above is None else f"above {above:g}"
        raise ConfigurationError(f"{where} must be a number {least}, got {value!r}")
    return number


def listed_prices(model: str, endpoint: str) -> Prices | None:
    """Return a model's prices at an endpoint from the genai-prices package, if installed; uses no network."""
    if not endpoint.startswith("https://"):
        return None  # nobody is paid over plain HTTP, and the list takes a quarter of a second to load
    try:
        from genai_prices import Usage, calc_price
    except ImportError:
        return None
    try:
        # The list's patterns of addresses have no ports.
        found = calc_price(Usage(), model, provider_api_url=endpoint.removesuffix(":443"))
    except (LookupError, ValueError):
        return None
    # An older list may not know all of these.
    listed = {name: getattr(found.model_price, f"{key}_mtok", None) for name, key in _LISTED.items()}
    if listed["input"] is None or listed["output"] is None or found.model_price.requests_kcount is not None:
        return None  # not sold by the token alone: half a price would be a wrong one
    return _with_tiers(listed, f"genai-prices: {found.model.id} at {found.provider.id}")


def _with_tiers(listed: Mapping[str, Any], source: str) -> Prices:
    """Return the list's prices with their tiers: above a number of input tokens, all tokens cost more."""
    starts = {tier.start for price in listed.values() for tier in getattr(price, "tiers", ())}

    def at(tokens: int, above: tuple[tuple[int, Prices], ...] = ()) -> Prices:
        prices = {name: None if price is None else _at(price, tokens) for name, price in listed.items()}
        return Prices(**prices, source=source, above=above)  # type: ignore[arg-type]

    return at(0, tuple((start, at(start + 1)) for start in sorted(starts, reverse=True)))


def _at(price: Any, tokens: int) -> float:
    """Return the price for a request of this many input tokens."""
    reached = [tier.price for tier in getattr(price, "tiers", ()) if tokens > tier.start]
    return float(reached[-1] if reached else getattr(price, "base", price))


def _has_list() -> bool:
    from importlib.util import find_spec

    return find_spec("genai_prices") is not None


def over_budget(
    spending: Spending,
    limit: float,
    in_flight: int = 0,
    *,
    answers_are_paid: bool = False,
    elsewhere: float = 0.0,
    expected: float = 0.0,
) -> str | None:
    """Return why the budget is exhausted: the spending plus the expected cost of calls in flight reaches the limit.

    None while it does not. A budget cannot be kept when no answer has a known cost: that is a reason too. Answers that
    are only scored again were already paid for: then only the judges count against the limit. `elsewhere` is what
    others under the same budget have spent, `expected` what their calls in flight will cost.
    """
    if answers_are_paid:
        total, per_call = spending.judges, spending.judges / spending.calls if spending.calls else 0.0
    elif spending.unknown and not spending.calls:
        return f"max_cost {limit:g} cannot be kept: no answer has a known cost ({spending.unknown:,} so far)"
    else:
        total, per_call = spending.total, spending.per_call
    if elsewhere + expected + total + in_flight * per_call < limit:
        return None
    spent = format_money(elsewhere + total, spending.currency)
    under_way = f", with {in_flight:,} in flight" if in_flight else ""
    return f"{spent} spent{' in the whole matrix' if elsewhere else ''}{under_way}: max_cost is {limit:g}"


class SharedBudget:
    """One budget for several runs."""

    def __init__(self, limit: float, before: float = 0.0) -> None:
        self.limit = limit
        self.before = before
        """What runs that are over have spent of it."""
        self._runs: list[tuple[Spending, Callable[[], int]]] = []
        self.is_reported = False
        """Whether it was already said that it is exhausted."""

    def join(self, spending: Spending, in_flight: Callable[[], int]) -> None:
        """Count what a run spends, and what its calls in flight will cost."""
        self._runs.append((spending, in_flight))

    def over(self, spending: Spending, in_flight: int) -> str | None:
        """Why the run with this spending may ask no more; None while it may."""
        others = [(other, count()) for other, count in self._runs if other is not spending]
        elsewhere = self.before + math.fsum(other.total for other, _ in others)
        expected = math.fsum(count * other.per_call for other, count in others)
        return over_budget(spending, self.limit, in_flight, elsewhere=elsewhere, expected=expected)


def check_budget(limit: float, target: Target, prices: PriceBook, judges: Iterable[Target] = ()) -> None:
    """Refuse a budget for an endpoint without known prices, before anything is called.

    A judge over plain HTTP needs no prices; a target does, as the budget is for it.
    """
    asked = [target, *(judge for judge in judges if is_paid(judge))]
    for one in asked:
        if isinstance(one, RemoteTarget) and prices.of(one) is None:
            raise ConfigurationError(
                f"max_cost {limit:g} cannot be kept: {prices.unknown_because(one)}", topic="budget"
            )


def is_paid(target: Target) -> bool:
    """Whether its answers are likely paid for: over plain HTTP they are not."""
    return isinstance(target, RemoteTarget) and target.endpoint.startswith("https://")
