"""The same cases at several parallelisms, one after another: what the endpoint bears, and where to run it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from steelyard.engine.cancellation import CancellationToken
from steelyard.engine.loop_thread import LoopFactory, LoopThread
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
from steelyard.journal.manifest import PLOTS, compare, read_sweep, refuse_run, sweep_manifest
from steelyard.load.levels import Level, Objective, parse_levels, parse_slo
from steelyard.load.measure import LevelRuns, SweepBudget
from steelyard.load.search import Recommendation, next_level, recommend
from steelyard.protocols import Engine
from steelyard.run.runner import Runner
from steelyard.stats.prices import read_prices

SWEEP_VERSION = 1
ERROR_RATE_LIMIT = "error_rate<=1%"
"""What is asked of the error rate where the objectives do not name it."""
DEFAULT_REQUESTS = 20

log = logging.getLogger("steelyard")


class SweepResult(msgspec.Struct, kw_only=True):
    """The levels that were measured, lowest first, and which of them to run at."""

    suite: str
    model_id: str | None
    asked: dict[str, Any]
    objectives: tuple[Objective, ...]
    levels: list[Level]
    recommendation: Recommendation
    path: Path
    cost: float | None = None
    """What all of it has cost, judges and repeated levels included; None when that is not known."""
    currency: str = "USD"
    about: dict[str, Any] = {}
    """What tells this sweep from others of the suite: its target, its seed, when it was begun."""
    stopped: str | None = None
    """Why it ended before all levels were measured; None when it is complete."""

    @property
    def complete(self) -> bool:
        """Whether every level that was asked for has been measured."""
        return self.stopped is None

    def to_metrics(self) -> dict[str, Any]:
        """The same as it stands in sweep.json."""
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
                "says": self.recommendation.describe(),
            },
        }


class Sweep:
    """Measures a runner's target at several parallelisms; each level is a run directory `level-<N>` of its own.

    `levels` are parallelisms or "auto", which searches. A level sends `requests`, or ten for each call in flight if
    that is more, going round the cases; or it goes on for `duration` seconds. Errors are what is measured: nothing
    is retried, nothing comes from a cache, and judges are asked when the level is over.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        levels: Sequence[int] | str = "auto",
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
        self.levels: list[int] | Literal["auto"] = parse_levels(levels)
        self.options = runner.options.replace(output_path=output_path, requests=requests, duration=duration, trials=1)
        self.pause = pause
        self.objectives = _with_an_error_limit(parse_slo(slo) if isinstance(slo, str) else tuple(slo))
        self.token = token or runner.token or CancellationToken()
        self._path = Path(output_path)
        self._currency = read_prices(self.options.prices, runner.target.model_id).currency
        self._budget = SweepBudget(self._path, self.options.max_cost, self._currency)
        self._about: dict[str, Any] = {}

    @property
    def engine(self) -> Engine | None:
        """What runs each level; the runner's."""
        return self.runner.engine

    @engine.setter
    def engine(self, engine: Engine | None) -> None:
        self.runner.engine = engine

    async def run(self, *, force: bool = False) -> SweepResult:
        """Measure the levels that have not been measured yet; the result, which sweep.json keeps when it is complete.

        A finished sweep raises RunFinished unless something else is asked of it now, or `force` is given: then
        all that is there is moved aside. Until it is finished, sweep.partial.json says how far it has come.
        """
        create(self._path)
        with RunLock(self._path):
            runs = self._runs()
            with disk_errors(self._path):
                clear_drafts(self._path)
                self._make_room(runs, force=force)
            levels: list[Level] = []
            self._keep(levels)
            try:
                complete = await self._measure(runs, levels)
            finally:
                self._forget_if_unused()
            if not complete:
                return self._keep(levels, self.token.reason or runs.stopped or "cancelled")
            result = self._result(levels)
            write_json(self._path / SWEEP, result.to_metrics())
            (self._path / SWEEP_PARTIAL).unlink(missing_ok=True)
            return result

    def _keep(self, levels: list[Level], stopped: str = "not finished") -> SweepResult:
        """Write down how far it has come, so that the sweep is found again; the result so far."""
        result = self._result(levels, stopped)
        write_json(self._path / SWEEP_PARTIAL, result.to_metrics())
        return result

    def _forget_if_unused(self) -> None:
        """Leave no trace of a sweep that was refused before its first call."""
        if not any(self._path.glob("level-*")):
            (self._path / SWEEP_PARTIAL).unlink(missing_ok=True)

    def run_sync(self, *, force: bool = False, loop_factory: LoopFactory | None = None) -> SweepResult:
        """The same from code that is not async; works inside a running event loop too."""
        running = LoopThread(self.run(force=force), loop_factory)
        try:
            return running.result()
        except KeyboardInterrupt:
            running.cancel()
            running.wait(5.0)
            raise

    async def _measure(self, runs: LevelRuns, levels: list[Level]) -> bool:
        """Measure one level after another, adding each to the list, until there is none left: whether that was so."""
        asked = False
        while (number := self._next(levels)) is not None:
            metrics = runs.finished(number)
            if metrics is None:
                if asked and not await self._paused():
                    return False
                asked = True
                metrics = await runs.measure(number)
            level = None if metrics is None else await runs.weighed(number, metrics)
            if level is None:
                return False
            _tell(level)
            levels.append(level)
            self._keep(levels)
        return True

    def _next(self, levels: Sequence[Level]) -> int | None:
        if self.levels == "auto":
            return next_level(levels, self.options.max_parallelism)
        return self.levels[len(levels)] if len(levels) < len(self.levels) else None

    async def _paused(self) -> bool:
        """Wait the pause; whether it passed without a cancellation."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.token.wait(), self.pause)
        return not self.token.cancelled

    def _runs(self) -> LevelRuns:
        return LevelRuns(
            self.runner,
            requests=self.options.requests or DEFAULT_REQUESTS,
            duration=self.options.duration,
            objectives=self.objectives,
            output_path=self._path,
            budget=self._budget,
            token=self.token,
        )

    def _asked(self) -> dict[str, Any]:
        """What decides the result, as sweep.json tells it."""
        return {
            "levels": self.levels,
            "requests": None if self.options.duration is not None else self.options.requests or DEFAULT_REQUESTS,
            "duration": self.options.duration,
            "slo": [objective.text for objective in self.objectives],
        }

    def _make_room(self, runs: LevelRuns, *, force: bool) -> None:
        """Refuse a sweep that has been made, or of something else, unless it is to be made anew; else go on with it."""
        refuse_run(self._path)
        manifest = runs.manifest(self.options)
        self._about = {"target": manifest.target, "seed": manifest.seed, "created": manifest.created}
        if force:
            old = sorted(place.name for pattern in ("level-*", *PLOTS) for place in self._path.glob(pattern))
            move_aside(self._path, (SWEEP, SWEEP_PARTIAL, REPORT, *old))
            return
        found = read_sweep(self._path)
        old_manifest = None if found is None else sweep_manifest(found)
        if old_manifest is not None:
            compare(self._path, old_manifest, manifest)
            self._about["created"] = old_manifest.created
        if found is not None and found.get("complete"):
            if found.get("asked") == self._asked():
                message = f"{self._path} holds a finished sweep; --force starts over there"
                raise RunFinished(message, path=self._path, errors=0)
            move_aside(self._path, (SWEEP, REPORT))

    def _result(self, levels: list[Level], stopped: str | None = None) -> SweepResult:
        ordered = sorted(levels, key=lambda level: level.level)
        return SweepResult(
            suite=self.runner.suite.id,
            model_id=self.runner.target.model_id,
            asked=self._asked(),
            objectives=self.objectives,
            levels=ordered,
            recommendation=recommend(ordered),
            path=self._path,
            cost=self._budget.spent(),
            currency=self._currency,
            about=self._about,
            stopped=stopped,
        )


def _with_an_error_limit(objectives: tuple[Objective, ...]) -> tuple[Objective, ...]:
    if any(objective.figure == "error_rate" for objective in objectives):
        return objectives
    return (*objectives, *parse_slo(ERROR_RATE_LIMIT))


def _tell(level: Level) -> None:
    """Say of a level what the table will not have room for, as soon as it is known."""
    if level.invalid is not None:
        log.warning("level %d says nothing: this client was the bottleneck: %s", level.level, level.invalid)
    elif not level.reached:
        log.warning("level %d was not reached: at most %d were in flight", level.level, level.peak_in_flight)
