"""Runs every variant of a matrix at the same time: one limit per endpoint, one budget, one cache, one display."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from steelyard.cache.store import ManagedStore
from steelyard.daemon_threads import DaemonThreads, LoopFactory, run_blocking
from steelyard.engine.base import CancellationToken, Engine
from steelyard.engine.lane import Lane, LaneEngine
from steelyard.engine.local import LocalEngine
from steelyard.errors import ConfigurationError, RunCancelled, SuiteError, describe
from steelyard.journal.files import CASES, RunState, create, disk_errors, run_state
from steelyard.journal.lock import RunLock
from steelyard.journal.manifest import compare, read_manifest
from steelyard.progress.display import LiveDisplay
from steelyard.protocols import InFlight
from steelyard.records import CaseLimits
from steelyard.run.directory import IfComplete, OpenMode
from steelyard.run.execution import Execution, MatrixPart, open_cache
from steelyard.run.matrix import (
    PROMPT,
    TARGET,
    Matrix,
    Variant,
    enter_matrix,
    leave_if_unused,
    make_variants,
    read_matrix,
    select_variants,
    write_matrix,
)
from steelyard.run.options import RunChanges, RunOptions
from steelyard.run.plan import manifest_of, read_session
from steelyard.run.result import Result
from steelyard.run.runner import Runner
from steelyard.run.send_policy import Endpoints, SendPolicy, endpoint_of, parallelism_of
from steelyard.shutdown import ENGINE_GRACE_SECONDS
from steelyard.stats.figures import parse_progress_bar_stats
from steelyard.stats.formatting import counted, safe_text
from steelyard.stats.metrics import marked_pass_rate
from steelyard.stats.prices import SharedBudget, format_money
from steelyard.stats.running import RunningStats
from steelyard.suite.evalset import EvalSet
from steelyard.suite.prompts import CasePrompt, read_prompts
from steelyard.workspace.template import Workspace

if TYPE_CHECKING:
    from steelyard.report.gate import Gated
    from steelyard.report.matrix.leaderboard import Leaderboard

log = logging.getLogger("steelyard")

_REFRESH_SECONDS = 0.2


class MatrixResult:
    """The outcome of a matrix: the result of each variant, by its name, in the order of the matrix."""

    def __init__(self, matrix: Matrix, path: Path, results: Mapping[str, Result]) -> None:
        self.matrix = matrix
        self.path = path
        self.results = dict(results)

    @property
    def complete(self) -> bool:
        """Whether every variant that was run is complete."""
        return bool(self.results) and all(result.complete for result in self.results.values())

    def __getitem__(self, name: str) -> Result:
        return self.results[name]

    @classmethod
    def load(cls, path: str | Path) -> MatrixResult:
        """The results in the folder of a matrix: of every variant that has begun."""
        folder = Path(path)
        matrix = read_matrix(folder)
        begun = {name: run for name, run in matrix.runs(folder).items() if run_state(run) is not RunState.FRESH}
        return cls(matrix, folder, {name: Result.load(run) for name, run in begun.items()})

    def summary(self) -> str:
        """What the command line prints at the end: the leaderboard."""
        from steelyard.report.matrix.text import leaderboard_text

        return leaderboard_text(self.leaderboard())

    def leaderboard(self) -> Leaderboard:
        """The variants from the best to the worst, each compared with the best; all that have begun in the folder."""
        from steelyard.report.matrix.leaderboard import leaderboard

        return leaderboard(self.path)

    def report(self, form: str = "html", output: str | Path | None = None) -> Path:
        """Write a report of all variants side by side and return where it is: html, md, text, json or csv.

        It goes to `output`, by default to a file `report.…` in the folder of the matrix.
        """
        from steelyard.report.formats import SUFFIXES, report_pieces, write_pieces

        place = self.path / f"report.{SUFFIXES.get(form, form)}" if output is None else Path(output)
        write_pieces(place, report_pieces([self.path], form))
        return place

    def gate(self, *rules: str, allow: Collection[str] = ()) -> dict[str, Gated]:
        """Check rules such as `pass_rate>=0.8` of each variant, by its name."""
        return {name: result.gate(*rules, allow=allow) for name, result in self.results.items()}

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.leaderboard()._repr_html_()

    def __repr__(self) -> str:
        rates = (f"{name}={marked_pass_rate(result.typed_metrics)}" for name, result in self.results.items())
        state = "complete" if self.complete else "incomplete"
        return f"<MatrixResult {state} {' '.join(rates)} path={self.path}>"


class MatrixRunner:
    """Runs a suite against several targets, with several prompts: every combination is a run in one folder.

    `targets` and `prompts` map names to targets and prompts; a prompt is a mapping with `system_prompt` or `prompt` (a
    template such as `{{ prompt }} Think first.`), or the path of a text file. `variants` are patterns of the
    combinations to run, such as `small/*` [default: all]. The other arguments are those of `Runner`, and the options
    those of `RunOptions`; `parallelism`, `rate` and `tokens_per_min` are for each endpoint, over all variants, and
    `max_cost` is for all of them together. `output_path` is the folder of the matrix, and required.
    """

    def __init__(
        self,
        targets: Mapping[str, object],
        suite: EvalSet,
        scorers: Iterable[object] = (),
        *,
        prompts: Mapping[str, object] | None = None,
        variants: Iterable[str] = (),
        workspace: Workspace | None = None,
        case_limits: CaseLimits | None = None,
        hooks: Iterable[object] = (),
        run_metrics: Iterable[object] = (),
        options: RunOptions | None = None,
        engine: Engine | None = None,
        token: CancellationToken | None = None,
        suite_file: str | None = None,
        **changes: Unpack[RunChanges],
    ) -> None:
        if not isinstance(targets, Mapping) or not targets:
            raise ConfigurationError(f"targets must be a mapping of names to targets, got {targets!r}")
        scorers, hooks, run_metrics = list(scorers), list(hooks), list(run_metrics)
        read = None if prompts is None else read_prompts(prompts, Path())
        axes = {TARGET: list(map(str, targets)), **({} if read is None else {PROMPT: list(read)})}
        named = {str(name): target for name, target in targets.items()}

        def make(at: Mapping[str, str]) -> Runner:
            return Runner(
                named[at[TARGET]],
                suite,
                scorers,
                workspace=workspace,
                case_limits=case_limits,
                hooks=hooks,
                run_metrics=run_metrics,
            )

        checked = (options or RunOptions()).replace(**changes)
        self._set_up(suite, axes, read or {}, make, checked, variants, engine, token, suite_file)

    def _set_up(
        self,
        suite: EvalSet,
        axes: dict[str, list[str]],
        prompts: Mapping[str, CasePrompt],
        make: Callable[[Mapping[str, str]], Runner],
        options: RunOptions,
        patterns: Iterable[str],
        engine: Engine | None,
        token: CancellationToken | None,
        suite_file: str | None,
    ) -> None:
        self.suite = suite
        self.axes = axes
        self.prompts = prompts
        self.variants = select_variants(make_variants(axes), patterns)
        self.runners = {variant.name: make(variant.axes) for variant in self.variants}
        self.options = options
        self.engine = engine
        self.token = token
        self.suite_file = suite_file

    @classmethod
    def of_runners(
        cls,
        suite: EvalSet,
        axes: dict[str, list[str]],
        prompts: Mapping[str, CasePrompt],
        make: Callable[[Mapping[str, str]], Runner],
        *,
        options: RunOptions,
        variants: Iterable[str] = (),
        engine: Engine | None = None,
        suite_file: str | None = None,
    ) -> MatrixRunner:
        """A matrix along any axes: `make` is given the values of each variant that is to be run, and makes its runner.

        `prompts` are those on the axis `prompt`, where there is one.
        """
        matrix = cls.__new__(cls)
        matrix._set_up(suite, axes, prompts, make, options, variants, engine, None, suite_file)
        return matrix

    def with_changes(
        self,
        *,
        engine: Engine | None = None,
        token: CancellationToken | None = None,
        suite_file: str | None = None,
        **changes: Unpack[RunChanges],
    ) -> MatrixRunner:
        """A matrix like this one with other options, or another engine, token or suite file."""
        matrix = copy(self)
        matrix.options = self.options.replace(**changes)
        matrix.engine = engine or self.engine
        matrix.token = token or self.token
        matrix.suite_file = suite_file or self.suite_file
        return matrix

    def only(self, patterns: Iterable[str]) -> MatrixRunner:
        """The same matrix with those of its variants alone whose names match one of the patterns."""
        matrix = copy(self)
        matrix.variants = select_variants(self.variants, patterns)
        matrix.runners = {variant.name: self.runners[variant.name] for variant in matrix.variants}
        return matrix

    def runner_of(self, variant: Variant, suite: EvalSet | None = None) -> Runner:
        """The runner of one variant, in its own run directory; `suite` has the cases where they were written down."""
        asked = suite or self.suite
        runner = copy(self.runners[variant.name])
        runner.suite = asked.with_prompt(self.prompts[variant.axes[PROMPT]]) if PROMPT in variant.axes else asked
        runner.suite_file = self.suite_file
        folder = self.options.output_path
        place = None if folder is None else Path(folder) / variant.directory
        runner.options = self.options.replace(output_path=place)
        return runner

    def check_same(self, variant: Variant) -> None:
        """Raise RunMismatch if the run of a variant that is there is of another target or seed."""
        runner = self.runner_of(variant)
        options = runner.options
        place = Path(options.output_path or "")
        old = read_manifest(place)
        if old is not None:
            session = None if options.initial_session_file is None else read_session(options.initial_session_file)
            compare(place, old, manifest_of(runner.target, runner.suite, (), options, session=session))

    @property
    def parallelism(self) -> dict[str, int]:
        """How many calls may be in flight at each endpoint."""
        found: dict[str, int] = {}
        for runner in self.runners.values():
            endpoint = endpoint_of(runner.target)
            found[endpoint] = max(found.get(endpoint, 0), parallelism_of(runner.target, self.options))
        return found

    def check(self) -> None:
        """Raise ConfigurationError, before anything is made or called, for what cannot be called or paid. Blocks."""
        for variant in self.variants:
            runner = self.runners[variant.name]
            try:
                SendPolicy(runner.target, runner.scorers, self.options).check()
            except ConfigurationError as error:
                raise ConfigurationError(f"{variant.name}: {error}") from error

    async def run(
        self,
        *,
        force: bool = False,
        retry_errors: bool = False,
        salvage: bool = False,
        accept_edits: bool = False,
        if_complete: IfComplete = "error",
        **changes: Unpack[RunChanges],
    ) -> MatrixResult:
        """Run what is left of every variant; the arguments are those of `Runner.run`, for the folder as a whole.

        Variants that are complete stay as they are while others are not. RunFinished is raised when all are.
        """
        mode = OpenMode(
            force=force,
            retry_errors=retry_errors,
            salvage=salvage,
            accept_edits=accept_edits,
            if_complete=if_complete,
        )
        matrix = self.with_changes(**changes)
        options = matrix.options
        await DaemonThreads().run(matrix.check)
        if options.output_path is None:
            raise ConfigurationError("a matrix keeps its runs in a folder: give it an output_path")
        if options.is_load:
            raise ConfigurationError("a matrix evaluates: measure its targets under load one by one, with a sweep")
        parse_progress_bar_stats(options.progress_bar_stats)
        folder = Path(options.output_path)
        create(folder)
        with RunLock(folder):
            launch = _MatrixLaunch(matrix, folder, mode)
            try:
                return await launch.run()
            finally:
                leave_if_unused(folder)

    def run_sync(
        self,
        *,
        force: bool = False,
        retry_errors: bool = False,
        salvage: bool = False,
        accept_edits: bool = False,
        if_complete: IfComplete = "error",
        loop_factory: LoopFactory | None = None,
        **changes: Unpack[RunChanges],
    ) -> MatrixResult:
        """The same from code that is not async; works inside a running event loop too."""
        coroutine = self.run(
            force=force,
            retry_errors=retry_errors,
            salvage=salvage,
            accept_edits=accept_edits,
            if_complete=if_complete,
            **changes,
        )
        return run_blocking(coroutine, loop_factory)


class _VariantRun(msgspec.Struct):
    """One variant that is being run."""

    variant: Variant
    execution: Execution
    engine: Engine


class _MatrixLaunch:
    """One call of `MatrixRunner.run`: prepares every variant before the first call of any, then runs them all."""

    def __init__(self, matrix: MatrixRunner, folder: Path, mode: OpenMode) -> None:
        self._matrix = matrix
        self._folder = folder
        self._mode = mode
        self._options = matrix.options
        self._token = CancellationToken()
        self._stats = RunningStats()
        self._warned: set[str] = set()
        self._runs: list[_VariantRun] = []
        self._failed: tuple[str, BaseException] | None = None
        """The first variant that could not be run, and why."""
        self._parallelism = matrix.parallelism
        self._endpoints = Endpoints(matrix.options, self._parallelism)
        limit = matrix.options.max_cost
        self._budget = None if limit is None else SharedBudget(limit)
        self._lanes = {
            endpoint: Lane(most, self._endpoints.adaptive(endpoint)) for endpoint, most in self._parallelism.items()
        }

    async def run(self) -> MatrixResult:
        token = self._matrix.token
        unfollow = None if token is None else token.on_cancel(lambda: self._token.cancel(token.reason or "cancelled"))
        store = open_cache(self._options.cache)
        try:
            matrix = self._matrix
            selected = [variant.name for variant in matrix.variants]
            described, modes = enter_matrix(
                self._folder, matrix.suite.id, matrix.axes, selected, self._mode, matrix.check_same
            )
            described = msgspec.structs.replace(described, suite_file=matrix.suite_file)
            write_matrix(self._folder, described)
            await self._prepare(described, modes, store)
            results = await self._work()
        finally:
            if store is not self._options.cache and isinstance(store, ManagedStore):
                store.close()
            if unfollow is not None:
                unfollow()
        return MatrixResult(described, self._folder.absolute(), results)

    async def _prepare(self, described: Matrix, modes: Mapping[str, OpenMode], store: Any) -> None:
        """Prepare all variants, one after another; when one is refused, nothing is asked of any."""
        suite = self._spooled()
        chosen = [variant for variant in described.variants if variant.name in modes]
        if self._budget is not None:
            others = [variant for variant in described.variants if variant.name not in modes]
            self._budget.before = math.fsum(filter(None, map(self._cost_of, others)))
        # Those that have begun first: one of another target is refused before anything is made of a new one.
        begun = [variant for variant in chosen if run_state(self._folder / variant.directory) is not RunState.FRESH]
        try:
            for variant in [*begun, *(one for one in chosen if one not in begun)]:
                await self._prepare_variant(variant, modes[variant.name], suite, store)
        except BaseException:
            for run in self._runs:
                run.execution.close()
            raise
        self._runs.sort(key=lambda run: chosen.index(run.variant))
        for run in self._runs:
            if run.execution.is_complete_already:
                if self._budget is not None:
                    self._budget.before += self._cost_of(run.variant) or 0.0
                continue
            recorder = run.execution.recorder
            self._stats.merge(recorder.stats)
            if self._budget is not None:
                self._budget.join(recorder.spending, self._counter_of(run.engine))
            if isinstance(run.engine, LaneEngine):
                run.engine.progress = recorder.done_before
        self._tell_of_earlier()

    def _counter_of(self, engine: Engine) -> Callable[[], int]:
        """How many calls a run has in flight; none while it waits for an engine that serves one run at a time."""
        return (lambda: engine.in_flight().count) if self._in_lanes else (lambda: 0)

    def _tell_of_earlier(self) -> None:
        """Log what earlier launches did, in one line for all variants."""
        done = [run for run in self._runs if run.execution.is_complete_already]
        if done or any(run.execution.recorder.resumed for run in self._active):
            complete = f"{counted(len(done), 'variant')} complete" if done else ""
            count = sum(run.execution.recorder.done_before for run in self._active)
            planned = sum(run.execution.planned for run in self._active)
            others = f"{count:,} of {planned:,} done in {counted(len(self._active), 'variant')}" if self._active else ""
            log.info("resuming %s: %s", self._folder, ", ".join(filter(None, (complete, others))))

    async def _prepare_variant(self, variant: Variant, mode: OpenMode, suite: EvalSet, store: Any) -> None:
        runner = self._matrix.runner_of(variant, suite)
        runner.token = self._token
        engine = self._engine_for(runner)
        part = MatrixPart(
            name=variant.name,
            axes=variant.axes,
            endpoints=self._endpoints if self._in_lanes else None,
            budget=self._budget,
            store=store,
            stats=self._stats,
            warned=self._warned,
        )
        execution = runner.execution(runner.options, engine, part)
        try:
            await execution.prepare(mode)
        except SuiteError:
            raise
        except ConfigurationError as error:
            raise ConfigurationError(f"{variant.name}: {error}") from error
        self._runs.append(_VariantRun(variant, execution, engine))

    def _engine_for(self, runner: Runner) -> Engine:
        """An engine in the lane of the target's endpoint; engines with other processes serve one run at a time."""
        engine = self._matrix.engine
        if not self._in_lanes:
            assert engine is not None
            return engine
        grace = engine.grace if isinstance(engine, LocalEngine) else ENGINE_GRACE_SECONDS
        return self._lanes[endpoint_of(runner.target)].engine(grace)

    @property
    def _in_lanes(self) -> bool:
        """Whether all variants run at the same time, in this process."""
        return self._matrix.engine is None or type(self._matrix.engine) is LocalEngine

    def _spooled(self) -> EvalSet:
        """The cases: those that can be read only once are written to the folder, for all variants to read."""
        suite = self._matrix.suite
        if not suite.one_shot:
            return suite
        with disk_errors(self._folder):
            return suite.spool(self._folder / CASES, self._options.spooled_cases)

    def _cost_of(self, variant: Variant) -> float | None:
        """What a variant that is not run now has cost."""
        place = self._folder / variant.directory
        return None if run_state(place) is RunState.FRESH else Result.load(place).typed_metrics.cost

    async def _work(self) -> dict[str, Result]:
        """Run all variants under one display, and return their results."""
        display = LiveDisplay(
            description=f"{self._matrix.suite.id} × {len(self._runs)}",
            total=sum(run.execution.planned for run in self._active),
            initial=sum(run.execution.recorder.done_before for run in self._active),
            spec=parse_progress_bar_stats(self._options.progress_bar_stats),
            mode=self._options.progress if self._active else "off",
        )
        ticker = asyncio.create_task(self._show(display), name="steelyard-display")
        try:
            found = await self._run_all()
        finally:
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticker
            display.close(self._done, self._stats, self._outcomes())
        if self._failed is not None:
            name, error = self._failed
            if not isinstance(error, (RunCancelled, KeyboardInterrupt)):
                log.error("%s failed: %s", safe_text(name), safe_text(describe(error)))
            raise error
        return {run.variant.name: result for run, result in zip(self._runs, found, strict=True) if result is not None}

    async def _run_all(self) -> Sequence[Result | None]:
        if not self._in_lanes:
            return [await self._run_one(run) for run in self._runs]
        # Each is waited for, also when this task is cancelled: it writes what became of its cases.
        found = await asyncio.gather(*map(self._run_one, self._runs), return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if not isinstance(one, BaseException)]

    async def _run_one(self, run: _VariantRun) -> Result | None:
        """Run one variant to its end. What ends it otherwise than by a stop rule ends the others too."""
        try:
            return await run.execution.work()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - raised when all others have ended
            # A KeyboardInterrupt would leave the event loop there and then, with nothing written of the others.
            if self._failed is None:
                self._failed = (run.variant.name, error)
            self._token.cancel(f"the variant {run.variant.name} failed: {describe(error)}")
            return None
        finally:
            if isinstance(run.engine, LaneEngine):
                run.engine.leave()

    @property
    def _active(self) -> list[_VariantRun]:
        return [run for run in self._runs if not run.execution.is_complete_already]

    @property
    def _done(self) -> int:
        return sum(run.execution.recorder.done for run in self._active)

    def _outcomes(self) -> dict[str, str]:
        """What was spent so far, as the display shows it. A pass rate over different variants would say nothing."""
        spending = [run.execution.recorder.spending for run in self._active]
        total = math.fsum(one.total for one in spending)
        return {"cost": format_money(total, safe_text(spending[0].currency))} if total > 0 else {}

    async def _show(self, display: LiveDisplay) -> None:
        active = self._active
        engines = list({id(run.engine): run.engine for run in active}.values())
        while active:
            self._stats.active_seconds = max(run.execution.recorder.active_seconds for run in active)
            flying = [engine.in_flight() for engine in engines]
            oldest = max(flying, key=lambda one: one.oldest_seconds)
            in_flight = InFlight(sum(one.count for one in flying), oldest.oldest_id, oldest.oldest_seconds)
            allowed = sum(lane.allowed for lane in self._lanes.values())
            display.refresh(self._done, self._stats, in_flight, allowed, self._outcomes())
            await asyncio.sleep(_REFRESH_SECONDS)
