"""One call of `Runner.run`, step by step: plan, recover, work under the live display, close the books."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from steelyard.cache.cached import Cached
from steelyard.cache.store import EvaluationDataStore, ManagedStore, open_store
from steelyard.daemon_threads import DaemonThreads
from steelyard.engine.base import Engine
from steelyard.engine.cancellation import CancellationToken
from steelyard.engine.retry import Retry, RetryPolicy
from steelyard.errors import RunCancelled, SuiteError
from steelyard.journal.reader import iter_records
from steelyard.progress.display import LiveDisplay
from steelyard.protocols import CallByCall, DriverCallback, RepeatedJudge, Scorer, Session, Tally, Target
from steelyard.records import Job, Record
from steelyard.run.case import CaseRunner
from steelyard.run.directory import OpenMode, RunDirectory
from steelyard.run.metrics import compose
from steelyard.run.options import RunOptions
from steelyard.run.plan import Plan, cycling, manifest_of, plan_of, read_session
from steelyard.run.recorder import Recorder
from steelyard.run.result import Result, about_run
from steelyard.run.send_policy import SendPolicy
from steelyard.run.stop_rules import StopRules
from steelyard.scoring.judge.calibration import is_trusted
from steelyard.scoring.pipeline import ScoringPipeline
from steelyard.stats.formatting import counted
from steelyard.stats.metrics import Metrics
from steelyard.stats.prices import over_budget
from steelyard.stats.spec import parse_progress_bar_stats
from steelyard.stats.trials import TrialStats
from steelyard.suite.evalset import EvalSet

log = logging.getLogger("steelyard")

_REFRESH_SECONDS = 0.2


class Execution:
    """Everything that one run holds while it runs; made anew for each call."""

    def __init__(
        self, target: Target, suite: EvalSet, scorers: Sequence[Scorer], options: RunOptions, engine: Engine
    ) -> None:
        self.suite = suite
        self.token = CancellationToken()
        self.origin: dict[str, str | None] = {}
        """What run.json says of where this comes from."""
        self._target = target
        self._scorers = scorers
        self._options = options
        self._engine = engine
        self._spec = parse_progress_bar_stats(options.progress_bar_stats)
        self._directory: RunDirectory | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._broken_off: str | None = None
        self._session: Session | None = None
        self._store: EvaluationDataStore | None = None
        self._send_policy = SendPolicy(target, scorers, options)

    def follow(self, token: CancellationToken) -> Callable[[], None]:
        """Stop when the caller's token is cancelled; what stops this run leaves that token alone."""
        return token.on_cancel(lambda: self.token.cancel(token.reason or "cancelled"))

    async def run(self, entry: OpenMode) -> Result:
        """Prepare off the event loop, then work; a cancelled task still leaves its books closed."""
        preparing = asyncio.create_task(DaemonThreads().run(self._prepare, entry))
        try:
            await asyncio.shield(preparing)
            return await self._work()
        except asyncio.CancelledError:
            self.token.cancel("the task was cancelled")
            await asyncio.wait([preparing])
            raise
        finally:
            self._close()

    def _prepare(self, entry: OpenMode) -> None:
        """Everything before the first call: the session, the cache, the plan, the lock, the recovery."""
        path = self._options.output_path
        if self._options.initial_session_file is not None:
            self._session = read_session(self._options.initial_session_file)
        if not self._options.is_load:
            self._store = open_store(self._options.cache)
        self._send_policy.check()
        # Refuse a bad suite before a directory is touched. A one-shot can be read only once, into the directory.
        plan = None if self.suite.one_shot else self._make_plan()
        self._engine.check(pace=self._options.arrivals is not None)
        self._manifest = manifest_of(self._target, self.suite, self._scorers, self._options, session=self._session)
        for name, value in self.origin.items():
            setattr(self._manifest, name, value)
        if path is not None:
            self._directory = RunDirectory(Path(path), entry)
            self._directory.enter(self._manifest, self.suite)
        if plan is None:
            self._spool()
            plan = self._make_plan()
        self._plan = plan
        self._manifest.planned = plan.slots
        keep = not self._options.low_memory
        repeated = not self._options.is_load and (self._options.trials > 1 or self._options.num_runs > 1)
        trials = TrialStats(plan.cases, plan.trials) if repeated else None
        watch = StopRules(self._options, self._engine.in_flight, self.token.cancel).check
        if self._directory is None:
            self._recorder = Recorder(plan, replay=None, writer=None, trials=trials, keep=keep, watch=watch)
        else:
            judged = any(isinstance(scorer, RepeatedJudge) for scorer in self._scorers)
            self._recorder = self._directory.open(
                plan, self._manifest, keep=keep, judged=judged, trials=trials, check=self._check, watch=watch
            )
        self._send_policy.tell_prices(self._recorder.spending)
        if self._recorder.resumed:
            log.info("resuming %s: %s", path, self._recorder.so_far())

    def _make_plan(self) -> Plan:
        return plan_of(self.suite, self._scorers, self._options, self._check)

    def _spool(self) -> None:
        # An iterator may have no end: with a limit, and nothing to look for, only so many are taken from it.
        limit = self._options.limit if self._options.match is None else None
        if self._directory is not None:
            self.suite = self._directory.spool(self.suite, limit)
        else:
            self._scratch = tempfile.TemporaryDirectory(prefix="steelyard-")
            self.suite = self.suite.spool(Path(self._scratch.name) / "cases.jsonl", limit)

    def _check(self) -> None:
        if self.token.cancelled:
            raise RunCancelled(f"cancelled before the first call: {self.token.reason}")

    async def _work(self) -> Result:
        """Run the jobs under the live display, then close the books."""
        if not self._engine.runs_in_other_processes:
            await self._send_policy.open()
        try:
            work = self._case_work()
            if self._options.warmup and not self._recorder.resumed:
                await self._warm_up(work)
            tally = await self._run_shown(work)
        finally:
            if not self._engine.runs_in_other_processes:
                await self._send_policy.close()
        return self._finish(tally)

    async def _run_shown(self, work: CaseRunner) -> Tally:
        display = LiveDisplay(
            description=self._plan.suite.id,
            total=self._plan.slots,
            initial=self._recorder.done_before,
            duration=self._options.duration,
            spec=self._spec,
            mode=self._options.progress,
        )
        self._recorder.begin()
        self._send_policy.watch()
        ticker = asyncio.create_task(self._show(display), name="steelyard-display")
        try:
            return await self._run_engine(work)
        finally:
            ticker.cancel()
            self._send_policy.stop_watching(self._engine.client_loads())
            display.close(self._recorder.done, self._recorder.stats)

    async def _warm_up(self, work: CaseRunner) -> None:
        """Send some requests that count for nothing: connections open, a model wakes up."""
        send_policy = self._send_policy
        tally = await self._engine.run(
            # Past our own cache: what the warm-up put there would be the answers of the run.
            work.for_warm_up(self._retrying(self._target)),
            cycling(self._plan, requests=self._options.warmup, duration=None).jobs(),
            lambda _: None,
            parallelism=send_policy.parallelism,
            token=self.token,
            permits=send_policy.permits,
        )
        send_policy.warmed_up = tally.finished

    async def _run_engine(self, work: CaseRunner) -> Tally:
        jobs = self._until_the_suite_changes(
            self._directory.jobs(self._recorder) if self._directory is not None else self._recorder.jobs(None)
        )
        if self._options.max_cost is not None:
            jobs = self._until_spent(jobs, self._options.max_cost)
        send_policy = self._send_policy
        running = asyncio.create_task(
            self._engine.run(
                work,
                jobs,
                self._recorder.emit,
                parallelism=send_policy.parallelism,
                token=self.token,
                permits=send_policy.permits,
                pace=send_policy.plan_sends(self._plan.slots or None),
            )
        )
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # Let the engine wind up first, so that the partial result says what really became of each case.
            self.token.cancel("the task was cancelled")
            self._finish(await running)
            raise

    def _until_the_suite_changes(self, jobs: Iterator[Job | None]) -> Iterator[Job | None]:
        """The jobs; a suite that is edited under us ends them, and what is in flight may finish."""
        try:
            yield from jobs
        except SuiteError as error:
            log.error("%s; stopping here, what is done stays done", error)
            self._broken_off = str(error)

    def _until_spent(self, jobs: Iterator[Job | None], limit: float) -> Iterator[Job | None]:
        """The jobs until the budget is used up; what is in flight is paid for, and may finish."""
        paid = self.origin.get("scored_from") is not None
        spending, engine = self._recorder.spending, self._engine
        while (reason := over_budget(spending, limit, engine.in_flight().count, answers_are_paid=paid)) is None:
            try:
                job = next(jobs)
            except StopIteration:
                return
            yield job
        log.warning("%s; stopping here, what is done stays done", reason)
        self._broken_off = reason

    def _case_work(self) -> CaseRunner:
        options, send_policy = self._options, self._send_policy
        target = self._retrying(self._target)
        if self._store is not None:
            target = Cached(target, self._store, self._plan.suite.id, session=self._session)
        scorers = [self._bound(scorer) if isinstance(scorer, RepeatedJudge) else scorer for scorer in self._scorers]
        return CaseRunner(
            target,
            ScoringPipeline(scorers, num_runs=options.num_runs, timeout=options.timeout),
            timeout=options.timeout,
            seed=options.seed,
            session=self._session,
            token=self.token,
            waits=send_policy.waits,
            remotes=send_policy.remotes,
            answered=DriverCallback(send_policy.permits.answered) if send_policy.permits is not None else None,
        )

    def _retrying(self, target: Target, paid: Callable[[float | None], None] | None = None) -> Target:
        """The target with its costs told, behind its endpoint's limits, asked again after faults that may pass."""
        options, send_policy = self._options, self._send_policy
        policy = RetryPolicy(attempts=options.attempts, retry_on=options.retry_on)

        def around(call: Target) -> Target:
            return Retry(send_policy.limited(target, send_policy.priced(target, call, paid)), policy)

        return target.bound(around) if isinstance(target, CallByCall) else around(target)

    def _bound(self, judge: RepeatedJudge) -> RepeatedJudge:
        """The judge with retries; where a calibration was demanded and is not there, its word is only advice."""
        bound = judge.bound(partial(self._retrying, paid=DriverCallback(self._recorder.judged)))
        if (demanded := getattr(judge, "calibration", None)) is not None:
            trusted, reason = is_trusted(demanded, judge.by)
            if not trusted:
                log.warning("judge %s is only advisory: %s", judge.name, reason)
                bound.advisory = True
        return bound

    async def _show(self, display: LiveDisplay) -> None:
        while True:
            self._recorder.stats.active_seconds = self._recorder.active_seconds
            display.refresh(
                self._recorder.done, self._recorder.stats, self._engine.in_flight(), self._send_policy.allowed
            )
            await asyncio.sleep(_REFRESH_SECONDS)

    def _finish(self, tally: Tally) -> Result:
        stopped = self.token.reason or self._broken_off
        metrics = self._metrics(tally, stopped)
        path = self._directory.path.absolute() if self._directory is not None else None
        if excess := int(getattr(self._target, "excess", 0)):
            calls = counted(excess, "call")
            log.warning("%s outlived the time allowed, still running: a thread cannot be stopped", calls)
        return Result(
            metrics=metrics,
            path=path,
            responses=self._responses(),
            cancelled=stopped is not None and not metrics.complete,
        )

    def _metrics(self, tally: Tally, stopped: str | None) -> Metrics:
        if self._directory is not None:
            return self._directory.finish(self._manifest, self._recorder, tally, stopped, self._send_policy)
        return compose(
            about=about_run(self._manifest, None),
            books=self._recorder.close(tally, stopped),
            stats=self._recorder.stats,
            scores=self._recorder.scores,
            errors=self._recorder.errors,
            left_out=0,
            stopped=stopped,
            trials=self._recorder.trial_metrics(),
            spending=self._recorder.spending,
            sent=partial(self._send_policy.to_metrics, tally),
        )

    def _responses(self) -> list[Record]:
        """All records in case order: those of this launch, or read back where earlier ones belong to them."""
        if self._recorder.kept is None:
            return []
        if self._directory is not None and self._recorder.resumed:
            return list(iter_records(self._directory.path))
        return sorted(self._recorder.kept, key=lambda record: (record.index, record.trial))

    def _close(self) -> None:
        if self._directory is not None:
            self._directory.close()
        if self._store is not None and self._store is not self._options.cache and isinstance(self._store, ManagedStore):
            self._store.close()
        if self._scratch is not None:
            self._scratch.cleanup()
