"""Measuring the levels of a sweep: the load runs of each, the judging of their answers, and the sweep's budget."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET

from steelyard.engine.base import CancellationToken
from steelyard.errors import RunCancelled, RunRefused
from steelyard.journal.files import MANIFEST, PREVIOUS, disk_errors, move_aside
from steelyard.journal.manifest import Manifest, compare, read_manifest
from steelyard.load.levels import Block, client_of
from steelyard.load.timings import read_timings
from steelyard.protocols import Identity, InvocationContext, RepeatedJudge, Scorer
from steelyard.records import EvalCase, InvocationResponse
from steelyard.run.options import RunOptions
from steelyard.run.plan import cycling, manifest_of, plan_of, read_session
from steelyard.run.rescore import StoredAnswers
from steelyard.run.result import Result, load_metrics
from steelyard.run.runner import Runner
from steelyard.stats.client_load import BUSY
from steelyard.stats.formatting import counted
from steelyard.stats.metrics import Metrics
from steelyard.stats.prices import format_money
from steelyard.suite.evalset import EvalSet

log = logging.getLogger("steelyard")
JUDGED = "judged"
_ROUND = "#"
"""Separates a case's id and the round in which it was sent."""
_MEASUREMENT_OPTIONS = (
    "parallelism",
    "requests",
    "duration",
    "arrivals",
    "limit",
    "match",
    "timeout",
    "warmup",
    "rate",
    "tokens_per_min",
)
"""The options that make a level's measurement a different one when they change."""


class LevelRun(msgspec.Struct, frozen=True):
    """A load run to be made: `requests` of them, or for the sweep's duration, with a number of calls in flight.

    With `arrivals` they are sent at planned moments instead. Each block of a level is a run in a separate directory.
    """

    level: int | float
    block: int
    requests: int | None
    arrivals: str | None = None

    @property
    def name(self) -> str:
        """Its directory's name."""
        return f"level-{self.level}" if self.block == 1 else f"level-{self.level}-block-{self.block}"

    def __str__(self) -> str:
        shown = f"level {self.level}" if self.arrivals is None else self.arrivals
        return shown if self.block == 1 else f"{shown}, block {self.block}"


