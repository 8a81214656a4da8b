"""Sweeps: the same cases under one load after another, and the one that is recommended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from steelyard.daemon_threads import LoopFactory, run_blocking
from steelyard.engine.base import CancellationToken, Engine
from steelyard.errors import ConfigurationError, RunFinished
from steelyard.journal.files import (
    REPORT,
    SWEEP,
    SWEEP_PARTIAL,
    clear_drafts,
    create,
    disk_errors,
    move_aside,
    write_json,
)
from steelyard.journal.lock import RunLock
from steelyard.journal.manifest import PLOTS, compare, read_sweep, refuse_matrix, refuse_run, sweep_manifest
from steelyard.load.levels import Block, Level, Objective, make_level, parse_levels, parse_rates, parse_slo
from steelyard.load.measure import LevelRun, LevelRuns, SweepBudget
from steelyard.load.search import Recommendation, exclude, found_so_far, recommend, recommend_rate
from steelyard.load.search_rule import MAX_BLOCKS, Found, LevelSearch, Measure, block_of
from steelyard.run.runner import Runner
from steelyard.stats.intervals import percentile_needs
from steelyard.stats.prices import read_prices

SWEEP_VERSION = 2
ERROR_RATE_LIMIT = "error_rate<=1%"
"""The objective for the error rate where the objectives do not name it."""
MAX_MORE = 5_000
"""How many more requests a level is given at once to settle an objective."""
RATE_SECONDS = 5.0
"""How long a block of an arrival rate sends at least."""

log = logging.getLogger("steelyard")


class SweepResult(msgspec.Struct, kw_only=True):
    """The measured levels, lowest first, and the recommendation."""

    suite: str
    model_id: str | None
    asked: dict[str, Any]
    objectives: tuple[Objective, ...]
    levels: list[Level]
    recommendation: Recommendation
    path: Path
    cost: float | None = None
    """The cost of the whole sweep, judges and repeated levels included; None when it is not known."""
    currency: str = "USD"
    about: dict[str, Any] = {}
    """What distinguishes this sweep from others of the suite: its target, its seed, its time of creation."""
    stopped: str | None = None
    """Why it ended before all levels were measured; None when it is complete."""

    @property
    def complete(self) -> bool:
        """Whether every requested level has been measured."""
        return self.stopped is None

    def summary(self) -> str:
        """What the command line prints at the end of a sweep."""
        from steelyard.report.sweep.table import sweep_table

        return sweep_table(self.to_metrics(), str(self.path))

    def report(self, form: str = "html", output: str | Path | None = None) -> Path:
        """Write a report and return where it is: html, md, text, csv or json; by default into the sweep's folder."""
        from steelyard.report.formats import SUFFIXES, report_pieces, write_pieces

        place = self.path / f"report.{SUFFIXES.get(form, form)}" if output is None else Path(output)
        write_pieces(place, report_pieces([self.path], form))
        return place

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from steelyard.report.notebook import sweep_html

        return sweep_html(self.to_metrics(), str(self.path))

    def to_metrics(self) -> dict[str, Any]:
        """Return the content of sweep.json."""
        return {
            "v": SWEEP_VERSION,
            "complete": self.complete,
            "stopped": self.stopped,
            "suite": self.suite,
            "model_id": self.model_id,
            **self.about,
            "cost": self.cost,
            "currency": self.currency,
            "asked": self.asked,
            "objectives": [msgspec.structs.asdict(objective) for objective in self.objectives],
            "levels": [level.to_metrics() for level in self.levels],
            "recommendation": {
                "level": self.recommendation.level,
                "reason": self.recommendation.reason,
                "decided": self.recommendation.decided,
                "more_requests": self.recommendation.more_requests,
                "unit": self.recommendation.unit,
                "says": self.recommendation.describe(),
            },
        }


