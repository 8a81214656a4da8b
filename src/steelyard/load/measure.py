"""Measuring one level of a sweep: a load run of its own, and the judges asked when it is over."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from steelyard.contracts import RepeatedJudge, Scorer
from steelyard.engine.cancellation import CancellationToken
from steelyard.errors import RunCancelled
from steelyard.journal.files import disk_errors, move_aside
from steelyard.journal.manifest import Manifest, compare, read_manifest
from steelyard.journal.states import read_metrics
from steelyard.load.budget import SweepBudget
from steelyard.load.judging import LevelAnswers, requests_of
from steelyard.load.levels import REQUESTS_PER_PLACE, Level, level_of
from steelyard.load.slo import Objective
from steelyard.options import RunOptions
from steelyard.planning import manifest_of
from steelyard.runner import Runner
from steelyard.session import read_session
from steelyard.stats.lag import BUSY
from steelyard.suite.evalset import EvalSet

log = logging.getLogger("steelyard")

JUDGED = "judged"
_DECIDES_THE_MEASUREMENT = (
    "parallelism",
    "requests",
    "duration",
    "limit",
    "match",
    "timeout",
    "warmup",
    "rate",
    "tokens_per_min",
)
"""The options that make another measurement of a level when they change."""


class LevelRuns:
    """Runs a suite at one parallelism after another, each in a directory of its own."""

    def __init__(
        self,
        runner: Runner,
        *,
        requests: int,
        duration: float | None,
        objectives: Sequence[Objective],
        output_path: Path,
        budget: SweepBudget,
        token: CancellationToken,
    ) -> None:
        self._runner = runner
        self._suite = runner.suite
        self._requests = requests
        self._duration = duration
        self._objectives = objectives
        self._path = output_path
        self._budget = budget
        self._token = token
        self.stopped: str | None = None
        """What ended a level, or its judging, before its time."""
        self._can_answer = False
        self._at_once = [scorer for scorer in runner.scorers if not _waits(scorer)]

    def place(self, level: int) -> Path:
        """The run directory of a level."""
        return self._path / f"level-{level}"

    def manifest(self, options: RunOptions) -> Manifest:
        """What is measured, as the manifest of each level says it."""
        session = None if options.initial_session_file is None else read_session(options.initial_session_file)
        return manifest_of(self._runner.target, self._suite, self._at_once, options, session=session)

    def finished(self, level: int) -> dict[str, Any] | None:
        """The metrics of a level that was measured before in just this way; refuses one of another target.

        One in which this client was the bottleneck says nothing, and is measured again.
        """
        place = self.place(level)
        metrics, old = read_metrics(place), read_manifest(place)
        if metrics is None or old is None:
            return None
        options = self._options(level)
        compare(place, old, self.manifest(options))
        now = options.for_manifest()
        if metrics["client"]["bottleneck"]:
            log.info("level %d is measured again: this client was the bottleneck", level)
            return None
        return metrics if all(old.options.get(name) == now[name] for name in _DECIDES_THE_MEASUREMENT) else None

    async def measure(self, level: int) -> dict[str, Any] | None:
        """The metrics of a level's load run, None when it was interrupted.

        One in which this client ran late though it was not busy is measured once more: something else may have had
        the machine just then.
        """
        metrics = await self._measure_once(level)
        client = {"bottleneck": False} if metrics is None else metrics["client"]
        if not client["bottleneck"] or client["loop_cpu_share"] >= BUSY:
            return metrics
        log.info("level %d is measured once more: this client was the bottleneck: %s", level, client["reason"])
        return await self._measure_once(level)

    async def _measure_once(self, level: int) -> dict[str, Any] | None:
        """The same, once. What is there is moved aside: half a level was another load."""
        if not self._has_budget():
            return None
        place, options = self.place(level), self._options(level)
        if place.exists():
            with disk_errors(place):
                move_aside(place, (JUDGED,))
        amount = f"{options.requests:,} requests" if options.requests is not None else f"{options.duration:g} s"
        log.info("level %d: %s, %d at a time", level, amount, level)
        runner = self._runner_of(self._runner.target, self._suite, self._at_once, options)
        metrics = await self._run(runner, force=True)
        self._suite = runner.suite  # a one-shot's cases were written down: the next level reads them there
        return metrics

    async def weighed(self, level: int, metrics: Mapping[str, Any]) -> Level | None:
        """What came of a level, with the verdicts of all scorers on its answers; None when that was interrupted.

        Answers are weighed again, not asked again: by judges, who were kept out of the level, and by scorers that
        were not in the suite when it was measured.
        """
        self._can_answer |= metrics["counts"]["ok"] > 0
        judged = None
        if not _scored_by(self.place(level), self._runner.scorers):
            judged = await self._judge(level, metrics["n"])
            if judged is None:
                return None
        return level_of(level, self.place(level).name, metrics, self._objectives, judged)

    async def _judge(self, level: int, requests: int) -> dict[str, Any] | None:
        """The metrics of a level's answers as all scorers see them."""
        place, scorers = self.place(level) / JUDGED, self._runner.scorers
        options, metrics = self._judging_options(place), read_metrics(place)
        if metrics is not None and _scored_by(place, scorers, options.num_runs):
            return metrics
        if not self._has_budget():
            return None
        log.info("level %d: %d answers are judged", level, requests)
        answers = LevelAnswers(self.place(level))
        try:
            suite = requests_of(self._suite, self._options(level), requests)
            runner = self._runner_of(answers, suite, scorers, options)
            runner.scored_from = str(self.place(level))
            if getattr(runner.engine, "works_elsewhere", False):  # the answers lie in a file of this process
                runner.engine = None
            # Complete, yet by other scorers: weighed anew. What was interrupted goes on.
            return await self._run(runner, force=metrics is not None)
        finally:
            answers.close()

    def _has_budget(self) -> bool:
        """Whether any more may be spent; where not, that is what stops the sweep."""
        if self._budget.left() != 0.0:
            return True
        self.stopped = self._budget.describe()
        return False

    async def _run(self, runner: Runner, *, force: bool) -> dict[str, Any] | None:
        """The metrics of a run that came to its end; None when something ended it before: its budget, say."""
        place = Path(runner.options.output_path or "")
        runner.options = runner.options.replace(max_cost=self._budget.left(again_in=None if force else place))
        try:
            metrics = (await runner.run(force=force)).metrics
        except RunCancelled:
            return None
        if not metrics["complete"]:
            # What the run calls its budget is only what was left of the sweep's.
            spent = "max_cost" in (metrics["stopped"] or "") and metrics["cost"] is not None
            self.stopped = self._budget.describe() if spent else metrics["stopped"]
            return None
        return metrics

    def _runner_of(self, target: object, suite: EvalSet, scorers: Sequence[Scorer], options: RunOptions) -> Runner:
        runner = Runner(target, suite, scorers, options=options, engine=self._runner.engine, token=self._token)
        runner.suite_file = self._runner.suite_file
        return runner

    def _options(self, level: int) -> RunOptions:
        """How a level is run: nothing is asked twice, nothing comes from a cache, nothing stops it but its end.

        Only where no level has had an answer yet may the first errors tell that there is nothing to measure.
        """
        return self._runner.options.replace(
            parallelism=level,
            output_path=self.place(level),
            requests=None if self._duration is not None else max(self._requests, REQUESTS_PER_PLACE * level),
            duration=self._duration,
            arrivals=None,
            retries=0,
            trials=1,
            num_runs=1,
            cache=None,
            stop_error_rate=None,
            stop_first_errors=0 if self._can_answer else self._runner.options.stop_first_errors,
            max_cost=None,
            low_memory=True,
        )

    def _judging_options(self, place: Path) -> RunOptions:
        """How the answers are judged: all of them, as patiently as outside of a sweep."""
        return self._runner.options.replace(
            parallelism=None,
            output_path=place,
            limit=None,
            match=None,
            requests=None,
            duration=None,
            arrivals=None,
            warmup=0,
            trials=1,
            cache=None,
            initial_session_file=None,
            stop_error_rate=None,
            low_memory=True,
        )


def _scored_by(run: Path, scorers: Sequence[Scorer], num_runs: int = 1) -> bool:
    """Whether a run was scored by just these, each judge asked so often."""
    manifest = read_manifest(run)
    now = msgspec.json.decode(msgspec.json.encode([scorer.identity() for scorer in scorers]))
    return manifest is not None and manifest.scorers == now and manifest.options.get("num_runs") == num_runs


def _waits(scorer: Scorer) -> bool:
    """Whether a scorer waits for something, most likely a model, which would compete with what is measured."""
    return isinstance(scorer, RepeatedJudge) or inspect.iscoroutinefunction(scorer.score)