class LevelRuns:
    """Runs a suite under one load after another, each in a separate directory."""

    def __init__(
        self,
        runner: Runner,
        *,
        duration: float | None,
        output_path: Path,
        budget: SweepBudget,
        token: CancellationToken,
    ) -> None:
        self._runner = runner
        self._suite = runner.suite
        self._duration = duration
        self._path = output_path
        self._budget = budget
        self._token = token
        self.stopped: str | None = None
        """Why a level, or its judging, was stopped early."""
        self._can_answer = False
        self._immediate_scorers = [scorer for scorer in runner.scorers if not _waits(scorer)]

    def place(self, run: LevelRun) -> Path:
        """Return its run directory."""
        return self._path / run.name

    def manifest(self, options: RunOptions) -> Manifest:
        """Make the manifest of what is measured, as each level has it."""
        session = None if options.initial_session_file is None else read_session(options.initial_session_file)
        return manifest_of(self._runner.target, self._suite, self._immediate_scorers, options, session=session)

    def finished(self, run: LevelRun) -> Metrics | None:
        """Return the metrics of a run that was already made with the same options; refuses one of another target.

        One in which this client was the bottleneck does not count, and is made again.
        """
        place = self.place(run)
        metrics, old = load_metrics(place), read_manifest(place)
        if metrics is None or old is None:
            return None
        options = self._options(run)
        compare(place, old, self.manifest(options))
        now = options.for_manifest()
        if client_of(metrics).bottleneck:
            log.info("%s is measured again: this client was the bottleneck", run)
            return None
        return metrics if all(old.options.get(name) == now[name] for name in _MEASUREMENT_OPTIONS) else None

    async def measure(self, run: LevelRun) -> Metrics | None:
        """Make a run and return its metrics, None when it was interrupted.

        One in which this client ran late though it was not busy is measured once more: something else may have
        used the machine just then.
        """
        metrics = await self._measure_once(run)
        if metrics is None:
            return None
        client = client_of(metrics)
        if not client.bottleneck or client.loop_cpu_share >= BUSY:
            return metrics
        log.info("%s is measured once more: this client was the bottleneck: %s", run, client.reason)
        return await self._measure_once(run)

    async def _measure_once(self, run: LevelRun) -> Metrics | None:
        """Make a run once. An earlier run is moved aside: half a level was another load."""
        if not self._has_budget():
            return None
        place, options = self.place(run), self._options(run)
        if place.exists():
            with disk_errors(place):
                move_aside(place, (JUDGED,))
        amount = f"{options.requests:,} requests" if options.requests is not None else f"{options.duration:g} s"
        log.info("%s: %s", run, amount)
        runner = self._runner_of(self._runner.target, self._suite, self._immediate_scorers, options)
        metrics = await self._run(runner, force=True)
        self._suite = runner.suite  # cases that can be read only once were saved: the next level reads them there
        return metrics

    async def scored(self, run: LevelRun, metrics: Metrics) -> Block | None:
        """Return a block with the scores of all scorers on its answers; None when that was interrupted.

        The recorded answers are scored, not requested again: by judges, which do not run during the level, and by
        scorers that were not in the suite when it was measured.
        """
        self._can_answer |= metrics.counts.ok > 0
        judged = None
        if not _scored_by(self.place(run), self._runner.scorers):
            judged = await self._judge(run, metrics)
            if judged is None:
                return None
        return Block(run=run.name, metrics=metrics, judged=judged, timings=read_timings(self.place(run)))

    async def _judge(self, run: LevelRun, measured: Metrics) -> Metrics | None:
        """Score a run's answers with all scorers and return the metrics."""
        place, scorers = self.place(run) / JUDGED, self._runner.scorers
        options, metrics = self._judging_options(place), load_metrics(place)
        if metrics is not None and _scored_by(place, scorers, options.num_runs):
            return metrics
        if not self._has_budget():
            return None
        self._announce(run, measured)
        answers = LevelAnswers(self.place(run))
        try:
            suite = sent_requests(self._suite, self._options(run), measured.n)
            runner = self._runner_of(answers, suite, scorers, options, scored_from=str(self.place(run)))
            # Complete, but by other scorers: scored again. An interrupted one is resumed.
            return await self._run(runner, force=metrics is not None)
        finally:
            answers.close()

    def _announce(self, run: LevelRun, measured: Metrics) -> None:
        """Log how many answers are looked at by the scorers that waited for the end of the level."""
        waiting = [scorer for scorer in self._runner.scorers if _waits(scorer)]
        judges = [scorer for scorer in waiting if isinstance(scorer, RepeatedJudge)]
        only_failed = len(judges) == len(waiting) and all(judge.when == "failed" for judge in judges)
        number = measured.scored - measured.passed if only_failed else measured.counts.ok
        if waiting and number:
            what = "judged" if len(judges) == len(waiting) else "scored"
            log.info("%s: %s %s", run, counted(number, "answer is", "answers are"), what)

    def _has_budget(self) -> bool:
        """Whether any more may be spent; if not, that stops the sweep."""
        if self._budget.left() != 0.0:
            return True
        self.stopped = self._budget.describe()
        return False

    async def _run(self, runner: Runner, *, force: bool) -> Metrics | None:
        """Run to the end and return the metrics; None when something stopped it early, such as its budget."""
        place = Path(runner.options.output_path or "")
        left = self._budget.left(resumed=None if force else place)
        try:
            metrics = (await runner.run(force=force, max_cost=left)).typed_metrics
        except RunCancelled:
            return None
        if not metrics.complete:
            # The run's budget is only what was left of the sweep's.
            spent = "max_cost" in (metrics.stopped or "") and metrics.cost is not None
            self.stopped = self._budget.describe() if spent else metrics.stopped
            return None
        return metrics

    def _runner_of(
        self,
        target: object,
        suite: EvalSet,
        scorers: Sequence[Scorer],
        options: RunOptions,
        scored_from: str | None = None,
    ) -> Runner:
        engine = self._runner.engine
        if scored_from is not None and engine is not None and engine.runs_in_other_processes:
            engine = None  # the answers are in a file of this process
        return Runner(
            target,
            suite,
            scorers,
            workspace=self._runner.workspace,
            case_limits=self._runner.case_limits,
            options=options,
            engine=engine,
            token=self._token,
            suite_file=self._runner.suite_file,
            scored_from=scored_from,
        )

    def _options(self, run: LevelRun) -> RunOptions:
        """Make the options of a run: no retries, no cache, and no stop rules.

        Only while no level has had an answer yet may the first errors stop it, as there is nothing to measure. Another
        block has another seed: what is random in it is drawn again.
        """
        own = self._runner.options
        return own.replace(
            parallelism=None if run.arrivals is not None else int(run.level),
            output_path=self.place(run),
            requests=None if self._duration is not None else run.requests,
            duration=self._duration,
            arrivals=run.arrivals,
            seed=own.seed + run.block - 1,
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
        """Make the options for judging: all answers, with retries as outside of a sweep."""
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
    """Whether a run was scored by exactly these scorers, with `num_runs` samples of each judge."""
    manifest = read_manifest(run)
    now = msgspec.json.decode(msgspec.json.encode([scorer.identity() for scorer in scorers]))
    return manifest is not None and manifest.scorers == now and manifest.options.get("num_runs") == num_runs


def _waits(scorer: Scorer) -> bool:
    """Whether a scorer waits for something, most likely a model, which would compete with the measurement."""
    return isinstance(scorer, RepeatedJudge) or inspect.iscoroutinefunction(scorer.score)


class LevelAnswers:
    """A target that answers the request `<case>#<round>` with the answer that a load run recorded for it."""

    def __init__(self, run: Path) -> None:
        self._stored = StoredAnswers(run)
        self.default_parallelism = self._stored.default_parallelism

    @property
    def model_id(self) -> str | None:
        return self._stored.model_id

    def identity(self) -> Identity:
        """Return the identity of the target that answered in the level."""
        return self._stored.identity()

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Return the recorded answer, with the times of its call."""
        case_id, _, number = case.id.rpartition(_ROUND)
        original = msgspec.structs.replace(case, id=case_id)
        return await self._stored.invoke(original, msgspec.structs.replace(context, trial=int(number)))

    def close(self) -> None:
        """Close the run's file."""
        self._stored.close()


def sent_requests(suite: EvalSet, options: RunOptions, requests: int) -> EvalSet:
    """Return the first `requests` requests of a load run, each as a separate case with its round in the id."""
    plan = plan_of(suite, [], options.replace(requests=None, duration=None, arrivals=None))

    def cases() -> Iterator[EvalCase]:
        for job in cycling(plan, requests=requests, duration=None).jobs():
            if job is not None:
                yield msgspec.structs.replace(job.case, id=f"{job.case.id}{_ROUND}{job.trial}")

    return EvalSet(id=suite.id, cases=list(cases()))


class SweepBudget:
    """Adds up the cost of every run in a sweep's folder: finished, interrupted, judged, or moved aside and repeated.

    Runs that `--force` moved aside belong to another sweep.
    """

    def __init__(self, sweep: Path, limit: float | None, currency: str) -> None:
        self._sweep = sweep
        self._limit = limit
        self._currency = currency
        self._previous_costs: dict[Path, float | None] = {}

    def spent(self) -> float | None:
        """Add up all known costs; None when no cost of any run is known."""
        runs = sorted(manifest.parent for manifest in self._sweep.glob(f"level-*/**/{MANIFEST}"))
        costs = [cost for run in runs if (cost := self._cost(run)) is not None]
        return math.fsum(costs) if costs else None

    def left(self, resumed: Path | None = None) -> float | None:
        """Return what may still be spent, 0 when nothing; None when there is no limit.

        A run that is resumed in `resumed` adds what it has spent so far by itself.
        """
        if self._limit is None:
            return None
        own = self._cost(resumed) if resumed is not None and (resumed / MANIFEST).exists() else None
        return max(self._limit - (self.spent() or 0.0) + (own or 0.0), 0.0)

    def describe(self) -> str:
        """Describe why no more may be spent."""
        spent = format_money(self.spent() or 0.0, self._currency)
        return f"{spent} spent in the whole sweep: max_cost is {self._limit:g}"

    def _cost(self, run: Path) -> float | None:
        if PREVIOUS not in run.relative_to(self._sweep).parts:
            return _cost_of(run)
        if run not in self._previous_costs:  # a run that was moved aside no longer changes
            self._previous_costs[run] = _cost_of(run)
        return self._previous_costs[run]


def _cost_of(run: Path) -> float | None:
    """Read the cost of a run; of one that only scored a level's answers, the cost of its judges."""
    try:
        metrics = Result.load(run).typed_metrics
    except RunRefused as error:
        log.warning("the cost of %s is not counted: %s", run, error)
        return None
    return metrics.cost if metrics.scored_from is UNSET else metrics.cost_judges
