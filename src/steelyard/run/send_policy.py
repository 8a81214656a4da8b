"""The conditions of a launch: how many calls at once, how fast and when, at which price; and what came of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from steelyard.engine.adaptive import AdaptivePermits
from steelyard.engine.arrivals import Schedule, parse_arrivals
from steelyard.engine.rate_limit import EndpointLimits, RateLimited
from steelyard.protocols import Pace, RemoteTarget, RepeatedJudge, Scorer, Tally, Target
from steelyard.run.options import RunOptions
from steelyard.stats.client_load import ClientLoad, LoopMonitor, judge_client, with_earlier
from steelyard.stats.costs import Spending
from steelyard.stats.metrics import LoadMetrics, SendCounts
from steelyard.stats.prices import Priced, Prices, check_budget, is_paid, read_prices
from steelyard.tokens import estimate_input_tokens
from steelyard.units import parse_rate


class SendPolicy:
    """Everything that decides when a call is sent, made anew for each launch."""

    def __init__(self, target: Target, scorers: Iterable[Scorer], options: RunOptions) -> None:
        self._options = options
        self._target = target
        self._asked = _asked_targets(target, scorers)
        self.remotes = [asked for asked in self._asked if isinstance(asked, RemoteTarget)]
        self._rate = parse_rate(options.rate) if options.rate is not None else None
        self._book = read_prices(options.prices, target.model_id)
        self._prices: dict[int, Prices | None] = {}
        self._limits: dict[str | int, EndpointLimits] = {}
        self._monitor = LoopMonitor()
        self._load: ClientLoad | None = None
        self.earlier: ClientLoad | None = None
        """How busy the client was in earlier launches, as far as that is known."""
        self._sends: SendCounts | None = None
        self.permits = AdaptivePermits(options.max_parallelism) if options.parallelism == "auto" else None
        self.schedule: Schedule | None = None
        self.warmed_up = 0
        self.parallelism = self._most_at_once()

    def check(self) -> None:
        """Refuse, before anything is called, what cannot be asked, planned or paid for. Not for the event loop."""
        for remote in self.remotes:
            remote.check()
        if self._options.arrivals is not None:
            parse_arrivals(self._options.arrivals)
        if self._options.max_cost is not None:
            check_budget(self._options.max_cost, self._target, self._book, judges=self._asked[1:])
        for asked in self._asked:
            self._prices[id(asked)] = self._book.of(asked)

    def tell_prices(self, spending: Spending) -> None:
        """Say in the books which currency they are in and, where no price is known, why."""
        spending.currency = self._book.currency
        target = self._target
        # A model on one's own machine has no price that anybody would miss.
        if is_paid(target) and self._prices[id(target)] is None:
            spending.unknown_because = self._book.unknown_because(target)

    def plan_sends(self, count: int | None) -> Pace | None:
        """When each call is to be sent, in open loop: so many, or as long as the options say."""
        if self._options.arrivals is not None:
            options = self._options
            arrivals = parse_arrivals(options.arrivals)
            most = options.requests or count
            self.schedule = Schedule(arrivals, duration=options.duration, count=most, seed=options.seed)
        return self.schedule

    @property
    def allowed(self) -> int:
        """How many calls may be in flight at this moment."""
        return self.permits.allowed if self.permits is not None else self.parallelism

    def priced(self, target: Target, inner: Target, on_cost: Callable[[float | None], None] | None = None) -> Target:
        """What asks the target with its costs told, where they can be known."""
        prices = self._prices.get(id(target))
        return inner if prices is None and on_cost is None else Priced(inner, prices, on_cost)

    def limited(self, target: Target, inner: Target) -> Target:
        """What asks the target, behind the limits of the target's endpoint, where it has any."""
        options = self._options
        is_remote = isinstance(target, RemoteTarget)
        adaptive = self.permits if target is self._target else None
        if adaptive is None and self.permits is not None:
            # What a judge asks bears a number of its own, and nothing else bounds it: scored cases hold no permit.
            adaptive = AdaptivePermits(options.max_parallelism)
        if not (is_remote or self._rate or options.tokens_per_min or adaptive):
            return inner
        place: str | int = target.endpoint if isinstance(target, RemoteTarget) else id(target)
        if place not in self._limits:
            self._limits[place] = EndpointLimits(
                rate=self._rate,
                tokens_per_min=options.tokens_per_min,
                permits=adaptive,
                pauses=not options.is_load,
            )
        estimate = estimate_input_tokens if options.tokens_per_min is not None else None
        return RateLimited(inner, self._limits[place], estimate=estimate)

    @property
    def waits(self) -> bool:
        """Whether a call may have to wait for leave, with its own time standing still."""
        return bool(self._limits)

    async def open(self) -> None:
        """Have the endpoints ready for as many calls as may come at once; all of them, or none is left open."""
        async with contextlib.AsyncExitStack() as opened:
            for remote in self.remotes:
                await remote.open(self.parallelism)
                opened.push_async_callback(remote.close)
            opened.pop_all()

    async def close(self) -> None:
        """Let go of the endpoints, whatever any of them makes of it."""
        async with contextlib.AsyncExitStack() as stack:
            for remote in self.remotes:
                stack.push_async_callback(remote.close)

    def watch(self) -> None:
        """Begin to watch how busy this process is with the run."""
        self._monitor.start()

    def stop_watching(self, elsewhere: Sequence[ClientLoad] = ()) -> None:
        """End it, and settle what was sent when: the run is over. Processes that did the work count before this one."""
        own = self._monitor.stop()
        self._load = max(elsewhere, key=lambda load: (load.loop_cpu_share, load.loop_lag_sustained), default=own)
        self._sends = self.schedule.counts() if self.schedule is not None else None

    def to_metrics(self, tally: Tally, stats: Mapping[str, float | None]) -> dict[str, Any]:
        """What metrics.json says of how the calls were sent."""
        metrics: dict[str, Any] = {
            "parallelism": "auto" if self.permits is not None else self.parallelism,
            "peak_in_flight": tally.peak_in_flight,
        }
        if self.permits is not None:
            metrics["parallelism_history"] = list(self.permits.history)
        if self._load is not None:
            load = self._judged(self._load, stats)
            metrics["client"] = load if self.earlier is None else with_earlier(self.earlier, load)
        if self._options.is_load or self.warmed_up:
            metrics["load"] = self._load_metrics(tally)
        return metrics

    def _judged(self, load: ClientLoad, stats: Mapping[str, float | None]) -> ClientLoad:
        """Whether the client was the bottleneck; a target in this very process keeps it busy by its nature."""
        if not (self._options.is_load or isinstance(self._target, RemoteTarget)):
            return load
        first = stats["time_to_first_token-p50"]
        return judge_client(load, stats["time_to_last_token-p50"] if first is None else first)

    def _load_metrics(self, tally: Tally) -> LoadMetrics:
        options = self._options
        return LoadMetrics(
            requests=options.requests,
            duration=options.duration,
            arrivals=options.arrivals,
            warmup=self.warmed_up,
            sends=UNSET if self._sends is None else self._sends.really_sent(tally.started),
        )

    def _most_at_once(self) -> int:
        wanted = self._options.parallelism
        if isinstance(wanted, int):
            return wanted
        if wanted == "auto" or self._options.arrivals is not None:
            return self._options.max_parallelism
        return self._target.default_parallelism


def load_of(options: RunOptions) -> dict[str, Any] | None:
    """What run.json says of how a load run's requests were to be sent; None when it is none."""
    if not options.is_load:
        return None
    return {name: getattr(options, name) for name in ("requests", "duration", "arrivals", "warmup", "parallelism")}


def _asked_targets(target: Target, scorers: Iterable[Scorer]) -> list[Target]:
    """What a run asks, its judges' targets included, each once."""
    found = {id(target): target}

    def take(asked: Target) -> Target:
        found[id(asked)] = asked
        return asked

    for scorer in scorers:
        if isinstance(scorer, RepeatedJudge):
            scorer.bound(take)
    return list(found.values())