class PlannedRequests(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests a sweep will send, as far as that can be known before."""

    least: int | None
    """None where only a time ends a level."""
    most: int | None
    """None where that depends on the endpoint."""
    says: str


class Sweep:
    """Measures a runner's target under one load after another; each level has a run directory, `level-<N>`.

    `levels` are parallelisms or "auto", which searches; `arrivals` are rates instead, `poisson:5/s,10/s`. A level
    sends `requests`, or runs for `duration` seconds, cycling through the cases; without either it sends blocks of
    requests, up to four, until what is asked of it is settled. Errors are part of the measurement: nothing is retried,
    nothing comes from a cache, and judges are asked when a block is over.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        levels: Sequence[int] | str = "auto",
        arrivals: str | None = None,
        output_path: str | Path,
        requests: int | None = None,
        duration: float | None = None,
        pause: float = 0.0,
        slo: str | Sequence[Objective] = "",
        token: CancellationToken | None = None,
    ) -> None:
        if requests is not None and duration is not None:
            raise ConfigurationError("a level ends after a number of requests or after a duration: give one of the two")
        if not (math.isfinite(pause) and pause >= 0):
            raise ConfigurationError(f"pause must be a number of seconds, 0 or more, got {pause!r}")
        self.runner = runner
        self.levels: list[int] | Literal["auto"] = parse_levels(levels) if arrivals is None else []
        self.arrivals = [] if arrivals is None else parse_rates(arrivals)
        self.options = runner.options.replace(output_path=output_path, requests=requests, duration=duration, trials=1)
        self.pause = pause
        self.objectives = _with_an_error_limit(parse_slo(slo) if isinstance(slo, str) else tuple(slo))
        self.token = token or runner.token or CancellationToken()
        self._path = Path(output_path)
        self._currency = read_prices(self.options.prices, runner.target.model_id).currency
        self._budget = SweepBudget(self._path, self.options.max_cost, self._currency)
        self._about: dict[str, Any] = {}
        self._blocks: dict[int | float, list[Block]] = {}
        self._measured_any = False
        self._search: LevelSearch | None = None

    @property
    def adaptive(self) -> bool:
        """Whether a level may be given more requests to settle what is open; else it has as many as it was told."""
        return self.options.requests is None and self.options.duration is None

    @property
    def engine(self) -> Engine | None:
        """The engine that runs each level: the runner's."""
        return self.runner.engine

    def planned_requests(self) -> PlannedRequests:
        """Return how many requests it will send, before it sends any; warm-ups included."""
        asked, warmup = self.options, self.options.warmup
        count = len(self.arrivals) or (1 if self.levels == "auto" else len(self.levels))
        if asked.duration is not None:
            says = f"{asked.duration:g} s a level, as many requests as come through"
            return PlannedRequests(least=None, most=None, says=says)
        if asked.requests is not None:
            total = count * (asked.requests + warmup)
            if self.levels == "auto" and not self.arrivals:
                says = (
                    f"{asked.requests:,} requests a level, about {_auto_levels(asked.max_parallelism)} levels at most"
                )
                most = _auto_levels(asked.max_parallelism) * (asked.requests + warmup)
                return PlannedRequests(least=asked.requests + warmup, most=most, says=says)
            says = f"{total:,} requests: {count:,} × {asked.requests + warmup:,}"
            return PlannedRequests(least=total, most=total, says=says)
        if self.levels == "auto" and not self.arrivals:
            return self._planned_search()
        blocks = [_rate_block(one.rate.per_second) for one in self.arrivals]
        blocks += [block_of(int(number)) for number in self.levels]
        firsts = [max(block, self._slo_needs) for block in blocks]
        least, most = sum(firsts) + count * warmup, MAX_BLOCKS * (sum(firsts) + count * warmup)
        each = " + ".join(f"{first:,}" for first in firsts)
        says = f"at least {least:,} requests ({each}), up to {most:,} if that leaves something undecided"
        return PlannedRequests(least=least, most=most, says=says)

    @property
    def _slo_needs(self) -> int:
        """How many requests a level needs at least to keep its objectives on percentiles: with none above the limit."""
        percents = [one.percent for one in self.objectives if one.percent is not None]
        needs = [percentile_needs(each, 1 - 0.05 / MAX_BLOCKS, one_sided=True) for each in percents]
        return max(needs, default=0)

    def _planned_search(self) -> PlannedRequests:
        """What a search sends to servers of some sizes whose answers take equally long; random times take more."""
        highest, warmup = self.options.max_parallelism, self.options.warmup
        least = _search_requests(1, highest, self._slo_needs, warmup)
        sent = {slots: _search_requests(slots, highest, self._slo_needs, warmup) for slots in (8, 32, 128)}
        found = ", ".join(f"{number:,} if {slots}" for slots, number in sent.items() if slots <= highest)
        about = f"about {found} calls at once fill the endpoint; " if found else ""
        says = f"at least {least:,} requests; {about}up to twice that if it leaves something undecided"
        return PlannedRequests(least=least, most=None, says=says)

    async def run(self, *, force: bool = False) -> SweepResult:
        """Measure the levels that have not been measured yet; writes sweep.json when it is complete.

        A finished sweep raises RunFinished unless other levels or objectives are requested, or `force` is given:
        then the old files are moved aside. Until it is finished, sweep.partial.json has the levels so far.
        """
        create(self._path)
        with RunLock(self._path):
            runs = self._runs()
            with disk_errors(self._path):
                clear_drafts(self._path)
                self._prepare_folder(force=force)
            levels: dict[int | float, Level] = {}
            self._write_partial(levels)
            try:
                complete = await self._measure(runs, levels)
            finally:
                self._remove_if_unused()
            if not complete:
                return self._write_partial(levels, self.token.reason or runs.stopped or "cancelled")
            result = self._result(levels)
            write_json(self._path / SWEEP, result.to_metrics())
            (self._path / SWEEP_PARTIAL).unlink(missing_ok=True)
            return result

    def _write_partial(self, levels: Mapping[int | float, Level], stopped: str = "not finished") -> SweepResult:
        """Write the result so far to sweep.partial.json, so that the sweep can be resumed."""
        result = self._result(levels, stopped)
        write_json(self._path / SWEEP_PARTIAL, result.to_metrics())
        return result

    def _remove_if_unused(self) -> None:
        """Remove the file of a sweep that was refused before its first call."""
        if not any(self._path.glob("level-*")):
            (self._path / SWEEP_PARTIAL).unlink(missing_ok=True)

    def run_sync(self, *, force: bool = False, loop_factory: LoopFactory | None = None) -> SweepResult:
        """Run from code that is not async; works inside a running event loop too."""
        return run_blocking(self.run(force=force), loop_factory)

    async def _measure(self, runs: LevelRuns, levels: dict[int | float, Level]) -> bool:
        """Measure one level after another, adding each to the levels; returns whether all were measured."""
        self._blocks.clear()
        self._measured_any = False
        if self.arrivals:
            return await self._measure_rates(runs, levels)
        self._search = search = self._new_search()
        while isinstance(step := search.step, Measure):
            before = len(self._blocks.get(step.level, ()))
            level = await self._add_to(runs, levels, LevelRun(step.level, before + 1, step.requests))
            if level is None:
                return False
            exclude(search, level, listed=self.levels != "auto")
            for block in self._blocks[step.level][before:]:
                search.add(step.level, block.timings.latencies)
        return True

    async def _measure_rates(self, runs: LevelRuns, levels: dict[int | float, Level]) -> bool:
        for arrivals in self.arrivals:
            rate = arrivals.rate.per_second
            requests = self.options.requests or _rate_block(rate)
            number = int(rate) if rate == int(rate) else rate
            run = LevelRun(number, 1, requests, f"{arrivals.kind}:{rate:g}/s")
            if await self._add_to(runs, levels, run) is None:
                return False
        return True

    async def _add_to(self, runs: LevelRuns, levels: dict[int | float, Level], run: LevelRun) -> Level | None:
        """Measure a block of a level, and more while an objective is open; None when it was interrupted."""
        while True:
            block = await self._block(runs, run)
            if block is None:
                return None
            blocks = self._blocks.setdefault(run.level, [])
            blocks.append(block)
            looks = MAX_BLOCKS if self.adaptive else 1
            level = make_level(run.level, blocks, self.objectives, looks=looks, open_loop=bool(self.arrivals))
            levels[run.level] = level
            self._write_partial(levels)
            more = level.more_requests
            is_open = level.usable and not level.broken and more is not None and more <= MAX_MORE
            if not (self.adaptive and is_open and len(blocks) < MAX_BLOCKS):
                _warn_if_unusable(level)
                return level
            run = LevelRun(run.level, len(blocks) + 1, max(run.requests or 0, more or 0), run.arrivals)

    async def _block(self, runs: LevelRuns, run: LevelRun) -> Block | None:
        """A block that is measured already, or is now; None when that was interrupted."""
        metrics = runs.finished(run)
        if metrics is None:
            if self._measured_any and not await self._paused():
                return None
            self._measured_any = True
            metrics = await runs.measure(run)
        return None if metrics is None else await runs.scored(run, metrics)

    def _new_search(self) -> LevelSearch:
        sizes = () if self.levels == "auto" else self.levels
        # A duration decides how many there are; the number is not used.
        requests = self.options.requests
        return LevelSearch(
            self.options.max_parallelism,
            sizes=sizes,
            requests=requests,
            max_blocks=MAX_BLOCKS if self.adaptive else 1,
        )

    async def _paused(self) -> bool:
        """Wait for the pause; returns False when it was cancelled."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.token.wait(), self.pause)
        return not self.token.cancelled

    def _runs(self) -> LevelRuns:
        return LevelRuns(
            self.runner,
            duration=self.options.duration,
            output_path=self._path,
            budget=self._budget,
            token=self.token,
        )

    def _requested(self) -> dict[str, Any]:
        """Return what decides the result, as `asked` in sweep.json."""
        return {
            "levels": self.levels,
            "arrivals": None if not self.arrivals else self._arrivals_text(),
            "requests": self.options.requests,
            "duration": self.options.duration,
            "slo": [objective.text for objective in self.objectives],
        }

    def _arrivals_text(self) -> str:
        rates = ",".join(f"{one.rate.per_second:g}/s" for one in self.arrivals)
        return f"{self.arrivals[0].kind}:{rates}"

    def _prepare_folder(self, *, force: bool) -> None:
        """Refuse a finished sweep, or one of something else, unless `force` moves it aside; else resume it."""
        self.check_folder(force=force)
        if force:
            old = sorted(place.name for pattern in ("level-*", *PLOTS) for place in self._path.glob(pattern))
            move_aside(self._path, (SWEEP, SWEEP_PARTIAL, REPORT, *old))
        elif (found := read_sweep(self._path)) is not None and found.get("complete"):
            move_aside(self._path, (SWEEP, REPORT))

    def check_folder(self, *, force: bool = False) -> None:
        """Raise where the sweep cannot start in its folder: it is finished, or that holds something else."""
        refuse_run(self._path)
        refuse_matrix(self._path, "a sweep")
        manifest = self._runs().manifest(self.options)
        self._about = {"target": manifest.target, "seed": manifest.seed, "created": manifest.created}
        found = None if force else read_sweep(self._path)
        old_manifest = None if found is None else sweep_manifest(found)
        if old_manifest is not None:
            compare(self._path, old_manifest, manifest)
            self._about["created"] = old_manifest.created
        if found is not None and found.get("complete") and found.get("asked") == self._requested():
            message = f"{self._path} holds a finished sweep; "
            raise RunFinished(message, "{force} starts over there", path=self._path, errors=0)

    def _result(self, levels: Mapping[int | float, Level], stopped: str | None = None) -> SweepResult:
        ordered = [levels[number] for number in sorted(levels)]
        return SweepResult(
            suite=self.runner.suite.id,
            model_id=self.runner.target.model_id,
            asked=self._requested(),
            objectives=self.objectives,
            levels=ordered,
            recommendation=self._recommendation(ordered),
            path=self._path,
            cost=self._budget.spent(),
            currency=self._currency,
            about=self._about,
            stopped=stopped,
        )

    def _recommendation(self, levels: Sequence[Level]) -> Recommendation:
        if self.arrivals:
            return recommend_rate(levels)
        if self._search is not None and levels and isinstance(found := self._search.step, Found):
            return recommend(levels, found, self._search)
        latencies = {number: [block.timings.latencies for block in blocks] for number, blocks in self._blocks.items()}
        return recommend(levels, *found_so_far(levels, latencies))


def _rate_block(rate: float) -> int:
    """How many requests a block of an arrival rate has."""
    return max(60, math.ceil(RATE_SECONDS * rate))


def _auto_levels(highest: int) -> int:
    """About how many levels a search measures at most: doubling, then closing in from both sides."""
    return math.ceil(math.log2(highest)) + 1 + 6 if highest > 1 else 1


def _search_requests(slots: int, highest: int, needs: int, warmup: int) -> int:
    """How many requests a search sends to a server of that many slots whose answers all take one second."""
    search, sent = LevelSearch(highest), 0
    while isinstance(step := search.step, Measure):
        sent += max(step.requests, needs) + warmup
        search.add(step.level, np.full(step.requests, max(1.0, step.level / slots)))
    return sent


def _with_an_error_limit(objectives: tuple[Objective, ...]) -> tuple[Objective, ...]:
    if any(objective.figure == "error_rate" for objective in objectives):
        return objectives
    return (*objectives, *parse_slo(ERROR_RATE_LIMIT))


def _warn_if_unusable(level: Level) -> None:
    """Log why a level is not usable, as soon as it is known."""
    if level.invalid is not None:
        remedy = "" if level.client.remedy is None else f"; {level.client.remedy}"
        log.warning("level %s is not valid: this client was the bottleneck: %s%s", level.level, level.invalid, remedy)
    elif not level.reached:
        log.warning("level %s was not reached: at most %d were in flight", level.level, level.peak_in_flight)
