"""One call of `Runner.run`, step by step: plan, recover, run the cases under the live display, write the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steelyard.cache.cached import Cached
from steelyard.cache.store import EvaluationDataStore, ManagedStore, StoreError, open_store
from steelyard.daemon_threads import DaemonThreads
from steelyard.engine.base import CancellationToken, Engine
from steelyard.engine.retry import Retry, RetryPolicy
from steelyard.errors import ConfigurationError, RunCancelled, SuiteError
from steelyard.journal.reader import decode_record, iter_records
from steelyard.plugins import make_sandbox
from steelyard.progress.display import LiveDisplay
from steelyard.protocols import (
    CallByCall,
    DriverCallback,
    RepeatedJudge,
    SandboxProvider,
    Scorer,
    Session,
    Tally,
    Target,
)
from steelyard.records import (
    STOP_REASONS,
    CaseLimits,
    EncodedRecords,
    InvocationResponse,
    Job,
    Record,
    StoredSample,
    UnscoredAnswer,
    verdict,
)
from steelyard.run.analysis import Analysed, Analysis, stopping
from steelyard.run.case import CaseRunner
from steelyard.run.directory import OpenMode, RunDirectory
from steelyard.run.hooks import Hooks, RunInfo
from steelyard.run.metrics import compose
from steelyard.run.options import RunOptions
from steelyard.run.plan import Plan, cycling, manifest_of, plan_of, read_session
from steelyard.run.recorder import Recorder
from steelyard.run.result import Result, about_run
from steelyard.run.run_metrics import NamedMetric
from steelyard.run.send_policy import Endpoints, SendPolicy
from steelyard.run.stop_rules import DecidedStop, StopRules
from steelyard.scoring.base import takes_context
from steelyard.scoring.judge.calibration import calibration_of, is_trusted
from steelyard.scoring.judge.verdict import is_verdict
from steelyard.scoring.pipeline import ScoringPipeline
from steelyard.stats.figures import parse_progress_bar_stats
from steelyard.stats.formatting import counted, safe_text
from steelyard.stats.metrics import JudgeCalibration, LimitMetrics, Metrics, NotKept
from steelyard.stats.prices import SharedBudget, over_budget
from steelyard.stats.running import RunningStats
from steelyard.stats.trials import TrialStats
from steelyard.suite.evalset import EvalSet
from steelyard.workspace.attempts import DISK_LIMIT, InWorkspace, Workspaces
from steelyard.workspace.limits import check_enforced
from steelyard.workspace.places import work_root
from steelyard.workspace.template import Workspace

if TYPE_CHECKING:
    from steelyard.workspace.gateway import Gateway

log = logging.getLogger("steelyard")

_REFRESH_SECONDS = 0.2


class MatrixPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a run takes from the matrix that it belongs to, and shares with the other runs in it."""

    name: str
    """The variant's, for messages."""
    axes: dict[str, str]
    endpoints: Endpoints | None
    """None where the runs do not run at the same time."""
    budget: SharedBudget | None
    store: EvaluationDataStore | None
    stats: RunningStats
    """Of all runs together, for the display."""
    warned: set[str]
    """The judges that were already reported as not trusted: they are the same for all."""


