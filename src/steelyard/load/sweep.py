"""Sweeps: the same cases at several parallelisms, one after another, and the parallelism that is recommended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from steelyard.engine.base import Engine
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
from steelyard.run.runner import Runner
from steelyard.shutdown import INTERRUPT_SECONDS
from steelyard.stats.prices import read_prices

SWEEP_VERSION = 1
ERROR_RATE_LIMIT = "error_rate<=1%"
"""The objective for the error rate where the objectives do not name it."""
DEFAULT_REQUESTS = 20

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
                "says": self.recommendation.describe(),
            },
        }


class Sweep:
    """Measures a runner's target at several parallelisms; each level has a run directory, `level-<N>`.

    `levels` are parallelisms or "auto", which searches. A level sends `requests`, or ten for each call in flight if
    that is more, cycling through the cases; or it runs for `duration` seconds. Errors are part of the measurement:
    nothing is retried, nothing comes from a cache, and judges are asked when the level is over.
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
        """The engine that runs each level: the runner's."""
        return self.runner.engine

    @engine.setter
    def engine(self, engine: Engine | None) -> None:
        self.runner.engine = engine

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
                self._prepare_folder(runs, force=force)
            levels: list[Level] = []
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

    def _write_partial(self, levels: list[Level], stopped: str = "not finished") -> SweepResult:
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
        running = LoopThread(self.run(force=force), loop_factory)
        try:
            return running.result()
        except KeyboardInterrupt:
            running.cancel()
            running.wait(INTERRUPT_SECONDS)
            raise

    async def _measure(self, runs: LevelRuns, levels: list[Level]) -> bool:
        """Measure one level after another, adding each to the list; returns whether all were measured."""
        measured_any = False
        while (number := self._next(levels)) is not None:
            metrics = runs.finished(number)
            if metrics is None:
                if measured_any and not await self._paused():
                    return False
                measured_any = True
                metrics = await runs.measure(number)
            level = None if metrics is None else await runs.scored(number, metrics)
            if level is None:
                return False
            _warn_if_unusable(level)
            levels.append(level)
            self._write_partial(levels)
        return True

    def _next(self, levels: Sequence[Level]) -> int | None:
        if self.levels == "auto":
            return next_level(levels, self.options.max_parallelism)
        return self.levels[len(levels)] if len(levels) < len(self.levels) else None

    async def _paused(self) -> bool:
        """Wait for the pause; returns False when it was cancelled."""
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

    def _requested(self) -> dict[str, Any]:
        """Return what decides the result, as `asked` in sweep.json."""
        return {
            "levels": self.levels,
            "requests": None if self.options.duration is not None else self.options.requests or DEFAULT_REQUESTS,
            "duration": self.options.duration,
            "slo": [objective.text for objective in self.objectives],
        }

    def _prepare_folder(self, runs: LevelRuns, *, force: bool) -> None:
        """Refuse a finished sweep, or one of something else, unless `force` moves it aside; else resume it."""
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
            if found.get("asked") == self._requested():
                message = f"{self._path} holds a finished sweep; --force starts over there"
                raise RunFinished(message, path=self._path, errors=0)
            move_aside(self._path, (SWEEP, REPORT))

    def _result(self, levels: list[Level], stopped: str | None = None) -> SweepResult:
        ordered = sorted(levels, key=lambda level: level.level)
        return SweepResult(
            suite=self.runner.suite.id,
            model_id=self.runner.target.model_id,
            asked=self._requested(),
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


def _warn_if_unusable(level: Level) -> None:
    """Log why a level is not usable, as soon as it is known."""
    if level.invalid is not None:
        log.warning("level %d is not valid: this client was the bottleneck: %s", level.level, level.invalid)
    elif not level.reached:
        log.warning("level %d was not reached: at most %d were in flight", level.level, level.peak_in_flight)
