"""The send policy of a launch: how many calls at once, how fast and when, at which price; and its figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from steelyard.engine.adaptive import AdaptivePermits, PermitsShare
from steelyard.engine.arrivals import Schedule, parse_arrivals
from steelyard.engine.rate_limit import CallPermits, EndpointLimits, FixedPermits, RateLimited
from steelyard.protocols import Pace, RemoteTarget, RepeatedJudge, Scorer, Tally, Target
from steelyard.run.options import RunOptions
from steelyard.scoring.pipeline import samples_per_answer
from steelyard.stats.client_load import (
    LATE,
    MIN_SECONDS,
    ClientLoad,
    LoopMonitor,
    judge_client,
    judge_driver,
    with_earlier,
)
from steelyard.stats.metrics import LoadMetrics, SendCounts
from steelyard.stats.prices import Priced, Prices, Spending, check_budget, is_paid, read_prices
from steelyard.tokens import estimate_input_tokens
from steelyard.units import parse_rate


class Endpoints:
    """The endpoints that several runs call at the same time: each has one limit, and one pause, for all of them.

    `parallelism` says how many calls may be in flight at the endpoints of the targets; at others, which only judges
    call, as many as at the widest of them.
    """

    def __init__(self, options: RunOptions, parallelism: Mapping[str, int]) -> None:
        self.limits: dict[str | int, EndpointLimits] = {}
        self._parallelism = parallelism
        self._max_parallelism = options.max_parallelism if options.parallelism == "auto" else None
        self._permits: dict[str, FixedPermits | AdaptivePermits] = {}

    def permits(self, endpoint: str) -> FixedPermits | AdaptivePermits:
        """What bounds the calls in flight at an endpoint."""
        if endpoint not in self._permits:
            if self._max_parallelism is not None:
                self._permits[endpoint] = AdaptivePermits(self._max_parallelism)
            else:
                widest = max(self._parallelism.values())
                self._permits[endpoint] = FixedPermits(self._parallelism.get(endpoint, widest))
        return self._permits[endpoint]

    def adaptive(self, endpoint: str) -> AdaptivePermits | None:
        """The same where the number is found as the runs go on."""
        permits = self.permits(endpoint)
        return permits if isinstance(permits, AdaptivePermits) else None


LOCAL = "this machine"
"""The endpoint, so to speak, of functions and programs: they share this machine."""


def endpoint_of(target: Target) -> str:
    """Where the calls of a target go to."""
    return target.endpoint if isinstance(target, RemoteTarget) else LOCAL


def parallelism_of(target: Target, options: RunOptions) -> int:
    """How many calls a run may have in flight at most."""
    wanted = options.parallelism
    if isinstance(wanted, int):
        return wanted
    if wanted == "auto" or options.arrivals is not None:
        return options.max_parallelism
    return target.default_parallelism


class SendPolicy:
    """Everything that decides when a call is sent; one for each launch.

    `endpoints` are those that other runs call at the same time.
    """

    def __init__(
        self,
        target: Target,
        scorers: Iterable[Scorer],
        options: RunOptions,
        upstreams: Sequence[RemoteTarget] = (),
        endpoints: Endpoints | None = None,
    ) -> None:
        self._options = options
        self._endpoints = endpoints
        self._target = target
        self._targets = _all_targets(target, scorers)
        self._judged_places = _judged_places(scorers, options.num_runs)
        self.remotes = [called for called in self._targets if isinstance(called, RemoteTarget)]
        self.remotes += upstreams  # the providers behind an agent's gateway
        self._rate = parse_rate(options.rate) if options.rate is not None else None
        self.price_list = read_prices(options.prices, target.model_id)
        self._prices: dict[int, Prices | None] = {}
        self._limits: dict[str | int, EndpointLimits] = {} if endpoints is None else endpoints.limits
        self._monitor = LoopMonitor()
        self._load: ClientLoad | None = None
        self._driver: ClientLoad | None = None
        """The load of this process, when others did the work."""
        self._sends: SendCounts | None = None
        self.permits: AdaptivePermits | PermitsShare | None = None
        if options.parallelism == "auto":
            shared = None if endpoints is None else endpoints.adaptive(endpoint_of(target))
            self.permits = AdaptivePermits(options.max_parallelism) if shared is None else PermitsShare(shared)
        self._schedule: Schedule | None = None
        self.parallelism = parallelism_of(target, options)

    def check(self) -> None:
        """Raise ConfigurationError, before any call, for what cannot be called, scheduled or paid. Blocks."""
        for remote in self.remotes:
            remote.check()
        if self._options.arrivals is not None:
            parse_arrivals(self._options.arrivals)
        if self._options.max_cost is not None:
            check_budget(self._options.max_cost, self._target, self.price_list, judges=self._targets[1:])
        for called in self._targets:
            self._prices[id(called)] = self.price_list.of(called)

    def new_spending(self) -> Spending:
        """Return an empty account in the currency of the prices that says, where no price is known, why."""
        target = self._target
        # A model on one's own machine is not expected to have a price.
        unknown = is_paid(target) and self._prices[id(target)] is None
        return Spending(self.price_list.currency, self.price_list.unknown_because(target) if unknown else None)

    def plan_sends(self, count: int | None) -> Pace | None:
        """Return when each call is to be sent, in an open-loop run: `count` calls, or as the options say."""
        if self._options.arrivals is not None:
            options = self._options
            arrivals = parse_arrivals(options.arrivals)
            self._schedule = Schedule(
                arrivals, duration=options.duration, count=options.requests or count, seed=options.seed
            )
        return self._schedule

    @property
    def allowed(self) -> int:
        """How many calls may be in flight at this moment."""
        return self.permits.allowed if self.permits is not None else self.parallelism

    def priced(self, target: Target, inner: Target, on_cost: Callable[[float | None], None] | None = None) -> Target:
        """Wrap the target so that the cost of each call is reported, where it can be known."""
        prices = self._prices.get(id(target))
        return inner if prices is None and on_cost is None else Priced(inner, prices, on_cost)

    def limited(self, target: Target, inner: Target) -> Target:
        """Wrap the target in the rate limits of its endpoint, where it has any."""
        options = self._options
        is_remote = isinstance(target, RemoteTarget)
        place = _place_of(target)
        permits: CallPermits | None = None
        if self._endpoints is not None and (is_remote or self.permits is not None):
            # At an endpoint of several runs, only this keeps the calls of all of them to what -j says.
            permits = self._endpoints.permits(endpoint_of(target))
        elif target is self._target and isinstance(self.permits, AdaptivePermits):
            permits = self.permits
        if permits is None and self.permits is not None:
            # A judge's endpoint has its own permits; nothing else bounds its calls, as scored cases hold no permit.
            permits = AdaptivePermits(options.max_parallelism)
        if permits is None and place in self._judged_places:
            # A case asks for its samples all at once: only this keeps the endpoint to what -j says.
            permits = FixedPermits(self.parallelism)
        if not (is_remote or self._rate or options.tokens_per_min or permits):
            return inner
        if place not in self._limits:
            self._limits[place] = EndpointLimits(
                rate=self._rate,
                tokens_per_min=options.tokens_per_min,
                permits=permits,
                pauses=not options.is_load,
            )
        estimate = estimate_input_tokens if options.tokens_per_min is not None else None
        return RateLimited(inner, self._limits[place], estimate=estimate)

    @property
    def waits(self) -> bool:
        """Whether a call may have to wait for a send permit, while its time limit is stopped."""
        return bool(self._limits)

    async def open(self) -> None:
        """Open all endpoints for as many calls as may be in flight; when one fails, the others are closed again."""
        async with contextlib.AsyncExitStack() as opened:
            for remote in self.remotes:
                await remote.open(self.parallelism)
                opened.push_async_callback(remote.close)
            opened.pop_all()

    async def close(self) -> None:
        """Close all endpoints, even when closing one of them fails."""
        async with contextlib.AsyncExitStack() as stack:
            for remote in self.remotes:
                stack.push_async_callback(remote.close)

    def watch(self) -> None:
        """Start to measure how busy this process is with the run."""
        self._monitor.start()

    def stop_watching(self, elsewhere: Sequence[ClientLoad] = ()) -> None:
        """Stop measuring: the run is over. When other processes did the work, the busiest of them counts.

        This process, their driver, counts too when it was so late that they had to wait for it.
        """
        own = self._monitor.stop()
        self._driver = own if elsewhere else None
        self._load = max(elsewhere, key=lambda load: (load.loop_cpu_share, load.loop_lag_sustained), default=own)
        self._sends = self._schedule.counts() if self._schedule is not None else None

    def to_metrics(
        self,
        tally: Tally,
        stats: Mapping[str, float | None],
        *,
        warmed_up: int = 0,
        earlier: ClientLoad | None = None,
    ) -> dict[str, Any]:
        """Return what metrics.json says about how the calls were sent.

        `warmed_up` is how many warm-up requests finished, `earlier` the load of the client in earlier launches.
        """
        metrics: dict[str, Any] = {
            "parallelism": "auto" if self.permits is not None else self.parallelism,
            "peak_in_flight": tally.peak_in_flight,
        }
        if (shortfall := self._shortfall(tally, stats)) is not None:
            metrics["parallelism_shortfall"] = shortfall
        if self.permits is not None:
            metrics["parallelism_history"] = list(self.permits.history)
        if self._load is not None:
            load = self._judged(self._load, stats)
            metrics["client"] = load if earlier is None else with_earlier(earlier, load)
        if self._options.is_load or warmed_up:
            metrics["load"] = self._load_metrics(tally, warmed_up)
        return metrics

    def _shortfall(self, tally: Tally, stats: Mapping[str, float | None]) -> str | None:
        """Say that fewer calls were in flight than asked for, and why; None where that is as it should be.

        Calls that end as soon as they begin are never many at once, and nobody waits for them.
        """
        wanted, peak = min(self.parallelism, tally.started), tally.peak_in_flight
        load, median = self._load, stats["time_to_last_token-p50"]
        if peak >= wanted or load is None or self.permits is not None or self._schedule is not None:
            return None
        if self._endpoints is not None:  # the others had the rest
            return None
        found = f"asked for {self.parallelism:,} at a time, at most {peak:,} {'was' if peak == 1 else 'were'} in flight"
        if load.loop_lag_sustained >= LATE and load.seconds >= MIN_SECONDS:
            if isinstance(self._target, RemoteTarget):
                return f"{found}: something blocks the event loop, such as a scorer that does not await"
            return f"{found}: your async function blocks the event loop; use `def`, or await"
        if median is not None and median >= LATE and load.seconds >= MIN_SECONDS:
            return f"{found}: calls ended sooner than new ones were started"
        return None

    def _judged(self, load: ClientLoad, stats: Mapping[str, float | None]) -> ClientLoad:
        """Mark the load when the client was the bottleneck; a target in this process keeps it busy by its nature."""
        if not (self._options.is_load or isinstance(self._target, RemoteTarget)):
            return load
        first, last = stats["time_to_first_token-p50"], stats["time_to_last_token-p50"]
        judged = judge_client(load, last if first is None else first)
        if self._driver is None:
            return judged
        driver = judge_driver(self._driver, last)
        if driver.bottleneck and judged.bottleneck:  # the one that was later has made the other wait, too
            return max(judged, driver, key=lambda load: load.loop_lag_sustained)
        return driver if driver.bottleneck else judged

    def _load_metrics(self, tally: Tally, warmed_up: int) -> LoadMetrics:
        options = self._options
        return LoadMetrics(
            requests=options.requests,
            duration=options.duration,
            arrivals=options.arrivals,
            warmup=warmed_up,
            sends=UNSET if self._sends is None else self._sends.really_sent(tally.started),
        )


def load_of(options: RunOptions) -> dict[str, Any] | None:
    """Return what run.json says about how a load run sends its requests; None for an evaluation."""
    if not options.is_load:
        return None
    return {name: getattr(options, name) for name in ("requests", "duration", "arrivals", "warmup", "parallelism")}


def _place_of(target: Target) -> str | int:
    """What calls to it share: the endpoint of a remote target, or the target itself."""
    return target.endpoint if isinstance(target, RemoteTarget) else id(target)


def _judged_places(scorers: Iterable[Scorer], num_runs: int) -> set[str | int]:
    """The endpoints that are asked for several samples of an answer at once."""
    found: set[str | int] = set()

    def take(asked: Target) -> Target:
        found.add(_place_of(asked))
        return asked

    for scorer in scorers:
        if isinstance(scorer, RepeatedJudge) and samples_per_answer(scorer, num_runs) > 1:
            scorer.bound(take)
    return found


def _all_targets(target: Target, scorers: Iterable[Scorer]) -> list[Target]:
    """Return all targets of a run, those of its judges included, each once."""
    found = {id(target): target}

    def take(called: Target) -> Target:
        found[id(called)] = called
        return called

    for scorer in scorers:
        if isinstance(scorer, RepeatedJudge):
            scorer.bound(take)
    return list(found.values())