class Execution:
    """Runs a suite once: everything that one call of `Runner.run` holds while it runs.

    It stops when the caller's `token` is cancelled; what stops it for another reason does not cancel that token.
    `suite_file` and `scored_from` are for run.json: where the suite was read from, and the run whose answers are scored
    again. A run that is `part` of a matrix has no own display.
    """

    def __init__(
        self,
        target: Target,
        suite: EvalSet,
        scorers: Sequence[Scorer],
        options: RunOptions,
        engine: Engine,
        *,
        workspace: Workspace | None = None,
        case_limits: CaseLimits | None = None,
        hooks: Sequence[object] = (),
        run_metrics: Sequence[NamedMetric] = (),
        token: CancellationToken | None = None,
        suite_file: str | None = None,
        scored_from: str | None = None,
        part: MatrixPart | None = None,
    ) -> None:
        self._suite = suite
        self._part = part
        self._workspace = workspace
        self._case_limits = case_limits
        self._workspaces: Workspaces | None = None
        self._token = CancellationToken()
        self._callers_token = token
        self._suite_file = suite_file
        self._scored_from = scored_from
        self._target = target
        self._scorers = scorers
        self._options = options
        self._engine = engine
        self._spec = parse_progress_bar_stats(options.progress_bar_stats)
        self._directory: RunDirectory | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._stopped: str | None = None
        """Why no more jobs were handed out, when that was not a cancellation."""
        self._complete_already = False
        """Whether the run directory has the result already, and nothing is to be done."""
        self._warmed_up = 0
        self._analysed = Analysed()
        self._analysis = Analysis()
        self._is_analysed = False
        self._decided: DecidedStop | None = None
        self._hooks = Hooks(hooks)
        self._run_metrics = run_metrics
        self._result: Result | None = None
        self._unfollow: Callable[[], None] | None = None
        self._session: Session | None = None
        self._store: EvaluationDataStore | None = None
        self._gateway = _gateway_of(target)
        upstreams = () if self._gateway is None else tuple(self._gateway.upstreams.values())
        endpoints = None if part is None else part.endpoints
        self._send_policy = SendPolicy(target, scorers, options, upstreams, endpoints)

    @property
    def _label(self) -> str:
        """What messages about one variant of a matrix begin with."""
        return "" if self._part is None else f"{safe_text(self._part.name)}: "

    @property
    def suite(self) -> EvalSet:
        """The suite; after a one-shot's cases were written to the run directory, as it is read from there."""
        return self._suite

    @property
    def has_directory(self) -> bool:
        """Whether it writes to a run directory."""
        return self._options.output_path is not None

    async def run(self, mode: OpenMode) -> Result:
        """Prepare off the event loop, then run the cases; a cancelled task still leaves a partial result."""
        await self.prepare(mode)
        return await self.work()

    async def prepare(self, mode: OpenMode) -> None:
        """Do everything before the first call, off the event loop; to be followed by `work` or `close`."""
        self._unfollow = self._follow(self._callers_token) if self._callers_token is not None else None
        try:
            await self._off_the_loop(self._prepare, mode)
        except BaseException as error:
            await self._close_hooks(error)
            self.close()
            raise

    async def _off_the_loop(self, step: Callable[..., None], *args: Any) -> None:
        """Do a step that may block in a thread; a cancelled task waits for it, as it holds the directory."""
        doing = asyncio.create_task(DaemonThreads().run(step, *args))
        try:
            await asyncio.shield(doing)
        except asyncio.CancelledError:
            self._token.cancel("the task was cancelled")
            await asyncio.wait([doing])
            raise

    @property
    def is_complete_already(self) -> bool:
        """Whether the run directory has the result, and nothing is to be done; known when it is prepared."""
        return self._complete_already

    @property
    def recorder(self) -> Recorder:
        """The counters, once it is prepared."""
        return self._recorder

    @property
    def planned(self) -> int:
        """How many records there are to be, once it is prepared."""
        return self._plan.slots

    async def work(self) -> Result:
        """Run the cases that are left, once it is prepared."""
        try:
            if self._complete_already:
                return self._loaded()
            await self._off_the_loop(self._begin)
            self._hooks.start(self._about())
            return await self._work()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self._token.cancel("the task was cancelled")
            await self._close_hooks(error)
            raise
        finally:
            self.close()

    def _about(self) -> RunInfo:
        return RunInfo(
            suite=self._plan.suite.id,
            path=None if self._directory is None else self._directory.path.absolute(),
            model_id=self._manifest.model_id,
            planned=self._plan.slots,
            done_before=self._recorder.done_before,
        )

    async def _close_hooks(self, error: BaseException | None = None) -> None:
        await self._hooks.close(self._result, error, interrupted=self._token.cancelled)

    def _follow(self, token: CancellationToken) -> Callable[[], None]:
        return token.on_cancel(lambda: self._token.cancel(token.reason or "cancelled"))

    def _prepare(self, mode: OpenMode) -> None:
        """Do everything before the first call: the session, the cache, the plan, the lock, the recovery."""
        if self._options.initial_session_file is not None:
            self._session = read_session(self._options.initial_session_file)
        if self._part is not None:
            self._store = self._part.store
        elif not self._options.is_load:
            self._store = open_cache(self._options.cache)
        self._send_policy.check()
        self._workspaces = self._open_workspaces()
        if self._case_limits is not None:
            self._check_limits(self._case_limits.names)
        # Refuse a bad suite before a directory is touched. A one-shot can be read only once, into the directory.
        plan = None if self._suite.one_shot else self._make_plan()
        self._engine.check_sent([self._target, *self._scorers])
        self._engine.check(pace=self._options.arrivals is not None)
        manifest = manifest_of(
            self._target,
            self._suite,
            self._scorers,
            self._options,
            session=self._session,
            suite_file=self._suite_file,
            scored_from=self._scored_from,
            case_limits=self._case_limits,
        )
        manifest = msgspec.structs.replace(
            manifest,
            calibrations=_calibrations(self._scorers),
            variant={} if self._part is None else self._part.axes,
            run_metrics=[dict(metric.identity()) for metric in self._run_metrics],
        )
        if self._options.output_path is not None:
            self._directory = RunDirectory(Path(self._options.output_path), mode)
            manifest = self._directory.prepare(manifest, self._suite)
            if self._directory.to_load:
                self._complete_already = True
                return
            if self._workspaces is not None:
                self._workspaces.programs = self._directory.programs
        if plan is None:
            self._spool()
            plan = self._make_plan()
        self._plan = plan
        if plan.limits:
            self._check_limits(plan.limits)
            self._workspaces = self._workspaces or self._new_workspaces(None)
        self._manifest = msgspec.structs.replace(manifest, planned=plan.slots)
        options = self._options
        self._analysed = Analysed(
            by=options.by,
            trials=options.trials,
            by_case=not options.is_load and (options.trials > 1 or plan.groups is not None),
            load=options.is_load,
            run_metrics=tuple(self._run_metrics),
        )
        self._recorder = self._recover(plan)
        if self._directory is not None and self._directory.is_up_to_date(self._manifest, self._recorder):
            log.info("%s is complete and up to date", self._options.output_path)
            self._complete_already = True
            if self._workspaces is not None:
                self._workspaces.is_complete = True
            return
        if self._recorder.resumed and self._part is None:
            log.info("resuming %s: %s", self._options.output_path, self._recorder.so_far())

    def _begin(self) -> None:
        """Note in the directory that another launch begins."""
        if self._directory is not None:
            self._directory.begin_launch(self._manifest, self._recorder.done_before, self._recorder.left_out_lines)

    def _open_workspaces(self) -> Workspaces | None:
        """Where agents work; None in a run that has no use for it."""
        workspace = self._workspace
        if self._gateway is not None:
            self._gateway.bind(
                lambda upstream: self._send_policy.limited(upstream, upstream), self._send_policy.price_list
            )
        elif workspace is None and self._case_limits is None and not any(map(takes_context, self._scorers)):
            return None
        if workspace is not None or self._gateway is not None:
            self._engine.check_workspaces()
        return self._new_workspaces(workspace)

    def _check_limits(self, names: Iterable[str]) -> None:
        """Refuse limits that nothing can enforce, and a timeout that would come before the time limit."""
        if self._scored_from is not None:
            return
        check_enforced(names, self._target)
        limit = self._case_limits.time if self._case_limits is not None else None
        timeout = self._options.timeout
        if limit is not None and timeout is not None and timeout <= limit and timeout != RunOptions().timeout:
            raise ConfigurationError(
                f"timeout ({timeout:g} s) ends a case as an error before case_limits.time ({limit:g} s) is reached: "
                f"leave it out, or make it longer"
            )

    @property
    def _timeout(self) -> float | None:
        """The time for one case. Where the suite has a time limit, that one is to count and not the default."""
        limits = self._case_limits
        is_default = self._options.timeout == RunOptions().timeout
        return None if is_default and limits is not None and limits.time is not None else self._options.timeout

    def _new_workspaces(self, workspace: Workspace | None) -> Workspaces:
        output = self._options.output_path
        sandbox = self._check_sandboxes(workspace)
        return Workspaces(
            workspace,
            run=None if output is None else Path(output),
            limits=self._case_limits,
            answers_of=None if self._scored_from is None else Path(self._scored_from),
            for_cache=self._store is not None,
            gateway=self._gateway,
            sandbox=sandbox,
        )

    def _check_sandboxes(self, workspace: Workspace | None) -> SandboxProvider | None:
        """The sandbox of the agent; ConfigurationError where it, or that of the setup or a grader, cannot be used."""
        raw = getattr(self._target, "sandbox", None)
        others = [getattr(scorer, "sandbox_provider", None) for scorer in self._scorers]
        others.append(None if workspace is None else workspace.sandbox)
        if raw is None and not any(others):
            return None
        sandbox = make_sandbox(raw, folder=getattr(self._target, "folder", None))
        if sandbox is not None and sandbox.wants_gateway and self._gateway is None:
            raise ConfigurationError("sandbox: network: gateway needs a `gateway` beside it")
        output = self._options.output_path
        hidden = [work_root(), *([] if output is None else [Path(output).absolute()])]
        for provider in (sandbox, *others):
            if provider is not None:
                provider.check(hidden)
        return sandbox

    def _loaded(self) -> Result:
        """The result that is in the directory."""
        assert self._directory is not None
        result = Result.load(self._directory.path.absolute())
        if not self._options.low_memory:
            result.responses = result.load_responses()
        return result

    def _recover(self, plan: Plan) -> Recorder:
        """Read what earlier launches did, and get ready to record more."""
        by_case = self._is_repeated or (plan.groups is not None and not self._options.is_load)
        trials = TrialStats(plan.cases, plan.trials, plan.groups) if by_case else None
        journal = None
        options = self._options
        if options.stop_when is not None:
            baseline = None if options.baseline is None else Path(options.baseline)
            self._decided = DecidedStop(
                plan, options.decide, seed=options.seed, baseline=baseline, max_regression=options.max_regression
            )
        if self._directory is not None:
            journal = self._directory.open(plan, trials=trials, check=self._check, decided=self._decided)
        return Recorder(
            plan,
            journal,
            spending=self._send_policy.new_spending(),
            keep=not self._options.low_memory,
            trials=trials,
            decided=self._decided,
            on_record=self._hooks.take if self._hooks.takes_records else None,
            watch=StopRules(self._options, self._engine.in_flight, self._token.cancel).check,
            label=self._label,
        )

    @property
    def _is_repeated(self) -> bool:
        """Whether cases are asked or judged several times, to see how answers and judgements vary."""
        return not self._options.is_load and (self._options.trials > 1 or self._options.num_runs > 1)

    def _make_plan(self) -> Plan:
        workspaces = self._workspaces
        seen_besides = None if workspaces is None or workspaces.workspace is None else workspaces.seen_of
        return plan_of(self._suite, self._scorers, self._options, self._check, seen_besides)

    def _spool(self) -> None:
        limit = self._options.spooled_cases
        if self._directory is not None:
            self._suite = self._directory.spool(self._suite, limit)
        else:
            self._scratch = tempfile.TemporaryDirectory(prefix="steelyard-")
            self._suite = self._suite.spool(Path(self._scratch.name) / "cases.jsonl", limit)

    def _check(self) -> None:
        if self._token.cancelled:
            raise RunCancelled(f"cancelled before the first call: {self._token.reason}")

    async def _work(self) -> Result:
        """Run the cases under the live display, then compose and write the metrics."""
        if not self._engine.runs_in_other_processes:
            await self._send_policy.open()
        try:
            if self._workspaces is not None:
                await self._workspaces.open(shared=self._engine.runs_in_other_processes)
            work = self._case_runner()
            if self._options.warmup and not self._recorder.resumed:
                self._warmed_up = await self._warm_up(work)
            tally = await self._run_shown(work)
        finally:
            if not self._engine.runs_in_other_processes:
                await self._send_policy.close()
        if tally.interrupted_by is None:
            await self._analyse()
            result = self._finish(tally)
            await self._close_hooks()
            return result
        self._stopped = f"KeyboardInterrupt, raised by the target or a scorer of case {safe_text(tally.interrupted_by)}"
        self._finish(tally)
        raise KeyboardInterrupt(self._stopped)

    async def _analyse(self) -> None:
        """Find out from the records what is not counted as they come, in a thread: it may take a while."""
        if not self._analysed or self._token.cancelled:
            return
        if self._directory is not None:
            self._directory.commit()
        threads, check = DaemonThreads(), stopping(lambda: self._token.cancelled)
        working = asyncio.create_task(threads.run(self._analysed.of, self._records, check))
        cancelled = asyncio.create_task(self._token.wait())
        try:
            await asyncio.wait({working, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                with contextlib.suppress(RunCancelled):
                    self._analysis, self._is_analysed = working.result(), True
        finally:
            for task in (working, cancelled):
                task.cancel()

    def _records(self) -> Iterator[Record]:
        """The records that count, in case order."""
        if self._directory is not None:
            return iter_records(self._directory.path)
        return iter(sorted(self._recorder.kept or (), key=lambda record: (record.index, record.trial)))

    async def _run_shown(self, work: CaseRunner) -> Tally:
        display = LiveDisplay(
            description=self._plan.suite.id,
            total=self._plan.slots,
            initial=self._recorder.done_before,
            duration=self._options.duration,
            spec=self._spec,
            mode=self._options.progress if self._part is None else "off",
        )
        self._start_clock()
        ticker = asyncio.create_task(self._show(display), name="steelyard-display")
        try:
            return await self._run_engine(work)
        finally:
            ticker.cancel()
            self._send_policy.stop_watching(self._engine.client_loads())
            display.close(self._recorder.done, self._recorder.stats, self._recorder.live_outcomes())

    def _start_clock(self) -> None:
        """Start the clock, and watch how busy this process is."""
        self._recorder.begin()
        self._send_policy.watch()

    def _from_the_first(self, jobs: Iterator[Job | None]) -> Iterator[Job | None]:
        """Yield the jobs; the clock starts with the first of them, when there are workers to do it."""
        self._start_clock()
        yield from jobs

    async def _warm_up(self, work: CaseRunner) -> int:
        """Send some requests that count for nothing, to open connections and wake the model; how many finished."""
        send_policy = self._send_policy
        tally = await self._engine.run(
            # Not through our own cache: what the warm-up put there would become the answers of the run.
            work.for_warm_up(self._retrying(self._target)),
            cycling(self._plan, requests=self._options.warmup, duration=None).jobs(),
            lambda _: None,
            parallelism=send_policy.parallelism,
            token=self._token,
            permits=send_policy.permits,
            together=self._options.is_load,
        )
        if tally.interrupted_by is not None:
            raise RunCancelled("KeyboardInterrupt, raised by the target in the warm-up")
        return tally.finished

    async def _run_engine(self, work: CaseRunner) -> Tally:
        jobs = self._hooks.paced(self._until_the_suite_changes(self._recorder.jobs()))
        if self._engine.runs_in_other_processes:
            jobs = self._from_the_first(jobs)
        if self._options.max_cost is not None:
            jobs = self._until_spent(jobs, self._options.max_cost)
        send_policy = self._send_policy
        running = asyncio.create_task(
            self._engine.run(
                work,
                jobs,
                self._recorder.emit if self._part is None else self._emit,
                parallelism=send_policy.parallelism,
                token=self._token,
                permits=send_policy.permits,
                pace=send_policy.plan_sends(self._plan.slots or None),
                together=self._options.is_load,
            )
        )
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # Let the engine stop first, so that the partial result says what became of each case.
            self._token.cancel("the task was cancelled")
            self._finish(await running)
            raise

    def _until_the_suite_changes(self, jobs: Iterator[Job | None]) -> Iterator[Job | None]:
        """Yield the jobs; a suite that is edited during the run ends them, and what is in flight may finish."""
        try:
            yield from jobs
        except SuiteError as error:
            log.error("%s%s; stopping here, finished cases are kept", self._label, error)
            self._stopped = str(error)

    def _until_spent(self, jobs: Iterator[Job | None], limit: float) -> Iterator[Job | None]:
        """Yield the jobs until the budget is spent; what is in flight is paid for, and may finish."""
        paid = self._scored_from is not None
        spending, engine = self._recorder.spending, self._engine
        budget = None if self._part is None else self._part.budget

        def over() -> str | None:
            in_flight = engine.in_flight().count
            if budget is not None:
                return budget.over(spending, in_flight)
            return over_budget(spending, limit, in_flight, answers_are_paid=paid)

        while (reason := over()) is None:
            try:
                job = next(jobs)
            except StopIteration:
                return
            yield job
        if budget is None or not budget.is_reported:
            log.warning("%s; stopping here, finished cases are kept", reason)
        if budget is not None:
            budget.is_reported = True
        self._stopped = reason

    def _emit(self, record: Record | UnscoredAnswer | StoredSample | EncodedRecords) -> None:
        """Record it, and count it for the display of the whole matrix."""
        if isinstance(record, EncodedRecords):
            for one in record.records:
                self._emit(decode_record(one.line))
            return
        recorder = self._recorder
        before = recorder.stats.total_requests
        recorder.emit(record)
        if self._part is not None and isinstance(record, Record) and recorder.stats.total_requests != before:
            self._part.stats.update(record)

    def _case_runner(self) -> CaseRunner:
        options, send_policy = self._options, self._send_policy
        target = self._retrying(self._target)
        if self._store is not None:
            is_good = None
            if self._workspaces is not None and self._workspaces.workspace is not None:
                is_good = _has_patch
            target = Cached(target, self._store, self._plan.suite.id, session=self._session, is_good=is_good)
        scorers = [self._bound(scorer) if isinstance(scorer, RepeatedJudge) else scorer for scorer in self._scorers]
        return CaseRunner(
            target,
            ScoringPipeline(scorers, num_runs=options.num_runs, tracebacks=options.tracebacks, trust=self._trust()),
            timeout=self._timeout,
            seed=options.seed,
            session=self._session,
            token=self._token,
            tracebacks=options.tracebacks,
            keep_expected=options.keep_expected,
            waits=send_policy.waits,
            remotes=send_policy.remotes,
            programs=self._directory.programs if self._directory is not None else None,
            workspaces=self._workspaces,
            answered=DriverCallback(send_policy.permits.answered) if send_policy.permits is not None else None,
        )

    def _trust(self) -> dict[str, bool]:
        """Whether each judge whose calibration is required is trusted, by its name; warns of those that are not."""
        found = {}
        for judge in self._scorers:
            required = getattr(judge, "calibration", None)
            if isinstance(judge, RepeatedJudge) and required is not None:
                found[judge.name], reason = is_trusted(required, judge.by)
                if not found[judge.name] and (self._part is None or judge.name not in self._part.warned):
                    named = "the judge" if judge.name == "judge" else f"judge {judge.name}"
                    log.warning("%s is only advisory: %s", named, reason)
                    if self._part is not None:
                        self._part.warned.add(judge.name)
        return found

    def _retrying(
        self, target: Target, paid: Callable[[float | None], None] | None = None, retries: int | None = None
    ) -> Target:
        """Wrap the target: its costs reported, within its endpoint's rate limits, retried after transient errors."""
        options, send_policy = self._options, self._send_policy
        attempts = options.attempts if retries is None else retries + 1
        policy = RetryPolicy(attempts=attempts, retry_on=options.retry_on)

        def wrap(call: Target) -> Target:
            called = send_policy.limited(target, send_policy.priced(target, call, paid))
            if places is not None and not isinstance(target, CallByCall):
                called = InWorkspace(called, places)
            return Retry(called, policy)

        places = self._workspaces if target is self._target and self._scored_from is None else None
        if not isinstance(target, CallByCall):
            return wrap(target)
        return target.bound(wrap) if places is None else InWorkspace(target.bound(wrap), places)

    def _bound(self, judge: RepeatedJudge) -> RepeatedJudge:
        """Return the judge with retries and the cache."""
        return judge.bound(partial(self._judge_target, retries=getattr(judge, "retries", None)))

    def _judge_target(self, target: Target, retries: int | None = None) -> Target:
        """What a judge asks: its replies are cached like answers, those that can be read."""
        asked = self._retrying(target, paid=DriverCallback(self._recorder.judged), retries=retries)
        if self._store is None:
            return asked
        return Cached(asked, self._store, self._plan.suite.id, is_good=is_verdict)

    async def _show(self, display: LiveDisplay) -> None:
        while True:
            self._recorder.stats.active_seconds = self._recorder.active_seconds
            recorder, allowed = self._recorder, self._send_policy.allowed
            display.refresh(recorder.done, recorder.stats, self._engine.in_flight(), allowed, recorder.live_outcomes())
            await asyncio.sleep(_REFRESH_SECONDS)

    def _finish(self, tally: Tally) -> Result:
        stopped = self._token.reason or self._stopped
        metrics = self._metrics(tally, stopped)
        if self._workspaces is not None:
            self._workspaces.is_complete = metrics.complete
        path = self._directory.path.absolute() if self._directory is not None else None
        if excess := int(getattr(self._target, "excess", 0)):
            calls = counted(excess, "call")
            log.warning("%s%s still running after the timeout: a thread cannot be stopped", self._label, calls)
        self._result = Result(
            metrics=metrics,
            path=path,
            responses=self._responses(),
            cancelled=stopped is not None and not metrics.complete,
        )
        return self._result

    def _metrics(self, tally: Tally, stopped: str | None) -> Metrics:
        """Commit every record, then compose the metrics and write them."""
        directory, recorder = self._directory, self._recorder
        if directory is not None:
            directory.commit()
        counts = recorder.close(tally, stopped)
        limits, not_kept = self._work_metrics()
        if counts.complete:  # whatever came just then stopped nothing
            stopped = None
        metrics = compose(
            about=about_run(self._manifest, directory.path if directory is not None else None),
            counts=counts,
            stats=recorder.stats,
            scores=recorder.scores,
            errors=recorder.errors,
            left_out=recorder.left_out,
            lines=recorder.lines if directory is not None else None,
            stopped=stopped,
            limits=limits,
            not_kept=not_kept,
            trials=recorder.trial_metrics(),
            repeated=self._is_repeated,
            spending=recorder.spending,
            load=self._options.is_load,
            decided=None if self._decided is None else self._decided.to_metrics(counts.not_asked),
            slices=self._analysis.slices,
            run_metrics=self._analysis.run_metrics,
            sent=partial(
                self._send_policy.to_metrics,
                tally,
                warmed_up=self._warmed_up,
                earlier=directory.earlier_client_load if directory is not None else None,
            ),
        )
        if self._analysed and not self._is_analysed and metrics.complete:
            # Interrupted just then: all is answered, and the next launch finds out the rest.
            metrics.complete, metrics.stopped = False, self._token.reason or "interrupted"
        if directory is not None:
            directory.write_metrics(metrics)
        return metrics

    def _work_metrics(self) -> tuple[dict[str, LimitMetrics], NotKept]:
        """How many cases reached each limit, how many of those passed all the same, and what was not kept of them."""
        names = (*STOP_REASONS.values(), DISK_LIMIT)
        found = {reason: LimitMetrics() for reason in names if reason in self._recorder.stats.stop_reasons}
        not_kept, workspaces = NotKept(), self._workspaces
        if workspaces is None or (not found and workspaces.keeper is None):
            return {}, not_kept
        records = self._recorder.kept or ()
        for record in iter_records(self._directory.path) if self._directory is not None else records:
            if record.status == "ok" and record.stop_reason in found:
                found[record.stop_reason].n += 1
                found[record.stop_reason].passed += verdict(record.scores) is True
            not_kept.cases += record.files_not_kept > 0
            not_kept.files += record.files_not_kept
            not_kept.bytes += record.bytes_not_kept
        return found, not_kept

    def _responses(self) -> list[Record]:
        """Return all records in case order: those of this launch or, after a resume, read from the journal."""
        if self._recorder.kept is None:
            return []
        if self._directory is not None and self._recorder.resumed:
            return list(iter_records(self._directory.path))
        return sorted(self._recorder.kept, key=lambda record: (record.index, record.trial))

    def close(self) -> None:
        """Commit what was recorded and release everything; for every way out."""
        if self._unfollow is not None:
            self._unfollow()
            self._unfollow = None
        if self._workspaces is not None:  # while the run directory is locked: the next launch has the same folder
            self._workspaces.close()
        if self._directory is not None:
            self._directory.close()
        if self._part is None and self._store is not self._options.cache and isinstance(self._store, ManagedStore):
            self._store.close()
        if self._scratch is not None:
            self._scratch.cleanup()


def _has_patch(response: InvocationResponse) -> bool:
    """Whether an agent's answer can be used again: without its patch, its workspace could not be graded."""
    return response.workspace_patch is not None


def _gateway_of(target: Target) -> Gateway | None:
    """What the model calls of an agent go through, where it asks for that."""
    apis = getattr(target, "gateway", None)
    if apis is None:
        return None
    from steelyard.workspace.gateway import Gateway

    return Gateway(apis)


def _calibrations(scorers: Sequence[Scorer]) -> dict[str, JudgeCalibration]:
    """What the calibration files say of the judges; a file that cannot be used is named when the judge is bound."""
    found = {}
    for judge in scorers:
        demanded = getattr(judge, "calibration", None)
        if isinstance(judge, RepeatedJudge) and demanded is not None:
            with contextlib.suppress(ConfigurationError):
                if (entry := calibration_of(demanded, judge.by)) is not None:
                    found[judge.name] = entry.summary()
    return found


def open_cache(cache: object) -> EvaluationDataStore | None:
    """The cache of a run; ConfigurationError, before anything is called, where it cannot be opened."""
    try:
        return open_store(cache)
    except StoreError as error:
        raise ConfigurationError(
            f"the cache cannot be opened: {error}; name another place, or run without one (--no-cache, cache=None)",
            topic="cache",
        ) from error
