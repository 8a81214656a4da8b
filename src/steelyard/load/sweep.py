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

from steelyard.contracts import Engine
from steelyard.engine.cancellation import CancellationToken
from steelyard.engine.threaded import LoopFactory, LoopThread
from steelyard.errors import ConfigurationError, RunFinished
from steelyard.journal.files import SWEEP, disk_errors, move_aside, read_json_object, write_json
from steelyard.journal.lock import RunLock
from steelyard.journal.states import create
from steelyard.load.levels import Level, parse_levels
from steelyard.load.measure import LevelRuns
from steelyard.load.recommend import Recommendation, recommend
from steelyard.load.search import next_level
from steelyard.load.slo import Objective, parse_slo
from steelyard.report.plots import PLOTS
from steelyard.runner import Runner

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
        all that is there is moved aside.
        """
        create(self._path)
        with RunLock(self._path):
            with disk_errors(self._path):
                self._make_room(force=force)
            levels: list[Level] = []
            runs = self._runs()
            if not await self._measure(runs, levels):
                return self._result(levels, stopped=self.token.reason or runs.stopped or "cancelled")
            result = self._result(levels)
            write_json(self._path / SWEEP, result.to_metrics())
            return result

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

    def _make_room(self, *, force: bool) -> None:
        """Refuse a sweep that has been made, unless it is to be made anew; one of which more is asked now goes on."""
        done = read_json_object(self._path / SWEEP)
        if force:
            old = sorted(place.name for pattern in ("level-*", *PLOTS) for place in self._path.glob(pattern))
            move_aside(self._path, (SWEEP, *old))
        elif done is not None:
            if done.get("asked") == self._asked():
                message = f"{self._path} holds a finished sweep; --force starts over there"
                raise RunFinished(message, path=self._path, errors=0)
            move_aside(self._path, (SWEEP,))

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
